#!/usr/bin/env python3
"""The disk tier with real files: conversations that outlive processes, whichever dies and however.  Right means:
the same answer as from a pipeline that computed everything."""

import glob
import os
import re
import shutil
import struct
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

CHAT = "/v1/chat/completions"

SHORT = not any(word.startswith("--seconds") for word in sys.argv)  # see tests/unit/test_disk_stories.c for the rest


def talk(name, lines):
    return [{"role": "user", "content": " ".join("%s has %d hens and a fox." % (name, i)
                                                 for i in range(lines)) + " Who has what?"}]


class Disk(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="ds4-disk-")
        self.rig = None

    def tearDown(self):
        if self.rig is not None:
            self.rig.stop()
        shutil.rmtree(self.folder)

    def start(self, stages=2, disk_mb=64, **sections):
        settings = {"kv": {"disk_mb": disk_mb, "disk_dir": self.folder, "disk_write_mbps": 0},
                    "sched": {"probe_ms": 200}}
        settings.update(sections)
        self.rig = e2e.rig(stages=stages, settings=settings)
        self.rig.start()
        self.wait("the scan", lambda: "commits=" in self.router_log())
        return self.rig

    def stop(self):
        statuses, self.rig = self.rig.stop(), None
        self.assertEqual({n: s for n, s in statuses.items() if s != 0}, {})

    def router_log(self):
        with open(os.path.join(self.rig.folder, "router.log"), encoding="utf-8") as log:
            return log.read()

    def wait(self, what, done):
        e2e.wait_until(done, lambda: what + "\n" + self.rig.logs())

    def metric(self, name, labels=""):
        text = self.rig.request("GET", "/metrics")[2].decode()
        found = re.findall(r"^%s{[^}]*%s[^}]*} (\S+)$" % (name, labels), text, re.M)
        return sum(float(value) for value in found)

    def commits(self):
        return self.metric("ds4_kv_disk_commits")

    def ask(self, messages, tokens=12):
        """The answer and how many prompt tokens were not computed."""
        status, answer = self.rig.post(CHAT, {
            "messages": messages, "temperature": 0, "max_tokens": tokens, "min_tokens": tokens,
            "chat_template_kwargs": {"thinking": False}})
        self.assertEqual(status, 200, answer)
        usage = answer["usage"]
        return (answer["choices"][0]["message"]["content"], usage["prompt_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"])

    def saved(self, messages):
        """Asks, waits until it is on disk, returns the answer."""
        before = self.metric("ds4_kv_disk_saves_total", 'result="ok"')
        text, _, cached = self.ask(messages)
        self.assertEqual(cached, 0)
        self.wait("two saves", lambda: self.metric("ds4_kv_disk_saves_total", 'result="ok"') >= before + 2)
        return text

    # ---- lives -----

    def test_a_talk_outlives_a_kill_of_everything_and_stages_cut_elsewhere(self):
        self.start(stages=2)
        talk_ = talk("Anna", 60)
        text = self.saved(talk_)
        self.rig.router.kill()
        for worker in self.rig.workers:
            worker.kill()
        self.rig.stop()
        for stages in (1, 3):  # which find their layers in the parts of two
            self.start(stages=stages)
            again, prompt, cached = self.ask(talk_)
            self.assertEqual(again, text)
            self.assertLess(prompt - cached, 128)
            self.assertEqual(self.metric("ds4_kv_restores_total", 'tier="disk",result="ok"'), 1)
            self.assertEqual(self.metric("ds4_kv_disk_rejects_total"), 0)
            self.stop()

    @unittest.skipIf(SHORT, "a soak's")
    def test_two_talks_go_on_after_all_processes_were_stopped(self):
        self.start()
        short, long = talk("Anna", 60), talk("Berta", 120)
        first, second = self.ask(short)[0], self.ask(long)[0]
        self.stop()  # saves what is not there yet
        self.start()
        text, prompt, cached = self.ask(long)
        self.assertEqual(text, second)
        self.assertLess(prompt - cached, 128)
        self.assertEqual(self.ask(short)[0], first)
        more = long + [{"role": "assistant", "content": second},
                       {"role": "user", "content": "And who has none?"}]
        text, prompt, cached = self.ask(more)
        self.assertEqual(self.metric("ds4_kv_restores_total", 'tier="disk",result="ok"'), 2)
        self.stop()
        shutil.rmtree(self.folder)
        self.start()
        self.assertEqual(self.ask(more)[0], text)

    # ---- damage ----

    def parts(self, kind):
        return sorted(glob.glob(os.path.join(self.folder, "v1/*/%s/*/*.s*" % kind)))

    def sections(self, path):
        """(kind, offset, bytes) of each section: the table of worker/kv_part.h."""
        with open(path, "rb") as part:
            head = part.read(4096)
        n = struct.unpack_from("<I", head, 104)[0]
        for i in range(n):
            _, kind, _, offset, size, _, _ = struct.unpack_from("<HHIQQII", head, 128 + 32 * i)
            yield kind, offset, size

    def flip(self, path, offset):
        with open(path, "r+b") as part:
            part.seek(offset)
            byte = part.read(1)[0]
            part.seek(offset)
            part.write(bytes([byte ^ 0x40]))

    def tails(self):
        """Those of the prompt's end, one per stage; the end of the turn has others."""
        def end(path):
            with open(path, "rb") as part:
                return struct.unpack_from("<I", part.read(100), 96)[0]
        first = min(end(path) for path in self.parts("tail"))
        return [path for path in self.parts("tail") if end(path) == first]

    def flip_section(self, kind):
        for path in self.tails():
            for found, offset, size in self.sections(path):
                if found == kind and size > 0:
                    self.flip(path, offset + size // 2)
                    return
        self.fail("no section of kind %d" % kind)

    def stop_router(self):
        self.rig.router.terminate()
        self.assertEqual(self.rig.router.wait(e2e.PATIENCE), 0)

    def start_router(self):
        """Workers keep their weights; a new router knows what is on disk and nothing else."""
        os.rename(os.path.join(self.rig.folder, "router.log"), os.path.join(self.rig.folder, "old.log"))
        self.rig.start_router()
        self.rig.wait_ready()
        self.wait("the scan", lambda: "commits=" in self.router_log())

    def manifest(self):
        """Of the prompt's end: the smallest."""
        return min(glob.glob(self.folder + "/v1/*/man/*.m"), key=os.path.getsize)

    def damages(self):
        """(what, does it, the reason that is counted)"""
        def truncate():
            path = self.tails()[-1]
            os.truncate(path, os.path.getsize(path) - 4096)

        def header(offset):
            return lambda: self.flip(self.tails()[-1], offset)

        yield "a byte of the window's rows", lambda: self.flip_section(1), "crc"
        if SHORT:
            return
        yield "a part that ends too early", truncate, "missing_part"
        yield "a part that is gone", lambda: os.unlink(self.tails()[-1]), "missing_part"
        for kind in range(2, 8):
            yield "a byte of kind %d" % kind, lambda k=kind: self.flip_section(k), "crc"
        yield "the magic", header(3), "magic"
        yield "the version", header(8), "version"
        yield "the fingerprint", header(20), "crc"  # of the header
        yield "the header's end", header(4090), "crc"
        yield "the manifest", lambda: self.flip(self.manifest(), 60), "crc"
        yield "its tokens", lambda: self.flip(self.manifest(), os.path.getsize(self.manifest()) - 9), "crc"

    def complete(self):
        """A prompt without messages: what is kept of it is its end."""
        status, answer = self.rig.post("/v1/completions", {
            "prompt": talk("Anna", 54)[0]["content"], "temperature": 0, "max_tokens": 4, "min_tokens": 4})
        self.assertEqual(status, 200, answer)
        return (answer["choices"][0]["text"],
                answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    def test_a_damaged_file_costs_a_cold_prompt_once_and_is_counted_by_its_reason(self):
        self.start()
        text = self.complete()[0]
        self.wait("the saves", lambda: self.commits() == 2)
        whole = self.folder + ".whole"
        self.addCleanup(shutil.rmtree, whole)
        shutil.copytree(self.folder, whole)
        for what, damage, reason in self.damages():
            with self.subTest(what):
                self.stop_router()
                for path in glob.glob(self.folder + "/v1/*/*"):
                    shutil.rmtree(path)
                shutil.copytree(whole, self.folder, dirs_exist_ok=True)
                damage()
                self.start_router()
                again, cached = self.complete()
                self.assertEqual((again, cached), (text, 0))
                self.assertEqual(self.metric("ds4_kv_disk_rejects_total"), 1, self.router_log())
                self.assertEqual(self.metric("ds4_kv_disk_rejects_total", 'reason="%s"' % reason), 1)
                self.assertTrue(glob.glob(self.folder + "/v1/*/*/*.bad") +
                                glob.glob(self.folder + "/v1/*/*/*/*.bad"))
                self.assertEqual(self.rig.request("GET", "/health")[0], 200)

    # ---- room ----

    @unittest.skipIf(SHORT, "a soak's")
    def test_a_cap_smaller_than_a_talk_keeps_nothing_and_says_so(self):
        self.start(disk_mb=1)
        for name in ("Anna", "Berta", "Clara", "Dora"):
            self.ask(talk(name, 60), 2)
        self.wait("a full disk", lambda: self.metric("ds4_kv_disk_write_skips_total", 'reason="value"') > 0 or
                  self.metric("ds4_kv_evictions_total", 'tier="disk"') > 0)
        self.assertLessEqual(self.metric("ds4_kv_bytes", 'tier="disk"'), 1 << 20)
        size = sum(os.path.getsize(path) for path in self.parts("ext") + self.parts("tail"))
        self.assertLessEqual(size, 3 << 19)


if __name__ == "__main__":
    e2e.main()
