"""A job as its user sees it while everything breaks: its status, whether it trains again, and why it does not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from spotfleet.api import Fleet, Job
from spotfleet.errors import SpotfleetError
from spotfleet.protocol.messages import JobStatus
from tests.support.e2e.e2e_stage import Stage
from tests.support.e2e.troubles import Troubles, workers_of

RECOVER_S = 60.0  # from the last trouble's end until all workers train again
STEADY_STEPS = 5  # so many steps in one generation of all workers are "trains again"
ENDED = ("succeeded", "failed", "cancelled")
ROUTINE = ("PriceChanged", "CheckpointKept", "JobProgress")


class Failure(AssertionError):
    pass


def status_of(job: Job) -> JobStatus:
    """The job; waits for a dispatcher that was killed."""
    limit = time.monotonic() + RECOVER_S
    while True:
        try:
            return job.status()
        except SpotfleetError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.1)


def trains_again(job: Job, troubles: Troubles, workers: int, after: str, limit_s: float = RECOVER_S) -> float:
    """Return once all workers train: some steps in one generation, after everything announced has happened; how many
    seconds that took. Raises Failure."""
    first, begun = None, time.monotonic()
    while True:
        status = status_of(job)
        ranked = [w for w in status.workers if w.rank >= 0]
        if status.state in ENDED:
            raise Failure(f"the job has {status.state} after {after}: {status.why}\n{status.error}")
        now = time.monotonic()
        whole = status.state == "running" and len(ranked) == workers and now > troubles.busy_until
        whole = whole and {w.host for w in ranked} <= set(troubles.living())
        if not whole or first is None or first.generation != status.generation:
            first = status if whole else None
        elif status.version >= first.version + STEADY_STEPS:
            return max(0.0, time.monotonic() - max(troubles.busy_until, begun))
        if now > max(troubles.busy_until, begun) + limit_s:
            raise Failure(f"does not train with {workers} workers {limit_s:.0f} s after {after}: {status}")
        time.sleep(0.1)


def await_forming(job: Job, limit_s: float = 10.0) -> None:
    """Until another generation forms than now."""
    before, limit = status_of(job), time.monotonic() + limit_s
    while time.monotonic() < limit:
        now = status_of(job)
        if now.generation != before.generation or now.state in ENDED:
            return
        time.sleep(0.005)


def dump(stage: Stage, fleet: Fleet, job: Job) -> None:
    """All that helps to find out why."""
    print(f"--- job\n{status_of(job)}\n--- hosts at {time.time():.2f}")
    for host in fleet.hosts():
        print(host)
    print("--- events")
    for event in [e for e in fleet.events() if e["kind"] not in ROUTINE][-100:]:
        print({k: v for k, v in event.items() if k not in ("ledger", "seq", "offer")})
    spy = Path(sys.executable).with_name("py-spy")
    for machine in stage.cloud.truth():
        for process in workers_of(machine) or machine.processes[:1]:
            pid = process if isinstance(process, int) else process.pid
            print(f"--- {machine.request_id}: process {pid}", flush=True)
            if spy.exists():
                subprocess.run([str(spy), "dump", "--native", "--pid", str(pid)], timeout=60, check=False)
