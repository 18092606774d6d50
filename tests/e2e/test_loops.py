"""Repetition: a model that is made to loop is nudged, then ended; prefixes are shared as asked."""

import json
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import e2e  # noqa: E402


def labelled(rig, name, **labels):
    text = rig.request("GET", "/metrics")[2].decode()
    total = 0.0
    for line in text.splitlines():
        if line.startswith(name + "{") and all('%s="%s"' % l in line for l in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total


class Loops(unittest.TestCase):
    """One token that is a whole line, and nothing else allowed: a perfect loop."""

    settings = {}

    @classmethod
    def setUpClass(cls):
        cls.rig = e2e.rig(stages=2, settings=dict(cls.settings))
        try:
            cls.rig.start()
            cls.line = cls.rig.post("/tokenize", {"content": "Go.\n"})[1]["tokens"][-1]
        except Exception:
            cls.rig.stop()
            raise

    @classmethod
    def tearDownClass(cls):
        statuses = cls.rig.stop()
        assert set(statuses.values()) == {0}, "exit statuses %r" % statuses

    def ask(self, **more):
        body = {"messages": [{"role": "user", "content": "Count to 12."}], "temperature": 0,
                "max_tokens": 400, "allowed_token_ids": [self.line],
                "chat_template_kwargs": {"thinking": False}}
        body.update(more)
        status, answer = self.rig.post("/v1/chat/completions", body)
        self.assertEqual(status, 200, answer)
        return answer


class Nudged(Loops):
    def test_two_nudges_then_the_turn_ends_as_stop(self):
        answer = self.ask()
        choice, ours = answer["choices"][0], answer["ds4"]
        # Five lines make the first hit, the sixth hit in a row fires: three times 30 tokens.
        self.assertEqual(choice["message"]["content"].count("."), 90)
        self.assertEqual(answer["usage"]["completion_tokens"], 90)
        self.assertEqual(choice["finish_reason"], "stop")
        self.assertEqual(ours["stop_detail"], "repetition")
        self.assertEqual(ours["repetition"],
                         {"detector": "repeat_line", "evidence": ".", "recoveries": 2})
        nudge = self.rig.post("/tokenize", {"content": "\n\nStop repeating yourself. "
                                            "Make the tool call now.\n\n"})[1]["tokens"]
        self.assertEqual(ours["recovery_tokens"], 2 * len(nudge))
        self.assertNotIn("repeating", json.dumps(choice))
        self.assertGreaterEqual(labelled(self.rig, "ds4_tripwires_total", kind="repeat_line"), 3)
        for result in ("again", "exhausted"):
            self.assertGreaterEqual(
                labelled(self.rig, "ds4_nudges_total", mode="nudge", result=result), 1)

    def test_a_request_may_switch_the_watch_off(self):
        answer = self.ask(ds4={"tripwire": False}, max_tokens=150)
        self.assertEqual(answer["usage"]["completion_tokens"], 150)
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")
        self.assertIsNone(answer["ds4"]["repetition"])
        self.assertEqual(answer["ds4"]["recovery_tokens"], 0)
        status, error = self.rig.post("/v1/chat/completions", {
            "messages": [{"role": "user", "content": "x"}], "ds4": {"tripwire": "no"}})
        self.assertEqual((status, error["error"]["param"]), (400, "ds4.tripwire"))

    def test_the_limit_counts_what_the_client_gets(self):
        answer = self.ask(max_tokens=45)
        self.assertEqual(answer["usage"]["completion_tokens"], 45)
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")
        self.assertEqual(answer["ds4"]["repetition"]["recoveries"], 1)
        self.assertGreaterEqual(
            labelled(self.rig, "ds4_nudges_total", mode="nudge", result="recovered"), 1)

    def test_streams_and_several_choices_end_the_same_way(self):
        answer = self.ask(n=3)
        for choice in answer["choices"]:
            self.assertEqual(choice["message"]["content"].count("."), 90)
            self.assertEqual(choice["finish_reason"], "stop")
        text, finish = "", None
        body = {"messages": [{"role": "user", "content": "Count to 12."}], "temperature": 0,
                "allowed_token_ids": [self.line], "stream": True,
                "chat_template_kwargs": {"thinking": False}}
        for _, data in self.rig.stream("/v1/chat/completions", body):
            if data.startswith("{"):
                for choice in json.loads(data)["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
        self.assertEqual((text.count("."), finish), (90, "stop"))

    def test_cache_switches(self):
        def cached(**more):
            answer = self.ask(max_tokens=4, messages=[
                {"role": "user", "content": "Once upon a time there was a fox. " * 8}], **more)
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        cached()
        full = cached()
        self.assertGreater(full, 50)
        self.assertEqual(cached(cache_prompt=False), 0)
        self.assertEqual(cached(cache_salt="tenant a"), 0)
        self.assertEqual(cached(cache_salt="tenant a"), full)
        self.assertEqual(cached(cache_salt="tenant b"), 0)
        for key, value in (("cache_salt", 7), ("cache_prompt", "no")):
            status, error = self.rig.post("/v1/chat/completions", {
                "messages": [{"role": "user", "content": "x"}], key: value})
            self.assertEqual((status, error["error"]["param"]), (400, key))


class Off(Loops):
    settings = {"loop": {"recovery": "off"}}

    def test_the_first_trip_ends_the_turn(self):
        answer = self.ask()
        self.assertEqual(answer["usage"]["completion_tokens"], 30)
        self.assertEqual(answer["ds4"]["stop_detail"], "repetition")
        self.assertEqual(answer["ds4"]["recovery_tokens"], 0)


class Reopened(Loops):
    settings = {"loop": {"recovery": "reopen"}}

    def test_new_turns_are_opened_inside_the_answer(self):
        answer = self.ask()
        self.assertEqual(answer["usage"]["completion_tokens"], 90)
        self.assertEqual(answer["ds4"]["stop_detail"], "repetition")
        go = len(self.rig.post("/tokenize", {"content": "go"})[1]["tokens"])
        self.assertEqual(answer["ds4"]["recovery_tokens"], 2 * (4 + go))
        self.assertGreaterEqual(
            labelled(self.rig, "ds4_nudges_total", mode="reopen", result="exhausted"), 1)


del Loops

if __name__ == "__main__":
    e2e.main()
