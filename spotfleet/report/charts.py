"""Values of a chart, without any drawing. Instants are Unix seconds, or seconds since a beginning."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from spotfleet.report.axes import TimeAxis, Unit

Points = tuple[tuple[float, float], ...]
MOST_POINTS = 500


class SeriesStyle(Enum):
    """Drawing style: a colour, and a shape that distinguishes it without colour."""

    SPOT = "spot"
    ON_DEMAND = "ondemand"  # hatched, or dashed
    PLAIN = "plain"  # a thin dotted line
    USEFUL = "useful"
    WASTED = "wasted"
    AROUND = "around"
    FIRST = "first"
    SECOND = "second"
    THIRD = "third"
    FOURTH = "fourth"


@dataclass(frozen=True)
class Curve:
    """Line of a chart. `steps`: each value holds until the next point; else straight between them."""

    name: str
    style: SeriesStyle
    points: Points
    steps: bool = False
    filled: bool = False
    value: str = ""  # shown beside its name in the legend


@dataclass(frozen=True)
class Band:
    """Layer of a stack: (instant, from, to), each valid until the next."""

    name: str
    style: SeriesStyle
    points: tuple[tuple[float, float, float], ...]
    value: str = ""


@dataclass(frozen=True)
class ChartMark:
    """Event on a chart: a triangle on the upper edge and a line down."""

    at: float
    text: str


@dataclass(frozen=True)
class Chart:
    key: str  # prefix of its elements' ids; unique in a document
    title: str
    desc: str  # description for readers who cannot see the chart
    unit: Unit
    begin: float
    end: float
    curves: tuple[Curve, ...] = ()
    bands: tuple[Band, ...] = ()
    marks: tuple[ChartMark, ...] = ()
    marked: str = ""  # legend of the marks
    clock: TimeAxis = TimeAxis.UTC
    small: bool = False  # one of several charts beside each other

    @property
    def most(self) -> float:
        """Return the highest value that must fit."""
        values = [v for c in self.curves for _, v in c.points] + [high for b in self.bands for _, _, high in b.points]
        return max(values, default=0.0)


@dataclass(frozen=True)
class Bar:
    """Row of a list of amounts."""

    name: str
    style: SeriesStyle
    micros: int
    description: str  # description in a few words
    note: str = field(default="")


def stacked(layers: Iterable[tuple[str, SeriesStyle, Points, str]]) -> tuple[Band, ...]:
    """Stack step functions: (name, look, points, legend's value), the lowest first."""
    layers = list(layers)
    instants = sorted({at for _, _, points, _ in layers for at, _ in points})
    floor = [0.0] * len(instants)
    bands = []
    for name, style, points, value in layers:
        tops = [low + step_at(points, at) for low, at in zip(floor, instants, strict=True)]
        bands.append(Band(name, style, tuple(zip(instants, floor, tops, strict=True)), value))
        floor = tops
    return tuple(bands)


def step_at(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value of a step function; 0 before its first point."""
    place = bisect_right(points, at, key=lambda point: point[0])
    return points[place - 1][1] if place else 0.0


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """Thin a curve to about `most` points, keeping every peak and trough: the first, lowest, highest and last of each
    stretch."""
    if len(points) <= most:
        return points
    size = -(-len(points) * 4 // most)
    kept: list[tuple[float, float]] = []
    for i in range(0, len(points), size):
        part = points[i:i + size]
        places = {0, len(part) - 1, min(range(len(part)), key=lambda k: part[k][1]),
                  max(range(len(part)), key=lambda k: part[k][1])}
        kept += [part[k] for k in sorted(places)]
    return tuple(kept)
