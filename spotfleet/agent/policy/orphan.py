"""Orphan policy: decides when a host ends itself, so that a forgotten machine stops costing money. Pure.

    IN_CONTACT --no orders for `orphan_after`, or `lifetime` is over--> SAVING --all saved, or SAVE_S--> STORING
      ^                                                                   |                                 |
      '-------------- orders again, unless it was `lifetime` -------------+---------------------------------+
    STORING --all stored, or STORE_S--> OFF, for good: workers are ended and the machine powers off

SAVING waits in this order: only rank 0 writes a checkpoint, and it needs every rank of its generation at a step
boundary. So the host of rank 0 leaves once its checkpoint is stored. A host without rank 0 trains on until its group
breaks, which happens when rank 0's host ends; if that never happens, it leaves after SAVE_S. The hosts start within
seconds of each other, because the same dispatcher fell silent to all. They need not communicate for this.

Time is counted in intervals. Each is added to `OrphanState`, which is kept on disk: neither a restart of the agent, nor
a reboot, nor another wall clock gives a host more time. An interval between two calls of `advance` counts as silence
for at most GAP_S: in a longer one the machine was stopped or asleep, and could not have received orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from spotfleet.protocol.messages import Assignment, Stage, WorkerReport

SAVE_S = 120.0  # for a last checkpoint, and for scripts that are nearly done
STORE_S = 600.0  # for a slow or absent target
GAP_S = 30.0


class OrphanPhase(Enum):
    IN_CONTACT = "heard"  # the value in life.json
    SAVING = "saving"
    STORING = "storing"
    OFF = "off"


@dataclass(frozen=True)
class Limits:
    """Time limits of a host. 0: none."""

    orphan_after_s: float = 0.0
    lifetime_s: float = 0.0


@dataclass(frozen=True)
class Instant:
    """A point in time since a boot of the machine."""

    boot: str  # identifies the boot
    at: float  # seconds since then, including suspension


@dataclass(frozen=True)
class OrphanState:
    """Persistent state of a host's own end."""

    now: Instant
    age_s: float = 0.0  # since the agent first ran on this host
    silent_s: float = 0.0  # since a dispatcher sent orders, or since the first start
    phase: OrphanPhase = OrphanPhase.IN_CONTACT
    phase_s: float = 0.0
    why: str = ""  # reason for the host's end


@dataclass(frozen=True)
class OrphanObservation:
    """Input of one call of `advance`."""

    has_orders: bool  # orders have come since the last call
    unsaved: str = ""  # what SAVING still waits for, in words; empty: nothing
    unstored: str = ""  # the same for STORING


@dataclass(frozen=True)
class LiveWorker:
    """A worker of this host whose process lives."""

    report: WorkerReport
    assignment: Assignment | None


def with_elapsed(life: OrphanState, now: Instant) -> OrphanState:
    """Add the time until `now` to `life`. After a reboot at least the time since the reboot has passed."""
    same = now.boot == life.now.boot and now.at >= life.now.at
    gone_s = max(0.0, now.at - life.now.at if same else now.at)
    counted_s = min(gone_s, GAP_S)
    return replace(life, now=now, age_s=life.age_s + gone_s, silent_s=life.silent_s + counted_s,
                   phase_s=life.phase_s + counted_s)


def advance(life: OrphanState, now: Instant, observed: OrphanObservation, limits: Limits) -> OrphanState:
    """Advance the state to `now` by what the agent observes."""
    life = with_elapsed(life, now)
    if observed.has_orders:
        life = replace(life, silent_s=0.0)
    if life.phase is OrphanPhase.OFF:
        return life
    why = _reason(life, limits)
    if not why:
        return replace(life, phase=OrphanPhase.IN_CONTACT, phase_s=0.0, why="")
    match life.phase:
        case OrphanPhase.IN_CONTACT:
            return replace(life, phase=OrphanPhase.SAVING, phase_s=0.0, why=why)
        case OrphanPhase.SAVING if not observed.unsaved or life.phase_s >= SAVE_S:
            return replace(life, phase=OrphanPhase.STORING, phase_s=0.0)
        case OrphanPhase.STORING if not observed.unstored or life.phase_s >= STORE_S:
            return replace(life, phase=OrphanPhase.OFF, phase_s=0.0)
    return life


def _reason(life: OrphanState, limits: Limits) -> str:
    if limits.lifetime_s and life.age_s >= limits.lifetime_s:
        return f"it is {life.age_s:.0f} s old and max_lifetime allowed {limits.lifetime_s:.0f} s"
    if limits.orphan_after_s and life.silent_s >= limits.orphan_after_s:
        return f"it has heard from no dispatcher for {limits.orphan_after_s:g} s (orphan_after)"
    return ""


def unsaved(live_workers: Sequence[LiveWorker], asked: Mapping[str, int]) -> str:
    """Explain what is still missing before these workers may be ended; "" when nothing is.

    `asked`: the version of each worker when it was asked for a checkpoint.
    """
    led = {t.report.job for t in live_workers if t.assignment is not None and t.assignment.rank == 0}
    waits = (_waits_for(t, asked, t.report.job in led) for t in live_workers)
    return next((w for w in waits if w), "")


def _waits_for(worker: LiveWorker, asked: Mapping[str, int], led_here: bool) -> str:
    report, place = worker.report, worker.assignment
    if report.stage in (Stage.STARTING, Stage.FINISHED):  # a shell command, or the rest of a script: it ends by itself
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
