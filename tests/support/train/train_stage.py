"""Agent and dispatcher for tests: real worker processes, real Unix sockets, a small membership.

Each worker is a plain Python process with an address of its own in 127.0.0.0/8. `Fleet` listens on one socket,
keeps the newest report of each worker and sends orders. `auto=True` makes it a dispatcher: the first generation forms
when all founders are in init(); a death or a failed generation forms the next one urgently, a worker that is READY
takes a dead rank's place or is added as planned.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from spotfleet.protocol.messages import JOB_KEY, Assignment, RankInfo, Stage, WorkerOrders, WorkerReport, dump, load
from tests.support.train.train_parts import Kept

LIMIT_S = 60.0
_addresses = itertools.count(10)


class Zygote:
    """The process that forks workers; one for all tests of a run."""

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._process = subprocess.Popen([sys.executable, str(Path(__file__).parent / "train_zygote.py")], env=env,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._pids: queue.Queue[int] = queue.Queue()
        self._forking = threading.Lock()
        self.exits: dict[int, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, script: Path, env: dict[str, str], log: Path) -> int:
        assert self._process.stdin is not None
        with self._forking:
            self._process.stdin.write(json.dumps({"script": str(script), "env": env, "log": str(log)}).encode() + b"\n")
            self._process.stdin.flush()
            return self._pids.get(timeout=LIMIT_S)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "exit" in said:
                self.exits[said["pid"]] = said["exit"]
            else:
                self._pids.put(said["pid"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


@dataclass
class Worker:
    name: str
    pid: int
    exits: dict[int, int]
    log: Path
    report: WorkerReport
    sock: socket.socket | None = None
    orders: WorkerOrders = field(default_factory=WorkerOrders)
    leaving: bool = False

    @property
    def alive(self) -> bool:
        return self.pid not in self.exits

    @property
    def exit(self) -> int | None:
        return self.exits.get(self.pid)


class Fleet:
    def __init__(self, zygote: Zygote, folder: Path, script: str, auto: bool = True, founders: int = 3,
                 checkpoint_every_s: float = 0.0, job: str = "job", checkpoint_url: str = "") -> None:
        self.zygote = zygote
        self.folder, self.auto, self.founders, self.job = folder, auto, founders, job
        self.script = folder / "script.py"
        self.script.write_text(script)
        self.workers: dict[str, Worker] = {}
        self.members: tuple[str, ...] = ()
        self.generation = 0
        self.founded = False
        self.target = founders
        self.every_s, self.url = checkpoint_every_s, checkpoint_url
        self.restore = None
        self.provisional: RankInfo | None = None  # for workers started from now on
        self.kept = Kept(folder / "kept")
        self.hold = False  # True: form nothing
        self.history: list[tuple[int, tuple[str, ...], str]] = []
        self.cv = threading.Condition(threading.RLock())
        self._closed = False
        self._failed_since = 0.0
        self._path = str(folder / "agent.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen(64)
        self._socks: dict[socket.socket, list] = {}
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    # What a test does

    def start(self, name: str = "", **env: str) -> str:
        number = next(_addresses)
        name = name or f"h{len(self.workers)}/0/1"
        work = self.folder / name.replace("/", "-")
        work.mkdir(parents=True)
        log = work / "log"
        environ = {
            "SPOTFLEET_SOCKET": self._path, "SPOTFLEET_WORKER": name, "SPOTFLEET_JOB": self.job, JOB_KEY: "key",
            "SPOTFLEET_ADDRESS": f"127.{1 + number // 60000}.{number // 250 % 250}.{number % 250 + 2}",
            "SPOTFLEET_WORK": str(work / "work"), "SPOTFLEET_OUTPUT": str(self.folder), "PYTHONUNBUFFERED": "1", **env,
        }
        log.touch()
        with self.cv:
            pid = self.zygote.fork(self.script, environ, log)
            place = self.provisional or RankInfo(size=max(1, len(self.members)))
            orders = WorkerOrders(founded=self.founded, checkpoint_every_s=self.every_s, provisional=place,
                                  restore=self.restore, checkpoint_url=self.url)
            self.workers[name] = Worker(name, pid, self.zygote.exits, log, WorkerReport(name, self.job), orders=orders)
        return name

    def start_all(self, **env: str) -> list[str]:
        """Start the founders; they train when this returns."""
        names = [self.start(**env) for _ in range(self.founders)]
        self.wait(lambda: self.founded or self._settled(), what="the first generation")
        return names

    def kill(self, name: str) -> None:
        os.killpg(self.workers[name].pid, signal.SIGKILL)

    def drain(self, name: str) -> None:
        """Planned: the others go on without it; a spare takes its place if one is ready."""
        with self.cv:
            self.workers[name].leaving = True
            self._tick()

    def order(self, name: str, **fields: object) -> None:
        with self.cv:
            worker = self.workers[name]
            worker.orders = replace(worker.orders, **fields)
            self._send(worker)

    def report(self, name: str) -> WorkerReport:
        with self.cv:
            return self.workers[name].report

    def wait(self, condition, limit_s: float = LIMIT_S, what: str = "") -> None:
        with self.cv:
            if not self.cv.wait_for(condition, limit_s):
                raise AssertionError(f"not within {limit_s} s: {what}\n{self.story()}")

    def wait_version(self, version: int, limit_s: float = LIMIT_S) -> None:
        self.wait(lambda: max((w.report.version for w in self.workers.values() if w.alive), default=0) >= version
                  or self._settled(), limit_s, f"version {version}")

    def wait_end(self, limit_s: float = LIMIT_S) -> None:
        """Every process has ended."""
        self.wait(self._settled, limit_s, "all ended")

    def _settled(self) -> bool:
        return all(not w.alive for w in self.workers.values())

    def log(self, name: str) -> str:
        return self.workers[name].log.read_text()

    def lines(self, prefix: str) -> list[str]:
        """What the workers printed after `prefix`, in the order of workers."""
        return [line[len(prefix):].strip() for name in self.workers for line in self.log(name).splitlines()
                if line.startswith(prefix)]

    def story(self) -> str:
        parts = [f"generations: {self.history}"]
        for name, w in self.workers.items():
            parts.append(f"--- {name} exit={w.exit} {w.report}\n{self.log(name)[-3000:]}")
        return "\n".join(parts)

    def close(self) -> None:
        with self.cv:
            self._closed = True
        self._thread.join(5)
        for w in self.workers.values():
            try:
                os.killpg(w.pid, signal.SIGKILL)  # its loaders' processes too
            except ProcessLookupError:
                pass
        deadline = time.monotonic() + LIMIT_S
        while not self._settled() and time.monotonic() < deadline:
            time.sleep(0.01)
        for sock in [self._listener, *self._socks]:
            sock.close()

    # The agent's part

    def _serve(self) -> None:
        due = 0.0
        while not self._closed:
            readable = self._readable(0.01)
            with self.cv:
                for sock in readable:
                    self._read(sock)
                if self.auto:
                    self._tick()
                if time.monotonic() >= due:
                    due = time.monotonic() + 0.5
                    for worker in self.workers.values():
                        self._send(worker)
                self.cv.notify_all()

    def _readable(self, wait_s: float) -> list[socket.socket]:
        poll, socks = select.poll(), {sock.fileno(): sock for sock in (self._listener, *self._socks)}
        for descriptor in socks:  # any: a process that runs many tests has more than `select.select` takes
            poll.register(descriptor, select.POLLIN)
        return [socks[descriptor] for descriptor, _ in poll.poll(1000 * wait_s)]

    def _read(self, sock: socket.socket) -> None:
        if sock is self._listener:
            self._socks[sock.accept()[0]] = [b"", ""]
            return
        try:
            data = sock.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            del self._socks[sock]
            sock.close()
            return
        *lines, rest = (self._socks[sock][0] + data).split(b"\n")
        self._socks[sock][0] = rest
        for line in lines:
            report = load(WorkerReport, line)
            worker = self.workers[report.worker]
            worker.report = report
            if report.checkpoint is not None:
                self.kept.take(report.checkpoint)
            if worker.sock is not sock:
                worker.sock = sock
                self._send(worker)

    def _send(self, worker: Worker) -> None:
        if worker.sock is not None and worker.sock in self._socks:
            try:
                worker.sock.sendall(dump(worker.orders).encode() + b"\n")
            except OSError:
                worker.sock = None

    # The dispatcher's part

    def _tick(self) -> None:
        live = {n: w for n, w in self.workers.items() if w.alive and w.report.stage is not Stage.FINISHED}
        if self.hold:
            return
        if any(w.report.stage is Stage.FINISHED for w in self.workers.values()):
            self._end(live)
            return
        if not self.founded:
            ready = [n for n, w in live.items() if w.report.stage is Stage.INIT]
            if len(ready) >= self.founders:
                self.form(tuple(ready), "start")
            return
        kept = [m for m in self.members if m in live]
        spares = [n for n, w in live.items() if n not in self.members and not w.leaving
                  and w.report.stage is Stage.READY]
        failed = any(live[m].report.failed >= self.generation for m in kept)
        self._failed_since = self._failed_since or time.monotonic() if failed else 0.0
        formed = all(live[m].report.generation == self.generation for m in kept)
        settled = failed and time.monotonic() - self._failed_since > 0.3  # most failures are a death not yet seen
        if len(kept) < len(self.members) or settled:
            self._renew(live, spares, urgent=True)
        elif formed and (any(live[m].leaving for m in kept) or (spares and len(kept) < self.target)):
            self._renew(live, spares, urgent=False)

    def _end(self, live: dict[str, Worker]) -> None:
        """The state is final: those whose last barrier broke pass it again, all others are told to stop."""
        rest = [n for n in live if n in self.members]
        for name, worker in live.items():
            if name not in rest and not worker.orders.stop:
                self.order(name, stop=True)
        if rest and any(live[n].report.failed >= self.generation for n in rest):
            self.form(tuple(rest), "barrier", urgent=True)

    def _renew(self, live: dict[str, Worker], spares: list[str], urgent: bool) -> None:
        slots: list[str] = []
        for m in self.members:
            if m in live and not live[m].leaving:
                slots.append(m)
            elif spares:
                slots.append(spares.pop(0))
        while spares and len(slots) < self.target:
            slots.append(spares.pop(0))
        if slots:
            self.form(tuple(slots), "death" if urgent else "planned", urgent)

    def form(self, members: tuple[str, ...], cause: str = "", urgent: bool = False) -> None:
        with self.cv:
            self.generation += 1
            self.history.append((self.generation, members, cause))
            out = [n for n in self.members if n not in members]
            self.members, self.founded = members, True
            store = self.workers[members[0]].report.store
            for name in [*members, *out]:
                worker = self.workers[name]
                rank = members.index(name) if name in members else -1
                worker.orders = replace(
                    worker.orders, founded=True, stop=worker.leaving and rank < 0,
                    assignment=Assignment(self.generation, rank, members, store, urgent=urgent))
                self._send(worker)
            for worker in self.workers.values():
                worker.orders = replace(worker.orders, founded=True)
                self._send(worker)
