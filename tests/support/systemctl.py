#!/usr/bin/python3
"""systemctl where no systemd runs: in the bare root of tests/newcomer.sh, by the stand-in of supervisor.py.

enable, disable, is-enabled and daemon-reload are the real program's, which works on files.  start, stop,
restart, reload, status and is-active of the ds4 units go to a manager that the first start leaves in the
background.
"""

import glob
import json
import os
import socket
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
from supervisor import Service, listen_of, read_unit  # noqa: E402

REAL = "/usr/bin/systemctl"
ADDRESS = "/run/ds4-stand-in"
FOLDERS = ("/etc/systemd/system", "/lib/systemd/system", "/usr/lib/systemd/system")
LOGS = "/var/log/ds4-%s.log"
RUNNING = ("starting", "running", "waiting", "stopping")


def files_of(name):
    """The unit file of a name with its suffix, and its drop-ins."""
    stem, _, suffix = name.rpartition(".")
    file = stem.split("@")[0] + ("@." if "@" in stem else ".") + suffix
    found = [path for folder in FOLDERS for path in [os.path.join(folder, file)] if os.path.isfile(path)]
    if not found:
        raise KeyError("Unit %s not found." % name)
    return found[:1] + [path for folder in FOLDERS for path in sorted(glob.glob("%s/%s.d/*.conf" % (folder, file)))]


class Manager:
    def __init__(self):
        self.services, self.sockets = {}, {}

    def members(self, name):
        """What a name stands for: the target's units in the order of a start, or itself."""
        if name != "ds4.target":
            return [name if name.rpartition(".")[2] in ("service", "socket") else name + ".service"]
        wanted = " ".join(read_unit(*files_of(name))["Unit"].get("Wants", [])).split()
        wanted += map(os.path.basename, glob.glob("/etc/systemd/system/ds4.target.wants/*"))
        return sorted(set(wanted), key=lambda n: (not n.endswith(".socket"), "worker" in n, n))

    def start(self, name):
        if name.endswith(".socket"):
            if name not in self.sockets:
                self.sockets[name] = listen_of(*files_of(name))
            return
        if name in self.services and self.services[name].state in RUNNING:
            return
        for needed in " ".join(read_unit(*files_of(name))["Unit"].get("Requires", [])).split():
            self.start(needed)
        instance = name.rpartition(".")[0].partition("@")[2]
        service = Service(files_of(name)[0], instance, as_user=True, log=LOGS % name.rpartition(".")[0],
                          listen=self.sockets.get(name.replace(".service", ".socket")))
        self.services[name] = service
        service.start()

    def stop(self, name):
        if name.endswith(".socket"):
            if name in self.sockets:
                self.sockets.pop(name).close()
        elif name in self.services and self.services[name].state in RUNNING:
            self.services[name].stop()

    def do(self, verb, names):
        units = [unit for name in names for unit in self.members(name)]
        if verb in ("stop", "restart"):
            for unit in reversed(units):
                self.stop(unit)
        if verb in ("start", "restart"):
            for unit in units:
                self.start(unit)
            for unit in units:  # systemctl waits for READY=1, except of what waits for others
                if unit in self.services and "worker" not in unit:
                    self.services[unit].wait(lambda u=unit: self.services[u].state in ("running", "failed"), unit, 90)
        if verb == "reload":
            for unit in units:
                self.services[unit].reload()
        states = {unit: self.services[unit].state if unit in self.services else "listening" if unit in self.sockets
                  else "dead" for unit in units}
        lines = ["%s: %s %s" % (unit, state, self.services[unit].status if unit in self.services else "")
                 for unit, state in states.items()]
        failed = any(state == "failed" for state in states.values())
        if verb == "is-active":
            failed = not all(state in ("running", "listening") for state in states.values())
        return {"status": 1 if failed else 0, "text": "\n".join(lines) if verb in ("status", "is-active") else ""}

    def serve(self, listener):
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as file:
                request = json.loads(file.readline())
                try:
                    answer = self.do(request["verb"], request["units"])
                except Exception as problem:  # told to who asked
                    answer = {"status": 1, "text": "%s: %r" % (request["verb"], problem)}
                file.write(json.dumps(answer) + "\n")


def ask(verb, units):
    if not os.path.exists(ADDRESS):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(ADDRESS)
        listener.listen()
        if os.fork() == 0:
            os.setsid()
            for fd in (0, 1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), fd)
            Manager().serve(listener)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(ADDRESS)
        with sock.makefile("rw") as file:
            file.write(json.dumps({"verb": verb, "units": units}) + "\n")
            file.flush()
            answer = json.loads(file.readline())
    if answer["text"]:
        print(answer["text"])
    return answer["status"]


def main():
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    verb, units = words[0], words[1:]
    status = 0
    if verb in ("enable", "disable", "is-enabled", "daemon-reload"):
        status = subprocess.run([REAL, verb] + units, check=False).returncode
        verb = {"enable": "start", "disable": "stop"}.get(verb, "") if "--now" in sys.argv else ""
    if verb and status == 0:
        status = ask(verb, units)
    return status


if __name__ == "__main__":
    sys.exit(main())
