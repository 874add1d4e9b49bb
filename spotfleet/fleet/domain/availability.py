"""Spot availability as the fleet observed it: periods with and without available hosts. Pure.

A new fleet has few observations, so estimates start from a prior: BELIEVED_LOSSES in BELIEVED_S, half of it available.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 256  # periods; more add little to a forecast, and a fleet may live for months
BELIEVED_LOSSES = 4
BELIEVED_S = 8 * 3600.0


@dataclass(frozen=True)
class AvailabilityPeriod:
    """Period in which spot hosts for the fleet's needs were observed as available, or as not available."""

    available: bool
    since: float
    until: float


@dataclass(frozen=True)
class AvailabilityHistory:
    """Observed periods, the newest last; the last one is still going on."""

    periods: tuple[AvailabilityPeriod, ...] = ()


def observe(history: AvailabilityHistory, now: float, available: bool) -> AvailabilityHistory:
    """Return the history after one observation at `now` (Unix seconds) of whether spot hosts are available.

    A period lasts until the opposite is observed. An observation older than the history is ignored.
    """
    periods = history.periods
    if not periods:
        return AvailabilityHistory((AvailabilityPeriod(available, now, now),))
    last = periods[-1]
    if now < last.until:
        return history
    extended = AvailabilityPeriod(last.available, last.since, now)
    if last.available == available:
        return AvailabilityHistory((*periods[:-1], extended))
    return AvailabilityHistory((*periods[:-1], extended, AvailabilityPeriod(available, now, now))[-KEPT:])


def is_available(spot: int, room: int | None, hosts: int) -> bool:
    """Return whether spot hosts count as available: the fleet has, or could launch, at least half of its target."""
    return 2 * (spot + (hosts if room is None else room)) >= hosts


def losses_per_s(history: AvailabilityHistory) -> float:
    """Return how often availability ended, per second of all observed time."""
    periods = history.periods
    if not periods:
        return BELIEVED_LOSSES / BELIEVED_S
    lost = (len(periods) - (0 if periods[0].available else 1)) // 2
    return (lost + BELIEVED_LOSSES) / (periods[-1].until - periods[0].since + BELIEVED_S)


def expected_s(history: AvailabilityHistory) -> float:
    """Return for how many more seconds hosts are expected to be available, if they are available now.

    This is the mean remaining length of former periods at the present one's age. It grows with that age where there
    are many short periods and a few long ones.
    """
    periods = history.periods
    age = periods[-1].until - periods[-1].since if periods else 0.0
    left, count = 0.5 * BELIEVED_S + BELIEVED_LOSSES * age, BELIEVED_LOSSES
    for period in periods[:-1]:
        if period.available and period.until - period.since > age:
            left += period.until - period.since - age
            count += 1
    return left / count
