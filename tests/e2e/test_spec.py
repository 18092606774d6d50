#!/usr/bin/env python3
"""Drafts over HTTP: what clients are told is what they are told without, and the counters say what happened."""

import json
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
from test_counters import Scrape  # noqa: E402

CHAT = "/v1/chat/completions"
RAW = "/v1/completions"
K = 6
CONTEXT = 1024
LINES = "river_stone_42\n/src/cache/queue7.py\na3f09c1b\nBlueLamp3"
COPY = [{"role": "user", "content": "Repeat this list exactly:\n" + LINES}]
HELLO = [{"role": "user", "content": "Hello"}]


def requests():
    """(name, path, body): greedy and seeded, with all that looks at single tokens."""
    yield "greedy copy", CHAT, {"messages": COPY, "max_tokens": 90, "reasoning_effort": "none"}
    yield "greedy text", CHAT, {"messages": HELLO, "max_tokens": 40}
    yield "log-probabilities", CHAT, {"messages": COPY, "max_tokens": 60, "logprobs": True,
                                      "top_logprobs": 3}
    yield "seeded", RAW, {"prompt": "one two one two one", "max_tokens": 60, "temperature": 0.8,
                          "top_p": 0.9, "seed": 11, "logprobs": 2}
    yield "penalties", RAW, {"prompt": "a b c a b c a b", "max_tokens": 50, "temperature": 0.7,
                             "seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.4,
                             "repetition_penalty": 1.05, "logit_bias": {"300": 3}}
    yield "stop string", CHAT, {"messages": COPY, "max_tokens": 90, "stop": ["queue7"],
                                "reasoning_effort": "none"}
    yield "minimum", CHAT, {"messages": HELLO, "max_tokens": 30, "min_tokens": 25,
                            "reasoning_effort": "none"}
    yield "limit", CHAT, {"messages": COPY, "max_tokens": 17, "reasoning_effort": "none"}


def stripped(answer):
    """What must be equal: no ids, no times, no drafts."""
    answer = json.loads(json.dumps(answer))
    for key in ("id", "created", "system_fingerprint", "timings"):
        answer.pop(key, None)
    answer.get("ds4", {}).pop("spec", None)
    return answer


class Drafts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.plain = {}
        rig = e2e.rig(stages=1)
        rig.start()
        try:
            for name, path, body in requests():
                body.setdefault("temperature", 0)
                body.setdefault("seed", 3)
                status, answer = rig.post(path, body)
                assert status == 200, answer
                cls.plain[name] = answer
        finally:
            rig.stop()
        cls.rig = e2e.rig(stages=2, settings={"spec": {"method": "ngram", "k": K, "min_match": 2},
                                              "model": {"context": CONTEXT}})
        cls.rig.start()

    @classmethod
    def tearDownClass(cls):
        cls.rig.stop()

    def scrape(self):
        return Scrape(self.rig.request("GET", "/metrics")[2].decode())

    def test_answers_are_those_without_drafts(self):
        drafted = 0
        for name, path, body in requests():
            with self.subTest(name):
                body.setdefault("temperature", 0)
                body.setdefault("seed", 3)
                status, answer = self.rig.post(path, body)
                self.assertEqual(status, 200, answer)
                drafted += answer.get("ds4", {}).get("spec", {}).get("draft_tokens", 0)
                want = stripped(self.plain[name])
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                self.assertLess(cached, answer["usage"]["prompt_tokens"])
                for usage in (want["usage"], answer["usage"]):
                    for key in ("prompt_tokens_details", "prompt_cache_hit_tokens",
                                "prompt_cache_miss_tokens"):
                        usage.pop(key, None)
                self.assertEqual(stripped(answer), want)
        self.assertGreater(drafted, 30)

    def test_streams_say_the_same(self):
        body = {"messages": COPY, "max_tokens": 90, "reasoning_effort": "none", "temperature": 0,
                "stream": True, "logprobs": True, "top_logprobs": 1}
        text, tokens = "", []
        for event, data in self.rig.stream(CHAT, body):
            if event == ":" or data == "[DONE]":
                continue
            for choice in json.loads(data)["choices"]:
                text += choice["delta"].get("content") or ""
                tokens += [t["token"] for t in
                           ((choice.get("logprobs") or {}).get("content") or [])]
        want = self.plain["greedy copy"]["choices"][0]["message"]["content"]
        self.assertEqual(text, want)
        self.assertEqual("".join(tokens), want)

    def test_an_edit_behind_accepted_drafts_hits_exactly(self):
        """A conversation that goes on, and is cut back, behind text that drafts brought."""
        first = self.rig.post(CHAT, {"messages": COPY, "max_tokens": 90, "temperature": 0,
                                     "reasoning_effort": "none"})[1]
        said = first["choices"][0]["message"]["content"]
        turn = COPY + [{"role": "assistant", "content": said}]
        for more in ("Hello", "Hello", "Who are you?"):
            body = {"messages": turn + [{"role": "user", "content": more}], "max_tokens": 20,
                    "temperature": 0, "reasoning_effort": "none"}
            warm = self.rig.post(CHAT, body)[1]
            cold = self.rig.post(CHAT, dict(body, cache_prompt=False))[1]
            self.assertEqual(warm["choices"][0]["message"], cold["choices"][0]["message"])
            self.assertEqual(cold["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
            # all of the first turn but, at most, its last token was there
            self.assertGreaterEqual(warm["usage"]["prompt_tokens_details"]["cached_tokens"],
                                    first["usage"]["total_tokens"] - 2)

    def test_counters_equal_what_the_answers_say(self):
        copy = {"messages": COPY, "max_tokens": 90, "temperature": 0, "reasoning_effort": "none"}
        self.rig.post(CHAT, copy)  # steps come back in order: what was posted before it is counted
        before = self.scrape()
        drafted = accepted = generated = 0
        for _ in range(3):
            answer = self.rig.post(CHAT, copy)[1]
            self.assertEqual(answer["ds4"]["stop_detail"], "eos")  # nothing runs ahead of that
            spec = answer["ds4"]["spec"]
            drafted += spec["draft_tokens"]
            accepted += spec["accepted_tokens"]
            generated += answer["usage"]["completion_tokens"]
            details = answer["usage"]["completion_tokens_details"]
            self.assertEqual((details["accepted_prediction_tokens"],
                              details["rejected_prediction_tokens"]), (0, 0))
        after = self.scrape()

        def rise(name, **labels):
            return after.sum(name, **labels) - before.sum(name, **labels)

        self.assertGreater(accepted, generated // 4)
        self.assertEqual(rise("ds4_spec_draft_tokens_total", method="ngram"), drafted)
        self.assertEqual(rise("ds4_spec_accepted_tokens_total", method="ngram"), accepted)
        places = [rise("ds4_spec_accepted_per_pos_total", position=str(i)) for i in range(8)]
        self.assertEqual(sum(places), accepted)
        self.assertEqual(places, sorted(places, reverse=True))
        self.assertEqual(places[K:], [0] * (8 - K))
        drafts = rise("ds4_spec_drafts_total")
        self.assertEqual(rise("ds4_spec_accept_length_count"), drafts)
        self.assertEqual(rise("ds4_spec_accept_length_sum"), drafts + accepted)
        self.assertEqual(rise("vllm:spec_decode_num_drafts_total"), drafts)
        self.assertEqual(rise("vllm:spec_decode_num_draft_tokens_total"), drafted)
        self.assertEqual(rise("vllm:spec_decode_num_accepted_tokens_total"), accepted)
        self.assertEqual(
            [rise("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i))
             for i in range(8)], places)
        self.assertEqual(rise("vllm:generation_tokens_total"), generated)
        self.assertGreater(rise("ds4_steps_total", kind="verify"), 0)

    def test_the_context_ends_as_it_does_without_drafts(self):
        """A period is what the drafter is best at, up to the last position there is."""
        prompt = ([300, 301, 302, 303, 304] * CONTEXT)[:CONTEXT - 30]
        answer = self.rig.post(RAW, {"prompt": prompt, "temperature": 0, "max_tokens": 1000,
                                     "logit_bias": {"1": -100}})[1]
        self.assertEqual(answer["usage"]["total_tokens"], CONTEXT)
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")


if __name__ == "__main__":
    e2e.main()
