"""Processes of the emulated machines.

    absent --wanted--> RUNNING --exit, or not wanted--> ENDING --no process left--> absent, or RUNNING after a back-off

Each tick compares the market's state with the processes; a missed tick costs nothing. A machine is the process of
its boot module with all its descendants: a session of its own, marked in the environment. ENDING is
bounded by TERM_S + proc.KILL_S; a process that survives SIGKILL that long is logged and killed again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from socket import socket
from threading import Thread

from spotfleet.errors import UsageError
from spotfleet.model import CloudState
from spotfleet.providers.local import proc
from spotfleet.providers.local.environment import passed
from spotfleet.providers.local.market.book import LocalHost
from spotfleet.providers.local.metadata import MetadataServer
from spotfleet.retry import growing_s
from spotfleet.storage import atomic, private

TERM_S = 2.0  # between SIGTERM and SIGKILL when the user terminates a host
BACKOFF_S, BACKOFF_MAX_S = 0.2, 5.0  # before a machine whose process died restarts it
STEADY_S = 10.0  # a process that lived this long resets its back-off
PORT_AGAIN_S = 1.0
CONSOLE = "console.log"
LAPTOP_ONLY = ("SPOTFLEET_HOME", "SPOTFLEET_LOCAL_CLOUD", "SPOTFLEET_LOCAL_OWNER_PID")  # not passed to hosts


@dataclass(frozen=True)
class Placement:
    """Address and process of a machine; kept in a file, so that a new daemon finds it again."""

    module: str
    address: str
    port: int
    metadata_port: int = 0
    pid: int = 0  # the boot process and the leader of its session; 0: not started yet
    started: int = 0  # its proc.started
    files: tuple[str, ...] = ()  # names of its boot files


@dataclass
class _Machine:
    host: LocalHost
    process: subprocess.Popen[bytes] | None = None  # None: started by an earlier daemon
    started_at: float = 0.0  # monotonic
    ending: Thread | None = None
    deaths: int = 0  # deaths of its process, in a row
    not_before: float = 0.0


@dataclass
class LocalMachines:
    """All machines of one cloud. Not thread-safe: the caller holds one lock over every method."""

    home: Path  # SPOTFLEET_HOME/local
    get_host: Callable[[str], LocalHost | None]  # the market's present state of a host
    placements: dict[str, Placement] = field(default_factory=dict)
    term_s: float = TERM_S  # 0: SIGKILL without SIGTERM
    starts: Counter[str] = field(default_factory=Counter)  # starts of each machine by this daemon
    _machines: dict[str, _Machine] = field(default_factory=dict)
    _metadata: dict[str, MetadataServer] = field(default_factory=dict)
    _unserved: dict[str, float] = field(default_factory=dict)  # hosts whose metadata port is taken -> next try

    def folder(self, request_id: str) -> Path:
        return self.home / "hosts" / request_id

    def prepare(self, request_id: str, module: str, files: dict[str, str]) -> Placement:
        """Prepare disk, address and port of a new machine, before it runs."""
        folder = self.folder(request_id)
        atomic.make_folder(folder)
        for name, text in files.items():
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        address = address_of(self.home, len(self.placements))
        self.placements[request_id] = Placement(module, address, _free_port(address), files=tuple(files))
        return self.placements[request_id]

    def boot_files(self, request_id: str) -> dict[str, str]:
        placement = self.placements.get(request_id)
        if placement is None:
            raise UsageError(f"request_id: no host '{request_id}'", hint="`spotfleet status` lists the live hosts")
        found = {name: self.folder(request_id) / name for name in placement.files}
        return {name: path.read_text("utf-8") for name, path in found.items() if path.exists()}

    def adopt(self, hosts: Iterable[LocalHost]) -> None:
        """Take over machines that an earlier daemon of this home has left running."""
        for host in hosts:
            placement = self.placements.get(host.order.request_id)
            if placement is None:
                continue
            if not placement.pid and host.state is CloudState.RUNNING:  # perhaps started, but not recorded
                oldest = next(iter(proc.of_host(0, host.provider_id)), None)
                placement = replace(placement, pid=oldest.pid, started=oldest.started) if oldest else placement
            elif not placement.pid:
                continue
            machine = self._machines[host.order.request_id] = _Machine(host, started_at=time.monotonic())
            if proc.alive(placement.pid, placement.started):
                self.placements[host.order.request_id] = placement
                self._serve_metadata(host.order.request_id)
            else:
                self.placements[host.order.request_id] = replace(placement, pid=0, started=0)
                self._end(machine, 0.0)

    def match(self, hosts: Iterable[LocalHost]) -> list[str]:
        """Start missing machines, end surplus ones; return the request_ids of machines that powered themselves off."""
        off = []
        for request_id in [r for r, at in self._unserved.items() if time.monotonic() >= at]:
            self._serve_metadata(request_id)
        for host in hosts:
            request_id, wanted = host.order.request_id, host.state is CloudState.RUNNING
            machine = self._machines.get(request_id)
            if machine is None:
                if wanted and request_id in self.placements:
                    self._start(_Machine(host))
                continue
            machine.host = host
            if machine.ending is not None:
                self._ended(machine, wanted)
            elif machine.process is None and not self.placements[request_id].pid:
                if not wanted:
                    self._forget(machine)
                elif time.monotonic() >= machine.not_before:
                    self._start(machine)
            elif not wanted:
                self._end(machine, 0.0 if host.runs and host.runs[-1].taken else self.term_s)
            elif (status := self._exit_status(machine)) is not None:
                if status == 0:
                    off.append(request_id)
                self._crashed(machine)
        return off

    def crash(self, request_id: str) -> None:
        """SIGKILL every process of a machine that stays: it runs its boot process again, as after a power cut."""
        machine = self._machines.get(request_id)
        if machine is not None and machine.ending is None:
            machine.not_before = time.monotonic() + BACKOFF_S
            self._end(machine, 0.0)

    def ending(self, request_id: str) -> bool:
        """Return whether a host that should have no processes may still have some."""
        return request_id in self._machines

    def busy(self) -> bool:
        return bool(self._machines)

    def processes(self, request_id: str) -> list[int]:
        placement, host = self.placements.get(request_id), self.get_host(request_id)
        if placement is None or host is None:
            return []
        return [p.pid for p in proc.of_host(placement.pid, host.provider_id)]

    def metadata_url(self, request_id: str) -> str:
        placement = self.placements.get(request_id)
        return f"http://{placement.address}:{placement.metadata_port}" if placement else ""

    def close(self) -> None:
        for server in self._metadata.values():
            server.close()

    def _serve_metadata(self, request_id: str) -> None:
        """Start the metadata server on the host's port; retry later while another program uses it."""
        placement = self.placements[request_id]
        if request_id in self._metadata:
            return
        try:
            server = MetadataServer(placement.address, placement.metadata_port, lambda: self.get_host(request_id))
        except OSError as error:
            if request_id not in self._unserved:
                print(f"{request_id}: metadata port {placement.metadata_port} of {placement.address}: {error}; until "
                      "it is free the host sees no notice", file=sys.stderr, flush=True)
            self._unserved[request_id] = time.monotonic() + PORT_AGAIN_S
            return
        self._unserved.pop(request_id, None)
        self._metadata[request_id] = server
        self.placements[request_id] = replace(placement, metadata_port=server.port)

    def _start(self, machine: _Machine) -> None:
        request_id = machine.host.order.request_id
        self._machines[request_id] = machine
        self._serve_metadata(request_id)
        placement, folder = self.placements[request_id], self.folder(request_id)
        environment = {k: v for k, v in passed(os.environ).items() if k not in LAPTOP_ONLY} | {
            "SPOTFLEET_HOST_ADDRESS": placement.address,
            "SPOTFLEET_HOST_PORT": str(placement.port),
            "SPOTFLEET_METADATA_URL": self.metadata_url(request_id),
            proc.MARK: machine.host.provider_id,
        }
        try:
            with private.open_file(folder / CONSOLE, "a") as console:
                machine.process = subprocess.Popen(
                    [sys.executable, "-m", placement.module, "--home", str(folder)], cwd=folder, env=environment,
                    stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, start_new_session=True,
                )
        except OSError as error:  # the system cannot start a process now
            print(f"{request_id}: {error}", file=sys.stderr, flush=True)
            machine.not_before = time.monotonic() + BACKOFF_MAX_S
            return
        machine.started_at = time.monotonic()
        self.starts[request_id] += 1
        pid = machine.process.pid
        self.placements[request_id] = replace(placement, pid=pid, started=proc.started(pid))

    def _exit_status(self, machine: _Machine) -> int | None:
        """Return the status, None while it runs. For a process of an earlier daemon only the end is known: 1."""
        if machine.process is not None:
            return machine.process.poll()
        placement = self.placements[machine.host.order.request_id]
        return None if proc.alive(placement.pid, placement.started) else 1

    def _crashed(self, machine: _Machine) -> None:
        steady = time.monotonic() - machine.started_at > STEADY_S
        machine.deaths = 1 if steady else machine.deaths + 1
        machine.not_before = time.monotonic() + backoff_s(machine.deaths)
        self._end(machine, 0.0)

    def _end(self, machine: _Machine, grace_s: float) -> None:
        session = self.placements[machine.host.order.request_id].pid

        def work() -> None:
            if left := proc.kill_host(session, machine.host.provider_id, grace_s):
                print(f"{machine.host.order.request_id}: processes {left} survive SIGKILL", file=sys.stderr, flush=True)

        machine.ending = Thread(target=work, name=f"end {machine.host.order.request_id}")
        machine.ending.start()

    def _ended(self, machine: _Machine, wanted: bool) -> None:
        assert machine.ending is not None
        if machine.ending.is_alive():
            return
        request_id = machine.host.order.request_id
        machine.ending = None
        if self.processes(request_id):
            self._end(machine, 0.0)
            return
        if machine.process is not None:
            machine.process.wait()
            machine.process = None
        self.placements[request_id] = replace(self.placements[request_id], pid=0, started=0)
        if not wanted:
            self._forget(machine)

    def _forget(self, machine: _Machine) -> None:
        """Clean up after the last process. A terminated machine loses its disk and secrets, but not the console log."""
        request_id = machine.host.order.request_id
        del self._machines[request_id]
        self._unserved.pop(request_id, None)
        if server := self._metadata.pop(request_id, None):
            server.close()
        if machine.host.state is CloudState.TERMINATED:
            wipe(self.folder(request_id))


def backoff_s(deaths: int) -> float:
    """Return how long a machine waits before it runs its process again after so many deaths in a row."""
    return growing_s(deaths, BACKOFF_S, BACKOFF_MAX_S)


def wipe(folder: Path) -> None:
    """Remove everything from a machine's folder except the console log."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != CONSOLE:
            path.unlink(missing_ok=True)


def address_of(home: Path, serial: int) -> str:
    """Choose an address of 127.0.0.0/8 that other clouds here hardly choose; 127.0.0.1 if it is the only one."""
    digest = blake2b(str(home.resolve()).encode(), digest_size=4).digest()
    number = (int.from_bytes(digest[1:], "big") + serial) % (256 * 254)
    address = f"127.{16 + digest[0] % 224}.{number // 254}.{number % 254 + 1}"
    with socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return "127.0.0.1"
    return address


def _free_port(address: str) -> int:
    with socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
