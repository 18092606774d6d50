#!/usr/bin/env python3
"""Whose request it is: affinity keys choose the slot that is given up, salts and API keys keep caches apart.
`--seconds 600`: every affinity key there is."""

import json
import os
import re
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
from scripted import ScriptedRig  # noqa: E402

PATH = "/v1/completions"
# In the order in which they speak: (body, header) of a session called so.
NAMES = [
    lambda name: ({"prompt_cache_key": name}, {}),
    lambda name: ({}, {"x-session-id": name}),
    lambda name: ({}, {"x-session-affinity": name}),
    lambda name: ({}, {"session-id": name}),
    lambda name: ({}, {"thread-id": name}),
    lambda name: ({}, {"X-Claude-Code-Session-Id": name}),
    lambda name: ({"session_id": name}, {}),
    lambda name: ({"user": name}, {}),
]


class Sessions(unittest.TestCase):
    def setUp(self):
        self.rig = e2e.rig(stages=1, settings={"model": {"context": 2048},
                                               "sched": {"max_seqs": 1, "probe_ms": 100},
                                               "kv": {"host_mb": 16, "blocks": 400}})
        self.rig.start()
        self.n = 0

    def tearDown(self):
        statuses = self.rig.stop()
        self.assertEqual({n: s for n, s in statuses.items() if s != 0}, {})

    def ask(self, text, *keys, **body):
        """Cached prompt tokens, and which kind of state the prompt went on from."""
        headers = {}
        for more, header in keys:
            body.update(more)
            headers.update(header)
        before = self.sources()
        status, _, data = self.rig.request(
            "POST", PATH, dict(body, prompt=text, max_tokens=1, temperature=0), headers)
        self.assertEqual(status, 200, data)
        after = self.sources()
        self.assertGreater(sum(after.values()), sum(before.values()))
        self.await_saves()
        return [s for s in after if after[s] > before[s]]

    def sources(self):
        return {s: float(v) for s, v in re.findall(
            r'^ds4_kv_recomputed_tokens_total{[^}]*source="(\w+)"[^}]*} (\S+)$',
            self.rig.request("GET", "/metrics")[2].decode(), re.M)}

    def steps(self):
        return sum(float(v) for v in re.findall(r"^ds4_steps_total{[^}]*} (\S+)$",
                                                self.rig.request("GET", "/metrics")[2].decode(), re.M))

    def await_saves(self):
        """A slot is not given up before a step has saved its state; an idle rig's probe is one."""
        done, deadline = self.steps(), time.monotonic() + 60
        while self.steps() < done + 2:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def talk(self):
        """Text that nobody has sent, so long that its first token is a trifle of it."""
        self.n += 1
        return "".join(chr(97 + (self.n * k * k + k) % 26) for k in range(1, 260))

    def keeps_the_other(self, mine, other):
        """A new talk of the session `mine` takes the slot of its own last one, though that of `other` has been
        idle for longer."""
        old, own, new = self.talk(), self.talk(), self.talk()
        self.ask(old, *other)
        self.ask(own, *mine)
        self.ask(new, *mine)
        return self.ask(old + "7", *other) == ["hot"]

    def test_each_key_names_a_session(self):
        for key in NAMES if e2e.SECONDS >= 600 else (NAMES[0], NAMES[5], NAMES[7]):
            self.assertTrue(self.keeps_the_other([key("a%d" % self.n)], [key("b%d" % self.n)]), key("a"))
        # Nobody says who he is: the one idle for longest goes.
        self.assertFalse(self.keeps_the_other([], []))

    def test_the_first_of_several_keys_counts(self):
        for first, second in ((0, 1), (5, 6), (1, 7))[:None if e2e.SECONDS >= 600 else 1]:
            other = NAMES[second]("same")
            self.assertTrue(self.keeps_the_other([other, NAMES[first]("a%d" % first)],
                                                 [other, NAMES[first]("b%d" % first)]), (first, second))

    def test_salts_keep_caches_apart(self):
        text = self.talk()
        self.assertEqual(self.ask(text), ["cold"])
        self.assertEqual(self.ask(text, cache_salt="x"), ["cold"])
        self.assertNotEqual(self.ask(text, cache_salt="x"), ["cold"])
        self.assertEqual(self.ask(text, cache_salt="y"), ["cold"])
        self.assertNotEqual(self.ask(text), ["cold"])


class Tenants(unittest.TestCase):
    """A tenant is the API key that let the request in, in whichever header it came."""

    @classmethod
    def setUpClass(cls):
        cls.rig = ScriptedRig({"rules": [{"contains": "", "text": "one"}]})
        cls.rig.settings.setdefault("http", {})["keys_file"] = os.path.join(cls.rig.folder, "keys")
        with open(cls.rig.settings["http"]["keys_file"], "w", encoding="utf-8") as out:
            out.write("sk-anna\nsk-berta of Berta\n")
        with open(cls.rig.config, "w", encoding="utf-8") as out:
            out.write(e2e.settings_text(cls.rig.settings))
        cls.rig.start()

    @classmethod
    def tearDownClass(cls):
        statuses = cls.rig.stop()
        assert all(s == 0 for s in statuses.values()), statuses

    def cached(self, text, bearer=None, key=None, **body):
        """Prompt tokens of the request that were not computed, as its usage says."""
        headers = {}
        if bearer is not None:
            headers["authorization"] = "Bearer " + bearer
        if key is not None:
            headers["x-api-key"] = key
        status, _, data = self.rig.request(
            "POST", PATH, dict(body, prompt=text, max_tokens=1, temperature=0), headers)
        self.assertEqual(status, 200, data)
        usage = json.loads(data)["usage"]
        self.assertEqual(self.n_prompt.setdefault(text, usage["prompt_tokens"]), usage["prompt_tokens"])
        return usage["prompt_tokens_details"]["cached_tokens"]

    def setUp(self):
        self.n_prompt = {}
        # Backwards, so that no two tests' texts begin alike.
        self.text = self.id()[::-1] + " the quick fox walks under the green river. " * 12

    def assert_whole(self, cached):
        self.assertEqual(cached, self.n_prompt[self.text] - 1)

    def test_two_keys_share_no_prefix_and_each_finds_its_own(self):
        self.assertEqual(self.cached(self.text, "sk-anna"), 0)
        self.assertEqual(self.cached(self.text, "sk-berta"), 0)
        self.assert_whole(self.cached(self.text, "sk-anna"))
        self.assert_whole(self.cached(self.text, "sk-berta"))

    def test_one_key_is_one_tenant_in_either_header(self):
        self.assertEqual(self.cached(self.text, key="sk-anna"), 0)
        self.assert_whole(self.cached(self.text, "sk-anna"))
        self.assertEqual(self.cached(self.text, key="sk-berta"), 0)

    def test_the_tenant_is_the_key_that_was_accepted_and_not_what_stands_beside_it(self):
        self.assertEqual(self.cached(self.text, key="sk-anna"), 0)
        self.assert_whole(self.cached(self.text, "no-such-key", "sk-anna"))
        self.assert_whole(self.cached(self.text, "another", "sk-anna"))
        self.assertEqual(self.cached(self.text, "sk-berta", "sk-anna"), 0)  # both are good: the first one counts
        self.assert_whole(self.cached(self.text, "sk-berta"))

    def test_one_key_divides_its_own_cache_by_salts_and_only_its_own(self):
        self.assertEqual(self.cached(self.text, "sk-anna", cache_salt="x"), 0)
        self.assertEqual(self.cached(self.text, "sk-anna", cache_salt="y"), 0)
        self.assertEqual(self.cached(self.text, "sk-anna"), 0)
        self.assertEqual(self.cached(self.text, "sk-berta", cache_salt="x"), 0)
        self.assert_whole(self.cached(self.text, "sk-anna", cache_salt="x"))

    def test_a_session_of_the_same_name_is_nobody_elses(self):
        for name in ("user", "session_id", "prompt_cache_key"):
            self.text = "%s: %s" % (name, self.id()) + "the fox sees a stone and a river. " * 12
            self.assertEqual(self.cached(self.text, "sk-anna", **{name: "same"}), 0)
            self.assertEqual(self.cached(self.text, "sk-berta", **{name: "same"}), 0)
            self.assert_whole(self.cached(self.text, "sk-anna", **{name: "other"}))


if __name__ == "__main__":
    e2e.main()
