"""Tool conversations with clients that forget: the server remembers what it sampled."""

import json
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import e2e  # noqa: E402

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
        "required": ["city"]}}}
CITIES = ["Paris", "Oslo", "Rome", "Berlin", "Madrid", "London", "Lisbon", "Vienna", "Athens", "Bern"]


def counter(rig, name, **labels):
    total = 0.0
    for line in rig.request("GET", "/metrics")[2].decode().splitlines():
        if line.startswith(name + "{") and all('%s="%s"' % l in line for l in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total


def forgetful(message):
    """What a client keeps of an answer: no reasoning, arguments written anew in another order."""
    kept = {"role": "assistant", "content": message["content"] or ""}
    calls = []
    for call in message.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        turned = dict(reversed(list(arguments.items())))
        calls.append({"id": call["id"], "type": "function", "function": {
            "name": call["function"]["name"],
            "arguments": json.dumps(turned, indent=2)}})
    if calls:
        kept["tool_calls"] = calls
    return kept


class Tools(unittest.TestCase):
    settings = {}

    @classmethod
    def setUpClass(cls):
        cls.rig = e2e.rig(stages=2, settings=dict(cls.settings))
        try:
            cls.rig.start()
        except Exception:
            cls.rig.stop()
            raise

    @classmethod
    def tearDownClass(cls):
        statuses = cls.rig.stop()
        assert set(statuses.values()) == {0}, "exit statuses %r" % statuses

    def ask(self, messages, **more):
        body = {"messages": messages, "tools": [WEATHER], "temperature": 0, "max_tokens": 200}
        body.update(more)
        status, answer = self.rig.post("/v1/chat/completions", body)
        self.assertEqual(status, 200, answer)
        usage = answer["usage"]
        return (answer["choices"][0]["message"], usage["prompt_tokens"], usage["completion_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"])

    def first_call(self, city="Paris"):
        messages = [{"role": "user", "content": "What is the weather in %s? Use celsius." % city}]
        message, prompt, completion, _ = self.ask(messages)
        self.assertTrue(message.get("tool_calls"), message)
        self.assertTrue(message.get("reasoning_content"), message)
        return messages, message, prompt + completion

    @staticmethod
    def results(message):
        return [{"role": "tool", "tool_call_id": call["id"], "content": '{"temperature": 11}'}
                for call in message["tool_calls"]]

    def prompt_of(self, messages):
        status, answer = self.rig.post("/apply-template", {"messages": messages, "tools": [WEATHER],
                                                           "tokenize": True})
        self.assertEqual(status, 200, answer)
        return answer["prompt"], answer["tokens"]


class Remembered(Tools):
    def test_ten_turns_with_a_forgetful_client_keep_the_prefix(self):
        messages, turns, seen, n_call = [], [], 0, 0
        for city in CITIES:
            messages.append({"role": "user",
                             "content": "What is the weather in %s? Use celsius." % city})
            message, prompt, completion, cached = self.ask(messages)
            turns.append((bool(message.get("tool_calls")), cached, seen))
            if not message.get("tool_calls"):
                messages.append(forgetful(message))
                seen = 0  # an answer without calls has no id to be remembered by
                continue
            n_call += 1
            seen = prompt + completion
            messages.append(forgetful(message))
            messages += self.results(message)
            message, prompt, completion, cached = self.ask(messages)
            turns.append((True, cached, seen))
            messages.append(forgetful(message))
            if message.get("tool_calls"):
                messages += self.results(message)
                seen = prompt + completion
            else:
                seen = 0
        self.assertGreaterEqual(n_call, 5)
        for _, cached, before in turns:
            self.assertGreaterEqual(cached, before - 2, turns)
        self.assertGreaterEqual(counter(self.rig, "ds4_tool_replay_total", result="exact"), n_call)
        self.assertEqual(counter(self.rig, "ds4_tool_replay_total", result="edited"), 0)
        self.assertGreaterEqual(
            counter(self.rig, "ds4_replay_missing_reasoning_total", api="chat"), n_call)
        self.assertGreaterEqual(counter(self.rig, "ds4_tool_memory_entries"), n_call)
        self.assertGreater(counter(self.rig, "ds4_tool_memory_bytes"), 1000)
        self.assertGreaterEqual(counter(self.rig, "ds4_tool_calls_total", api="chat", result="ok"),
                                n_call)
        self.assertGreaterEqual(counter(self.rig, "ds4_dsml_blocks_total"), n_call)

    def test_the_prompt_holds_the_sampled_reasoning_and_tokens(self):
        messages, message, n_known = self.first_call()
        sent = messages + [forgetful(message)] + self.results(message)
        text, tokens = self.prompt_of(sent)
        self.assertIn(message["reasoning_content"], text)
        before = self.prompt_of(messages)[1]
        self.assertEqual(tokens[:len(before)], before)
        # Nothing but the remembered turn differs from a client that sends everything back.
        whole = dict(message)
        whole.pop("reasoning", None)
        self.assertEqual(tokens, self.prompt_of(messages + [whole] + self.results(message))[1])
        self.assertGreater(len(tokens), n_known)

    def test_what_a_client_edits_is_what_the_model_reads(self):
        messages, message, _ = self.first_call("Oslo")
        edited = forgetful(message)
        edited["tool_calls"][0]["function"]["arguments"] = '{"city": "Bergen"}'
        text, _ = self.prompt_of(messages + [edited] + self.results(message))
        self.assertIn("Bergen", text)
        self.assertIn(message["reasoning_content"], text)
        other = dict(forgetful(message), reasoning_content="I was asked to think otherwise.")
        text, _ = self.prompt_of(messages + [other] + self.results(message))
        self.assertIn("think otherwise", text)
        self.assertNotIn(message["reasoning_content"], text)
        before = counter(self.rig, "ds4_tool_replay_total", result="edited")
        self.ask(messages + [edited] + self.results(message), max_tokens=2)
        self.assertEqual(counter(self.rig, "ds4_tool_replay_total", result="edited"), before + 1)

    def test_foreign_calls_are_rendered_and_results_of_no_call_refused(self):
        call = {"id": "call_elsewhere", "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
        history = [{"role": "user", "content": "Rome?"},
                   {"role": "assistant", "content": None, "tool_calls": [call]},
                   {"role": "tool", "tool_call_id": "call_elsewhere", "content": "21"}]
        before = counter(self.rig, "ds4_tool_replay_total", result="missing")
        self.ask(history, max_tokens=2)
        self.assertEqual(counter(self.rig, "ds4_tool_replay_total", result="missing"), before + 1)
        history[2]["tool_call_id"] = "call_never_made"
        status, answer = self.rig.post("/v1/chat/completions", {"messages": history})
        self.assertEqual((status, answer["error"]["code"]), (400, "unknown_tool_call_id"))

    def test_results_of_very_many_calls_do_not_hold_up_the_router(self):
        n = 100000  # each looked for among all of them: more than half a minute for all clients
        calls = [{"id": "c%d" % i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in range(n)]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in reversed(calls)]
        results.append({"role": "tool", "tool_call_id": "c%d" % n, "content": ""})
        status, answer = self.rig.post("/v1/chat/completions", {"messages": [
            {"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": calls}] + results})
        self.assertEqual((status, answer["error"]["code"]), (400, "unknown_tool_call_id"))


class Forgotten(Tools):
    settings = {"prompt": {"reasoning_memory": False}}

    def test_without_the_memory_the_client_is_taken_at_its_word(self):
        messages, message, _ = self.first_call()
        text, _ = self.prompt_of(messages + [forgetful(message)] + self.results(message))
        self.assertNotIn(message["reasoning_content"], text)


del Tools

if __name__ == "__main__":
    e2e.main()
