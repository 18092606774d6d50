#!/usr/bin/env python3
"""Conversations recorded from real clients, turn after turn, in every dialect, on a scripted stage.

A recorded second turn holds what the client made of a first answer: arguments written anew, reasoning sent back
or not.  The stage says that first answer again, and the second prompt must begin with its very tokens.
"""

import copy
import json
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
from dialects import recorded  # noqa: E402
from scripted import ScriptedRig, calls  # noqa: E402

SECOND = "*-turn2-tool-result.json"


def is_call(entry):
    parts = entry.get("content") if isinstance(entry.get("content"), list) else []
    return (entry.get("type") == "function_call" or bool(entry.get("tool_calls")) or
            any(part.get("type") == "tool_use" for part in parts))


def history(request):
    return request["messages"] if "messages" in request else request["input"]


def begins_turn(entry):
    """What belongs to the assistant's turn: its message, or reasoning and calls as items."""
    return entry.get("role") == "assistant" or entry.get("type") in ("reasoning", "function_call")


def first_turn(request):
    """The request without the last assistant turn and what follows it."""
    entries = history(request)
    at = max(i for i, entry in enumerate(entries) if is_call(entry))
    while at > 0 and begins_turn(entries[at - 1]):
        at -= 1
    first = copy.deepcopy(request)
    del history(first)[at:]
    return first


def recorded_call(request):
    """(name, arguments) of the last call."""
    entry = [entry for entry in history(request) if is_call(entry)][-1]
    if entry.get("type") == "function_call":
        return entry["name"], json.loads(entry["arguments"])
    if entry.get("tool_calls"):
        function = entry["tool_calls"][0]["function"]
        return function["name"], json.loads(function["arguments"])
    block = [part for part in entry["content"] if part["type"] == "tool_use"][0]
    return block["name"], block["input"]


def replaced(value, ids):
    """The same value with other texts in the place of some."""
    if isinstance(value, dict):
        return {key: replaced(member, ids) for key, member in value.items()}
    if isinstance(value, list):
        return [replaced(member, ids) for member in value]
    return ids.get(value, value) if isinstance(value, str) else value


def call_id(answer):
    if "choices" in answer:
        return answer["choices"][0]["message"]["tool_calls"][0]["id"]
    if "output" in answer:
        return [item for item in answer["output"] if item["type"] == "function_call"][0]["call_id"]
    return [block for block in answer["content"] if block["type"] == "tool_use"][0]["id"]


def usage(answer):
    """(prompt, completion, cached)"""
    u = answer["usage"]
    if "prompt_tokens" in u:
        return u["prompt_tokens"], u["completion_tokens"], u["prompt_tokens_details"]["cached_tokens"]
    if "input_tokens_details" in u:
        return u["input_tokens"], u["output_tokens"], u["input_tokens_details"]["cached_tokens"]
    cached = u["cache_read_input_tokens"]
    return u["input_tokens"] + cached, u["output_tokens"], cached


class RecordedTurns(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        names = {}
        for name, _, request in recorded(SECOND):
            names.setdefault(json.dumps(recorded_call(request)), recorded_call(request))
        cls.rig = ScriptedRig({"rules": [
            {"contains": '"name": "%s"' % call[0], "lacks": "hi-from-tool", "thinking": "mock thought",
             "text": calls(call)} for call in names.values()] + [
                 {"contains": "hi-from-tool", "thinking": "It ran.", "text": "PONG"}]})
        cls.rig.start()

    @classmethod
    def tearDownClass(cls):
        statuses = cls.rig.stop()
        assert set(statuses.values()) == {0}, "exit statuses %r" % statuses

    def ask(self, path, request):
        status, answer = self.rig.post(path, dict(request, stream=False))
        self.assertEqual(status, 200, answer)
        return answer

    def test_every_recorded_request_is_answered_whole_and_streamed(self):
        n = 0
        for name, path, request in recorded("*-turn*.json"):
            n += 1
            with self.subTest(name=name):
                request = replaced(request, {})
                if SECOND[1:] in name:
                    first = self.ask(path, first_turn(request))
                    request = replaced(request, {"call_1": call_id(first), "toolu_1": call_id(first)})
                answer = self.ask(path, request)
                self.assertGreater(usage(answer)[1], 1)
                events = [data for event, data in self.rig.stream(path, dict(request, stream=True))
                          if event != ":"]
                self.assertNotIn('"error":{', "".join(events))
                last = events[-1] if events[-1] == "[DONE]" else json.loads(events[-1])["type"]
                self.assertEqual(last, {"chat": "[DONE]", "responses": "response.completed",
                                        "messages": "message_stop"}[path.split("?")[0].split("/")[2]])
        self.assertGreaterEqual(n, 14)

    def test_the_second_prompt_begins_with_the_tokens_of_the_first_turn(self):
        n = 0
        for name, path, request in recorded(SECOND):
            n += 1
            with self.subTest(name=name):
                first = self.ask(path, first_turn(request))
                prompt, completion, _ = usage(first)
                ids = {"call_1": call_id(first), "toolu_1": call_id(first)}
                second = self.ask(path, replaced(request, ids))
                # The end token was sampled but never computed.
                self.assertGreaterEqual(usage(second)[2], prompt + completion - 1)
                self.assertGreater(usage(second)[0], prompt + completion)
        self.assertGreaterEqual(n, 9)

    def test_counted_tokens_are_the_tokens_used(self):
        for name, path, request in recorded("*-turn*.json", "anthropic-sdk-*.json", "openai-sdk-*.json"):
            with self.subTest(name=name):
                if SECOND[1:] in name or "completions.json" in name and "chat" not in name:
                    continue
                path = path.split("?")[0].replace("/count_tokens", "")
                prompt = usage(self.ask(path, request))[0]
                if path == "/v1/messages":
                    _, counted = self.rig.post(path + "/count_tokens", request)
                    self.assertEqual(counted["input_tokens"], prompt)
                elif path == "/v1/responses":
                    _, counted = self.rig.post(path + "/input_tokens", request)
                    self.assertEqual(counted["input_tokens"], prompt)
                else:
                    _, template = self.rig.post("/apply-template", dict(request, tokenize=True))
                    self.assertEqual(len(template["tokens"]), prompt)
                    _, tokens = self.rig.post("/tokenize", {"content": template["prompt"]})
                    self.assertEqual(len(tokens["tokens"]), prompt)


if __name__ == "__main__":
    e2e.main()
