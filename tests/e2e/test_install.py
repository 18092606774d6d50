#!/usr/bin/env python3
"""What `make install` puts where, and that it works from there."""

import glob
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import e2e  # noqa: E402

VERSION = "0.1.0"  # of Makefile and deploy/debian/changelog
PROGRAMS = ["sbin/ds4-router", "libexec/ds4-worker", "bin/ds4-text", "bin/ds4-gguf"]
OTHERS = [
    "bin/ds4-doctor",
    "lib/systemd/system/ds4.target",
    "lib/systemd/system/ds4-router.service",
    "lib/systemd/system/ds4-router.socket",
    "lib/systemd/system/ds4-worker@.service",
    "lib/sysusers.d/ds4.conf",
    "lib/tmpfiles.d/ds4.conf",
    "share/doc/ds4/ds4.conf.example",
    "share/doc/ds4/LICENSE",
    "share/doc/ds4/README.md",
    "share/doc/ds4/INSTALL.md",
    "share/doc/ds4/CLIENTS.md",
    "share/doc/ds4/TUNING.md",
    "share/doc/ds4/TROUBLESHOOTING.md",
    "share/doc/ds4/examples/prometheus.yml",
    "share/doc/ds4/examples/alerts.yml",
    "share/doc/ds4/examples/grafana-dashboard.json",
]


def run(*command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=300, **options)


class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="ds4-install-")
        cls.addClassCleanup(shutil.rmtree, cls.root)
        cls.prefix = os.path.join(cls.root, "usr")
        cls.install(PREFIX=cls.prefix)

    @staticmethod
    def make(target, **variables):
        """The outer make's job server is not ours."""
        environment = dict(os.environ, MAKEFLAGS="")
        for word in os.environ.get("MAKEFLAGS", "").split():
            name, equals, value = word.partition("=")
            if equals and not name.startswith("-"):
                variables.setdefault(name, value)
        variables["CONFIG"] = e2e.CONFIG
        done = run("make", "-C", e2e.ROOT, target, env=environment,
                   *["%s=%s" % item for item in variables.items()])
        if done.returncode != 0:
            raise AssertionError(done.stdout)

    @classmethod
    def install(cls, **variables):
        cls.make("install", **variables)

    def path(self, name):
        return os.path.join(self.prefix, name)

    def test_destdir_holds_exactly_the_files_of_the_package(self):
        folder = os.path.join(self.root, "package")
        self.install(DESTDIR=folder, PREFIX="/usr")
        found = [os.path.relpath(f, os.path.join(folder, "usr"))
                 for f in glob.glob(folder + "/**", recursive=True) if os.path.isfile(f)]
        self.assertEqual(sorted(found), sorted(PROGRAMS + OTHERS))
        with open(os.path.join(folder, "usr/lib/systemd/system/ds4-worker@.service")) as unit:
            self.assertIn("ExecStart=/usr/libexec/ds4-worker ", unit.read())

    def test_programs_run_and_explain_themselves(self):
        for name in PROGRAMS:
            done = run(self.path(name), "--help")
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertIn("Usage: " + os.path.basename(name), done.stdout)
        done = run(self.path("bin/ds4-doctor"), "--version")
        self.assertEqual(done.stdout.split(), ["ds4-doctor", VERSION])

    def test_example_settings_are_all_settings_with_their_defaults(self):
        done = run(self.path("sbin/ds4-router"), "--config", "/dev/null", "--print-config")
        self.assertEqual(done.returncode, 0, done.stdout)
        with open(self.path("share/doc/ds4/ds4.conf.example"), encoding="utf-8") as example:
            head, _, body = example.read().partition("\n\n")
        self.assertTrue(all(line.startswith("#") for line in head.split("\n")))
        self.assertEqual(body, done.stdout, "settings changed: `make example`")

    def test_router_and_worker_load_the_example_once_it_names_a_model(self):
        settings = os.path.join(self.root, "ds4.conf")
        with open(self.path("share/doc/ds4/ds4.conf.example"), encoding="utf-8") as example:
            text = example.read()
        self.assertEqual(text.count('path = ""'), 1)
        with open(settings, "w", encoding="utf-8") as out:
            out.write(text.replace('path = ""', 'path = "%s"' % e2e.TINY))
        for program in PROGRAMS[:2]:
            done = run(self.path(program), "--config", settings, "--check-config")
            self.assertEqual(done.returncode, 0, done.stdout)

    def analyze(self, *command):
        folder = self.path("lib/systemd/system")
        return run("systemd-analyze", *command, env=dict(os.environ, SYSTEMD_UNIT_PATH=folder + ":"))

    @unittest.skipUnless(shutil.which("systemd-analyze"), "systemd-analyze is not installed")
    def test_units_are_valid(self):
        folder = self.path("lib/systemd/system")
        done = self.analyze("verify", "--man=no", folder + "/ds4.target", folder + "/ds4-router.socket",
                            folder + "/ds4-router.service", folder + "/ds4-worker@0.service")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertNotIn("ds4", done.stdout)

    @unittest.skipUnless(shutil.which("systemd-analyze"), "systemd-analyze is not installed")
    def test_services_are_confined(self):
        """Exposure by systemd's own measure, 0 to 10; the worker needs the host's devices and memory."""
        for unit, limit in (("ds4-router.service", 2.0), ("ds4-worker@0.service", 4.5)):
            done = self.analyze("security", "--offline=true", "--no-pager",
                                "--threshold=%d" % (10 * limit), self.path("lib/systemd/system/" + unit))
            self.assertEqual(done.returncode, 0, done.stdout)

    def test_a_stage_may_use_the_graphics_cards(self):
        """Directives that hide or forbid device nodes, also where they do so by implication."""
        with open(self.path("lib/systemd/system/ds4-worker@.service"), encoding="utf-8") as unit:
            names = {line.partition("=")[0] for line in unit if "=" in line and line[0] not in "#["}
        self.assertEqual(names & {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock",
                                  "MemoryDenyWriteExecute", "PrivateIPC", "PrivateUsers"}, set())

    @unittest.skipUnless(shutil.which("systemd-sysusers") and shutil.which("systemd-tmpfiles") and
                         os.geteuid() == 0, "needs systemd's tools and the right to change owners")
    def test_user_and_private_folders_are_made(self):
        system = os.path.join(self.root, "system")
        self.install(DESTDIR=system, PREFIX="/usr")
        os.makedirs(os.path.join(system, "etc"), exist_ok=True)
        done = run("systemd-sysusers", "--root", system)
        self.assertEqual(done.returncode, 0, done.stdout)
        with open(os.path.join(system, "etc/passwd"), encoding="utf-8") as users:
            user = [line.split(":") for line in users if line.startswith("ds4:")]
        self.assertEqual(len(user), 1)
        done = run("systemd-tmpfiles", "--root", system, "--create")
        self.assertEqual(done.returncode, 0, done.stdout)
        for folder, mode in (("run/ds4", 0o700), ("var/lib/ds4", 0o750)):
            status = os.stat(os.path.join(system, folder))
            self.assertEqual(status.st_mode & 0o777, mode, folder)
            self.assertEqual(status.st_uid, int(user[0][2]), folder)


@unittest.skipUnless(all(map(shutil.which, ("dpkg-buildpackage", "dh", "help2man"))),
                     "make deps-deb is needed for packages")
class Package(unittest.TestCase):
    """`make deb`; that it installs and goes again is tried in a bare root by tests/newcomer.sh."""

    @classmethod
    def setUpClass(cls):
        Install.make("deb")
        cls.folder = os.path.join(e2e.ROOT, "build/deb")
        cls.deb = os.path.join(cls.folder, "ds4_%s_amd64.deb" % VERSION)

    def test_programs_and_package_have_the_same_version(self):
        done = run(os.path.join(e2e.bin_dir(), "ds4-router"), "--version")
        self.assertEqual(done.stdout.split(), ["ds4-router", VERSION])
        self.assertTrue(os.path.isfile(self.deb), "deploy/debian/changelog names another version")

    def test_it_holds_what_make_install_installs(self):
        done = run("dpkg-deb", "--contents", self.deb)
        self.assertEqual(done.returncode, 0, done.stdout)
        files = [line.split()[5] for line in done.stdout.splitlines() if not line.startswith("d")]
        ours = [name.replace("./lib/", "./usr/lib/") for name in files
                if "/share/man/" not in name and "/share/lintian/" not in name]
        own = ["share/doc/ds4/changelog.gz", "share/doc/ds4/copyright"]
        wanted = set(PROGRAMS + OTHERS + own) - {"share/doc/ds4/LICENSE"}
        self.assertEqual(sorted(ours), sorted("./usr/" + name for name in wanted))
        for page in ("man8/ds4-router.8", "man1/ds4-text.1", "man1/ds4-gguf.1", "man1/ds4-doctor.1"):
            self.assertIn("./usr/share/man/%s.gz" % page, files)

    @unittest.skipUnless(shutil.which("lintian"), "lintian is not installed")
    def test_lintian_finds_no_error(self):
        changes = os.path.join(self.folder, "ds4_%s_amd64.changes" % VERSION)
        done = run("lintian", "--allow-root", "--fail-on", "error", changes)
        self.assertEqual((done.returncode, done.stdout), (0, ""))


if __name__ == "__main__":
    e2e.main()
