"""Coding assistants as their users run them: the guide's set-up, the installed programs, a home of their own.

What is run is cut out of deploy/CLIENTS.md, with the rig's port and the test's question put in: a guide that
does not work fails here.  Nothing leaves this machine: main() moves the whole test into a network
namespace that has a loopback device and nothing else.
"""

import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402
from scripted import calls  # noqa: E402

BUILD = os.path.join(e2e.ROOT, "build/clients")
GUIDE = os.path.join(e2e.ROOT, "deploy/CLIENTS.md")
NODE_MAJOR = 20  # what pi and the SDKs need
IN_NAMESPACE = "--in-namespace"


def guide(block):
    """The text of the guide's block with this id."""
    with open(GUIDE, encoding="utf-8") as text:
        found = re.search(r"^```\w+ id=%s\n(.*?)^```$" % re.escape(block), text.read(), re.M | re.S)
    if not found:
        raise KeyError("%s has no block %s" % (GUIDE, block))
    return found.group(1)


def node_is_missing():
    """Why programs that need Node cannot run here, or None."""
    try:
        version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "node is not installed"
    if int(version.lstrip("v").split(".")[0]) < NODE_MAJOR:
        return "node is %s, must be %d or newer" % (version.strip(), NODE_MAJOR)
    return None


class Run:
    """A client at work, in a process group of its own."""

    def __init__(self, argv, folder, env):
        self.begin = time.monotonic()
        self.output = ""
        self.process = subprocess.Popen(argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        start_new_session=True, errors="replace")
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.output += line

    def wait(self, seconds):
        """The exit status, or None if it was still at work after that long: it is killed then."""
        try:
            status = self.process.wait(max(0.0, self.begin + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.reader.join(60)
        self.process.stdout.close()
        return status


class Client:
    """`files`: guide block -> place in the home.  `shell`: the tool that runs a command, its argument."""

    def __init__(self, name, files, shell, needs_node=False):
        self.name, self.files, self.shell, self.needs_node = name, files, shell, needs_node

    def call(self, command):
        """The model's markup of a call that runs `command`."""
        return calls(self.invoke(command))

    def invoke(self, command):
        tool, argument = self.shell
        arguments = {argument: command}
        if self.name == "claude":
            arguments["description"] = "A step of the test"
        return tool, arguments

    def missing(self):
        """Why the client cannot run on this machine, or None.  Not to be installed is no reason: that is
        what `make check-clients` does first."""
        if not os.path.exists(os.path.join(BUILD, "bin", self.name)):
            raise FileNotFoundError("%s is not installed: `make check-clients` does that" % self.name)
        return node_is_missing() if self.needs_node else None

    def start(self, port, question, changes=None):
        """Runs the guide's command with another question, in an empty project.  `changes`: text of the
        guide's files -> what stands there instead."""
        os.makedirs(os.path.join(BUILD, "homes"), exist_ok=True)
        home = tempfile.mkdtemp(prefix=self.name + "-", dir=os.path.join(BUILD, "homes"))
        project = os.path.join(home, "project")
        os.makedirs(project)
        os.makedirs(os.path.join(home, "tmp"))
        for block, place in self.files.items():
            os.makedirs(os.path.dirname(os.path.join(home, place)), exist_ok=True)
            with open(os.path.join(home, place), "w", encoding="utf-8") as out:
                text = guide(block).replace(":8000", ":%d" % port)
                for before, after in (changes or {}).items():
                    if before not in text:
                        raise KeyError("%s has no %s" % (block, before))
                    text = text.replace(before, after)
                out.write(text)
        script = guide(self.name + ".sh").replace(":8000", ":%d" % port)
        if '"Hello"' not in script:
            raise KeyError("the guide's %s.sh asks no \"Hello\"" % self.name)
        env = {"PATH": os.path.join(BUILD, "bin") + ":" + os.environ["PATH"], "HOME": home,
               "TMPDIR": os.path.join(home, "tmp"), "LANG": "C.UTF-8", "NO_COLOR": "1",
               "TERM": "dumb"}
        run = Run(["bash", "-c", script.replace('"Hello"', '"$QUESTION"')], project,
                  dict(env, QUESTION=question))
        run.home, run.project = home, project
        return run

    @staticmethod
    def clean(run):
        shutil.rmtree(run.home, ignore_errors=True)


CLIENTS = [
    Client("opencode", {"opencode.json": ".config/opencode/opencode.json"}, ("bash", "command")),
    Client("pi", {"pi.json": ".pi/agent/models.json", "pi-settings.json": ".pi/agent/settings.json"},
           ("bash", "command"), needs_node=True),
    Client("codex", {"codex.toml": ".codex/config.toml"}, ("exec_command", "cmd")),
    Client("claude", {}, ("Bash", "command")),
]


def client(name):
    return [one for one in CLIENTS if one.name == name][0]


def requests_seen(rig):
    """How many requests for an answer have reached the router, answered or not."""
    answered = started = 0
    for line in rig.request("GET", "/metrics")[2].decode().splitlines():
        if re.match(r'ds4_http_requests_total{.*endpoint="(chat|responses|messages|completions)"', line):
            answered += float(line.rsplit(" ", 1)[1])
        elif line.startswith("ds4_requests_started_total{"):
            started += float(line.rsplit(" ", 1)[1])
    return int(max(answered, started))


def isolate():
    """Runs this program again in a network namespace of its own.  Root is not needed where the kernel
    lets users make namespaces."""
    if IN_NAMESPACE in sys.argv:
        sys.argv.remove(IN_NAMESPACE)
        with socket.socket() as sock:
            flags = struct.pack("16sH", b"lo", 0x41)  # IFF_UP | IFF_RUNNING
            fcntl.ioctl(sock, 0x8914, flags)  # SIOCSIFFLAGS
        return
    how = ["unshare", "-n" if os.getuid() == 0 else "-rn"]
    try:
        subprocess.run(how + ["true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        why = (getattr(problem, "stderr", None) or str(problem)).strip()
        print("FAILED: no network namespace can be made here (%s), and no client may run where it could reach "
              "other hosts.  Run this as root, or let users make namespaces "
              "(sysctl kernel.unprivileged_userns_clone=1)." % why)
        print("0 passed, 1 failed")
        sys.exit(1)
    os.execvp(how[0], how + [sys.executable] + sys.argv + [IN_NAMESPACE])


def main():
    isolate()
    with open("/proc/net/dev", encoding="ascii") as devices:
        others = [line.split(":")[0].strip() for line in devices if ":" in line]
    if others != ["lo"]:
        sys.exit("the namespace has the devices %s" % others)
    e2e.main()
