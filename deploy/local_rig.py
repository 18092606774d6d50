"""A whole rig on this machine: one router and its stage workers as child processes.

Used by the demo and by the end-to-end tests; Python standard library only.  The rig owns its
processes and a temporary folder (settings, sockets, logs) and removes both on stop().
"""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time


class RigError(Exception):
    """The rig did not do what was asked; the message carries the last log lines."""


def free_port():
    """A TCP port on loopback for one server of ours.  A socket that is bound and never listens keeps it from
    everybody else, connections that go out among them; the server binds beside it, as both reuse addresses."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    sock.detach()  # open as long as this process lives
    return port


def quote(value):
    """A setting's value in the settings file's syntax."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "{" + ", ".join(quote(v) for v in value) + "}"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + text + '"'


def settings_text(settings):
    """{"http": {"port": 8000}} -> the settings file."""
    lines = []
    for section, options in settings.items():
        lines.append(section + " {")
        lines += ["    %s = %s" % (name, quote(value)) for name, value in options.items()]
        lines.append("}")
    return "\n".join(lines) + "\n"


class Rig:
    """Router plus `stages` workers.  `settings` are merged over the rig's own."""

    def __init__(self, model, stages=2, port=0, bin_dir="build/release/bin", settings=None):
        self.model = model if model.startswith("synth:") else os.path.abspath(model)
        self.stages = stages
        self.port = port or free_port()
        self.bin_dir = os.path.abspath(bin_dir)
        self.folder = tempfile.mkdtemp(prefix="ds4-rig-")
        self.config = os.path.join(self.folder, "ds4.conf")
        self.router = None
        self.workers = [None] * stages
        merged = {
            "http": {"listen": "127.0.0.1", "port": self.port},
            "model": {"path": self.model},
            "cluster": {"stages": stages, "endpoint_dir": os.path.join(self.folder, "run")},
        }
        for section, options in (settings or {}).items():
            merged.setdefault(section, {}).update(options)
        self.settings = merged
        with open(self.config, "w", encoding="utf-8") as out:
            out.write(settings_text(merged))

    def _spawn(self, program, args, log):
        path = os.path.join(self.bin_dir, program)
        with open(os.path.join(self.folder, log), "ab") as out:
            return subprocess.Popen([path, "--config", self.config] + args, stdin=subprocess.DEVNULL,
                                    stdout=out, stderr=out)

    def start_router(self):
        self.router = self._spawn("ds4-router", [], "router.log")

    def start_worker(self, stage):
        self.workers[stage] = self._spawn("ds4-worker", ["--stage", str(stage)],
                                          "stage%d.log" % stage)

    def start(self, timeout=120):
        """Starts everything and waits until /health answers 200."""
        self.start_router()
        for stage in range(self.stages):
            self.start_worker(stage)
        return self.wait_ready(timeout)

    def wait_ready(self, timeout=120):
        """Waits until the rig can produce tokens; returns the health body."""
        deadline = time.monotonic() + timeout
        last = "no answer"
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                status, _, body = self.request("GET", "/health", timeout=20)
                if status == 200:
                    return json.loads(body)
                last = "%d %s" % (status, body.decode("utf-8", "replace"))
            except OSError as problem:
                last = str(problem)
            time.sleep(0.05)
        raise RigError("not ready after %d s: %s\n%s" % (timeout, last, self.logs()))

    def wait_not_ready(self, timeout=60):
        """Waits until /health stops answering 200; returns the seconds it took."""
        begin = time.monotonic()
        while time.monotonic() - begin < timeout:
            if self.request("GET", "/health", timeout=20)[0] != 200:
                return time.monotonic() - begin
            time.sleep(0.02)
        raise RigError("/health stayed 200 for %d s\n%s" % (timeout, self.logs()))

    def check_alive(self):
        named = [("router", self.router)]
        named += [("stage %d" % n, worker) for n, worker in enumerate(self.workers)]
        for name, process in named:
            if process is not None and process.poll() is not None:
                raise RigError("%s ended with status %d\n%s" %
                               (name, process.returncode, self.logs(name.replace(" ", "") + ".log")))

    def logs(self, closing="", lines=15):
        """The last lines of every log; those of `closing` stand last, where they are read."""
        parts = []
        for name in sorted(os.listdir(self.folder), key=lambda name: (name == closing, name)):
            if name.endswith(".log"):
                with open(os.path.join(self.folder, name), encoding="utf-8",
                          errors="replace") as log:
                    parts.append("--- %s\n%s" % (name, "".join(log.readlines()[-lines:])))
        return "\n".join(parts)

    def request(self, method, path, body=None, headers=None, timeout=120):
        """One exchange on a fresh connection: (status, headers dict in lower case, body bytes)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            if isinstance(body, (dict, list)):
                body = json.dumps(body).encode()
            connection.request(method, path, body, headers or {"content-type": "application/json"})
            response = connection.getresponse()
            data = response.read()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, data
        finally:
            connection.close()

    def post(self, path, body, timeout=120):
        """POST of a JSON body; returns (status, parsed answer)."""
        status, _, data = self.request("POST", path, body, timeout=timeout)
        return status, json.loads(data)

    def stream(self, path, body, timeout=120):
        """POST with an event stream as answer: yields (event name or None, data text) as they come;
        comments are yielded as (":", text)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", path, json.dumps(body).encode(),
                               {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RigError("status %d: %s" % (response.status, response.read().decode()))
            event = None
            for raw in response:
                line = raw.decode("utf-8").rstrip("\n")
                if line.startswith("data: "):
                    yield event, line[len("data: "):]
                    event = None
                elif line.startswith("event: "):
                    event = line[len("event: "):]
                elif line.startswith(":"):
                    yield ":", line[1:].strip()
        finally:
            connection.close()

    def kill_worker(self, stage, signum=signal.SIGKILL):
        self.workers[stage].send_signal(signum)
        self.workers[stage].wait()
        self.workers[stage] = None

    def stop(self, timeout=60):
        """SIGTERM to all, router first; SIGKILL for what is left at the timeout.  Returns the exit
        statuses {name: status}."""
        named = [("router", self.router)]
        named += [("stage%d" % n, worker) for n, worker in enumerate(self.workers)]
        named = [(name, process) for name, process in named if process is not None]
        for _, process in named:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout
        statuses = {}
        for name, process in named:
            try:
                statuses[name] = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                statuses[name] = process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        return statuses
