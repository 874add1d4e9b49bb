"""Ticks of an axis: positions and labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from spotfleet.words import DAY_S, MONTHS, civil, clock

TIME_STEPS_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 10_800, 21_600, 43_200,
                *(DAY_S * n for n in (1, 2, 4, 7, 14, 28, 56, 112, 365, 730, 3650)))


class TimeAxis(Enum):
    UTC = "utc"  # instants
    ELAPSED = "elapsed"  # seconds since a beginning
    SHARE = "share"  # per cent


class Unit(Enum):
    DOLLARS = "dollars"  # values are micro-dollars
    DOLLARS_H = "dollars per hour"
    HOSTS = "hosts"
    PERCENT = "percent"


@dataclass(frozen=True)
class Tick:
    at: float
    label: str
    below: str = ""  # a second line


def value_ticks(most: float, unit: Unit, wanted: int = 4) -> list[Tick]:
    """Return ticks from 0 to the first one that is not below `most`: 3 to about 2 x `wanted` of them."""
    scale = 1e6 if unit in (Unit.DOLLARS, Unit.DOLLARS_H) else 1.0
    top = max(most / scale, 1e-6 if scale > 1 else 1.0)
    rough = top / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
    if unit is Unit.HOSTS:
        step = max(1.0, math.ceil(step))
    ticks = [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]
    return [Tick(v * scale, _value(v, step, unit)) for v in ticks]


def _value(value: float, step: float, unit: Unit) -> str:
    if unit is Unit.HOSTS:
        return f"{value:,.0f}"
    if unit is Unit.PERCENT:
        return f"{value:g} %"
    if not value:
        return "$0"
    digits = 0 if step >= 1 else max(2, -math.floor(math.log10(step) + 1e-9))
    return f"${value:,.{digits}f}"


def time_ticks(begin: float, end: float, kind: TimeAxis, most: int) -> list[Tick]:
    """Return about `most` ticks at round instants between `begin` and `end`, or those of a share in percent.

    Below a tick stands the day where it begins or changes, or the year if ticks are days apart.
    """
    if kind is TimeAxis.SHARE:
        return [Tick(float(at), f"{at} %") for at in range(0, 101, 20)]
    length = max(end - begin, 1e-9)
    step = next((s for s in TIME_STEPS_S if length / s <= most), TIME_STEPS_S[-1] * math.ceil(length / 3.15e8))
    first = math.ceil((begin - 1e-3) / step) * step
    ticks, shown = [], None
    for i in range(int((end - first + 1e-3) // step) + 1 if first <= end else 0):
        at = first + i * step
        if kind is TimeAxis.ELAPSED:
            ticks.append(Tick(at, _elapsed(at, step)))
            continue
        today = civil(at)
        if step >= DAY_S:
            below = str(today[0]) if shown is None or shown[0] != today[0] else ""
            ticks.append(Tick(at, f"{today[2]} {MONTHS[today[1] - 1]}", below))
        else:
            below = f"{today[2]} {MONTHS[today[1] - 1]}" if shown != today else ""
            ticks.append(Tick(at, clock(at, seconds=step < 60), below))
        shown = today
    return ticks


def _elapsed(at: float, step: float) -> str:
    if step >= DAY_S:
        return f"{at / DAY_S:.0f} d"
    if step >= 3600:
        return f"{at / 3600:.0f} h"
    return f"{at / 60:.0f} min" if step >= 60 else f"{at:.0f} s"
