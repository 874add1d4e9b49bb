"""Events, costs, logs and status of a fleet, also after its end: from the dispatcher, or else from the archive."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from spotfleet.api.home import FleetDir
from spotfleet.api.machine import DispatcherMachine, record_machine
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.fleet.cost.facts import hosts
from spotfleet.fleet.cost.groups import FleetLedgers
from spotfleet.fleet.domain.events import (
    Event,
    FleetDown,
    GenerationFormed,
    JobChanged,
    JobEvent,
    JobProgress,
    JobResumed,
    JobSubmitted,
    NodesChanged,
    event_from_json,
    event_to_json,
)
from spotfleet.fleet.ledger import Ledger, LedgerDamaged, problem, read_events
from spotfleet.model import JobState
from spotfleet.protocol.messages import FleetStatus, JobStatus
from spotfleet.transport.client import DispatcherClient

SETUP = "#setup"  # suffix of the name of a host's setup log
SKEW_S = 5.0  # a smaller difference may be the answer's delay; the dispatcher sends whole seconds


def laptop_events(folder: FleetDir) -> list[Event]:
    """Return the events of the dispatcher's machine. A damaged ledger is set aside and started again from the
    provider's list."""
    if not folder.ledger.exists():
        return []
    if isinstance(problem(folder.ledger), LedgerDamaged):
        record_machine(DispatcherMachine(folder), time.time())
    ledger = Ledger(folder.ledger)
    try:
        return [event for _, event in ledger.events()]
    finally:
        ledger.close()


def archived_events(folder: FleetDir) -> list[Event]:
    """Return the dispatcher's ledger from the archive; [] without an archive."""
    path = folder.archive / "ledger.db"
    return read_events(path) if path.exists() else []


def dispatcher_rows(client: DispatcherClient) -> list[dict[str, Any]]:
    """Fetch the dispatcher's whole ledger as {"kind", "at", ...}, with kinds that only a newer release knows."""
    found: list[dict[str, Any]] = []
    after = 0
    while page := client.events(after):
        found += [{k: v for k, v in row.items() if k != "seq"} for row in page]
        after = page[-1]["seq"]
    return found


def dispatcher_events(client: DispatcherClient) -> list[Event]:
    """Fetch the dispatcher's whole ledger. Raises ValueError for a kind that only a newer release knows: a bill without
    it may be wrong."""
    return [event_from_json(row) for row in dispatcher_rows(client)]


def archived_rows(folder: FleetDir) -> list[dict[str, Any]]:
    return [event_to_json(event) for event in archived_events(folder)]


def merged(dispatcher: Sequence[dict[str, Any]], laptop: Sequence[Event]) -> list[dict[str, Any]]:
    """Merge both ledgers into one list, in the order of time, as {"ledger", "seq", "kind", "at", ...}."""
    own = [event_to_json(event) for event in laptop]
    rows = [{"ledger": name, "seq": seq, **row} for name, events in (("dispatcher", dispatcher), ("laptop", own))
            for seq, row in enumerate(events, 1)]
    return sorted(rows, key=lambda row: row["at"])


def fleet_ledgers(fleet: str, dispatcher: Sequence[Event], laptop: Sequence[Event], ahead_s: float = 0.0,
                  missing: str = "") -> FleetLedgers:
    """Return all ledgers of a fleet up to its end, or up to now while it is up. `ahead_s`: by how much our clock is
    ahead of the dispatcher's; the cloud's clock is assumed to agree with the dispatcher's."""
    down = [e.at for e in laptop if isinstance(e, FleetDown)]
    now = time.time() - (ahead_s if abs(ahead_s) > SKEW_S else 0.0)
    return FleetLedgers(fleet, (*dispatcher, *laptop), down[-1] if down else now, not down, missing)


def ended_ledgers(folder: FleetDir) -> FleetLedgers:
    """Return the ledgers of a fleet that is down, from its archive."""
    dispatcher = archived_events(folder)
    lost = folder.record.reached and not dispatcher
    missing = "its dispatcher's records were not copied here: its worker hosts are missing here" if lost else ""
    return fleet_ledgers(folder.name, dispatcher, laptop_events(folder), missing=missing)


def check_source(client: DispatcherClient, job: str, rank: int, worker: str) -> None:
    """Raise SpotfleetError for a rank or a worker that the job cannot have: its output would stay empty for ever."""
    if worker:
        there = [*client.log_workers(job), *(w.worker for w in client.job(job).workers)]
        if worker not in there:
            raise SpotfleetError(f"job '{job}' has no worker '{worker}'",
                                 hint=f"it has {', '.join(dict.fromkeys(there)) or 'none yet'}")
    elif rank >= (most := client.job(job).max_workers):
        raise SpotfleetError(f"job '{job}' has no rank {rank}", hint=(
            f"it has at most {most} workers: 0..{most - 1}" if most > 1 else "it has one worker, rank 0"))


def archived_logs(folder: FleetDir, job: str, rank: int, worker: str, tail: int | None = None,
                  since_s: float = 0.0) -> Iterator[bytes]:
    """Return a job's output from the archive, or its last `tail` lines. Raises SpotfleetError when there is none, and
    UsageError for `since_s`."""
    if since_s:
        raise UsageError(f"--since: fleet '{folder.name}' has ended, and its archive does not hold the time of a line",
                         hint="`--tail 100` prints the last 100 lines")
    logs = folder.archive / "jobs" / job / "logs"
    path = logs / (f"{worker.replace('/', '@')}.log" if worker else f"rank-{rank}.log")
    if not path.is_file():
        there = ", ".join(sorted(p.name for p in (folder.archive / "jobs").glob("*")))
        raise SpotfleetError(f"the archive holds no output of job '{job}', {worker or f'rank {rank}'}",
                             hint=f"jobs in the archive: {there or 'none'}")
    data = path.read_bytes()
    if tail is None:
        return iter([data])
    lines = data.splitlines(keepends=True)
    return iter([b"".join(lines[max(0, len(lines) - tail):])])


def all_archived_logs(folder: FleetDir, job: str, tail: int | None, since_s: float) -> Iterator[tuple[int, bytes]]:
    """Yield (rank, output) of all ranks from the archive."""
    names = (path.stem.removeprefix("rank-") for path in (folder.archive / "jobs" / job / "logs").glob("rank-*.log"))
    ranks = sorted(int(name) for name in names if name.isdecimal()) or [0]  # 0: its error names the archived jobs
    return ((rank, data) for rank in ranks for data in archived_logs(folder, job, rank, "", tail, since_s))


def archived_setups(folder: FleetDir, job: str) -> list[str]:
    """Return the names of the archived logs of `setup`, for `archived_logs`."""
    return sorted(p.name.removesuffix(".log") for p in (folder.archive / "jobs" / job / "logs").glob(f"*{SETUP}.log"))


def ended_status(folder: FleetDir) -> FleetStatus:
    """Return the status of an ended fleet, from its archive."""
    record, events = folder.record, archived_events(folder)
    nodes = [record.spec.nodes, *(e.nodes for e in events if isinstance(e, NodesChanged) and not e.group)][-1]
    reasons = [e.why for e in events if isinstance(e, FleetDown)][-1:]
    why = "; ".join([*reasons, "nothing of it is left", *([] if events else ["no results were copied here"])])
    return FleetStatus(folder.name, "down", why, nodes.min, nodes.target, nodes.max, jobs=_jobs(events),
                       age_s=_end(folder, events) - record.made_at)


def _end(folder: FleetDir, events: Sequence[Event]) -> float:
    """Return when the last of its machines ended according to the ledgers. If the end of one is not recorded, return
    when this machine noticed the fleet's end, which may be much later."""
    record = folder.record
    runs = [run for host in hosts([*events, *laptop_events(folder)]).values() for run in host.runs]
    ends = [run.ended_at for run in runs if run.ended_at is not None]
    if not runs or len(ends) < len(runs):
        return record.down_at
    return min(record.down_at, max(record.made_at, *ends))


def _jobs(events: Sequence[Event]) -> tuple[JobStatus, ...]:
    """Return each job's last state; `age_s` is its duration."""
    of: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        if isinstance(event, JobEvent):
            of[event.job].append(event)
    return tuple(_job(submitted, of[submitted.job]) for submitted in events if isinstance(submitted, JobSubmitted))


def _job(submitted: JobSubmitted, events: Sequence[Event]) -> JobStatus:
    changes = [e for e in events if isinstance(e, JobChanged)]
    last = changes[-1] if changes else JobChanged(submitted.at, submitted.job, JobState.QUEUED, "")
    return JobStatus(
        submitted.job, submitted.name, last.state.value, last.why, version=last.version,
        generation=max((e.generation for e in events if isinstance(e, GenerationFormed)), default=0),
        repeated=sum(e.repeated for e in events if isinstance(e, JobResumed)),
        recomputed=sum(e.recomputed for e in events if isinstance(e, JobResumed)),
        step_s=next((e.step_s for e in reversed(events) if isinstance(e, JobProgress) and e.step_s), 0.0),
        min_workers=submitted.min_workers, max_workers=submitted.max_workers, age_s=last.at - submitted.at,
        kind=submitted.job_kind,
    )
