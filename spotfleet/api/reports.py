"""What is known of a fleet, also after its end: from the dispatcher while it answers, else from what came home."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from spotfleet.api.house import Folder
from spotfleet.api.machine import Machine, watch
from spotfleet.client import Client
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.cost import CostReport
from spotfleet.fleet.cost_facts import hosts
from spotfleet.fleet.cost_groups import Books
from spotfleet.fleet.events import (
    Event,
    FleetDown,
    GenerationFormed,
    JobChanged,
    JobProgress,
    JobResumed,
    JobSubmitted,
    NodesChanged,
    event_from_json,
    event_to_json,
)
from spotfleet.fleet.ledger import Damaged, Ledger, problem, read_events
from spotfleet.messages import FleetStatus, JobStatus
from spotfleet.model import JobState

SETUP = "#setup"  # ends the name of a host's log of that
SKEW_S = 5.0  # less is the way of an answer, and the dispatcher tells whole seconds


def laptop_events(folder: Folder) -> list[Event]:
    """What happened to the dispatcher's machine. A damaged ledger is set aside, and begun anew from what is listed."""
    if not folder.ledger.exists():
        return []
    if isinstance(problem(folder.ledger), Damaged):
        watch(Machine(folder), time.time())
    ledger = Ledger(folder.ledger)
    try:
        return [event for _, event in ledger.events()]
    finally:
        ledger.close()


def archived_events(folder: Folder) -> list[Event]:
    """The dispatcher's ledger as it came home; [] when nothing did."""
    path = folder.archive / "ledger.db"
    return read_events(path) if path.exists() else []


def dispatcher_events(client: Client) -> list[Event]:
    """The dispatcher's whole ledger."""
    found: list[Event] = []
    after = 0
    while page := client.events(after):
        found += [event_from_json({k: v for k, v in e.items() if k != "seq"}) for e in page]
        after = page[-1]["seq"]
    return found


def merged(dispatcher: Sequence[Event], laptop: Sequence[Event]) -> list[dict[str, Any]]:
    """Both ledgers in one list, in the order of time, as {"ledger", "seq", "kind", "at", ...}."""
    rows = [{"ledger": name, "seq": seq, **event_to_json(event)}
            for name, events in (("dispatcher", dispatcher), ("laptop", laptop))
            for seq, event in enumerate(events, 1)]
    return sorted(rows, key=lambda row: row["at"])


def books(fleet: str, dispatcher: Sequence[Event], laptop: Sequence[Event], ahead_s: float = 0.0,
          missing: str = "") -> Books:
    """All ledgers of a fleet up to its end, or up to now while it lives. `ahead_s`: of our clock, against the
    dispatcher's; the cloud's is taken to go with that one."""
    down = [e.at for e in laptop if isinstance(e, FleetDown)]
    now = time.time() - (ahead_s if abs(ahead_s) > SKEW_S else 0.0)
    return Books(fleet, (*dispatcher, *laptop), down[-1] if down else now, not down, missing)


def cost(dispatcher: Sequence[Event], laptop: Sequence[Event], ahead_s: float = 0.0) -> CostReport:
    return books("", dispatcher, laptop, ahead_s).report()


def ended_books(folder: Folder) -> Books:
    """Of a fleet that is down, from what came home."""
    dispatcher = archived_events(folder)
    unsaid = folder.record.reached and not dispatcher
    missing = "its dispatcher's ledger did not come home: its worker hosts are missing here" if unsaid else ""
    return books(folder.name, dispatcher, laptop_events(folder), missing=missing)


def check_source(client: Client, job: str, rank: int, worker: str) -> None:
    """Refuse to show the output of a rank or a worker that the job cannot have, which would be empty for ever."""
    if worker:
        there = [*client.log_workers(job), *(w.worker for w in client.job(job).workers)]
        if worker not in there:
            raise SpotfleetError(f"job '{job}' has no worker '{worker}'",
                                 hint=f"it has {', '.join(dict.fromkeys(there)) or 'none yet'}")
    elif rank >= (most := client.job(job).max_workers):
        raise SpotfleetError(f"job '{job}' has no rank {rank}", hint=f"it has at most {most} workers: 0..{most - 1}")


def archived_logs(folder: Folder, job: str, rank: int, worker: str) -> Iterator[bytes]:
    """A job's output as it came home. Raises SpotfleetError when there is none."""
    logs = folder.archive / "jobs" / job / "logs"
    path = logs / (f"{worker.replace('/', '@')}.log" if worker else f"rank-{rank}.log")
    if not path.is_file():
        there = ", ".join(sorted(p.name for p in (folder.archive / "jobs").glob("*")))
        raise SpotfleetError(f"the archive holds no output of job '{job}', {worker or f'rank {rank}'}",
                             hint=f"jobs in the archive: {there or 'none'}")
    return iter([path.read_bytes()])


def archived_setups(folder: Folder, job: str) -> list[str]:
    """The logs of `setup` that came home, by the names that `archived_logs` takes."""
    return sorted(p.name.removesuffix(".log") for p in (folder.archive / "jobs" / job / "logs").glob(f"*{SETUP}.log"))


def ended_status(folder: Folder) -> FleetStatus:
    """The status of a fleet of which nothing is left, from its archive."""
    record, events = folder.record, archived_events(folder)
    nodes = [record.spec.nodes, *(e.nodes for e in events if isinstance(e, NodesChanged))][-1]
    reasons = [e.why for e in events if isinstance(e, FleetDown)][-1:]
    why = "; ".join([*reasons, "nothing of it is left", *([] if events else ["nothing was brought home"])])
    return FleetStatus(folder.name, "down", why, nodes.min, nodes.target, nodes.max, jobs=_jobs(events),
                       age_s=_end(folder, events) - record.made_at)


def _end(folder: Folder, events: Sequence[Event]) -> float:
    """When the last of its machines ended, as far as its bill knows; where one has no end in it, when that was seen
    here, which may be long after."""
    record = folder.record
    runs = [run for host in hosts([*events, *laptop_events(folder)]).values() for run in host.runs]
    ends = [run.ended_at for run in runs if run.ended_at is not None]
    if not runs or len(ends) < len(runs):
        return record.down_at
    return min(record.down_at, max(record.made_at, *ends))


def _jobs(events: Sequence[Event]) -> tuple[JobStatus, ...]:
    """What each job had reached; `age_s` is how long it took."""
    return tuple(_job(submitted, [e for e in events if getattr(e, "job", "") == submitted.job])
                 for submitted in events if isinstance(submitted, JobSubmitted))


def _job(submitted: JobSubmitted, events: Sequence[Event]) -> JobStatus:
    changes = [e for e in events if isinstance(e, JobChanged)]
    last = changes[-1] if changes else JobChanged(submitted.at, submitted.job, JobState.QUEUED, "")
    return JobStatus(
        submitted.job, submitted.name, last.state.value, last.why, version=last.version,
        generation=max((e.generation for e in events if isinstance(e, GenerationFormed)), default=0),
        repeated=sum(e.repeated for e in events if isinstance(e, JobResumed)),
        step_s=next((e.step_s for e in reversed(events) if isinstance(e, JobProgress) and e.step_s), 0.0),
        min_workers=submitted.min_workers, max_workers=submitted.max_workers, age_s=last.at - submitted.at,
    )
