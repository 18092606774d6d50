#!/usr/bin/env python3
"""Weights that take their time: a bar where a person looks, lines in a journal, a status for the service manager."""

import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

# A disk of 2 MiB/s: reads sleep for as long as they would take, then are the system's own.
SLOW_DISK = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
ssize_t pread(int fd, void *data, size_t n, off_t offset)
{
    double seconds = (double)n / (2 << 20);
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
    return syscall(SYS_pread64, fd, data, n, offset);
}
ssize_t pread64(int fd, void *data, size_t n, off_t offset) { return pread(fd, data, n, offset); }
"""
LINE = r'(\d+) %, [0-9.]+ of [0-9.]+ MiB, [0-9.]+ [KM]iB/s, \d+ s left'


@unittest.skipUnless(shutil.which("gcc"), "gcc is not installed")
class Loading(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="ds4-loading-")
        self.addCleanup(self.folder.cleanup)
        self.disk = os.path.join(self.folder.name, "slow_disk.so")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-w", "-x", "c", "-", "-o", self.disk],
                       input=SLOW_DISK, text=True, check=True, timeout=60)
        self.rig = e2e.rig(stages=2, settings={"worker": {"load": "pread"}})
        self.addCleanup(self.rig.stop)
        self.screen = ""

    def start(self, stage, stderr, **environment):
        self.rig.workers[stage] = subprocess.Popen(
            [os.path.join(self.rig.bin_dir, "ds4-worker"), "--config", self.rig.config, "--stage", str(stage)],
            stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
            env=dict(os.environ, LD_PRELOAD=self.disk, **environment))

    def watch(self, terminal):
        try:
            while True:
                self.screen += os.read(terminal, 4096).decode("utf-8", "replace")
        except OSError:  # nobody writes to it any more
            os.close(terminal)

    def test_a_slow_load_is_told_to_a_person_a_journal_and_the_service_manager(self):
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(manager.close)
        manager.bind(os.path.join(self.folder.name, "notify"))
        manager.setblocking(False)
        said = []

        def statuses():
            try:
                while True:
                    said.append(manager.recv(4096).decode())
            except BlockingIOError:
                return [text for text in said if "STATUS=loading" in text]

        self.rig.start_router()
        path = os.path.join(self.rig.folder, "stage0.log")
        with open(path, "ab") as journal:
            self.start(0, journal, NOTIFY_SOCKET=os.path.join(self.folder.name, "notify"))
        terminal, slave = pty.openpty()
        self.start(1, slave)
        os.close(slave)
        watcher = threading.Thread(target=self.watch, args=(terminal,), daemon=True)
        watcher.start()

        def lines():
            statuses()  # the socket holds few
            with open(path, encoding="utf-8") as log:
                return [line for line in log if ' progress what="loading weights" ' in line]

        e2e.wait_until(lambda: len(lines()) >= 2, self.rig.logs)
        self.assertRegex(lines()[0], 'done="%s"' % LINE)
        self.assertRegex(lines()[-1], r'bytes=\d+ seconds=[0-9.]+ rate="[0-9.]+ [KM]iB/s"')
        self.rig.wait_ready()
        shares = [int(n) for n in re.findall(r"STATUS=loading %s" % LINE, "\n".join(statuses()))]
        self.assertGreater(len(set(shares)), 1, said)
        self.assertEqual(shares, sorted(shares))
        bars = re.findall(r"\r\033\[Kloading weights \[([#.]{30})\] %s" % LINE, self.screen)
        shares = [int(share) for _, share in bars]
        self.assertGreater(len(set(shares)), 1, self.screen)
        self.assertEqual(shares, sorted(shares))
        for cells, share in bars:
            self.assertAlmostEqual(cells.count("#"), int(share) * 30 / 100, delta=1)
        # The bar is gone where the log goes on.
        self.assertRegex(self.screen, r'\r\033\[K[^\r]* progress what="loading weights" bytes=')
        status, answer = self.rig.post("/v1/completions", {"prompt": "one two", "max_tokens": 2, "temperature": 0})
        self.assertEqual(status, 200, answer)


if __name__ == "__main__":
    e2e.main()
