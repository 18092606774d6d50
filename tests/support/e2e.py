"""What every end-to-end test shares: the programs' folder, the tiny model, the closing line."""

import os
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "deploy"))
from local_rig import Rig, RigError, free_port, settings_text  # noqa: E402,F401

CONFIG = "release"
TINY = os.path.join(ROOT, "tests/data/ds4-tiny.gguf")


def bin_dir():
    return os.path.join(ROOT, "build", CONFIG, "bin")


def rig(stages=2, **options):
    """A rig on the tiny model with this run's programs, not started."""
    return Rig(options.pop("model", TINY), stages, bin_dir=bin_dir(), **options)


def main():
    """Runs the calling file's tests; `--config NAME` picks the build tree.  The last line is
    `N passed, N failed`."""
    global CONFIG
    args = sys.argv[1:]
    if "--config" in args:
        at = args.index("--config")
        CONFIG = args[at + 1]
        del args[at:at + 2]
    program = unittest.main(module="__main__", argv=[sys.argv[0]] + args, exit=False, verbosity=2)
    result = program.result
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    print("%d passed, %d failed" % (result.testsRun - failed - len(result.skipped), failed))
    sys.exit(1 if failed or result.testsRun == 0 else 0)
