"""Helpers of all formats: errors that name the place, numbers, names of zones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TypeVar

from spotfleet.errors import UsageError

V = TypeVar("V")

MOST_HOSTS = 1_000_000  # more in one pool is no count of hosts
MOST_MICROS_H = 10_000 * 1_000_000  # no machine costs as much per hour
DAY_S = 86400.0
PROVIDERS = (  # clouds, by the form of their zone names
    (re.compile(r"[a-z]{2}(-gov)?-[a-z]+-\d[a-z]"), "aws"),
    (re.compile(r"[a-z]+-[a-z]+\d+-[a-z]"), "gcp"),
)


def wrong(place: Path | str, what: str, hint: str) -> UsageError:
    return UsageError(f"{place}: {what}", hint=hint)


def steps(points: Iterable[tuple[float, V]]) -> tuple[tuple[float, V], ...]:
    """Return a step function without redundant points; of several points at one instant the last counts."""
    kept: list[tuple[float, V]] = []
    for at, value in points:
        if kept and kept[-1][0] == at:
            kept.pop()
        if not kept or kept[-1][1] != value:
            kept.append((at, value))
    return tuple(kept)


def hosts(value: Any, place: str) -> int:
    """Parse a count of hosts. 3.0 is one, True is not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise wrong(place, f"{value!r} is no number of hosts", "each value counts the spot hosts that can be held")
    if value != int(value):
        raise wrong(place, f"{value!r} is a fraction, not a number of hosts",
                    "give counts, not shares or probabilities of being available")
    if not 0 <= value <= MOST_HOSTS:
        raise wrong(place, f"{value!r} is no number of hosts", f"counts lie between 0 and {MOST_HOSTS}")
    return int(value)


def micros(value: Any, place: str) -> int:
    """Return micro-dollars of a price in dollars, a number or a text such as "$0.24552"."""
    text = value.strip().removeprefix("$") if isinstance(value, str) else repr(value)
    try:
        price = Decimal(text) if not isinstance(value, bool) else Decimal("NaN")
    except InvalidOperation:
        price = Decimal("NaN")
    if not price.is_finite():
        raise wrong(place, f"{value!r} is no price", "prices are US dollars per hour, such as 0.918")
    amount = int((price * 1_000_000).to_integral_value())
    if not 0 <= amount <= MOST_MICROS_H:
        raise wrong(place, f"a price of {value!r} per hour", "prices are US dollars per hour, such as 0.918")
    return amount


def instant(text: Any, place: str) -> float:
    """Return Unix seconds of an ISO date or time; one without a zone is UTC."""
    try:
        at = datetime.fromisoformat(str(text).strip().replace(" ", "T"))
    except ValueError:
        raise wrong(place, f"{text!r} is no date or time", "write it as 2020-03-23T14:39:14Z") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def where(zone: str) -> tuple[str, str]:
    """Return provider and region of a zone, "" for each that its name does not contain."""
    for shape, provider in PROVIDERS:
        if shape.fullmatch(zone):
            return provider, zone[:-1] if provider == "aws" else zone.rpartition("-")[0]
    return "", ""
