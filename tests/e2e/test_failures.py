#!/usr/bin/env python3
"""Stages that are not there, die in the middle of an answer, and come back."""

import json
import os
import socket
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

CHAT = "/v1/chat/completions"
STORY = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "temperature": 0,
         "max_tokens": 1500, "min_tokens": 1500, "stream": True}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8,
         "chat_template_kwargs": {"thinking": False}}


class Failures(unittest.TestCase):
    def setUp(self):
        self.rig = e2e.rig(stages=2)

    def tearDown(self):
        statuses = self.rig.stop()
        self.assertEqual({n: s for n, s in statuses.items() if s != 0}, {})

    def answer(self):
        status, answer = self.rig.post(CHAT, HELLO)
        self.assertEqual(status, 200, answer)
        return answer["choices"][0]["message"]["content"]

    def test_a_worker_that_is_not_there_is_503_with_retry_after(self):
        self.rig.start_router()
        self.rig.start_worker(0)
        status, headers, data = e2e.wait_until(lambda: self.rig.request("POST", CHAT, HELLO))
        self.assertEqual(status, 503, data)
        self.assertIn("retry-after", headers)
        self.assertEqual(json.loads(data)["error"]["code"], "loading")
        self.assertEqual(self.rig.request("GET", "/livez")[0], 200)
        self.assertEqual(self.rig.request("GET", "/v1/models")[0], 503)
        self.rig.start_worker(1)
        self.rig.wait_ready()
        self.assertEqual(self.answer(), "Hi! How can I help you?")

    def kill_in_stream(self, stage):
        frames, ended = [], threading.Event()

        def read():
            try:
                for frame in self.rig.stream(CHAT, STORY):
                    frames.append(frame)
            finally:
                ended.set()

        reader = threading.Thread(target=read)
        reader.start()
        e2e.wait_until(lambda: len(frames) >= 20, lambda: "no tokens\n" + self.rig.logs())
        self.rig.kill_worker(stage)
        print("/health said so after %.1f s" % self.rig.wait_not_ready())
        self.assertTrue(ended.wait(e2e.PATIENCE), "the stream hangs\n" + self.rig.logs())
        reader.join()
        data = [text for event, text in frames if event != ":"]
        self.assertEqual(data[-1], "[DONE]")
        error = json.loads(data[-2])["error"]
        self.assertIn(error["code"], ("pipeline_restarted", "stage_down"))
        finishes = [c["finish_reason"] for text in data[:-2] for c in json.loads(text)["choices"]]
        self.assertEqual([f for f in finishes if f], [])
        self.assertEqual(self.rig.request("POST", CHAT, HELLO)[0], 503)

    def test_each_stage_killed_in_an_answer_and_service_again(self):
        self.rig.start()
        first = self.answer()
        generation = self.rig.wait_ready()["generation"]
        for stage in (0, 1):
            self.kill_in_stream(stage)
            self.rig.start_worker(stage)
            health = self.rig.wait_ready()
            self.assertGreater(health["generation"], generation)
            generation = health["generation"]
            self.assertEqual(self.answer(), first)
        self.assertIsNone(self.rig.router.poll())

    def test_answers_are_counted_by_endpoint_and_status(self):
        self.rig.start()
        self.answer()
        self.rig.request("POST", CHAT, b"{")
        self.rig.request("GET", "/nowhere")
        text = self.rig.request("GET", "/metrics")[2].decode()
        for labels in ('endpoint="chat",method="POST",code="200"',
                       'endpoint="chat",method="POST",code="400"',
                       'endpoint="other",method="GET",code="404"'):
            self.assertRegex(text, 'ds4_http_requests_total{[^}]*%s} 1' % labels)
        self.assertRegex(text, 'ds4_http_connections{[^}]*state="streaming"} 0')
        self.assertRegex(text, 'ds4_http_request_seconds_count{[^}]*endpoint="chat"} 2')

    def test_survivors_keep_their_process(self):
        self.rig.start()
        survivor = self.rig.workers[1].pid
        self.rig.kill_worker(0)
        self.rig.wait_not_ready()
        self.rig.start_worker(0)
        self.rig.wait_ready()
        self.assertIsNone(self.rig.workers[1].poll())
        self.assertEqual(self.rig.workers[1].pid, survivor)

    def shared_memory(self):
        """The files in /dev/shm that the stages have open."""
        names = set()
        for worker in self.rig.workers:
            with open(f"/proc/{worker.pid}/maps", encoding="utf-8") as maps:
                names |= {line.split()[5] for line in maps if "/dev/shm/ds4-" in line}
        return names

    def test_no_shared_memory_is_left_behind(self):
        self.rig.start()
        seen = self.shared_memory()
        self.rig.kill_worker(0)
        self.rig.wait_not_ready()
        self.rig.start_worker(0)
        self.rig.wait_ready()
        seen |= self.shared_memory()
        for stage in (0, 1):
            self.rig.kill_worker(stage)
        self.rig.stop()
        self.assertGreaterEqual(len(seen), 2)
        self.assertEqual([name for name in seen if os.path.exists(name)], [])
        self.rig.router, self.rig.workers = None, [None, None]

    def test_an_idle_rig_uses_no_processor(self):
        self.rig.start()
        self.answer()
        processes = [self.rig.router] + self.rig.workers

        def ticks():
            total = 0
            for process in processes:
                with open("/proc/%d/stat" % process.pid, encoding="ascii") as stat:
                    fields = stat.read().rsplit(")", 1)[1].split()
                total += int(fields[11]) + int(fields[12])
            return total

        before = ticks()
        time.sleep(3)
        used = (ticks() - before) / os.sysconf("SC_CLK_TCK")
        self.assertLess(used, 0.3, "%.2f s of processor time in 3 s" % used)

    def test_sigterm_lets_running_streams_finish(self):
        self.rig.start()
        done = []

        def read():
            for frame in self.rig.stream(CHAT, dict(STORY, max_tokens=200, min_tokens=200)):
                done.append(frame)

        reader = threading.Thread(target=read)
        reader.start()
        e2e.wait_until(lambda: len(done) >= 5, lambda: "no tokens\n" + self.rig.logs())
        self.rig.router.terminate()
        reader.join(e2e.PATIENCE)
        self.assertFalse(reader.is_alive())
        self.assertEqual(done[-1][1], "[DONE]")
        self.assertNotIn("error", done[-2][1])
        self.assertEqual(self.rig.router.wait(e2e.PATIENCE), 0)

    def test_a_second_sigterm_ends_streams_with_an_error(self):
        self.rig.start()
        frames = []
        idle = socket.create_connection(("127.0.0.1", self.rig.port))
        for _, text in self.rig.stream(CHAT, STORY):
            frames.append(text)
            if len(frames) == 20:
                self.rig.router.terminate()  # twice before it has looked is once
                e2e.wait_until(lambda: b"draining" in self.rig.request("GET", "/health")[2])
                self.rig.router.terminate()
        self.assertEqual(frames[-1], "[DONE]")
        self.assertEqual(json.loads(frames[-2])["error"]["code"], "draining")
        self.assertEqual(self.rig.router.wait(e2e.PATIENCE), 0)
        self.assertEqual(idle.recv(1), b"")
        idle.close()


if __name__ == "__main__":
    e2e.main()
