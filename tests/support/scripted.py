"""A rig whose only stage says what a script tells it to, and the markup such scripts need."""

import json
import os

import e2e

PROGRAM = "tests/programs/ds4_scripted"
DSML = "｜DSML｜"


def calls(*invokes):
    """The markup of a block of calls as V4 models write it: (name, {parameter: value}) each.  Strings are
    written as they are, everything else as JSON."""
    lines = ["\n\n<%stool_calls>" % DSML]
    for name, arguments in invokes:
        lines.append('<%sinvoke name="%s">' % (DSML, name))
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            lines.append('<%sparameter name="%s" string="%s">%s</%sparameter>' % (
                DSML, key, "true" if is_text else "false",
                value if is_text else json.dumps(value), DSML))
        lines.append("</%sinvoke>" % DSML)
    return "\n".join(lines + ["</%stool_calls>" % DSML])


class ScriptedRig(e2e.Rig):
    """Start it like any rig; `say` replaces the script for workers started from then on."""

    def __init__(self, script, settings=None, model=e2e.TINY):
        merged = {"model": {"release": "v4_preview", "context": 131072}}
        for section, options in (settings or {}).items():
            merged.setdefault(section, {}).update(options)
        super().__init__(model, 1, bin_dir=e2e.bin_dir(), settings=merged)
        self.program = os.path.join(os.path.dirname(self.bin_dir), PROGRAM)
        self.say(script)

    def say(self, script):
        with open(os.path.join(self.folder, "script.json"), "w", encoding="utf-8") as out:
            json.dump(script, out)

    def start_worker(self, stage):
        self.workers[stage] = self._spawn(
            self.program, ["--script", os.path.join(self.folder, "script.json")], "stage0.log")

    def wait_worker_gone(self, timeout=20):
        """Waits until the worker has ended; returns its status."""
        status = self.workers[0].wait(timeout)
        self.workers[0] = None
        return status
