"""When a host ends itself, so that nobody pays for a machine that everybody has forgotten. Pure.

    HEARD --no orders for `orphan_after`, or `lifetime` is over--> SAVING --all saved, or SAVE_S--> STORING
      ^                                                              |                                 |
      '---------- orders again, unless it was `lifetime` ------------+---------------------------------+
    STORING --all stored, or STORE_S--> OFF, for good: workers are ended and the machine powers off

Who waits for whom in SAVING: only rank 0 writes a checkpoint, and it needs every rank of its generation to come to a
step boundary. So the host of rank 0 leaves when its checkpoint is stored, and a host without rank 0 trains on until
that is felt: its group breaks when rank 0's host ends. The clocks of hosts differ by seconds only, because the same
dispatcher fell silent to all; a host that feels nothing leaves after SAVE_S. Nothing here needs hosts to talk.

Time is counted in stretches, each added to what `Life` holds, which is kept on disk: so neither a restart of the agent,
nor a reboot, nor another wall clock gives a host more time. Of one stretch between two looks at most GAP_S count as
silence: in a longer one the machine was stopped or asleep, and nobody could have been heard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from spotfleet.messages import Assignment, Stage, WorkerReport

SAVE_S = 120.0  # for a last checkpoint, and for scripts that are nearly done
STORE_S = 600.0  # for a target that is slow, or away
GAP_S = 30.0


class Phase(Enum):
    HEARD = "heard"
    SAVING = "saving"
    STORING = "storing"
    OFF = "off"


@dataclass(frozen=True)
class Limits:
    """0: never."""

    orphan_after_s: float = 0.0
    lifetime_s: float = 0.0


@dataclass(frozen=True)
class Moment:
    boot: str  # which start of the machine
    at: float  # seconds on a clock that runs from then on, in suspension too


@dataclass(frozen=True)
class Life:
    """All that a host remembers about its end."""

    now: Moment
    age_s: float = 0.0  # since the agent first ran on this host
    silent_s: float = 0.0  # since a dispatcher gave orders, or since the beginning
    phase: Phase = Phase.HEARD
    phase_s: float = 0.0
    why: str = ""  # it ends


@dataclass(frozen=True)
class Sight:
    """What the agent sees at a look."""

    heard: bool  # orders have come since the last one
    unsaved: str = ""  # what is still to be waited for, in words; empty: nothing
    unstored: str = ""


@dataclass(frozen=True)
class Trainee:
    """A worker of this host whose process lives."""

    report: WorkerReport
    assignment: Assignment | None


def passed(life: Life, now: Moment) -> Life:
    """`life` with the time until `now` in it. After a reboot at least the time since then has passed."""
    same = now.boot == life.now.boot and now.at >= life.now.at
    gone_s = max(0.0, now.at - life.now.at if same else now.at)
    counted_s = min(gone_s, GAP_S)
    return replace(life, now=now, age_s=life.age_s + gone_s, silent_s=life.silent_s + counted_s,
                   phase_s=life.phase_s + counted_s)


def look(life: Life, now: Moment, sight: Sight, limits: Limits) -> Life:
    """What holds after a look at `now`."""
    life = passed(life, now)
    if sight.heard:
        life = replace(life, silent_s=0.0)
    if life.phase is Phase.OFF:
        return life
    why = _reason(life, limits)
    if not why:
        return replace(life, phase=Phase.HEARD, phase_s=0.0, why="")
    match life.phase:
        case Phase.HEARD:
            return replace(life, phase=Phase.SAVING, phase_s=0.0, why=why)
        case Phase.SAVING if not sight.unsaved or life.phase_s >= SAVE_S:
            return replace(life, phase=Phase.STORING, phase_s=0.0)
        case Phase.STORING if not sight.unstored or life.phase_s >= STORE_S:
            return replace(life, phase=Phase.OFF, phase_s=0.0)
    return life


def _reason(life: Life, limits: Limits) -> str:
    if limits.lifetime_s and life.age_s >= limits.lifetime_s:
        return f"it is {life.age_s:.0f} s old and max_lifetime allowed {limits.lifetime_s:.0f} s"
    if limits.orphan_after_s and life.silent_s >= limits.orphan_after_s:
        return f"it has heard from no dispatcher for {limits.orphan_after_s:g} s (orphan_after)"
    return ""


def unsaved(trainees: Sequence[Trainee], asked: Mapping[str, int]) -> str:
    """What is still to be waited for before these may be ended; "" when nothing is.

    `asked`: the version that each held when it was asked for a checkpoint.
    """
    led = {t.report.job for t in trainees if t.assignment is not None and t.assignment.rank == 0}
    waits = (_waits_for(t, asked, t.report.job in led) for t in trainees)
    return next((w for w in waits if w), "")


def _waits_for(trainee: Trainee, asked: Mapping[str, int], led_here: bool) -> str:
    report, place = trainee.report, trainee.assignment
    if report.stage in (Stage.STARTING, Stage.FINISHED):  # a command, or the rest of a script: it ends by itself
        return f"{report.worker} runs its script to the end"
    if place is None or place.rank < 0 or report.stage is not Stage.READY:
        return ""
    member = report.generation == place.generation
    if place.rank == 0:
        wanted = asked.get(report.worker, report.version)
        written = report.checkpoint is not None and report.checkpoint.version >= wanted
        return "" if written or not (member or report.version > 0) else f"{report.worker} writes a checkpoint"
    if led_here or not member:
        return ""
    return f"{report.worker} trains on until rank 0 on {place.members[0].partition('/')[0]} has its checkpoint"
