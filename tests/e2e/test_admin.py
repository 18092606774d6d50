#!/usr/bin/env python3
"""Health that follows tokens, the canary, and what an operator may do through HTTP."""

import http.client
import json
import os
import re
import socket
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8,
         "chat_template_kwargs": {"thinking": False}}
STORY = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "temperature": 0,
         "stream": True}
HEALTHS = 300


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


class Admin(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rig = e2e.rig(stages=2, settings={"cluster": {"leave_s": 60}})
        cls.rig.start()

    @classmethod
    def tearDownClass(cls):
        cls.rig.stop()

    def admin(self, path, headers=None):
        status, _, data = self.rig.request("POST", "/admin/" + path, b"", headers or {})
        return status, json.loads(data)

    def health(self):
        status, headers, data = self.rig.request("GET", "/health")
        return status, headers, json.loads(data)

    def read_story(self, tokens):
        frames = []
        body = dict(STORY, max_tokens=tokens, min_tokens=tokens)

        def read():
            for frame in self.rig.stream(CHAT, body):
                frames.append(frame)

        thread = threading.Thread(target=read)
        thread.start()
        e2e.wait_until(lambda: len(frames) >= 5, self.rig.logs)
        return thread, frames

    def test_the_canary_has_answered_soon_after_the_start(self):
        e2e.wait_until(lambda: self.health()[2]["canary_age_ms"] is not None, self.rig.logs)
        text = self.rig.request("GET", "/metrics")[2].decode()
        self.assertRegex(text, r'ds4_canary_total{[^}]*result="ok"} [1-9]')
        self.assertNotRegex(text, r'ds4_requests_started_total{[^}]*api="completions"} [1-9]')
        self.assertRegex(text, r"ds4_canary_age_seconds{[^}]*} [0-9]")

    def test_health_is_quick_under_load(self):
        """Eight streams run meanwhile: the answer takes no lock and asks no worker."""
        running = [self.read_story(60) for _ in range(8)]
        sock = socket.create_connection(("127.0.0.1", self.rig.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        took = []
        for _ in range(HEALTHS):
            begin = time.perf_counter()
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = sock.recv(65536)
            took.append(time.perf_counter() - begin)
            self.assertTrue(answer.startswith(b"HTTP/1.1 200"), answer)
        sock.close()
        text = self.rig.request("GET", "/metrics")[2].decode()
        inside = [float(re.search(r'ds4_http_request_seconds_%s{[^}]*endpoint="health"} (\S+)' % part,
                                  text).group(1)) for part in ("sum", "count")]
        print("inside the router: %.0f us in the mean of %d" % (1e6 * inside[0] / inside[1], inside[1]))
        print("GET /health over one connection: p50 %.0f us, p99 %.0f us" %
              (1e6 * percentile(took, 0.5), 1e6 * percentile(took, 0.99)))
        for thread, frames in running:
            thread.join(60)
            self.assertEqual(frames[-1][1], "[DONE]")

    def test_a_drain_refuses_new_requests_and_can_be_taken_back(self):
        thread, frames = self.read_story(200)
        self.assertEqual(self.admin("drain"), (202, {"status": "draining"}))
        status, headers, body = self.health()
        self.assertEqual((status, body["status"]), (503, "draining"))
        status, headers, data = self.rig.request("POST", CHAT, HELLO)
        self.assertEqual((status, json.loads(data)["error"]["code"]), (503, "draining"))
        self.assertGreaterEqual(int(headers["retry-after"]), 1)
        self.assertEqual(headers["connection"], "close")
        self.assertEqual(self.rig.request("GET", "/v1/models")[0], 503)
        self.assertEqual(self.rig.request("GET", "/livez")[0], 200)
        thread.join(60)
        self.assertEqual(frames[-1][1], "[DONE]")
        self.assertNotIn("error", json.loads(frames[-2][1]))
        self.assertEqual(self.admin("undrain"), (202, {"status": "serving"}))
        self.assertEqual(self.health()[0], 200)
        self.assertEqual(self.rig.post(CHAT, HELLO)[0], 200)

    def test_a_stage_is_restarted_without_an_error_in_what_runs(self):
        thread, frames = self.read_story(60)
        generation = self.health()[2]["generation"]
        self.assertEqual(self.admin("stage/1/restart"), (202, {"status": "restarting"}))
        status, _, body = self.health()
        self.assertEqual((status, body["status"]), (503, "recovering"))
        self.assertIn("stage 1", body["reasons"][0])
        # Exit 75: a supervisor starts it again; here that is the test.
        self.assertEqual(self.rig.workers[1].wait(e2e.PATIENCE), 75)
        thread.join(60)
        self.assertEqual(frames[-1][1], "[DONE]")
        self.assertNotIn("error", json.loads(frames[-2][1]))
        self.rig.start_worker(1)
        self.assertGreater(self.rig.wait_ready()["generation"], generation)
        self.assertEqual(self.rig.post(CHAT, HELLO)[0], 200)
        text = self.rig.request("GET", "/metrics")[2].decode()
        self.assertRegex(text, r'ds4_worker_restarts_total{[^}]*stage="1",exit="clean"} 1')

    def test_what_cannot_be_restarted_is_said(self):
        self.assertEqual(self.admin("stage/7/restart")[0], 400)
        self.assertEqual(self.admin("stage/x/restart")[0], 400)
        self.assertEqual(self.admin("stage/99999999999999/restart")[0], 400)
        self.rig.kill_worker(1)
        e2e.wait_until(lambda: "stage 1 is missing" in self.health()[2]["reasons"], self.rig.logs)
        self.assertEqual(self.admin("stage/1/restart")[0], 503)
        self.rig.start_worker(1)
        self.rig.wait_ready()

    def test_foreign_pages_and_proxies_are_refused(self):
        port = self.rig.port
        for headers in ({"origin": "http://evil.example"}, {"origin": "null"},
                        {"host": "evil.example", "origin": "http://evil.example"},
                        {"host": "rig.lan:%d" % port}, {"x-forwarded-for": "192.0.2.1"},
                        {"via": "1.1 proxy"}, {"forwarded": "for=192.0.2.1"}, {"x-real-ip": "192.0.2.1"},
                        {"x-forwarded-host": "rig.lan"}, {"x-forwarded-proto": "https"},
                        {"origin": "https://127.0.0.1:%d" % port}):
            status, answer = self.admin("drain", headers)
            self.assertEqual((status, answer["error"]["code"]), (403, "permission_denied"), headers)
        self.assertEqual(self.health()[0], 200)
        for headers in ({"host": "localhost:%d" % port, "origin": "http://localhost:%d" % port},
                        {"host": "[::1]:%d" % port}, {"host": "127.0.0.1"}):
            self.assertEqual(self.admin("undrain", headers)[0], 202, headers)
        self.assertEqual(self.rig.request("GET", "/admin/drain")[0], 405)


class Side(unittest.TestCase):
    def test_metrics_have_a_listener_of_their_own_with_nothing_else(self):
        rig = e2e.rig(stages=1, settings={"metrics": {"listen": "127.0.0.1:0"}})
        keys = os.path.join(rig.folder, "keys")
        with open(keys, "w", encoding="utf-8") as out:
            out.write("secret\n")
        rig.settings["http"]["keys_file"] = keys
        with open(rig.config, "w", encoding="utf-8") as out:
            out.write(e2e.settings_text(rig.settings))
        try:
            rig.start()
            port = int(re.search(r"metrics_port=(\d+)", rig.logs("router.log", lines=1000)).group(1))

            def ask(method, path, headers=None, body=None):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                try:
                    connection.request(method, path, body, headers or {})
                    answer = connection.getresponse()
                    return answer.status, answer.read().decode()
                finally:
                    connection.close()

            status, text = ask("GET", "/metrics")
            self.assertEqual(status, 200)
            self.assertIn("\nds4_ready{", text)
            for host in ("default", "side", "127.0.0.1:%d" % rig.port):
                self.assertEqual(ask("GET", "/v1/models", {"host": host})[0], 404, host)
            for method, path in (("GET", "/"), ("GET", "/health"), ("POST", "/admin/drain"), ("POST", CHAT)):
                self.assertEqual(ask(method, path, body="{}" if method == "POST" else None)[0], 404, path)
            self.assertEqual(rig.request("GET", "/v1/models")[0], 401)
            self.assertEqual(rig.request("GET", "/v1/models", headers={"host": "side",
                                                                       "x-api-key": "secret"})[0], 200)
        finally:
            rig.stop()


class Live(unittest.TestCase):
    def test_health_as_liveness_where_the_settings_say_so(self):
        rig = e2e.rig(stages=1, settings={"health": {"mode": "live"}})
        rig.start_router()
        try:
            self.assertEqual(e2e.wait_until(lambda: rig.request("GET", "/health"))[0], 200)
            self.assertEqual(rig.request("GET", "/ready")[0], 503)
        finally:
            rig.stop()


if __name__ == "__main__":
    e2e.main()
