"""Real sshd processes on loopback addresses, each playing a machine whose user is ours."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from spotfleet.model import SshAccess
from spotfleet.ssh import keys

SSHD = "/usr/sbin/sshd"
LIMIT_S = 60.0  # for any one thing to happen on a busy machine
RUN_MARK = "TEST_RUN_OF_SPOTFLEET"  # tests/conftest.py finds what bears it
AS_ROOT = "mount -t tmpfs none /run && mkdir -p -m 755 /run/sshd && exec \"$@\""  # Debian's sshd wants that folder


def why_not() -> str:
    """Why no sshd runs here; "" where one does."""
    for tool in (SSHD, "ssh"):
        if shutil.which(tool) is None:
            return f"needs {tool} (Debian: openssh-server, openssh-client)"
    if os.getuid() == 0:
        tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
        return f"sshd as root needs a mount namespace: {tried.stderr.strip()}" if tried.returncode else ""
    return ""


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as door:
        return door.getsockname()[1]


class Machine:
    """An sshd, its host key, and who may enter."""

    def __init__(self, folder: Path, name: str, address: str) -> None:
        folder.mkdir(parents=True)
        folder.chmod(0o700)
        self.folder, self.name, self.address = folder, name, address
        self.host_key = keys.derived_host_key("the machines' secret", name)
        self.port = free_port(address)
        self.options: list[str] = []
        self.path = ""  # where its commands are looked for; "" for sshd's own
        self._first = (self.host_key, "")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def door(self) -> SshAccess:
        return SshAccess(self.address, getpass.getuser(), self.port, (keys.pinned(self.host_key.public),))

    def admit(self, public: str) -> None:
        """This key alone."""
        (self.folder / "authorized_keys").write_text(public + "\n")

    def start(self) -> None:
        """Returns when it listens."""
        secret = self.folder / "host_key"
        secret.write_text(self.host_key.private)
        secret.chmod(0o600)
        (self.folder / "authorized_keys").touch(0o600)
        mark = f"{RUN_MARK}={os.environ.get(RUN_MARK, '')}" + (f" PATH={self.path}" if self.path else "")
        (self.folder / "sshd_config").write_text("\n".join([
            f"ListenAddress {self.address}:{self.port}", f"HostKey {secret}", "PidFile none", "UsePAM no",
            f"AuthorizedKeysFile {self.folder}/authorized_keys", "StrictModes no", "PasswordAuthentication no",
            "KbdInteractiveAuthentication no", "UseDNS no", "MaxStartups 100", "PrintMotd no", f"SetEnv {mark}",
            "PermitRootLogin prohibit-password", *self.options, ""]))
        command = [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        if os.getuid() == 0:
            command = ["unshare", "--mount", "sh", "-c", AS_ROOT, "sh", *command]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(self._listens, f"sshd does not listen: {(self.folder / 'log').read_text()}")

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            socket.create_connection((self.address, self.port), 1.0).close()
        except OSError:
            return False
        return True

    def processes(self) -> list[psutil.Process]:
        """Its sshd and all that was started through it."""
        if self.process is None or self.process.poll() is not None:
            return []
        own = psutil.Process(self.process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            return [own, *own.children(recursive=True)]
        return []

    def freeze(self) -> None:
        """From now on it says nothing, and takes everything: as a link that is cut."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def mend(self) -> None:
        """As it was at first, and running."""
        self.thaw()
        if (self.host_key, self.path) != self._first or self.options or self.process is None:
            self.stop()
            (self.host_key, self.path), self.options = self._first, []
            self.start()

    def stop(self) -> None:
        """All of it is gone when this returns."""
        found = self.processes()
        self._send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(LIMIT_S)
        until(lambda: not any(map(lives, found)), f"{self.name} does not stop")
        self.process = None


def lives(process: psutil.Process) -> bool:
    """A dead one that nobody has buried yet is gone: whose it became when its sshd ended may take its time."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
