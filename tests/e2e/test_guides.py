#!/usr/bin/env python3
"""The guides: every metric, setting, event, error code and file they name exists, every block of settings
loads, and every block that tests cut out can be cut out."""

import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

NAMES = ["README.md"] + ["deploy/%s.md" % name for name in
                         ("INSTALL", "CLIENTS", "TUNING", "TROUBLESHOOTING", "README")]


def read(path):
    with open(os.path.join(e2e.ROOT, path), encoding="utf-8") as file:
        return file.read()


def sources():
    """All text of the programs."""
    return "\n".join(read(os.path.relpath(path, e2e.ROOT)) for folder in ("router", "worker", "common", "proto")
                     for pattern in ("/**/*.c", "/**/*.h")
                     for path in glob.glob(os.path.join(e2e.ROOT, folder) + pattern, recursive=True))


def code(text):
    """What stands in back quotes, outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def blocks(text):
    """[(words of the opening line, body)] of the fenced blocks."""
    return [(words.split(), body) for words, body in
            re.findall(r"^```([^\n]*)\n(.*?)^```$", text, flags=re.M | re.S)]


class Guides(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.guides = {name: read(name) for name in NAMES}
        cls.source = sources()
        done = subprocess.run([os.path.join(e2e.bin_dir(), "ds4-router"), "--config", "/dev/null", "--print-config"],
                              stdout=subprocess.PIPE, text=True, check=True, timeout=60)
        section, cls.settings = "", set()
        for line in done.stdout.splitlines():
            head, option = re.match(r"(\w+) \{", line), re.match(r"    (\w+) = ", line)
            section = head.group(1) if head else section
            if option:
                cls.settings.add(section + "." + option.group(1))

    def test_every_metric_exists_with_its_labels(self):
        table = read("common/metrics_table.h")
        known = set(re.findall(r'"((?:ds4|process|vllm)[_:][a-z_]+)"', table))
        seen = 0
        for name, text in self.guides.items():
            if name == "README.md":  # it names C structs
                continue
            for metric, labels in re.findall(r"(?<![.\w])(ds4_[a-z_]+)(?:\{([^}]*)\})?", text):
                seen += 1
                base = re.sub(r"_(bucket|count|sum)$", "", metric)
                self.assertTrue({metric, base} & known, "%s names %s" % (name, metric))
                for label, value in re.findall(r'(\w+)="(\w+)"', labels):
                    found = re.search(r"\b%s=[\w|]*\b%s\b" % (label, value), table)
                    self.assertTrue(found, "%s names %s{%s=%s}" % (name, metric, label, value))
        self.assertGreater(seen, 20)

    def test_every_dotted_name_is_a_setting_an_event_or_a_file(self):
        files = {os.path.basename(path) for path in glob.glob(e2e.ROOT + "/**/*.*", recursive=True)}
        files |= {"ds4.conf", "opencode.json", "simd.c"}
        for name, text in self.guides.items():
            for word in code(text):
                if not re.fullmatch(r"[a-z]+\.[a-z_0-9]+", word):
                    continue
                known = (word in self.settings or '"%s"' % word in self.source or word in files
                         or word in ("section.option", "client.what"))
                self.assertTrue(known, "%s names %s" % (name, word))
                if word.split(".")[0] + "." in {s.split(".")[0] + "." for s in self.settings} and word not in files:
                    self.assertTrue(word in self.settings or '"%s"' % word in self.source, word)

    def test_every_error_code_exists(self):
        text = self.guides["deploy/TROUBLESHOOTING.md"]
        found = set()
        for status, word in re.findall(r"\b(4\d\d|500) `([a-z_]+)`", text):
            found.add(word)
            self.assertIn('{"%s", %s,' % (word, status), self.source)
        self.assertGreater(len(found), 5)
        for word in ("pipeline_restarted", "stage_down"):
            self.assertIn('{"%s", 503,' % word, self.source)

    def test_every_exit_status_has_the_meaning_it_has(self):
        text = self.guides["deploy/TROUBLESHOOTING.md"]
        known = set(re.findall(r"X\(DS4_EXIT_\w+, (\d+),", self.source))
        for number in re.findall(r"exit (?:status )?(\d+)", text):
            self.assertIn(number, known)

    def test_links_and_checks_of_the_doctor_exist(self):
        listed = subprocess.run([sys.executable, os.path.join(e2e.ROOT, "deploy/ds4-doctor"), "--list"],
                                stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
        checks = {line.split()[0] for line in listed.splitlines()}
        for name, text in self.guides.items():
            for target in re.findall(r"\]\(([^)#:]+)\)", text):
                path = os.path.join(e2e.ROOT, os.path.dirname(name), target)
                self.assertTrue(os.path.exists(path), "%s links %s" % (name, target))
            for check in re.findall(r"--only ([a-z0-9]+)", text):
                self.assertIn(check, checks, name)

    def test_blocks_of_the_clients_have_ids_and_parse(self):
        ids = []
        for words, body in blocks(self.guides["deploy/CLIENTS.md"]):
            self.assertRegex(words[1], r"^id=[a-z]+(-[a-z]+)?\.(json|toml|sh|mjs)$")
            ids.append(words[1])
            if words[0] == "json":
                json.loads(body)
            elif words[0] == "toml":
                tomllib.loads(body)
            elif words[0] == "sh":
                self.assertEqual(subprocess.run(["bash", "-n"], input=body, text=True, timeout=60).returncode, 0)
        self.assertEqual(len(ids), len(set(ids)))
        for client in ("curl", "opencode", "pi", "codex", "claude", "openai", "anthropic"):
            self.assertTrue(any(i.startswith("id=" + client) for i in ids), client)

    def test_all_clients_compact_at_the_same_size(self):
        by_id = {words[1][3:]: body for words, body in blocks(self.guides["deploy/CLIENTS.md"])}
        window, at = 115000, 97750
        self.assertEqual(at, window * 85 // 100)
        opencode = json.loads(by_id["opencode.json"])
        limit = opencode["provider"]["ds4"]["models"]["deepseek-v4-flash"]["limit"]
        self.assertEqual(limit["input"] - opencode["compaction"]["reserved"], at)
        model = json.loads(by_id["pi.json"])["providers"]["ds4"]["models"][0]
        self.assertEqual(model["contextWindow"] - json.loads(by_id["pi-settings.json"])["compaction"]["reserveTokens"], at)
        codex = tomllib.loads(by_id["codex.toml"])
        self.assertEqual((codex["model_context_window"], codex["model_auto_compact_token_limit"]), (window, at))
        self.assertIn("CLAUDE_CODE_AUTO_COMPACT_WINDOW=%d CLAUDE_AUTOCOMPACT_PCT_OVERRIDE=85" % window,
                      by_id["claude.sh"])

    def test_settings_in_the_guide_are_accepted(self):
        texts = [body for words, block in blocks(self.guides["deploy/INSTALL.md"])
                 for body in re.findall(r"<<'END'\n(.*?)^END$", block, flags=re.M | re.S)]
        self.assertEqual(len(texts), 2)
        more = re.search(r"printf '(http \{.*?)\\n'", self.guides["deploy/INSTALL.md"]).group(1)
        # What stands in no command: a block of settings alone, and a section in the text.
        parts = [block for words, block in blocks(self.guides["deploy/INSTALL.md"]) if not words and "{" in block]
        parts += re.findall(r"`(\w+ \{[^`\n]*\})`", self.guides["deploy/INSTALL.md"])
        self.assertEqual(len(parts), 2)
        texts += [texts[0] + part for part in parts]
        for text in texts:
            with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
                file.write(text + more + "\n")
                file.flush()
                done = subprocess.run([os.path.join(e2e.bin_dir(), "ds4-router"), "--config", file.name, "--check-config"],
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
                self.assertEqual(done.returncode, 0, done.stdout)


if __name__ == "__main__":
    e2e.main()
