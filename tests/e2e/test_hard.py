#!/usr/bin/env python3
"""Connections that are hard on a server: slow, idle, huge, garbled, unwelcome, many.  After each the
service answers at once and its memory is where it was; the figures are printed."""

import json
import os
import random
import resource
import socket
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

CHAT = "/v1/chat/completions"
KEY = "sk-right"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 2}
N_SLOW, N_IDLE, N_GARBAGE, N_PEERS, N_TRIES = 200, 1000, 300, 15, 150
N_FREE = 100  # wrong keys of one address in a minute
REQUEST_S = 3
GROWN_KIB = 48 * 1024  # of resident memory, at most, by any of these


def rss_kib(process):
    with open("/proc/%d/status" % process.pid, encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))


def read_all(sock):
    parts = []
    try:
        while True:
            part = sock.recv(1 << 16)
            if not part:
                break
            parts.append(part)
    except (ConnectionError, socket.timeout):
        pass
    return b"".join(parts)


class Hard(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        cls.keys = tempfile.NamedTemporaryFile("w", suffix=".keys")
        cls.keys.write(KEY + "\n")
        cls.keys.flush()
        cls.rig = e2e.rig(stages=1, settings={"http": {"request_s": REQUEST_S,
                                                       "keys_file": cls.keys.name}})
        cls.rig.start()
        for _ in range(3):
            cls.serves(cls)

    @classmethod
    def tearDownClass(cls):
        cls.rig.stop()
        cls.keys.close()

    def serves(self):
        """A whole answer, and how long /health took meanwhile."""
        begin = time.monotonic()
        status = self.rig.request("GET", "/health", timeout=e2e.PATIENCE)[0]
        took = time.monotonic() - begin
        if status != 200:
            raise AssertionError("/health is %d" % status)
        headers = {"authorization": "Bearer " + KEY, "content-type": "application/json"}
        status, _, data = self.rig.request("POST", CHAT, HELLO, headers, timeout=e2e.PATIENCE)
        if status != 200:
            raise AssertionError("%d %r" % (status, data))
        return took

    def connect(self, source=None):
        sock = socket.create_connection(("127.0.0.1", self.rig.port), timeout=e2e.PATIENCE,
                                        source_address=(source, 0) if source else None)
        return sock

    def measure(self, what, during, after):
        """Runs `during`, then checks the service, then `after`, then memory."""
        before = rss_kib(self.rig.router)
        begin = time.monotonic()
        result = during()
        took = self.serves()
        peak = rss_kib(self.rig.router)
        after(result)
        print("%s: %.1f s, /health meanwhile in %.1f ms, resident %d -> %d -> %d KiB" %
              (what, time.monotonic() - begin, 1e3 * took, before, peak, rss_kib(self.rig.router)))
        self.assertLess(max(peak, rss_kib(self.rig.router)) - before, GROWN_KIB)
        self.assertIsNone(self.rig.router.poll())

    def test_slow_senders_are_cut_and_delay_nobody(self):
        """A byte now and then, of a head or of a body, for ever."""
        head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n" % CHAT.encode()
        begin = time.monotonic()

        def during():
            socks = [self.connect() for _ in range(N_SLOW)]
            for number, sock in enumerate(socks):
                sock.sendall(head + (b"\r\n{" if number % 2 else b"x-slow: "))
            return socks

        def after(socks):
            left = list(socks)
            while left and time.monotonic() - begin < 20 * REQUEST_S:
                time.sleep(0.2)
                for sock in list(left):
                    try:
                        sock.sendall(b" ")
                        sock.setblocking(False)
                        if sock.recv(4096) == b"":
                            left.remove(sock)
                    except BlockingIOError:
                        pass
                    except OSError:
                        left.remove(sock)
                    finally:
                        sock.setblocking(True)
            for sock in socks:
                sock.close()
            self.assertEqual(len(left), 0, "%d slow senders are still there" % len(left))

        self.measure("%d slow senders" % N_SLOW, during, after)

    def test_a_thousand_idle_connections(self):
        def during():
            socks = [self.connect() for _ in range(N_IDLE)]
            # Half of them have had an answer and are kept alive.
            for sock in socks[::2]:
                sock.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            for sock in socks[::2]:
                self.assertIn(b" 200 ", sock.recv(4096))
            return socks

        def after(socks):
            for sock in socks:
                sock.close()

        self.measure("%d idle connections" % N_IDLE, during, after)

    def test_oversized_headers_are_refused(self):
        def answer(head, body=b""):
            sock = self.connect()
            try:
                sock.sendall(head + b"connection: close\r\n\r\n" + body)
            except ConnectionError:
                pass
            data = read_all(sock)
            sock.close()
            return data

        get = b"GET /livez HTTP/1.1\r\nhost: x\r\n"
        fits = answer(get + b"x-big: " + b"a" * 60000 + b"\r\n")
        self.assertIn(b" 200 ", fits.split(b"\r\n")[0])
        large = answer(get + b"x-big: " + b"a" * 70000 + b"\r\n")
        self.assertIn(b" 431 ", large.split(b"\r\n")[0])
        self.assertIn(b"64 KiB", large)

        def during():
            for _ in range(20):
                for head in (get + b"x-big: " + b"a" * 3000000 + b"\r\n",
                             get + b"".join(b"x-%d: y\r\n" % i for i in range(5000)),
                             b"GET /" + b"a" * 1000000 + b" HTTP/1.1\r\nhost: x\r\n"):
                    data = answer(head)
                    self.assertNotIn(b" 200 ", data.split(b"\r\n")[0])

        self.measure("60 oversized heads", during, lambda _: None)

    def test_pipelined_garbage(self):
        rng = random.Random(11)
        good = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
        bad = [lambda: bytes(rng.randrange(256) for _ in range(rng.randint(1, 3000))),
               lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # TLS hello
               lambda: b"GET /livez HTTP/9.9\r\n\r\n", lambda: b"\r\n" * 2000,
               lambda: b"POST %s HTTP/1.1\r\ncontent-length: -1\r\n\r\n" % CHAT.encode(),
               lambda: b"POST %s HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n" % CHAT.encode(),
               lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(rng.randrange(256) for _ in range(900))]

        def during():
            for number in range(N_GARBAGE):
                sock = self.connect()
                try:
                    sock.sendall(good * (number % 4) + bad[number % len(bad)]())
                    sock.shutdown(socket.SHUT_WR)
                except OSError:
                    pass
                data = read_all(sock)
                self.assertGreaterEqual(data.count(b'{"status":"alive"}'), 0)
                sock.close()
            # A thousand good ones in one write are answered one by one.
            sock = self.connect()
            threading.Thread(target=sock.sendall, args=(good * 1000,), daemon=True).start()
            data = b""
            while data.count(b'{"status":"alive"}') < 1000:
                part = sock.recv(1 << 16)
                self.assertTrue(part, "closed after %d" % data.count(b'{"status":"alive"}'))
                data += part
            sock.close()

        self.measure("%d garbled connections, 1000 pipelined requests" % N_GARBAGE, during,
                     lambda _: None)

    def test_wrong_keys_from_many_peers(self):
        statuses = {}

        def during():
            for peer in range(N_PEERS):
                sock = self.connect("127.0.7.%d" % (peer + 1))
                for number in range(N_TRIES):
                    body = json.dumps(HELLO).encode()
                    sock.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-%d-%d\r\n"
                                 b"content-length: %d\r\n\r\n" % (CHAT.encode(), peer, number,
                                                                  len(body)) + body)
                    answer = b""
                    while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
                        part = sock.recv(1 << 16)
                        self.assertTrue(part, "closed without an answer")
                        answer += part
                    status = int(answer.split()[1])
                    statuses.setdefault(status, 0)
                    statuses[status] += 1
                    if status == 429:
                        self.assertIn(b"retry-after", answer.lower())
                sock.close()

        self.measure("%d wrong keys from %d addresses" % (N_PEERS * N_TRIES, N_PEERS), during,
                     lambda _: None)
        # The first of each address are told what is wrong, the rest to wait.  One peer comes after the
        # other, so it does not matter if two share a place.
        self.assertEqual(statuses, {401: N_FREE * N_PEERS, 429: (N_TRIES - N_FREE) * N_PEERS})
        # A right key from such an address is served.
        sock = self.connect("127.0.7.1")
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: %s\r\n\r\n" % KEY.encode())
        self.assertIn(b" 200 ", sock.recv(4096))
        sock.close()


class Files(unittest.TestCase):
    def test_a_low_limit_of_open_files_is_raised(self):
        """A service manager's soft limit of 1024 was met by 500 clients."""
        rig = e2e.rig(stages=1)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        try:
            rig.start()
            with open("/proc/%d/limits" % rig.router.pid, encoding="ascii") as limits:
                line = next(line for line in limits if line.startswith("Max open files"))
            self.assertEqual(line.split()[3], line.split()[4])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            rig.stop()


if __name__ == "__main__":
    e2e.main()
