#!/usr/bin/env python3
"""ds4-worker --plan: tables for cards that are not there, and starts that fail with the same words."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402


def worker(*args):
    return subprocess.run([os.path.join(e2e.bin_dir(), "ds4-worker"), *args], capture_output=True,
                          text=True, timeout=60, check=False)


class Plan(unittest.TestCase):
    def test_cards_of_every_size_get_a_table_and_a_verdict(self):
        for gb, n in ((8, 20), (10, 16), (32, 3), (40, 3), (64, 2), (80, 2)):
            done = worker("--plan", "--json", "--model", "synth:flash:q2:1",
                          "--cards", ",".join([str(gb)] * n))
            self.assertEqual(done.returncode, 0, done.stderr)
            rig = json.loads(done.stdout)
            self.assertTrue(rig["fits"])
            self.assertEqual(sum(rig["partition"]), 43)
            self.assertEqual(len(rig["partition"]), n)
            for stage in rig["stages"]:
                b = stage["bytes"]
                parts = ["weights_device", "weights_mapped", "cache_blocks", "cache_rings", "cache_points",
                         "step_buffers", "scratch", "pipe", "offload", "spare"]
                self.assertEqual(sum(b[p] for p in parts), b["total"])
                self.assertLessEqual(b["total"], b["usable"])
                self.assertEqual(b["spare"], 1 << 30)
                self.assertEqual(b["card"], gb << 30)
                self.assertEqual(sum(stage["weights"].values()), b["weights_device"])

    def test_a_rig_too_small_exits_with_78_and_says_what_would_do(self):
        done = worker("--plan", "--model", "synth:flash:q2:1", "--cards", "8,8,8,8")
        self.assertEqual(done.returncode, 78)
        self.assertIn("does not fit: stage 0 on a card of 8 GB", done.stdout)
        self.assertIn("4 card(s) of 32 GB would", done.stdout)
        self.assertIn("does not fit", done.stderr)

    def test_mixed_cards_share_by_size(self):
        done = worker("--plan", "--json", "--model", "synth:flash:q2:1", "--cards", "8,8,10,80")
        self.assertEqual(done.returncode, 0, done.stderr)
        partition = json.loads(done.stdout)["partition"]
        self.assertEqual(sum(partition), 43)
        self.assertGreater(partition[3], 30)

    def test_a_bad_call_is_refused(self):
        for args in (("--cards", "8"), ("--json",), ("--model", "synth:tiny:q2:1"),
                     ("--plan", "--model", "synth:tiny:q2:1", "--cards", "8,x"),
                     ("--plan", "--model", "synth:tiny:q9:1", "--cards", "8"),
                     ("--plan", "--model", "synth:tiny:q2:1", "--cards", ",".join(["8"] * 9))):
            self.assertEqual(worker(*args).returncode, 78, args)

    def test_a_start_that_does_not_fit_fails_with_the_words_of_the_plan(self):
        with tempfile.TemporaryDirectory() as folder:
            config = os.path.join(folder, "ds4.conf")
            with open(config, "w", encoding="utf-8") as out:
                out.write(e2e.settings_text({"model": {"path": e2e.TINY},
                                             "gpu": {"memory_limit_mb": [24]},
                                             "cluster": {"endpoint_dir": folder + "/run"}}))
            plan = worker("--config", config, "--plan", "--json")
            start = worker("--config", config)
            self.assertEqual((plan.returncode, start.returncode), (78, 78))
            words = json.loads(plan.stdout)["verdict"].split("does not fit: ")[1]
            self.assertIn("the plan needs", words)
            self.assertIn(words, start.stderr)

    @staticmethod
    def counted(rig):
        """Where stage 1's experts were used, once all of it has been counted."""
        text = rig.request("GET", "/metrics")[2].decode()
        uses = {where for where, n in re.findall(
            r'^ds4_stage_expert_uses_total{[^}]*stage="1"[^}]*where="(\w+)"[^}]*} (\S+)$', text, re.M) if float(n) > 0}
        return uses if len(uses) == 3 else None

    def test_experts_beyond_the_limit_stay_on_the_host_and_the_answers_stay_the_same(self):
        def settings(mib):
            gpu = {"offload": True, "memory_limit_mb": [mib]} if mib else {}
            # The last stage, with the head, is the one that gets short of memory.
            return {"model": {"context": 1024}, "kv": {"host_mb": 0}, "gpu": gpu,
                    "sched": {"max_seqs": 2, "chunk_tok": 64, "probe_ms": 100}}

        def ask(mib):
            rig = e2e.rig(2, model="synth:tiny:q8:3", settings=settings(mib))
            try:
                rig.start()
                status, answer = rig.post("/v1/completions", {
                    "prompt": "x" * 150, "max_tokens": 24, "min_tokens": 24, "temperature": 0,
                    "logprobs": 2})
                self.assertEqual(status, 200, answer)
                plan = json.loads(worker("--config", rig.config, "--stage", "1", "--plan",
                                         "--json").stdout)
                # Counts are read twice a second, before a step: the idle rig's probe is one.
                metrics = e2e.wait_until(lambda: self.counted(rig)) if mib else None
                return answer["choices"], plan, metrics
            finally:
                rig.stop()

        want, _, _ = ask(0)
        for mib in range(8, 40):
            rig = e2e.rig(2, model="synth:tiny:q8:3", settings=settings(mib))
            plan = json.loads(worker("--config", rig.config, "--stage", "1", "--plan",
                                     "--json").stdout)
            rig.stop()
            if plan["fits"]:
                break
        got, plan, metrics = ask(mib)
        stage = plan["stages"][0]
        self.assertIn(stage["experts_per_layer"], range(3, 8))
        self.assertGreater(stage["bytes"]["host_experts"], 0)
        self.assertLessEqual(stage["bytes"]["total"], mib << 20)
        self.assertEqual(got, want)
        self.assertEqual(set(metrics), {"device", "host", "streamed"})

    def test_settings_name_cards_and_the_start_takes_the_proposal(self):
        rig = e2e.rig(2, settings={"gpu": {"cards": ["8@100", "8"]}})
        try:
            rig.start()
            plan = worker("--config", rig.config, "--plan", "--json")
            self.assertEqual(plan.returncode, 0, plan.stderr)
            partition = json.loads(plan.stdout)["partition"]
            self.assertLess(partition[0], partition[1])
            layers = [line for line in rig.logs(lines=200).splitlines() if " info plan layers=" in
                      line.replace(" stage0 ", " ").replace(" stage1 ", " ")]
            self.assertIn("layers=0-%d" % (partition[0] - 1), layers[0])
            status, answer = rig.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
            self.assertEqual(status, 200, answer)
        finally:
            rig.stop()


if __name__ == "__main__":
    e2e.main()
