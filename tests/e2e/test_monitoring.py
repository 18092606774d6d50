#!/usr/bin/env python3
"""What a rig is watched with: alerts that fire when they should, queries that name what there is, and a
real Prometheus that scrapes a running rig and answers all of them."""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

DEPLOY = os.path.join(e2e.ROOT, "deploy")
RULE_TESTS = os.path.join(e2e.ROOT, "tests/support/alerts_test.yml")
NAME = re.compile(r"\b(?:ds4|vllm|process)[_:][a-zA-Z0-9_:]+")


def read(path):
    with open(path, encoding="utf-8") as text:
        return text.read()


def known_names():
    """Every name a scrape may hold: from the one table of metrics."""
    names = set()
    for name, kind in re.findall(r'X\([A-Z0-9_]+, "([^"]+)", ([A-Z]+),',
                                 read(os.path.join(e2e.ROOT, "common/metrics_table.h"))):
        names.add(name)
        if kind == "HISTOGRAM":
            names |= {name + end for end in ("_bucket", "_sum", "_count")}
    return names


def dashboard():
    return json.loads(read(os.path.join(DEPLOY, "grafana-dashboard.json")))


def dashboard_queries():
    board = dashboard()
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    return queries + [a["expr"] for a in board["annotations"]["list"]]


def alert_names():
    return re.findall(r"- alert: (\w+)", read(os.path.join(DEPLOY, "alerts.yml")))


def promtool(*args):
    return subprocess.run(["promtool"] + list(args), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=300, check=False)


class Files(unittest.TestCase):
    def test_every_query_names_metrics_that_exist(self):
        known = known_names()
        self.assertGreater(len(known), 100)
        for query in dashboard_queries() + re.findall(r"expr: (.*(?:\n {10}.*)*)",
                                                      read(os.path.join(DEPLOY, "alerts.yml"))):
            names = NAME.findall(re.sub(r'"[^"]*"', '""', query))
            self.assertTrue(names or "up{" in query, query)
            for name in names:
                self.assertIn(name, known, query)

    def test_the_dashboard_is_one(self):
        board = dashboard()
        ids = [panel["id"] for panel in board["panels"]]
        self.assertEqual(len(ids), len(set(ids)))
        self.assertEqual([p["title"] for p in board["panels"] if p["type"] == "row"],
                         ["Now", "Traffic", "Latency", "Pipeline", "Speculation", "Cache", "Quality", "Machines"])
        taken = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            self.assertLessEqual(at["x"] + at["w"], 24)
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                     for y in range(at["y"], at["y"] + at["h"])}
            self.assertFalse(cells & taken, panel["title"])
            taken |= cells

    @unittest.skipUnless(shutil.which("promtool"), "promtool is not installed")
    def test_promtool_accepts_settings_and_rules(self):
        for args in (("check", "config", os.path.join(DEPLOY, "prometheus.yml")),
                     ("check", "rules", "--lint-fatal", os.path.join(DEPLOY, "alerts.yml"))):
            done = promtool(*args)
            self.assertEqual(done.returncode, 0, done.stdout)

    @unittest.skipUnless(shutil.which("promtool"), "promtool is not installed")
    def test_each_alert_fires_and_stays_silent_when_it_should(self):
        text = read(RULE_TESTS)
        for name in alert_names():
            cases = re.findall(r'ALERTS\{alertname="%s",alertstate="firing"\}\n *eval_time: \S+\n'
                               r' *exp_samples:( \[\])?' % name, text)
            self.assertEqual(sorted(cases), ["", " []"], name)
        done = promtool("test", "rules", RULE_TESTS)
        self.assertEqual(done.returncode, 0, done.stdout)


@unittest.skipUnless(shutil.which("prometheus"), "prometheus is not installed")
class Running(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rig = e2e.rig(stages=2)
        cls.rig.start()
        cls.folder = tempfile.mkdtemp(prefix="ds4-prometheus-")
        cls.port = e2e.free_port()
        shutil.copy(os.path.join(DEPLOY, "alerts.yml"), cls.folder)
        # The shipped settings, with this rig's port and in a hurry.
        settings = read(os.path.join(DEPLOY, "prometheus.yml"))
        settings = settings.replace("127.0.0.1:8000", "127.0.0.1:%d" % cls.rig.port)
        settings = settings.replace("interval: 15s", "interval: 1s")
        with open(os.path.join(cls.folder, "prometheus.yml"), "w", encoding="utf-8") as out:
            out.write(settings)
        with open(os.path.join(cls.folder, "log"), "wb") as log:
            cls.prometheus = subprocess.Popen(
                ["prometheus", "--config.file=" + os.path.join(cls.folder, "prometheus.yml"),
                 "--storage.tsdb.path=" + os.path.join(cls.folder, "data"),
                 "--web.listen-address=127.0.0.1:%d" % cls.port], stdout=log, stderr=log)

    @classmethod
    def tearDownClass(cls):
        cls.prometheus.terminate()
        cls.prometheus.wait(e2e.PATIENCE)
        cls.rig.stop()
        shutil.rmtree(cls.folder, ignore_errors=True)

    def api(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=e2e.PATIENCE)
        try:
            connection.request("GET", "/api/v1/" + path)
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        self.assertEqual(answer["status"], "success", answer)
        return answer["data"]

    def query(self, expression):
        return self.api("query?" + urllib.parse.urlencode({"query": expression}))["result"]

    def wait(self, expression, good, seconds=e2e.PATIENCE):
        deadline = time.monotonic() + seconds
        while True:
            try:
                found = self.query(expression)
                if good([float(series["value"][1]) for series in found]):
                    return found
            except (ConnectionError, ValueError):  # it starts, and says so in words
                found = "no answer yet"
            if time.monotonic() > deadline:
                self.fail("%s: %s\n%s" % (expression, found, read(os.path.join(self.folder, "log"))))
            time.sleep(0.1)

    def test_prometheus_scrapes_a_rig_and_answers(self):
        self.wait('up{job="ds4"}', lambda values: values == [1])
        self.wait("ds4_ready", lambda values: values == [1])
        status, answer = self.rig.post("/v1/chat/completions", {
            "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 30, "min_tokens": 30})
        self.assertEqual(status, 200)
        self.wait("sum(ds4_generated_tokens_total)",
                  lambda values: values == [answer["usage"]["completion_tokens"]])
        self.wait("ds4_worker_up", lambda values: values == [1, 1])
        # Every query of the board is one that Prometheus can answer, and those of the first row do.
        for query in dashboard_queries():
            self.query(query.replace("$__rate_interval", "1m"))
        self.wait('sum by (stage) (rate(ds4_stage_step_seconds_count[1m]))',
                  lambda values: len(values) == 2 and min(values) > 0)
        rules = [rule for group in self.api("rules")["groups"] for rule in group["rules"]]
        self.assertEqual([rule["name"] for rule in rules], alert_names())
        self.assertEqual([rule["name"] for rule in rules if rule["health"] == "err"], [])
        self.rig.kill_worker(1)
        self.wait('ds4_worker_up{stage="1"}', lambda values: values == [0])
        self.wait("ds4_ready", lambda values: values == [0])
        self.wait('ALERTS{alertname="Ds4StageDown",stage="1",alertstate="pending"}',
                  lambda values: values == [1])
        self.rig.start_worker(1)
        self.rig.wait_ready()
        self.wait("ds4_ready", lambda values: values == [1])
        self.wait('ds4_worker_restarts_total{stage="1",exit="signal"}', lambda values: values == [1])


if __name__ == "__main__":
    e2e.main()
