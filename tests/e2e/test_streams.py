#!/usr/bin/env python3
"""Many streams at once: each complete and equal to its solo run; clients that leave; flat memory."""

import http.client
import json
import os
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

N_STREAMS = 16
SUBJECTS = ["fox", "dog", "cat", "bird", "fish", "mouse", "bear", "frog"]


def body_of(number, **more):
    subject = SUBJECTS[number % len(SUBJECTS)]
    body = {"messages": [{"role": "user", "content": "Tell me a story about a %s." % subject}],
            "temperature": 1.0, "seed": 1000 + number, "max_tokens": 40 + number,
            "chat_template_kwargs": {"thinking": number % 2 == 0}}
    body.update(more)
    return body


def text_of(rig, body):
    """(reasoning + content, finish_reason) of one stream."""
    text, finish, done = "", None, False
    for event, data in rig.stream("/v1/chat/completions", dict(body, stream=True)):
        if event == ":":
            continue
        if data == "[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            delta = choice["delta"]
            text += (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            finish = choice["finish_reason"] or finish
    assert done, "no [DONE]"
    return text, finish


def rss_kib(process):
    with open("/proc/%d/status" % process.pid, encoding="ascii") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    return 0


def metric(rig, name):
    """Sum of a metric's samples over its labels."""
    total = 0.0
    for line in rig.request("GET", "/metrics")[2].decode().splitlines():
        if line.startswith(name + " ") or line.startswith(name + "{"):
            total += float(line.rsplit(" ", 1)[1])
    return total


class Streams(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rig = e2e.rig(stages=2, settings={"sched": {"max_seqs": N_STREAMS}})
        cls.rig.start()

    @classmethod
    def tearDownClass(cls):
        cls.rig.stop()

    def wait_idle(self):
        e2e.wait_until(lambda: metric(self.rig, "ds4_requests_inflight") == 0,
                       lambda: "requests stay in flight: %g" % metric(self.rig, "ds4_requests_inflight"))

    def test_concurrent_streams_equal_their_solo_runs(self):
        solo = [text_of(self.rig, body_of(n)) for n in range(N_STREAMS)]
        ends = time.monotonic() + e2e.SECONDS
        wrong, rounds = [], [0] * N_STREAMS

        def run(number):
            while (time.monotonic() < ends or not rounds[number]) and not wrong:
                try:
                    got = text_of(self.rig, body_of(number))
                except Exception as problem:  # a thread must report, not die
                    wrong.append("stream %d: %r" % (number, problem))
                    return
                if got != solo[number]:
                    wrong.append("stream %d: %r, alone %r" % (number, got, solo[number]))
                rounds[number] += 1

        threads = [threading.Thread(target=run, args=(n,)) for n in range(N_STREAMS)]
        for thread in threads:
            thread.start()
        # What a first round of all at once takes is no growth.
        e2e.wait_until(lambda: all(rounds) or wrong, lambda: "rounds: %r" % rounds)
        processes = [self.rig.router] + self.rig.workers
        before = [rss_kib(p) for p in processes]
        with e2e.Progress("streams", lambda: sum(rounds), seconds=e2e.SECONDS):
            for thread in threads:
                thread.join()
        after = [rss_kib(p) for p in processes]
        self.assertEqual(wrong, [])
        self.assertTrue(all(rounds), rounds)
        for b, a in zip(before, after):
            self.assertLess(a - b, 32 * 1024, "resident KiB grew from %d to %d" % (b, a))
        self.wait_idle()

    def test_a_client_that_leaves_mid_stream_frees_its_sequence(self):
        for stream in (True, False):
            connection = http.client.HTTPConnection("127.0.0.1", self.rig.port, timeout=30)
            body = body_of(0, stream=stream, max_tokens=2000, min_tokens=2000)
            connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(),
                               {"content-type": "application/json"})
            if stream:
                response = connection.getresponse()
                response.read(200)
            e2e.wait_until(lambda: metric(self.rig, "ds4_requests_inflight") > 0)
            connection.sock.close()
            connection.close()
            del connection
            if stream:
                del response
            self.wait_idle()
        self.assertGreaterEqual(metric(self.rig, "ds4_requests_cancelled_total"), 2)
        self.assertEqual(text_of(self.rig, body_of(3)), text_of(self.rig, body_of(3)))


if __name__ == "__main__":
    e2e.main()
