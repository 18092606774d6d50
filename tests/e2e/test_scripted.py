#!/usr/bin/env python3
"""Failures in every dialect, made by a scripted stage: what a client sees when the model misbehaves, a worker
dies or stays silent, the queue is full, the prompt too long, the router leaving."""

import http.client
import json
import os
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
from scripted import DSML, ScriptedRig, calls  # noqa: E402

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}


class Dialect:
    """The same question in one dialect, and where its answers stand."""

    def __init__(self, name, path, body, tools, code):
        self.name, self.path, self.body, self.tools, self.code = name, path, body, tools, code

    def ask(self, text, tools=False, **more):
        body = self.body(text)
        if tools:
            body["tools"] = self.tools
        return dict(body, **more)


def by_message(text):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 400}


DIALECTS = [
    Dialect("chat", "/v1/chat/completions", by_message,
            [{"type": "function", "function": FUNCTION}], lambda e: e["error"]["code"]),
    Dialect("responses", "/v1/responses", lambda text: {"input": text, "max_output_tokens": 400},
            [dict(FUNCTION, type="function")],
            lambda e: (e.get("response") or e)["error"]["code"]),
    Dialect("messages", "/v1/messages", by_message,
            [{"name": "get_weather", "description": "Weather.", "input_schema": WEATHER}],
            lambda e: e["error"]["type"]),
    Dialect("completions", "/v1/completions", lambda text: {"prompt": text, "max_tokens": 400}, None,
            lambda e: e["error"]["code"]),
]
SCRIPT = {"rules": [
    {"contains": "die in prefill", "prefill_ms": 200, "die_at": 0, "text": "never"},
    {"contains": "die in decode", "die_at": 6, "step_ms": 20, "text": "one two three ", "repeat": True},
    {"contains": "not finite", "nan_at": 5, "text": "one two three ", "repeat": True},
    {"contains": "slowly", "step_ms": 20, "text": "one two three ", "repeat": True},
    {"contains": "hang", "hang_at": 4, "text": "one two three ", "repeat": True},
    {"last": "long prompt", "prefill_ms": 3500, "text": "At last."},
    {"last": "two calls", "thinking": "Both.", "text": "Looking." + calls(
        ("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Oslo"}))},
    {"last": "bare JSON", "thinking": "Hm.", "text": '{"city": "Paris", "n": 3}'},
    {"last": "fenced JSON", "thinking": "Hm.", "text": '```json\n{"city": "Paris"}\n```'},
    {"last": "other JSON", "thinking": "Hm.", "text": '{"city": 7}'},
    {"last": "unclosed", "text": "Well." + calls(("get_weather", {"city": "Rome"}))[:-30]},
    {"last": "bare", "text": "<%sinvoke name=\"get_weather\">\n<%sparameter name=\"city\" string=\"true\">"
     "Bonn</%sparameter>\n</%sinvoke>" % (DSML, DSML, DSML, DSML)},
    {"text": "PONG"}]}


def tool_calls(dialect, answer):
    """(name, arguments) of a whole answer."""
    if dialect.name == "chat":
        return [(c["function"]["name"], json.loads(c["function"]["arguments"]))
                for c in answer["choices"][0]["message"].get("tool_calls", [])]
    if dialect.name == "responses":
        return [(c["name"], json.loads(c["arguments"]))
                for c in answer["output"] if c["type"] == "function_call"]
    return [(c["name"], c["input"]) for c in answer["content"] if c["type"] == "tool_use"]


class Scripted(unittest.TestCase):
    settings = {"sched": {"max_seqs": 1, "queue_max": 1}, "model": {"context": 2048},
                "watchdog": {"step_s": 2}}

    def setUp(self):
        self.rig = ScriptedRig(SCRIPT, self.settings)
        self.rig.start()

    def tearDown(self):
        statuses = self.rig.stop()
        self.assertEqual({n: s for n, s in statuses.items() if s != 0}, {})

    def frames(self, dialect, text):
        return [(event, data if data == "[DONE]" else json.loads(data)) for event, data in
                self.rig.stream(dialect.path, dialect.ask(text, stream=True)) if event != ":"]

    def last_error(self, dialect, frames):
        """The code of the error object that ends the stream; nothing after it says that all went well."""
        if dialect.name in ("chat", "completions"):
            self.assertEqual(frames.pop(), (None, "[DONE]"))
            self.assertEqual([c["finish_reason"] for _, data in frames[:-1]
                              for c in data["choices"] if c["finish_reason"]], [])
        else:
            self.assertEqual(frames[-1][0], {"responses": "response.failed", "messages": "error"}[dialect.name])
        return dialect.code(frames[-1][1])

    def inflight(self):
        return "".join(line + "\n" for line in self.rig.request("GET", "/metrics")[2].decode().splitlines()
                       if line.startswith("ds4_requests_inflight{"))

    def restart(self):
        if self.rig.workers[0] is not None:
            self.rig.wait_worker_gone()
        self.rig.start_worker(0)
        self.rig.wait_ready()

    def expect(self, dialect, openai, anthropic, frames):
        self.assertEqual(self.last_error(dialect, frames),
                         anthropic if dialect.name == "messages" else openai)

    def test_two_calls_and_healed_ones_in_every_dialect(self):
        for dialect in DIALECTS[:3]:
            for text, cities in (("two calls", ["Paris", "Oslo"]), ("bare", ["Bonn"])):
                with self.subTest(dialect=dialect.name, text=text):
                    status, answer = self.rig.post(dialect.path, dialect.ask(text, tools=True))
                    self.assertEqual(status, 200, answer)
                    self.assertEqual(tool_calls(dialect, answer),
                                     [("get_weather", {"city": city}) for city in cities])
                    self.assertNotIn("DSML", json.dumps(answer, ensure_ascii=False))

    def test_a_demanded_call_that_is_not_made_is_an_error_object(self):
        """The opener is forced; the stage of the script says its own text behind it and ends the turn."""
        demands = {"messages": {"type": "any"}}
        for dialect in DIALECTS[:3]:
            with self.subTest(dialect=dialect.name):
                body = dialect.ask("ping", tools=True, tool_choice=demands.get(dialect.name, "required"))
                status, answer = self.rig.post(dialect.path, body)
                self.assertEqual(status, 500, answer)
                self.assertEqual(dialect.code(answer), "api_error" if dialect.name == "messages"
                                 else "tool_choice_unsatisfied")
                self.assertNotIn("DSML", json.dumps(answer, ensure_ascii=False))

    def test_a_request_keeps_the_name_its_body_gives_it(self):
        for dialect in DIALECTS:
            body = dialect.ask("ping", request_id="mine-1")
            for headers, name in (({}, "mine-1"), ({"x-request-id": "header-2"}, "header-2")):
                with self.subTest(dialect=dialect.name, name=name):
                    got, told, _ = self.rig.request("POST", dialect.path, body, headers)
                    self.assertEqual((got, told["x-request-id"]), (200, name))
        told = self.rig.request("POST", DIALECTS[0].path, DIALECTS[0].ask("ping", request_id="a b"))[1]
        self.assertRegex(told["x-request-id"], "^req-")

    def test_what_cannot_be_offered_is_named_in_responses(self):
        for more, param in (({"instructions": [{"role": "user", "content": "x"}]}, "instructions"),
                            ({"prompt": {"id": "pmpt_1"}}, "prompt"), ({"include": "x"}, "include")):
            with self.subTest(more=more):
                status, answer = self.rig.post("/v1/responses", DIALECTS[1].ask("ping", **more))
                self.assertEqual((status, answer["error"]["param"]), (400, param), answer)

    def test_tools_that_run_elsewhere_are_passed_over_whatever_they_lack(self):
        tools = [{"type": "mcp_toolset", "mcp_server_name": "x"}, {"type": "web_search_20250305", "name": "w"}]
        self.assertEqual(self.rig.post("/v1/messages", DIALECTS[2].ask("ping") | {"tools": tools})[0], 200)

    def test_an_answers_schema_has_two_names_in_messages(self):
        form = {"type": "json_schema", "schema": {"type": "object", "required": ["city"]}}
        for more in ({"output_config": {"format": form}}, {"output_format": form}):
            answer = self.rig.post("/v1/messages", DIALECTS[2].ask("bare JSON", **more))[1]
            self.assertEqual(answer["ds4"]["format"], {"valid": True, "problem": None}, answer)

    def test_reasoning_that_is_excluded_is_not_sent(self):
        body = DIALECTS[0].ask("bare JSON")
        for more, sent in (({}, True), ({"reasoning": {"exclude": True}}, False),
                           ({"reasoning": {"exclude": False}}, True), ({"include_reasoning": False}, False)):
            with self.subTest(more=more):
                message = self.rig.post(DIALECTS[0].path, dict(body, **more))[1]["choices"][0]["message"]
                self.assertEqual("reasoning_content" in message, sent, message)

    def test_without_parallel_calls_the_turn_ends_behind_the_first(self):
        for dialect in DIALECTS[:3]:
            with self.subTest(dialect=dialect.name):
                body = dialect.ask("two calls", tools=True)
                if dialect.name == "messages":
                    body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
                else:
                    body["parallel_tool_calls"] = False
                status, answer = self.rig.post(dialect.path, body)
                self.assertEqual(status, 200, answer)
                self.assertEqual(tool_calls(dialect, answer), [("get_weather", {"city": "Paris"})])
                self.assertNotIn("Oslo", json.dumps(answer))
                self.assertNotIn("DSML", json.dumps(answer, ensure_ascii=False))
                if dialect.name == "chat":
                    self.assertEqual(answer["choices"][0]["finish_reason"], "tool_calls")
                elif dialect.name == "messages":
                    self.assertEqual(answer["stop_reason"], "tool_use")

    def formatted(self, dialect, text, schema, strict=None):
        form = {"type": "json_schema", "name": "city", "schema": schema}
        if strict is not None:
            form["strict"] = strict
        body = dialect.ask(text)
        if dialect.name == "chat":
            form.pop("type")
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        elif dialect.name == "responses":
            body["text"] = {"format": form}
        else:
            body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        return self.rig.post(dialect.path, body)

    def test_answers_are_checked_against_their_schema(self):
        for dialect in DIALECTS[:3]:
            for text, problem in (("bare JSON", None), ("fenced JSON", "the answer is not JSON"),
                                  ("other JSON", "city must be of type string")):
                with self.subTest(dialect=dialect.name, text=text):
                    status, answer = self.formatted(dialect, text, WEATHER, strict=False)
                    self.assertEqual(status, 200, answer)
                    self.assertEqual(answer["ds4"]["format"]["valid"], problem is None)
                    self.assertTrue((answer["ds4"]["format"]["problem"] or "").startswith(problem or ""))
            _, answer = self.rig.post(dialect.path, dialect.ask("bare JSON"))
            self.assertIsNone(answer["ds4"]["format"])
        text = self.rig.request("GET", "/metrics")[2].decode()
        self.assertRegex(text, r'ds4_grammar_failures_total{[^}]*action="abandoned"} 6')
        for body in ({"guided_json": WEATHER}, {"structured_outputs": {"json": json.dumps(WEATHER)}}):
            for text, valid in (("bare JSON", True), ("other JSON", False)):
                _, answer = self.rig.post(DIALECTS[0].path, dict(DIALECTS[0].ask(text), **body))
                self.assertEqual(answer["ds4"]["format"]["valid"], valid, answer)
        frames = [data for _, data in self.rig.stream(DIALECTS[0].path, dict(
            DIALECTS[0].ask("other JSON"), stream=True, response_format={"type": "json_object"}))]
        self.assertIn('"format":{"valid":true,"problem":null}', "".join(frames))

    def test_schemas_that_cannot_be_promised_are_422(self):
        for dialect in DIALECTS[:3]:
            status, answer = self.formatted(dialect, "PONG", dict(WEATHER, patternProperties={"^a": {}}))
            self.assertEqual(status, 422, answer)
            self.assertIn("patternProperties", answer["error"]["message"])
        for dialect in DIALECTS[:2]:
            status, answer = self.formatted(dialect, "PONG", WEATHER, strict=True)
            self.assertEqual((status, answer["error"]["code"]), (422, "schema_unsupported"))

    def test_a_call_that_never_closes_does_not_leak_its_markup(self):
        for dialect in DIALECTS[:3]:
            with self.subTest(dialect=dialect.name):
                status, answer = self.rig.post(dialect.path, dialect.ask("unclosed", tools=True))
                self.assertEqual(status, 200, answer)
                self.assertNotIn("DSML", json.dumps(answer, ensure_ascii=False))

    def test_a_worker_that_dies_in_prefill_or_decode_is_an_error_object(self):
        for dialect in DIALECTS:
            for text in ("die in prefill", "die in decode"):
                with self.subTest(dialect=dialect.name, text=text):
                    if dialect.name == "completions" and text == "die in prefill":
                        # Nothing was sent yet: completions has no opening frame.
                        status, answer = self.rig.post(dialect.path, dialect.ask(text, stream=True))
                        self.assertEqual((status, dialect.code(answer)), (503, "pipeline_restarted"))
                    else:
                        self.expect(dialect, "pipeline_restarted", "overloaded_error",
                                    self.frames(dialect, text))
                    status, headers, data = self.rig.request(
                        "POST", dialect.path, dialect.ask("PONG"))
                    self.assertEqual(status, 503, data)
                    self.assertGreater(int(headers["retry-after"]), 0)
                    self.restart()

    def test_a_long_prompt_is_an_event_a_second_to_responses(self):
        """With http.ping_ms at its default of 5 s Codex gave up where its idle limit was 3 s."""
        events = [event for event, _ in self.frames(DIALECTS[1], "long prompt")]
        self.assertGreaterEqual(events.index("response.output_item.added"), 4)
        self.assertEqual(set(events[1:events.index("response.output_item.added")]), {"response.in_progress"})

    def test_a_row_that_is_not_finite_is_an_error_object(self):
        for dialect in DIALECTS:
            with self.subTest(dialect=dialect.name):
                self.expect(dialect, "internal_error", "api_error", self.frames(dialect, "not finite"))

    def test_a_worker_that_falls_silent_is_given_up(self):
        begin = time.monotonic()
        self.expect(DIALECTS[0], "pipeline_restarted", None, self.frames(DIALECTS[0], "hang"))
        print("given up after %.1f s" % (time.monotonic() - begin))

    def test_a_full_queue_is_429_with_retry_after(self):
        slow = [http.client.HTTPConnection("127.0.0.1", self.rig.port, timeout=60) for _ in range(2)]
        for connection in slow:
            connection.request("POST", DIALECTS[0].path, json.dumps(
                DIALECTS[0].ask("slowly", stream=True, max_tokens=1500, ds4={"tripwire": False})))
            if connection is slow[0]:  # it has the only place once tokens come
                running = connection.getresponse()
                while b'"content":"o' not in running.readline():
                    pass
        e2e.wait_until(lambda: 'phase="queued"} 1' in self.inflight(), self.rig.logs)
        for dialect in DIALECTS:
            with self.subTest(dialect=dialect.name):
                status, headers, data = self.rig.request("POST", dialect.path, dialect.ask("PONG"))
                self.assertEqual(status, 429, data)
                self.assertGreater(int(headers["retry-after"]), 0)
                self.assertIn("retry-after-ms", headers)
                self.assertEqual(dialect.code(json.loads(data)),
                                 "rate_limit_error" if dialect.name == "messages" else "queue_full")
        running.close()
        for connection in slow:
            connection.close()

    def test_too_long_a_prompt_is_told_in_the_words_clients_look_for(self):
        for dialect in DIALECTS:
            with self.subTest(dialect=dialect.name):
                status, answer = self.rig.post(dialect.path, dialect.ask("word " * 3000))
                self.assertEqual(status, 400, answer)
                self.assertRegex(answer["error"]["message"],
                                 r"^prompt is too long: \d+ tokens > 2048 maximum$"
                                 if dialect.name == "messages" else
                                 r"^This model's maximum context length is 2048 tokens\. "
                                 r"However, your prompt has \d+ tokens\.$")

    def test_a_draining_router_finishes_what_runs_and_refuses_the_rest(self):
        for dialect in DIALECTS[:1]:
            frames = []
            for event, data in self.rig.stream(dialect.path, dialect.ask(
                    "slowly", stream=True, max_tokens=60)):
                frames.append(data)
                if len(frames) == 5:
                    self.rig.router.terminate()
            self.assertEqual(frames[-1], "[DONE]")
            self.assertIn('"finish_reason":"length"', "".join(frames))
            self.assertEqual(self.rig.router.wait(e2e.PATIENCE), 0)


class AbsentThinking(unittest.TestCase):
    def test_no_thinking_member_means_none_where_the_setting_says_so(self):
        rig = ScriptedRig(SCRIPT, {"anthropic": {"absent_thinking": "off"}})
        rig.start()
        try:
            for more, want in (({}, "off"), ({"output_config": {"effort": "high"}}, "off"),
                               ({"thinking": {"type": "adaptive"}}, "on"),
                               ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "on")):
                told = rig.request("POST", "/v1/messages", DIALECTS[2].ask("ping", **more))[1]
                self.assertEqual(told["x-ds4-thinking"], want, more)
            told = rig.request("POST", DIALECTS[0].path, DIALECTS[0].ask("ping"))[1]
            self.assertEqual(told["x-ds4-thinking"], "on")
        finally:
            rig.stop()


class Pictures(unittest.TestCase):
    """A client that once sent a picture sends it again with every turn."""

    def test_pictures_become_marks_where_the_setting_says_so(self):
        pictures = {"chat": {"type": "image_url", "image_url": {"url": "data:x"}},
                    "responses": {"type": "input_image", "image_url": "data:x"},
                    "messages": {"type": "image", "source": {"type": "base64", "data": "x"}}}
        script = {"rules": [{"last": "[image omitted]", "text": "seen"}, {"text": "not seen"}]}
        for word, status in (("refuse", 400), ("placeholder", 200)):
            rig = ScriptedRig(script, {"http": {"drop_media": word}})
            rig.start()
            try:
                for dialect in DIALECTS[:3]:
                    body = dialect.ask("look")
                    talk = [{"role": "user", "content": [pictures[dialect.name]]}]
                    body["input" if dialect.name == "responses" else "messages"] = talk
                    got, answer = rig.post(dialect.path, body)
                    self.assertEqual(got, status, answer)
                    if got == 200:
                        self.assertIn('"seen"', json.dumps(answer))
            finally:
                rig.stop()


class NeverReady(unittest.TestCase):
    def test_a_stage_that_never_forms_is_503_loading(self):
        rig = ScriptedRig({"never_ready": True})
        try:
            rig.start_router()
            rig.start_worker(0)
            e2e.wait_until(lambda: [stage for stage in json.loads(rig.request("GET", "/health")[2])["stages"]
                                    if stage["state"] == "forming"], rig.logs)
            for dialect in DIALECTS:
                status, headers, data = rig.request("POST", dialect.path, dialect.ask("PONG"))
                self.assertEqual(status, 503, data)
                self.assertIn("retry-after", headers)
                self.assertEqual(dialect.code(json.loads(data)),
                                 "overloaded_error" if dialect.name == "messages" else "loading")
        finally:
            rig.stop()


if __name__ == "__main__":
    e2e.main()
