"""Cost limit of a fleet: when it must end, so that the shutdown fits in too. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spotfleet.model import Nodes, Offer
from spotfleet.words import about, dollars

ENDING_S = 300.0  # a last checkpoint (15 s), drains (at most 120 s), terminations and billed minutes, with a reserve
WARN = (80, 95)  # percent of the money available until the shutdown must begin


@dataclass(frozen=True)
class Budget:
    """Money limit and spending, in micro-dollars; `burn` per hour."""

    limit: int
    spent: int
    burn: int  # cost of all machines
    kept_burn: int = 0  # cost of the machine that keeps the results after the fleet has ended by itself ...
    kept_s: float = 0.0  # ... for so long

    @property
    def ending(self) -> int:
        """Cost of an orderly shutdown."""
        return math.ceil((self.burn * ENDING_S + self.kept_burn * self.kept_s) / 3600)

    @property
    def lasts_s(self) -> float:
        """Seconds until the shutdown must begin."""
        left = self.limit - self.spent - self.ending
        return max(0.0, left * 3600 / self.burn) if self.burn else math.inf


def level(budget: Budget) -> int:
    """Return the percent to report: 0, 80, 95, or 100 when the fleet must end now."""
    if budget.spent + budget.ending >= budget.limit:
        return 100
    before = budget.limit - budget.ending
    return max((p for p in WARN if budget.spent * 100 >= before * p), default=0)


def describe(budget: Budget) -> str:
    """Return the state of the budget in one sentence."""
    spent = f"{_dollars(budget.spent)} of {_dollars(budget.limit)} are spent"
    if level(budget) == 100:
        return f"{spent}, and a clean shutdown takes up to {_dollars(budget.ending)}"
    rest = f", which lasts {about(budget.lasts_s)} more" if budget.burn else ""
    return f"{spent} at {_dollars(budget.burn, 4)}/h{rest}"


def too_small(max_micros_h: int, nodes: Nodes, offers: Sequence[Offer], dispatcher_micros_h: int) -> str:
    """Return why `max_hourly_cost` is too low for `nodes.min` hosts, at least one, with the cheapest offer; "" if it
    suffices."""
    cheapest = min(offers, key=lambda o: (o.price_micros_h, o.pool), default=None)
    if not max_micros_h or cheapest is None:
        return ""
    hosts = max(1, nodes.min)  # with none at first, too: a job could never have one
    least = dispatcher_micros_h + hosts * cheapest.price_micros_h
    if least <= max_micros_h:
        return ""
    dispatcher = f" and a dispatcher for {_dollars(dispatcher_micros_h, 4)}/h" if dispatcher_micros_h else ""
    return (f"{_dollars(max_micros_h, 4)}/h is less than {hosts} x the cheapest offer, "
            f"{_dollars(cheapest.price_micros_h, 4)}/h in {cheapest.pool},{dispatcher} cost: {_dollars(least, 4)}/h")


def _dollars(micros: int, digits: int = 2) -> str:
    return dollars(micros, digits if micros >= 10_000 else 6)
