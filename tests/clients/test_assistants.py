#!/usr/bin/env python3
"""opencode, pi, Codex and Claude Code against the router: turns that must work, failures that must not
become storms of requests.

A turn has worked when its side effect is on disk and its last words were printed.  A failure is survived when
no client sends more than MOST requests within WINDOW_S, counted at the router.
"""

import concurrent.futures
import os
import signal
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import clients  # noqa: E402
import e2e  # noqa: E402
from scripted import DSML, ScriptedRig, calls  # noqa: E402

MOST, WINDOW_S = 10, 20
TURN_S = 240  # a client may take so long for a turn; most of it is its own start
MODEL_TURN_S = 900  # the same where a model on a slow processor reads 35,000 tokens first
QUESTION = "Please begin the test"
RESTART_S = 2  # RestartSec of the units
AT_ONCE = int(os.environ.get("CLIENTS_AT_ONCE", "2"))
QUICK = bool(os.environ.get("QUICK"))  # what every change runs: each client once


def only():
    """The clients to run: all, or those that CLIENTS names."""
    names = os.environ.get("CLIENTS", "").split()
    return [client for client in clients.CLIENTS if not names or client.name in names]


def full_only(test):
    return unittest.skipIf(QUICK, "not in the quick run")(test)


class Model(unittest.TestCase):
    """The guide's commands on ds4-tiny.  Behind a short prompt the model greets whoever greets it.  Behind the
    36,000 tokens of an assistant, which it was not made for, it may say anything: there it is the turn that
    counts - the router answered, and the client took the answer for complete - and not its words."""

    def take_a_turn(self, client, greets):
        if client.missing():
            self.skipTest(client.missing())
        rig = e2e.rig(stages=1, settings={"model": {"context": 65536}, "sched": {"chunk_tok": 2048},
                                          "sampling": {"temperature": 0}})
        try:
            rig.start()
            run = client.start(rig.port, "Hello")
            self.assertEqual(run.wait(MODEL_TURN_S), 0, run.output + rig.logs())
            self.assertGreaterEqual(clients.requests_seen(rig), 1, run.output + rig.logs())
            self.assertTrue(run.output.strip(), "the client printed nothing")
            if greets:
                self.assertRegex(run.output, "How can I help you|Hello!|Hi!")
                self.assertLessEqual(clients.requests_seen(rig), 2)
            client.clean(run)
        finally:
            rig.stop()

    def test_the_model_greets_behind_the_smallest_prompt(self):
        for client in only():
            if client.name == "pi":
                self.take_a_turn(client, greets=True)

    @full_only
    def test_every_client_takes_the_models_turn_for_complete(self):
        for client in only():
            with self.subTest(client=client.name):
                self.take_a_turn(client, greets=False)


class Turns(unittest.TestCase):
    def story(self, rule_of, check, requests):
        """The same story with every client; `rule_of(client)` are the rules, `check(client, run)` looks at
        what became of it."""
        for client in only():
            with self.subTest(client=client.name):
                if client.missing():
                    self.skipTest(client.missing())
                rig = ScriptedRig({"rules": rule_of(client)})
                try:
                    rig.start()
                    run = client.start(rig.port, QUESTION)
                    status = run.wait(TURN_S)
                    self.assertEqual(status, 0, run.output + rig.logs())
                    check(client, run)
                    self.assertLessEqual(clients.requests_seen(rig), requests, rig.logs())
                    client.clean(run)
                finally:
                    rig.stop()

    @full_only
    def test_a_text_turn(self):
        def check(_, run):
            self.assertIn("PONG 1", run.output)

        self.story(lambda client: [{"last": "begin the test", "thinking": "Well.", "text": "PONG {turn}"}],
                   check, 2)

    def test_a_tool_turn_really_runs_the_tool(self):
        def rules(client):
            return [{"last": "begin the test", "lacks": "<tool_result>", "thinking": "I run it.",
                     "text": "Running." + client.call("echo one > made.txt; cat made.txt")},
                    {"contains": "one", "turn": 2, "thinking": "It ran.", "text": "The file is made."}]

        def check(_, run):
            with open(os.path.join(run.project, "made.txt"), encoding="utf-8") as made:
                self.assertEqual(made.read(), "one\n")
            self.assertIn("The file is made.", run.output)

        self.story(rules, check, 3)

    @full_only
    def test_two_parallel_calls_both_run(self):
        def rules(client):
            return [{"last": "begin the test", "lacks": "<tool_result>", "thinking": "Both.", "text": calls(
                        client.invoke("echo one > one.txt"), client.invoke("echo two > two.txt"))},
                    {"turn": 2, "thinking": "They ran.", "text": "Both are made."}]

        def check(_, run):
            self.assertLessEqual({"one.txt", "two.txt"}, set(os.listdir(run.project)))
            self.assertIn("Both are made.", run.output)

        self.story(rules, check, 3)


    @full_only
    def test_codex_with_an_idle_limit_of_three_seconds_waits_for_a_long_prompt(self):
        client = clients.client("codex")
        if client.missing():
            self.skipTest(client.missing())
        rig = ScriptedRig({"ms_per_ktok": 1300, "rules": [{"last": "begin the test", "text": "PONG"}]})
        try:
            rig.start()
            begin = time.monotonic()
            run = client.start(rig.port, QUESTION, {"stream_idle_timeout_ms = 600000":
                                                    "stream_idle_timeout_ms = 3000"})
            self.assertEqual(run.wait(TURN_S), 0, run.output + rig.logs())
            self.assertGreater(time.monotonic() - begin, 20)
            self.assertIn("PONG", run.output)
            self.assertEqual(clients.requests_seen(rig), 1)
            client.clean(run)
        finally:
            rig.stop()


class Failure:
    """One way to fail.  `before(rig)` makes it, `during(rig)` runs every 50 ms while the client works."""

    def __init__(self, name, rules=None, settings=None, before=ScriptedRig.start, during=None):
        # The router's own probe is to live.
        self.rules = [dict({"contains": QUESTION}, **rule) for rule in rules or []]
        self.name, self.settings = name, settings or {}
        self.before, self.during = before, during


def fill_queue(rig):
    rig.start()
    body = {"prompt": "occupied", "max_tokens": 4000}
    for n in (1, 2):
        threading.Thread(target=swallow, args=(rig, body), daemon=True).start()
        while 'phase="%s"} 1' % ("decode" if n == 1 else "queued") not in inflight(rig):
            time.sleep(0.02)


def swallow(rig, body):
    try:
        rig.post("/v1/completions", body)
    except (OSError, ValueError):
        pass  # the rig was stopped


def inflight(rig):
    return "\n".join(line for line in rig.request("GET", "/metrics")[2].decode().splitlines()
                     if line.startswith("ds4_requests_inflight{"))


def begin_only(rig):
    rig.start_router()
    rig.start_worker(0)


def lose_worker(rig):
    rig.start()
    rig.kill_worker(0)
    rig.wait_not_ready()


def restart_worker(rig):
    """What the service manager does."""
    worker = rig.workers[0]
    if worker is not None and worker.poll() is not None:
        rig.workers[0] = None
        rig.restart_at = time.monotonic() + RESTART_S
    if worker is None and time.monotonic() >= rig.restart_at:
        rig.start_worker(0)


def drain(rig):
    if 'phase="decode"} 1' in inflight(rig):
        rig.router.send_signal(signal.SIGTERM)


WORDS = {"text": "one two three four five ", "repeat": True}
FAILURES = [
    Failure("overflow", settings={"model": {"context": 1024}}),
    Failure("queue full", [{"contains": "occupied", "step_ms": 100, "text": "and so on ", "repeat": True}],
            {"sched": {"max_seqs": 1, "queue_max": 1}, "loop": {"repetition": False}}, fill_queue),
    Failure("loading", before=begin_only),
    Failure("worker gone", before=lose_worker),
    Failure("not finite", [dict(WORDS, nan_at=6)]),
    Failure("dies in prefill", [dict(WORDS, prefill_ms=300, die_at=0)], during=restart_worker),
    Failure("dies in decode", [dict(WORDS, step_ms=20, die_at=6)], during=restart_worker),
    Failure("falls silent", [dict(WORDS, hang_at=6)], {"watchdog": {"step_s": 2}}),
    Failure("drain", [dict(WORDS, step_ms=50)], {"cluster": {"drain_s": 1}}, during=drain),
    # A model that goes on calling is an agent at work, not a storm: these go wrong in the first turn only.
    Failure("unclosed call", [{"turn": 1, "raw": True, "text":
                               "Hm.</think>" + calls(("bash", {"command": "ls"}))[:-40]}]),
    Failure("call of no tool", [{"turn": 1, "text": calls(("no_such_tool", {"x": 1}))}]),
    Failure("bad arguments", [{"turn": 1, "text": calls(("bash", {"no_such_argument": [1]}))}]),
    Failure("markup soup", [{"raw": True, "text": "</think><%sinvoke name=<%stool_calls></think><think>"
                             % (DSML, DSML) * 5}]),
    Failure("nothing", [{"raw": True, "text": ""}]),
]


def storm(client, failure):
    """Requests within WINDOW_S of the first, and the client's run (its status is None if it was killed)."""
    rig = ScriptedRig({"rules": failure.rules, "never_ready": failure.before is begin_only}, failure.settings)
    first, seen, base = None, 0, 0
    try:
        failure.before(rig)
        while rig.router.poll() is None:
            try:
                base = clients.requests_seen(rig)
                break
            except ConnectionError:
                time.sleep(0.05)
        run = client.start(rig.port, QUESTION)
        while run.process.poll() is None:
            now = time.monotonic()
            if now > (run.begin + TURN_S if first is None else first + WINDOW_S):
                break
            try:
                seen = clients.requests_seen(rig) - base
                if failure.during:
                    failure.during(rig)
            except ConnectionError:
                pass  # the router has left
            if seen and first is None:
                first = now
            time.sleep(0.05)
        run.status = run.wait(0)
        try:
            seen = max(seen, clients.requests_seen(rig) - base)
        except ConnectionError:
            pass
        client.clean(run)
        print("%-16s %-9s %2d requests, status %s, %.0f s" % (failure.name, client.name, seen, run.status,
                                                             time.monotonic() - run.begin), flush=True)
        return seen, run, rig.logs()
    finally:
        rig.stop()


@full_only
class Storms(unittest.TestCase):
    def test_no_failure_makes_a_client_send_a_storm_of_requests(self):
        names = os.environ.get("FAILURES", "").split(",")
        work = [(client, failure) for failure in FAILURES for client in only()
                if client.missing() is None and (names == [""] or failure.name in names)]
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            results = list(pool.map(lambda pair: storm(*pair), work))
        for (client, failure), (seen, run, logs) in zip(work, results):
            with self.subTest(client=client.name, failure=failure.name):
                self.assertGreater(seen, 0, run.output + logs)
                self.assertLessEqual(seen, MOST, run.output + logs)


if __name__ == "__main__":
    clients.main()
