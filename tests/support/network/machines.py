"""Whole machines on a network of their own, entered through Debian's real sshd.

    with Machines([Build("laptop", "wlan0", door="none"), Build("w0", "ens5")]) as lan:
        lan["laptop"].run("ssh", "w0", "hostname")   # its user's key opens every machine; known_hosts knows them
        lan.net.cut("w0")                            # and whatever else `namespaces.py` does to links
        lan["w0"].changes()                          # every file that differs from before the first command
        lan["w0"].processes()                        # all but its sshd

Each has namespaces of its own for network, processes, mounts and host name, an overlay over the real file system with
fresh /root, /home, /tmp, /run ... (`machine_init.py`), its own host key, authorized_keys, and all names in /etc/hosts.
A machine is gone with all that runs on it after `close`, and when the process that made it is killed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import spotfleet

sys.path.append(str(Path(__file__).parents[2]))  # as pytest does

from tests.support.machine_group import MachineGroup
from tests.support.network import namespaces
from tests.support.network.machine_init import CHANGES
from tests.support.network.namespaces import Namespaces

SSHD, SFTP = "/usr/sbin/sshd", "/usr/lib/openssh/sftp-server"
INIT = Path(__file__).with_name("machine_init.py")
LIMIT_S = 90.0  # generous: for any one thing to happen on a busy machine
USER, USER_ID = "trainer", 2000  # on each machine beside root, and no more than a user
RUN_MARK = "TEST_RUN_OF_SPOTFLEET"  # tests/conftest.py ends what bears it
CHECKOUT = Path(spotfleet.__file__).parent.parent
FRESH = ("/root", "/home", "/tmp", "/var/tmp", "/run", "/var/log", "/var/spool/cron", "/var/lib/systemd")
NOISE = ("/var/log/", "/run/utmp")  # what the machine itself writes down
SOMEBODY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEnotours00000000000000000000000000000000000 somebody@else"
SSHD_CONFIG = """Port 22
HostKey /etc/ssh/host_key
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UseDNS no
LogLevel VERBOSE
PrintMotd no
Subsystem sftp {sftp}
SetEnv {env}
"""
SILENT = """
import socket, threading
door = socket.create_server(("::", 22), family=socket.AF_INET6, dualstack_ipv6=True)
held = []
while True:
    held.append(door.accept())
"""


@functools.cache
def why_not() -> str:
    """Why there can be no machines here; empty where there can."""
    if missing := namespaces.why_not():
        return missing
    for tool, package in ((SSHD, "openssh-server"), ("ssh", "openssh-client"), ("unshare", "util-linux"),
                          ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            return f"machines with an sshd need `{tool}` (Debian: {package})"
    try:
        with Machines([Build("probe", "eth9")]):
            return ""
    except RuntimeError as error:
        return f"no machines here: {error}"


@dataclass(frozen=True)
class Key:
    private: str  # OpenSSH's format
    public: str  # "ssh-ed25519 AAAA..."

    @staticmethod
    def make() -> Key:
        key, form = Ed25519PrivateKey.generate(), serialization
        private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
        public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
        return Key(private.decode(), public.decode())


@dataclass(frozen=True)
class Build:
    """What a machine shall be."""

    name: str
    interface: str
    door: str = "sshd"  # or "silent", which accepts on port 22 and never says a word, or "none"
    python: bool = True
    disk_mib: int = 1024  # in all, of what differs from the real file system
    families: tuple[int, ...] = namespaces.BOTH
    known: bool = True  # does the laptop know its host key?
    forged: bool = False  # the laptop knows another one


class Machine:
    """One that runs. Paths are as seen from inside."""

    def __init__(self, build: Build, net: Namespaces, host_key: Key, spec: dict[str, Any]) -> None:
        self.build, self.name, self.host_key = build, build.name, host_key.public
        self.address = net.address(build.name, build.families[0]) if build.families else ""
        self._net, self._door = net, spec["door"]
        self._outer = net.start(build.name, ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child",
                                             sys.executable, "-I", "-S", str(INIT), json.dumps(spec)],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.pid = 0

    def wait(self) -> None:
        """Return once it stands."""
        assert self._outer.stdout is not None and self._outer.stderr is not None
        if not self._outer.stdout.readline():
            raise RuntimeError(f"machine {self.name} does not start: {self._outer.stderr.read().decode()[-500:]}")
        self.pid = psutil.Process(self._outer.pid).children()[0].pid

    @property
    def root(self) -> Path:
        """Its file system, from outside."""
        return Path("/proc", str(self.pid), "root")

    def path(self, inside: str) -> Path:
        return self.root / inside.lstrip("/")

    def start(self, *command: str, env: dict[str, str] | None = None, cwd: str = "/root",
              **options: Any) -> subprocess.Popen[Any]:
        """A process of its root user, whose environment is `env` and little else. It hears SIGINT also where the tests
        were started in the background, which makes a shell have it ignored."""
        words = [f"{k}={v}" for k, v in {**environment(), **(env or {})}.items()]
        into = ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
        there = ["sh", "-c", 'cd "$0" && exec "$@"', cwd]
        return subprocess.Popen([*into, "env", "-i", "--default-signal=INT", *words, *there, *command], **options)

    def run(self, *command: str, ok: bool = True, timeout_s: float = LIMIT_S, **options: Any) -> Any:
        """Run it to its end; its subprocess.CompletedProcess with text."""
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        process = self.start(*command, text=True, **options)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
            out, err = process.communicate()
            raise AssertionError(f"{self.name}: {' '.join(command)}: still running after {timeout_s:.0f} s\n"
                                 f"{out}{err}") from None
        assert not ok or process.returncode == 0, f"{self.name}: {' '.join(command)}\n{out}{err}"
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def changes(self) -> dict[str, str]:
        """Each file, and each folder that the real file system has not, that is not as it is there: path -> what it is.

        Take it before and after, and compare. A removed file is one that is `gone`.
        """
        top = Path("/proc", str(self.pid), "fd", str(CHANGES))
        found = {}
        for folder, names, files in os.walk(top):
            for name in sorted([*names, *files]):
                inside = "/" + str(Path(folder, name).relative_to(top))
                if not inside.startswith(NOISE) and (what := _what(Path(folder, name), inside)):
                    found[inside] = what
        return found

    def pids(self) -> list[int]:
        """As seen from outside, of all but its first process."""
        return [pid for pid in self._net.pids(self.name) if pid not in (self.pid, self._outer.pid)]

    def processes(self) -> list[str]:
        """Command lines of all that runs, but its first process and its sshd's."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                door = process.name() == "sshd" or process.cmdline() == self._door
                if not door and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{pid} {' '.join(process.cmdline())[:200]}")
        return found

    def freeze_door(self) -> None:
        """Its sshd, sessions too, stops answering; connections stay open."""
        self._signal_all(signal.SIGSTOP, "sshd")

    def thaw_door(self) -> None:
        self._signal_all(signal.SIGCONT, "sshd")

    def door_log(self) -> str:
        return self.path("/var/log/door.log").read_text(errors="replace")

    def wait_for_door(self) -> None:
        if self.build.door != "none":
            wait_for(f"{self.name}: somebody at port 22", lambda: ":0016 " in self._net.call(
                self.name, lambda: Path("/proc/thread-self/net/tcp6").read_text()))

    def power_off(self) -> None:
        """All that runs on it ends, and nobody is told."""
        self._net.cut(self.name)
        wait_for(f"{self.name}: its end", lambda: not self._signal_all(signal.SIGKILL))

    def power_on(self) -> None:
        """It begins anew, with what is on its disk; returns when its door is open."""
        for folder in ("/run", "/tmp"):
            words = ("-mindepth", "1", "!", "-path", "/run/sshd", "!", "-path", "/run/lock", "-delete")
            self.run("find", folder, "-xdev", *words, ok=False)  # what is mounted there stays
        assert self._outer.stdin is not None and self._outer.stdout is not None
        self._outer.stdin.write(b"\n")
        self._outer.stdin.flush()
        self._outer.stdout.readline()
        self.wait_for_door()
        self._net.restore(self.name)

    def said(self) -> Iterator[str]:
        """What its first process says on stderr, line by line, until its end."""
        assert self._outer.stderr is not None
        for line in self._outer.stderr:
            yield line.decode().rstrip()

    def close(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # the kernel ends with it all that is in its namespace of processes
        else:
            self._outer.kill()
        self._outer.wait(LIMIT_S)
        for end in (self._outer.stdin, self._outer.stdout, self._outer.stderr):
            if end is not None:
                end.close()
        self._net.kill(self.name)

    def _signal_all(self, number: signal.Signals, name: str = "") -> list[int]:
        pids = []
        for pid in self.pids():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if not name or psutil.Process(pid).name() == name:
                    os.kill(pid, number)
                    pids.append(pid)
        return pids


class Machines(MachineGroup[Machine]):
    def __init__(self, builds: Sequence[Build], linked: Sequence[Path] = ()) -> None:
        """All stand, and let the laptop in by `key`, when this returns. Each sees the folders `linked`, as a network's
        disk."""
        self.net = Namespaces()
        self.key = Key.make()  # key of the user at the laptop
        super().__init__()
        try:
            addresses = {b.name: [self.net.add(b.name, b.interface, b.families)] for b in builds}
            for build in builds:
                addresses[build.name] = [self.net.address(build.name, family) for family in build.families]
            keys = {b.name: Key.make() for b in builds}
            known = {b.name: Key.make() if b.forged else keys[b.name] for b in builds if b.known}
            for build in builds:
                spec = spec_of(build, keys[build.name], self.key, addresses, known)
                spec["linked"] = [str(folder) for folder in linked]
                self._all[build.name] = Machine(build, self.net, keys[build.name], spec)
            for machine in self._all.values():
                machine.wait()
            for machine in self._all.values():
                machine.wait_for_door()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for machine in self._all.values():
            machine.close()
        self.net.close()

    def wait(self, what: str, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        wait_for(what, condition, limit_s)


def wait_for(what: str, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit_s:.0f} s"
        time.sleep(0.02)


def interrupt(process: subprocess.Popen[Any]) -> None:
    """Ctrl-C for what `Machine.start` has started; returns at its end."""
    for child in psutil.Process(process.pid).children():
        child.send_signal(signal.SIGINT)
    process.wait(LIMIT_S)


def environment() -> dict[str, str]:
    """Of every command on a machine, like that of a login; and the code under test is this one, in a copy too."""
    bins = [str(Path(sys.prefix, "bin")), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    return {"HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "LANG": "C.UTF-8",
            "PATH": os.pathsep.join(bins), "PYTHONPATH": str(CHECKOUT), **_marks()}


def _marks() -> dict[str, str]:
    mark = os.environ.get(RUN_MARK, "")
    return {"OMP_NUM_THREADS": "1"} | ({RUN_MARK: mark} if mark else {})


def spec_of(build: Build, host_key: Key, user_key: Key, addresses: dict[str, list[str]],
            known: dict[str, Key]) -> dict[str, Any]:
    """For `machine_init.py`."""
    hosts = "".join(f"{a} {name}\n" for name, found in addresses.items() for a in found)
    files: dict[str, tuple[str, int]] = {
        "/etc/hosts": (f"127.0.0.1 localhost\n::1 localhost\n{hosts}", 0o644),
        "/etc/hostname": (f"{build.name}\n", 0o644),
        "/etc/passwd": (_accounts("/etc/passwd", f"{USER}:x:{USER_ID}:{USER_ID}::/home/{USER}:/bin/bash"), 0o644),
        "/etc/shadow": (_accounts("/etc/shadow", f"{USER}:*:19000:0:99999:7:::"), 0o640),
        "/etc/group": (_accounts("/etc/group", f"{USER}:x:{USER_ID}:"), 0o644)}
    if build.door == "sshd":
        env = " ".join(f"{k}={v}" for k, v in _marks().items())
        files["/etc/ssh/sshd_config"] = (SSHD_CONFIG.format(sftp=SFTP, env=env), 0o644)
        files["/etc/ssh/host_key"] = (host_key.private, 0o600)
        for home in ("/root", f"/home/{USER}"):
            files[f"{home}/.ssh/authorized_keys"] = (f"{SOMEBODY}\n{user_key.public} user@laptop\n", 0o600)
    else:
        lines = [f"{place} {key.public}\n" for name, key in known.items() for place in (name, *addresses[name])]
        files["/root/.ssh/known_hosts"] = ("".join(lines), 0o600)
        files["/root/.ssh/id_ed25519"] = (user_key.private, 0o600)
        files["/root/.ssh/config"] = ("# mine\nHost *\n    ServerAliveInterval 17\n", 0o600)
    doors = {"sshd": [SSHD, "-D", "-e"], "silent": [sys.executable, "-I", "-S", "-c", SILENT], "none": []}
    hidden = [] if build.python else _pythons(prefixes())
    masks: dict[str, dict[str, str]] = {} if build.python else {f: {} for f in _shared_bins(prefixes())}
    shared = [*(prefixes() if build.python else []), str(CHECKOUT)]
    folders = ["/run/sshd", "/root/.ssh", f"/home/{USER}/.ssh", "/run/lock"]
    return {"name": build.name, "fresh": FRESH, "shared": shared, "hidden": hidden, "size": f"{build.disk_mib}m",
            "files": files, "folders": folders, "masks": masks, "linked": [], "door": doors[build.door],
            "user_id": USER_ID}


def prefixes() -> list[str]:
    """Folders of the interpreter that runs here and of the one that its environment was made of, but for Debian's."""
    found = {str(Path(p).resolve()) for p in (sys.prefix, sys.base_prefix)}
    return sorted(p for p in found if not p.startswith("/usr"))


def _accounts(path: str, line: str) -> str:
    there = [x for x in Path(path).read_text().splitlines() if not x.startswith(f"{USER}:")]
    return "\n".join([*there, line, ""])


def _pythons(prefixes: list[str]) -> list[str]:
    """Every interpreter that a shell would find, and ours where no fresh folder hides it."""
    found = [p for folder in ("/usr/bin", "/usr/local/bin") for p in Path(folder).glob("python*")]
    found += [p for prefix in prefixes for p in Path(prefix, "bin").glob("python*")]
    return sorted({str(p) for p in found if not str(p).startswith(tuple(f"{f}/" for f in FRESH))})


def _shared_bins(prefixes: list[str]) -> list[str]:
    """Folders of interpreters in the checkout, which every machine shares: it may hold the environment of the tests."""
    return [f"{p}/bin" for p in prefixes if Path(p).is_relative_to(CHECKOUT)]


def _what(path: Path, inside: str) -> str:
    about = path.lstat()
    mode = f"{stat.S_IMODE(about.st_mode):o} {about.st_uid}"
    if stat.S_ISLNK(about.st_mode):
        return f"link to {os.readlink(path)}"
    if stat.S_ISCHR(about.st_mode):
        return "gone"
    if stat.S_ISDIR(about.st_mode):
        return "" if Path(inside).is_dir() and not inside.startswith(FRESH) else f"folder {mode}"
    if stat.S_ISREG(about.st_mode):
        return f"file {mode} {about.st_size} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    return f"special {mode}"
