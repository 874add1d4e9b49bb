"""Cost of booting: the money paid for worker hosts before they could work. Pure.

A boot is a run of a machine until the agent on it has joined; its cost is part of the cost of that run. A machine that
never joined has cost nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from spotfleet.model import BootStages


@dataclass(frozen=True)
class BootLine:
    """One boot of a worker host."""

    host: str
    pool: str
    market: str
    asked_at: float | None  # the launch request; None: the cloud or its user started the machine again
    running_at: float  # its bill begins
    joined_at: float | None  # None: no agent has joined
    first_step_at: float | None  # None: it has made no step in a job, or an earlier release wrote the ledger
    stages: BootStages | None
    seconds: int  # billed before it joined
    micros: int  # the cost of these

    @property
    def took_s(self) -> float | None:
        """Seconds from the request, or from the machine's start, until its agent had joined."""
        if self.joined_at is None:
            return None
        return self.joined_at - (self.running_at if self.asked_at is None else min(self.asked_at, self.joined_at))


@dataclass(frozen=True)
class PoolBoots:
    """Boots in one pool."""

    pool: str
    boots: int
    joined: int  # the others have ended before, or still boot
    seconds: int
    micros: int
    median_s: float | None  # from the request until the agent had joined; None: none has joined


def boots_by_pool(boots: Iterable[BootLine]) -> tuple[PoolBoots, ...]:
    """Return the boots of each pool, the dearest first; they add up to all boots."""
    found: dict[str, list[BootLine]] = {}
    for boot in boots:
        found.setdefault(boot.pool, []).append(boot)
    rows = [PoolBoots(pool, len(of), sum(b.joined_at is not None for b in of), sum(b.seconds for b in of),
                      sum(b.micros for b in of), median_s(of)) for pool, of in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.micros, row.pool)))


def median_s(boots: Iterable[BootLine]) -> float | None:
    """Return the median of `took_s`; None if no agent has joined."""
    took = [seconds for boot in boots if (seconds := boot.took_s) is not None]
    return round(median(took), 2) if took else None
