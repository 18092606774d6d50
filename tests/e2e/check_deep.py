#!/usr/bin/env python3
"""Long conversations beside each other: a client compacts, cold ones push deep ones out, the disk tier saves in
the middle of a prompt (kv-cache.md 6: T09, T12, T15).  `make check-cuda` runs it at the lengths of the field reports, as
far as ds4-tiny's 65,536 tokens go (`--seconds 600`); without that short forms, which a processor can do.  `make check` has
the scheduler's side of it in test_kv_stories.  Right means: what the same prompt answers when nothing of it is cached."""

import os
import random
import re
import shutil
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

WORDS = ("fox", "river", "stone", "green", "walks", "under", "seven", "little", "moon", "house")
SHORT = not any(word.startswith("--seconds") for word in sys.argv)
BLOCK = 256  # tokens of a cache block
ANCHOR = 127  # what a deep cut may cost


def lines(seed, n_tok):
    """About n_tok tokens of text that no other seed begins with."""
    rng = random.Random(seed)
    text = ["%d: " % seed]
    while len(text) < n_tok // 17 + 1:
        text.append(" ".join(rng.choice(WORDS) for _ in range(9)) + ".\n")
    return "".join(text)


class Deep(unittest.TestCase):
    def setUp(self):
        self.whole = e2e.SECONDS >= 600
        self.rig, self.folder = None, tempfile.mkdtemp(prefix="ds4-deep-")

    def tearDown(self):
        if self.rig is not None:
            self.stop()
        shutil.rmtree(self.folder)

    def start(self, **sections):
        settings = {"model": {"context": 65536 if self.whole else 1024}, "sched": {"max_seqs": 4, "chunk_tok": 1024}}
        for section, options in sections.items():
            settings.setdefault(section, {}).update(options)
        self.rig = e2e.rig(stages=2, settings=settings)
        self.rig.start()

    def stop(self):
        rig, self.rig = self.rig, None
        failures = self.metric("ds4_kv_invariant_failures_total", rig)
        statuses = rig.stop()
        self.assertEqual(failures, 0)
        self.assertEqual({n: s for n, s in statuses.items() if s != 0}, {})

    def metric(self, name, rig=None):
        text = (rig or self.rig).request("GET", "/metrics")[2].decode()
        return sum(float(v) for v in re.findall(r"^%s(?:{[^}]*})? (\S+)$" % name, text, re.M))

    def ask(self, prompt, path="/v1/completions", **more):
        """Text, prompt tokens and how many of them were not computed."""
        body = dict({"temperature": 0, "max_tokens": 8, "min_tokens": 8}, **more)
        body["prompt" if isinstance(prompt, str) else "messages"] = prompt
        status, answer = self.rig.post(path, body, timeout=300)
        self.assertEqual(status, 200, answer)
        choice, usage = answer["choices"][0], answer["usage"]
        return (choice.get("text") or choice["message"]["content"], usage["prompt_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"])

    def cold(self, prompt, name):
        """The answer of someone who shares nothing with anybody."""
        text, _, cached = self.ask(prompt, cache_salt=name)
        self.assertEqual(cached, 0)
        return text

    def test_a_client_that_compacts_goes_on_from_what_both_histories_share(self):
        self.start()
        session, compact, shared = (28000, 6000, 3000) if self.whole else (420, 300, 170)
        system = lines(1, shared)
        self.ask(system + lines(2, session - shared))
        new = system + lines(3, compact - shared)
        text, _, cached = self.ask(new)
        common = self.ask(system)[1]
        self.assertLessEqual(cached, common)
        self.assertGreaterEqual(cached, common - ANCHOR - 2)  # the texts may part inside a token
        self.assertEqual(text, self.cold(new, "compact"))

    def test_two_deep_conversations_give_way_to_two_cold_ones(self):
        deep = 60000 if self.whole else 280
        self.start(sched={"max_seqs": 2}, kv={"blocks": 2 * (deep // BLOCK + 1) + 1})  # two of them and a little
        talks = [lines(10 + i, deep) for i in range(4)]
        first = [self.ask(talk)[0] for talk in talks[:2]]
        cold = {}
        threads = [threading.Thread(target=lambda n=n: cold.__setitem__(n, self.ask(talks[n])[0])) for n in (2, 3)]
        for thread in threads:  # two cold admissions at once
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(sorted(cold), [2, 3])
        self.assertGreater(self.metric("ds4_kv_evictions_total"), 0)
        self.assertEqual([self.ask(talk)[0] for talk in talks[:2]], first)
        for n in (2, 3) if self.whole else (2,):
            self.assertEqual(cold[n], self.cold(talks[n], "cold%d" % n))

    @unittest.skipIf(SHORT, "a save needs thousands of tokens")
    def test_saves_in_the_middle_of_a_prompt_change_nothing(self):
        messages = []
        for i in range(26):
            messages += [{"role": "user", "content": lines(100 + i, 2000)}, {"role": "assistant", "content": "Yes."}]
        messages.append({"role": "user", "content": "And now?"})
        answers = []
        for disk_mb in (0, 2048):
            self.start(kv={"disk_mb": disk_mb, "disk_dir": self.folder, "disk_write_mbps": 0})
            text, prompt, cached = self.ask(messages, "/v1/chat/completions", max_tokens=24, min_tokens=24,
                                            chat_template_kwargs={"thinking": False})
            self.assertEqual(cached, 0)
            self.assertGreater(prompt, 40000)
            answers.append(text)
            if disk_mb:
                self.assertGreaterEqual(self.metric("ds4_kv_disk_saves_total"), 4)
            self.stop()
        self.assertEqual(answers[0], answers[1])


if __name__ == "__main__":
    e2e.main()
