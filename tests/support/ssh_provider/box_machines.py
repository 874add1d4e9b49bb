"""Machines that are folders of this one: real scripts without sshd, and a process that is killed at any point of one.

A point is before or after a request to a machine, before a file of it is there, after half of one, or before a command
of its script. Of what the machine itself started by then, all goes on.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from spotfleet.codec import to_json
from spotfleet.model import EnvironmentSpec, Market, Offer, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.ssh import SshProvider, inventory
from spotfleet.providers.ssh.inventory import MachineInventory
from spotfleet.providers.ssh.machines import ResolvedMachine
from spotfleet.providers.ssh.section.spec import SshMachine, SshSpec
from spotfleet.providers.ssh.transport import CommandResult
from tests.support.ssh_provider.sshd_machines import MARK, RUN_MARK

BOXES = "SPOTFLEET_TEST_BOXES"  # environment of all that runs on machines of one folder
POLLERS = "poll "  # threads that only read
USERS_KEY = "ssh-ed25519 AAAAusers user@laptop\n"
LONG_AGO_S = 600.0
LIMIT_S = 60.0


class Killed(BaseException):
    """The process that uses the machines died here."""


@dataclass(frozen=True)
class Point:
    request: int
    step: int  # 0: before the request; then each command or half file; -1: after it


class Victim:
    """Counts the steps of one process's requests, or kills it at one."""

    def __init__(self, at: Point | None = None) -> None:
        self.at, self.points, self.names = at, list[Point](), list[str]()
        self._number = itertools.count(1)
        self.dead = False

    def request(self, name: str) -> int:
        if self.dead:
            raise Killed
        number = next(self._number)
        self.names.append(name)
        self.step(number, 0)
        return number

    def step(self, number: int, step: int) -> None:
        self.points.append(Point(number, step))
        if self.at == self.points[-1]:
            self.kill()

    def kill(self) -> None:
        self.dead = True
        raise Killed


class Box:
    """One machine: its home is a folder. It is the transport to itself."""

    def __init__(self, folder: Path, boxes: Boxes) -> None:
        self.home, self._boxes, self.machine = folder, boxes, None
        self._ssh = folder / ".ssh"
        self._ssh.mkdir(parents=True)
        (self._ssh / "authorized_keys").write_text(USERS_KEY)
        self._counted = folder.parent / f"{folder.name}.commands"

    def run(self, text: str, limit_s: float = LIMIT_S) -> CommandResult:
        victim = self._boxes.victim
        if victim is None or threading.current_thread().name.startswith(POLLERS):
            return self._run(text, "")
        number = victim.request("script")
        here = victim.at.step if victim.at is not None and victim.at.request == number else 0
        result = self._run(text, f"trap '(( ++SPENT == {here} )) && kill -9 $$; echo $SPENT >{self._counted}' DEBUG\n")
        if here > 0:
            assert result.status == -signal.SIGKILL, "the script was shorter than before"
            victim.kill()
        for step in range(1, int(self._counted.read_text()) + 1):
            victim.step(number, step)
        victim.step(number, -1)
        return result

    def _run(self, text: str, first: str) -> CommandResult:
        env = {"PATH": os.environ["PATH"], "HOME": str(self.home), "SSH_CONNECTION": "127.0.0.1 1 127.0.0.1 22",
               BOXES: str(self._boxes.folder), RUN_MARK: os.environ.get(RUN_MARK, "")}
        done = subprocess.run(["bash", "-T", "-s"], input=f"{first}{text}\n", env=env, text=True, capture_output=True,
                              timeout=LIMIT_S, start_new_session=True, check=False)
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def put(self, folder: str, files: Mapping[str, bytes], limit_s: float) -> None:
        victim = self._boxes.victim
        number = victim.request("files") if victim else 0
        step = itertools.count(1)
        for name, data in files.items():
            part = Path(folder, f"{name}.part")
            part.write_bytes(data[:len(data) // 2])
            if victim:
                victim.step(number, next(step))
            part.write_bytes(data)
            part.chmod(0o600)
            part.rename(Path(folder, name))
        if victim:
            victim.step(number, -1)

    def get(self, paths: list[str], limit_s: float = LIMIT_S) -> list[bytes]:
        return [Path(path).read_bytes() for path in paths]

    def close(self) -> None:
        """There is no connection."""

    def holds(self) -> list[str]:
        return sorted(str(p.relative_to(self.home)) for p in self.home.rglob("*"))


class Boxes:
    """The machines `head` and `w0` of one fleet, and the processes that use them, one after the other."""

    def __init__(self, folder: Path, fleet: str) -> None:
        self.folder, self.fleet = folder, fleet
        self.victim: Victim | None = None
        self.by_host = {f"127.0.1.{n}": Box(folder / name, self) for n, name in enumerate(("head", "w0"), 1)}
        self.head, self.worker = self.by_host.values()
        self._processes = itertools.count(1)

    def process(self, victim: Victim | None = None) -> SshProvider:
        """Return the provider of a new process, which remembers nothing."""
        inventory.close_all()
        self.victim = victim
        head, worker = self.by_host
        config: dict[str, Any] = {
            "ssh": to_json(SshSpec(SshMachine(head), (SshMachine(worker),))), "known_hosts": "", "side": "laptop",
            "environment": to_json(EnvironmentSpec(python=sys.executable, inherit=True)),
            "process": str(next(self._processes))}
        return SshProvider(config)

    def request(self, number: int, role: Role = Role.WORKER) -> LaunchRequest:
        kind, name = ("dispatcher", f"{self.fleet}-d-{number}") if role is Role.DISPATCHER else (
            "machine", f"{self.fleet}-{number}")
        zone = list(self.by_host)[role is Role.WORKER]
        return LaunchRequest(name, self.fleet, role, Offer("ssh", "ssh", zone, kind, Market.ON_DEMAND, 1, 0, 0),
                             Boot("idle", {"boot.json": "{}"}))

    def killed(self, act: Any, at: Point | None) -> Victim:
        """Let a process do `act` until it is killed `at` a point, or to its end. Return what it did."""
        victim = Victim(at)
        try:
            act(self.process(victim))
        except Killed:
            pass
        finally:
            inventory.close_all()
            self.victim = None
        assert victim.dead == (at is not None), f"not killed at {at}"
        return victim

    def running(self) -> list[str]:
        """Hosts of which something runs, once for each process that is theirs for long."""
        return sorted(env[MARK] for process, env in self._processes_there() if MARK in env)

    def settle(self) -> None:
        """Wait until all is over that a killed process had begun on a machine, but for hosts."""
        end = time.monotonic() + LIMIT_S
        while left := [process for process, env in self._processes_there() if MARK not in env]:
            assert time.monotonic() < end, f"still running: {left}"
            time.sleep(0.01)

    def _processes_there(self) -> list[tuple[psutil.Process, dict[str, str]]]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                env = process.environ()
                if env.get(BOXES) == str(self.folder) and process.status() != "zombie":
                    found.append((process, env))
        return found

    def age(self) -> None:
        """Let everything on the machines be ten minutes older: what died is taken for dead."""
        then = time.time() - LONG_AGO_S
        for box in self.by_host.values():
            for path in [*box.home.rglob("*")]:
                if path.name not in ("state", "boot.json"):
                    os.utime(path, (then, then), follow_symlinks=False)

    def close(self) -> None:
        inventory.close_all()
        for process, _ in self._processes_there():
            with suppress(psutil.Error):
                process.kill()


@contextmanager
def boxes(folder: Path, fleet: str) -> Iterator[Boxes]:
    """Yield the machines; nothing of theirs runs afterwards."""
    made = Boxes(folder, fleet)

    def transport(_self: MachineInventory, machine: ResolvedMachine) -> Box:
        box = made.by_host[machine.host]
        box.machine = machine  # type: ignore[assignment]
        return box

    with patch.object(MachineInventory, "_made", transport):
        try:
            yield made
        finally:
            made.close()
