#!/usr/bin/env python3
"""What each deliberate fault leads to: a clear error or the right answer, and a /health that tells the
truth.  Needs the programs of `make FAULTS=1` (make FAULTS=1 check-faults)."""

import json
import os
import re
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8,
         "chat_template_kwargs": {"thinking": False}}
TEXT = "Hi! How can I help you?"
STORY = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "temperature": 0,
         "max_tokens": 400, "min_tokens": 400, "stream": True}


class Faults(unittest.TestCase):
    def setUp(self):
        self.rig = e2e.rig(stages=2)

    def tearDown(self):
        self.rig.stop()

    def start(self, fault, stage, timeout=60):
        """A rig whose worker `stage` has the fault."""
        self.rig.start_router()
        self.start_worker(stage, fault)
        self.rig.start_worker(1 - stage)
        return self.rig.wait_ready(timeout)

    def start_worker(self, stage, fault):
        os.environ["DS4_FAULT"] = "%s:%d" % (fault, stage)
        try:
            self.rig.start_worker(stage)
        finally:
            del os.environ["DS4_FAULT"]

    def log(self, stage):
        with open(os.path.join(self.rig.folder, "stage%d.log" % stage), encoding="utf-8") as log:
            return log.read()

    def exit_status(self, stage, seconds=10):
        status = self.rig.workers[stage].wait(seconds)
        self.rig.workers[stage] = None
        return status

    def answer(self):
        status, answer = self.rig.post(CHAT, HELLO)
        self.assertEqual(status, 200, answer)
        return answer["choices"][0]["message"]["content"]

    def story(self):
        """Frames of a long stream, read to its end by a thread."""
        frames = []
        reader = threading.Thread(target=lambda: frames.extend(self.rig.stream(CHAT, STORY)))
        reader.start()
        return frames, reader

    def assert_ends_with_an_error(self, frames, reader):
        reader.join(10)
        self.assertFalse(reader.is_alive(), "the stream hangs\n" + self.rig.logs())
        data = [text for event, text in frames if event != ":"]
        self.assertEqual(data[-1], "[DONE]")
        self.assertIn(json.loads(data[-2])["error"]["code"], ("pipeline_restarted", "stage_down"))

    def test_a_device_fault_ends_the_worker_with_70_and_service_comes_back_twice_in_a_row(self):
        self.start("cuda_sticky_error:30", 1)
        router = self.rig.router.pid
        for _ in range(2):
            frames, reader = self.story()
            self.assertEqual(self.exit_status(1, 20), 70)
            self.assertLess(self.rig.wait_not_ready(), 3)
            self.assert_ends_with_an_error(frames, reader)
            self.assertEqual(self.rig.request("POST", CHAT, HELLO)[0], 503)
            self.start_worker(1, "cuda_sticky_error:30")
            self.rig.wait_ready(30)
            self.assertEqual(self.answer(), TEXT)
        self.assertEqual(self.rig.router.pid, router)
        self.assertIsNone(self.rig.router.poll())

    def test_a_card_that_needs_an_operator_ends_its_worker_with_79_and_is_counted(self):
        self.start("card_xid:12", 1)
        self.assertEqual(self.exit_status(1, 30), 79)
        self.assertLess(self.rig.wait_not_ready(), 3)
        text = self.rig.request("GET", "/metrics")[2].decode()
        self.assertRegex(text, r'ds4_gpu_xid_total\{[^}]*stage="1",code="79"\} 1')
        self.assertIn("Xid 79", self.log(1))
        self.rig.start_worker(1)
        self.rig.wait_ready(30)
        self.assertEqual(self.answer(), TEXT)
        text = self.rig.request("GET", "/metrics")[2].decode()
        self.assertRegex(text, r'ds4_worker_restarts_total\{[^}]*stage="1",exit="79"\} 1')

    def test_the_report_of_a_fault_names_where_and_the_last_64_steps(self):
        self.start("cuda_sticky_error:80", 0)
        _, reader = self.story()
        self.assertEqual(self.exit_status(0, 20), 70)
        reader.join(10)
        log = self.log(0)
        report = re.search(r'fatal exit=70 meaning="device fault" stage=0 generation=(\d+) '
                           r"step=(\d+) layer=-?\d+ message=\"(.*)\"", log)
        self.assertIsNotNone(report, log)
        self.assertIn("kernel launched last", report.group(3))
        steps = re.findall(r"fatal\.step generation=(\d+) step=(\d+) age_ms=\d+ entries=\d+ rows=\d+",
                           log)
        self.assertEqual(len(steps), 64)
        newest = int(report.group(2))
        self.assertEqual([int(step) for _, step in steps], list(range(newest, newest - 64, -1)))

    def violation(self, fault):
        self.start(fault, 1)
        frames, reader = self.story()
        self.assertEqual(self.exit_status(1, 20), 72)
        self.assertLess(self.rig.wait_not_ready(), 3)
        self.assert_ends_with_an_error(frames, reader)
        self.rig.start_worker(1)
        self.rig.wait_ready(30)
        self.assertEqual(self.answer(), TEXT)

    def test_a_step_that_never_arrives_ends_the_worker_with_72_at_the_next(self):
        self.violation("step_msg_drop:10")

    def test_a_step_that_arrives_twice_ends_the_worker_with_72(self):
        self.violation("step_msg_dup:10")

    def test_a_row_that_is_not_finite_is_an_error_of_that_answer_alone(self):
        self.start("nan_logits:60", 1)
        frames, reader = self.story()
        reader.join(20)
        data = [text for event, text in frames if event != ":"]
        self.assertEqual(data[-1], "[DONE]")
        self.assertIn("error", json.loads(data[-2]))
        finishes = [c["finish_reason"] for text in data[:-2] for c in json.loads(text)["choices"]]
        self.assertEqual([f for f in finishes if f], [])
        self.assertEqual(self.rig.request("GET", "/health")[0], 200)
        self.assertEqual(self.answer(), TEXT)

    def broken_index(self, fault, stage, what):
        self.start(fault, stage)
        frames, reader = self.story()
        self.assertEqual(self.exit_status(stage, 20), 70)
        self.assertLess(self.rig.wait_not_ready(), 3)
        self.assert_ends_with_an_error(frames, reader)
        self.assertIn(what, self.log(stage))

    def test_an_expert_id_out_of_range_ends_the_worker_with_70(self):
        self.broken_index("expert_oob:40", 0, "an expert id is out of range")

    def test_a_selected_row_out_of_range_ends_the_worker_with_70(self):
        self.broken_index("topk_oob:40", 1, "a selected row is out of range")

    def test_a_stage_killed_before_it_sends(self):
        self.start("nccl_peer_exit:20", 0)
        frames, reader = self.story()
        self.assertEqual(self.exit_status(0, 20), -9)
        self.assertLess(self.rig.wait_not_ready(), 3)
        self.assert_ends_with_an_error(frames, reader)
        self.rig.start_worker(0)
        self.rig.wait_ready(30)
        self.assertEqual(self.answer(), TEXT)

    def test_rows_that_never_come_end_the_generation_and_the_next_one_works(self):
        self.rig.stop()
        self.rig = e2e.rig(stages=2, settings={"watchdog": {"step_s": 2, "prefill_s": 3}})
        self.start("nccl_hang:20", 0)
        generation = self.rig.wait_ready()["generation"]
        frames, reader = self.story()
        self.assert_ends_with_an_error(frames, reader)
        self.assertGreater(self.rig.wait_ready(30)["generation"], generation)
        self.assertEqual(self.answer(), TEXT)
        self.assertEqual([w.poll() for w in self.rig.workers], [None, None])

    def test_steps_of_another_generation_change_nothing(self):
        self.start("stale_epoch_msg:1+", 1)
        self.assertEqual(self.answer(), TEXT)
        self.assertIn("fault.acts point=stale_epoch_msg", self.log(1))

    def test_the_wall_clock_may_leap_back(self):
        self.start("clock_jump:5+", 1)
        self.assertEqual(self.answer(), TEXT)
        self.assertIn("fault.acts point=clock_jump", self.log(1))

    def test_an_unknown_fault_stops_the_start_with_78(self):
        self.start_worker(0, "no_such_fault:1")
        self.assertEqual(self.exit_status(0), 78)
        self.assertIn("no_such_fault", self.log(0))


if __name__ == "__main__":
    e2e.main()
