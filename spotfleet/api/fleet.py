"""The Python API: `Fleet`. Every method may be called from any process; the object holds no state of the fleet."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spotfleet.api import cloud, outputs, reports
from spotfleet.api.access import ssh
from spotfleet.api.home import FleetDir, FleetRecord, Home
from spotfleet.api.job import Job
from spotfleet.api.lifecycle.attach import attach
from spotfleet.api.lifecycle.down import DownResult, close_if_ended, take_down
from spotfleet.api.lifecycle.preview import UpPlan
from spotfleet.api.lifecycle.up import UpResult, bring_up, plan_up, plan_without_account
from spotfleet.api.machine import DispatcherMachine, Progress
from spotfleet.api.ray_cluster import RayOnFleet
from spotfleet.api.train import RestartOptions, TrainRequest, submit
from spotfleet.config import FleetFile, load
from spotfleet.errors import DispatcherUnreachable, SpotfleetError, UsageError
from spotfleet.fleet.cost.groups import FleetLedgers
from spotfleet.fleet.cost.meter import CostReport
from spotfleet.model import FleetSpec, Role
from spotfleet.protocol.messages import EndedJob, FleetStatus, HostStatus
from spotfleet.providers.plugin import makes_machines
from spotfleet.transport.client import DispatcherClient

UP_TIMEOUT_S = 600.0
PATIENCE_S = 30.0  # for a dispatcher that restarts
READ_PATIENCE_S = 8.0  # the same, for commands that only read


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
        self.home = Home(home)
        self._file: FleetFile | None = None
        if isinstance(source, FleetSpec):
            self._file = FleetFile(source, dict(secrets or {}))
        elif isinstance(source, FleetFile):
            self._file = source
        elif isinstance(source, Path) or source.endswith((".yaml", ".yml")) or os.sep in source:
            self._file = load(Path(source))
        self.name = self._file.spec.name if self._file else self.home.find(str(source)).name

    @classmethod
    def attach(cls, name: str = "", provider: str = "local", home: Path | str | None = None,
               file: Path | None = None) -> Fleet:
        """Attach a fleet that another machine has made, found by its tags, or on the machines that its `file` names.
        Raises NoSuchFleet, naming the fleets that exist."""
        asked = load(file).spec if file else None
        return cls(attach(Home(home), name, asked.provider if asked else provider, asked).fleet, home)

    # --- changing

    def plan(self, *, catalog: bool = False) -> UpPlan:
        """Return what `up` would do, and its cost; changes nothing. `catalog`: with the catalog's prices where the
        provider cannot be asked, as without an account."""
        spec = self._require_file().spec
        return plan_without_account(self.home, spec) if catalog else plan_up(self.home, spec)

    def up(self, *, progress: Progress = _silent, timeout_s: float = UP_TIMEOUT_S,
           agreed: UpPlan | None = None) -> UpResult:
        """Bring the fleet up, or change a running one's size; returns once `nodes.min` hosts are up. Idempotent.
        `agreed`: the plan that the user accepted; its region is used.

        Raises NoCapacity when that takes longer than `timeout_s`; the fleet stays and goes on trying.
        """
        return bring_up(self.home, self._require_file(), progress, timeout_s, agreed.region if agreed else "")

    def train(self, script: str = "", args: Sequence[str] = (), *, np: tuple[int, int] | None = None, name: str = "",
              envs: Mapping[str, str] | None = None, secrets: Mapping[str, str] | None = None, down: bool = False,
              wait: bool = False, detach: bool = False, spares: int = 0, slots: int = 0, priority: int = 0,
              resize_policy: str = "", growth: Mapping[int, int] | None = None,
              deadline_s: float = 0.0, work_s: float = 0.0, work_steps: int = 0,
              options: RestartOptions = RestartOptions(), group: str = "",
              output: Callable[[bytes], object] | None = None, progress: Progress = _silent) -> Job:
        """Run `script` (or the fleet file's `run`) on the fleet; returns when it has succeeded.

        `np` is (fewest, most) workers. Without `wait`, NoCapacity is raised, and no job is left, when fewer can start
        now. Rank 0's output goes to `output` (default: stdout). With `detach` it returns at once. Raises JobFailed.
        `down` ends the fleet after the job, also with this machine off. `spares` more workers wait, warm and paid for,
        to replace lost ones. `slots`: the most slots that the job takes; `priority`: its place among jobs that wait for
        hosts, for which it takes those of jobs with lower ones (docs/resizing.md). `resize_policy` and `growth`, {from
        this epoch: workers}, override the fleet file's `resize`. The same holds for `deadline_s`, counted from now, and
        the work to be done by then: `work_s` at the fleet's full target, or `work_steps`. `options`: the job's kind,
        and what follows the end of a process. `group`: the group of the fleet file whose hosts it uses.
        """
        request = TrainRequest(script, tuple(args), np, name, dict(envs or {}), dict(secrets or {}), down, wait, spares,
                               slots, priority, resize_policy, tuple((growth or {}).items()), deadline_s, work_s,
                               work_steps, options, group=group)
        return self._submit(self._folder().record, request, detach, output, progress)

    def run(self, command: str = "", *, file: Path | None = None, nodes: int = 1, each: bool = False, name: str = "",
            envs: Mapping[str, str] | None = None, secrets: Mapping[str, str] | None = None, down: bool = False,
            wait: bool = False, detach: bool = False, priority: int = 0, options: RestartOptions = RestartOptions(),
            group: str = "",
            output: Callable[[bytes], object] | None = None, progress: Progress = _silent) -> Job:
        """Run a shell command on `nodes` hosts at once, one process on each; returns when all have succeeded.

        With `each` it runs on every host by itself. With `file` the `run`, `setup`, `envs`, `workdir`, `file_mounts`
        and `container` of a task file are taken, and its number of nodes. The other arguments are those of `train`.
        """
        record = self._folder().record
        if file is not None:
            task = load(file).spec
            record = replace(record, spec=replace(
                record.spec, name=task.name, run=task.run, setup=task.setup, envs=task.envs, workdir=task.workdir,
                file_mounts=task.file_mounts, container=task.container))
            nodes = task.nodes.target
        request = TrainRequest(name=name, envs=dict(envs or {}), secrets=dict(secrets or {}), down=down, wait=wait,
                               run=command, nodes=0 if each else nodes, each=each, priority=priority, options=options,
                               group=group)
        return self._submit(record, request, detach, output, progress)

    def _submit(self, record: FleetRecord, request: TrainRequest, detach: bool,
                output: Callable[[bytes], object] | None, progress: Progress) -> Job:
        folder, client = self._folder(), self._client()
        job = Job(client, submit(self.home, record, folder.keys.secrets, client, request, progress))
        if detach:
            return job
        for data in job.logs(follow=True):
            (output or _to_stdout)(data)
        job.wait()
        return job

    @property
    def ray(self) -> RayOnFleet:
        """The fleet's Ray cluster: `start`, `status`, `submit`, `stop`."""
        folder = self._folder()
        return RayOnFleet(self.home, folder.record, folder.keys.secrets, self._client())

    def drain(self, host: str) -> None:
        """Release `host` once its workers have left; the fleet replaces it."""
        self._client().drain(host)

    def interrupt(self, host: str, notice_s: float | None) -> None:
        """Make the cloud interrupt `host` after a notice of `notice_s` seconds, or at once for None."""
        self._client().interrupt(host, notice_s)

    def revoke(self, host: str, why: str = "") -> None:
        """Revoke the trust in `host`: its token is refused at once and for good, its machine is ended and replaced."""
        self._client().revoke(host, why)

    def down(self, *, discard: bool = False, bring_checkpoints: bool = False,
             progress: Progress = _silent) -> DownResult:
        """Fetch the results and end everything; returns when the provider lists nothing of the fleet.

        Raises SpotfleetError when something would be lost, unless `discard`: also when a host holds results that do
        not arrive. Results that were lost with a host before are in the `missing` of what it returns. Checkpoints that
        lie at a target which outlives the fleet are in its `elsewhere`, and are copied only with `bring_checkpoints`.
        """
        return take_down(self._folder(), progress, discard=discard, why="asked by `down`",
                         bring_checkpoints=bring_checkpoints)

    def prune(self, jobs: Sequence[str]) -> list[str]:
        """Remove logs, checkpoints and outputs of these ended jobs from the dispatcher's disk; return the jobs whose
        files were removed. Their events and cost stay. Running jobs, and the newest that has ended, are left alone."""
        return self._client().prune(jobs)

    # --- reading

    def ended_jobs(self, keep: int = 1) -> list[EndedJob]:
        """Return the jobs that `prune` may remove, oldest first, without the newest `keep`."""
        return list(self._client().ended_jobs(keep))

    def status(self) -> FleetStatus:
        """Return the present status; after the fleet's end, the one from its archive. Raises DispatcherUnreachable
        if the dispatcher does not answer and the fleet has not ended."""
        found = self._ask_dispatcher(lambda client: client.status(), lambda: reports.ended_status(self._folder()))
        self._refresh_ssh(found)
        self._remember_names(found)
        return replace(found, fleet=self.name)  # the dispatcher knows the name in the cloud, which may be a longer one

    def hosts(self) -> list[HostStatus]:
        return list(self.status().hosts)

    def jobs(self) -> list[Job]:
        client = self._client()
        return [Job(client, j.job) for j in client.jobs()]

    def job(self, job: str) -> Job:
        """Return the job of that name. Raises SpotfleetError when there is none."""
        found = Job(self._client(), job)
        found.status()
        return found

    def logs(self, job: str, *, follow: bool = False, rank: int = 0, worker: str = "", tail: int | None = None,
             since_s: float = 0.0) -> Iterator[bytes]:
        """Yield the output of one rank or one worker of a job; after the fleet's end from its archive. Raises
        SpotfleetError for a rank or worker that the job cannot have.

        `tail`: only the last lines so far. `since_s`: only output of the last seconds, which no archive can tell.
        """
        def living(client: DispatcherClient) -> Iterator[bytes]:
            reports.check_source(client, job, rank, worker)
            return Job(client, job).logs(follow=follow, rank=rank, worker=worker, tail=tail, since_s=since_s)

        return self._ask_dispatcher(
            living, lambda: reports.archived_logs(self._folder(), job, rank, worker, tail, since_s))

    def all_logs(self, job: str, *, follow: bool = False, tail: int | None = None, since_s: float = 0.0,
                 ) -> Iterator[tuple[int, bytes]]:
        """Yield (rank, output) of all ranks of a job, in pieces; arguments as for `logs`."""
        return self._ask_dispatcher(
            lambda client: Job(client, job).all_logs(follow=follow, tail=tail, since_s=since_s),
            lambda: reports.all_archived_logs(self._folder(), job, tail, since_s))

    def setup_logs(self, job: str, host: str = "", *, tail: int | None = None, since_s: float = 0.0,
                   ) -> Iterator[tuple[str, bytes]]:
        """Yield (host, output of `setup` there) for a job, of one host or of all; after the fleet's end from its
        archive. `tail` and `since_s` as for `logs`. Raises SpotfleetError when there is none."""
        def living(client: DispatcherClient) -> list[str]:
            return [name for name in client.log_workers(job) if name.endswith(reports.SETUP)]

        there = self._ask_dispatcher(living, lambda: reports.archived_setups(self._folder(), job))
        chosen = [name for name in there if not host or name == f"{host}{reports.SETUP}"]
        if not chosen:
            where = ", ".join(name.removesuffix(reports.SETUP) for name in there)
            raise SpotfleetError(f"job '{job}' has run no setup" + (f" on {host}" if host else ""),
                                 hint=f"it ran on {where}" if where else "see `setup` in the fleet file")
        return ((n.removesuffix(reports.SETUP), b"".join(self.logs(job, worker=n, tail=tail, since_s=since_s)))
                for n in chosen)

    def outputs(self, job: str, into: Path, *, progress: Progress = _silent) -> outputs.DownloadedOutputs:
        """Copy the files that the workers of a job have written to SPOTFLEET_OUTPUT so far to the folder `into`, by
        worker; after the fleet's end from its archive. Files that are there already are not copied again."""
        return self._ask_dispatcher(lambda client: outputs.living(client, job, into, progress),
                                    lambda: outputs.archived(self._folder(), job, into, progress))

    def events(self) -> list[dict[str, Any]]:
        """Return all events, oldest first: {"ledger", "seq", "kind", "at", ...}."""
        folder = self._folder()
        return reports.merged(self._dispatcher_rows(), reports.laptop_events(folder))

    def cost(self, since: float | None = None, until: float | None = None) -> CostReport:
        """Return the bill until now, or until the fleet's end; only the part in [since, until), Unix seconds. Raises
        DispatcherUnreachable where `books` reports a missing ledger."""
        return self._books().report(since, until)

    def books(self, *, whole: bool = False) -> FleetLedgers:
        """Return the fleet's ledgers, as far as they can be read, for grouping its cost (`fleet.cost.groups`). With
        `whole` it raises DispatcherUnreachable instead of reporting in `missing` what cannot be read now."""
        try:
            return self._books()
        except DispatcherUnreachable as error:
            if whole:
                raise
            laptop = reports.laptop_events(self._folder())
            missing = f"its worker hosts are missing here, as the records of them cannot be read now: {error}"
            return reports.fleet_ledgers(self.name, (), laptop, missing=missing)

    def _books(self) -> FleetLedgers:
        folder = self._folder()

        def living(client: DispatcherClient) -> FleetLedgers:
            events = reports.dispatcher_events(client)
            return reports.fleet_ledgers(self.name, events, reports.laptop_events(folder), client.ahead_s)

        return self._ask_dispatcher(living, lambda: reports.ended_ledgers(folder))

    @property
    def client(self) -> DispatcherClient:
        """Client of the dispatcher's API, for requests that have no method here."""
        return self._client()

    @property
    def ended(self) -> bool:
        """Whether fleet.json records the fleet's end; `status` asks the provider."""
        return bool(self._folder().record.down_at)

    @property
    def archive(self) -> Path | None:
        """Folder with the results that `down` has fetched; None without results here."""
        archive = self._folder().archive
        return archive if archive.exists() else None

    # --- inside

    def _refresh_ssh(self, found: FleetStatus) -> None:
        """Update the SSH files to the present hosts."""
        folder = self._folder()
        if not folder.record.down_at:
            workers = [h.host for h in found.hosts if h.role == Role.WORKER.value]
            ssh.refresh_if_changed(folder, workers, lambda: DispatcherMachine(folder).left())

    def _remember_names(self, found: FleetStatus) -> None:
        folder = self._folder()
        if folder.exists and not folder.record.down_at:
            folder.remember_names([h.host for h in found.hosts if h.role == Role.WORKER.value],
                                  [j.job for j in found.jobs])

    def _require_file(self) -> FleetFile:
        if self._file is None:
            raise UsageError(f"fleet '{self.name}' was named, but its file is needed here", hint="spotfleet up FILE")
        return self._file

    def _folder(self) -> FleetDir:
        return self.home.find(self.name)

    def _dispatcher_rows(self) -> list[dict[str, Any]]:
        folder = self._folder()
        return self._ask_dispatcher(reports.dispatcher_rows, lambda: reports.archived_rows(folder))

    def _ask_dispatcher(self, living: Callable[[DispatcherClient], Any], ended: Callable[[], Any]) -> Any:
        """Ask the dispatcher; if it does not answer because the fleet has ended, use the archive."""
        folder = self._folder()
        if folder.record.down_at:
            return ended()
        try:
            return living(self._client(READ_PATIENCE_S))
        except DispatcherUnreachable:
            if close_if_ended(folder):
                return ended()
            raise

    def _client(self, patience_s: float | None = None) -> DispatcherClient:
        """Return a client of the dispatcher at its last known URL, or where the provider lists it now."""
        patience_s = PATIENCE_S if patience_s is None else patience_s
        folder = self._folder()
        record = folder.record
        if record.down_at:
            raise SpotfleetError(f"fleet '{self.name}' is down", hint="`spotfleet up FILE` makes it anew")
        machine = DispatcherMachine(folder)
        client = machine.client(record.url, patience_s) if record.url else None
        if client and client.healthy():
            return client
        if client and makes_machines(record.spec) and machine.locate() == record.url:
            # The machine exists, so this laptop's address may have changed.
            cloud.allow_access(machine.provider, machine.cloud_name)
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
