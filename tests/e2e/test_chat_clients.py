#!/usr/bin/env python3
"""Chat requests recorded from real clients, and the order and members of streams they accepted."""

import json
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
from dialects import Recorded, accepted, missing, recorded, shape  # noqa: E402

PATH = "/v1/chat/completions"
REQUESTS = ("*chat-*.json",)


class ChatClients(Recorded, unittest.TestCase):
    def stream(self, body):
        frames = self.frames(PATH, dict(body, stream=True))
        self.assertEqual(frames[-1], (None, "[DONE]"))
        return [data for _, data in frames[:-1]]

    def test_recorded_requests_are_answered(self):
        n = 0
        for name, _, request in recorded(*REQUESTS):
            n += 1
            with self.subTest(name=name):
                for key in ("max_tokens", "max_completion_tokens"):
                    if key in request:
                        request[key] = 16
                request.setdefault("max_tokens", 16)
                if not request.get("stream"):
                    status, answer = self.rig.post(PATH, request)
                    self.assertEqual(status, 200, answer)
                    continue
                chunks = self.stream(request)
                reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
                self.assertEqual(len([r for r in reasons if r]), 1)
                self.assertIn(reasons[-1], ("stop", "length", "tool_calls"))
                if request.get("stream_options", {}).get("include_usage"):
                    self.assertGreater(chunks[-1]["usage"]["prompt_tokens"], 0)
        self.assertGreater(n, 9)

    def test_effort_of_recorded_requests(self):
        for name, thinking, requested in (("pi-chat-think-off.json", "off", "default"),
                                          ("opencode-chat-turn1.json", "on", "max")):
            for _, _, request in recorded(name):
                status, headers, data = self.rig.request("POST", PATH, dict(
                    request, stream=False, max_tokens=2))
                self.assertEqual(status, 200, data)
                self.assertEqual((headers["x-ds4-thinking"], headers["x-ds4-effort-requested"]),
                                 (thinking, requested))

    def test_streams_have_the_members_and_order_of_accepted_ones(self):
        weather = {"type": "function", "function": {
            "name": "get_weather", "description": "Get the current weather for a city.",
            "parameters": {"type": "object", "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
                "required": ["city"]}}}
        asked = {"accepted-chat-text-stream.json": {
            "messages": [{"role": "user", "content": "What is 47 + 85?"}]},
            "accepted-chat-tool-stream.json": {
                "tools": [weather], "messages": [{
                    "role": "user",
                    "content": "What is the weather in Paris and Oslo? Use celsius."}]}}

        def kind(data):
            choice = data["choices"][0] if data["choices"] else None
            if choice is None:
                return "usage"
            return choice["finish_reason"] or sorted(choice["delta"])[0]
        for file, body in asked.items():
            ours = self.stream(dict(body, temperature=0, max_tokens=300,
                                    stream_options={"include_usage": True}))
            order = iter([kind(data) for data in ours])
            seen = {kind(data): shape(data) for data in reversed(ours)}
            last = None
            for _, data in accepted(file):
                if data == "[DONE]":
                    continue
                data = json.loads(data) if isinstance(data, str) else data
                with self.subTest(file=file, kind=kind(data)):
                    if kind(data) != last:
                        self.assertIn(kind(data), order)
                    self.assertEqual(missing(shape(data), seen[kind(data)]), [])
                last = kind(data)


if __name__ == "__main__":
    e2e.main()
