#!/usr/bin/env python3
"""Many requests of every kind, and a storm of refused ones: what must not move does not.

`make check` runs 300 mixed requests and 350 refusals, on a scripted stage; `--seconds 600` or more, on stages
with the model, 20,000 or as many as that time allows, and 1,400.  After each: no sequence is left, the cache's blocks add up to what there are, no invariant was
broken, the processes have not grown, and the next request is answered."""

import http.client
import json
import os
import random
import re
import socket
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
from scripted import ScriptedRig  # noqa: E402

WORDS = ("fox", "river", "stone", "green", "walks", "under", "seven", "little", "moon", "house")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GROWTH_BYTES = 48 << 20  # of all processes: what the allocator keeps of the widest moment


class Flat(unittest.TestCase):
    def tearDown(self):
        statuses = self.rig.stop()
        self.assertEqual({n: s for n, s in statuses.items() if s != 0}, {})

    def metrics(self):
        samples = {}
        for name, value in re.findall(r"^(\w+(?:{[^}]*})?) (\S+)$",
                                      self.rig.request("GET", "/metrics")[2].decode(), re.M):
            samples[name] = float(value)
        return samples

    def sum_of(self, name, *labels):
        return sum(v for k, v in self.metrics().items()
                   if k.split("{")[0] == name and all(label in k for label in labels))

    def resident(self):
        rss = 0
        for process in [self.rig.router] + self.rig.workers:
            with open("/proc/%d/statm" % process.pid, encoding="ascii") as statm:
                rss += int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return rss

    def settled(self):
        """Blocks by state, once nothing runs."""
        deadline = time.monotonic() + 60
        while self.sum_of("ds4_requests_inflight") + self.sum_of("ds4_kv_blocks", '"promised"') != 0:
            self.assertLess(time.monotonic(), deadline, "requests are left, or what was promised to them")
            time.sleep(0.02)
        return {k: v for k, v in self.metrics().items() if k.startswith("ds4_kv_blocks{")}

    def assert_sound(self, total):
        blocks = self.settled()
        self.assertEqual(sum(blocks.values()), total, blocks)
        self.assertEqual(self.sum_of("ds4_kv_invariant_failures_total"), 0)


class Mixed(Flat):
    def setUp(self):
        self.whole = e2e.SECONDS >= 600
        settings = {"model": {"context": 2048}, "kv": {"blocks": 40, "host_mb": 64},
                    # Who waits for a processor is not dead: a loss is what test_service.py Kills is about.
                    "cluster": {"lost_ms": 60000},
                    "sched": {"max_seqs": 4, "queue_max": 64, "queue_s": 600}}
        self.rig = e2e.rig(stages=2, settings=settings) if self.whole else ScriptedRig(
            {"rules": [{"contains": "", "text": "one two three ", "repeat": True}]}, settings)
        self.rig.start()
        self.until = time.monotonic() + max(e2e.SECONDS, 600)
        self.done = 0
        self.wrong = []

    def ask(self, rng, talk):
        """One request of a random kind; talk is the client's conversation."""
        kind = rng.random()
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 24)))
        if kind < 0.06:  # refused before it is anybody's turn
            status, answer = self.rig.post(COMPLETIONS, rng.choice((
                {"prompt": "fox " * 3000, "max_tokens": 4}, {"prompt": [1 << 20], "max_tokens": 1},
                {"prompt": 7}, {"prompt": "a", "temperature": "warm"})))
            return status == 400 and "error" in answer
        if kind < 0.16:  # the client goes away in the middle
            with socket.create_connection(("127.0.0.1", self.rig.port), timeout=60) as wire:
                body = json.dumps({"prompt": " ".join(talk) + text, "max_tokens": 64, "stream": True,
                                   "ignore_eos": True})
                wire.sendall(("POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                              "content-length: %d\r\n\r\n%s" % (COMPLETIONS, len(body), body)).encode())
                if rng.random() < 0.6:
                    wire.recv(1)
            return True
        if kind < 0.3 and talk:  # the last words once more, or far back
            del talk[rng.randint(0, len(talk) - 1):]
        talk.append(text)
        if sum(map(len, talk)) > 4000:
            del talk[2:]
        if kind < 0.6:
            status, answer = self.rig.post(COMPLETIONS, {
                "prompt": "\n".join(talk), "max_tokens": rng.randint(1, 6), "seed": 1,
                "repetition_penalty": rng.choice((1, 1, 1.1))})
            return status == 200 and answer["choices"][0]["finish_reason"] in ("length", "stop")
        if kind < 0.8:
            status, answer = self.rig.post(CHAT, {
                "messages": [{"role": "user", "content": t} for t in talk], "max_tokens": 4,
                "reasoning_effort": "none", "n": rng.choice((1, 1, 2))})
            return status == 200 and answer["choices"][0]["finish_reason"] is not None
        frames = [data for _, data in self.rig.stream("/v1/messages", {
            "model": "x", "messages": [{"role": "user", "content": "\n".join(talk)}], "max_tokens": 4,
            "stream": True})]
        return "message_stop" in frames[-1]

    def client(self, seed, n):
        rng, talk = random.Random(seed), []
        for i in range(n):
            if time.monotonic() > self.until:
                break
            try:
                if not self.ask(rng, talk):
                    self.wrong.append("client %d, request %d" % (seed, i))
            except (OSError, e2e.RigError, http.client.HTTPException, ValueError, KeyError, IndexError) as e:
                self.wrong.append("client %d, request %d: %r" % (seed, i, e))
            self.done += 1

    def run_clients(self, first_seed, n):
        threads = [threading.Thread(target=self.client, args=(first_seed + i, n // 6))
                   for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(self.wrong, [])

    def test_mixed_requests_leave_nothing_behind(self):
        n = 20000 if self.whole else 300
        total = sum(self.settled().values())
        with e2e.Progress("mixed requests", lambda: self.done, total=n):
            self.run_clients(0, n // 10)
            self.assert_sound(total)
            before = self.resident()
            self.run_clients(100, n - n // 10)
        self.assert_sound(total)
        grown = self.resident() - before
        print("%d mixed requests, %+.1f MB since a tenth" % (self.done, grown / 1e6))
        self.assertLess(grown, GROWTH_BYTES)
        self.assertEqual(self.rig.post(COMPLETIONS, {"prompt": "fox", "max_tokens": 1})[0], 200)


class Storm(Flat):
    def setUp(self):
        self.rig = ScriptedRig(
            {"rules": [{"contains": "slowly", "step_ms": 50, "text": "one two three ", "repeat": True},
                       {"contains": "", "text": "ok"}]},
            settings={"sched": {"max_seqs": 1, "queue_max": 1, "queue_s": 3600}})
        self.rig.start()

    def test_a_storm_of_refusals_moves_nothing(self):
        """98 % are refused while one runs and one waits."""
        n = 1400 if e2e.SECONDS >= 600 else 350
        rng = random.Random(11)
        held = []
        for i in range(2):
            connection = http.client.HTTPConnection("127.0.0.1", self.rig.port, timeout=600)
            connection.request("POST", CHAT, json.dumps({
                "messages": [{"role": "user", "content": "slowly"}], "max_tokens": 60000, "stream": True,
                "ds4": {"tripwire": False}}))
            if i == 0:
                running = connection.getresponse()
                while b'"content":"o' not in running.readline():
                    pass
            held.append(connection)
        deadline = time.monotonic() + 60
        while self.sum_of("ds4_requests_inflight", 'phase="queued"') != 1:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
        connection = http.client.HTTPConnection("127.0.0.1", self.rig.port, timeout=60)
        resident = blocks = None
        for i in range(n):
            connection.request("POST", CHAT, json.dumps({
                "messages": [{"role": "user", "content": "fox " * rng.randint(1, 400)}],
                "max_tokens": rng.randint(1, 2000)}))
            response = connection.getresponse()
            error = json.loads(response.read())["error"]
            self.assertEqual((response.status, error["code"]), (429, "queue_full"))
            self.assertGreater(int(response.headers["retry-after"]), 0)
            if i == n // 4:
                resident = self.resident()
                blocks = self.sum_of("ds4_kv_blocks", '"free"')
        grown = self.resident() - resident
        self.assertEqual(self.sum_of("ds4_kv_blocks", '"free"'), blocks)
        print("%d refusals, %+.1f MB since a quarter" % (n, grown / 1e6))
        self.assertLess(grown, GROWTH_BYTES)
        running.close()
        for other in held + [connection]:
            other.close()
        self.assert_sound(sum(self.settled().values()))
        self.assertEqual(self.rig.post(CHAT, {
            "messages": [{"role": "user", "content": "x"}], "max_tokens": 9})[0], 200)


del Flat  # the cases are its children

if __name__ == "__main__":
    e2e.main()
