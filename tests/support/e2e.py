"""What every end-to-end test shares: the programs' folder, the tiny model, the closing line."""

import argparse
import os
import sys
import threading
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "deploy"))
from local_rig import Rig, RigError, free_port, settings_text  # noqa: E402,F401

CONFIG = "release"
SECONDS = 10.0  # of the load tests; a soak asks for more
FORCED = []  # (section, option, value) for every rig, from --set
PATIENCE = 60.0  # seconds in which what must happen has happened, on a machine however busy
TINY = os.path.join(ROOT, "tests/data/ds4-tiny.gguf")


def bin_dir():
    return os.path.join(ROOT, "build", CONFIG, "bin")


def rig(stages=2, **options):
    """A rig on the tiny model with this run's programs, not started."""
    settings = options.pop("settings", {})
    settings.setdefault("model", {}).setdefault("release", "v4_preview")
    for section, option, value in FORCED:
        settings.setdefault(section, {})[option] = value
    return Rig(options.pop("model", TINY), stages, bin_dir=bin_dir(), settings=settings, **options)


def wait_until(done, what=lambda: "it did not happen"):
    """Returns what `done()` gives as soon as that is true; `what()` says what is missing if it never is.  A
    place where no server listens yet counts as no."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            found = done()
        except ConnectionError:
            found = None
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(what())
        time.sleep(0.02)


class Progress:
    """How far a long test is, of a time or of a number: a bar on a terminal, a line a minute elsewhere.
    From a thread of its own, so that the test only counts."""

    def __init__(self, what, count, seconds=None, total=None):
        self.what, self.count, self.seconds, self.total = what, count, seconds, total
        self.begin = time.monotonic()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def text(self):
        spent, count = max(time.monotonic() - self.begin, 1e-3), self.count()
        share = min(1, count / self.total if self.total else spent / self.seconds)
        left = "%d s left" % (spent / share - spent) if share > 0 else "no end in sight yet"
        return "%d %%, %d done, %.1f/s, %s" % (100 * share, count, count / spent, left)

    def _run(self):
        terminal = sys.stderr.isatty()
        while not self.over.wait(0.5 if terminal else 60):
            sys.stderr.write("\r\033[K%s: %s" % (self.what, self.text()) if terminal else
                             "%s: %s\n" % (self.what, self.text()))
            sys.stderr.flush()
        if terminal:
            sys.stderr.write("\r\033[K")

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


def main():
    """Runs the calling file's tests.  `--config NAME` picks the build tree, `--seconds N` the length
    of load tests, `--set section.option=value` what every rig has in its settings (the same tests on
    GPUs: worker.backend=cuda).  The last line is `N passed, N failed`."""
    global CONFIG, SECONDS
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--set", action="append", default=[])
    options, args = parser.parse_known_args()
    for text in options.set:
        name, _, value = text.partition("=")
        section, _, option = name.partition(".")
        FORCED.append((section, option, {"true": True, "false": False}.get(value, value)))
    CONFIG, SECONDS = options.config, options.seconds
    program = unittest.main(module="__main__", argv=[sys.argv[0]] + args, exit=False, verbosity=2)
    result = program.result
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    passed = max(0, result.testsRun - failed - len(result.skipped))  # a class that cannot start runs none
    if result.skipped:
        print("[  SKIPPED ] %d test(s)." % len(result.skipped))  # as cmocka says it, for tests/run.sh
    print("%d passed, %d failed" % (passed, failed))
    sys.exit(1 if failed or result.testsRun == 0 else 0)
