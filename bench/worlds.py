"""Systems that train bench/steps.py with three workers on three "hosts" of this machine, and the events on them.

A host under torchrun is its agent with one worker; under torchft it is one process, worker and manager at once; under
spotfleet it is an agent, its zygote and one worker. Every world's processes are gone when its context ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import psutil
from diary import Diary

from spotfleet.api import Fleet
from spotfleet.model import CheckpointSpec, FleetSpec, Need, Nodes
from spotfleet.providers.local import LocalCloud, LocalProvider

HERE = Path(__file__).parent
STEPS = HERE / "steps.py"
WORLD = 3
LIMIT_S = 60.0
NOTICE_S = 5.0  # short, so that the worker leaves at once


def kill_all(pids: Iterable[int]) -> float:
    """Send SIGKILL to each process, one right after the other. Returns when the first was sent."""
    at = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return at


def family(pid: int) -> list[int]:
    """Return a process and all its children, the process first, so that none survives to report the others' deaths."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(p.pid for p in psutil.Process(pid).children(recursive=True))]
    return []


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class World(ABC):
    """Common part of all systems. `kill_*`, `leave` and `join` return the instant of the event."""

    name = ""
    rejoins = True  # a lost worker comes back by itself
    host_returns = False  # a lost host too
    replaces = True  # another host replaces one that left

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.diary = Diary(folder)

    @abstractmethod
    def __enter__(self) -> World:
        """Start training; returns before it has begun."""

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """End training; no process is left."""

    def pid_of(self, rank: int) -> int:
        return next(n.pid for n in reversed(self.diary.read()) if n.rank == rank)

    def kill_worker(self, rank: int) -> float:
        return kill_all([self.pid_of(rank)])

    @abstractmethod
    def kill_host(self, rank: int) -> float:
        """All its processes at once."""

    @abstractmethod
    def leave(self, rank: int) -> float:
        """Ask the host of that rank to leave."""

    @abstractmethod
    def join(self) -> float:
        """Start a host in the place of the one that left."""


class Spotfleet(World):
    name = "spotfleet"
    host_returns = True

    def __init__(self, folder: Path, extra: tuple[str, ...] = (), checkpoint_s: float = 60.0) -> None:
        super().__init__(folder)
        home = folder / "home"
        self.cloud = LocalCloud(home)
        spec = FleetSpec("bench", any_of=(Need(instance_type="cpu.small"),), nodes=Nodes(2, WORLD, WORLD),
                         workdir=str(HERE), envs={"OMP_NUM_THREADS": "1"}, checkpoint=CheckpointSpec(checkpoint_s))
        self.fleet, self._extra = Fleet(spec, home), extra

    def __enter__(self) -> Spotfleet:
        try:
            self.fleet.up(timeout_s=LIMIT_S)
            args = ["--under", "spotfleet", "--folder", str(self.folder), *self._extra]
            self.fleet.train("steps.py", args, np=(2, WORLD), detach=True)
        except BaseException:
            self.cloud.shutdown()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cloud.shutdown()

    def host_of(self, pid: int) -> str:
        return next(m.request_id for m in self.cloud.truth() if pid in m.processes)

    def kill_host(self, rank: int) -> float:
        """Kill all its processes at once; the machine is gone for good."""
        pid = self.pid_of(rank)
        machine = next(m for m in self.cloud.truth() if pid in m.processes)
        at = kill_all(machine.processes)
        self.cloud.kill(machine.request_id)
        return at

    def leave(self, rank: int) -> float:
        host = self.host_of(self.pid_of(rank))
        at = time.monotonic()
        self.fleet.interrupt(host, NOTICE_S)
        return at

    def join(self) -> float:
        """Wait for the replacement, which the fleet began at the notice."""
        return time.monotonic()


class Shrinking(Spotfleet):
    """Fleet without a replacement for a host that leaves.

    The replacement's start would use one of this machine's few cores; on a cloud it would use its own."""

    replaces = False

    def leave(self, rank: int) -> float:
        for offer in LocalProvider({"home": str(self.folder / "home")}).offers(Need(instance_type="cpu.small")):
            self.cloud.set_capacity(offer.pool, 0)
        return super().leave(rank)


class Processes(World):
    """World whose hosts are processes that we start."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.hosts: list[subprocess.Popen[bytes]] = []
        self._log = (folder / "console.log").open("ab")

    def start(self, command: list[str], **env: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL,
                                env=os.environ | {"OMP_NUM_THREADS": "1"} | env, start_new_session=True)

    def end(self, processes: Iterable[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            kill_all(family(process.pid))
            process.wait()

    def host_of(self, rank: int) -> subprocess.Popen[bytes]:
        pid = self.pid_of(rank)
        return next(h for h in self.hosts if h.poll() is None and pid in family(h.pid))

    def kill_host(self, rank: int) -> float:
        host = self.host_of(rank)
        at = kill_all(family(host.pid))
        host.wait()
        return at

    def leave(self, rank: int) -> float:
        host = self.host_of(rank)
        at = time.monotonic()
        host.terminate()
        return at

    @abstractmethod
    def host(self, index: int) -> subprocess.Popen[bytes]:
        """Start one host."""

    def join(self) -> float:
        index = next(i for i, h in enumerate(self.hosts) if h.poll() is not None)
        at = time.monotonic()
        self.hosts[index] = self.host(index)
        return at

    def __exit__(self, *_: object) -> None:
        self.end(self.hosts)
        self._log.close()


class Ddp(Processes):
    """Plain DDP without elasticity, for the step time."""

    name = "ddp"

    def __init__(self, folder: Path, extra: tuple[str, ...] = ()) -> None:
        super().__init__(folder)
        self._extra, self._port = extra, free_port()

    def __enter__(self) -> Ddp:
        self.hosts = [self.host(i) for i in range(WORLD)]
        return self

    def host(self, index: int) -> subprocess.Popen[bytes]:
        return self.start([sys.executable, str(STEPS), "--under", "ddp", "--folder", str(self.folder), *self._extra],
                          RANK=str(index), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self._port))


class DdpViews(Ddp):
    """Tuned DDP: gradients are views of the buckets, which saves a copy of each; not its default."""

    name = "ddp views"

    def __init__(self, folder: Path, extra: tuple[str, ...] = ()) -> None:
        super().__init__(folder, ("--views", *extra))


class Torchrun(Processes):
    """torch.distributed.run: one agent per host, and the rendezvous store in a process that is never killed."""

    name = "torchrun"
    settings = ""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._port, self._store = free_port(), None

    def __enter__(self) -> Torchrun:
        code = ("import sys, time, torch.distributed as d; "
                f"s = d.TCPStore('127.0.0.1', {self._port}, is_master=True, wait_for_workers=False); time.sleep(1e6)")
        self._store = self.start([sys.executable, "-c", code])
        self.hosts = [self.host(i) for i in range(WORLD)]
        return self

    def __exit__(self, *_: object) -> None:
        self.end([self._store])
        super().__exit__()

    def host(self, index: int) -> subprocess.Popen[bytes]:
        conf = ",".join(["is_host=false", *([self.settings] if self.settings else [])])
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"2:{WORLD}", "--nproc-per-node", "1",
                   "--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}",
                   "--rdzv-id", "bench", "--rdzv-conf", conf, "--monitor-interval", "0.1", "--local-addr", "127.0.0.1",
                   str(STEPS), "--under", "torchrun", "--folder", str(self.folder)]  # fmt: skip
        # torch 2.13 gives a restarted worker the store of its predecessor, with addresses where nothing listens any
        # more; without this setting torchrun needs a second restart, or all of them.
        return self.start(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


class TunedTorchrun(Torchrun):
    """torchrun with keep-alives of 1 s, two of which may be missed, and without the 30 s wait for latecomers."""

    name = "torchrun tuned"
    settings = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=1"


class Torchft(Processes):
    """torchft with its defaults: heartbeats may be missed for 5 s; a quorum waits 60 s for live members."""

    name = "torchft"
    rejoins = False  # torchft does not restart a worker itself: here `join` does
    lighthouse: tuple[str, ...] = ()
    limit_s = 5.0

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        super().__init__(folder)
        self._python, self._port = python, free_port()
        self._lighthouse: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Torchft:
        binary = Path(self._python).parent / "torchft_lighthouse"
        self._lighthouse = self.start([str(binary), "--bind", f"[::]:{self._port}", "--min_replicas", "2",
                                       *self.lighthouse])
        self.hosts = [self.host(i) for i in range(WORLD)]
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._lighthouse is not None:
            kill_all(family(self._lighthouse.pid))
            self._lighthouse.wait()

    def host(self, index: int) -> subprocess.Popen[bytes]:
        return self.start([self._python, str(STEPS), "--under", "torchft", "--folder", str(self.folder), "--replica",
                           str(index), "--lighthouse", f"http://127.0.0.1:{self._port}", "--limit-s",
                           str(self.limit_s)])


class TunedTorchft(Torchft):
    """torchft with heartbeats of 100 ms that may be missed for 0.5 s, and collectives of up to 1.5 s, some five steps.

    A quorum that waits for stragglers for only 0.1 s goes on in about 0.3 s, but then no lost worker ever came back.
    """

    name = "torchft tuned"
    lighthouse = ("--heartbeat_timeout_ms", "500", "--quorum_tick_ms", "50")
    limit_s = 1.5


class QuickTorchft(TunedTorchft):
    """TunedTorchft whose heartbeats may be missed for 250 ms only, less than three of its heartbeats of 100 ms."""

    name = "torchft 250 ms tuned"
    lighthouse = ("--heartbeat_timeout_ms", "250", "--quorum_tick_ms", "50")


def has_torchft(python: str) -> bool:
    return subprocess.run([python, "-c", "import torchft"], capture_output=True, check=False).returncode == 0
