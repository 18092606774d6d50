#!/usr/bin/env python3
"""What each deliberate fault leads to: a clear error or the right answer, and a /health that tells the
truth.  Needs the programs of `make FAULTS=1` (make FAULTS=1 check-faults)."""

import glob
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

CHAT = "/v1/chat/completions"
LONG = unittest.skipIf(not any(word.startswith("--seconds") for word in sys.argv), "takes --seconds 60")
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8,
         "chat_template_kwargs": {"thinking": False}}
TEXT = "Hi! How can I help you?"
STORY = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "temperature": 0,
         "max_tokens": 400, "min_tokens": 400, "stream": True}
LATE = [dict(STORY, temperature=1.0, seed=number, max_tokens=16 + number, min_tokens=16 + number)
        for number in range(2)]


class Faults(unittest.TestCase):
    def setUp(self):
        self.rig = e2e.rig(stages=2)

    def tearDown(self):
        self.rig.stop()

    def start(self, fault, stage):
        """A rig whose worker `stage` has the fault."""
        self.rig.start_router()
        self.start_worker(stage, fault)
        self.rig.start_worker(1 - stage)
        return self.rig.wait_ready()

    def start_worker(self, stage, fault):
        os.environ["DS4_FAULT"] = "%s:%d" % (fault, stage)
        try:
            self.rig.start_worker(stage)
        finally:
            del os.environ["DS4_FAULT"]

    def log(self, stage):
        with open(os.path.join(self.rig.folder, "stage%d.log" % stage), encoding="utf-8") as log:
            return log.read()

    def exit_status(self, stage):
        status = self.rig.workers[stage].wait(e2e.PATIENCE)
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
        reader.join(e2e.PATIENCE)
        self.assertFalse(reader.is_alive(), "the stream hangs\n" + self.rig.logs())
        data = [text for event, text in frames if event != ":"]
        self.assertEqual(data[-1], "[DONE]")
        self.assertIn(json.loads(data[-2])["error"]["code"], ("pipeline_restarted", "stage_down"))

    def test_a_device_fault_ends_the_worker_with_70_and_service_comes_back_twice_in_a_row(self):
        self.start("cuda_sticky_error:30", 1)
        router = self.rig.router.pid
        for _ in range(2):
            frames, reader = self.story()
            self.assertEqual(self.exit_status(1), 70)
            self.rig.wait_not_ready()
            self.assert_ends_with_an_error(frames, reader)
            self.assertEqual(self.rig.request("POST", CHAT, HELLO)[0], 503)
            self.start_worker(1, "cuda_sticky_error:30")
            self.rig.wait_ready()
            self.assertEqual(self.answer(), TEXT)
        self.assertEqual(self.rig.router.pid, router)
        self.assertIsNone(self.rig.router.poll())

    def test_a_card_that_needs_an_operator_ends_its_worker_with_79_and_is_counted(self):
        self.start("card_xid:12", 1)
        self.assertEqual(self.exit_status(1), 79)
        self.rig.wait_not_ready()
        text = self.rig.request("GET", "/metrics")[2].decode()
        self.assertRegex(text, r'ds4_gpu_xid_total\{[^}]*stage="1",code="79"\} 1')
        self.assertIn("Xid 79", self.log(1))
        self.rig.start_worker(1)
        self.rig.wait_ready()
        self.assertEqual(self.answer(), TEXT)
        text = self.rig.request("GET", "/metrics")[2].decode()
        self.assertRegex(text, r'ds4_worker_restarts_total\{[^}]*stage="1",exit="79"\} 1')

    def test_the_report_of_a_fault_names_where_and_the_last_64_steps(self):
        self.start("cuda_sticky_error:80", 0)
        _, reader = self.story()
        self.assertEqual(self.exit_status(0), 70)
        reader.join(e2e.PATIENCE)
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
        self.assertEqual(self.exit_status(1), 72)
        self.rig.wait_not_ready()
        self.assert_ends_with_an_error(frames, reader)
        self.rig.start_worker(1)
        self.rig.wait_ready()
        self.assertEqual(self.answer(), TEXT)

    def test_a_step_that_never_arrives_ends_the_worker_with_72_at_the_next(self):
        self.violation("step_msg_drop:10")

    def test_a_step_that_arrives_twice_ends_the_worker_with_72(self):
        self.violation("step_msg_dup:10")

    def test_a_row_that_is_not_finite_is_an_error_of_that_answer_alone(self):
        self.start("nan_logits:60", 1)
        frames, reader = self.story()
        reader.join(e2e.PATIENCE)
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
        self.assertEqual(self.exit_status(stage), 70)
        self.rig.wait_not_ready()
        self.assert_ends_with_an_error(frames, reader)
        self.assertIn(what, self.log(stage))

    def test_an_expert_id_out_of_range_ends_the_worker_with_70(self):
        self.broken_index("expert_oob:40", 0, "an expert id is out of range")

    def test_a_selected_row_out_of_range_ends_the_worker_with_70(self):
        self.broken_index("topk_oob:40", 1, "a selected row is out of range")

    def test_a_stage_killed_before_it_sends(self):
        self.start("nccl_peer_exit:20", 0)
        frames, reader = self.story()
        self.assertEqual(self.exit_status(0), -9)
        self.rig.wait_not_ready()
        self.assert_ends_with_an_error(frames, reader)
        self.rig.start_worker(0)
        self.rig.wait_ready()
        self.assertEqual(self.answer(), TEXT)

    def test_rows_that_never_come_end_the_generation_and_the_next_one_works(self):
        self.rig.stop()
        self.rig = e2e.rig(stages=2, settings={"watchdog": {"step_s": 2, "prefill_s": 3}})
        self.start("nccl_hang:20", 0)
        generation = self.rig.wait_ready()["generation"]
        frames, reader = self.story()
        self.assert_ends_with_an_error(frames, reader)
        self.assertGreater(self.rig.wait_ready()["generation"], generation)
        self.assertEqual(self.answer(), TEXT)
        self.assertEqual([w.poll() for w in self.rig.workers], [None, None])

    def test_rows_or_records_of_another_step_end_the_generation_and_no_process(self):
        for fault, stage in (("rows_header:20", 0), ("record_header:20", 1)):
            with self.subTest(fault):
                self.start(fault, stage)
                generation = self.rig.wait_ready()["generation"]
                frames, reader = self.story()
                self.assert_ends_with_an_error(frames, reader)  # the next one may be there before one looks
                self.assertIn("fault.acts", self.log(stage))
                self.assertGreater(self.rig.wait_ready()["generation"], generation)
                self.assertEqual(self.answer(), TEXT)
                self.assertEqual([w.poll() for w in self.rig.workers], [None, None])
            self.tearDown()
            self.setUp()

    def said(self, bodies):
        """What each of these streams says, all at once."""
        said = [[] for _ in bodies]
        readers = [threading.Thread(target=lambda n=n: said[n].extend(self.rig.stream(CHAT, bodies[n])))
                   for n in range(len(bodies))]
        for reader in readers:
            reader.start()
        texts = []
        for frames, reader in zip(said, readers):
            reader.join(e2e.PATIENCE)
            self.assertFalse(reader.is_alive(), "a stream hangs\n" + self.rig.logs())
            data = [text for event, text in frames if event != ":"]
            self.assertEqual(data[-1], "[DONE]")
            deltas = [choice["delta"] for text in data[:-1] for choice in json.loads(text)["choices"]]
            texts.append("".join((d.get("reasoning_content") or "") + (d.get("content") or "") for d in deltas))
        return texts

    def sum_of(self, pattern):
        text = self.rig.request("GET", "/metrics")[2].decode()
        found = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(pattern, line)]
        self.assertTrue(found, pattern)
        return sum(found)

    def test_no_step_begins_before_tokens_that_return_late_and_streams_say_the_same(self):
        """Tokens 50 ms late, drafts with them (kv-cache.md 6: T24).  A stage ends, with 72, at an entry whose
        token is not that of the step it names, and the router counts rows that it has no token for."""
        self.rig.start()
        right = self.said(LATE)
        self.assertTrue(all(right))
        for method in ("none", "ngram"):
            with self.subTest(method):
                self.rig.stop()
                self.rig = e2e.rig(stages=2, settings={"spec": {"method": method}})
                generation = self.start("token_delay_ms:1+", 1)["generation"]
                # Alone its next step is posted ahead of its token: the first stage has it, and waits.
                self.assertEqual(self.said(LATE[:1]), right[:1])
                late_s = self.sum_of("ds4_decode_steps_total") * 0.050
                steps = self.sum_of("ds4_steps_total")
                e2e.wait_until(lambda: self.sum_of('ds4_stage_steps_total{.*stage="0"') >= steps, self.rig.logs)
                self.assertGreater(self.sum_of('ds4_stage_wait_seconds_total{.*stage="0".*on="token"'), late_s / 4)
                # Beside others it is not posted before the token is back.
                self.assertEqual(self.said(LATE), right)
                self.assertIn("fault.acts point=token_delay_ms", self.log(1))
                self.assertEqual(self.sum_of("ds4_kv_invariant_failures_total"), 0)
                self.assertEqual(self.rig.wait_ready()["generation"], generation)
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


class DiskFaults(unittest.TestCase):
    """Each point of a save and of a read, in each process: afterwards a commit is there and right, or is not
    there; the answer is that of a pipeline that computes everything (kv-cache.md 6, T16 and T17)."""

    PROMPT = {"prompt": " ".join("A fox and %d hens went home." % i for i in range(60)), "temperature": 0,
              "max_tokens": 4, "min_tokens": 4}

    @classmethod
    def setUpClass(cls):
        rig = e2e.rig(stages=2)
        rig.start()
        cls.right = rig.post("/v1/completions", cls.PROMPT)[1]["choices"][0]["text"]
        rig.stop()

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="ds4-disk-")
        self.rig = e2e.rig(stages=2, settings={"kv": {"disk_mb": 64, "disk_dir": self.folder},
                                               "sched": {"probe_ms": 200}})

    def tearDown(self):
        self.rig.stop()
        shutil.rmtree(self.folder)

    def spawn(self, who, fault=None):
        """`who` is "router" or a stage."""
        if fault is not None:
            os.environ["DS4_FAULT"] = "%s:%s" % (fault, who)
        try:
            self.rig.start_router() if who == "router" else self.rig.start_worker(who)
        finally:
            os.environ.pop("DS4_FAULT", None)

    def start(self, who=None, fault=None):
        for process in ("router", 0, 1):
            self.spawn(process, fault if process == who else None)
        self.rig.wait_ready()

    def process(self, who):
        return self.rig.router if who == "router" else self.rig.workers[who]

    def wait(self, what, done):
        e2e.wait_until(done, lambda: what + "\n" + self.rig.logs())

    def metric(self, name, labels=""):
        text = self.rig.request("GET", "/metrics")[2].decode()
        return sum(float(value) for value in
                   re.findall(r"^%s{[^}]*%s[^}]*} (\S+)$" % (name, labels), text, re.M))

    def files(self, pattern):
        return glob.glob(self.folder + "/v1/*/" + pattern)

    def ask(self):
        """Asks; the answer must be right.  Tokens that were not computed."""
        status, answer = self.rig.post("/v1/completions", self.PROMPT)
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["choices"][0]["text"], self.right)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def settled(self):
        """Two commits, and nothing that is to be cleaned up."""
        self.wait("the saves", lambda: self.metric("ds4_kv_disk_commits") == 2 and not self.files("man/*.w"))

    def new_router(self):
        self.rig.router.terminate()
        self.rig.router.wait(30)
        self.spawn("router")
        self.rig.wait_ready()

    def kill_while_saving(self, who, fault, kept):
        """The process is killed at that point of the save; it comes back, and so does everything else."""
        self.start(who, fault)
        try:  # the answer may still be under way when its prompt is saved
            self.assertIn(self.rig.post("/v1/completions", self.PROMPT)[0], (200, 503))
        except OSError:
            self.assertEqual(who, "router")
        self.wait("the kill", lambda: self.process(who).poll() is not None)
        self.assertEqual(self.process(who).poll(), -9)
        if who != "router":
            self.rig.wait_not_ready()
        self.spawn(who)
        self.rig.wait_ready()
        cached = self.ask()
        if kept:
            self.assertGreater(cached, 500)
        self.settled()
        self.new_router()
        self.assertGreater(self.ask(), 500)
        self.assertEqual(self.metric("ds4_kv_disk_rejects_total"), 0)

    @LONG
    def test_a_worker_killed_before_its_part_has_its_name(self):
        for nth in (1, 2):
            with self.subTest(nth):
                self.kill_while_saving(1, "kill_before_rename:%d" % nth, False)
                self.tearDown()
                self.setUp()

    def test_a_worker_killed_with_its_part_in_place(self):
        self.kill_while_saving(0, "kill_after_part_before_manifest:1", False)

    def test_the_router_killed_with_all_parts_and_no_manifest(self):
        self.kill_while_saving("router", "kill_after_part_before_manifest:1", False)

    @LONG
    def test_the_router_killed_with_a_manifest_that_has_no_name(self):
        self.kill_while_saving("router", "kill_before_rename:1", False)

    @LONG
    def test_the_router_killed_when_the_manifest_is_there(self):
        self.kill_while_saving("router", "kill_after_manifest:1", True)

    def fail_while_saving(self, who, fault):
        """No commit comes of it, nothing is left of it, the next one works."""
        self.start(who, fault)
        self.ask()
        self.wait("the failure", lambda: self.metric("ds4_kv_disk_saves_total", 'result="failed"') == 1)
        self.wait("the other save", lambda: self.metric("ds4_kv_disk_saves_total", 'result="ok"') >= 1)
        self.wait("the removal", lambda: not self.files("man/*.w"))
        self.assertEqual(self.metric("ds4_kv_disk_commits"), len(self.files("man/*.m")))
        self.assertEqual(self.rig.request("GET", "/health")[0], 200)
        self.ask()
        self.new_router()
        self.ask()
        self.assertEqual(self.metric("ds4_kv_disk_rejects_total"), 0)

    @LONG
    def test_a_full_disk_a_lost_write_and_a_refused_name_at_a_worker(self):
        for fault in ("write_enospc:1", "fsync_eio:1", "rename_fail:1"):
            with self.subTest(fault):
                self.fail_while_saving(1, fault)
                self.tearDown()
                self.setUp()

    @LONG
    def test_the_same_at_the_router(self):
        for fault in ("write_enospc:2", "fsync_eio:1", "rename_fail:1"):  # its first write is the .w file
            with self.subTest(fault):
                self.fail_while_saving("router", fault)
                self.tearDown()
                self.setUp()

    @LONG
    def test_a_manifest_that_leaves_a_stage_out_is_refused(self):
        self.start("router", "manifest_missing_stage:1")
        self.ask()
        self.settled()
        self.new_router()
        self.assertEqual(self.ask(), 0)
        self.assertEqual(self.metric("ds4_kv_disk_rejects_total", 'reason="missing_part"'), 1)

    def bad_read(self, fault, reason):
        self.start()
        self.ask()
        self.settled()
        self.rig.router.terminate()
        self.rig.router.wait(30)
        self.rig.workers[1].terminate()
        self.rig.workers[1].wait(30)
        self.spawn(1, fault)
        self.spawn("router")
        self.rig.wait_ready()
        self.wait("the scan", lambda: self.metric("ds4_kv_disk_commits") == 2)
        cached = self.ask()
        if reason is None:
            self.assertGreater(cached, 500)
        else:
            self.assertEqual(cached, 0)
            self.assertEqual(self.metric("ds4_kv_disk_rejects_total"), 1)
            self.assertEqual(self.metric("ds4_kv_disk_rejects_total", 'reason="%s"' % reason), 1)
        self.assertEqual(self.rig.request("GET", "/health")[0], 200)

    @LONG
    def test_a_checksum_that_is_wrong_when_read(self):
        self.bad_read("part_bad_crc:1", "crc")

    @LONG
    def test_a_part_of_another_model(self):
        self.bad_read("part_wrong_fingerprint:1", "fingerprint")

    @LONG
    def test_a_disk_that_cannot_be_read(self):
        self.bad_read("part_short_read:1", "io")

    @LONG
    def test_a_disk_that_takes_its_time(self):
        self.bad_read("part_delay_ms:1+", None)


if __name__ == "__main__":
    e2e.main()
