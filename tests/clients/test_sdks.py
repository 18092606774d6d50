#!/usr/bin/env python3
"""openai-node, the Anthropic SDK and curl: what they make of the router's answers, and how often they ask."""

import json
import os
import shutil
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import clients  # noqa: E402
import e2e  # noqa: E402
from scripted import ScriptedRig, calls  # noqa: E402

SCRIPT = {"rules": [
    {"contains": "not finite", "nan_at": 8, "text": "one two three ", "repeat": True},
    {"contains": "slow prefill", "prefill_ms": 2500, "text": "At last."},
    {"last": "two calls", "thinking": "Both.", "text": "Looking." + calls(
        ("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Oslo"}))},
    {"contains": "PONG", "thinking": "I say it.", "text": "PONG"}]}
SETTINGS = {"http": {"ping_ms": 500}, "model": {"context": 32768}}
CALLS = [["get_weather", {"city": "Paris"}], ["get_weather", {"city": "Oslo"}]]


def environment(port):
    """The guide's."""
    lines = clients.guide("sdk.sh").replace(":8000", ":%d" % port).split()
    return dict(word.split("=", 1) for word in lines if "=" in word)


def run_node(rig, text, name):
    """Runs a module beside the installed packages; its output."""
    path = os.path.join(clients.BUILD, name)
    with open(path, "w", encoding="utf-8") as out:
        out.write(text)
    return subprocess.run(["node", path], env=dict(os.environ, **environment(rig.port)), capture_output=True,
                          text=True, timeout=120, check=False)


def source(name):
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name), encoding="utf-8") as text:
        return text.read()


class Sdks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        why = clients.node_is_missing()
        if why:
            raise unittest.SkipTest(why)
        if not os.path.isdir(os.path.join(clients.BUILD, "node_modules/openai")):
            raise FileNotFoundError("the SDKs are not installed: `make check-clients` does that")
        cls.rig = ScriptedRig(SCRIPT, SETTINGS)
        cls.rig.start()

    @classmethod
    def tearDownClass(cls):
        cls.rig.stop()

    def stories(self, name):
        done = run_node(self.rig, source(name), name)
        self.assertEqual(done.returncode, 0, done.stderr)
        return {story["name"]: story["result"] for story in map(json.loads, done.stdout.splitlines())}

    def check(self, got, want):
        for name, result in want.items():
            with self.subTest(story=name):
                self.assertEqual(got[name], result)
        self.assertEqual(set(got), set(want))

    def test_openai(self):
        got = self.stories("openai.mjs")
        self.assertGreater(got["whole"].pop("total", 0), 0, got["whole"])
        self.assertGreater(got["deltas"].pop("usage", 0), 0, got["deltas"])
        self.assertRegex(got["tooLong"].pop("message", ""), r"maximum context length is 32768 tokens")
        self.check(got, {
            "whole": {"text": "PONG", "finish": "stop"},
            "deltas": {"text": "PONG", "reasoning": "I say it.", "both": True, "finish": "stop"},
            "helper": {"calls": CALLS, "finish": "tool_calls"},
            "responses": {"text": "PONG", "status": "completed", "kinds": ["reasoning", "message"]},
            "responsesHelper": {"calls": CALLS, "gaps": [], "status": "completed"},
            "slowPrefill": {"text": "At last.", "repeated": True},
            "completions": {"text": "PONG", "finish": "stop"},
            "models": {"ids": ["deepseek-v4-flash"], "one": "deepseek-v4-flash"},
            "badRequest": {"name": "BadRequestError", "status": 400, "code": "invalid_value",
                           "param": "temperature"},
            "tooLong": {"name": "BadRequestError", "code": "context_length_exceeded"},
            "streamError": {"name": "APIError", "code": "internal_error", "some": True},
        })

    def test_anthropic(self):
        got = self.stories("anthropic.mjs")
        self.assertGreater(got["helper"].pop("output", 0), 0, got["helper"])
        self.assertGreater(got["count"].pop("counted", 0), 0, got["count"])
        self.assertRegex(got["tooLong"].pop("message", ""), r"^prompt is too long: \d+ tokens > 32768 maximum$")
        self.check(got, {
            "whole": {"kinds": ["thinking", "text"], "text": "PONG", "stop": "end_turn"},
            "helper": {"text": "Looking.", "thinking": "Both.", "calls": CALLS, "signed": True,
                       "stop": "tool_use"},
            "slowPrefill": {"text": "At last."},
            "count": {"same": True},
            "models": {"ids": ["deepseek-v4-flash"], "one": "deepseek-v4-flash"},
            "badRequest": {"name": "BadRequestError", "status": 400, "type": "invalid_request_error", "id": True},
            "tooLong": {"name": "BadRequestError"},
            "streamError": {"name": "APIError", "type": "api_error", "some": True},
        })

    def test_the_guides_programs_run_as_they_stand(self):
        for block, words in (("openai.mjs", "ok"), ("anthropic.mjs", "ok")):
            done = run_node(self.rig, clients.guide(block), "guide-" + block)
            self.assertEqual((done.returncode, done.stdout.strip()), (0, words), done.stderr)

    def test_a_refused_request_is_sent_three_times_and_not_before_its_time(self):
        rig = ScriptedRig({"never_ready": True})
        try:
            rig.start_router()
            rig.start_worker(0)
            while True:
                try:
                    rig.request("GET", "/livez")
                    break
                except ConnectionError:
                    time.sleep(0.05)
            for name in ("openai.mjs", "anthropic.mjs"):
                before, begin = clients.requests_seen(rig), time.monotonic()
                done = run_node(rig, clients.guide(name), "guide-" + name)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn("503", done.stderr)
                self.assertEqual(clients.requests_seen(rig) - before, 3)
                self.assertGreaterEqual(time.monotonic() - begin, 2)
        finally:
            rig.stop()


class Curl(unittest.TestCase):
    def test_the_guides_command_streams_an_answer(self):
        if shutil.which("curl") is None:
            self.skipTest("curl is not installed")
        rig = ScriptedRig({"rules": [{"last": "47 + 38", "thinking": "Easy.", "text": "85"}]})
        try:
            rig.start()
            done = subprocess.run(["bash", "-c", clients.guide("curl.sh").replace(":8000", ":%d" % rig.port)],
                                  capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            data = [line[6:] for line in done.stdout.splitlines() if line.startswith("data: ")]
            self.assertEqual(data[-1], "[DONE]")
            self.assertEqual("".join(c["delta"].get("content") or "" for line in data[:-1]
                                     for c in json.loads(line)["choices"]), "85")
        finally:
            rig.stop()


if __name__ == "__main__":
    clients.main()
