#!/usr/bin/env python3
"""The disk tier with real files: conversations that outlive processes, whichever dies and however.  Right means:
the same answer as from a pipeline that computed everything."""

import glob
import os
import re
import shutil
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

CHAT = "/v1/chat/completions"
SECONDS = 30


def talk(name, lines):
    return [{"role": "user", "content": " ".join("%s has %d hens and a fox." % (name, i)
                                                 for i in range(lines)) + " Who has what?"}]


class Disk(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="ds4-disk-")
        self.rig = None

    def tearDown(self):
        if self.rig is not None:
            self.rig.stop()
        shutil.rmtree(self.folder)

    def start(self, stages=2, disk_mb=64, **sections):
        settings = {"kv": {"disk_mb": disk_mb, "disk_dir": self.folder, "disk_write_mbps": 0},
                    "sched": {"probe_ms": 200}}
        settings.update(sections)
        self.rig = e2e.rig(stages=stages, settings=settings)
        self.rig.start()
        self.wait("the scan", lambda: "commits=" in self.router_log())
        return self.rig

    def stop(self):
        statuses, self.rig = self.rig.stop(), None
        self.assertEqual({n: s for n, s in statuses.items() if s != 0}, {})

    def router_log(self):
        with open(os.path.join(self.rig.folder, "router.log"), encoding="utf-8") as log:
            return log.read()

    def wait(self, what, done):
        deadline = time.monotonic() + SECONDS
        while not done():
            self.assertLess(time.monotonic(), deadline, what + "\n" + self.rig.logs())
            time.sleep(0.02)

    def metric(self, name, labels=""):
        text = self.rig.request("GET", "/metrics")[2].decode()
        found = re.findall(r"^%s{[^}]*%s[^}]*} (\S+)$" % (name, labels), text, re.M)
        return sum(float(value) for value in found)

    def commits(self):
        return self.metric("ds4_kv_disk_commits")

    def ask(self, messages, tokens=12):
        """The answer and how many prompt tokens were not computed."""
        status, answer = self.rig.post(CHAT, {
            "messages": messages, "temperature": 0, "max_tokens": tokens, "min_tokens": tokens,
            "chat_template_kwargs": {"thinking": False}})
        self.assertEqual(status, 200, answer)
        usage = answer["usage"]
        return (answer["choices"][0]["message"]["content"], usage["prompt_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"])

    def saved(self, messages):
        """Asks, waits until it is on disk, returns the answer."""
        before = self.metric("ds4_kv_disk_saves_total", 'result="ok"')
        text, _, cached = self.ask(messages)
        self.assertEqual(cached, 0)
        self.wait("two saves", lambda: self.metric("ds4_kv_disk_saves_total", 'result="ok"') >= before + 2)
        return text

    def test_a_talk_goes_on_after_all_processes_were_stopped(self):
        self.start()
        short, long = talk("Anna", 60), talk("Berta", 120)
        first, second = self.ask(short)[0], self.ask(long)[0]
        self.stop()  # saves what is not there yet
        self.start()
        text, prompt, cached = self.ask(long)
        self.assertEqual(text, second)
        self.assertLess(prompt - cached, 128)
        self.assertEqual(self.ask(short)[0], first)
        more = long + [{"role": "assistant", "content": second},
                       {"role": "user", "content": "And who has none?"}]
        text, prompt, cached = self.ask(more)
        self.assertEqual(self.metric("ds4_kv_disk_hits_total"), 2)
        self.assertEqual(self.metric("ds4_kv_disk_rejects_total"), 0)
        self.stop()
        shutil.rmtree(self.folder)
        self.start()
        self.assertEqual(self.ask(more)[0], text)

    def test_after_a_kill_of_everything_what_was_saved_is_there(self):
        self.start()
        text = self.saved(talk("Anna", 60))
        self.rig.router.kill()
        for worker in self.rig.workers:
            worker.kill()
        self.rig.stop()
        self.start()
        again, prompt, cached = self.ask(talk("Anna", 60))
        self.assertEqual(again, text)
        self.assertLess(prompt - cached, 128)


if __name__ == "__main__":
    e2e.main()
