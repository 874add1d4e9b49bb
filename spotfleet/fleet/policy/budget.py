"""When a fleet that may cost so much must end, so that ending fits in too. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spotfleet.model import Need, Nodes, Offer

ENDING_S = 300.0  # a last checkpoint (15 s), drains (at most 120 s), ends and billed minutes, with room to spare
WARN = (80, 95)  # percent of what can be spent until the end has to begin


@dataclass(frozen=True)
class Purse:
    """All in micro-dollars; `burn` an hour."""

    limit: int
    spent: int
    burn: int  # of all machines
    kept_burn: int = 0  # of the machine that keeps the results when the fleet has ended by itself ...
    kept_s: float = 0.0  # ... for so long

    @property
    def ending(self) -> int:
        """What it takes to end in good order."""
        return math.ceil((self.burn * ENDING_S + self.kept_burn * self.kept_s) / 3600)

    @property
    def lasts_s(self) -> float:
        """Until the fleet has to begin its end."""
        left = self.limit - self.spent - self.ending
        return max(0.0, left * 3600 / self.burn) if self.burn else math.inf


def level(purse: Purse) -> int:
    """Percent that somebody should hear of: 0, 80, 95, or 100 when the fleet must end now."""
    if purse.spent + purse.ending >= purse.limit:
        return 100
    before = purse.limit - purse.ending
    return max((p for p in WARN if purse.spent * 100 >= before * p), default=0)


def said(purse: Purse) -> str:
    """Where it stands, in one sentence."""
    spent = f"{_dollars(purse.spent)} of {_dollars(purse.limit)} are spent"
    if level(purse) == 100:
        return f"{spent}, and ending in good order takes up to {_dollars(purse.ending)}"
    rest = f", which lasts {_hours(purse.lasts_s)} more" if purse.burn else ""
    return f"{spent} at {_dollars(purse.burn, 4)}/h{rest}"


def too_small(max_micros_h: int, nodes: Nodes, any_of: Sequence[Need], offers: Sequence[Offer],
              dispatcher_micros_h: int) -> str:
    """Why `nodes.min` hosts cannot be had for `max_hourly_cost`, naming the cheapest offer; "" if they can."""
    cheapest = min(offers, key=lambda o: (o.price_micros_h, o.pool), default=None)
    if not max_micros_h or cheapest is None:
        return ""
    least = dispatcher_micros_h + nodes.min * cheapest.price_micros_h
    if least <= max_micros_h:
        return ""
    dispatcher = f" and a dispatcher for {_dollars(dispatcher_micros_h, 4)}/h" if dispatcher_micros_h else ""
    return (f"{_dollars(max_micros_h, 4)}/h is less than {nodes.min} x the cheapest offer, "
            f"{_dollars(cheapest.price_micros_h, 4)}/h in {cheapest.pool},{dispatcher} cost: {_dollars(least, 4)}/h")


def _dollars(micros: int, digits: int = 2) -> str:
    return f"${micros / 1e6:,.{digits if micros >= 10_000 else 6}f}"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.0f} min"
