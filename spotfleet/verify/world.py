"""One small job on this machine: real worker processes, the real membership, and disturbances at chosen versions.

    start -> all hold version K (record written, FOLDER/hold-K exists) -> the disturbance -> hold-K removed -> ...

Workers are forked by the agent's zygote; when its socket closes, it ends all of them. This module is agent and
dispatcher to them: it reads their reports, calls `Membership.observe`, and sends orders.

Threads: one, which `wait` runs.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spotfleet.agent.processes.child import ChildSpec, read_result
from spotfleet.agent.processes.zygote import QUIET, SINGLE_THREADED
from spotfleet.codec import to_json
from spotfleet.membership import Evicted, Membership, Orders, Tuning, WorkerView
from spotfleet.protocol.checkpoint_files import MANIFEST
from spotfleet.protocol.messages import JOB_KEY, Checkpoint, Stage, WorkerOrders, WorkerReport, dump, load
from spotfleet.storage.checkpoint_folder import files_of, read_manifest
from spotfleet.verify.folders import make_folder

TICK_S = 0.02
REPEAT_S = 0.5
START_LIMIT_S = 120.0  # for the zygote to import torch
TUNING = Tuning(join_settle_s=0.0, failure_grace_s=0.3, leave_lead_s=1.0, short_lead_s=1.0)


ENDED = "the script has ended"


class RunFailed(Exception):
    """End of a run that did not reach the wanted version; the text says why."""


class Forker:
    """The zygote of all runs."""

    def __init__(self) -> None:
        self.sock, remote = socket.socketpair()
        env = {**QUIET, **os.environ, **SINGLE_THREADED}
        with remote:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "spotfleet.agent.processes.zygote", str(remote.fileno())],
                pass_fds=(remote.fileno(),), env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        self.started: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self._buffer = b""
        self._wait_warm()

    def _wait_warm(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if select.select([self.sock], [], [], TICK_S)[0] and any(m["event"] == "warm" for m in self.receive()):
                return
            if self.process.poll() is not None:
                break
        self.close()
        raise RunFailed("the process that starts workers could not be started")

    def receive(self) -> list[dict[str, Any]]:
        *lines, self._buffer = (self._buffer + self.sock.recv(1 << 16)).split(b"\n")
        found = [json.loads(line) for line in lines]
        for message in found:
            if message["event"] == "started":
                self.started[message["id"]] = message["pid"]
            elif message["event"] == "ended":
                self.ended[message["id"]] = message["code"]
        return found

    def send(self, **message: object) -> None:
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """End all workers and the zygote."""
        self.sock.close()
        try:
            self.process.terminate()
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class LocalWorker:
    """One worker process and its newest report."""

    name: str
    folder: Path
    report: WorkerReport
    orders: WorkerOrders = field(default_factory=WorkerOrders)
    sock: socket.socket | None = None
    leaving: tuple[float, str] | None = None  # end of its time (monotonic), and the reason
    killed: bool = False
    reports: int = 0  # number of reports read


@dataclass(frozen=True)
class RunSpec:
    """Script, its arguments and the number of workers."""

    script: Path
    args: tuple[str, ...]
    workers: int
    limit_s: float = 120.0  # without a new version


class LocalJob:
    """One run of the script."""

    def __init__(self, forker: Forker, spec: RunSpec, folder: Path, holds: Sequence[int],
                 environ: Mapping[str, str]) -> None:
        self._forker, self.spec, self.folder, self._environ = forker, spec, folder, environ
        self.records = folder / "records"
        self.records.mkdir(parents=True)
        for version in holds:
            (self.records / f"hold-{version}").touch()
        self.workers: dict[str, LocalWorker] = {}
        self.membership = Membership(folder.name, spec.workers, spec.workers, TUNING)
        self.checkpoint: Checkpoint | None = None
        self.save = False  # order a checkpoint
        self._files: dict[tuple[int, int], dict[str, Checkpoint]] = {}  # by generation and version
        self._path = str(folder / "s")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen(64)
        self._peers: dict[socket.socket, tuple[bytes, str]] = {}
        self._sent_at = self._moved_at = time.monotonic()
        self._newest = -1

    # What a scenario does

    def start(self, count: int = 1) -> list[LocalWorker]:
        """Start workers, each on a host of its own."""
        return [self._start() for _ in range(count)]

    def _start(self) -> LocalWorker:
        number = len(self.workers)
        name = f"v{number}/0/1"
        folder = self.folder / f"v{number}"
        (folder / "work").mkdir(parents=True)
        (folder / "output").mkdir()
        environ = {
            **QUIET, **self._environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "SPOTFLEET_SOCKET": self._path,
            "SPOTFLEET_WORKER": name, "SPOTFLEET_JOB": self.folder.name, JOB_KEY: "verify",
            "SPOTFLEET_ADDRESS": "127.0.0.1", "SPOTFLEET_WORK": str(folder / "work"),
            "SPOTFLEET_OUTPUT": str(folder / "output"), "SPOTFLEET_VERIFY": str(self.records),
            "SPOTFLEET_WORKERS": f"{self.spec.workers}:{self.spec.workers}", "SPOTFLEET_BACKEND": "gloo",
            "CUDA_VISIBLE_DEVICES": "", "SPOTFLEET_LOCAL_RANK": "0"}
        self.workers[name] = worker = LocalWorker(name, folder, WorkerReport(name, self.folder.name))
        here = make_folder(folder / "here", Path.cwd())
        child = ChildSpec(self._id(name), str(here), str(folder / "log"), environ,
                          (str(self.spec.script), *self.spec.args), exit_file=str(folder / "exit.json"))
        self._forker.send(do="fork", spec=to_json(child))
        return worker

    def _id(self, name: str) -> str:
        return f"{self.folder}/{name}"  # unique for the zygote, which serves several jobs

    def kill(self, worker: LocalWorker) -> None:
        worker.killed = True
        self._forker.send(do="kill", id=self._id(worker.name), signal=int(signal.SIGKILL))

    def lose(self, worker: LocalWorker) -> None:
        """Kill a worker, and return when it has ended but before that is acted on."""
        self.kill(worker)
        while not self.has_ended(worker):
            self._turn(observe=False)

    def notice(self, worker: LocalWorker, seconds: float) -> None:
        worker.leaving = (time.monotonic() + seconds, "notice")

    def order_checkpoint(self) -> None:
        """Order a checkpoint, and return when every worker has read the order: the next step takes one."""
        self.save = True
        workers = self.by_rank()
        self.wait(lambda: all(w.orders.checkpoint_now for w in workers), "orders for a checkpoint")
        sent = {w.name: w.reports for w in workers}  # one more may be on its way; whoever sends a second one has read
        self.wait(lambda: all(w.reports >= sent[w.name] + 2 for w in workers), "reports after the orders")

    def by_rank(self) -> list[LocalWorker]:
        return [self.workers[m] for m in self.membership.members]

    def release(self, version: int) -> None:
        (self.records / f"hold-{version}").unlink()

    def wait_held(self, version: int) -> None:
        """Wait until every rank has recorded `version`; RunFailed if the script ends or stops before that."""
        self.wait(lambda: self.holds(version), f"every worker at step {version}")

    def wait_ready(self, worker: LocalWorker) -> None:
        self.wait(lambda: worker.report.stage is Stage.READY, "a replacement to reach elastic.run")

    def holds(self, version: int) -> bool:
        members = self.membership.members
        return len(members) == self.spec.workers and all(self._recorded(m) >= version for m in members)

    def _recorded(self, name: str) -> int:
        path = self.records / f"{name.replace('/', '-')}.jsonl"
        if not path.exists():
            return -1
        data = path.read_text()
        lines = data[:data.rfind("\n") + 1].splitlines()
        return json.loads(lines[-1]).get("version", 0) if lines else -1

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        self._moved_at = time.monotonic()
        while True:
            self._turn()
            if condition():
                return
            if reason := self._is_over():
                raise RunFailed(reason)
            if time.monotonic() - self._moved_at > self.spec.limit_s:
                raise RunFailed(f"nothing happened for {self.spec.limit_s:.0f} s while it waited for {what}: "
                                f"{self.membership.why}")

    def _is_over(self) -> str:
        """Return why the run cannot go on; "" while it can."""
        for worker in self.workers.values():
            if not (worker.killed or worker.leaving) and self.has_ended(worker):
                return self._end_of(worker) or ENDED
        return ""

    def _end_of(self, worker: LocalWorker) -> str:
        result, code = read_result(worker.folder / "exit.json"), self._forker.ended[self._id(worker.name)]
        return "" if result.done else (result.error or f"its process ended with status {code}").strip()

    def has_ended(self, worker: LocalWorker) -> bool:
        return self._id(worker.name) in self._forker.ended

    def close(self) -> None:
        for worker in self.workers.values():
            self.kill(worker)
        deadline = time.monotonic() + 10
        while not all(map(self.has_ended, self.workers.values())) and time.monotonic() < deadline:
            self._turn(observe=False)
        for sock in (self._listener, *self._peers):
            sock.close()

    # Agent and dispatcher

    def _turn(self, observe: bool = True) -> None:
        socks = [self._listener, self._forker.sock, *self._peers]
        for sock in select.select(socks, [], [], TICK_S)[0]:
            if sock is self._forker.sock:
                self._forker.receive()
            elif sock is self._listener:
                self._peers[sock.accept()[0]] = (b"", "")
            else:
                self._read(sock)
        if observe:
            self._decide()

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 16)
        except OSError:
            data = b""
        pending, name = self._peers[sock]
        if not data:
            del self._peers[sock]
            sock.close()
            return
        *lines, rest = (pending + data).split(b"\n")
        for line in lines:
            report = load(WorkerReport, line)
            name, worker = report.worker, self.workers[report.worker]
            worker.report, worker.sock, worker.reports = report, sock, worker.reports + 1
            if report.version > self._newest or report.stage is not Stage.READY:
                self._newest, self._moved_at = max(self._newest, report.version), time.monotonic()
            if report.checkpoint is not None:
                self._keep(report.checkpoint)
        self._peers[sock] = (rest, name)

    def _keep(self, made: Checkpoint) -> None:
        """Keep a checkpoint once the files of all its writers are there."""
        key = (made.generation, made.version)
        if self.checkpoint is not None or not Path(made.path).is_file():
            return
        files = self._files.setdefault(key, {})
        files.update({file.name: file for file in files_of(made)})
        if MANIFEST not in files or not set(read_manifest(Path(files[MANIFEST].path).parent).files) <= set(files):
            return
        place = self.folder / "checkpoint"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for name, file in files.items():
            shutil.copyfile(file.path, place / name)
        self.checkpoint = replace(files[MANIFEST], part=0, parts=1, path=str(place))

    def _decide(self) -> None:
        now, living = time.monotonic(), [w for w in self.workers.values() if not self.has_ended(w)]
        starting = sum(w.report.stage is Stage.STARTING for w in living)
        for change in self.membership.observe([self._view(w, now) for w in living], starting, now):
            for name in change.workers if isinstance(change, Evicted) else ():
                self.kill(self.workers[name])  # it has read another place than it would have
                self.start()
        for worker in living:
            if worker.leaving and worker.name not in self.membership.members and worker.report.generation == 0:
                self.kill(worker)  # it has handed its place on
        repeat = now - self._sent_at > REPEAT_S
        self._sent_at = now if repeat else self._sent_at
        for name, said in self.membership.orders_of([w.name for w in living]).items():
            worker, orders = self.workers[name], self._orders(said)
            if worker.sock in self._peers and (repeat or orders != worker.orders):
                worker.orders = orders
                try:
                    worker.sock.sendall(dump(orders).encode() + b"\n")
                except OSError:
                    worker.sock = None

    def _view(self, worker: LocalWorker, now: float) -> WorkerView:
        r, (end, why) = worker.report, worker.leaving or (None, "")
        return WorkerView(worker.name, worker.name.split("/")[0], 0, r.stage, r.generation, r.failed, r.version,
                          r.store, None if end is None else max(0.0, end - now), why, waits=r.waits, step_s=r.step_s,
                          resumed=r.resumed, unreached=r.unreached, backend=r.backend,
                          read_rank=-1 if r.read_rank is None else r.read_rank, read_size=r.read_size)

    def _orders(self, said: Orders) -> WorkerOrders:
        return WorkerOrders(said.assignment, said.founded, said.provisional, checkpoint_every_s=0.0,
                            checkpoint_now=self.save, backend=said.backend,
                            restore=self.checkpoint if said.needs_restore else None)
