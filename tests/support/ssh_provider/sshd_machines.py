"""Machines of a kind: real sshd processes on loopback, each with its own address, home, host key and authorized_keys.

    with Machines(tmp_path, ["head", "w0", "w1"]) as machines:
        provider = SshProvider(machines.config())           # as the laptop; side="dispatcher" as the dispatcher
        machines["w0"].holds()                              # what of ours lies there

They share this machine's file system and processes, so what a home holds is told apart by its folder, and what runs for
a host by its mark. Whole machines, with file systems of their own, are in `tests/support/network/machines.py`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spotfleet.bootstrap import MARK, script
from spotfleet.codec import to_json
from spotfleet.model import EnvironmentSpec
from spotfleet.providers.ssh import inventory
from spotfleet.providers.ssh.section.spec import SshMachine, SshSpec
from tests.support.machine_group import MachineGroup

SSHD = "/usr/sbin/sshd"
SFTP = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")
RUN_MARK = "TEST_RUN_OF_SPOTFLEET"  # tests/conftest.py looks for what bears it
LIMIT_S = 60.0  # for any one thing to happen on a busy machine
CONFIG = """
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {home}/.ssh/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
UseDNS no
PrintMotd no
MaxStartups 100:30:200
MaxSessions 50
SetEnv HOME={home} {env}
{more}
"""


def why_not() -> str:
    """Why there can be no sshd here; empty where there can."""
    if not Path(SSHD).exists():
        return "needs sshd (Debian: openssh-server)"
    if not Path("/run/sshd").is_dir():
        try:
            os.mkdir("/run/sshd", 0o755)
        except OSError as error:
            return f"sshd needs the folder /run/sshd: {error}"
    return ""


def key_pair() -> tuple[str, str]:
    """(private, public), ed25519, in OpenSSH's formats."""
    key, form = Ed25519PrivateKey.generate(), serialization
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()).decode()
    return private, key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH).decode()


class Machine:
    """One sshd. `address` is of 127.0.0.0/8; the port stays when it is stopped and started."""

    def __init__(self, folder: Path, name: str, address: str, opens: list[str], more: str = "") -> None:
        self.name, self.address, self.folder, self.home = name, address, folder, folder / "home"
        (self.home / ".ssh").mkdir(parents=True)
        self.keys_file = self.home / ".ssh" / "authorized_keys"
        self._keys = "".join(f"{key} user@laptop\n" for key in opens)
        self.keys_file.write_text(self._keys)
        self.more = more
        self.host_key = ""
        self.new_host_key()
        self._first = self.more, self.host_key, (folder / "host_key").read_text()
        self._runs = ("", "")  # what `more` said, and its host key, when its sshd was started
        with socket.create_server((address, 0)) as probe:
            self.port = probe.getsockname()[1]
        self._sshd: subprocess.Popen[bytes] | None = None
        self._hole: socket.socket | None = None

    @property
    def root(self) -> Path:
        """Everything of ours."""
        return self.home / ".spotfleet-host"

    def new_host_key(self) -> None:
        private, self.host_key = key_pair()
        (self.folder / "host_key").write_text(private)
        (self.folder / "host_key").chmod(0o600)

    def start(self, *, first: bool = False) -> None:
        """`first`: what `more` says comes before our own settings, and so holds."""
        assert not why_not(), why_not()
        sftp = next((s for s in SFTP if Path(s).exists()), "internal-sftp")
        mark = os.environ.get(RUN_MARK, "")
        more = self.more if "Subsystem" in self.more else f"Subsystem sftp {sftp}"
        (self.folder / "sshd_config").write_text((f"{self.more}\n" if first else "") + CONFIG.format(
            address=self.address, port=self.port, folder=self.folder, home=self.home, more=more,
            env=f"{RUN_MARK}={mark} TMPDIR={self.folder}"))
        self._runs = self.more, self.host_key
        log = (self.folder / "sshd.log").open("ab")
        with log:
            self._sshd = subprocess.Popen([SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")],
                                          stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait("sshd listens", self._listens)

    def _listens(self) -> bool:
        assert self._sshd is not None and self._sshd.poll() is None, (self.folder / "sshd.log").read_text()
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 1):
            return True
        return False

    def stop(self) -> None:
        """Nobody listens any more, and every open connection is cut. Hosts go on."""
        if self._hole is not None:
            self._hole.close()
            self._hole = None
        if self._sshd is not None:
            for process in [psutil.Process(self._sshd.pid), *self.sessions()]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._sshd.wait()
            self._sshd = None

    def sessions(self) -> list[psutil.Process]:
        """sshd's processes of open connections."""
        if self._sshd is None:
            return []
        found = []
        for process in psutil.Process(self._sshd.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [process] if process.name() == "sshd" else []
        return found

    def freeze(self) -> None:
        """It stops answering, and every connection stays open."""
        assert self._sshd is not None
        for process in [*self.sessions(), psutil.Process(self._sshd.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        assert self._sshd is not None
        for process in [psutil.Process(self._sshd.pid), *self.sessions()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def hang(self) -> None:
        """In its place something accepts connections and never says a word."""
        self.stop()
        self._hole = socket.create_server((self.address, self.port))

    def renew(self) -> None:
        """As it was at first, and running: an empty home with its user's key, and nobody connected."""
        if self._sshd is not None:
            self.thaw()
        more, self.host_key, private = self._first
        if self._sshd is None or self._runs != (more, self.host_key):
            self.stop()
            self.more = more
            (self.folder / "host_key").write_text(private)
            self.start()
        for session in self.sessions():
            with contextlib.suppress(psutil.NoSuchProcess):
                session.kill()
        shutil.rmtree(self.home)
        self.keys_file.parent.mkdir(parents=True)
        self.keys_file.write_text(self._keys)

    def hosts(self) -> list[str]:
        """Those that have something running here, by their marks."""
        return sorted({host for host, process in marked() if _home(process) == str(self.home)})

    def holds(self) -> list[str]:
        """Everything of ours in its home."""
        return sorted(str(p.relative_to(self.home)) for p in self.home.rglob("*") if ".ssh" not in p.parts)

    def close(self) -> None:
        with contextlib.suppress(psutil.Error):
            self.thaw() if self._sshd is not None else None
        self.stop()


IDLE = """#!/bin/bash
# Stands in for bootstrap.sh, where what a host runs is no test's subject: it runs a host that does nothing, at once.
host=$(cd "$(dirname "$0")" && pwd)
. "$host/settings.sh"
case $1 in
start) [ -e "$host/state" ] && exit 0
  printf 'running %s idle\\n' "$(date +%s)" >"$host/.state" && mv "$host/.state" "$host/state"
  SPOTFLEET_HOST_MARK=$REQUEST_ID setsid sleep 1000 </dev/null >/dev/null 2>&1 &
  # The mark is in its environment only after exec: what looks for marks before that would leave it running.
  until read -r name <"/proc/$!/comm" && [ "$name" = sleep ]; do sleep 0.01; done ;;
look) cat "$host/state" ;;
esac
"""


def idle_hosts(monkeypatch) -> None:
    """Hosts are made at once and do nothing; they are removed by the real script."""
    real = script.text
    monkeypatch.setattr(script, "text", lambda name: IDLE if name == "bootstrap.sh" else real(name))


def marked() -> list[tuple[str, psutil.Process]]:
    """(host, process) of all that runs for hosts of this test run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            env = process.environ()
            if MARK in env and env.get(RUN_MARK) == os.environ.get(RUN_MARK) and process.status() != "zombie":
                found.append((env[MARK], process))
    return found


class Machines(MachineGroup[Machine]):
    def __init__(self, folder: Path, names: list[str]) -> None:
        super().__init__()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.private, self.public = key_pair()  # keys of the user at the laptop
        self.identity = folder / "id_ed25519"
        self.identity.write_text(self.private)
        self.identity.chmod(0o600)
        self.fleet_private, self.fleet_public = key_pair()
        self._all = {n: Machine(folder / n, n, f"127.0.0.{i + 11}", [self.public]) for i, n in enumerate(names)}
        self._head = names[0]
        try:
            for machine in self._all.values():
                machine.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Everything that was started is gone, hosts too."""
        with contextlib.ExitStack() as last:  # each of these, whichever fails
            last.callback(shutil.rmtree, self.folder, ignore_errors=True)
            last.callback(self._end_hosts)
            for machine in self._all.values():
                last.callback(machine.close)
            last.callback(inventory.close_all)

    def renew(self) -> None:
        """All as they were at first, with the same addresses, ports and keys."""
        inventory.close_all()
        self._end_hosts()
        for machine in self:
            machine.renew()

    def _end_hosts(self) -> None:
        homes = [str(m.folder) for m in self._all.values()]
        deadline = time.monotonic() + LIMIT_S
        while left := [p for _, p in marked() if _home(p).startswith(tuple(homes))]:
            assert time.monotonic() < deadline, left
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            time.sleep(0.02)

    def spec(self, **changes: object) -> SshSpec:
        head, *workers = [self.ssh_machine(m.name) for m in self]
        head = replace(head, folder=str(self[self._head].root))  # a dispatcher looks there without SSH
        said = {"dispatcher": head, "hosts": tuple(workers), "user": user(), "identity_file": str(self.identity)}
        return SshSpec(**{**said, **changes})

    def ssh_machine(self, name: str, **changes: object) -> SshMachine:
        machine = self[name]
        said = {"host": machine.address, "port": machine.port, "host_key": machine.host_key}
        return SshMachine(**{**said, **changes})

    def zone(self, name: str) -> str:
        """What the provider calls it."""
        return f"[{self[name].address}]:{self[name].port}"

    def config(self, spec: SshSpec | None = None, side: str = "laptop", **more: str) -> dict[str, Any]:
        """With the fleet's key on the dispatcher; on the laptop with `private_key=machines.fleet_private` alone."""
        environment = EnvironmentSpec(python=sys.executable, inherit=True)
        own = {"private_key": self.fleet_private, "public_key": self.fleet_public} if side == "dispatcher" else {}
        return {"ssh": to_json(spec or self.spec()), "environment": to_json(environment),
                "known_hosts": "", "side": side, **own, **more}

    def admit(self) -> None:
        """The fleet's key opens all of them, whoever put it there."""
        for machine in self:
            with machine.keys_file.open("a") as file:
                file.write(f"{self.fleet_public} spotfleet:f\n")


def _home(process: psutil.Process) -> str:
    try:
        return process.environ().get("HOME", "")
    except psutil.Error:
        return ""


def user() -> str:
    import getpass

    return getpass.getuser()


def wait(what: str, true: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        time.sleep(0.02)
