#!/usr/bin/env python3
"""Raw completions: forms of the prompt, echo, log-probabilities, choices, stops, fill-in-the-middle."""

import json
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
from dialects import Recorded, recorded  # noqa: E402

GOLDEN = os.path.join(e2e.ROOT, "tests/data/model/ds4-tiny-greedy.json")
EOS = "<｜end▁of▁sentence｜>"
PATH = "/v1/completions"


class Completions(Recorded, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with open(GOLDEN, encoding="utf-8") as file:
            cls.golden = json.load(file)

    def ask(self, **body):
        body.setdefault("temperature", 0)
        body.setdefault("max_tokens", 8)
        status, answer = self.rig.post(PATH, body)
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["object"], "text_completion")
        return answer

    def stream(self, **body):
        body.setdefault("temperature", 0)
        body.setdefault("max_tokens", 8)
        frames = self.frames(PATH, dict(body, stream=True))
        self.assertEqual(frames[-1], (None, "[DONE]"))
        self.assertEqual({event for event, _ in frames}, {None})
        return [data for _, data in frames[:-1]]

    def test_recorded_request_is_answered(self):
        for name, path, request in recorded("openai-sdk-6-completions.json"):
            status, answer = self.rig.post(path, dict(request, min_tokens=3))
            self.assertEqual(status, 200, (name, answer))
            lists = answer["choices"][0]["logprobs"]
            self.assertEqual(len({len(lists[key]) for key in lists}), 1)
            self.assertEqual(answer["usage"]["completion_tokens"], 3)

    def test_golden_prompts_continue_as_golden_outputs_markup_included(self):
        for case in self.golden:
            n = len(case["output_ids"])
            for prompt in (case["prompt"], case["prompt_ids"]):
                with self.subTest(prompt=str(prompt)[:40]):
                    answer = self.ask(prompt=prompt, max_tokens=n)
                    self.assertEqual(answer["choices"][0]["text"], case["output"].replace(EOS, ""))
                    self.assertEqual(answer["usage"]["prompt_tokens"], len(case["prompt_ids"]))
                    self.assertEqual(answer["usage"]["completion_tokens"], n)
                    self.assertEqual(answer["choices"][0]["finish_reason"],
                                     "stop" if case["output"].endswith(EOS) else "length")

    def test_lists_of_prompts_are_choice_groups(self):
        first, second = self.golden[0], self.golden[1]
        one = [self.ask(prompt=case["prompt"])["choices"][0]["text"] for case in (first, second)]
        for prompts in ([first["prompt"], second["prompt"]],
                        [first["prompt_ids"], second["prompt_ids"]]):
            answer = self.ask(prompt=prompts, n=2)
            choices = sorted(answer["choices"], key=lambda c: c["index"])
            self.assertEqual([c["index"] for c in choices], [0, 1, 2, 3])
            self.assertEqual([c["text"] for c in choices], [one[0], one[0], one[1], one[1]])
            self.assertEqual(answer["usage"]["prompt_tokens"],
                             len(first["prompt_ids"]) + len(second["prompt_ids"]))
            chunks = self.stream(prompt=prompts, n=2)
            texts = [""] * 4
            for chunk in chunks:
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
            self.assertEqual(texts, [c["text"] for c in choices])

    def test_stream_says_what_the_whole_answer_says(self):
        case = self.golden[1]
        body = {"prompt": case["prompt"], "max_tokens": 40, "logprobs": 2, "echo": False}
        whole = self.ask(**body)
        chunks = self.stream(stream_options={"include_usage": True}, **body)
        self.assertEqual("".join(c["choices"][0]["text"] for c in chunks if c["choices"]),
                         whole["choices"][0]["text"])
        lists = {key: [x for c in chunks if c["choices"] for x in c["choices"][0]["logprobs"][key]]
                 for key in whole["choices"][0]["logprobs"]}
        self.assertEqual(lists, whole["choices"][0]["logprobs"])
        self.assertEqual(chunks[-1]["choices"], [])
        self.assertEqual(chunks[-1]["usage"]["total_tokens"], whole["usage"]["total_tokens"])
        finish = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
        self.assertEqual([f for f in finish if f], [whole["choices"][0]["finish_reason"]])

    def check_lists(self, choice, n_top):
        lists, text = choice["logprobs"], choice["text"]
        for token, offset in zip(lists["tokens"], lists["text_offset"]):
            if token != "<｜begin▁of▁sentence｜>":
                self.assertEqual(text[offset:offset + len(token)], token)
        for value, top in zip(lists["token_logprobs"], lists["top_logprobs"]):
            if value is not None:
                self.assertLessEqual(value, 0)
                self.assertIn(len(top), (max(n_top, 1), n_top + 1))
        self.assertEqual("".join(t for t in lists["tokens"] if not t.startswith("<｜begin")), text)

    def test_logprobs_are_lists_that_agree_with_the_text(self):
        for n_top in (0, 1, 5):
            choice = self.ask(prompt=self.golden[0]["prompt"], max_tokens=20,
                              logprobs=n_top)["choices"][0]
            self.check_lists(choice, n_top)
            for token, value, top in zip(*(choice["logprobs"][k] for k in (
                    "tokens", "token_logprobs", "top_logprobs"))):
                self.assertEqual(max(top.values()), value, token)  # greedy

    def test_echo_puts_the_prompt_in_front(self):
        case = self.golden[0]
        plain = self.ask(prompt=case["prompt"])["choices"][0]["text"]
        self.assertEqual(self.ask(prompt=case["prompt"], echo=True)["choices"][0]["text"],
                         case["prompt"] + plain)
        chunks = self.stream(prompt=case["prompt"], echo=True)
        self.assertEqual("".join(c["choices"][0]["text"] for c in chunks), case["prompt"] + plain)
        by_ids = self.ask(prompt=case["prompt_ids"], echo=True)["choices"][0]["text"]
        self.assertEqual(by_ids, case["prompt"].replace("<｜begin▁of▁sentence｜>", "") + plain)

    def test_echo_with_logprobs_scores_the_prompt(self):
        text = "1, 2, 3, 4,"
        free = self.ask(prompt=text, max_tokens=4, logprobs=2)
        self.assertEqual(free["choices"][0]["finish_reason"], "length")
        scored = self.ask(prompt=text + free["choices"][0]["text"], max_tokens=0, logprobs=2,
                          echo=True)
        choice = scored["choices"][0]
        self.assertEqual(choice["text"], text + free["choices"][0]["text"])
        self.check_lists(choice, 2)
        self.assertIsNone(choice["logprobs"]["token_logprobs"][0])
        n = free["usage"]["completion_tokens"]
        self.assertEqual(choice["logprobs"]["token_logprobs"][-n:],
                         free["choices"][0]["logprobs"]["token_logprobs"])
        self.assertEqual(scored["usage"]["completion_tokens"], 0)
        self.assertEqual(scored["usage"]["prompt_tokens"], free["usage"]["total_tokens"])
        more = self.ask(prompt=text, max_tokens=4, logprobs=2, echo=True)
        self.assertEqual(more["choices"][0]["text"], choice["text"])
        self.assertEqual(more["choices"][0]["logprobs"], choice["logprobs"])
        self.assertEqual(more["usage"], dict(free["usage"], **{k: more["usage"][k] for k in (
            "prompt_tokens_details", "prompt_cache_hit_tokens", "prompt_cache_miss_tokens")}))

    def test_bos_is_added_once(self):
        bos = "<｜begin▁of▁sentence｜>"
        answers = [self.ask(prompt=text) for text in ("Hello", bos + "Hello")]
        self.assertEqual(answers[0]["choices"], answers[1]["choices"])
        self.assertEqual(answers[0]["usage"]["prompt_tokens"], answers[1]["usage"]["prompt_tokens"])
        plain = self.ask(prompt="<｜User｜>", parse_special=False)["usage"]["prompt_tokens"]
        self.assertGreater(plain, self.ask(prompt="<｜User｜>")["usage"]["prompt_tokens"])

    def test_suffix_is_filled_in_the_order_of_the_model(self):
        middle = self.ask(prompt="def f(", suffix="return x")
        text = ("<｜fim▁begin｜>def f(<｜fim▁hole｜>return x<｜fim▁end｜>")
        by_hand = self.ask(prompt=text)
        self.assertEqual(middle["choices"], by_hand["choices"])
        self.assertEqual(middle["usage"]["prompt_tokens"], by_hand["usage"]["prompt_tokens"])

    def test_stop_string_cuts_the_text(self):
        case = next(c for c in self.golden if "Count to 12" in c["prompt"])
        answer = self.ask(prompt=case["prompt"], max_tokens=40, stop=[", 7"], logprobs=0)
        choice = answer["choices"][0]
        self.assertEqual((choice["text"], choice["finish_reason"]), ("1, 2, 3, 4, 5, 6", "stop"))
        self.check_lists(choice, 0)

    def test_max_tokens_is_sixteen_when_absent(self):
        status, answer = self.rig.post(PATH, {"prompt": "1, 2, 3, 4,", "temperature": 0,
                                              "ignore_eos": True})
        self.assertEqual((status, answer["usage"]["completion_tokens"]), (200, 16))

    def test_best_of_no_more_than_n_is_no_choice_at_all(self):
        status, answer = self.rig.post(PATH, {"prompt": "a", "n": 2, "best_of": 2, "max_tokens": 1})
        self.assertEqual((status, len(answer["choices"])), (200, 2), answer)

    def test_an_included_stop_string_ends_the_text(self):
        ask = {"prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 16}
        text = self.rig.post(PATH, ask)[1]["choices"][0]["text"]
        stop = text.strip()[1]
        whole = self.rig.post(PATH, dict(ask, stop=stop, include_stop_str_in_output=True))[1]["choices"][0]
        self.assertEqual((whole["text"], whole["finish_reason"]), (text[:text.index(stop) + 1], "stop"))

    def test_what_is_not_offered_is_refused(self):
        for more in ({}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [1, "x"]}, {"prompt": 5},
                     {"prompt": [999999]}, {"prompt": [-1]}, {"prompt": ["a"] * 17},
                     {"prompt": "a", "max_tokens": 0}, {"prompt": "a", "logprobs": 21},
                     {"prompt": "a", "logprobs": "1"}, {"prompt": "a", "best_of": 3},
                     {"prompt": [1, 2], "suffix": "x"}, {"prompt": "a", "n": 0},
                     {"prompt": ["a"] * 4, "n": 5}, {"prompt": "a", "echo": 1},
                     {"prompt": "a " * 200, "echo": True, "logprobs": 0},
                     {"prompt": "a", "response_format": {"type": "json_object"}},
                     {"prompt": "a", "grammar": "x"}, {"prompt": "a", "cache_prompt": "no"}):
            with self.subTest(more=str(more)[:60]):
                status, answer = self.rig.post(PATH, more)
                self.assertEqual(status, 400, answer)
                self.assertEqual(answer["error"]["type"], "invalid_request_error")


if __name__ == "__main__":
    e2e.main()
