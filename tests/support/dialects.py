"""What the tests of the API dialects share: recorded requests, accepted streams, comparing frames."""

import glob
import json
import os

import e2e

DATA = os.path.join(e2e.ROOT, "tests/data/api")


def recorded(*patterns):
    """(name, path without query, request) of the recorded requests whose names match."""
    for pattern in patterns:
        for file in sorted(glob.glob(os.path.join(DATA, pattern))):
            if os.path.basename(file).startswith("accepted"):
                continue
            with open(file, encoding="utf-8") as text:
                case = json.load(text)
            yield os.path.basename(file), case["_meta"]["path"], case["request"]


def accepted(name):
    """Frames of an accepted stream as (event, data), comments left out."""
    with open(os.path.join(DATA, name), encoding="utf-8") as text:
        frames = json.load(text)["frames"]
    return [(frame.get("event"), frame["data"]) for frame in frames if "data" in frame]


def shape(value):
    """Members of a value, recursively, without the values: what a client may rely on."""
    if isinstance(value, dict):
        return {key: shape(member) for key, member in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__ if not isinstance(value, (int, float)) else "number"


def missing(want, got, path=""):
    """Members of `want` that `got` lacks, or whose kind differs (null stands for any kind)."""
    if isinstance(want, dict) and isinstance(got, dict):
        return [line for key in want for line in
                (missing(want[key], got[key], path + "." + key) if key in got
                 else [path + "." + key])]
    if isinstance(want, list) and isinstance(got, list):
        return missing(want[0], got[0], path + "[]") if want and got else []
    return [] if want == got or "NoneType" in (want, got) else ["%s: %r, not %r" % (path, got, want)]


class Recorded:
    """One rig for a file of tests."""

    @classmethod
    def setUpClass(cls):
        cls.rig = e2e.rig(stages=1)
        try:
            cls.rig.start()
        except Exception:
            cls.rig.stop()
            raise

    @classmethod
    def tearDownClass(cls):
        statuses = cls.rig.stop()
        assert set(statuses.values()) == {0}, "exit statuses %r" % statuses

    def frames(self, path, body):
        """All data frames of a stream as (event, parsed data or text)."""
        return [(event, data if data == "[DONE]" else json.loads(data))
                for event, data in self.rig.stream(path, body) if event != ":"]

    def metric(self, name, **labels):
        """A counter's value at /metrics; 0 if it is not shown."""
        _, _, text = self.rig.request("GET", "/metrics")
        total = 0
        for line in text.decode().splitlines():
            if line.startswith(name + "{") and all('%s="%s"' % kv in line for kv in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total
