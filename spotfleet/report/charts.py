"""What a chart shows, before anything is drawn. Instants are Unix seconds, or seconds since a beginning."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from spotfleet.report.axes import Clock, Unit

Points = tuple[tuple[float, float], ...]
MOST_POINTS = 500


class Look(Enum):
    """How it is drawn: a colour, and a shape that tells it from the others without colour."""

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
    """A line. `steps`: each value holds until the next point; else straight between them."""

    name: str
    look: Look
    points: Points
    steps: bool = False
    filled: bool = False
    value: str = ""  # beside its name in the legend


@dataclass(frozen=True)
class Band:
    """A stretch of a stack: (instant, from, to), each holding until the next."""

    name: str
    look: Look
    points: tuple[tuple[float, float, float], ...]
    value: str = ""


@dataclass(frozen=True)
class Mark:
    """Something that happened: a triangle on the upper edge and a line down."""

    at: float
    text: str


@dataclass(frozen=True)
class Chart:
    key: str  # of its elements' ids; unique in a document
    title: str
    desc: str  # what it shows, for those who cannot see it
    unit: Unit
    begin: float
    end: float
    curves: tuple[Curve, ...] = ()
    bands: tuple[Band, ...] = ()
    marks: tuple[Mark, ...] = ()
    marked: str = ""  # what the marks are, for the legend
    clock: Clock = Clock.UTC
    small: bool = False  # one of several beside each other

    @property
    def most(self) -> float:
        """The highest value that must fit."""
        values = [v for c in self.curves for _, v in c.points] + [high for b in self.bands for _, _, high in b.points]
        return max(values, default=0.0)


@dataclass(frozen=True)
class Bar:
    """A row of a list of amounts."""

    name: str
    look: Look
    micros: int
    says: str  # what it is, in a few words
    note: str = field(default="")


def stacked(layers: Iterable[tuple[str, Look, Points, str]]) -> tuple[Band, ...]:
    """Step functions piled up on each other: (name, look, points, legend's value), the lowest first."""
    layers = list(layers)
    instants = sorted({at for _, _, points, _ in layers for at, _ in points})
    floor = [0.0] * len(instants)
    bands = []
    for name, look, points, value in layers:
        tops = [low + step_at(points, at) for low, at in zip(floor, instants, strict=True)]
        bands.append(Band(name, look, tuple(zip(instants, floor, tops, strict=True)), value))
        floor = tops
    return tuple(bands)


def step_at(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value of a step function; 0 before its first point."""
    place = bisect_right(points, at, key=lambda point: point[0])
    return points[place - 1][1] if place else 0.0


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most about `most` of them, with every peak and trough: of each stretch the first, lowest, highest and last."""
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
