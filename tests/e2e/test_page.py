#!/usr/bin/env python3
"""The status page and its data, without a browser (`make check-page` has one)."""

import base64
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
import scripted  # noqa: E402

CHAT = "/v1/chat/completions"
STORY = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "temperature": 0,
         "stream": True, "max_tokens": 120, "min_tokens": 120}


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rig = e2e.rig(stages=2)
        cls.rig.start()

    @classmethod
    def tearDownClass(cls):
        cls.rig.stop()

    def stats(self):
        status, headers, data = self.rig.request("GET", "/v1/stats")
        self.assertEqual((status, headers["cache-control"]), (200, "no-store"))
        return json.loads(data)

    def page(self, **headers):
        status, answer_headers, data = self.rig.request("GET", "/", headers=headers)
        self.assertEqual(status, 200)
        return answer_headers, data.decode("utf-8")

    def test_the_page_is_one_file_that_asks_no_other_host(self):
        headers, text = self.page(accept="text/html,*/*;q=0.8")
        self.assertEqual(headers["content-type"], "text/html; charset=utf-8")
        self.assertLess(len(text), 100000)
        self.assertNotRegex(text, r"(src|href)\s*=\s*[\"']?(https?:|//)")
        self.assertEqual(set(re.findall(r"https?://[^\s'\"`)]*", text)), {"http://www.w3.org/2000/svg"})
        self.assertNotRegex(text, r"<link[^>]*stylesheet|<script[^>]*src|@import|innerHTML")
        self.assertNotRegex(text, r"<[^>]*\s(style|on[a-z]+)=")  # the policy would refuse them

    def test_the_policy_allows_exactly_what_is_on_the_page(self):
        headers, text = self.page()
        policy = headers["content-security-policy"]
        for tag in ("style", "script"):
            body = re.search("<%s>(.*?)</%s>" % (tag, tag), text, re.S).group(1)
            digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
            self.assertIn("%s-src 'sha256-%s';" % (tag, digest), policy)
        for rule in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'",
                     "base-uri 'none'", "form-action 'none'"):
            self.assertIn(rule, policy)
        self.assertNotIn("unsafe", policy)
        self.assertEqual(headers["x-content-type-options"], "nosniff")

    def test_who_asks_for_json_gets_the_version(self):
        headers, text = self.page(accept="application/json")
        self.assertIn("version", json.loads(text))
        status, headers, data = self.rig.request("HEAD", "/")
        self.assertEqual((status, data), (200, b""))

    def test_the_numbers_say_what_happens(self):
        before, done, enough = self.stats(), [], threading.Event()

        def run():
            while not enough.is_set():
                done.append(list(self.rig.stream(CHAT, STORY)))

        # Rates are those of the last seconds and come with heartbeats: two clients go on until all is there.
        def busy():
            now = self.stats()
            seen = [now["generated_tokens_per_second"] > 1, now["decoding"] == 2, now["cache"]["live"] >= 2,
                    now["bubble_ratio"] or 0, now["stages"][0]["sent_bytes_per_second"] or 0]
            seen += [stage[key] or 0 for stage in now["stages"] for key in
                     ("weights_bytes", "cache_bytes", "resident_bytes", "steps", "decode_step_seconds", "busy_ratio")]
            return now if all(value > 0 for value in seen) else None

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            now = e2e.wait_until(busy, lambda: str(self.stats()))
        finally:
            enough.set()
            for thread in threads:
                thread.join()
        self.assertLess(now["bubble_ratio"], 1)
        cache = now["cache"]
        self.assertEqual(cache["free"] + cache["promised"] + cache["live"] + cache["cached"],
                         cache["total"])
        layer = 0
        for number, stage in enumerate(now["stages"]):
            self.assertEqual((stage["stage"], stage["state"]), (number, "ready"))
            self.assertEqual(stage["first_layer"], layer)
            layer = stage["last_layer"] + 1
            self.assertLessEqual(stage["busy_ratio"], 1)
        self.assertEqual(layer, now["stages"][0]["layers"])
        after = self.stats()
        self.assertEqual(after["totals"]["completed"], before["totals"]["completed"] + len(done))
        self.assertEqual(after["totals"]["generated_tokens"],
                         before["totals"]["generated_tokens"] + 120 * len(done))
        e2e.wait_until(lambda: sum(self.stats()["history"]["generated_tokens_per_second"]) > 60 * len(done))

    def test_a_stage_that_died_is_down_within_three_seconds_and_an_event(self):
        self.rig.kill_worker(1)
        begin = time.monotonic()
        e2e.wait_until(lambda: self.stats()["stages"][1]["state"] == "down", self.rig.logs)
        print("a dead stage is down after %.1f s" % (time.monotonic() - begin))
        now = self.stats()
        self.assertEqual((now["state"], now["ready"]), ("recovering", False))
        self.assertTrue(now["events"][0]["bad"])
        self.rig.start_worker(1)
        self.rig.wait_ready()
        now = self.stats()
        self.assertEqual([stage["state"] for stage in now["stages"]], ["ready", "ready"])
        self.assertEqual(now["stages"][1]["restarts"], 1)
        self.assertEqual(now["events"][0]["text"], "2 stages formed the pipeline")


class Card(unittest.TestCase):
    def test_what_a_card_says_is_in_the_numbers_and_the_metrics_and_goes_with_its_stage(self):
        rig = scripted.ScriptedRig({"celsius": 86})
        try:
            rig.start()
            stage = json.loads(rig.request("GET", "/v1/stats")[2])["stages"][0]
            self.assertEqual(stage["card"], {
                "core_celsius": 86, "memory_celsius": None, "watts": None, "slowed_by_heat": True,
                "slowed_by_power_brake": False})
            status, _, health = rig.request("GET", "/health")
            health = json.loads(health)
            self.assertEqual((status, health["status"], health["reasons"]),
                             (200, "degraded", ["stage 0 is slowed down by heat"]))
            text = rig.request("GET", "/metrics")[2].decode()
            self.assertRegex(text, r'ds4_gpu_temperature_celsius\{[^}]*sensor="core"\} 86')
            self.assertRegex(text, r'ds4_gpu_throttle\{[^}]*reason="thermal"\} 1')
            self.assertRegex(text, r'ds4_gpu_xid_total\{[^}]*code="79"\} 0')
            self.assertNotIn('sensor="memory"', text)
            self.assertNotIn("ds4_gpu_power_watts{", text)
            rig.kill_worker(0)

            def down():
                now = json.loads(rig.request("GET", "/v1/stats")[2])["stages"][0]
                return now if now["state"] == "down" else None

            self.assertIsNone(e2e.wait_until(down, rig.logs)["card"])
            text = rig.request("GET", "/metrics")[2].decode()
            self.assertNotIn("ds4_gpu_temperature_celsius{", text)
            self.assertIn("ds4_gpu_xid_total{", text)
        finally:
            rig.stop()


class Locked(unittest.TestCase):
    def test_the_page_is_open_and_its_data_is_not(self):
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
            keys.write("sk-right\n")
            keys.flush()
            rig = e2e.rig(stages=1, settings={"http": {"keys_file": keys.name}})
            try:
                rig.start()
                self.assertEqual(rig.request("GET", "/")[0], 200)
                self.assertEqual(rig.request("GET", "/v1/stats")[0], 401)
                self.assertEqual(rig.request("POST", "/admin/drain", b"")[0], 401)
                headers = {"authorization": "Bearer sk-right"}
                self.assertEqual(rig.request("GET", "/v1/stats", headers=headers)[0], 200)
                self.assertEqual(rig.request("POST", "/admin/drain", b"", headers)[0], 202)
            finally:
                rig.stop()


if __name__ == "__main__":
    e2e.main()
