#!/usr/bin/env python3
"""The status page in a headless Chromium: it lives, a chat streams, a dead stage is red and green again.

Not part of `make check`: the browser is 300 MB.  `make check-page` installs it and runs this.
With PICTURES=folder in the environment the screens are left there, to be looked at.
"""

import json
import os
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
import scripted  # noqa: E402
from browser import Browser, find  # noqa: E402

DESK, PHONE = (1440, 900), (375, 740)
PICTURES = os.environ.get("PICTURES")


def text(selector):
    return "((document.querySelector('%s') || {}).textContent || '')" % selector


def tones(mark):
    return "document.querySelectorAll('.stage[data-tone=%s]').length" % mark


@unittest.skipUnless(find(), "there is no chromium: make check-page installs it")
class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rig = e2e.rig(stages=3, settings={"sampling": {"temperature": 0}})
        cls.rig.start()
        cls.browser = Browser()

    @classmethod
    def tearDownClass(cls):
        cls.browser.__exit__()
        cls.rig.stop()

    def open(self, size, dark=False):
        page = self.browser.open("http://127.0.0.1:%d/" % self.rig.port, *size, dark=dark)
        page.wait(text("#state span"), lambda value: value == "Ready")
        return page

    def finish(self, page):
        """Nobody complained, and nobody but the rig was asked."""
        self.assertEqual(page.complaints, [])
        own = ("http://127.0.0.1:%d/" % self.rig.port, "data:")
        self.assertEqual([url for url in page.requests if not url.startswith(own)], [])
        page.close()

    def look(self, page, name, whole=False):
        if PICTURES:
            page.picture(os.path.join(PICTURES, name + ".png"), whole)

    def ask(self, page, what):
        before = page.eval("document.querySelectorAll('.under').length")
        page.type("#say", what)
        page.press_enter()
        return before

    def test_a_chat_streams_with_its_reasoning_folded_and_the_page_lives(self):
        page = self.open(DESK)
        # The page itself notes each length of the reasoning: to ask for it may be too slow.
        page.eval("window.grown = []; new MutationObserver(() => grown.push(%s.length)).observe(document.body,"
                  " {subtree: true, childList: true, characterData: true}); 0" % text(".think p"))
        self.ask(page, "What is 47 + 38?")
        page.wait(text(".msg .under"))
        lengths = page.eval("grown")
        self.assertGreater(len(set(lengths)), 1, "the reasoning did not grow")
        self.assertEqual(lengths, sorted(lengths))
        self.assertIn("85", page.eval(text(".msg .text")))
        self.assertFalse(page.eval("document.querySelector('.think').open"))
        self.assertRegex(page.eval(text(".think summary")), r"Thought for [0-9.]+ s")
        self.assertRegex(page.eval(text(".under")), r"[0-9]+ tokens · [0-9.]+ tokens/s · .*effort high")
        page.wait(text("#out"), lambda value: float(value) > 0)
        page.wait(text("#totals"), lambda value: "Answered1" in value)
        page.click(".think summary")
        self.assertTrue(page.eval("document.querySelector('.think').open"))
        self.look(page, "desk")
        self.finish(page)

    def test_calls_of_tools_are_shown_and_their_results_go_back(self):
        page = self.open(PHONE)
        page.click("#tab-chat")
        page.click("#tools-on")
        self.ask(page, "What is the weather in Paris and Oslo? Use celsius.")
        page.wait("document.querySelectorAll('.call').length", lambda n: n == 2)
        self.assertEqual(page.eval("[...document.querySelectorAll('.call h4')].map(n => n.textContent)"),
                         ["get_weather", "get_weather"])
        self.assertIn("Paris", page.eval(text(".call dl")))
        self.look(page, "phone-call")
        for temperature in (12, 5):
            page.type(".call input", '{"temperature": %d}' % temperature)
            page.click(".call button")
        page.wait("document.querySelectorAll('.under').length", lambda n: n == 2)
        page.wait("[...document.querySelectorAll('.under')].pop().textContent")
        self.assertEqual(page.eval("document.querySelectorAll('.result').length"), 2)
        self.assertEqual(page.eval("document.querySelectorAll('.fault').length"), 0)
        self.finish(page)

    def test_an_answer_of_calls_alone_has_the_rate_of_its_own_time(self):
        chunks = [{"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c", "function": {
            "name": "f", "arguments": "{}"}}]}}]}, {"choices": [], "usage": {"completion_tokens": 9}}]
        page = self.open(PHONE)
        page.eval("{const real = window.fetch; window.fetch = (where, how) => where.includes('/chat/') ?"
                  " Promise.resolve(new Response(%s)) : real(where, how)}" %
                  json.dumps("".join("data: %s\n\n" % json.dumps(chunk) for chunk in chunks)))
        page.click("#tab-chat")
        self.ask(page, "Call f.")
        page.wait("document.querySelectorAll('.call').length", lambda n: n == 1)
        self.assertRegex(page.eval(text(".under")), r"^9 tokens.*first after 0\.\d\d s")
        self.finish(page)

    def test_a_dead_stage_is_red_within_three_seconds_and_green_again(self):
        page = self.open(DESK, dark=True)
        page.wait(tones("good"), lambda n: n == 3)
        self.rig.kill_worker(1)
        _, seconds = page.wait(tones("bad"), lambda n: n == 1)
        print("a dead stage is red after %.1f s" % seconds)
        self.assertLess(seconds, 3)
        page.wait(text("#state span"), lambda value: value == "Recovering")
        self.look(page, "dark-dead")
        self.rig.start_worker(1)
        page.wait(tones("good"), lambda n: n == 3)
        page.wait(text("#state span"), lambda value: value == "Ready")
        self.finish(page)

    def test_it_fits_a_phone(self):
        page = self.open(PHONE)
        self.assertEqual(page.eval("document.documentElement.scrollWidth"), PHONE[0])
        wide = ("[...document.querySelectorAll('main *')].filter(n => n.getClientRects().length &&"
                " n.getBoundingClientRect().right > innerWidth + 1).map(n => n.className || n.tagName)")
        self.assertEqual(page.eval(wide), [])
        self.look(page, "phone", whole=True)
        page.click("#tab-chat")
        self.assertEqual(page.eval(wide), [])
        self.assertEqual(page.eval("getComputedStyle(document.querySelector('.rig')).display"), "none")
        self.finish(page)

    def test_a_router_that_is_gone_is_said(self):
        page = self.open(DESK)
        self.rig.router.kill()
        self.rig.router.wait()
        _, seconds = page.wait(text("#state span"), lambda value: value == "No answer")
        print("a dead router is told after %.1f s" % seconds)
        self.rig.start_router()
        self.rig.wait_ready()
        page.wait(text("#state span"), lambda value: value == "Ready")
        time.sleep(0.1)
        page.complaints = [c for c in page.complaints if "ERR_CONNECTION" not in c]
        self.finish(page)


@unittest.skipUnless(find(), "there is no chromium: make check-page installs it")
class Hot(unittest.TestCase):
    def test_a_card_that_slows_down_is_amber_and_says_why(self):
        rig = scripted.ScriptedRig({"celsius": 86})
        try:
            rig.start()
            with Browser() as browser:
                page = browser.open("http://127.0.0.1:%d/" % rig.port, *PHONE)
                page.wait(tones("warn"), lambda n: n == 1)
                self.assertEqual(page.eval(text(".stage .card")), "86 °C · slowed by heat")
                if PICTURES:
                    page.picture(os.path.join(PICTURES, "hot.png"))
                page.close()
        finally:
            rig.stop()


@unittest.skipUnless(find(), "there is no chromium: make check-page installs it")
class Locked(unittest.TestCase):
    def test_a_locked_rig_asks_for_its_key_once(self):
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys, Browser() as browser:
            keys.write("sk-right\n")
            keys.flush()
            rig = e2e.rig(stages=1, settings={"http": {"keys_file": keys.name}})
            try:
                rig.start()
                page = browser.open("http://127.0.0.1:%d/" % rig.port, *DESK)
                page.wait(text("#state span"), lambda value: value == "Locked")
                self.assertFalse(page.eval("document.getElementById('key').hidden"))
                if PICTURES:
                    page.picture(os.path.join(PICTURES, "locked.png"))
                asked = len([url for url in page.requests if url.endswith("/v1/stats")])
                time.sleep(2.5)
                page.eval("1")
                self.assertEqual(len([u for u in page.requests if u.endswith("/v1/stats")]), asked)
                page.type("#key-value", "sk-right")
                page.click("#key button")
                page.wait(text("#state span"), lambda value: value == "Ready")
                page.type("#say", "Hello")
                page.press_enter()
                page.wait(text(".under"))
                self.assertEqual(page.eval("document.querySelectorAll('.fault').length"), 0)
                page.close()
            finally:
                rig.stop()


if __name__ == "__main__":
    e2e.main()
