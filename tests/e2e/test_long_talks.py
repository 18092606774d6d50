#!/usr/bin/env python3
"""Fifty turns with tools through each dialect: every prompt begins with the very tokens of the turn before.

The model is a scripted stage, so a turn costs nothing; the clients are forgetful in the ways real ones are:
reasoning is not sent back, arguments are written anew.  What the router computes again would show as
prompt tokens that are not cached.
"""

import json
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
from scripted import ScriptedRig, calls  # noqa: E402

TURNS = 50
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
              "required": ["path"]}
FUNCTION = {"name": "read", "description": "Read a file.", "parameters": PARAMETERS}
RESULT = "line %d of the file: \u201cgr\u00fc\u00df\u201d \u2603 </think> <｜User｜>"
# Arguments in an order, with blanks and an escape that no client would write the same way again.
SCRIPT = {"rules": [{"thinking": "Turn {turn}: I read on.", "text": "Reading {turn}." + calls(
    ("read", {"line": 7, "path": "dir/a \\\"b\\\" {turn}.txt"}))}]}


class Chat:
    path = "/v1/chat/completions"

    def __init__(self):
        self.messages = [{"role": "user", "content": "Read it all."}]

    def body(self):
        return {"messages": self.messages, "tools": [{"type": "function", "function": FUNCTION}]}

    def take(self, answer, turn):
        message = answer["choices"][0]["message"]
        call = message["tool_calls"][0]
        arguments = json.loads(call["function"]["arguments"])
        self.messages += [
            {"role": "assistant", "content": message["content"], "tool_calls": [
                {"id": call["id"], "type": "function", "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(dict(sorted(arguments.items(), reverse=True)), separators=(",", ":"))}}]},
            {"role": "tool", "tool_call_id": call["id"], "content": RESULT % turn}]
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


class Responses:
    path = "/v1/responses"

    def __init__(self):
        self.items = [{"type": "message", "role": "user", "content": "Read it all."}]

    def body(self):
        return {"input": self.items, "tools": [dict(FUNCTION, type="function")], "store": False}

    def take(self, answer, turn):
        for item in answer["output"]:
            if item["type"] == "function_call":
                self.items += [item, {"type": "function_call_output", "call_id": item["call_id"],
                                      "output": RESULT % turn}]
            elif item["type"] == "message":
                self.items.append(item)
        usage = answer["usage"]
        return usage["input_tokens"], usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]


class Stored(Responses):
    """Only the results are sent; the response before stands for the rest."""

    def __init__(self):
        super().__init__()
        self.previous = None

    def body(self):
        body = dict(super().body(), store=True)
        return dict(body, previous_response_id=self.previous) if self.previous else body

    def take(self, answer, turn):
        self.previous = answer["id"]
        self.items = []
        call = [item for item in answer["output"] if item["type"] == "function_call"][0]
        self.items = [{"type": "function_call_output", "call_id": call["call_id"], "output": RESULT % turn}]
        usage = answer["usage"]
        return usage["input_tokens"], usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]


class Messages:
    path = "/v1/messages"

    def __init__(self):
        self.messages = [{"role": "user", "content": "Read it all."}]

    def body(self):
        return {"messages": self.messages, "max_tokens": 1000, "tools": [
            {"name": "read", "description": "Read a file.", "input_schema": PARAMETERS}]}

    def take(self, answer, turn):
        kept = [block for block in answer["content"] if block["type"] != "thinking"]
        call = kept[-1]
        self.messages += [{"role": "assistant", "content": kept},
                          {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"],
                                                        "content": RESULT % turn}]}]
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, usage["output_tokens"], cached


class Completions:
    """No calls here, but the same promise: the client sends back the text it got."""

    path = "/v1/completions"

    def __init__(self):
        self.prompt = "<｜User｜>Read it all.<｜Assistant｜><think>"

    def body(self):
        return {"prompt": self.prompt, "max_tokens": 400}

    def take(self, answer, turn):
        self.prompt += answer["choices"][0]["text"] + "<｜end▁of▁sentence｜><｜User｜><tool_result>%d</tool_result>" \
            "<｜Assistant｜><think>" % turn
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


class LongTalks(unittest.TestCase):
    def talk(self, client):
        rig = ScriptedRig(SCRIPT)
        try:
            rig.start()
            end = 0
            for turn in range(1, TURNS + 1):
                status, answer = rig.post(client.path, client.body())
                self.assertEqual(status, 200, answer)
                prompt, completion, cached = client.take(answer, turn)
                self.assertGreater(prompt, end)
                # All of the turn before, its end token aside: that was sampled but never computed.
                self.assertGreaterEqual(cached, end - 1, "turn %d of %s" % (turn, client.path))
                self.assertLess(prompt - cached, 300 if turn == 1 else 120)
                end = prompt + completion
            self.assertGreater(end, 50 * TURNS)
        finally:
            statuses = rig.stop()
        self.assertEqual(set(statuses.values()), {0})

    def test_chat(self):
        self.talk(Chat())

    def test_responses(self):
        self.talk(Responses())

    def test_responses_kept_by_the_server(self):
        self.talk(Stored())

    def test_messages(self):
        self.talk(Messages())

    def test_completions(self):
        self.talk(Completions())


if __name__ == "__main__":
    e2e.main()
