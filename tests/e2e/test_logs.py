#!/usr/bin/env python3
"""The journal: a line per request with every phase, slow ones as warnings, and nothing secret."""

import http.client
import json
import os
import re
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
from scripted import ScriptedRig  # noqa: E402

CHAT = "/v1/chat/completions"
PROMPT, KEY, WRONG_KEY, TOOL = ("xylophone-prompt-7731", "sk-marker-right-4410",
                                "sk-marker-wrong-9902", "marker_tool_5518")


class Logs(unittest.TestCase):
    def setUp(self):
        self.keys = tempfile.NamedTemporaryFile("w", suffix=".keys")
        self.keys.write(KEY + " alice\n")
        self.keys.flush()
        self.rig = None

    def tearDown(self):
        if self.rig:
            self.rig.stop()
        self.keys.close()

    def start(self, **settings):
        self.rig = e2e.rig(stages=1, settings=dict({"http": {"keys_file": self.keys.name}}, **settings))
        self.rig.start()

    def ask(self, body, path=CHAT, key=KEY):
        data = json.dumps(body).encode()
        status, _, answer = self.rig.request("POST", path, data, {"authorization": "Bearer " + key})
        return status, answer

    def lines(self, event):
        """[{name: value}] of the router's lines of one event."""
        with open(os.path.join(self.rig.folder, "router.log"), encoding="utf-8") as log:
            return [dict(re.findall(r'(\w+)=("[^"]*"|\S+)', line)) for line in log
                    if " %s " % event in line]

    def test_a_request_leaves_one_line_with_every_phase(self):
        self.start()
        status, answer = self.ask({"messages": [{"role": "user", "content": "Hello"}],
                                   "max_tokens": 20, "min_tokens": 20, "reasoning_effort": "none"})
        self.assertEqual(status, 200)
        usage = json.loads(answer)["usage"]
        (line,) = e2e.wait_until(lambda: self.lines("request.done"), self.rig.logs)
        self.assertEqual((line["api"], line["stream"], line["end"], line["reason"]),
                         ("chat", "no", "length", "none"))
        self.assertEqual((int(line["prompt"]), int(line["completion"])),
                         (usage["prompt_tokens"], usage["completion_tokens"]))
        phases = [int(line[p + "_ms"]) for p in ("parse", "queue", "prefill", "decode")]
        self.assertGreaterEqual(min(phases), 0)
        self.assertAlmostEqual(sum(phases[:3]), int(line["ttft_ms"]), delta=3)
        self.assertGreaterEqual(int(line["total_ms"]), sum(phases) - 4)  # each is rounded
        self.assertGreater(float(line["tok_s"]), 0)
        self.assertEqual((line["effort_requested"], line["effort_applied"]), ("none", "off"))
        self.assertEqual(self.lines("request.slow"), [])

    def test_a_slow_request_is_a_warning(self):
        self.rig = ScriptedRig({"rules": [{"contains": "slowly", "prefill_ms": 5500, "text": "At last."},
                                          {"text": "At once."}]},
                               {"log": {"slow_total_s": 5, "level": "warn"}})
        self.rig.start()
        for word in ("Hello", "slowly"):
            self.assertEqual(self.lines("request.slow"), [])
            self.assertEqual(self.ask({"messages": [{"role": "user", "content": word}], "max_tokens": 20})[0], 200)
        (line,) = e2e.wait_until(lambda: self.lines("request.slow"), self.rig.logs)
        self.assertGreater(int(line["total_ms"]), 5000)
        self.assertGreater(sum(int(line[p + "_ms"]) for p in ("queue", "prefill", "decode")), 5000)

    def test_nothing_secret_is_logged(self):
        """Not at the level of every step either."""
        self.start(log={"level": "debug"})
        messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": PROMPT}]
        tools = [{"type": "function", "function": {"name": TOOL, "description": PROMPT, "parameters": {
            "type": "object", "properties": {PROMPT: {"type": "string"}}}}}]
        self.assertEqual(self.ask({"messages": messages, "max_tokens": 5, "tools": tools,
                                   "user": PROMPT, "stop": [PROMPT], PROMPT: 1})[0], 200)
        self.assertEqual(self.ask({"input": PROMPT, "max_output_tokens": 3}, "/v1/responses")[0], 200)
        self.assertEqual(self.ask({"prompt": PROMPT, "max_tokens": 3}, "/v1/completions")[0], 200)
        self.assertEqual(self.ask({"messages": messages[1:], "max_tokens": 3}, "/v1/messages")[0], 200)
        self.assertEqual(self.ask({"prompt": PROMPT}, "/tokenize")[0], 200)
        # What is refused is not quoted either.
        self.assertEqual(self.ask({"messages": messages, "stop": {PROMPT: 1}})[0], 400)
        self.assertEqual(self.ask({"messages": messages, "temperature": PROMPT})[0], 400)
        self.assertEqual(self.ask({"messages": [{"role": PROMPT, "content": ""}]})[0], 400)
        self.assertEqual(self.rig.request("POST", CHAT, ("{" + PROMPT).encode(),
                                          {"authorization": "Bearer " + KEY})[0], 400)
        self.assertEqual(self.ask({"messages": messages}, key=WRONG_KEY)[0], 401)
        self.assertEqual(self.rig.request("GET", "/v1/models", headers={"x-api-key": WRONG_KEY})[0],
                         401)
        self.rig.request("GET", "/v1/models?key=" + WRONG_KEY, headers={"x-api-key": KEY})
        # A stream whose client leaves, and one whose stage dies.
        body = {"messages": messages, "stream": True, "max_tokens": 3000, "min_tokens": 3000}
        connection = http.client.HTTPConnection("127.0.0.1", self.rig.port, timeout=e2e.PATIENCE)
        connection.request("POST", CHAT, json.dumps(body), {"authorization": "Bearer " + KEY})
        stream = connection.getresponse()
        self.assertTrue(stream.readline())
        self.rig.kill_worker(0)
        stream.read()
        connection.close()
        self.rig.start_worker(0)
        self.rig.wait_ready()
        e2e.wait_until(lambda: len(self.lines("request.done")) == 5, self.rig.logs)
        everything = ""
        for name in os.listdir(self.rig.folder):
            if name.endswith(".log"):
                with open(os.path.join(self.rig.folder, name), encoding="utf-8") as log:
                    everything += log.read()
        for secret in (PROMPT, KEY, WRONG_KEY, TOOL, "xylophone", "marker"):
            self.assertNotIn(secret, everything)
        text = self.rig.request("GET", "/metrics")[2].decode()
        for secret in (PROMPT, KEY, WRONG_KEY, TOOL, "127.0.0.1"):
            self.assertNotIn(secret, text)


if __name__ == "__main__":
    e2e.main()
