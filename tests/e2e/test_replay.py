#!/usr/bin/env python3
"""recovery.mode = replay: a stage dies in the middle of answers and their clients notice a pause only."""

import json
import os
import re
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

CHAT = "/v1/chat/completions"


def story(seed, stream=True):
    """Sampled, so that only the same random numbers give the same text."""
    return {"messages": [{"role": "user", "content": "Tell me a story about fox number %d." % seed}],
            "temperature": 0.9, "seed": seed, "max_tokens": 250, "min_tokens": 250,
            "presence_penalty": 0.3, "stream": stream, "stream_options": {"include_usage": True}}


def text_of(frames):
    """Everything a client shows of a stream, and its last usage."""
    text, usage = "", None
    for event, data in frames:
        if event == ":" or data == "[DONE]":
            continue
        frame = json.loads(data)
        assert "error" not in frame, frame
        usage = frame.get("usage") or usage
        for choice in frame["choices"]:
            delta = choice["delta"]
            text += (delta.get("reasoning_content") or "") + (delta.get("content") or "")
    return text, usage


class Replay(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.kept = os.path.join(self.folder.name, "generation")
        self.rig = e2e.rig(stages=2, settings={
            "recovery": {"mode": "replay", "generation_file": self.kept}})
        self.rig.start()

    def tearDown(self):
        statuses = self.rig.stop()
        self.folder.cleanup()
        self.assertEqual({n: s for n, s in statuses.items() if s != 0}, {})

    def read(self, body, frames, done):
        try:
            for frame in self.rig.stream(CHAT, body):
                frames.append(frame)
        finally:
            done.set()

    def metric(self, name):
        text = self.rig.request("GET", "/metrics")[2].decode()
        return sum(float(v) for v in re.findall(r"^%s(?:{[^}]*})? (\S+)$" % name, text, re.M))

    def kill_and_compare(self, stage, seeds):
        want = [text_of(self.rig.stream(CHAT, story(seed))) for seed in seeds]
        while True:
            runs = [([], threading.Event()) for _ in want]
            threads = [threading.Thread(target=self.read, args=(story(seed), *run))
                       for seed, run in zip(seeds, runs)]
            for thread in threads:
                thread.start()
            e2e.wait_until(lambda: min(len(frames) for frames, _ in runs) >= 30, self.rig.logs)  # noqa: B023
            if not any(done.is_set() for _, done in runs):
                break
            for thread in threads:  # over before they were looked at, on a machine that has much to do
                thread.join()
        self.rig.kill_worker(stage)
        self.rig.wait_not_ready()
        self.rig.start_worker(stage)
        for thread, (frames, done) in zip(threads, runs):
            self.assertTrue(done.wait(60), "a stream hangs\n" + self.rig.logs())
            thread.join()
        for (frames, _), (text, usage) in zip(runs, want):
            got, said = text_of(frames)
            self.assertEqual(got, text)
            self.assertEqual(said["completion_tokens"], usage["completion_tokens"])

    def test_streams_through_a_killed_last_stage_equal_undisturbed_ones(self):
        with open(self.kept, encoding="ascii") as kept:
            before = int(kept.read())
        self.kill_and_compare(1, (1, 2, 3))
        self.assertEqual(self.metric("ds4_requests_replayed_total"), 3)
        with open(self.kept, encoding="ascii") as kept:
            self.assertGreater(int(kept.read()), before)

    def test_a_stream_through_a_killed_first_stage_equals_an_undisturbed_one(self):
        self.kill_and_compare(0, (4,))

    def test_a_prompt_that_is_there_at_two_losses_is_refused(self):
        frames, done = [], threading.Event()
        thread = threading.Thread(target=self.read, args=(story(9), frames, done))
        thread.start()
        for stage in (1, 0):
            n = len(frames)
            e2e.wait_until(lambda: len(frames) >= n + 10, self.rig.logs)  # noqa: B023
            self.rig.kill_worker(stage)
            self.rig.wait_not_ready()
            self.rig.start_worker(stage)
            self.rig.wait_ready()
        self.assertTrue(done.wait(60))
        thread.join()
        self.assertEqual(frames[-1][1], "[DONE]")
        self.assertEqual(json.loads(frames[-2][1])["error"]["code"], "poisoned_request")
        status, headers, data = self.rig.request("POST", CHAT, story(9, stream=False))
        self.assertEqual(status, 503, data)
        self.assertEqual(json.loads(data)["error"]["code"], "poisoned_request")
        self.assertIn("retry-after", headers)
        other = dict(story(10, stream=False), max_tokens=4, min_tokens=4)
        self.assertEqual(self.rig.post(CHAT, other)[0], 200)


if __name__ == "__main__":
    e2e.main()
