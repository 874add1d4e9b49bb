"""Which actors to ask for, and which to end. Pure.

    asked (not placed, or importing) --> idle (warm) --> runs --> gone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

FIRST_WAIT_S, LAST_WAIT_S = 1.0, 30.0


class ActorStage(IntEnum):
    ASKED = 0
    IDLE = 1
    RUNS = 2


@dataclass(frozen=True)
class StaffMember:
    """One actor that has not ended."""

    number: int
    stage: ActorStage
    member: bool = False  # in the newest generation
    leaving: bool = False  # its node goes
    wanted: bool = True  # False: evicted, or released from a node that leaves


@dataclass(frozen=True)
class StaffChange:
    start: int
    end: tuple[int, ...]


def staff_change(staff: Sequence[StaffMember], wanted: int, *, complete: bool) -> StaffChange:
    """Return the actors to start and to end so that `wanted` of them stay. Members of the newest generation are never
    ended for their number alone: Membership lets them go first. `complete`: a function has returned, so none starts."""
    end = [s.number for s in staff if not s.wanted]
    stay = [s for s in staff if s.wanted and not s.leaving]
    if complete:
        return StaffChange(0, (*end, *(s.number for s in stay if s.stage is not ActorStage.RUNS)))
    spares = sorted((s for s in stay if not s.member), key=lambda s: (s.stage, -s.number))
    surplus = spares[:max(0, len(stay) - wanted)]
    return StaffChange(max(0, wanted - len(stay)), (*end, *(s.number for s in surplus)))


class Cooldown:
    """Wait before lost workers are replaced: none at first, then doubled for each loss in a row without progress."""

    def __init__(self, bounds: tuple[float, float] | None) -> None:
        self._bounds = bounds
        self.losses = 0  # in a row, without a step in between
        self.until = float("-inf")
        self._version = 0

    def progressed(self, version: int) -> None:
        if version > self._version:
            self._version, self.losses = version, 0

    def lost(self, now: float) -> None:
        self.losses += 1
        low, high = self._bounds or (FIRST_WAIT_S, LAST_WAIT_S)
        doublings = self.losses - 1 if self._bounds else self.losses - 2
        if doublings >= 0:
            self.until = now + min(high, low * 2**min(doublings, 20))


def gpu_place(given: Sequence[str], visible: Sequence[str], count: int) -> tuple[int | None, str]:
    """Return the place of an actor's only GPU among those of its node, and CUDA_VISIBLE_DEVICES for them all.

    Ray shows each actor its own GPU. Scripts and NCCL choose by the local rank among those of the host. None and "" for
    an actor with another number of GPUs. `visible`: the ids that the node was limited to, which may be UUIDs; without
    them it has `count`.
    """
    ids = list(visible) or [str(n) for n in range(count)]
    if len(given) != 1 or given[0] not in ids:
        return None, ""
    return ids.index(given[0]), ",".join(ids)


def room_on(resources: dict[str, float], cpus: float, gpus: float) -> int:
    """Return the number of workers that a node's resources hold."""
    by_cpu = int(resources.get("CPU", 0.0) / cpus + 1e-9)
    return min(by_cpu, int(resources.get("GPU", 0.0) / gpus + 1e-9)) if gpus else by_cpu
