"""Failures of scripts after training, on ranks other than 0: they do not fail the job, so it reports them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spotfleet.dispatcher.jobs.restart import Cause
from spotfleet.dispatcher.jobs.workers import JobWorker

TOLD = 3  # clauses of one line


def failures(finished: Sequence[str], workers: dict[str, JobWorker]) -> tuple[str, ...]:
    """Return a clause for each failed script; `finished` are the workers that trained last, by rank. A lost host is no
    failure."""
    ended = [(rank, workers[name]) for rank, name in enumerate(finished) if rank > 0 and name in workers]
    return tuple(_failure(rank, w) for rank, w in ended if w.cause not in (None, Cause.DONE, Cause.LOST))


def _failure(rank: int, worker: JobWorker) -> str:
    if worker.cause is Cause.SIGNAL:
        return f"rank {rank} was {worker.error} after training"
    return f"the script failed on rank {rank} after training: {worker.error.strip().rpartition(chr(10))[2]}"


def cut_off(finished: Sequence[str], rest: Iterable[JobWorker], after_s: float) -> tuple[str, ...]:
    """Return a clause for each script of `rest`, which is ended before its end."""
    return tuple(f"rank {finished.index(w.name)} was ended: its script still ran {after_s:.0f} s after rank 0's"
                 for w in rest)


def words(clauses: Iterable[str]) -> str:
    """Join the first clauses, and count the others."""
    clauses = tuple(clauses)
    more = (f"and {len(clauses) - TOLD} more",) if len(clauses) > TOLD else ()
    return "; ".join((*clauses[:TOLD], *more))
