#!/usr/bin/env python3
"""The Responses dialect: recorded requests, order of events, items, kept responses, refusals."""

import json
import os
import sys
import threading
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
from dialects import Recorded, accepted, missing, recorded, shape  # noqa: E402

PATH = "/v1/responses"
CITY = {"type": "object", "properties": {
    "city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather",
           "description": "Get the current weather for a city.", "parameters": CITY, "strict": False}
QUESTION = {"role": "user", "content": "What is the weather in Paris and Oslo? Use celsius."}
SUM = {"role": "user", "content": "What is 47 + 85?"}
CODEX = {"reasoning": {"effort": "high", "summary": "auto"}, "store": False,
         "include": ["reasoning.encrypted_content"]}
REQUESTS = ("*responses*.json",)
ENDS = ("response.completed", "response.incomplete")


class Responses(Recorded, unittest.TestCase):
    def ask(self, **body):
        body.setdefault("temperature", 0)
        body.setdefault("max_output_tokens", 300)
        status, answer = self.rig.post(PATH, body)
        self.assertEqual(status, 200, answer)
        return answer

    def stream(self, **body):
        """Events of a stream after checking numbers, names, and that items open and close."""
        frames = self.frames(PATH, dict(body, stream=True))
        events = [data for _, data in frames]
        self.assertEqual([e["type"] for e in events], [event for event, _ in frames])
        self.assertEqual([e["sequence_number"] for e in events], list(range(len(events))))
        self.assertEqual([e["type"] for e in events[:2]],
                         ["response.created", "response.in_progress"])
        self.assertIn(events[-1]["type"], ENDS)
        open_item, n_item, done = None, 0, []
        for event in events[2:-1]:
            if event["type"] == "response.in_progress":
                continue
            self.assertEqual(event["output_index"], n_item)
            if event["type"] == "response.output_item.added":
                self.assertIsNone(open_item)
                open_item = event["item"]["id"]
            elif event["type"] == "response.output_item.done":
                self.assertEqual(event["item"]["id"], open_item)
                open_item, n_item = None, n_item + 1
                done.append(event["item"])
            else:
                self.assertEqual(event["item_id"], open_item)
        self.assertIsNone(open_item)
        self.assertEqual(events[-1]["response"]["output"], done)
        return events

    def test_recorded_requests_are_answered(self):
        n = 0
        for name, path, request in recorded(*REQUESTS):
            n += 1
            with self.subTest(name=name):
                events = self.stream(**dict(request, max_output_tokens=24))
                response = events[-1]["response"]
                self.assertEqual(response["model"], request["model"])
                self.assertGreater(response["usage"]["output_tokens"], 0)
        self.assertGreater(n, 5)

    def collect(self):
        return (self.stream(input=[SUM], temperature=0, max_output_tokens=300, **CODEX) +
                self.stream(input=[QUESTION], tools=[WEATHER], temperature=0,
                            max_output_tokens=300, **CODEX))

    def test_streams_have_events_and_members_of_accepted_ones(self):
        def kind(data):
            return data["type"], data.get("item", data.get("part", {})).get("type")
        seen = {}
        for data in self.collect():
            seen.setdefault(kind(data), shape(data))
            if data["type"] == "response.completed":
                items = seen.setdefault("items", {})
                items.update({i["type"]: shape(i) for i in data["response"]["output"]})
        for file in ("accepted-responses-text-stream.json", "accepted-responses-tool-stream.json"):
            for _, data in accepted(file):
                with self.subTest(file=file, kind=kind(data)):
                    self.assertIn(kind(data), seen)
                    want = shape(data)
                    if data["type"] == "response.completed":
                        for item in data["response"]["output"]:
                            self.assertEqual(missing(shape(item), seen["items"][item["type"]]), [])
                        want["response"]["output"] = []
                    self.assertEqual(missing(want, seen[kind(data)]), [])

    def test_order_of_events_contains_the_accepted_order(self):
        for file, body in (("accepted-responses-text-stream.json", {"input": [SUM]}),
                           ("accepted-responses-tool-stream.json",
                            {"input": [QUESTION], "tools": [WEATHER]})):
            ours = iter([e["type"] for e in self.stream(
                temperature=0, max_output_tokens=300, **body, **CODEX)])
            last = None
            for _, data in accepted(file):
                if data["type"] != last:  # how many deltas there are is ours to say
                    self.assertIn(data["type"], ours, file)  # consumes up to it
                last = data["type"]

    def test_stream_and_whole_answer_say_the_same(self):
        for body in ({"input": "What is 47 + 85?"}, {"input": [QUESTION], "tools": [WEATHER]}):
            whole = self.ask(**body)
            streamed = self.stream(temperature=0, max_output_tokens=300, **body)[-1]["response"]
            for answer in (whole, streamed):
                for item in answer["output"]:
                    item.pop("id")
                    item.pop("call_id", None)
            self.assertEqual(whole["output"], streamed["output"])
            self.assertEqual(whole["status"], "completed")
            self.assertEqual(whole["usage"]["output_tokens"], streamed["usage"]["output_tokens"])

    def test_deltas_add_up(self):
        events = self.collect()
        for delta, done, key in (
                ("response.output_text.delta", "response.output_text.done", "text"),
                ("response.reasoning_summary_text.delta",
                 "response.reasoning_summary_text.done", "text"),
                ("response.function_call_arguments.delta",
                 "response.function_call_arguments.done", "arguments")):
            got = {}
            for event in events:
                if event["type"] == delta:
                    got[event["item_id"]] = got.get(event["item_id"], "") + event["delta"]
            want = {e["item_id"]: e[key] for e in events if e["type"] == done}
            self.assertEqual(got, want)
            self.assertTrue(want)

    def calls(self, answer):
        return [i for i in answer["output"] if i["type"] == "function_call"]

    def results(self, answer):
        return [{"type": "function_call_output", "call_id": c["call_id"],
                 "output": json.dumps({"temperature": 11 + i})}
                for i, c in enumerate(self.calls(answer))]

    def test_a_tool_turn_goes_on_with_its_results(self):
        first = self.ask(input=[QUESTION], tools=[WEATHER], **CODEX)
        self.assertEqual([json.loads(c["arguments"]) for c in self.calls(first)],
                         [{"city": "Paris", "unit": "celsius"}, {"city": "Oslo", "unit": "celsius"}])
        second = self.ask(input=[QUESTION] + first["output"] + self.results(first),
                          tools=[WEATHER], **CODEX)
        self.assertEqual(second["output"][-1]["type"], "message")
        self.assertGreater(second["usage"]["input_tokens_details"]["cached_tokens"], 0)

    def count(self, **body):
        status, answer = self.rig.post(PATH + "/input_tokens", body)
        self.assertEqual((status, answer.get("object")), (200, "response.input_tokens"), answer)
        return answer["input_tokens"]

    def test_reasoning_is_restored_from_its_token(self):
        first = self.ask(input=[QUESTION], tools=[WEATHER], **CODEX)
        reasoning, known = first["output"][0], first["output"][1:] + self.results(first)
        rest = [dict(i, call_id=i["call_id"] + "f") for i in known]  # ids nobody remembers
        self.assertEqual(reasoning["type"], "reasoning")

        def count(*items):
            return self.count(input=[QUESTION] + list(items) + rest, tools=[WEATHER])
        full = count(reasoning)
        self.assertEqual(self.count(input=[QUESTION] + known, tools=[WEATHER]), full)
        self.assertEqual(count(dict(reasoning, content=[], summary=[])), full)
        self.assertEqual(count(dict(reasoning, encrypted_content=None, content=None)), full)
        self.assertLess(count(), full)
        self.assertEqual(count(dict(reasoning, encrypted_content="Zm9yZWlnbg==", content=[],
                                    summary=[])), count())

    def test_same_conversation_same_tokens_as_chat(self):
        first = self.ask(input=[QUESTION], tools=[WEATHER])
        calls = self.calls(first)
        function = {"type": "function", "function": {
            k: WEATHER[k] for k in ("name", "description", "parameters")}}
        messages = [{"role": "system", "content": "Be brief."}, QUESTION,
                    {"role": "assistant", "reasoning_content": first["output"][0]["content"][0]["text"],
                     "tool_calls": [{"id": c["call_id"], "type": "function", "function": {
                         "name": c["name"], "arguments": c["arguments"]}} for c in calls]}]
        messages += [{"role": "tool", "tool_call_id": r["call_id"], "content": r["output"]}
                     for r in self.results(first)]
        _, chat = self.rig.post("/tokenize", {"messages": messages, "tools": [function]})
        self.assertEqual(self.count(input=[QUESTION] + first["output"] + self.results(first),
                                    instructions="Be brief.", tools=[WEATHER]), chat["count"])

    def test_input_tokens_agree_with_usage(self):
        for name, _, request in recorded(*REQUESTS):
            with self.subTest(name=name):
                answer = self.ask(**dict(request, max_output_tokens=1, stream=False))
                self.assertEqual(self.count(**request), answer["usage"]["input_tokens"])

    def test_previous_response_stands_for_its_turns(self):
        first = self.ask(input=[QUESTION], tools=[WEATHER])
        by_id = self.ask(input=self.results(first), tools=[WEATHER],
                         previous_response_id=first["id"])
        in_full = self.ask(input=[QUESTION] + first["output"] + self.results(first),
                           tools=[WEATHER])
        self.assertEqual(by_id["usage"]["input_tokens"], in_full["usage"]["input_tokens"])
        self.assertEqual(by_id["previous_response_id"], first["id"])
        third = self.ask(input="Hello", previous_response_id=by_id["id"], tools=[WEATHER])
        self.assertGreater(third["usage"]["input_tokens"], by_id["usage"]["input_tokens"])
        references = [{"type": "item_reference", "id": i["id"]} for i in first["output"]]
        self.assertEqual(self.count(input=[QUESTION] + references + self.results(first),
                                    tools=[WEATHER]), in_full["usage"]["input_tokens"])

    def test_kept_responses_are_shown_and_deleted(self):
        kept = self.ask(input="Hello", max_output_tokens=8)
        status, _, data = self.rig.request("GET", PATH + "/" + kept["id"])
        self.assertEqual((status, json.loads(data)), (200, kept))
        self.assertEqual(self.rig.post(PATH + "/" + kept["id"] + "/cancel", {})[0], 400)
        status, _, data = self.rig.request("DELETE", PATH + "/" + kept["id"])
        self.assertEqual((status, json.loads(data)["deleted"]), (200, True))
        unkept = self.ask(input="Hello", max_output_tokens=8, store=False)
        for gone in (kept["id"], unkept["id"], "resp_none"):
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
                status, _, data = self.rig.request(method, PATH + "/" + gone + path)
                self.assertEqual((status, json.loads(data)["error"]["code"]),
                                 (404, "response_not_found"))
            status, answer = self.rig.post(PATH, {"input": "x", "previous_response_id": gone})
            self.assertEqual((status, answer["error"]["code"]), (404, "response_not_found"))
        self.assertEqual(self.rig.request("PUT", PATH + "/x")[0], 405)
        self.assertEqual(self.rig.request("GET", PATH + "/x/y/z")[0], 404)

    def test_running_response_is_shown_and_cancelled(self):
        events, ids = [], []

        def read():
            for event, data in self.rig.stream(PATH, {
                    "input": "Hello", "stream": True, "ignore_eos": True,
                    "max_output_tokens": 20000}):
                if event != ":":
                    events.append(json.loads(data))
                    ids.append(events[0]["response"]["id"])
        reader = threading.Thread(target=read)
        reader.start()
        e2e.wait_until(lambda: ids, self.rig.logs)
        status, _, data = self.rig.request("GET", PATH + "/" + ids[0])
        self.assertEqual((status, json.loads(data)["status"]), (200, "in_progress"))
        status, answer = self.rig.post(PATH + "/" + ids[0] + "/cancel", {})
        self.assertEqual((status, answer["status"], answer["id"]), (200, "cancelled", ids[0]))
        reader.join(e2e.PATIENCE)
        self.assertFalse(reader.is_alive())
        self.assertEqual((events[-1]["type"], events[-1]["response"]["status"]),
                         ("response.failed", "cancelled"))

    def test_namespaces_and_custom_tools_keep_their_form(self):
        space = {"type": "namespace", "name": "multi_agent_v1", "tools": [
            {"type": "function", "name": "get_weather", "parameters": CITY,
             "description": WEATHER["description"]}]}
        answer = self.ask(input=[QUESTION], tools=[space, {"type": "web_search"}])
        calls = self.calls(answer)
        self.assertTrue(calls, answer["output"])
        for call in calls:
            self.assertEqual((call["namespace"], call["name"]), ("multi_agent_v1", "get_weather"))
        again = self.ask(input=[QUESTION] + answer["output"] + self.results(answer), tools=[space])
        self.assertEqual(again["status"], "completed")
        custom = {"type": "custom", "name": "shell", "description": "Run a command."}
        events = self.stream(input=[{"role": "user", "content": "Hello"}], tools=[custom],
                             tool_choice={"type": "function", "name": "shell"}, temperature=0,
                             max_output_tokens=200)
        calls = [i for i in events[-1]["response"]["output"] if i["type"] == "custom_tool_call"]
        self.assertTrue(calls, events[-1])
        done = [e for e in events if e["type"] == "response.custom_tool_call_input.done"]
        self.assertEqual([e["input"] for e in done], [c["input"] for c in calls])
        history = [{"role": "user", "content": "Hello"},
                   {"type": "custom_tool_call", "call_id": "call_1", "name": "shell", "input": "ls"},
                   {"type": "custom_tool_call_output", "call_id": "call_1", "output": "a.txt"}]
        self.ask(input=history, tools=[custom], max_output_tokens=8)

    def test_limit_makes_the_response_incomplete(self):
        events = self.stream(input="Count to 12.", reasoning={"effort": "none"}, temperature=0,
                             max_output_tokens=5)
        response = events[-1]["response"]
        self.assertEqual((events[-1]["type"], response["status"], response["incomplete_details"]),
                         ("response.incomplete", "incomplete", {"reason": "max_output_tokens"}))
        self.assertEqual(response["output"][-1]["status"], "incomplete")

    def test_summary_only_when_asked_for(self):
        plain = self.ask(input=[SUM])
        self.assertEqual(plain["output"][0]["summary"], [])
        self.assertTrue(plain["output"][0]["content"][0]["text"])
        self.assertIsNone(plain["output"][0]["encrypted_content"])
        events = self.stream(input=[SUM], temperature=0, max_output_tokens=300)
        types = {e["type"] for e in events}
        self.assertIn("response.reasoning_text.delta", types)
        self.assertNotIn("response.reasoning_summary_text.delta", types)

    def test_logprobs_come_with_an_include(self):
        answer = self.ask(input="Count to 12.", reasoning={"effort": "none"}, top_logprobs=2,
                          include=["message.output_text.logprobs"], max_output_tokens=8)
        part = answer["output"][0]["content"][0]
        self.assertEqual("".join(item["token"] for item in part["logprobs"]), part["text"])
        self.assertEqual({len(item["top_logprobs"]) for item in part["logprobs"]}, {2})

    def test_errors_name_their_place(self):
        user = {"role": "user", "content": "Hello"}
        for body, status, code in (
                ({}, 400, "missing_field"), ({"input": []}, 400, "missing_field"),
                ({"input": 5}, 400, "invalid_value"), ({"input": [5]}, 400, "invalid_value"),
                ({"input": [{"role": "nobody", "content": ""}]}, 400, "invalid_value"),
                ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400,
                 "unsupported_value"),
                ({"input": [user, {"type": "function_call_output", "call_id": "call_x",
                                   "output": ""}]}, 400, "unknown_tool_call_id"),
                ({"input": [user], "background": True}, 400, "unsupported_value"),
                ({"input": [user], "conversation": "c"}, 400, "unsupported_value"),
                ({"input": [user], "truncation": "auto"}, 400, "unsupported_value"),
                ({"input": [user], "max_output_tokens": 0}, 400, "invalid_value"),
                ({"input": [user], "reasoning": {"effort": "huge"}}, 400, "invalid_value"),
                ({"input": [user], "tools": [{"type": "function"}]}, 400, "invalid_value"),
                ({"input": [user], "text": {"format": {
                    "type": "json_schema", "name": "n", "schema": {}, "strict": True}}}, 422,
                 "schema_unsupported")):
            with self.subTest(body=body):
                got, answer = self.rig.post(PATH, body)
                self.assertEqual((got, answer["error"]["code"]), (status, code), answer)
        # kinds that other servers have and we do not are passed over
        self.ask(input=[user, {"type": "web_search_call", "id": "ws_1"}, {"type": "compaction"}],
                 tools=[{"type": "web_search"}, {"type": "mcp", "server_label": "x"}],
                 max_output_tokens=4)


class Waiting(unittest.TestCase):
    """Events before the first token: what keeps a client with an idle timer waiting."""

    def test_in_progress_is_repeated_until_the_first_item(self):
        rig = e2e.rig(stages=1, settings={"http": {"ping_ms": 200, "queue_header_ms": 200},
                                          "sched": {"max_seqs": 1}})
        try:
            rig.start()
            frames = []

            def read():
                for frame in rig.stream("/v1/completions", {
                        "prompt": "Hello", "ignore_eos": True, "max_tokens": 1500, "stream": True}):
                    frames.append(frame)

            busy = threading.Thread(target=read)
            busy.start()
            e2e.wait_until(lambda: frames, rig.logs)  # it has the only place
            events = [json.loads(data) for event, data in rig.stream(PATH, {
                "input": "Hello", "stream": True, "max_output_tokens": 4}) if event != ":"]
            busy.join()
        finally:
            rig.stop()
        types = [e["type"] for e in events]
        first = types.index("response.output_item.added")
        self.assertEqual(types[0], "response.created")
        self.assertEqual(set(types[1:first]), {"response.in_progress"})
        self.assertGreater(first, 3)
        self.assertEqual([e["sequence_number"] for e in events], list(range(len(events))))


if __name__ == "__main__":
    e2e.main()
