"""Rounds of a job whose processes are all ended and started anew together at each change. Pure.

    gathering --Membership orders a generation of the workers that are ready--> running --all have ended well--> done
        ^                                                                          |
        |   a death, a notice, a drain, a join: Membership orders another one,     |
        |   or lacks workers; or a process failed and restarts are left            |
        '--- each process of the round ends: SIGTERM, `grace_s`, SIGKILL ----------'

A generation is ordered only after all processes of the round before are confirmed to have ended, except those on a host
that is silent: no process of the next round meets them, because each round has a MASTER_PORT of its own.

A process that fails may be a lost peer's victim. So the failure is judged after FAULT_S, and only if by then no host of
the round is silent, lost or leaving; at once if all processes have ended. `max_restarts` counts these failures alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spotfleet.addresses import host_of
from spotfleet.dispatcher.jobs.context import JobContext
from spotfleet.dispatcher.jobs.restart import Cause
from spotfleet.dispatcher.jobs.workers import JobWorker
from spotfleet.membership import Change, Membership, Ordered, Phase
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import GangOrder

FAULT_S = 5.0  # a lost host is noticed within this time
HANGS_S = 60.0  # a process that runs on for so long after the others' ends is named
OWN = (Cause.USER, Cause.SIGNAL, Cause.PEER)  # causes of an end that may be the script's fault
SIGNALLED = 128  # added to a signal's number, as in shells


@dataclass(frozen=True)
class RoundEnd:
    """Reason to end all processes of the round."""

    why: str
    failed: bool = False  # a process failed, and no host was lost
    lost: bool = False  # a host or a process on it was lost, or will be
    error: str = ""
    status: int = 0  # exit status of the process that failed


class RoundWatch:
    """Watch of the current round of one job."""

    def __init__(self) -> None:
        self._failed_at: float | None = None  # monotonic: first failure of a process in this round

    def update(self, members: Sequence[JobWorker], membership: Membership, changes: Sequence[Change],
               before: int, context: JobContext) -> RoundEnd | None:
        """Return why the round ends; None if it goes on. `members` of the generation are sorted by rank; `before` is
        the generation before `changes`."""
        if not before:
            return None
        if (failure := self._failure(members, context)) is not None:
            return failure
        for change in changes:
            if isinstance(change, Ordered):
                return RoundEnd(change.why, lost=change.cause != "join")
        if membership.phase is Phase.HOLDING:
            return RoundEnd(membership.why, lost=True)
        return None

    def _failure(self, members: Sequence[JobWorker], context: JobContext) -> RoundEnd | None:
        failed = [w for w in members if w.cause in OWN]
        if not failed:
            self._failed_at = None
            return None
        if self._failed_at is None:
            self._failed_at = context.now
        gone = [w for w in members if w.cause is Cause.LOST or (w.silent and not w.done)]
        leaving = [w for w in members if (left := context.leaving(w.host)) is not None and left.why == "notice"]
        if gone:
            return None  # Membership counts it as lost, or its agent comes back
        if leaving:
            return RoundEnd(f"{leaving[0].host} leaves (notice), and {failed[0].name} has ended", lost=True)
        if context.now - self._failed_at < FAULT_S and not all(w.ended for w in members):
            return None
        first = min(failed, key=lambda w: (w.cause is Cause.PEER, w.ended_at, w.rank))
        return RoundEnd(f"rank {first.rank} ({first.name}) {_how(first)}", failed=True, error=first.error,
                        status=exit_status(first))


def exit_status(worker: JobWorker) -> int:
    """Return the status with which a process that failed ended, as a shell shows it."""
    code = worker.exit.code if worker.exit is not None else 1
    return SIGNALLED - code if code < 0 else code or 1


def _how(worker: JobWorker) -> str:
    return f"was {worker.error}" if worker.cause is Cause.SIGNAL else f"failed with status {exit_status(worker)}"


def may_restart(spec: JobSpec, end: RoundEnd, failures: int) -> str:
    """Return why the job fails instead of a restart; "" if it restarts. `failures`: those before this one."""
    if end.failed and failures >= spec.max_restarts:
        after = f", after {failures} of {spec.max_restarts} restarts" if spec.max_restarts else ""
        return f"{end.why}{after}"
    if end.lost and not spec.retry:
        return f"{end.why}; it was submitted with --no-retry"
    return ""


def restart_why(spec: JobSpec, end: RoundEnd, failures: int) -> str:
    """Return the reason of a restart, for the job's event."""
    counted = f" (restart {failures + 1} of {spec.max_restarts})" if end.failed else ""
    return f"{end.why}; all workers start anew{counted}"


def hanging(job: str, members: Sequence[JobWorker], now: float) -> str:
    """Return which processes of the round run on long after the others have ended with status 0; "" if none does.
    `members` are sorted by rank."""
    done = [w for w in members if w.done]
    left = [rank for rank, w in enumerate(members) if not (w.ended or w.gone)]
    if not done or not left or now - max(w.ended_at for w in done) < HANGS_S:
        return ""
    rank, more = left[0], f" (and {len(left) - 1} more)" if left[1:] else ""
    return (f"rank {rank} on {members[rank].host}{more} still runs, over {HANGS_S:.0f} s after the others ended with "
            f"status 0: see `spotfleet logs {job} --rank {rank}`; if it hangs at its exit, call "
            "torch.distributed.destroy_process_group() at the script's end")


def belongs(worker: JobWorker, group: Sequence[str]) -> bool:
    """Return whether a worker's end belongs to the round of `group`: it is judged here, not slot by slot."""
    return worker.name in group and worker.cause in OWN


def gang_order(members: Sequence[JobWorker], restarts: int, saved: str) -> GangOrder:
    """Return the order for the processes of a round whose `members` are sorted by rank."""
    addresses = {w.host: host_of(w.report.store) for w in reversed(members)}
    hosts = dict.fromkeys(w.host for w in members)
    return GangOrder(tuple(addresses[host] for host in hosts), restarts, saved)
