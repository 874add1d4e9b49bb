"""Facts about hosts, disks and jobs in a ledger that determine cost. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from spotfleet.fleet.cost.billing import seconds_until
from spotfleet.fleet.domain.events import (
    CheckpointKept,
    Event,
    GenerationFormed,
    HostJoined,
    HostListed,
    HostPlaced,
    JobChanged,
    JobProgress,
    JobResumed,
    JobSubmitted,
    LaunchIntended,
    ScriptsRan,
)
from spotfleet.model import RAY_KIND, BootStages, CloudState, Offer, Role, Run

_ALL_SECONDS = 2**62
JobCostEvent = JobChanged | GenerationFormed | JobResumed | JobProgress | CheckpointKept
HoldEvent = JobChanged | GenerationFormed | ScriptsRan  # changes of the slots that a job holds


@dataclass(frozen=True)
class Disk:
    """Disk of one machine, from the start of its first run to its end."""

    provider_id: str
    gib: int
    since: float
    until: float | None = None


@dataclass(frozen=True)
class CostHost:
    """Facts about one host in the ledger."""

    request_id: str
    role: Role
    offer: Offer
    runs: tuple[Run, ...]
    joined_at: tuple[float, ...]
    disks: tuple[Disk, ...] = ()
    addresses: int = 0  # public addresses while it runs
    provider_ids: tuple[str, ...] = ()  # ids of its machines
    asked_at: float = 0.0  # its first launch request
    boots: dict[float, BootStages] = field(default_factory=dict)  # by the instant of its agent's join
    stepped_at: tuple[float, ...] = ()  # its first steps after boots
    group: str = ""  # one of the fleet's named groups

    @property
    def region(self) -> str:
        return f"{self.offer.provider}/{self.offer.region}"

    def boot_seconds(self, run: Run) -> int:
        """Return the seconds of `run` before its agent joined; all of them if it never joined."""
        first = first_within(self.joined_at, run)
        return _ALL_SECONDS if first is None else seconds_until(run, first)


def first_within(instants: Iterable[float], run: Run) -> float | None:
    """Return the first of `instants` that lies in `run`."""
    ended_at = math.inf if run.ended_at is None else run.ended_at
    return next((at for at in instants if run.started_at <= at <= ended_at), None)


@dataclass(frozen=True)
class SlotUse:
    """Period in which `job` held `slots` slots of a host."""

    job: str
    slots: int
    since: float
    until: float
    known: bool = True  # False: work outside training, of unknown kind


@dataclass(frozen=True)
class CostJob:
    job: str
    name: str
    slot_uses: dict[str, list[SlotUse]]  # by host
    log: tuple[JobCostEvent, ...]  # in the order of the ledger
    whole_hosts: bool = False  # it holds all slots of each host where it has a worker

    @cached_property
    def resumed(self) -> list[JobResumed]:
        return [e for e in self.log if isinstance(e, JobResumed)]

    @cached_property
    def formed(self) -> dict[int, GenerationFormed]:
        return {e.generation: e for e in self.log if isinstance(e, GenerationFormed)}

    @cached_property
    def _timed(self) -> list[JobProgress]:
        return sorted((e for e in self.log if isinstance(e, JobProgress) and e.step_s > 0), key=lambda e: e.at)

    def steps(self, at: float) -> int:
        """Return the highest version that it had reached before `at`."""
        return max((e.version for e in self.log if e.at < at), default=0)

    def step_s(self, at: float) -> float:
        """Return the seconds per step at about `at`."""
        after = bisect_right(self._timed, at, key=lambda e: e.at)
        return self._timed[max(0, after - 1)].step_s if self._timed else 0.0


def hosts(events: Iterable[Event]) -> dict[str, CostHost]:
    """Return every host in the ledger, by request_id."""
    intents: dict[str, LaunchIntended] = {}
    placed: dict[str, Offer] = {}
    listed: dict[str, list[HostListed]] = {}
    joined: dict[str, list[HostJoined]] = {}
    stepped: dict[str, list[float]] = {}
    for event in events:
        match event:
            case LaunchIntended():
                intents.setdefault(event.request_id, event)
            case HostPlaced():
                placed[event.request_id] = event.offer
            case HostListed():
                listed.setdefault(event.request_id, []).append(event)
            case HostJoined():
                joined.setdefault(event.request_id, []).append(event)
            case JobResumed():
                for name in event.first_steps:
                    stepped.setdefault(name, []).append(event.at)
    return {name: _host(e, placed.get(name, e.offer), listed.get(name, []), joined.get(name, []),
                        tuple(stepped.get(name, ()))) for name, e in intents.items()}


def _host(intent: LaunchIntended, offer: Offer, listed: list[HostListed], joined: list[HostJoined],
          stepped_at: tuple[float, ...]) -> CostHost:
    ids = dict.fromkeys(e.provider_id for e in listed if e.provider_id)
    return CostHost(intent.request_id, intent.role, offer, listed[-1].runs if listed else (),
                    tuple(e.at for e in joined), disks(listed), max((e.addresses for e in listed), default=0),
                    tuple(ids), intent.at, {e.at: e.boot for e in joined if e.boot is not None}, stepped_at,
                    intent.group)


def disks(listed: Iterable[HostListed]) -> tuple[Disk, ...]:
    """Return the disks of one host. A machine that the cloud launched anew under the same name has another disk."""
    held: list[Disk] = []
    ran = -math.inf  # start of the last listed run of the last machine
    for event in listed:
        ended = event.state is CloudState.TERMINATED
        if event.missing and not ended:
            continue  # its values repeat the last listing
        if event.disk_gib and event.runs:
            _hold(held, event, ended, ran)
        same_machine = bool(held) and held[-1].provider_id == event.provider_id
        if same_machine and event.runs:
            ran = event.runs[-1].started_at
        reported = ended and not event.missing and event.ended_at is not None
        if held and ((reported and same_machine) or (held[-1].until is None and (ended or not event.disk_gib))):
            held[-1] = replace(held[-1], until=max(held[-1].since, _end(event)))
    return tuple(held)


def _hold(held: list[Disk], event: HostListed, ended: bool, ran: float) -> None:
    """Record the disk in `event`. Runs up to the one that began at `ran` belong to the previous machine."""
    last = held[-1] if held else None
    if last is None:
        held.append(Disk(event.provider_id, event.disk_gib, event.runs[0].started_at))
        return
    if last.provider_id == event.provider_id:
        until = last.until if ended else None  # it may only have been missing from a listing
        held[-1] = replace(last, gib=max(last.gib, event.disk_gib), until=until)
        return
    before = [r for r in event.runs if r.started_at <= ran]
    since = min((r.started_at for r in event.runs if r.started_at > ran), default=None)
    if before:
        stopped_at = before[-1].ended_at
        if last.until is None and stopped_at is None:  # its end was not observed
            stopped_at = event.at if since is None else since
        held[-1] = replace(last, until=max(t for t in (last.until, stopped_at) if t is not None))
    if since is not None:
        held.append(Disk(event.provider_id, event.disk_gib, since))


def _end(event: HostListed) -> float:
    """Return when the machine of this line last had its disk; it has ended, or has no disk now."""
    if event.ended_at is not None:
        return event.ended_at
    last = event.runs[-1].ended_at if event.runs else None
    return event.at if last is None else last


def jobs(events: Iterable[Event], now: float) -> dict[str, CostJob]:
    names: dict[str, str] = {}
    whole: set[str] = set()
    log: dict[str, list[JobCostEvent]] = {}
    holds: dict[str, list[HoldEvent]] = {}
    for event in events:
        if isinstance(event, JobSubmitted):
            names[event.job] = event.name
            if event.job_kind == RAY_KIND:
                whole.add(event.job)
        elif isinstance(event, JobCostEvent):
            names.setdefault(event.job, "")
            log.setdefault(event.job, []).append(event)
        if isinstance(event, HoldEvent):
            names.setdefault(event.job, "")
            holds.setdefault(event.job, []).append(event)
    return {job: CostJob(job, name, _slot_uses(job, holds.get(job, []), now), tuple(log.get(job, ())), job in whole)
            for job, name in names.items()}


def _slot_uses(job: str, log: list[HoldEvent], now: float) -> dict[str, list[SlotUse]]:
    slot_uses: dict[str, list[SlotUse]] = {}
    held: Counter[str] = Counter()
    since, counted_until, known = 0.0, -math.inf, True
    for event in [*log, None]:
        ended = event is None or (isinstance(event, JobChanged) and event.state.ended)
        if not ended and isinstance(event, JobChanged):
            continue
        begun = now if event is None else event.since if isinstance(event, ScriptsRan) else event.at
        begun = max(begun, counted_until)  # scripts may have run since before the newest generation, which then is none
        if held and since < begun:
            counted_until = begun
            for host, slots in held.items():
                slot_uses.setdefault(host, []).append(SlotUse(job, slots, since, begun, known))
        held = Counter() if ended else slots_of(event)
        since, known = begun, not isinstance(event, ScriptsRan) or event.known
    return slot_uses


def slots_of(event: GenerationFormed | ScriptsRan) -> Counter[str]:
    """Return host -> the number of its slots that the workers hold; a worker's name is HOST/SLOT/INCARNATION."""
    workers = event.members if isinstance(event, GenerationFormed) else event.workers
    return Counter(worker.partition("/")[0] for worker in workers)
