#!/usr/bin/env python3
"""Stages that reach their router over tcp, as on other hosts: by key, and not without."""

import os
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8,
         "chat_template_kwargs": {"thinking": False}}


def make_keys(folder):
    os.makedirs(folder, mode=0o700)
    return subprocess.run([os.path.join(e2e.bin_dir(), "ds4-router"), "--make-keys", folder],
                          capture_output=True, text=True, timeout=20, check=False)


class Hosts(unittest.TestCase):
    def setUp(self):
        self.rig = e2e.rig(stages=2)
        self.keys = os.path.join(self.rig.folder, "keys")
        cluster = self.rig.settings["cluster"]
        cluster["steps_endpoint"] = "tcp://127.0.0.1:%d" % e2e.free_port()
        cluster["curve_dir"] = self.keys
        self.write_settings(self.rig.config, self.keys)
        done = make_keys(self.keys)
        self.assertEqual(done.returncode, 0, done.stderr)

    def tearDown(self):
        self.rig.stop()

    def write_settings(self, path, keys):
        self.rig.settings["cluster"]["curve_dir"] = keys
        with open(path, "w", encoding="utf-8") as out:
            out.write(e2e.settings_text(self.rig.settings))

    def test_with_keys_stages_serve_over_tcp(self):
        self.rig.start()
        status, answer = self.rig.post("/v1/chat/completions", HELLO)
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["choices"][0]["message"]["content"], "Hi! How can I help you?")
        self.rig.kill_worker(0)
        self.rig.wait_not_ready()
        self.rig.start_worker(0)
        self.rig.wait_ready()

    def test_a_worker_with_another_key_stays_outside(self):
        strange = os.path.join(self.rig.folder, "strange")
        self.assertEqual(make_keys(strange).returncode, 0)
        shutil.copy(os.path.join(self.keys, "router.public"), strange)  # it knows the router's
        self.rig.start_router()
        e2e.wait_until(lambda: "listen" in self.router_log(), self.rig.logs)  # it has read its own keys
        self.write_settings(self.rig.config, strange)
        self.rig.start_worker(0)
        self.rig.start_worker(1)
        e2e.wait_until(lambda: "bus.refused" in self.router_log(), self.rig.logs)
        self.assertNotIn("worker.hello", self.router_log())

    def router_log(self):
        with open(os.path.join(self.rig.folder, "router.log"), encoding="utf-8") as log:
            return log.read()

    def test_keys_that_are_there_are_not_overwritten_and_secrets_are_private(self):
        with open(os.path.join(self.keys, "router.secret"), "rb") as file:
            before = file.read()
        done = subprocess.run([os.path.join(e2e.bin_dir(), "ds4-router"), "--make-keys", self.keys],
                              capture_output=True, text=True, timeout=20, check=False)
        self.assertEqual(done.returncode, 78, done.stderr)
        with open(os.path.join(self.keys, "router.secret"), "rb") as file:
            self.assertEqual(file.read(), before)
        for name, mode in (("router.secret", 0o600), ("worker.secret", 0o600)):
            self.assertEqual(os.stat(os.path.join(self.keys, name)).st_mode & 0o777, mode)


if __name__ == "__main__":
    e2e.main()
