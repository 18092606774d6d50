#!/usr/bin/env python3
"""A disk that is full, unmounted, mounted again: a real one, a tmpfs in a mount namespace of the test's own.
Requests never notice, /health and the metrics say what is wrong, and all of it heals without a restart.
Part of `make soak`; needs to be root, or says why it did nothing."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

CHAT = "/v1/chat/completions"
SECONDS = 60
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x00020000, 0x4000, 1 << 18


def own_namespace():
    """Why there is none, or None.  Of this process and what it starts; the rest of the machine sees nothing."""
    if shutil.which("mount") is None or shutil.which("umount") is None:
        return "mount is not installed"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return "no mount namespace: " + os.strerror(ctypes.get_errno())
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], stderr=subprocess.DEVNULL).returncode != 0:
            return "no tmpfs may be mounted"
        subprocess.run(["umount", folder], check=True)
    return None


class Mounts(unittest.TestCase):
    def setUp(self):
        why = own_namespace()
        if why is not None:
            self.skipTest(why)
        self.folder = tempfile.mkdtemp(prefix="ds4-mount-")
        self.mount()
        self.rig = e2e.rig(stages=2, settings={
            "kv": {"disk_mb": 64, "disk_dir": self.folder, "disk_write_mbps": 0},
            "sched": {"probe_ms": 200}})
        self.rig.start()
        self.n = 0
        self.wait_state("ready")

    def tearDown(self):
        if getattr(self, "rig", None) is None:
            return
        self.assertEqual({n: s for n, s in self.rig.stop().items() if s != 0}, {})
        subprocess.run(["umount", "-l", self.folder], stderr=subprocess.DEVNULL)
        os.rmdir(self.folder)

    def mount(self, *options):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m,mode=0700", *options, "tmpfs", self.folder], check=True)

    def metric(self, name, labels=""):
        text = self.rig.request("GET", "/metrics")[2].decode()
        return sum(float(v) for v in re.findall(r"^%s{[^}]*%s[^}]*} (\S+)$" % (name, labels), text, re.M))

    def health(self):
        status, _, body = self.rig.request("GET", "/health")
        self.assertEqual(status, 200, body)
        return json.loads(body)

    def wait(self, what, done):
        deadline = time.monotonic() + SECONDS
        while not done():
            self.assertLess(time.monotonic(), deadline, what + "\n" + self.rig.logs())
            time.sleep(0.05)

    def wait_state(self, state):
        self.wait("the state " + state, lambda: self.metric("ds4_kv_disk_state", 'state="%s"' % state) == 1)

    def ask(self):
        """A talk that nobody has had, long enough to be kept."""
        self.n += 1
        status, answer = self.rig.post(CHAT, {
            "messages": [{"role": "user", "content": " ".join("%d %d hens and a fox." % (self.n, i)
                                                              for i in range(36))}],
            "temperature": 0, "max_tokens": 4, "chat_template_kwargs": {"thinking": False}})
        self.assertEqual(status, 200, answer)

    def assert_degraded(self, *words):
        health = self.health()
        self.assertEqual(health["status"], "degraded", health)
        self.assertTrue(any("disk" in reason and any(word in reason for word in words)
                            for reason in health["reasons"]), health)
        self.assertNotIn(self.folder, json.dumps(health))

    def assert_heals(self):
        """Requests go on and sooner or later one is kept."""
        saved = self.metric("ds4_kv_disk_saves_total", 'result="ok"')

        def kept():
            self.ask()
            return self.metric("ds4_kv_disk_saves_total", 'result="ok"') > saved

        self.wait("a save", kept)
        self.wait_state("ready")
        self.assertEqual(self.health()["status"], "ok")

    def fail_saves(self):
        """Until it is not one that failed by chance."""

        def failing():
            self.ask()
            return self.metric("ds4_kv_disk_state", 'state="failing"') == 1

        self.wait("saves that fail", failing)

    def test_a_disk_that_is_full_gone_and_back_costs_no_request_and_no_restart(self):
        self.assert_heals()
        room = os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize
        with open(os.path.join(self.folder, "somebody-elses"), "wb") as ballast:
            ballast.write(b"x" * (room - 20480))
        self.fail_saves()
        self.assert_degraded("free", "space")
        os.unlink(ballast.name)
        self.assert_heals()
        subprocess.run(["umount", "-l", self.folder], check=True)
        self.ask()
        self.wait_state("lost")
        self.assert_degraded("gone", "mounted")
        self.ask()
        below = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, below)
        self.mount()
        self.wait_state("ready")
        self.assert_heals()
        self.assertEqual(os.listdir(below), [])  # nobody filled the disk below meanwhile
        self.assertEqual(self.metric("ds4_kv_invariant_failures_total"), 0)


if __name__ == "__main__":
    e2e.main()
