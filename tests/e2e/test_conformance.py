#!/usr/bin/env python3
"""What every dialect promises alike: statuses and error bodies, disconnects, effort, reasoning in history."""

import http.client
import json
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
from scripted import ScriptedRig, calls  # noqa: E402

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCRIPT = {"ms_per_ktok": 1000, "rules": [
    {"contains": "slowly", "step_ms": 30, "text": "one two three ", "repeat": True},
    {"contains": "characters", "thinking": "D\u00e9j\u00e0 vu \U0001f600.",
     "text": "\u4f60\u597d \U0001f680\U0001f469\u200d\U0001f4bb na\u00efve STOP" + calls(
         ("write", {"text": "a \"b\" \\ \u00e9\n\U0001f680", "n": 7}))},
    {"contains": "busy", "step_ms": 30, "text": "one two three ", "repeat": True},
    {"thinking": "I think.", "text": "PONG"}]}


# vLLM's own lists: shared dashboards and recording rules name these borders.
TTFT = ("0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 "
        "2560.0")
PER_TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
LATENCY = ("0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 "
           "7680.0")


def body(path, text="Hello", **more):
    if path == RESPONSES:
        return dict({"input": text}, **more)
    return dict({"messages": [{"role": "user", "content": text}]}, **more)


class Conformance(unittest.TestCase):
    settings = {"sched": {"max_seqs": 1, "queue_max": 4, "chunk_tok": 128}, "model": {"context": 32768}}

    @classmethod
    def setUpClass(cls):
        cls.rig = ScriptedRig(SCRIPT, cls.settings)
        cls.rig.start()

    @classmethod
    def tearDownClass(cls):
        statuses = cls.rig.stop()
        assert set(statuses.values()) == {0}, "exit statuses %r" % statuses

    def metrics(self, *starts):
        return [line for line in self.rig.request("GET", "/metrics")[2].decode().splitlines()
                if line.startswith(starts)]

    def inflight(self, phase):
        return any('phase="%s"} 1' % phase in line for line in self.metrics("ds4_requests_inflight{"))

    def cancelled(self, phase):
        return sum(float(line.rsplit(" ", 1)[1]) for line in self.metrics("ds4_requests_cancelled_total{")
                   if 'phase="%s"' % phase in line and 'reason="disconnect"' in line)

    def wait(self, what):
        e2e.wait_until(what, lambda: "\n".join(self.metrics("ds4_requests_")))

    def send(self, path, text):
        connection = http.client.HTTPConnection("127.0.0.1", self.rig.port, timeout=60)
        connection.request("POST", path, json.dumps(body(path, text, stream=True, max_tokens=3000)
                                                    if path != RESPONSES else
                                                    body(path, text, stream=True, max_output_tokens=3000)))
        return connection

    def read_some(self, connection):
        """Eight frames: tokens are coming."""
        response = connection.getresponse()
        n = 0
        while n < 8:
            line = response.readline()
            self.assertTrue(line, "the stream ended")
            n += line.startswith(b"data: ")
        response.close()

    def test_a_client_that_leaves_frees_its_place_in_every_phase(self):
        phases = [("queued", "x"), ("prefill", "word " * 4000), ("decode", "slowly")]
        # Where nothing is being written a closed socket is a half close at first, and takes 5 s.
        for path, some in ((CHAT, phases), (RESPONSES, phases[2:]), (MESSAGES, phases[2:])):
            for phase, text in some:
                with self.subTest(path=path, phase=phase):
                    before = self.cancelled(phase)
                    busy = self.send(path, "busy") if phase == "queued" else None
                    if busy:
                        self.read_some(busy)
                    leaver = self.send(path, text)
                    if phase == "decode":  # the canary is a sequence that decodes as well: look at the text
                        self.read_some(leaver)
                    else:
                        self.wait(lambda: self.inflight(phase))  # noqa: B023
                    leaver.close()
                    self.wait(lambda: self.cancelled(phase) == before + 1)  # noqa: B023
                    if busy:
                        busy.close()
                    self.wait(lambda: not any(self.inflight(p) for p in ("queued", "prefill", "decode")))
                    self.assertEqual(self.rig.post(path, body(path))[0], 200)

    def test_effort_names_mean_the_same_in_every_dialect(self):
        # The preview release has no low and renders it as high; the floor of max is above this context.
        applied = {"none": "off", "minimal": "high", "low": "high", "medium": "high", "high": "high",
                   "xhigh": "high", "max": "high", "ultra": "high"}
        for name, want in applied.items():
            asked = {CHAT: {"reasoning_effort": name}, RESPONSES: {"reasoning": {"effort": name}},
                     MESSAGES: {"output_config": {"effort": name}}}
            for path, member in asked.items():
                with self.subTest(path=path, effort=name):
                    status, headers, data = self.rig.request("POST", path, body(path, **member))
                    self.assertEqual(status, 200, data)
                    self.assertEqual(headers["x-ds4-effort"], want)
                    self.assertEqual("x-ds4-effort-downgraded" in headers, name in ("max", "ultra"))
                    self.assertEqual(headers["x-ds4-effort-requested"], name)
                    self.assertEqual(headers["x-ds4-thinking"], "off" if want == "off" else "on")
                    self.assertEqual(json.loads(data)["ds4"]["effort_applied"], want)

    def test_the_conflict_of_two_efforts_is_decided_by_the_list(self):
        request = body(CHAT, reasoning_effort="high",
                       chat_template_kwargs={"thinking": True, "reasoning_effort": "max"})
        _, headers, _ = self.rig.request("POST", CHAT, request)
        self.assertEqual(headers["x-ds4-effort-requested"], "max")
        request = body(CHAT, reasoning_effort="max", thinking={"type": "disabled"})
        _, headers, _ = self.rig.request("POST", CHAT, request)
        self.assertEqual(headers["x-ds4-thinking"], "off")

    def test_history_takes_reasoning_under_all_its_names(self):
        def prompt(name):
            messages = [{"role": "user", "content": "Hello"},
                        {"role": "assistant", "content": "Hi", name: "a thought of mine", "tool_calls": [
                            {"id": "call_%s" % name, "type": "function",
                             "function": {"name": "f", "arguments": "{}"}}]},
                        {"role": "tool", "tool_call_id": "call_%s" % name, "content": "x"}]
            tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
            return self.rig.post("/apply-template", {"messages": messages, "tools": tools})[1]["prompt"]

        prompts = {prompt(name) for name in ("reasoning", "reasoning_content", "reasoning_text")}
        self.assertEqual(len(prompts), 1)
        self.assertIn("a thought of mine", prompts.pop())

    def test_output_has_both_names_with_the_same_text(self):
        _, answer = self.rig.post(CHAT, body(CHAT))
        message = answer["choices"][0]["message"]
        self.assertEqual((message["reasoning"], message["reasoning_content"]), ("I think.", "I think."))

    def test_what_moves_between_requests_does_not_move_the_prompt(self):
        def tokens(hash_text, marked):
            system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=%s;" % hash_text},
                      {"type": "text", "text": "You help."}]
            content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
            (system[1] if marked == 0 else content[marked - 1])["cache_control"] = {"type": "ephemeral"}
            request = {"system": system, "messages": [{"role": "user", "content": content},
                                                      {"role": "system", "content": "Be brief."}]}
            _, headers, _ = self.rig.request("POST", MESSAGES, request)
            return int(headers["x-ds4-prompt-tokens"]), int(headers["x-ds4-cached-tokens"])

        first, _ = tokens("00000", 0)
        for hash_text, marked in (("fffff", 0), ("a1b2c", 1), ("00000", 2)):
            prompt, cached = tokens(hash_text, marked)
            self.assertEqual(prompt, first)
            self.assertGreaterEqual(cached, prompt - 1)

    def test_characters_cut_by_tokens_arrive_whole(self):
        """Rare characters are several tokens each here: no piece of a stream may hold half of one."""
        tool = {"type": "function", "function": {"name": "write", "parameters": {
            "type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}}}
        text, reasoning, arguments, n = "", "", "", 0
        for event, data in self.rig.stream(CHAT, body(CHAT, "characters", stream=True, tools=[tool])):
            if event == ":" or data == "[DONE]":
                continue
            self.assertNotIn("\ufffd", data)
            for choice in json.loads(data)["choices"]:
                n += 1
                text += choice["delta"].get("content") or ""
                reasoning += choice["delta"].get("reasoning_content") or ""
                for call in choice["delta"].get("tool_calls", []):
                    arguments += call["function"].get("arguments", "")
        self.assertGreater(n, 20)
        self.assertEqual(text, "\u4f60\u597d \U0001f680\U0001f469\u200d\U0001f4bb na\u00efve STOP")
        self.assertEqual(reasoning, "D\u00e9j\u00e0 vu \U0001f600.")
        self.assertEqual(json.loads(arguments), {"text": "a \"b\" \\ \u00e9\n\U0001f680", "n": 7})

    def test_a_stop_string_over_several_tokens_is_never_shown(self):
        for stop, want in (("\U0001f680", "\u4f60\u597d "), ("ve STOP", "\u4f60\u597d \U0001f680\U0001f469\u200d"
                                                            "\U0001f4bb na\u00ef")):
            text = "".join(c["delta"].get("content") or "" for event, data in self.rig.stream(
                CHAT, body(CHAT, "characters", stream=True, stop=[stop]))
                           if event != ":" and data != "[DONE]" for c in json.loads(data)["choices"])
            self.assertEqual(text, want)

    def test_series_do_not_grow_with_what_clients_send(self):
        def shown():
            return [line for line in self.rig.request("GET", "/metrics")[2].decode().splitlines()
                    if line[:1] not in ("#", "")]

        def send(n):
            for i in range(n):
                path = (CHAT, RESPONSES, MESSAGES)[i % 3]
                self.rig.request("POST", path, body(path, "x%d" % i, **{"field_%d" % i: i, "user": "u%d" % i}))
                self.rig.request("GET", "/unknown/%d" % i)

        send(90)
        before = len(shown())
        send(300)
        lines = shown()
        self.assertEqual(len(lines), before)
        self.assertLess(len(lines), 5000)
        for name, borders in (("time_to_first_token_seconds", TTFT), ("inter_token_latency_seconds", PER_TOKEN),
                              ("e2e_request_latency_seconds", LATENCY)):
            got = [float(line.split('le="')[1].split('"')[0]) for line in lines
                   if line.startswith("vllm:%s_bucket{" % name)]
            self.assertEqual(got, [float(b) for b in borders.split()] + [float("inf")])

    def refusal(self, path, status, code, kind, **how):
        """Both error bodies, by path."""
        got, headers, data = self.rig.request(how.pop("method", "POST"), path, **how)
        self.assertEqual(got, status, data)
        error = json.loads(data)
        if path.startswith(MESSAGES):
            self.assertEqual((error["type"], error["error"]["type"]), ("error", kind))
            self.assertTrue(error["request_id"])
        else:
            self.assertEqual(error["error"]["code"], code)
            self.assertIn("param", error["error"])
        self.assertTrue(error["error"]["message"])
        return headers

    def test_refusals_have_the_dialects_body_and_status(self):
        invalid = "invalid_request_error"
        for path in (CHAT, RESPONSES, MESSAGES, "/v1/completions"):
            with self.subTest(path=path):
                self.refusal(path, 400, "invalid_json", invalid, body=b"{")
                self.refusal(path, 400, "invalid_json", invalid, body=b'{"a": "\xff"}')
                self.refusal(path, 400, "invalid_value", invalid, body=dict(body(path), prompt="x", temperature="hot"))
                self.assertIn("POST", self.refusal(path, 405, "method_not_allowed", invalid, method="PUT",
                                                   body=b"")["allow"])
                self.refusal(path, 415, "unsupported_encoding", invalid, body=b"xx",
                             headers={"content-encoding": "br"})
        self.refusal(CHAT, 400, "context_length_exceeded", invalid, body=body(CHAT, "word " * 40000))
        self.refusal(MESSAGES, 400, "context_length_exceeded", invalid, body=body(MESSAGES, "word " * 40000))
        self.refusal("/v1/embeddings", 404, "endpoint_not_supported", None, body={"input": "x"})
        self.refusal("/v1/messages/x", 404, "not_found", "not_found_error", body={})
        self.refusal(RESPONSES, 404, "response_not_found", None,
                     body={"input": "x", "previous_response_id": "resp_unknown"})
        self.assertEqual([p for p in ("queued", "prefill", "decode") if self.inflight(p)], [])


class Closed(unittest.TestCase):
    """Statuses that need settings of their own."""

    def test_keys_models_sizes_and_times(self):
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
            keys.write("secret\n")
            keys.flush()
            rig = ScriptedRig(SCRIPT, {"http": {"keys_file": keys.name, "max_body": 65536, "any_model": False},
                                       "sched": {"max_seqs": 1, "queue_s": 1}})
            key = {"authorization": "Bearer secret"}
            try:
                rig.start()
                for path in (CHAT, MESSAGES):
                    def code(body_of=body, headers=None, path=path, **more):
                        status, got, data = rig.request("POST", path, body_of(path, **more), headers=headers)
                        error = json.loads(data)["error"]
                        return status, error["type" if path == MESSAGES else "code"], got

                    ours = path == MESSAGES
                    status, word, headers = code(headers={})
                    self.assertEqual((status, word), (401, "authentication_error" if ours else "invalid_api_key"))
                    self.assertEqual(headers["www-authenticate"], "Bearer")
                    self.assertEqual(code(headers=key, model="other")[:2],
                                     (404, "not_found_error" if ours else "model_not_found"))
                    self.assertEqual(code(headers=key, text="x" * 70000)[:2],
                                     (413, "request_too_large"))
                    busy = http.client.HTTPConnection("127.0.0.1", rig.port, timeout=60)
                    busy.request("POST", path, json.dumps(body(path, "slowly", max_tokens=3000)), key)
                    def decodes():
                        return 'phase="decode"} 1' in rig.request("GET", "/metrics", headers=key)[2].decode()

                    e2e.wait_until(decodes)
                    self.assertEqual(code(headers=key)[:2], (408, "timeout_error" if ours else "queue_timeout"))
                    busy.close()
                    e2e.wait_until(lambda: not decodes())  # noqa: B023
            finally:
                rig.stop()


if __name__ == "__main__":
    e2e.main()
