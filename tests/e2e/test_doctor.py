#!/usr/bin/env python3
"""ds4-doctor: on this machine as it is, on machines with one thing wrong, and on rigs of cards whose
nvidia-smi, /proc and /sys are stand-ins of the shape that real ones have."""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

DOCTOR = os.path.join(e2e.ROOT, "deploy/ds4-doctor")
loader = importlib.machinery.SourceFileLoader("doctor", DOCTOR)
doctor = importlib.util.module_from_spec(importlib.util.spec_from_loader("doctor", loader))
sys.dont_write_bytecode = True  # beside the program, that is
loader.exec_module(doctor)
# One 170HX as an unlocked driver reports it (--format=csv,noheader,nounits).
CARD = {
    "index": "0", "uuid": "GPU-5d3a1c7e-0f6b-4a0e-9a52-0c1b8f1e0a01", "serial": "[N/A]",
    "name": "NVIDIA CMP 170HX", "pci.bus_id": "00000000:01:00.0", "pci.device_id": "0x20C210DE",
    "driver_version": "610.43.02", "memory.total": "65536", "memory.used": "4", "temperature.gpu": "41",
    "temperature.memory": "47", "power.limit": "160.00", "clocks.sm": "1140", "pcie.link.gen.current": "1",
    "pcie.link.gen.max": "2", "pcie.link.width.current": "4", "pcie.link.width.max": "16",
    "persistence_mode": "Enabled", "compute_mode": "Default", "mig.mode.current": "[N/A]",
    "clocks_event_reasons.hw_thermal_slowdown": "Not Active",
    "clocks_event_reasons.hw_power_brake_slowdown": "Not Active",
    "clocks_event_reasons.sw_thermal_slowdown": "Not Active",
}
SMI = """#!/usr/bin/python3 -IS
import json, sys, time
d = json.load(open(%r))
if d.get("hang"):
    time.sleep(60)
if d.get("broken"):
    print(d["broken"])
    sys.exit(9)
arg = sys.argv[1] if len(sys.argv) > 1 else ""
if arg.startswith("--query-gpu="):
    for card in d["cards"]:
        for field in arg.partition("=")[2].split(","):
            if field not in card:
                print('Field "%%s" is not a valid field to query.' %% field)
                sys.exit(2)
        print(", ".join(card[field] for field in arg.partition("=")[2].split(",")))
elif arg == "topo":
    n = len(d["cards"])
    print(" \\t" + "\\t".join("GPU%%d" %% i for i in range(n)) + "\\t")
    for i in range(n):
        print(" GPU%%d\\t" %% i + "\\t".join("X" if i == k else d["p2p"] for k in range(n)) + "\\t")
    print("\\nLegend:\\n\\n  X    = Self\\n  OK   = Status Ok\\n  CNS  = Chipset not supported")
else:
    print("| NVIDIA-SMI %%s    Driver Version: %%s    CUDA Version: %%s     |" %% (
        d["cards"][0]["driver_version"], d["cards"][0]["driver_version"], d["cuda"]))
"""
# Enough of libcuda, libcublas and libnccl for the doctor: three cards of 3 GiB whose memory is a sparse
# mapping.  FAKE=fold makes card 1 wrap at 512 MiB; slow, sum, hang and crash are what they say.
LIBRARIES = r"""
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#define CARDS 3
#define SPACE (4UL << 30)
static char *memory[CARDS];
static size_t used[CARDS];
static int current;
static int faked(const char *what) { const char *f = getenv("FAKE"); return f && !strcmp(f, what); }
int cuInit(unsigned f) { (void)f; return 0; }
int cuDeviceGetCount(int *n) { *n = CARDS; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(intptr_t)(d + 1); return 0; }
int cuCtxSetCurrent(void *c) { current = (int)(intptr_t)c - 1; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuMemGetInfo_v2(size_t *f, size_t *t) { *f = 3UL << 30; *t = 3UL << 30; return 0; }
int cuMemAlloc_v2(uint64_t *p, size_t n)
{
    if (memory[current] == NULL)
        memory[current] = mmap(NULL, SPACE, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *p = (uint64_t)(memory[current] + used[current]);
    used[current] += n;
    return used[current] > SPACE ? 2 : 0;
}
int cuMemsetD32_v2(uint64_t p, unsigned v, size_t n)
{
    for (size_t i = 0; i < n && n <= (1 << 20); i++)
        ((unsigned *)p)[i] = v;
    return 0;
}
struct copy { size_t sx, sy; int st; char *sh; uint64_t sd; void *sa; size_t sp, dx, dy; int dt; char *dh;
              uint64_t dd; void *da; size_t dp, w, h; };
static char *fold(uint64_t p)
{
    size_t at = (size_t)((char *)p - memory[current]);
    return memory[current] + (faked("fold") && current == 1 ? at % (512UL << 20) : at);
}
int cuMemcpy2D_v2(const struct copy *c)
{
    for (size_t y = 0; y < c->h; y++)
        memcpy(c->dt == 1 ? c->dh + y * c->dp : fold(c->dd + y * c->dp),
               c->st == 1 ? c->sh + y * c->sp : fold(c->sd + y * c->sp), c->w);
    return 0;
}
int cublasCreate_v2(void **h) { *h = memory; return 0; }
int cublasGemmEx(void) { if (faked("slow")) usleep(100000); return 0; }
int ncclGetVersion(int *v) { *v = 22809; return 0; }
int ncclCommInitAll(void **c, int n, const int *d)
{
    for (int i = 0; i < n; i++)
        c[i] = (void *)(intptr_t)(d[i] + 1);
    if (faked("crash"))
        abort();
    return 0;
}
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { while (faked("hang")) pause(); return 0; }
int ncclAllReduce(const void *s, unsigned *r, size_t n, int type, int op, void *comm, void *stream)
{
    (void)s; (void)comm; (void)stream;
    for (size_t i = 0; i < n; i++)
        r[i] = faked("sum") || type != 2 || op != 0 ? 5 : CARDS * (CARDS + 1) / 2;
    return 0;
}
"""
CPUINFO = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx2\n\n"
MEMINFO = "MemTotal:       65000000 kB\nMemFree:         1000000 kB\nMemAvailable:   60000000 kB\n"
RESOURCE = ("0x00000000fa000000 0x00000000faffffff 0x0000000000040200\n"
            "0x0000038000000000 0x0000038fffffffff 0x000000000014220c\n"
            "0x0000000000000000 0x0000000000000000 0x0000000000000000\n")
VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  610.43.02  Release Build\nGCC version: 12\n"


class Doctor(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="ds4-doctor-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.config = os.path.join(self.folder, "ds4.conf")
        self.settings = {"http": {"port": e2e.free_port()},
                         "model": {"path": e2e.TINY, "release": "v4_preview"}, "cluster": {"stages": 2}}
        self.options = []

    def write(self, path, text):
        path = os.path.join(self.folder, path.lstrip("/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as out:
            out.write(text)
        return path

    def run_doctor(self, *args):
        if not os.path.exists(self.config):
            self.write("ds4.conf", e2e.settings_text(self.settings))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            status = doctor.main(["--config", self.config, "--bin-dir", e2e.bin_dir()] + self.options + list(args))
        return status, out.getvalue()

    def examine(self, *only):
        """(status, {check: [findings]})."""
        status, text = self.run_doctor("--json", *[word for name in only for word in ("--only", name)])
        report = json.loads(text)
        self.assertEqual(report["ok"], status == 0)
        for entry in report["checks"]:
            for finding in entry["findings"]:
                if finding["verdict"] in ("warn", "fail"):
                    self.assertGreater(len(finding["fix"]), 5, "no way out of: %r" % finding)
                self.assertNotIn("could not look", finding["text"])
        return status, {entry["name"]: entry["findings"] for entry in report["checks"]}

    def assertFinds(self, check, verdict, text):
        """The check has a finding of that verdict which says `text`."""
        status, found = self.examine(check)
        said = [(f["verdict"], f["text"] + " -> " + f["fix"]) for f in found[check]]
        right = [t for v, t in said if v == verdict and text in t]
        self.assertNotEqual(right, [], "%s %r not in %r" % (verdict, text, said))
        self.assertEqual(status, 1 if any(v == "fail" for v, _ in said) else 0)
        return right[0]


class Cpu(Doctor):
    def test_a_machine_without_cards_is_fine_for_the_cpu_profile(self):
        # Where ds4 is installed its user must reach the model, and these sources may be in a home.
        os.chmod(self.folder, 0o755)
        self.settings["model"]["path"] = shutil.copy(e2e.TINY, self.folder)
        os.chmod(self.settings["model"]["path"], 0o644)
        # All but the one about /run/ds4, which is this machine's own.
        status, found = self.examine(*[name for name, _, _, _ in doctor.CHECKS if name != "folders"])
        self.assertEqual(status, 0, found)
        for name in ("cpu", "programs", "settings", "model", "plan", "load"):
            self.assertEqual({f["verdict"] for f in found[name]}, {"ok"}, name)
        self.assertIn("ok", [f["verdict"] for f in found["port"]])  # and a socket unit that is installed here
        self.assertEqual(len(found["plan"]), 2)
        for name in ("driver", "cards", "throttle", "link", "p2p", "xid", "nccl"):
            self.assertEqual([f["verdict"] for f in found[name]], ["skip"], name)

    def test_the_text_says_verdict_check_and_way_out(self):
        self.settings["model"]["path"] = "/nonexistent.gguf"
        status, text = self.run_doctor()
        self.assertEqual(status, 1)
        lines = text.splitlines()
        at = next(n for n, line in enumerate(lines) if line.startswith("fail  model"))
        self.assertIn("/nonexistent.gguf is not a file", lines[at])
        self.assertIn("-> set model.path", lines[at + 1])
        self.assertRegex(lines[-1], r"^profile cpu: [1-9]\d* fail, \d+ warn, ")

    def test_the_json_form_has_the_members_the_manual_names(self):
        status, text = self.run_doctor("--json")
        report = json.loads(text)
        self.assertEqual(set(report), {"version", "profile", "ok", "checks"})
        self.assertEqual((report["version"], report["profile"], report["ok"]), (1, "cpu", status == 0))
        for entry in report["checks"]:
            self.assertEqual(set(entry), {"name", "what", "verdict", "findings"})
            verdicts = [finding["verdict"] for finding in entry["findings"]]
            self.assertEqual(entry["verdict"], max(verdicts, key=doctor.VERDICTS.index))
            for finding in entry["findings"]:
                self.assertEqual(set(finding), {"verdict", "text", "fix"})
        for name in ("version", "profile", "ok", "checks", "name", "what", "verdict", "findings", "text", "fix"):
            self.assertIn('"%s"' % name, doctor.__doc__)

    def test_the_list_names_every_check(self):
        _, text = self.run_doctor("--list")
        _, found = self.examine()
        self.assertEqual([line.split()[0] for line in text.splitlines()], list(found))

    def test_settings_that_are_wrong_are_named_with_their_line(self):
        self.config = self.write("bad.conf", "http {\n  port = 99999999\n}\n")
        self.assertFinds("settings", "fail", "bad.conf:2")

    def test_no_settings_file_says_where_to_get_one(self):
        done = subprocess.run([sys.executable, DOCTOR, "--config", self.folder + "/none", "--only", "settings"],
                              stdout=subprocess.PIPE, text=True, timeout=60)
        self.assertEqual(done.returncode, 1)
        self.assertIn("ds4.conf.example", done.stdout)

    def test_keys_that_everybody_may_read(self):
        keys = self.write("keys", "k\n")
        os.chmod(keys, 0o644)
        self.settings["http"]["keys_file"] = keys
        self.assertFinds("settings", "warn", "can be read by everybody")

    def test_a_damaged_model_file(self):
        path = os.path.join(self.folder, "cut.gguf")
        with open(e2e.TINY, "rb") as model, open(path, "wb") as out:
            out.write(model.read(4 << 20))
        self.settings["model"]["path"] = path
        self.assertFinds("model", "fail", "cut.gguf")

    def test_a_plan_that_does_not_fit(self):
        self.settings["cluster"] = {"partition": [7, 7]}
        self.assertFinds("plan", "fail", "stage 0")

    def test_stages_that_only_the_cards_tell_are_all_looked_at(self):
        self.settings["cluster"] = {}
        self.settings["gpu"] = {"cards": ["8", "8", "10"]}
        _, found = self.examine("plan")
        self.assertEqual([f["verdict"] for f in found["plan"]], ["ok"] * 3)

    def test_a_relative_folder_of_the_disk_tier_does_not_hang_it(self):
        self.settings["kv"] = {"disk_mb": 1, "disk_dir": "no-such-folder/kv"}
        self.assertFinds("disk", "ok", "1 MiB wanted")

    def test_a_port_that_another_program_has(self):
        with socket.create_server(("127.0.0.1", self.settings["http"]["port"])) as other:
            other.settimeout(5)
            self.assertFinds("port", "fail", "not by ds4")

    def test_a_port_that_ds4_has_shows_its_state(self):
        rig = e2e.rig(stages=1)
        self.addCleanup(rig.stop)
        rig.start()
        self.settings["http"]["port"] = rig.port
        self.assertFinds("port", "ok", "ds4 serves on port")
        rig.kill_worker(0)
        rig.wait_not_ready()
        self.assertFinds("port", "warn", "recovering")

    def test_a_socket_unit_that_says_another_address(self):
        self.options = ["--root", self.folder]
        self.write("etc/systemd/system/ds4-router.socket", "[Socket]\nListenStream=127.0.0.1:1\n")
        self.assertFinds("port", "warn", "the socket wins")
        self.write("etc/systemd/system/ds4-router.socket.d/override.conf",
                   "[Socket]\nListenStream=\nListenStream=127.0.0.1:%d\n" % self.settings["http"]["port"])
        _, found = self.examine("port")
        self.assertEqual({f["verdict"] for f in found["port"]}, {"ok"})

    def test_too_little_memory_and_an_old_processor(self):
        self.options = ["--root", self.folder]
        self.write("proc/meminfo", MEMINFO.replace("60000000", "100000"))
        self.write("proc/cpuinfo", CPUINFO.replace(" sse4_2", "").replace(" popcnt", ""))
        self.assertFinds("memory", "warn", "98 MiB available")
        self.assertFinds("cpu", "fail", "lacks popcnt, sse4_2")
        self.write("proc/cpuinfo", CPUINFO.replace(" avx2", ""))
        self.assertFinds("cpu", "warn", "no AVX2")

    def test_nouveau_and_iommu(self):
        self.options = ["--root", self.folder]
        self.write("proc/modules", "nouveau 2334720 0 - Live 0x0000000000000000\n")
        self.assertFinds("kernel", "fail", "nouveau")
        _, found = self.examine("kernel")
        self.assertEqual([f["verdict"] for f in found["kernel"]], ["fail"], "said to be well in the same breath")

    def test_a_unit_that_raises_no_limit_is_not_said_to(self):
        self.options = ["--root", self.folder]
        self.write("etc/systemd/system/ds4-worker@.service", "[Service]\nLimitMEMLOCK=infinity\n")
        with mock.patch.object(doctor.resource, "getrlimit", return_value=(1024, 1024)):
            self.assertFinds("limits", "ok", "locked memory: 1024 in this shell, raised by the unit")
            self.assertFinds("limits", "warn", "open files: 1024")


class Rig(Doctor):
    """A rig of four cards on which everything is right."""

    def setUp(self):
        super().setUp()
        self.settings["worker"] = {"backend": "cuda"}
        self.settings["cluster"] = {"stages": 4}
        self.rig = {"cuda": "13.0", "p2p": "CNS", "cards": []}
        for n in range(4):
            self.rig["cards"].append(dict(CARD, index=str(n), uuid=CARD["uuid"][:-1] + str(n),
                                          **{"pci.bus_id": "00000000:0%d:00.0" % (n + 1)}))
        smi = self.write("nvidia-smi", SMI % os.path.join(self.folder, "rig.json"))
        os.chmod(smi, os.stat(smi).st_mode | stat.S_IXUSR)
        self.options = ["--root", self.folder, "--nvidia-smi", smi]
        self.write("proc/cpuinfo", CPUINFO)
        self.write("proc/meminfo", MEMINFO)
        self.write("proc/cmdline", "root=/dev/sda1 quiet iommu=pt\n")
        self.write("proc/driver/nvidia/version", VERSION)
        self.write("proc/driver/nvidia/params", 'EnableGpuFirmware: 18\nRegistryDwords: ""\n')
        self.write("var/log/kern.log", "kernel: usb 1-1: new device\n")
        for node in ["nvidiactl", "nvidia-uvm"] + ["nvidia%d" % n for n in range(4)]:
            os.chmod(self.write("dev/" + node, ""), 0o666)
        for n in range(4):
            self.write("sys/bus/pci/devices/0000:0%d:00.0/aer_dev_correctable" % (n + 1),
                       "RxErr 0\nBadTLP 0\nTOTAL_ERR_COR 0\n")
            self.write("sys/bus/pci/devices/0000:0%d:00.0/resource" % (n + 1), RESOURCE)

    def examine(self, *only):
        self.write("rig.json", json.dumps(self.rig))
        return super().examine(*only)


class Cards(Rig):
    """And then one thing is not."""

    def test_a_good_rig_is_good(self):
        checks = ("driver", "nodes", "cards", "throttle", "link", "p2p", "xid", "clients")
        status, found = self.examine(*checks)
        self.assertEqual(status, 0)
        for name in checks:
            self.assertEqual({f["verdict"] for f in found[name]}, {"ok"}, found[name])
        self.assertIn("driver 610.43.02, CUDA 13.0", found["driver"][0]["text"])
        self.assertEqual(len(found["cards"]), 4)
        self.assertIn("generation 2, x4, about 1.7 GB/s: 40 ms", found["link"][0]["text"])
        self.assertIn("0 of 12 directions (CNS)", found["p2p"][0]["text"])

    def test_each_fault_of_a_card_is_seen_on_that_card(self):
        reasons = "clocks_event_reasons."
        for field, value, check, verdict, text in (
                ("memory.total", "8192", "cards", "warn", "as sold"),
                ("memory.total", "32768", "cards", "note", "single-rank"),
                ("memory.total", "81920", "cards", "fail", "loses the card above 65536"),
                ("memory.total", "[N/A]", "cards", "fail", "no memory"),
                ("memory.used", "9000", "cards", "note", "9000 MiB in use"),
                (reasons + "hw_power_brake_slowdown", "Active", "throttle", "fail", "B30"),
                (reasons + "hw_thermal_slowdown", "Active", "throttle", "fail", "heat (hardware)"),
                (reasons + "sw_thermal_slowdown", "Active", "throttle", "fail", "heat (driver)"),
                ("temperature.gpu", "83", "throttle", "warn", "83 C"),
                ("temperature.memory", "90", "throttle", "warn", "temperature.memory 90 C"),
                ("power.limit", "250.00", "throttle", "note", "nvidia-smi -pl"),
                ("pcie.link.width.current", "1", "link", "warn", "bifurcation"),
                ("mig.mode.current", "Enabled", "cards", "fail", "nvidia-smi -i 2 -mig 0"),
                ("compute_mode", "Prohibited", "cards", "fail", "nvidia-smi -i 2 -c DEFAULT"),
                ("persistence_mode", "Disabled", "clients", "note", "card 2"),
                ("uuid", "GPU-0", "cards", "ok", "card 2")):
            with self.subTest(field=field, value=value):
                kept = self.rig["cards"][2][field]
                self.rig["cards"][2][field] = value
                said = self.assertFinds(check, verdict, text)
                self.assertIn("card 2", said)
                self.rig["cards"][2][field] = kept

    def test_the_10_gb_card_has_its_own_limits(self):
        for card in self.rig["cards"]:
            card.update({"pci.device_id": "0x208210DE", "memory.total": "40960"})
        _, found = self.examine("cards")
        self.assertEqual({f["verdict"] for f in found["cards"]}, {"ok"})
        self.rig["cards"][0]["memory.total"] = "81920"
        self.assertFinds("cards", "fail", "loses the card above 40960")

    def test_a_driver_that_is_missing_hangs_or_is_too_old(self):
        self.rig["cuda"] = "12.4"
        self.assertFinds("driver", "fail", "12.8 is the least")
        self.rig["cuda"] = "13.0"
        self.rig["broken"] = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
        self.assertFinds("driver", "fail", "couldn't communicate")
        _, found = self.examine("link")
        self.assertEqual(found["link"][0]["verdict"], "skip")
        self.options[-1] = "/nonexistent/nvidia-smi"
        self.assertFinds("driver", "fail", "there is no nvidia-smi")

    def test_an_old_driver_knows_the_reasons_under_their_old_name(self):
        for card in self.rig["cards"]:
            for key in list(card):
                if key.startswith("clocks_event_reasons"):
                    card[key.replace("event", "throttle")] = card.pop(key)
        _, found = self.examine("throttle")
        self.assertEqual({f["verdict"] for f in found["throttle"]}, {"ok"})

    def test_known_bad_driver_settings(self):
        self.write("proc/driver/nvidia/params", "EnableGpuFirmware: 0\n")
        self.assertFinds("driver", "fail", "EnableGpuFirmware")
        self.write("proc/driver/nvidia/params", 'EnableGpuFirmware: 18\nRegistryDwords: "RMForce=1"\n')
        self.assertFinds("driver", "note", "RMForce=1")
        self.write("proc/driver/nvidia/version", VERSION.replace("610.43.02", "580.95.05"))
        self.assertFinds("driver", "fail", "reboot after an update")
        self.write("proc/driver/nvidia/version", VERSION.replace("Open Kernel Module", "Kernel Module"))
        self.assertFinds("driver", "warn", "closed kernel modules")
        secure = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
        self.write(secure, "\x06\0\0\0\0")
        _, found = self.examine("kernel")
        self.assertEqual({f["verdict"] for f in found["kernel"]}, {"ok"})
        self.write(secure, "\x06\0\0\0\x01")
        self.assertFinds("kernel", "note", "Secure Boot is on")
        self.write("proc/cmdline", "quiet\n")
        os.makedirs(os.path.join(self.folder, "sys/class/iommu/dmar0"))
        self.assertFinds("kernel", "warn", "iommu=pt")
        self.write("proc/4242/comm", "nvidia-pstated\n")
        self.assertFinds("clients", "warn", "nvidia-pstated runs")

    def test_faults_in_the_kernels_log(self):
        line = "kernel: NVRM: Xid (PCI:0000:03:00): %d, pid=1234, name=ds4-worker, text\n"
        for code, verdict, text in ((79, "fail", "fell off the bus"), (109, "fail", "context switch"), (31, "warn", "memory access fault"),
                                    (154, "fail", "reset or reboot"), (8, "fail", "NVIDIA's list"),
                                    (74, "warn", "NVLink")):
            self.write("var/log/kern.log", line % code + line % code)
            self.assertFinds("xid", verdict, "Xid %d on 0000:03:00, 2 times" % code)
            self.assertFinds("xid", verdict, text)

    def test_links_nodes_and_stages(self):
        self.write("sys/bus/pci/devices/0000:02:00.0/aer_dev_correctable", "TOTAL_ERR_COR 17\n")
        self.assertFinds("link", "warn", "17 corrected errors")
        self.write("sys/bus/pci/devices/0000:03:00.0/resource", RESOURCE.replace("38", "00").replace("8f", "00")
                   .replace("fffffffff", "000000000"))
        self.assertFinds("link", "fail", "Above 4G Decoding")
        os.chmod(os.path.join(self.folder, "dev/nvidia2"), 0o600)
        self.assertFinds("nodes", "fail", "may not open /dev/nvidia2")
        os.remove(os.path.join(self.folder, "dev/nvidia-uvm"))
        self.assertFinds("nodes", "fail", "/dev/nvidia-uvm")
        self.rig["p2p"] = "OK"
        self.assertFinds("p2p", "note", "copy test")
        self.write("etc/ds4/worker-0.env", "CUDA_VISIBLE_DEVICES=GPU-dead-beef\n")
        self.assertFinds("cards", "fail", "GPU-dead-beef, which is not here")
        self.rig["cards"].pop()
        self.assertFinds("cards", "warn", "4 stages on 3 cards")


    def test_what_is_set_for_nccl_against_what_such_cards_need(self):
        self.write("etc/ds4/worker-1.env", "CUDA_DEVICE_ORDER=PCI_BUS_ID\nNCCL_P2P_DISABLE=0\nNCCL_DEBUG=INFO\n")
        _, found = self.examine("nccl")
        self.assertEqual([f["text"] for f in found["nccl"] if f["verdict"] == "warn"],
                         ["NCCL_P2P_DISABLE=0 in /etc/ds4/worker-1.env"])
        self.settings["nccl"] = {"p2p": True}
        os.remove(self.config)
        self.assertFinds("nccl", "warn", "nccl.p2p = true")


class CardTests(Rig):
    """What runs on the cards, on libraries that behave as told."""

    @classmethod
    def setUpClass(cls):
        cls.libraries = tempfile.mkdtemp(prefix="ds4-doctor-lib-")
        cls.addClassCleanup(shutil.rmtree, cls.libraries)
        first = os.path.join(cls.libraries, "libcuda.so.1")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-w", "-x", "c", "-", "-o", first], input=LIBRARIES,
                       text=True, check=True, timeout=60)
        for name in ("libcublas.so.13", "libnccl.so.2"):
            os.symlink(first, os.path.join(cls.libraries, name))

    def setUp(self):
        super().setUp()
        self.options += ["--card-tests"]

    def fake(self, what):
        environment = mock.patch.dict(os.environ, {"LD_LIBRARY_PATH": self.libraries, "FAKE": what})
        environment.start()
        self.addCleanup(environment.stop)

    def test_good_cards_pass(self):
        self.fake("")
        status, found = self.examine("memtest", "rates", "nccltest")
        self.assertEqual(status, 0, found)
        self.assertEqual([f["text"] for f in found["memtest"]],
                         ["card %d: 1.0 GiB of 3.0 GiB hold what was written" % n for n in range(3)])
        self.assertEqual({f["verdict"] for f in found["rates"]}, {"ok"})
        self.assertEqual([f["text"] for f in found["nccltest"]], ["3 cards added 4 MiB correctly"])

    def test_memory_that_folds_is_found_on_its_card(self):
        self.fake("fold")
        said = self.assertFinds("memtest", "fail", "card 1")
        self.assertIn("8192 pages hold another's number, the first at 0 MiB", said)
        _, found = self.examine("memtest")
        self.assertEqual([f["verdict"] for f in found["memtest"]], ["ok", "fail", "ok"])

    def test_a_throttled_card_is_found(self):
        self.fake("slow")
        self.assertFinds("rates", "warn", "throttled")

    def test_nccl_that_computes_wrongly_hangs_or_crashes(self):
        self.fake("sum")
        self.assertFinds("nccltest", "fail", "wrong sum")
        self.fake("crash")
        self.assertFinds("nccltest", "fail", "ended with -6")
        self.fake("hang")
        with mock.patch.object(doctor, "CARD_TEST_S", 1):
            self.assertFinds("nccltest", "fail", "no end within 1 s")

    def test_without_the_flag_or_the_libraries_it_says_so(self):
        self.options.pop()
        self.assertFinds("memtest", "skip", "--card-tests")
        self.options.append("--card-tests")
        self.assertFinds("nccltest", "fail", "there is no lib")  # nccl or cuda, whichever is missed first


if __name__ == "__main__":
    e2e.main()
