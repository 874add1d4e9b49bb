"""What to do about a worker that ended: start its slot again, after how long, or fail the job. Pure.

Who is to blame decides. A peer's loss and a signal are the machine's fault and cost nothing at first; the user's own
error fails the job as soon as it is clear that it will come back: on every rank at once, or `USER_LIMIT` times in a row
without progress. Signals fail the job only when one slot gets `SIGNAL_LIMIT` of them without progress, which is how a
script that eats all memory looks; a worker that has trained is started again at once after a signal, as often as that
happens, if the job came further in between. A host whose disk is full is to blame itself: after HOST_LIMIT failures it
is to be replaced, and the job fails only when HOSTS_LIMIT hosts in a row had no room for it. So is a host on which what
comes before the script fails SETUP_TRIES times; when it has failed on SETUP_HOSTS hosts in a row, or a bucket has
answered SURE_ANSWERS times that it is not to be had, the job fails: then it is not the host.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum

from spotfleet.messages import STUCK_EXIT, Exit, WorkerReport

TOGETHER_S = 2.0  # crashes of a whole generation within this time have one cause
USER_LIMIT = 3
SIGNAL_LIMIT = 5
HOST_LIMIT = 2
HOSTS_LIMIT = 3
SETUP_TRIES = 2
SETUP_HOSTS = 3
SURE_ANSWERS = 3
COOLDOWN_S = 1.0
COOLDOWN_MAX_S = 60.0
FORGET_S = 300.0  # a slot that has been well for so long starts from nothing again


class Cause(Enum):
    DONE = "done"  # the script ran to its end
    PEER = "peer"  # an error that a lost peer caused
    HOST = "host"  # its host has no room
    SETUP = "setup"  # what comes before the script failed on its host
    USER = "user"
    SIGNAL = "signal"
    LOST = "lost"  # with its host or its agent


Slot = tuple[str, int]  # host, slot


@dataclass(frozen=True)
class End:
    """One worker's end."""

    worker: str
    slot: Slot
    cause: Cause
    at: float
    rank: int = -1
    error: str = ""
    stepped: bool = False  # it had completed a step
    tries: int = 0  # of Cause.SETUP: how often it has failed on this host
    sure: bool = False  # of Cause.SETUP: another host would hear the same


@dataclass(frozen=True)
class Strikes:
    """What a slot has done wrong lately."""

    count: int = 0
    signals: int = 0
    last_at: float = 0.0
    ready_at: float = 0.0  # not started again before
    version: int = -1  # the newest of the job when its last worker ended


@dataclass(frozen=True)
class History:
    """A job's record of failures."""

    version: int = 0  # newest any worker has reported: progress forgives
    user_ends: tuple[End, ...] = ()  # since the last progress, oldest first
    slots: dict[Slot, Strikes] = field(default_factory=dict)
    host_ends: tuple[End, ...] = ()  # for which hosts are to blame
    roomless: frozenset[str] = frozenset()  # hosts without room since the last progress
    setups: tuple[End, ...] = ()  # tries that failed since one has succeeded anywhere; of workers that shared one, one


@dataclass(frozen=True)
class Failed:
    why: str
    error: str  # the traceback to show


def cause_of(exit: Exit, report: WorkerReport) -> tuple[Cause, str]:
    """Who is to blame for this exit, and the text to show."""
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
    """The record after some worker has reported `version`."""
    if version <= history.version:
        return history
    return replace(history, version=version, user_ends=(), roomless=frozenset(), setups=(),
                   slots={k: replace(s, signals=0) for k, s in history.slots.items()})


def set_up(history: History) -> History:
    """The record after some host has come through what is before the script."""
    return replace(history, setups=()) if history.setups else history


def ended(history: History, end: End, group: frozenset[str]) -> tuple[History, Failed | None]:
    """The record after `end`, and whether the job fails of it.

    `group`: the members of the generation, or all workers that started while there is none.
    """
    if end.cause in (Cause.DONE, Cause.LOST):
        return history, None
    strikes = _strike(history.slots.get(end.slot, Strikes()), end, history.version)
    history = replace(history, slots={**history.slots, end.slot: strikes})
    if end.cause is Cause.SIGNAL and strikes.signals >= SIGNAL_LIMIT:
        return history, Failed(f"{end.worker} {end.error} for the {strikes.signals}th time without progress"
                               " (out of memory?)", end.error)
    if end.cause is Cause.HOST:
        history = replace(history, host_ends=(*history.host_ends, end), roomless=history.roomless | {end.slot[0]})
        failed = Failed(f"{len(history.roomless)} hosts in a row had no room on their disks", end.error)
        return history, failed if len(history.roomless) >= HOSTS_LIMIT else None
    if end.cause is Cause.SETUP:
        return _setup_verdict(history, end)
    if end.cause is not Cause.USER:
        return history, None
    history = replace(history, user_ends=(*history.user_ends, end))
    return history, _user_verdict(history, group)


def _setup_verdict(history: History, end: End) -> tuple[History, Failed | None]:
    known = {(e.slot[0], e.tries) for e in (*history.setups, *history.host_ends) if e.cause is Cause.SETUP}
    if (end.slot[0], end.tries) in known:
        return history, None  # workers of one host waited for one try
    setups = (*history.setups, end)
    history = replace(history, setups=setups, host_ends=history.host_ends if end.sure else (*history.host_ends, end))
    hosts, what = {e.slot[0] for e in setups}, first_line(end.error)
    if len(sure := [e for e in setups if e.sure]) >= SURE_ANSWERS:
        asked = f"asked {len(sure)} times, from {len({e.slot[0] for e in sure})} hosts"
        return history, Failed(f"{what} ({asked})", end.error)
    if len(hosts) >= SETUP_HOSTS:
        return history, Failed(f"on {len(hosts)} hosts in a row: {what}", end.error)
    return history, None


def first_line(error: str) -> str:
    return error.partition("\n")[0]


def _strike(strikes: Strikes, end: End, version: int) -> Strikes:
    if end.at - strikes.last_at > FORGET_S:
        strikes = Strikes()
    if end.cause in (Cause.SIGNAL, Cause.PEER) and end.stepped and version > strikes.version:
        return replace(strikes, last_at=end.at, ready_at=end.at, version=version)  # not the script's doing
    free = strikes.count == 0 and end.cause is not Cause.USER
    exponent = strikes.count if end.cause is Cause.USER else strikes.count - 1
    wait_s = 0.0 if free else min(COOLDOWN_MAX_S, COOLDOWN_S * 2 ** min(exponent, 10))
    return Strikes(strikes.count + 1, strikes.signals + (end.cause is Cause.SIGNAL), end.at, end.at + wait_s, version)


def _user_verdict(history: History, group: frozenset[str]) -> Failed | None:
    ends = history.user_ends
    together = [e for e in ends if ends[-1].at - e.at <= TOGETHER_S]
    if group and group <= {e.worker for e in together}:
        lowest = _lowest(together)
        return Failed(f"the script failed{' on every worker' if len(group) > 1 else ''}", lowest.error)
    if len(ends) >= USER_LIMIT:
        lowest = _lowest(list(ends))
        return Failed(f"the script failed {len(ends)} times in a row without progress", lowest.error)
    return None


def _lowest(ends: list[End]) -> End:
    return min(ends, key=lambda e: (e.rank if e.rank >= 0 else 1 << 30, e.worker))


def unfit(history: History, now: float) -> dict[str, str]:
    """The hosts that are to be replaced, and why."""
    lately = [end for end in history.host_ends if now - end.at <= FORGET_S or end.cause is Cause.SETUP]
    counts = Counter(end.slot[0] for end in lately)
    return {end.slot[0]: f"{counts[end.slot[0]]} workers failed there: {_reason(end)}"
            for end in lately if counts[end.slot[0]] >= (SETUP_TRIES if end.cause is Cause.SETUP else HOST_LIMIT)}


def _reason(end: End) -> str:
    return first_line(end.error) if end.cause is Cause.SETUP else end.error.splitlines()[-1]


def ready_at(history: History, slot: Slot) -> float:
    """When `slot` may start its next worker."""
    return history.slots.get(slot, Strikes()).ready_at
