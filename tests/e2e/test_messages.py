#!/usr/bin/env python3
"""The Anthropic dialect: recorded requests of its clients, order of frames, blocks, counts, errors."""

import json
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
from dialects import Recorded, accepted, missing, recorded, shape  # noqa: E402

CITY = {"type": "object", "properties": {
    "city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the current weather for a city.",
           "input_schema": CITY}
QUESTION = {"role": "user", "content": "What is the weather in Paris and Oslo? Use celsius."}
REQUESTS = ("*messages*.json", "*anthropic-turn*.json")


class Messages(Recorded, unittest.TestCase):
    def ask(self, **body):
        body.setdefault("max_tokens", 300)
        body.setdefault("temperature", 0)
        return self.rig.post("/v1/messages", body)

    def stream(self, path="/v1/messages", **body):
        """Frames of a stream after checking its order; every name is the frame's type."""
        frames = self.frames(path, dict(body, stream=True))
        for event, data in frames:
            self.assertEqual(event, data["type"])
        types = [data["type"] for _, data in frames]
        self.assertEqual(types[:2], ["message_start", "ping"])
        self.assertEqual(types[-2:], ["message_delta", "message_stop"])
        open_block, n_block = None, 0
        for _, data in frames[2:-2]:
            if data["type"] == "ping":
                continue
            self.assertEqual(data["index"], n_block)
            if data["type"] == "content_block_start":
                self.assertIsNone(open_block)
                open_block = data["content_block"]["type"]
            elif data["type"] == "content_block_delta":
                self.assertIn((open_block, data["delta"]["type"]), (
                    ("thinking", "thinking_delta"), ("thinking", "signature_delta"),
                    ("text", "text_delta"), ("tool_use", "input_json_delta")))
            else:
                self.assertEqual(data["type"], "content_block_stop")
                self.assertIsNotNone(open_block)
                open_block, n_block = None, n_block + 1
        self.assertIsNone(open_block)
        return [data for _, data in frames]

    def blocks(self, frames):
        """The content a client would collect."""
        content = []
        for data in frames:
            if data["type"] == "content_block_start":
                content.append(dict(data["content_block"], json=""))
            elif data["type"] == "content_block_delta":
                delta = data["delta"]
                for kind, key in (("thinking", "thinking"), ("text", "text"),
                                  ("signature", "signature"), ("partial_json", "json")):
                    if kind in delta:
                        content[-1][key] += delta[kind]
        for block in content:
            text = block.pop("json")
            if block["type"] == "tool_use":
                self.assertEqual(block["input"], {})
                block["input"] = json.loads(text)
        return content

    def test_recorded_requests_are_answered(self):
        n = 0
        for name, path, request in recorded(*REQUESTS):
            n += 1
            with self.subTest(name=name):
                request = dict(request, max_tokens=24)
                if request.get("stream"):
                    frames = self.stream(path, **request)
                    self.assertGreater(frames[-2]["usage"]["output_tokens"], 0)
                    start = frames[0]["message"]
                    self.assertEqual(start["model"], request["model"])
                else:
                    status, answer = self.rig.post(path, request)
                    self.assertEqual(status, 200, answer)
                    self.assertEqual(answer["type"], "message")
        self.assertGreater(n, 8)

    def test_streams_have_the_members_of_accepted_ones(self):
        ours = self.stream(messages=[QUESTION], tools=[WEATHER], max_tokens=300, temperature=0)
        ours += self.stream(messages=[{"role": "user", "content": "What is 47 + 85?"}],
                            max_tokens=200, temperature=0)

        def kind(data):
            return (data["type"], data.get("content_block", {}).get("type"),
                    data.get("delta", {}).get("type"))
        seen = {}
        for data in ours:
            seen.setdefault(kind(data), shape(data))
        for file in ("accepted-messages-text-stream.json", "accepted-messages-tool-stream.json"):
            for _, data in accepted(file):
                with self.subTest(file=file, kind=kind(data)):
                    self.assertIn(kind(data), seen)
                    self.assertEqual(missing(shape(data), seen[kind(data)]), [])
                    extra = set(seen[kind(data)]) - set(data)
                    self.assertLessEqual(extra, {"ds4"})

    def test_stream_and_whole_answer_say_the_same(self):
        body = {"messages": [QUESTION], "tools": [WEATHER], "max_tokens": 300, "temperature": 0}
        status, whole = self.ask(**body)
        self.assertEqual(status, 200, whole)
        frames = self.stream(**body)
        content = self.blocks(frames)
        calls = [b for b in content if b["type"] == "tool_use"]
        self.assertEqual([c["input"] for c in calls],
                         [{"city": "Paris", "unit": "celsius"}, {"city": "Oslo", "unit": "celsius"}])
        for block in content + whole["content"]:
            if block["type"] == "tool_use":
                self.assertTrue(block["id"].startswith("toolu_"))
                block["id"] = ""
            if block["type"] == "thinking":
                self.assertTrue(block["signature"])
                block["signature"] = ""
        self.assertEqual(content, whole["content"])
        self.assertEqual(whole["stop_reason"], "tool_use")
        self.assertEqual(frames[-2]["delta"], {"stop_reason": "tool_use", "stop_sequence": None})
        self.assertEqual(frames[-2]["usage"]["output_tokens"], whole["usage"]["output_tokens"])

    def test_a_tool_turn_goes_on_with_its_results(self):
        status, first = self.ask(messages=[QUESTION], tools=[WEATHER])
        self.assertEqual(status, 200, first)
        calls = [b for b in first["content"] if b["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": c["id"],
                    "content": [{"type": "text", "text": json.dumps({"temperature": 11 + i})}]}
                   for i, c in enumerate(calls)]
        history = [QUESTION, {"role": "assistant", "content": first["content"]},
                   {"role": "user", "content": results}]
        status, second = self.ask(messages=history, tools=[WEATHER])
        self.assertEqual(status, 200, second)
        self.assertEqual(second["stop_reason"], "end_turn")
        self.assertIn("text", [b["type"] for b in second["content"]])
        self.assertGreater(second["usage"]["cache_read_input_tokens"], 0)

    def test_thinking_left_out_is_restored_from_its_signature(self):
        status, first = self.ask(messages=[QUESTION], tools=[WEATHER])
        self.assertEqual((status, first["content"][0]["type"]), (200, "thinking"))
        calls = [b for b in first["content"] if b["type"] == "tool_use"]

        def count(thinking, calls=[dict(c, id="toolu_foreign%d" % i) for i, c in enumerate(calls)]):
            results = [{"type": "tool_result", "tool_use_id": c["id"], "content": "11"}
                       for c in calls]
            content = ([thinking] if thinking else []) + calls
            return self.count(messages=[QUESTION, {"role": "assistant", "content": content},
                                        {"role": "user", "content": results}], tools=[WEATHER])
        full = count(first["content"][0])
        self.assertEqual(count(dict(first["content"][0], thinking="")), full)
        self.assertEqual(count({"type": "redacted_thinking",
                                "data": first["content"][0]["signature"]}), full)
        self.assertLess(count(None), full)
        self.assertEqual(count(None, calls), full)  # the calls' own ids are remembered
        self.assertEqual(count({"type": "thinking", "thinking": "", "signature": "Zm9yZWlnbg=="}),
                         count(None))

    def count(self, **body):
        status, answer = self.rig.post("/v1/messages/count_tokens", body)
        self.assertEqual(status, 200, answer)
        self.assertEqual(set(answer), {"input_tokens"})
        return answer["input_tokens"]

    def test_count_tokens_agrees_with_usage(self):
        for name, path, request in recorded(*REQUESTS):
            if "count_tokens" in name:
                continue
            with self.subTest(name=name):
                count = self.count(**{k: v for k, v in request.items() if k != "stream"})
                request = dict(request, max_tokens=1, stream=False)
                status, answer = self.rig.post(path, request)
                self.assertEqual(status, 200, answer)
                usage = answer["usage"]
                self.assertEqual(count, usage["input_tokens"] + usage["cache_read_input_tokens"] +
                                 usage["cache_creation_input_tokens"])

    def test_count_tokens_answers_recorded_requests(self):
        for name, path, request in recorded("anthropic-sdk-2-count_tokens.json"):
            self.assertGreater(self.rig.post(path, request)[1]["input_tokens"], 0, name)

    def test_billing_header_is_stripped_and_counted(self):
        user = [{"role": "user", "content": "Hello"}]

        def system(value, **more):
            return [{"type": "text", "text": "x-anthropic-billing-header: cc_version=%s;" % value},
                    dict({"type": "text", "text": "You are a helpful assistant."}, **more)]
        before = self.metric("ds4_prompt_stripped_total", what="billing_header")
        plain = self.count(messages=user, system="You are a helpful assistant.")
        self.assertEqual(self.count(messages=user, system=system("1")), plain)
        self.assertEqual(self.count(messages=user, system=system(
            "2.1.332", cache_control={"type": "ephemeral"})), plain)
        self.assertEqual(self.metric("ds4_prompt_stripped_total", what="billing_header"), before + 2)

    def test_same_conversation_same_tokens_as_chat(self):
        function = {"type": "function", "function": {
            "name": "get_weather", "description": WEATHER["description"], "parameters": CITY}}
        ours = self.count(messages=[QUESTION], tools=[WEATHER], system="Be brief.")
        _, chat = self.rig.post("/tokenize", {
            "messages": [{"role": "system", "content": "Be brief."}, QUESTION], "tools": [function]})
        self.assertEqual(ours, chat["count"])

    def test_system_message_between_others_is_read(self):
        body = [{"role": "user", "content": "Hello"}, {"role": "system", "content": "Be brief."}]
        self.assertGreater(self.count(messages=body), self.count(messages=body[:1]))
        status, answer = self.ask(messages=body, max_tokens=8)
        self.assertEqual(status, 200, answer)

    def test_stop_sequence_is_named(self):
        body = {"messages": [{"role": "user", "content": "Count to 12."}],
                "thinking": {"type": "disabled"}, "stop_sequences": ["zzz", ", 7"]}
        status, answer = self.ask(**body)
        self.assertEqual(status, 200, answer)
        self.assertEqual((answer["stop_reason"], answer["stop_sequence"]), ("stop_sequence", ", 7"))
        self.assertEqual(answer["content"], [{"type": "text", "text": "1, 2, 3, 4, 5, 6"}])
        status, answer = self.ask(**dict(body, stop_sequences=[], max_tokens=5))
        self.assertEqual((answer["stop_reason"], answer["stop_sequence"]), ("max_tokens", None))

    def test_effort_and_thinking_are_applied_and_echoed(self):
        user = [{"role": "user", "content": "Hello"}]
        for more, headers in (
                ({"thinking": {"type": "disabled"}}, ("off", "off", "default")),
                ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
                 ("on", "high", "high")),
                ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ("on", None, "default")),
                ({"output_config": {"effort": "max"}}, ("on", "high", "max")),
                ({"output_config": {"effort": "none"}}, ("off", "off", "none"))):
            with self.subTest(more=more):
                status, got, data = self.rig.request("POST", "/v1/messages?beta=true", dict(
                    more, messages=user, max_tokens=2))
                self.assertEqual(status, 200, data)
                self.assertEqual(got["x-ds4-thinking"], headers[0])
                if headers[1]:
                    self.assertEqual(got["x-ds4-effort"], headers[1])
                self.assertEqual(got["x-ds4-effort-requested"], headers[2])
                self.assertEqual(got["request-id"], got["x-request-id"])

    def test_thinking_budget_closes_the_thinking(self):
        status, answer = self.ask(messages=[{"role": "user", "content": "What is 47 + 85?"}],
                                  thinking={"type": "enabled", "budget_tokens": 4})
        self.assertEqual(status, 200, answer)
        self.assertIn("text", [b["type"] for b in answer["content"]])
        _, free = self.ask(messages=[{"role": "user", "content": "What is 47 + 85?"}])
        self.assertLess(len(answer["content"][0]["thinking"]), len(free["content"][0]["thinking"]))

    def test_last_assistant_message_is_continued(self):
        status, answer = self.ask(
            messages=[{"role": "user", "content": "Count to 12."},
                      {"role": "assistant", "content": "1, 2, 3, 4,"}],
            thinking={"type": "disabled"})
        self.assertEqual(status, 200, answer)
        self.assertTrue(answer["content"][0]["text"].lstrip().startswith("5"), answer)

    def test_tool_choice_any_forces_a_call_and_none_forbids_it(self):
        hello = [{"role": "user", "content": "Hello"}]
        status, answer = self.ask(messages=hello, tools=[WEATHER], tool_choice={"type": "any"})
        self.assertEqual(status, 200, answer)
        self.assertIn("tool_use", [b["type"] for b in answer["content"]])
        status, answer = self.ask(messages=hello, tools=[WEATHER],
                                  tool_choice={"type": "tool", "name": "get_weather"})
        self.assertEqual(status, 200, answer)
        names = {b["name"] for b in answer["content"] if b["type"] == "tool_use"}
        self.assertEqual((names, answer["stop_reason"]), ({"get_weather"}, "tool_use"))
        status, answer = self.ask(messages=[QUESTION], tools=[WEATHER],
                                  tool_choice={"type": "none"})
        self.assertEqual(status, 200, answer)
        self.assertNotIn("tool_use", [b["type"] for b in answer["content"]])

    def test_errors_have_the_dialect_s_shape(self):
        user = {"role": "user", "content": "Hello"}
        result = {"type": "tool_result", "tool_use_id": "toolu_none", "content": "x"}
        for body, status in (
                ({}, 400), ({"messages": []}, 400), ({"messages": [{"role": "tool"}]}, 400),
                ({"messages": [user], "max_tokens": 0}, 400),
                ({"messages": [user], "tool_choice": {"type": "some"}}, 400),
                ({"messages": [user], "tool_choice": {"type": "tool", "name": "none"}}, 400),
                ({"messages": [user], "thinking": {"type": "sometimes"}}, 400),
                ({"messages": [user], "output_config": {"effort": "huge"}}, 400),
                ({"messages": [user], "stop_sequences": 5}, 400),
                ({"messages": [{"role": "user", "content": [result]}]}, 400),
                ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400),
                ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, 400),
                ({"messages": [{"role": "user", "content": [7]}]}, 400),
                ({"messages": [user], "tools": [{"input_schema": {}}]}, 400),
                ({"messages": [user], "system": 5}, 400)):
            with self.subTest(body=body):
                got, headers, data = self.rig.request("POST", "/v1/messages", body)
                answer = json.loads(data)
                self.assertEqual(got, status, answer)
                self.assertEqual(answer["type"], "error")
                self.assertEqual(answer["error"]["type"], "invalid_request_error")
                self.assertTrue(answer["error"]["message"])
                self.assertEqual(answer["request_id"], headers["request-id"])
        got, _, data = self.rig.request("GET", "/v1/messages")
        self.assertEqual((got, json.loads(data)["type"]), (405, "error"))

    def test_overflow_has_the_wording_clients_know(self):
        text = "word " * 70000
        status, answer = self.ask(messages=[{"role": "user", "content": text}])
        self.assertEqual(status, 400)
        self.assertRegex(answer["error"]["message"], r"^prompt is too long: \d+ tokens > \d+ maximum$")


if __name__ == "__main__":
    e2e.main()
