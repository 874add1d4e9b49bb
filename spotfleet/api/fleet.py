"""The Python API: `Fleet`. Every method may be called from any process; nothing is kept in the object."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spotfleet.api import cloud, outputs, reports, ssh
from spotfleet.api import down as downs
from spotfleet.api.attach import attach
from spotfleet.api.house import Folder, House
from spotfleet.api.job import Job
from spotfleet.api.machine import Machine, Progress
from spotfleet.api.preview import UpPlan
from spotfleet.api.train import Ask, submit
from spotfleet.api.up import Up, bring_up, plan_up
from spotfleet.client import Client
from spotfleet.config import FleetFile, load
from spotfleet.errors import DispatcherUnreachable, SpotfleetError, UsageError
from spotfleet.fleet.cost import CostReport
from spotfleet.fleet.cost_groups import Books
from spotfleet.messages import FleetStatus, HostStatus
from spotfleet.model import FleetSpec, Role

UP_TIMEOUT_S = 600.0
PATIENCE_S = 30.0  # for a dispatcher that restarts
READ_PATIENCE_S = 8.0  # the same, for commands that only look


def _silent(_line: str) -> None:
    pass


class Fleet:
    """A fleet by its file (`Path`, or text that ends in .yaml/.yml), its spec, its name, or, for "", the only one.

        fleet = Fleet("fleet.yaml")
        fleet.up(progress=print)
        job = fleet.train("train.py", ["--epochs", "3"], np=(2, 4))
        print(fleet.cost().savings_percent)
        fleet.down()
    """

    def __init__(self, source: FleetSpec | FleetFile | Path | str = "", home: Path | str | None = None,
                 secrets: Mapping[str, str] | None = None) -> None:
        self.house = House(home)
        self._file: FleetFile | None = None
        if isinstance(source, FleetSpec):
            self._file = FleetFile(source, dict(secrets or {}))
        elif isinstance(source, FleetFile):
            self._file = source
        elif isinstance(source, Path) or source.endswith((".yaml", ".yml")) or os.sep in source:
            self._file = load(Path(source))
        self.name = self._file.spec.name if self._file else self.house.find(str(source)).name

    @classmethod
    def attach(cls, name: str = "", provider: str = "local", home: Path | str | None = None,
               file: Path | None = None) -> Fleet:
        """A fleet that another machine has made, found by its tags, or on the machines that its `file` names. Raises
        NoSuchFleet, naming what there is."""
        asked = load(file).spec if file else None
        return cls(attach(House(home), name, asked.provider if asked else provider, asked).fleet, home)

    # --- changing

    def plan(self) -> UpPlan:
        """What `up` would do, and what it costs; changes nothing."""
        return plan_up(self.house, self._given().spec)

    def up(self, *, progress: Progress = _silent, timeout_s: float = UP_TIMEOUT_S, agreed: UpPlan | None = None) -> Up:
        """Bring the fleet up, or change a running one's size; returns once `nodes.min` hosts are up. Idempotent.
        `agreed`: the plan that was shown, whose choice of a region holds.

        Raises NoCapacity when that takes longer than `timeout_s`; the fleet stays and goes on trying.
        """
        return bring_up(self.house, self._given(), progress, timeout_s, agreed.region if agreed else "")

    def train(self, script: str = "", args: Sequence[str] = (), *, np: tuple[int, int] | None = None, name: str = "",
              envs: Mapping[str, str] | None = None, secrets: Mapping[str, str] | None = None, down: bool = False,
              wait: bool = False, detach: bool = False, spares: int = 0,
              resize_policy: str = "", growth: Mapping[int, int] | None = None,
              deadline_s: float = 0.0, work_s: float = 0.0, work_steps: int = 0,
              output: Callable[[bytes], object] | None = None, progress: Progress = _silent) -> Job:
        """Run `script` (or the fleet file's `run`) on the fleet; returns when it has succeeded.

        `np` is (fewest, most) workers. Without `wait`, NoCapacity is raised, and no job is left, when fewer can start
        now. Rank 0's output goes to `output` (default: stdout). With `detach` it returns at once. Raises JobFailed.
        `down` ends the fleet after the job, also with this machine off. `spares` more workers wait, warm and paid for,
        to fill a lost one's place. `resize_policy` and `growth`, {from this epoch: workers}, go before the fleet
        file's `resize`; so do `deadline_s`, from now on, and what is to be done by then: `work_s` at the fleet's full
        target, or `work_steps`.
        """
        ask = Ask(script, tuple(args), np, name, dict(envs or {}), dict(secrets or {}), down, wait, spares,
                  resize_policy, tuple((growth or {}).items()), deadline_s, work_s, work_steps)
        folder, client = self._folder(), self._client()
        record = folder.record
        job = Job(client, submit(self.house, record, folder.keys.secrets, client, ask, progress))
        if detach:
            return job
        for data in job.logs(follow=True):
            (output or _to_stdout)(data)
        job.wait()
        return job

    def drain(self, host: str) -> None:
        """Give `host` back once its workers have left; the fleet replaces it."""
        self._client().drain(host)

    def interrupt(self, host: str, notice_s: float | None) -> None:
        """Make the cloud take `host` after a notice of `notice_s` seconds, or at once for None."""
        self._client().interrupt(host, notice_s)

    def revoke(self, host: str, why: str = "") -> None:
        """Trust `host` no more: its token is refused at once and for good, its machine is ended and replaced."""
        self._client().revoke(host, why)

    def down(self, *, discard: bool = False, progress: Progress = _silent) -> downs.Down:
        """Bring the results home and end everything; returns when the provider lists nothing of the fleet.

        Raises SpotfleetError when something would be lost, unless `discard`.
        """
        return downs.take_down(self._folder(), progress, discard=discard, why="asked by `down`")

    # --- looking

    def status(self) -> FleetStatus:
        """The fleet now; after its end, what its archive says. Raises DispatcherUnreachable in between."""
        found = self._look(lambda client: client.status(), lambda: reports.ended_status(self._folder()))
        self._follow(found)
        return replace(found, fleet=self.name)  # the dispatcher knows the name in the cloud, which may be a longer one

    def hosts(self) -> list[HostStatus]:
        return list(self.status().hosts)

    def jobs(self) -> list[Job]:
        client = self._client()
        return [Job(client, j.job) for j in client.jobs()]

    def job(self, job: str) -> Job:
        """The job of that name. Raises SpotfleetError when there is none."""
        found = Job(self._client(), job)
        found.status()
        return found

    def logs(self, job: str, *, follow: bool = False, rank: int = 0, worker: str = "") -> Iterator[bytes]:
        """Output of a job: of one rank, or of one worker; after the fleet's end from its archive. Raises
        SpotfleetError where no such rank or worker can be."""
        def living(client: Client) -> Iterator[bytes]:
            reports.check_source(client, job, rank, worker)
            return Job(client, job).logs(follow=follow, rank=rank, worker=worker)

        return self._look(living, lambda: reports.archived_logs(self._folder(), job, rank, worker))

    def setup_logs(self, job: str, host: str = "") -> Iterator[tuple[str, bytes]]:
        """(host, what `setup` printed there) of a job, of one host or of all; after the fleet's end from its archive.
        Raises SpotfleetError where there is none."""
        def living(client: Client) -> list[str]:
            return [name for name in client.log_workers(job) if name.endswith(reports.SETUP)]

        there = self._look(living, lambda: reports.archived_setups(self._folder(), job))
        chosen = [name for name in there if not host or name == f"{host}{reports.SETUP}"]
        if not chosen:
            where = ", ".join(name.removesuffix(reports.SETUP) for name in there)
            raise SpotfleetError(f"job '{job}' has run no setup" + (f" on {host}" if host else ""),
                                 hint=f"it ran on {where}" if where else "see `setup` in the fleet file")
        return ((n.removesuffix(reports.SETUP), b"".join(self.logs(job, worker=n))) for n in chosen)

    def outputs(self, job: str, into: Path) -> outputs.Brought:
        """Bring what the workers of a job have left in SPOTFLEET_OUTPUT so far to the folder `into`, by worker; after
        the fleet's end from its archive."""
        return self._look(lambda client: outputs.living(client, job, into),
                          lambda: outputs.archived(self._folder(), job, into))

    def events(self) -> list[dict[str, Any]]:
        """Everything that happened, oldest first: {"ledger", "seq", "kind", "at", ...}."""
        folder = self._folder()
        return reports.merged(self._dispatcher_events(), reports.laptop_events(folder))

    def cost(self, since: float | None = None, until: float | None = None) -> CostReport:
        """The bill until now, or until the fleet's end; of what fell due in [since, until), Unix seconds. Raises
        DispatcherUnreachable where `books` says what is missing."""
        return self._books().report(since, until)

    def books(self, *, whole: bool = False) -> Books:
        """Its ledgers, as far as they can be had, for every cut of what it has cost (`fleet.cost_groups`). With `whole`
        it raises DispatcherUnreachable instead of saying in `missing` what cannot be had now."""
        try:
            return self._books()
        except DispatcherUnreachable as error:
            if whole:
                raise
            laptop = reports.laptop_events(self._folder())
            return reports.books(self.name, (), laptop, missing=f"its worker hosts are missing here, as their ledger "
                                 f"cannot be had now: {error}")

    def _books(self) -> Books:
        folder = self._folder()

        def living(client: Client) -> Books:
            events = reports.dispatcher_events(client)
            return reports.books(self.name, events, reports.laptop_events(folder), client.ahead_s)

        return self._look(living, lambda: reports.ended_books(folder))

    @property
    def client(self) -> Client:
        """The dispatcher's API, for what has no method here."""
        return self._client()

    @property
    def ended(self) -> bool:
        """Is nothing of it left? By our books; `status` asks the provider."""
        return bool(self._folder().record.down_at)

    # --- inside

    def _follow(self, found: FleetStatus) -> None:
        """Let OpenSSH know the hosts of now."""
        folder = self._folder()
        if not folder.record.down_at:
            workers = [h.host for h in found.hosts if h.role == Role.WORKER.value]
            ssh.follow(folder, workers, lambda: Machine(folder).left())

    def _given(self) -> FleetFile:
        if self._file is None:
            raise UsageError(f"fleet '{self.name}' was named, but its file is needed here", hint="spotfleet up FILE")
        return self._file

    def _folder(self) -> Folder:
        return self.house.find(self.name)

    def _dispatcher_events(self) -> list:
        folder = self._folder()
        return self._look(reports.dispatcher_events, lambda: reports.archived_events(folder))

    def _look(self, living: Callable[[Client], Any], ended: Callable[[], Any]) -> Any:
        """Ask the dispatcher; if it does not answer because the fleet has ended, use what came home."""
        folder = self._folder()
        if folder.record.down_at:
            return ended()
        try:
            return living(self._client(READ_PATIENCE_S))
        except DispatcherUnreachable:
            if downs.settle(folder):
                return ended()
            raise

    def _client(self, patience_s: float | None = None) -> Client:
        """A client of the dispatcher where it was last, or where the provider lists it now."""
        patience_s = PATIENCE_S if patience_s is None else patience_s
        folder = self._folder()
        record = folder.record
        if record.down_at:
            raise SpotfleetError(f"fleet '{self.name}' is down", hint="`spotfleet up FILE` makes it anew")
        machine = Machine(folder)
        client = machine.client(record.url, patience_s) if record.url else None
        if client and client.healthy():
            return client
        if client and cloud.makes_machines(record.spec) and machine.locate() == record.url:
            # It is there, so this laptop may have moved.
            cloud.open_door(machine.provider, machine.cloud_name)
            if client.healthy():
                return client
        if not record.reached:
            raise DispatcherUnreachable(f"fleet '{self.name}' has no dispatcher yet",
                                        hint=f"`spotfleet up FILE` goes on, `spotfleet down {self.name}` ends it")
        url = machine.locate()
        if not url and (lost := machine.lost()):
            raise DispatcherUnreachable(
                f"{lost.what}{f'; {lost.hosts} go on without it' if lost.hosts else ''}",
                hint=f"`spotfleet up FILE` starts a new one, which {lost.then}; "
                     f"or `spotfleet down {self.name} --discard`")
        if url and url != record.url:
            folder.update(url=url)
        return machine.client(url or record.url, patience_s)


def _to_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.flush()
