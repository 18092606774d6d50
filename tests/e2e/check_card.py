#!/usr/bin/env python3
"""What only a machine with a card can show: the driver's readings reach the router's metrics, and a rig of cards too
small for the experts answers all the same.  `make check-cuda` runs it with worker.backend = cuda; `--seconds 600` adds
four stages of 8,192 MB each with full Flash shapes, which takes 70 GB of host memory and minutes."""

import os
import re
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

# metric, labels, least, most: wide enough for any card, narrow enough for a unit taken wrongly
READINGS = (
    ("ds4_gpu_temperature_celsius", 'sensor="core"', 10, 110),
    ("ds4_gpu_power_watts", "", 5, 1500),
    ("ds4_gpu_power_limit_watts", "", 50, 1500),
    ("ds4_gpu_clock_hertz", 'clock="sm"', 1e8, 4e9),
    ("ds4_gpu_clock_hertz", 'clock="memory"', 1e8, 2e10),
    ("ds4_gpu_link_generation", "", 1, 7),
    ("ds4_gpu_link_width", "", 1, 32),
)


def samples(rig, name, labels=""):
    text = rig.request("GET", "/metrics")[2].decode()
    return [(line, float(line.rsplit(" ", 1)[1])) for line in text.splitlines()
            if line.startswith(name + "{") and labels in line]


class Card(unittest.TestCase):
    def test_the_drivers_readings_of_each_stages_card_are_in_the_metrics(self):
        rig = e2e.rig(stages=2)
        try:
            rig.start()
            deadline = time.monotonic() + 20
            while len(samples(rig, "ds4_gpu_power_watts")) < 2:
                self.assertLess(time.monotonic(), deadline, rig.logs())
                time.sleep(0.1)
            for name, labels, least, most in READINGS:
                found = samples(rig, name, labels)
                print(*[line for line, _ in found], sep="\n")
                with self.subTest(name + labels):
                    self.assertEqual(len(found), 2)
                    for _, value in found:
                        self.assertTrue(least <= value <= most, value)
            for line, _ in samples(rig, "ds4_gpu_memory_bytes") + samples(rig, "ds4_gpu_ecc_errors_total"):
                print(line)
            self.assertEqual(sum(value for _, value in samples(rig, "ds4_gpu_xid_total")), 0)
            for stage in (0, 1):
                with open(os.path.join(rig.folder, "stage%d.log" % stage), encoding="utf-8") as log:
                    line = re.search(r"card\.watch .*", log.read())
                self.assertIsNotNone(line)
                print(line.group(0))
                self.assertIn("xids=yes", line.group(0))
        finally:
            rig.stop()


@unittest.skipIf(not any(word.startswith("--seconds") for word in sys.argv), "takes --seconds 600")
class SmallCards(unittest.TestCase):
    def test_four_stages_of_8192_mb_answer_with_all_of_flash(self):
        stages = 4
        rig = e2e.rig(stages=stages, model="synth:flash:q2:1", settings={
            "model": {"context": 8192}, "sched": {"max_seqs": 4, "chunk_tok": 2048},
            "kv": {"host_mb": 1024},
            "gpu": {"memory_limit_mb": (8192,), "offload": True, "self_test": False}})
        try:
            begin = time.monotonic()
            rig.start(timeout=400)
            print("ready after %.0f s" % (time.monotonic() - begin))
            for tokens in (32, 32):
                begin = time.monotonic()
                status, answer = rig.post("/v1/completions", {"prompt": "All that glitters", "max_tokens": tokens,
                                                              "min_tokens": tokens, "temperature": 0}, timeout=300)
                self.assertEqual(status, 200, answer)
                self.assertEqual(answer["usage"]["completion_tokens"], tokens)  # most are no text
                print("%d tokens in %.1f s, %.2f tok/s" % (tokens, time.monotonic() - begin,
                                                           tokens / (time.monotonic() - begin)))
            begin = time.monotonic()
            status, answer = rig.post("/v1/completions", {"prompt": "All that glitters is not gold. " * 220,
                                                          "max_tokens": 1, "temperature": 0}, timeout=300)
            self.assertEqual(status, 200, answer)
            n, spent = answer["usage"]["prompt_tokens"], time.monotonic() - begin
            print("a prompt of %d tokens in %.1f s, %.0f tok/s" % (n, spent, n / spent))
            for name in ("ds4_gpu_memory_bytes", "ds4_stage_memory_bytes", "ds4_stage_expert"):
                text = rig.request("GET", "/metrics")[2].decode()
                print(*[line for line in text.splitlines() if line.startswith(name)], sep="\n")
            for stage in range(stages):
                with open(os.path.join(rig.folder, "stage%d.log" % stage), encoding="utf-8") as log:
                    print(*[line.rstrip() for line in log if "plan" in line or "offload" in line or "expert" in line][:12],
                          sep="\n")
        finally:
            rig.stop()


if __name__ == "__main__":
    e2e.main()
