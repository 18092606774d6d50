#!/usr/bin/env python3
"""A generation that forms with difficulty: a stage comes back late, and the first attempt with it runs out of time
because another stage does not answer (kv-cache.md 6: T28).  Every attempt has a number of its own, and what was said in
an older one counts for nothing.  `--seconds 600`: the stage is a minute late."""

import os
import re
import signal
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8,
         "chat_template_kwargs": {"thinking": False}}
FORM_MS = 1500


class Reform(unittest.TestCase):
    def setUp(self):
        self.rig = e2e.rig(stages=2, settings={"cluster": {"form_ms": FORM_MS, "lost_ms": 60000}})

    def tearDown(self):
        for worker in self.rig.workers:
            if worker is not None and worker.poll() is None:
                worker.send_signal(signal.SIGCONT)
        statuses = self.rig.stop()
        self.assertEqual({n: s for n, s in statuses.items() if s != 0}, {})

    def metric(self, name, labels=""):
        text = self.rig.request("GET", "/metrics")[2].decode()
        return sum(float(v) for v in re.findall(r"^%s(?:{[^}]*%s[^}]*})? (\S+)$" % (name, labels), text, re.M))

    def wait(self, what, done, seconds=60):
        deadline = time.monotonic() + seconds
        while not done():
            self.assertLess(time.monotonic(), deadline, what + "\n" + self.rig.logs())
            time.sleep(0.05)

    def answer(self):
        status, answer = self.rig.post("/v1/chat/completions", HELLO)
        self.assertEqual(status, 200, answer)
        return answer["choices"][0]["message"]["content"]

    def timeouts(self):
        return self.metric("ds4_reforms_total", 'result="timeout"') + self.metric("ds4_reforms_total", 'result="failed"')

    def test_a_late_stage_and_an_attempt_that_runs_out_of_time(self):
        self.rig.start()
        text, generation = self.answer(), self.rig.wait_ready()["generation"]
        router, survivor = self.rig.router.pid, self.rig.workers[0]
        self.rig.kill_worker(1)
        self.rig.wait_not_ready()
        late = time.monotonic() + (60 if e2e.SECONDS >= 600 else 3)
        while time.monotonic() < late:  # nothing forms without it, and nothing pretends to
            self.assertEqual(self.rig.request("GET", "/health")[0], 503)
            time.sleep(0.2)
        survivor.send_signal(signal.SIGSTOP)
        self.rig.start_worker(1)
        before = self.timeouts()
        self.wait("an attempt that runs out of time", lambda: self.timeouts() > before)
        self.assertEqual(self.rig.request("GET", "/health")[0], 503)
        survivor.send_signal(signal.SIGCONT)
        health = self.rig.wait_ready(60)
        self.assertGreaterEqual(health["generation"], generation + 2)  # one was lost on the attempt
        self.assertEqual(self.answer(), text)
        self.assertEqual(self.rig.router.pid, router)
        self.assertIsNone(self.rig.router.poll())
        self.assertIsNone(survivor.poll())


if __name__ == "__main__":
    e2e.main()
