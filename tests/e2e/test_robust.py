#!/usr/bin/env python3
"""What once hung or broke the server, one test per symptom: rude clients, failures at bad moments."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}


def wordy(tokens, **more):
    """A streamed request whose answer has exactly so many tokens."""
    return dict(HELLO, stream=True, max_tokens=tokens, min_tokens=tokens, temperature=1, **more)


def send(rig, body, receive_bytes=None):
    """A request on a plain socket, whose answer nobody reads yet."""
    sock = socket.socket()
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(e2e.PATIENCE)
    sock.connect(("127.0.0.1", rig.port))
    data = json.dumps(body).encode()
    sock.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
                 % (CHAT.encode(), len(data)) + data)
    return sock


def read_all(sock):
    parts = []
    while True:
        try:
            part = sock.recv(1 << 16)
        except ConnectionError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def metric(rig, name):
    """Sum of a metric's samples over its labels."""
    lines = rig.request("GET", "/metrics", timeout=10)[2].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines
               if line.startswith((name + " ", name + "{")))


class Rude(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rig = e2e.rig(stages=1, settings={"http": {"out_buf": 4096, "slow_client_s": 1}})
        cls.rig.start()

    @classmethod
    def tearDownClass(cls):
        cls.rig.stop()

    def tearDown(self):
        self.assertEqual(self.rig.post(CHAT, HELLO)[0], 200)

    def wait_idle(self):
        e2e.wait_until(lambda: metric(self.rig, "ds4_requests_inflight") == 0, lambda: "requests stay in flight")

    def test_readers_that_stop_do_not_hang_the_router(self):
        """A frame that no longer fits ended answers inside their own callbacks: the loop never returned
        when one of several choices was delivering, and the answer was freed under its last frame."""
        usage = {"include_usage": True, "continuous_usage_stats": True}
        before = metric(self.rig, "ds4_requests_started_total")
        socks = [send(self.rig, wordy(tokens, n=n, logprobs=True, top_logprobs=20,
                                      stream_options=usage), 4096)
                 for tokens in (60, 100) for n in (1, 3, 8)]
        # Each choice is a sequence; those that have ended are counted.
        e2e.wait_until(lambda: metric(self.rig, "ds4_requests_started_total") >= before + len(socks))
        self.wait_idle()
        ends = [read_all(sock)[-60:] for sock in socks[2::3]]
        for sock in socks:
            sock.close()
        # Cut off in the middle, not ended in good order.
        for end in ends:
            self.assertNotIn(b"0\r\n\r\n", end[-5:])
            self.assertNotIn(b"[DONE]", end)
        self.assertGreaterEqual(metric(self.rig, "ds4_requests_cancelled_total"), 6)

    def test_a_worker_that_dies_under_several_choices_ends_them_all(self):
        """The first choice to fail cancelled the others, which their generation still held, for ever."""
        frames = []
        reader = threading.Thread(
            target=lambda: frames.extend(self.rig.stream(CHAT, wordy(1500, n=3))))
        reader.start()
        e2e.wait_until(lambda: len(frames) >= 30, self.rig.logs)
        self.rig.kill_worker(0)
        reader.join(e2e.PATIENCE)
        self.assertFalse(reader.is_alive(), "the stream hangs")
        self.assertEqual(frames[-1][1], "[DONE]")
        self.assertIn("error", json.loads(frames[-2][1]))
        self.rig.start_worker(0)
        self.rig.wait_ready()

    def test_a_worker_that_was_stopped_for_a_while_serves_again(self):
        """Lost for its silence, it was never taken back, and nobody starts a process that runs."""
        worker = self.rig.workers[0]
        worker.send_signal(signal.SIGSTOP)
        try:
            print("silent, it was given up after %.1f s" % self.rig.wait_not_ready())
        finally:
            worker.send_signal(signal.SIGCONT)
        self.rig.wait_ready()
        self.assertIs(self.rig.workers[0], worker)


class Files(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="ds4-robust-")

    def tearDown(self):
        self.folder.cleanup()

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def test_the_key_stands_before_its_name(self):
        """The name was taken for the key."""
        with open(self.path("keys"), "w", encoding="ascii") as keys:
            keys.write("# keys\n\nsk-first alice in the lab\n  sk-second\tbob\nsk-third\n")
        rig = e2e.rig(stages=1, settings={"http": {"keys_file": self.path("keys")}})
        rig.start_router()
        try:
            e2e.wait_until(lambda: rig.request("GET", "/livez"))

            def status(headers):
                return rig.request("GET", "/v1/models", headers=headers)[0]

            for key in ("sk-first", "sk-second", "sk-third"):
                self.assertEqual(status({"authorization": "Bearer " + key}), 503)
                self.assertEqual(status({"x-api-key": key}), 503)
            for key in ("alice", "alice in the lab", "lab", "bob", "sk-first alice in the lab",
                        "sk-firs", "sk-first1", "# keys", "#", ""):
                self.assertEqual(status({"authorization": "Bearer " + key}), 401)
                self.assertEqual(status({"x-api-key": key}), 401)
            self.assertEqual(status({}), 401)
        finally:
            rig.stop()

    def test_a_synthesised_file_does_not_replace_a_device(self):
        """rename() put a regular file where /dev/full had been."""
        os.mkfifo(self.path("fifo"))
        done = subprocess.run([os.path.join(e2e.bin_dir(), "ds4-gguf"), "synth", "--shape", "tiny",
                               "--quant", "q8", "--layers", "0-1", "--seed", "1",
                               self.path("fifo")], stderr=subprocess.PIPE, text=True, timeout=60,
                              check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no regular file", done.stderr)
        self.assertEqual(os.listdir(self.folder.name), ["fifo"])

    def test_zero_is_refused_where_it_would_mean_the_default(self):
        for section, option in (("sched", "queue_max"), ("sched", "queue_s"),
                                ("kv", "hot_window")):
            with open(self.path("ds4.conf"), "w", encoding="ascii") as conf:
                conf.write("%s { %s = 0 }\n" % (section, option))
            done = subprocess.run([os.path.join(e2e.bin_dir(), "ds4-router"), "--check-config",
                                   "--config", self.path("ds4.conf")], stderr=subprocess.PIPE,
                                  text=True, timeout=60, check=False)
            self.assertEqual(done.returncode, 78)
            self.assertIn(section + "." + option, done.stderr)


if __name__ == "__main__":
    e2e.main()
