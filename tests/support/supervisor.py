"""A stand-in for systemd: runs one unit file's service the way systemd.service(5) says it would.

What it knows: ExecStart, ExecReload, Environment, Type=notify with READY, STATUS, STOPPING, WATCHDOG and
EXTEND_TIMEOUT_USEC from the main process only, TimeoutStartSec, WatchdogSec with WatchdogSignal and
TimeoutAbortSec, TimeoutStopSec, Restart with RestartSec and RestartPreventExitStatus, StartLimit*, and one
socket passed in as descriptor 3.  What it does not: sandboxing, other units, drop-ins of services.

Each service is one thread: start, watch, decide whether to start again.  `history` is what happened,
oldest first, as (event, detail) pairs.
"""

import fcntl
import os
import re
import select
import shlex
import signal
import socket
import struct
import subprocess
import threading
import time

EXIT_CLEAN_SIGNALS = {"SIGHUP", "SIGINT", "SIGTERM", "SIGPIPE"}
UNITS = {"us": 1e-6, "ms": 1e-3, "": 1.0, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
HIGH_FD = 100  # above what bash uses itself
WRAPPER = "export LISTEN_PID=$$ WATCHDOG_PID=$$; exec \"$0\" \"$@\""
WRAPPER_SOCKET = WRAPPER + " 3<&%d %d<&-"


def seconds(text):
    """"2min 30s" -> 150.0; a bare number is seconds."""
    total = 0.0
    for number, unit in re.findall(r"([0-9.]+)\s*([a-z]*)", text):
        total += float(number) * UNITS[unit]
    return total


def read_unit(*paths):
    """{"Service": {"Restart": ["on-failure"], ...}, ...} of a unit file and its drop-ins; an empty
    assignment clears a list."""
    sections, name = {}, None
    for path in paths:
        with open(path, encoding="utf-8") as lines:
            for line in map(str.strip, lines):
                if not line or line[0] in "#;":
                    continue
                if line[0] == "[":
                    name = line[1:-1]
                    sections.setdefault(name, {})
                    continue
                key, _, value = line.partition("=")
                values = sections[name].setdefault(key, [])
                if value:
                    values.append(value)
                else:
                    values.clear()
    return sections


class Service(threading.Thread):
    """One service.  `replace` are texts of the unit file to exchange (paths); `settings` override
    directives of [Unit] and [Service]; `listen` is the listening socket of its socket unit; with
    `as_user` the unit's User is obeyed, which takes root."""

    def __init__(self, path, instance="", replace=None, settings=None, listen=None, log=os.devnull,
                 as_user=False):
        super().__init__(daemon=True)
        unit = read_unit(path)
        self.directives = {**unit.get("Unit", {}), **unit["Service"]}
        self.directives.update({key: [value] for key, value in (settings or {}).items()})
        self.replace = dict(replace or {}, **{"%i": instance})
        self.log, self.as_user = log, as_user
        self.listen = listen and fcntl.fcntl(listen, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
        self.history, self.state, self.status, self.pid = [], "inactive", "", 0
        self.changed = threading.Condition()
        self.wake, self.waker = os.pipe()
        self.wanted, self.starts, self.result = True, [], "success"
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.notify.bind(b"")  # autobind, abstract
        self.address = "@" + self.notify.getsockname()[1:].decode()

    # ---- what a test asks ----

    def tell(self, event, detail=None):
        with self.changed:
            self.history.append((event, detail))
            if event in ("starting", "running", "stopping", "waiting", "failed", "dead"):
                self.state = event
            self.changed.notify_all()

    def wait_state(self, state, timeout=30):
        return self.wait(lambda: self.state == state, "state %s" % state, timeout)

    def wait_event(self, event, count=1, timeout=30):
        """Until `event` has happened `count` times in all."""
        return self.wait(lambda: self.events(event) >= count, "%d times %s" % (count, event), timeout)

    def wait(self, condition, what, timeout):
        with self.changed:
            if not self.changed.wait_for(condition, timeout):
                raise AssertionError("no %s within %g s; history %r" % (what, timeout, self.history))
        return self

    def events(self, name):
        return sum(1 for event, _ in self.history if event == name)

    def details(self, name):
        return [detail for event, detail in self.history if event == name]

    def reload(self):
        line = self.one("ExecReload").replace("${MAINPID}", str(self.pid))
        subprocess.run(shlex.split(line), check=True)

    def stop(self, timeout=200):
        """systemctl stop: returns when the service is down."""
        self.wanted = False
        os.write(self.waker, b"x")
        self.join(timeout)
        if self.is_alive():
            raise AssertionError("not stopped within %g s" % timeout)
        return self

    # ---- directives ----

    def one(self, key, default=""):
        values = self.directives.get(key, [])
        return values[-1] if values else default

    def span(self, key, default):
        return seconds(self.one(key)) if self.directives.get(key) else default

    def statuses(self, key):
        return {int(word) for line in self.directives.get(key, []) for word in line.split()}

    def signal_of(self, key, default):
        return getattr(signal, self.one(key, default))

    # ---- one life ----

    def command(self):
        line = self.one("ExecStart").lstrip("-@:+!")
        for old, new in self.replace.items():
            line = line.replace(old, new)
        script = WRAPPER_SOCKET % (self.listen, self.listen) if self.listen else WRAPPER
        user = self.one("User")
        drop = ["setpriv", "--reuid", user, "--regid", user, "--init-groups"] if self.as_user and user else []
        return ["bash", "-c", script] + drop + shlex.split(line)

    def spawn(self):
        environment = dict(os.environ, NOTIFY_SOCKET=self.address)
        for line in self.directives.get("Environment", []):
            environment.update(word.partition("=")[::2] for word in shlex.split(line))
        watchdog = self.span("WatchdogSec", 0)
        if watchdog:
            environment["WATCHDOG_USEC"] = str(int(watchdog * 1e6))
        passed = ()
        if self.listen:
            environment["LISTEN_FDS"] = "1"
            passed = (self.listen,)
        with open(self.log, "ab") as out:
            process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                       env=environment, pass_fds=passed)
        self.pid = process.pid
        return process

    def messages(self):
        """Assignments that have arrived from the main process."""
        while True:
            try:
                data, control, _, _ = self.notify.recvmsg(4096, 64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            sender = struct.unpack("3i", control[0][2][:12])[0] if control else 0
            if sender != self.pid:
                self.tell("stranger", sender)
                continue
            for line in data.decode().split("\n"):
                if "=" in line:
                    yield line.partition("=")[::2]

    def live(self, process):
        """Until the main process has ended; sets self.result."""
        pidfd = os.pidfd_open(process.pid)
        now = time.monotonic()
        deadline = now + self.span("TimeoutStartSec", 90)
        watchdog, phase = self.span("WatchdogSec", 0), "start"
        self.result = "success"
        poller = select.poll()
        for fd in (pidfd, self.notify.fileno(), self.wake):
            poller.register(fd, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            ready = {fd for fd, _ in poller.poll(max(0, min(left, 3600)) * 1000)}
            for key, value in self.messages():
                if key == "READY" and phase == "start":
                    phase, deadline = "run", time.monotonic() + (watchdog or 1e9)
                    self.tell("running")
                elif key == "EXTEND_TIMEOUT_USEC" and phase == "start":
                    deadline = max(deadline, time.monotonic() + int(value) / 1e6)
                    self.tell("extended", int(value))
                elif key == "WATCHDOG" and phase == "run" and watchdog:
                    deadline = time.monotonic() + watchdog
                    self.tell("ping")
                elif key == "STATUS":
                    self.status = value
                    self.tell("status", value)
                elif key == "STOPPING":
                    self.tell("says stopping")
            if pidfd in ready:
                break
            if self.wake in ready:
                os.read(self.wake, 1)
                phase, deadline = "stop", time.monotonic() + self.span("TimeoutStopSec", 90)
                self.tell("stopping")
                process.send_signal(signal.SIGTERM)
            elif time.monotonic() >= deadline:
                phase, deadline = self.late(process, phase)
        os.close(pidfd)
        process.wait()

    def late(self, process, phase):
        """The deadline of `phase` has passed: the next phase and its deadline."""
        if phase == "run":
            self.result = "watchdog"
            self.tell("watchdog")
            process.send_signal(self.signal_of("WatchdogSignal", "SIGABRT"))
            process.send_signal(signal.SIGCONT)  # systemd lets a stopped process see the signal
            return "abort", time.monotonic() + self.span("TimeoutAbortSec", self.span("TimeoutStopSec", 90))
        if phase == "start":
            self.result = "timeout"
            self.tell("start timeout")
            process.send_signal(signal.SIGTERM)
            return "abort", time.monotonic() + self.span("TimeoutStopSec", 90)
        if phase == "stop":
            self.result = "timeout"
        self.tell("killed")
        process.send_signal(signal.SIGKILL)
        return "kill", time.monotonic() + 3600

    def judge(self, code):
        """The result of a life that ended with `code` (negative: a signal), as systemd names it."""
        if self.result != "success":
            return self.result
        if code == 0:
            return "success"
        if code < 0:
            name = signal.Signals(-code).name
            return "success" if name in EXIT_CLEAN_SIGNALS else "signal"
        return "exit-code"

    def again(self, code):
        policy = self.one("Restart", "no")
        if not self.wanted or code in self.statuses("RestartPreventExitStatus"):
            return False
        return policy == "always" or (policy == "on-failure" and self.result != "success")

    def may_start(self):
        """Counts a start against StartLimitBurst in StartLimitIntervalSec."""
        now = time.monotonic()
        interval, burst = self.span("StartLimitIntervalSec", 10), int(self.one("StartLimitBurst", "5"))
        self.starts = [at for at in self.starts if now - at < interval]
        self.starts.append(now)
        return len(self.starts) <= burst

    def run(self):
        while self.wanted:
            if not self.may_start():
                self.result = "start-limit-hit"
                break
            self.tell("starting")
            process = self.spawn()
            self.live(process)
            self.result = self.judge(process.returncode)
            self.tell("exit", process.returncode)
            if not self.again(process.returncode):
                break
            self.tell("waiting")
            select.select([self.wake], [], [], self.span("RestartSec", 0.1))
        self.pid = 0
        self.notify.close()
        if self.listen:
            os.close(self.listen)
        self.tell("dead" if self.result == "success" else "failed", self.result)


def listen_of(*paths, address=None):
    """The listening socket that a socket unit describes; `address` replaces its ListenStream."""
    unit = read_unit(*paths)["Socket"]
    host, _, port = (address or unit["ListenStream"][-1]).rpartition(":")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host.strip("[]"), int(port)))
    sock.listen(int(unit.get("Backlog", ["128"])[-1]))
    return sock
