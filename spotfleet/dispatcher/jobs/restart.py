"""Restart policy for workers that ended: restart the slot, after which delay, or fail the job. Pure.

The cause decides:
- A peer's loss or a signal is the machine's fault; the first restart has no delay. Signals fail the job only when one
  slot gets SIGNAL_LIMIT of them without progress, as a script that uses all memory does. A worker that had trained
  restarts at once after a signal, any number of times, if the job progressed in between.
- The user's error fails the job once it is clear that it will recur: on every rank at once, or USER_LIMIT times in a
  row without progress. Leaving with status 0 too early is one (`failures.py`).
- A full disk is the host's fault, and so is a checkpoint that is damaged only there, and a CUDA device that is lost, or
  missing where the job trains over NCCL: the host is replaced after HOST_LIMIT failures. The job fails only when
  HOSTS_LIMIT hosts in a row had no room or device.
- A failure before the script (`setup`, `file_mounts`) is the host's fault, too: the host is replaced after SETUP_TRIES
  failures. The job fails after failures on SETUP_HOSTS hosts in a row, or when a bucket has answered SURE_ANSWERS times
  that it is not available.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum

from spotfleet.protocol.messages import STUCK_EXIT, Exit, WorkerReport

TOGETHER_S = 2.0  # crashes of a whole generation within this time have the same cause
USER_LIMIT = 3
SIGNAL_LIMIT = 5
HOST_LIMIT = 2
HOSTS_LIMIT = 3
SETUP_TRIES = 2
SETUP_HOSTS = 3
SURE_ANSWERS = 3
COOLDOWN_S = 1.0
COOLDOWN_MAX_S = 60.0
FORGET_S = 300.0  # a slot without failures for this time has a clean record again


class Cause(Enum):
    """Cause of a worker's end."""

    DONE = "done"  # the script ended normally
    PEER = "peer"  # an error that a lost peer caused
    HOST = "host"  # the host's disk is full, or its device is lost or missing
    SETUP = "setup"  # `setup` or `file_mounts` failed on the host
    USER = "user"
    SIGNAL = "signal"
    LOST = "lost"  # its host or its agent was lost


Slot = tuple[str, int]  # host, slot


@dataclass(frozen=True)
class End:
    """End of one worker."""

    worker: str
    slot: Slot
    cause: Cause
    at: float
    rank: int = -1
    error: str = ""
    stepped: bool = False  # it had completed a step
    tries: int = 0  # for Cause.SETUP: number of failures on this host
    sure: bool = False  # for Cause.SETUP: another host would get the same error


@dataclass(frozen=True)
class Strikes:
    """Recent failures of a slot."""

    count: int = 0
    signals: int = 0
    last_at: float = 0.0
    ready_at: float = 0.0  # not started again before
    version: int = -1  # the job's newest version when the slot's last worker ended


@dataclass(frozen=True)
class History:
    """Failure record of a job."""

    version: int = 0  # newest version that any worker has reported; progress clears failures
    user_ends: tuple[End, ...] = ()  # since the last progress, oldest first
    slots: dict[Slot, Strikes] = field(default_factory=dict)
    host_ends: tuple[End, ...] = ()  # ends caused by hosts
    roomless: frozenset[str] = frozenset()  # hosts without room or device since the last progress
    setups: tuple[End, ...] = ()  # failed tries since the last success anywhere; one for all workers of a try


@dataclass(frozen=True)
class JobFailure:
    """Reason to fail the job."""

    why: str
    error: str  # the traceback to show


def cause_of(exit: Exit, report: WorkerReport) -> tuple[Cause, str]:
    """Return the cause of this exit, and the text to show."""
    if exit.done:
        return Cause.DONE, ""
    if report.error:
        return _blamed(report), report.error
    if exit.code == STUCK_EXIT:
        return Cause.PEER, "it could not get free of a lost peer"
    if exit.code < 0:
        return Cause.SIGNAL, f"ended by {_signal_name(-exit.code)}"
    if exit.code == 0:
        return Cause.USER, "the process exited with status 0 before the script's end"
    return Cause.USER, f"the process exited with status {exit.code}"


def _blamed(report: WorkerReport) -> Cause:
    if report.blame_host:
        return Cause.HOST
    if report.setup_tries > 0:
        return Cause.SETUP
    return Cause.PEER if report.blame_peer else Cause.USER


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def progressed(history: History, version: int) -> History:
    """Return the record after a worker has reported `version`."""
    if version <= history.version:
        return history
    return replace(history, version=version, user_ends=(), roomless=frozenset(), setups=(),
                   slots={k: replace(s, signals=0) for k, s in history.slots.items()})


def set_up(history: History) -> History:
    """Return the record after a host has completed `setup` and `file_mounts`."""
    return replace(history, setups=()) if history.setups else history


def ended(history: History, end: End, group: frozenset[str]) -> tuple[History, JobFailure | None]:
    """Return the record after `end`, and the job's failure if it fails.

    `group`: the members of the generation, or all started workers while there is no generation.
    """
    if end.cause in (Cause.DONE, Cause.LOST):
        return history, None
    strikes = _strike(history.slots.get(end.slot, Strikes()), end, history.version)
    history = replace(history, slots={**history.slots, end.slot: strikes})
    if end.cause is Cause.SIGNAL and strikes.signals >= SIGNAL_LIMIT:
        return history, JobFailure(f"{end.worker} {end.error} for the {strikes.signals}th time without progress"
                               " (out of memory?)", end.error)
    if end.cause is Cause.HOST:
        history = replace(history, host_ends=(*history.host_ends, end), roomless=history.roomless | {end.slot[0]})
        failed = JobFailure(f"{len(history.roomless)} hosts in a row {_lack(_reason(end))}", end.error)
        return history, failed if len(history.roomless) >= HOSTS_LIMIT else None
    if end.cause is Cause.SETUP:
        return _setup_verdict(history, end)
    if end.cause is not Cause.USER:
        return history, None
    history = replace(history, user_ends=(*history.user_ends, end))
    return history, _user_verdict(history, group)


def _setup_verdict(history: History, end: End) -> tuple[History, JobFailure | None]:
    known = {(e.slot[0], e.tries) for e in (*history.setups, *history.host_ends) if e.cause is Cause.SETUP}
    if (end.slot[0], end.tries) in known:
        return history, None  # the host's workers waited for the same try
    setups = (*history.setups, end)
    history = replace(history, setups=setups, host_ends=history.host_ends if end.sure else (*history.host_ends, end))
    hosts, what = {e.slot[0] for e in setups}, first_line(end.error)
    if len(sure := [e for e in setups if e.sure]) >= SURE_ANSWERS:
        asked = f"asked {len(sure)} times, from {len({e.slot[0] for e in sure})} hosts"
        return history, JobFailure(f"{what} ({asked})", end.error)
    if len(hosts) >= SETUP_HOSTS:
        return history, JobFailure(f"on {len(hosts)} hosts in a row: {what}", end.error)
    return history, None


def first_line(error: str) -> str:
    return error.partition("\n")[0]


def _strike(strikes: Strikes, end: End, version: int) -> Strikes:
    if end.at - strikes.last_at > FORGET_S:
        strikes = Strikes()
    if end.cause in (Cause.SIGNAL, Cause.PEER) and end.stepped and version > strikes.version:
        return replace(strikes, last_at=end.at, ready_at=end.at, version=version)  # not the script's fault
    free = strikes.count == 0 and end.cause is not Cause.USER
    exponent = strikes.count if end.cause is Cause.USER else strikes.count - 1
    wait_s = 0.0 if free else min(COOLDOWN_MAX_S, COOLDOWN_S * 2 ** min(exponent, 10))
    return Strikes(strikes.count + 1, strikes.signals + (end.cause is Cause.SIGNAL), end.at, end.at + wait_s, version)


def _user_verdict(history: History, group: frozenset[str]) -> JobFailure | None:
    ends = history.user_ends
    together = [e for e in ends if ends[-1].at - e.at <= TOGETHER_S]
    if group and group <= {e.worker for e in together}:
        lowest = _lowest(together)
        return JobFailure(f"the script failed{' on every worker' if len(group) > 1 else ''}", lowest.error)
    if len(ends) >= USER_LIMIT:
        lowest = _lowest(list(ends))
        return JobFailure(f"the script failed {len(ends)} times in a row without progress", lowest.error)
    return None


def _lowest(ends: list[End]) -> End:
    return min(ends, key=lambda e: (e.rank if e.rank >= 0 else 1 << 30, e.worker))


def unfit(history: History, now: float) -> dict[str, str]:
    """Return the hosts to replace, each with the reason."""
    lately = [end for end in history.host_ends if now - end.at <= FORGET_S or end.cause is Cause.SETUP]
    counts = Counter(end.slot[0] for end in lately)
    return {end.slot[0]: f"{counts[end.slot[0]]} workers failed there: {_reason(end)}"
            for end in lately if counts[end.slot[0]] >= (SETUP_TRIES if end.cause is Cause.SETUP else HOST_LIMIT)}


def _lack(reason: str) -> str:
    if "arrived damaged" in reason:
        return "received a damaged checkpoint, though the dispatcher's file is whole"
    return f"had no {'working CUDA device' if 'CUDA' in reason else 'room on their disks'}"


def _reason(end: End) -> str:
    if end.cause is Cause.SETUP:
        return first_line(end.error)
    lines = end.error.splitlines()
    return next((line for line in lines if "CUDA error" in line), lines[-1])  # torch adds lines of advice


def ready_at(history: History, slot: Slot) -> float:
    """Return the time from which `slot` may start its next worker."""
    return history.slots.get(slot, Strikes()).ready_at
