"""The runs: one undisturbed, and one for each kind of disturbance, on the same number of workers at every step.

Each disturbs twice, a third and two thirds of the way. At that moment every worker has recorded the step and waits (in
the run `step` one waits within it), so the replacement can be brought to where the scenario needs it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotfleet.verify.world import ENDED, Forker, LocalJob, LocalWorker, RunFailed, RunSpec

Record = dict[str, Any]


@dataclass(frozen=True)
class Disturbance:
    """A disturbance of a run, after `version` was complete everywhere."""

    version: int
    text: str


@dataclass
class RecordedRun:
    """What the workers of one run recorded."""

    name: str
    records: dict[tuple[int, int], Record] = field(default_factory=dict)  # by version and rank; the last one counts
    entered: dict[str, Record] = field(default_factory=dict)  # by worker, in the order of their start
    disturbances: list[Disturbance] = field(default_factory=list)
    error: str = ""  # why it did not reach its last step
    ended: bool = False  # the script ended by itself
    took_s: float = 0.0

    @property
    def version(self) -> int:
        return max((v for v, _ in self.records), default=0)

    def before(self, version: int) -> Disturbance | None:
        """Return the last disturbance before step `version`."""
        return next((d for d in reversed(self.disturbances) if d.version < version), None)


Play = Callable[[LocalJob, RecordedRun, tuple[int, int], int], None]


def undisturbed(job: LocalJob, run: RecordedRun, at: tuple[int, int], last: int) -> None:
    job.start(job.spec.workers)
    job.wait_held(last)


def kill(job: LocalJob, run: RecordedRun, at: tuple[int, int], last: int) -> None:
    """Kill the last rank, then the first; a warm replacement takes the place."""
    job.start(job.spec.workers)
    for version, rank in zip(at, (job.spec.workers - 1, 0), strict=True):
        job.wait_held(version)
        _warm_replacement(job)
        run.disturbances.append(Disturbance(version, f"rank {rank} was killed"))
        job.lose(job.by_rank()[rank])
        job.release(version)
    job.wait_held(last)


def step(job: LocalJob, run: RecordedRun, at: tuple[int, int], last: int) -> None:
    """Kill the first rank between its gradient and its step, which the others make; then the last rank."""
    holds = [job.records / f"within-{v}-{r}" for v, r in zip(at, (0, job.spec.workers - 1), strict=True)]
    for hold in holds:
        hold.touch()
    job.start(job.spec.workers)
    for version, rank, hold in zip(at, (0, job.spec.workers - 1), holds, strict=True):
        reached = hold.with_suffix(".reached")
        job.wait(lambda version=version, reached=reached: reached.exists() or job.holds(version),
                 f"rank {rank} in step {version}")
        within = reached.exists()
        _warm_replacement(job)
        run.disturbances.append(Disturbance(version - within, f"rank {rank} was killed" + " in the next step" * within))
        job.lose(job.by_rank()[rank])
        hold.unlink()
        job.release(version)
    job.wait_held(last)


def notice(job: LocalJob, run: RecordedRun, at: tuple[int, int], last: int) -> None:
    """Give a notice to the first rank, then to the last; its replacement enters as it leaves."""
    job.start(job.spec.workers)
    for version, rank in zip(at, (0, job.spec.workers - 1), strict=True):
        job.wait_held(version)
        _warm_replacement(job)
        generation = job.membership.generation
        job.notice(job.by_rank()[rank], 3600.0)
        job.wait(lambda before=generation: job.membership.generation > before, "the planned change")
        run.disturbances.append(Disturbance(version, f"rank {rank} left as planned"))
        job.release(version)
    job.wait_held(last)


def join(job: LocalJob, run: RecordedRun, at: tuple[int, int], last: int) -> None:
    """Let the last rank leave before there is a replacement, which joins later; then the same with the first rank."""
    job.start(job.spec.workers)
    for version, rank in zip(at, (job.spec.workers - 1, 0), strict=True):
        job.wait_held(version)
        leaver = job.by_rank()[rank]
        rest = [w for w in job.by_rank() if w is not leaver]
        job.notice(leaver, 0.5)
        job.wait(lambda: not job.membership.members, "the planned leave")
        job.release(version)
        job.wait(lambda rest=rest: all(w.report.generation == 0 for w in rest), "the others to stand by")
        run.disturbances.append(Disturbance(version, f"rank {rank} left and a worker joined later"))
        job.start()
    job.wait_held(last)


def restore(job: LocalJob, run: RecordedRun, at: tuple[int, int], last: int) -> None:
    """Write a checkpoint, kill every worker some steps later, and start others that restore it."""
    job.start(job.spec.workers)
    job.wait_held(at[0])
    job.order_checkpoint()
    job.release(at[0])
    job.wait_held(at[1])
    job.wait(lambda: job.checkpoint is not None, "a checkpoint")
    job.save = False
    workers = job.by_rank()
    for worker in workers:
        job.kill(worker)
    job.wait(lambda: all(job.has_ended(w) for w in workers), "their end")
    assert job.checkpoint is not None
    run.disturbances.append(Disturbance(job.checkpoint.version, f"the checkpoint of step {job.checkpoint.version} was "
                                                                "restored"))
    job.release(at[1])
    job.start(job.spec.workers)
    job.wait_held(last)


def _warm_replacement(job: LocalJob) -> LocalWorker:
    (worker,) = job.start()
    job.wait_ready(worker)
    return worker


DISTURBED: Mapping[str, Play] = {"kill": kill, "step": step, "notice": notice, "join": join, "restore": restore}


def play(name: str, scenario: Play, forker: Forker, spec: RunSpec, folder: Path, last: int,
         environ: Mapping[str, str]) -> RecordedRun:
    """Run the script once; a script that stops early or fails is told in the result."""
    run, at, began = RecordedRun(name), (max(1, last // 3), max(2, 2 * last // 3)), time.monotonic()
    job = LocalJob(forker, spec, folder, (last,) if scenario is undisturbed else (*at, last), environ)
    try:
        scenario(job, run, at, last)
    except RunFailed as failure:
        run.ended = str(failure) == ENDED
        run.error = "" if run.ended else str(failure)
    finally:
        job.close()
    for worker in job.workers.values():
        path = job.records / f"{worker.name.replace('/', '-')}.jsonl"
        data = path.read_text() if path.exists() else ""
        for line in data[:data.rfind("\n") + 1].splitlines():  # the last one may be cut short by a kill
            _take(run, worker.name, json.loads(line))
    run.took_s = time.monotonic() - began
    return run


def _take(run: RecordedRun, worker: str, record: Record) -> None:
    if record.get("entered"):
        run.entered[worker] = record
        return
    key = (record["version"], record["rank"])
    if key not in run.records or record["generation"] >= run.records[key]["generation"]:
        run.records[key] = {**record, "worker": worker}
