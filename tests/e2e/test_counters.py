#!/usr/bin/env python3
"""/metrics: bounded whatever clients send, equal to what a client counted, fed by every stage."""

import http.client
import json
import os
import random
import re
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

MAX_SERIES = 5000
MIXED = 10000
RUN_EVERY = 200
SAMPLE = re.compile(r'^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')
CHAT = "/v1/chat/completions"
ENDS_AT_ONCE = 104  # the seed with which ds4-tiny continues "one two" with the end token
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 2}


class Scrape:
    """One exposition: {(name, frozenset of labels): value}."""

    def __init__(self, text):
        self.samples = {}
        for line in text.splitlines():
            if line.startswith("#") or not line:
                continue
            name, labels, value = SAMPLE.match(line).groups()
            pairs = {k: v for k, v in LABEL.findall(labels or "") if k not in ("model",)}
            key = (name, frozenset(pairs.items()))
            if key in self.samples:
                raise AssertionError("twice: " + line)
            self.samples[key] = float(value)

    def sum(self, name, **labels):
        want = set(labels.items())
        return sum(v for (n, have), v in self.samples.items() if n == name and want <= have)

    def has(self, name, **labels):
        want = set(labels.items())
        return any(n == name and want <= have for n, have in self.samples)


class Counters(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rig = e2e.rig(stages=2)
        cls.rig.start()

    @classmethod
    def tearDownClass(cls):
        cls.rig.stop()

    def scrape(self):
        status, headers, data = self.rig.request("GET", "/metrics")
        self.assertEqual((status, headers["content-type"]),
                         (200, "text/plain; version=0.0.4; charset=utf-8"))
        return Scrape(data.decode())

    def test_counters_equal_what_a_client_counted(self):
        before = self.scrape()
        mine = {"prompt": 0, "generated": 0, "reasoning": 0, "streams": 0, "calls": 0}

        def count(usage):
            mine["prompt"] += usage["prompt_tokens"]
            mine["generated"] += usage["completion_tokens"]
            mine["reasoning"] += usage["completion_tokens_details"]["reasoning_tokens"]

        for i in range(6):
            body = {"messages": [{"role": "user", "content": "What is %d + 4?" % i}],
                    "temperature": 0, "max_tokens": 60, "reasoning_effort": ("none", "high")[i % 2]}
            status, answer = self.rig.post(CHAT, body)
            self.assertEqual(status, 200, answer)
            count(answer["usage"])
        for i in range(2):
            body = dict(HELLO, stream=True, stream_options={"include_usage": True}, max_tokens=20)
            for _, text in self.rig.stream(CHAT, body):
                if text != "[DONE]" and json.loads(text).get("usage"):
                    count(json.loads(text)["usage"])
            mine["streams"] += 1
        # The other dialects: what was generated is what the answer says, never what was allowed; the
        # third one is drawn and ends before its limit.
        others = {"generated": 0, "reasoning": 0}
        status, answer = self.rig.post("/v1/messages", dict(HELLO, max_tokens=3))
        self.assertEqual(status, 200, answer)
        self.assertEqual([block["type"] for block in answer["content"]], ["thinking"])
        others["generated"] += answer["usage"]["output_tokens"]
        others["reasoning"] += answer["usage"]["output_tokens"]
        status, answer = self.rig.post("/v1/responses", {"input": "Hello", "temperature": 0,
                                                           "max_output_tokens": 3})
        self.assertEqual(status, 200, answer)
        others["generated"] += answer["usage"]["output_tokens"]
        others["reasoning"] += answer["usage"]["output_tokens_details"]["reasoning_tokens"]
        status, answer = self.rig.post("/v1/completions", {"prompt": "one two", "max_tokens": 3,
                                                           "seed": ENDS_AT_ONCE})
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["choices"][0]["finish_reason"], "stop")
        others["generated"] += answer["usage"]["completion_tokens"]
        for bad in (b"{", b'{"messages":[]}', b'{"messages":"x"}'):
            self.assertEqual(self.rig.request("POST", CHAT, bad)[0], 400)
        long = {"messages": [{"role": "user", "content": "one two three " * 40000}]}
        self.assertEqual(self.rig.post(CHAT, long)[0], 400)
        after = self.scrape()

        def grew(name, **labels):
            return after.sum(name, **labels) - before.sum(name, **labels)

        self.assertEqual(grew("ds4_requests_total", api="chat", outcome="completed"), 8)
        self.assertEqual(grew("ds4_requests_total", api="chat", outcome="refused"), 4)
        self.assertEqual(grew("ds4_requests_started_total", api="chat"), 12)
        for api in ("messages", "responses", "completions"):
            self.assertEqual(grew("ds4_requests_total", api=api, outcome="completed"), 1)
        self.assertEqual(grew("ds4_admit_rejects_total", reason="invalid"), 3)
        self.assertEqual(grew("ds4_admit_rejects_total", reason="context"), 1)
        self.assertEqual(grew("ds4_http_requests_total", endpoint="chat", code="200"), 8)
        self.assertEqual(grew("ds4_http_requests_total", endpoint="chat", code="400"), 4)
        self.assertEqual(grew("ds4_generated_tokens_total"),
                         mine["generated"] + others["generated"])
        self.assertEqual(grew("ds4_generated_tokens_total") - grew("ds4_generated_tokens_total",
                                                                   kind="content"),
                         mine["reasoning"] + others["reasoning"])
        self.assertEqual(grew("ds4_prompt_tokens_sum", api="chat"), mine["prompt"])
        self.assertEqual(grew("ds4_prompt_tokens_total"), grew("ds4_prompt_tokens_sum"))
        self.assertEqual(grew("ds4_effort_requests_total", requested="none", applied="off"), 3)
        self.assertEqual(grew("ds4_ttft_seconds_count", api="chat"), 8)
        # Every prompt of a conversation was rendered and tokenised, the one that was too long as well.
        self.assertEqual(grew("ds4_render_seconds_count"), 11)
        self.assertEqual(grew("ds4_tokenize_seconds_count"), 11)
        self.assertEqual(grew("ds4_e2e_seconds_count"), 11)
        # The same under vLLM's names.
        self.assertEqual(grew("vllm:generation_tokens_total"), grew("ds4_generated_tokens_total"))
        self.assertEqual(grew("vllm:prompt_tokens_total"), grew("ds4_prompt_tokens_total"))
        self.assertEqual(grew("vllm:request_success_total"), 11)
        self.assertEqual(grew("vllm:time_to_first_token_seconds_count"), 11)
        self.assertEqual(after.sum("vllm:num_requests_running"), 0)
        self.assertTrue(after.has("vllm:cache_config_info", block_size="256", engine="0"))

    def test_every_stage_tells_what_it_does(self):
        self.assertEqual(self.rig.post(CHAT, dict(HELLO, max_tokens=40, min_tokens=40))[0], 200)

        # A heartbeat of each stage and a sample; the idle rig's probe may fall between two heartbeats.
        def settled():
            now = self.scrape()
            sent, got = (now.sum("ds4_stage_bytes_total", stage=stage, link=link)
                         for stage, link in (("0", "next"), ("1", "prev")))
            bubble = now.sum("ds4_pipeline_bubble_ratio")
            return now if 0 < sent == got and 0 < bubble < 1 else None

        now = e2e.wait_until(settled, lambda: self.rig.request("GET", "/metrics")[2].decode())
        for stage in ("0", "1"):
            for kind in ("prefill", "decode"):
                self.assertGreater(now.sum("ds4_stage_step_seconds_count", stage=stage, kind=kind), 0)
            self.assertEqual(now.sum("ds4_stage_step_seconds_count", stage=stage),
                             now.sum("ds4_stage_steps_total", stage=stage))
            busy = now.sum("ds4_stage_busy_seconds_total", stage=stage)
            self.assertAlmostEqual(now.sum("ds4_stage_step_seconds_sum", stage=stage), busy,
                                   delta=0.05 + busy / 10)
            for name in ("ds4_worker_cpu_seconds_total", "ds4_stage_memory_bytes"):
                self.assertGreater(now.sum(name, stage=stage), 0, name)
            self.assertAlmostEqual(now.sum("ds4_worker_start_time_seconds", stage=stage), time.time(),
                                   delta=600)
            self.assertTrue(now.has("ds4_stage_wait_seconds_total", stage=stage, on="send"))
            self.assertTrue(now.has("ds4_worker_info", stage=stage, backend="cpu"))

    def test_refusals_while_nothing_is_ready_are_counted(self):
        before = self.scrape()
        self.assertEqual(self.rig.request("POST", "/admin/drain", b"")[0], 202)
        try:
            for _ in range(5):
                self.assertEqual(self.rig.request("POST", CHAT, HELLO)[0], 503)
        finally:
            self.assertEqual(self.rig.request("POST", "/admin/undrain", b"")[0], 202)
        after = self.scrape()
        for name, labels, n in (("ds4_admit_rejects_total", {"reason": "draining"}, 5),
                                ("ds4_requests_total", {"outcome": "refused"}, 5),
                                ("ds4_requests_started_total", {}, 5)):
            self.assertEqual(after.sum(name, **labels) - before.sum(name, **labels), n)

    def test_ten_thousand_mixed_requests_leave_few_series(self):
        """Random members, paths, methods, headers: every label comes from a list."""
        rng = random.Random(7)

        def word():
            return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz_") for _ in range(rng.randint(1, 40)))

        paths = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models", "/tokenize",
                 "/health", "/livez", "/version", "/v1/stats", "/v1/embeddings",
                 "/v1/messages/count_tokens"]
        connection = http.client.HTTPConnection("127.0.0.1", self.rig.port, timeout=60)
        before = self.scrape()
        begin = time.monotonic()
        for i in range(MIXED):
            path = rng.choice(paths) if i % 5 else "/" + word()
            method = rng.choice(("POST", "POST", "GET", "DELETE", "PUT", "OPTIONS"))
            body = json.dumps({word(): i, word(): word(), "text": word()})
            if i % RUN_EVERY == 0:
                # One that runs, with members nobody knows.
                path, method = CHAT, "POST"
                body = json.dumps(dict(HELLO, max_tokens=1, user="me", **{word(): 1, word(): [1]}))
            connection.request(method, path, body, {"content-type": "application/json",
                                                    "x-request-id": word()})
            response = connection.getresponse()
            response.read()
            if response.will_close:
                connection.close()
        spent = time.monotonic() - begin
        connection.close()
        after = self.scrape()
        print("%d series before, %d after %d mixed requests in %.1f s" %
              (len(before.samples), len(after.samples), MIXED, spent))
        self.assertLess(len(after.samples), MAX_SERIES)
        self.assertEqual(after.sum("ds4_metrics_unknown_labels_total"), 0)
        self.assertEqual(after.sum("ds4_param_ignored_total", field="user"), MIXED / RUN_EVERY)
        self.assertGreaterEqual(after.sum("ds4_request_unknown_fields_total", field="other"),
                                2 * MIXED / RUN_EVERY)
        answered = sum(after.sum(n) - before.sum(n) for n in ("ds4_http_requests_total",))
        self.assertEqual(answered, MIXED + 1)  # and the first scrape


if __name__ == "__main__":
    e2e.main()
