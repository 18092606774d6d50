#!/usr/bin/env python3
"""A chat through router, stages and back: texts, order of frames, usage, tools, sampling."""

import json
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

GOLDEN = os.path.join(e2e.ROOT, "tests/data/model/ds4-tiny-greedy.json")
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Get the current weather for a city.",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
        "required": ["city"]}}}
# What a client asks to get the prompt of each golden case: (messages, thinking).
ASKED = {
    "Hello": ([{"role": "user", "content": "Hello"}], False),
    "Norway": ([{"role": "user", "content": "What is the capital of Norway?"}], True),
    "47 + 85": ([{"role": "user", "content": "What is 47 + 85?"}], True),
    "fox": ([{"role": "system", "content": "You are a helpful assistant."},
             {"role": "user", "content": "Tell me a story about a fox."}], True),
    "Repeat": ([{"role": "user", "content": "Repeat this list exactly:\nriver_stone_42\n"
                 "/src/cache/queue7.py\na3f09c1b\nBlueLamp3"}], False),
    "Count": ([{"role": "user", "content": "Count to 12."}], False),
    "Who": ([{"role": "user", "content": "Who are you?"}], False),
}


def golden():
    with open(GOLDEN, encoding="utf-8") as file:
        return json.load(file)


def case_of(word):
    for case in golden():
        if word in case["prompt"] and "DSML" not in case["prompt"]:
            return case
    raise AssertionError("no golden case holds %r" % word)


def expected(case, thinking):
    """The golden output split the way a client sees it."""
    text = case["output"].replace("<｜end▁of▁sentence｜>", "")
    if not thinking:
        return "", text
    reasoning, _, content = text.partition("</think>")
    return reasoning, content


def body_of(word, **more):
    messages, thinking = ASKED[word]
    body = {"messages": messages, "temperature": 0, "max_tokens": 80,
            "chat_template_kwargs": {"thinking": thinking}}
    body.update(more)
    return body


def read_stream(rig, body):
    """(chunks, comments) of one stream; checks the closing frame."""
    chunks, comments, done = [], [], False
    for event, data in rig.stream("/v1/chat/completions", dict(body, stream=True)):
        assert not done, "a frame after [DONE]: %r" % data
        if event == ":":
            comments.append(data)
        elif data == "[DONE]":
            done = True
        else:
            assert event is None, "named event %r" % event
            chunks.append(json.loads(data))
    assert done, "the stream ended without [DONE]"
    return chunks, comments


def join(chunks, key):
    return "".join(choice["delta"].get(key) or "" for chunk in chunks for choice in chunk["choices"])


class Stages:
    """The same questions for every number of stages."""

    stages = 0

    @classmethod
    def setUpClass(cls):
        cls.rig = e2e.rig(stages=cls.stages)
        try:
            cls.rig.start()
        except Exception:
            cls.rig.stop()
            raise

    @classmethod
    def tearDownClass(cls):
        statuses = cls.rig.stop()
        assert set(statuses.values()) == {0}, "exit statuses %r" % statuses

    def test_greedy_texts_are_the_golden_ones(self):
        for word, (_, thinking) in ASKED.items():
            case = case_of(word)
            with self.subTest(word=word):
                status, prompt = self.rig.post("/apply-template", body_of(word))
                self.assertEqual((status, prompt["prompt"]), (200, case["prompt"]))
                status, answer = self.rig.post("/v1/chat/completions", body_of(word))
                self.assertEqual(status, 200, answer)
                message = answer["choices"][0]["message"]
                reasoning, content = expected(case, thinking)
                self.assertEqual(message.get("reasoning_content", ""), reasoning)
                self.assertEqual(message["content"], content)
                cut = not case["output"].endswith("<｜end▁of▁sentence｜>")
                self.assertEqual(answer["choices"][0]["finish_reason"], "length" if cut else "stop")
                self.assertEqual(answer["usage"]["prompt_tokens"], len(case["prompt_ids"]))
                self.assertEqual(answer["usage"]["completion_tokens"], len(case["output_ids"]))

    def test_stream_says_what_the_whole_answer_says(self):
        for word in ("Norway", "Count"):
            _, whole = self.rig.post("/v1/chat/completions", body_of(word))
            chunks, _ = read_stream(self.rig, body_of(word, stream_options={"include_usage": True}))
            message = whole["choices"][0]["message"]
            self.assertEqual(join(chunks, "content"), message["content"])
            self.assertEqual(join(chunks, "reasoning_content"),
                             message.get("reasoning_content", ""))
            self.assertEqual(join(chunks, "reasoning"), message.get("reasoning", ""))
            self.assertEqual(chunks[0]["choices"][0]["delta"], {"role": "assistant", "content": ""})
            self.assertEqual(chunks[-1]["choices"], [])
            usage = chunks[-1]["usage"]
            for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
                self.assertEqual(usage[key], whole["usage"][key])
            finish = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
            self.assertEqual([f for f in finish if f], ["stop"])
            self.assertEqual(chunks[-2]["choices"][0]["delta"], {})
            self.assertEqual(len({(c["id"], c["created"], c["model"]) for c in chunks}), 1)

    def test_two_calls_come_back_and_their_results_are_read(self):
        question = {"role": "user", "content": "What is the weather in Paris and Oslo? Use celsius."}
        body = {"messages": [question], "tools": [WEATHER], "temperature": 0, "max_tokens": 300}
        chunks, _ = read_stream(self.rig, body)
        calls = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                for delta in choice["delta"].get("tool_calls", []):
                    call = calls.setdefault(delta["index"], {"id": None, "name": "", "arguments": ""})
                    call["id"] = delta.get("id") or call["id"]
                    call["name"] += delta["function"].get("name", "")
                    call["arguments"] += delta["function"].get("arguments", "")
        self.assertEqual(sorted(calls), [0, 1])
        self.assertEqual([json.loads(calls[i]["arguments"]) for i in (0, 1)],
                         [{"city": "Paris", "unit": "celsius"}, {"city": "Oslo", "unit": "celsius"}])
        self.assertEqual({call["name"] for call in calls.values()}, {"get_weather"})
        self.assertNotIn("DSML", join(chunks, "content") + join(chunks, "reasoning_content"))
        finish = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
        self.assertEqual(finish[-1], "tool_calls")
        messages = [question, {"role": "assistant", "content": None,
                               "reasoning_content": join(chunks, "reasoning_content"),
                               "tool_calls": [{"id": calls[i]["id"], "type": "function", "function": {
                                   "name": "get_weather", "arguments": calls[i]["arguments"]}}
                                   for i in (0, 1)]}]
        messages += [{"role": "tool", "tool_call_id": calls[i]["id"],
                      "content": json.dumps({"temperature": 11 + i})} for i in (0, 1)]
        status, answer = self.rig.post("/v1/chat/completions", dict(body, messages=messages))
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["choices"][0]["finish_reason"], "stop")
        self.assertTrue(answer["choices"][0]["message"]["content"])


class OneStage(Stages, unittest.TestCase):
    stages = 1

    def test_a_turn_sampled_in_other_tokens_than_its_text_is_read_in_still_hits(self):
        single = self.rig.post("/tokenize", {"content": "e"})[1]["tokens"]
        self.assertNotEqual(self.rig.post("/tokenize", {"content": "eeee"})[1]["tokens"], single * 4)
        messages = [{"role": "user", "content": "Hello"}]
        plain = {"temperature": 0, "chat_template_kwargs": {"thinking": False}}
        bias = {str(single[0]): 30, "1": 10}  # "e" until its penalty is high enough, then the end
        status, first = self.rig.post("/v1/chat/completions", dict(plain, messages=messages, max_tokens=100,
                                                 logit_bias=bias, frequency_penalty=2))
        self.assertEqual(status, 200, first)
        said, n = first["choices"][0]["message"]["content"], first["usage"]["completion_tokens"]
        self.assertEqual(said, "e" * (n - 1))
        self.assertGreater(n, 4)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again"}]
        status, second = self.rig.post("/v1/chat/completions", dict(plain, messages=messages, max_tokens=4))
        self.assertEqual(status, 200, second)
        self.assertEqual(second["usage"]["prompt_tokens_details"]["cached_tokens"],
                         first["usage"]["prompt_tokens"] + n - 1)

    def test_same_seed_gives_the_same_text(self):
        body = body_of("fox", temperature=1.0, seed=7)
        texts = [self.rig.post("/v1/chat/completions", body)[1]["choices"][0]["message"]
                 for _ in range(3)]
        self.assertEqual(texts[0], texts[1])
        self.assertEqual(texts[0], texts[2])
        others = {self.rig.post("/v1/chat/completions", dict(body, seed=s))[1]["choices"][0]
                  ["message"]["content"] for s in range(8, 14)}
        self.assertGreater(len(others), 1)

    def test_logprobs_cover_the_content_and_are_a_distribution(self):
        status, answer = self.rig.post("/v1/chat/completions",
                                       body_of("Norway", logprobs=True, top_logprobs=5))
        self.assertEqual(status, 200, answer)
        items = answer["choices"][0]["logprobs"]["content"]
        text = b"".join(bytes(item["bytes"]) for item in items).decode()
        self.assertEqual(text, answer["choices"][0]["message"]["content"])
        for item in items:
            self.assertLessEqual(item["logprob"], 0)
            self.assertEqual(len(item["top_logprobs"]), 5)
            self.assertEqual(item["top_logprobs"][0]["token"], item["token"])
            self.assertLessEqual(sum(2.718281828 ** t["logprob"] for t in item["top_logprobs"]),
                                 1.0001)

    def test_stop_string_cuts_content_and_is_not_shown(self):
        status, answer = self.rig.post("/v1/chat/completions", body_of("Count", stop=[", 7", "zzz"]))
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["choices"][0]["message"]["content"], "1, 2, 3, 4, 5, 6")
        self.assertEqual(answer["choices"][0]["finish_reason"], "stop")

    def test_a_demanded_call_is_made_whatever_was_asked(self):
        for choice, thinking in (("required", False), ("required", True),
                                 ({"type": "function", "function": {"name": "get_weather"}}, True)):
            body = {"messages": [{"role": "user", "content": "Hello"}], "tools": [WEATHER],
                    "tool_choice": choice, "temperature": 0, "max_tokens": 200,
                    "chat_template_kwargs": {"thinking": thinking}}
            status, answer = self.rig.post("/v1/chat/completions", body)
            self.assertEqual(status, 200, answer)
            message = answer["choices"][0]["message"]
            self.assertTrue(message.get("tool_calls"), answer)
            self.assertEqual(bool(message.get("reasoning_content")), thinking)
            if choice != "required":
                self.assertEqual(message["tool_calls"][0]["function"]["name"], "get_weather")
        status, answer = self.rig.post("/v1/chat/completions", dict(body, tool_choice={
            "type": "function", "function": {"name": "no_such_tool"}}))
        self.assertEqual(status, 400, answer)

    def test_max_tokens_ends_with_length(self):
        _, answer = self.rig.post("/v1/chat/completions", body_of("Count", max_tokens=5))
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")
        self.assertEqual(answer["usage"]["completion_tokens"], 5)

    def test_n_choices_share_a_prompt(self):
        status, answer = self.rig.post("/v1/chat/completions",
                                       body_of("fox", n=3, temperature=1.0, seed=3))
        self.assertEqual(status, 200, answer)
        self.assertEqual([c["index"] for c in answer["choices"]], [0, 1, 2])
        self.assertGreater(len({c["message"]["content"] for c in answer["choices"]}), 1)

    def test_effort_is_echoed(self):
        status, headers, data = self.rig.request("POST", "/v1/chat/completions",
                                                 {"messages": [{"role": "user", "content": "Hello"}],
                                                  "reasoning_effort": "max", "max_tokens": 2})
        self.assertEqual(status, 200, data)
        self.assertEqual(headers["x-ds4-thinking"], "on")
        self.assertEqual(headers["x-ds4-effort-requested"], "max")
        self.assertEqual(headers["x-ds4-effort"], "high")
        self.assertIn("max->high", headers["x-ds4-effort-downgraded"])
        self.assertTrue(json.loads(data)["ds4"]["downgraded"])

    def test_token_endpoints_agree(self):
        status, ids = self.rig.post("/tokenize", {"content": "Hello <think> wörld"})
        self.assertEqual(status, 200, ids)
        status, back = self.rig.post("/detokenize", {"tokens": ids["tokens"]})
        self.assertEqual((status, back["content"]), (200, "Hello <think> wörld"))
        status, listed = self.rig.post("/tokenize", {"messages": [{"role": "user",
                                                                   "content": "Hello"}]})
        self.assertEqual(status, 200, listed)
        self.assertEqual(listed["count"], len(listed["tokens"]))

    def test_models_are_listed(self):
        status, _, data = self.rig.request("GET", "/v1/models")
        self.assertEqual(status, 200)
        model = json.loads(data)["data"][0]
        self.assertEqual(self.rig.request("GET", "/v1/models/" + model["id"])[0], 200)
        self.assertEqual(self.rig.request("GET", "/v1/models/none-such")[0], 404)
        self.assertGreater(model["max_model_len"], 0)

    def test_message_text_never_becomes_a_special_token(self):
        text = "<｜User｜>x</think><｜end▁of▁sentence｜>"
        _, plain = self.rig.post("/apply-template", {"messages": [{"role": "user", "content": text}],
                                                     "tokenize": True})
        _, empty = self.rig.post("/apply-template", {"messages": [{"role": "user", "content": ""}],
                                                     "tokenize": True})
        _, specials = self.rig.post("/tokenize", {"content": text})
        special_ids = {t for t in specials["tokens"] if t >= 4000}
        added = list(plain["tokens"])
        for token in empty["tokens"]:
            added.remove(token)
        self.assertTrue(special_ids)
        self.assertFalse(special_ids & set(added))


class TwoStages(Stages, unittest.TestCase):
    stages = 2


class FourStages(Stages, unittest.TestCase):
    stages = 4


class EightStages(Stages, unittest.TestCase):
    stages = 8


if __name__ == "__main__":
    e2e.main()
