"""Inline SVG of charts. Each is drawn twice, for wide and for narrow screens, so that its text keeps its size."""

from __future__ import annotations

from dataclasses import dataclass

from spotfleet.report.axes import Tick, time_ticks, value_ticks
from spotfleet.report.charts import Band, Chart, ChartMark, Curve, SeriesStyle
from spotfleet.report.html import SafeHtml, join, tag, text

WIDE, SMALL, NARROW = 880, 430, 340
CHARACTER = 7.2  # an upper bound of the mean width of a character of an axis, in the SVG's units
CLOSE = 3.0  # closer marks are drawn as one line
MANY = 40  # beyond this number marks have no lines: they would hide the chart


@dataclass(frozen=True)
class Frame:
    """Plot area in the drawing, and the values at its edges."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    begin: float
    end: float
    most: float

    def x(self, at: float) -> float:
        share = (at - self.begin) / (self.end - self.begin) if self.end > self.begin else 0.0
        return self.left + min(1.0, max(0.0, share)) * (self.right - self.left)

    def y(self, value: float) -> float:
        share = value / self.most if self.most else 0.0
        return self.bottom - min(1.0, max(0.0, share)) * (self.bottom - self.top)


def figure(chart: Chart) -> SafeHtml:
    """Return the chart in both sizes; style sheets show one of them."""
    return join(_draw(chart, SMALL if chart.small else WIDE, "wide"), _draw(chart, NARROW, "narrow"))


def frame(chart: Chart, width: int, ticks: list[Tick]) -> Frame:
    height = 180 if chart.small else 300 if width == WIDE else 240
    longest = max((len(label) for t in _ticks(chart, width) for label in (t.label, t.below)), default=0)
    half = longest * CHARACTER / 2 + 2
    left = max(max(len(t.label) for t in ticks) * CHARACTER + 12, half)
    return Frame(width, height, left, width - max(26, half), 24 if chart.marks else 10, height - 38, chart.begin,
                 chart.end, ticks[-1].at)


def _draw(chart: Chart, width: int, name: str) -> SafeHtml:
    key = f"{chart.key}-{name}"
    ticks = value_ticks(chart.most, chart.unit, 3 if chart.small else 4)
    f = frame(chart, width, ticks)
    hatch = tag("pattern", tag("rect", width="6", height="6", class_="hatch-ground"),
                tag("path", d="M-1 7 L7 -1 M-1 1 L1 -1 M5 7 L7 5", class_="hatch-line"),
                id=f"{key}-hatch", width="6", height="6", patternUnits="userSpaceOnUse")
    return tag(
        "svg", tag("title", chart.title, id=f"{key}-title"), tag("desc", chart.desc, id=f"{key}-desc"),
        tag("defs", hatch), _grid(f, ticks), *(_band(f, band, key) for band in chart.bands),
        *(_curve(f, curve) for curve in chart.curves), _marks(f, chart.marks), _times(f, chart),
        class_=f"chart {name}", viewBox=f"0 0 {f.width:g} {f.height:g}", role="img",
        aria_labelledby=f"{key}-title {key}-desc")


def _grid(f: Frame, ticks: list[Tick]) -> SafeHtml:
    lines = [join(tag("line", x1=_n(f.left), x2=_n(f.right), y1=_n(f.y(t.at)), y2=_n(f.y(t.at)),
                      class_="axis" if not t.at else "grid"),
                  _text(f.left - 8, f.y(t.at) + 4, t.label, "end")) for t in ticks]
    return tag("g", *lines)


def _times(f: Frame, chart: Chart) -> SafeHtml:
    return tag("g", *(join(
        tag("line", x1=_n(f.x(t.at)), x2=_n(f.x(t.at)), y1=_n(f.bottom), y2=_n(f.bottom + 5), class_="axis"),
        _text(f.x(t.at), f.bottom + 18, t.label, "middle"),
        _text(f.x(t.at), f.bottom + 33, t.below, "middle") if t.below else None) for t in _ticks(chart, f.width)))


def _ticks(chart: Chart, width: float) -> list[Tick]:
    return time_ticks(chart.begin, chart.end, chart.clock, 9 if width == WIDE else 5)


def _curve(f: Frame, curve: Curve) -> SafeHtml:
    if not curve.points:
        return SafeHtml()
    path = _path(f, list(curve.points), curve.steps)
    area = None
    if curve.filled:
        area = tag("path", class_=f"area {curve.style.value}",
                   d=f"{path} V{_n(f.bottom)} H{_n(f.x(curve.points[0][0]))} Z")
    return join(area, tag("path", d=path, class_=f"line {curve.style.value}"))


def _path(f: Frame, points: list[tuple[float, float]], steps: bool) -> str:
    """Return a path; a step function continues to the right edge."""
    first, *rest = points
    data = f"M{_n(f.x(first[0]))} {_n(f.y(first[1]))}"
    for at, value in rest:
        data += f" H{_n(f.x(at))} V{_n(f.y(value))}" if steps else f" L{_n(f.x(at))} {_n(f.y(value))}"
    return data + (f" H{_n(f.x(f.end))}" if steps else "")


def _band(f: Frame, band: Band, key: str) -> SafeHtml:
    """Draw a band only where it has a height: the outline of an empty band would be visible."""
    ends = [*(at for at, _, _ in band.points[1:]), f.end]
    parts: list[list[tuple[float, float, float, float]]] = [[]]
    for (at, low, high), end in zip(band.points, ends, strict=True):
        if high > low and end > at:
            parts[-1].append((at, end, low, high))
        elif parts[-1]:
            parts.append([])
    path = " ".join(_outline(f, part) for part in parts if part)
    fill = f"url(#{key}-hatch)" if band.style is SeriesStyle.ON_DEMAND else None
    return tag("path", d=path, class_=f"band {band.style.value}", fill=fill) if path else SafeHtml()


def _outline(f: Frame, part: list[tuple[float, float, float, float]]) -> str:
    """Return an outline: forth along the upper edge, back along the lower."""
    there = "".join(f" V{_n(f.y(high))} H{_n(f.x(end))}" for _, end, _, high in part)
    back = "".join(f" V{_n(f.y(low))} H{_n(f.x(at))}" for at, _, low, _ in reversed(part))
    return f"M{_n(f.x(part[0][0]))} {_n(f.y(part[0][2]))}{there}{back} Z"


def _marks(f: Frame, marks: tuple[ChartMark, ...]) -> SafeHtml:
    """Draw marks; overlapping ones share one mark, with all their texts."""
    groups: list[list[ChartMark]] = []
    for mark in sorted(marks, key=lambda m: m.at):
        if groups and f.x(mark.at) - f.x(groups[-1][0].at) < CLOSE:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    drawn = []
    for group in groups:
        x = f.x(group[0].at)
        label = "; ".join(m.text for m in group[:8]) + (f"; and {len(group) - 8} more" if len(group) > 8 else "")
        drawn.append(tag("g", tag("title", label),
                         *(tag("line", x1=_n(x), x2=_n(x), y1=_n(f.top - 4), y2=_n(f.bottom), class_=style)
                           for style in ("mark-halo", "mark-line") if len(marks) < MANY),
                         tag("path", d=f"M{_n(x - 5)} {_n(f.top - 14)} h10 l-5 9 Z", class_="mark"), class_="event"))
    return tag("g", *drawn)


def swatch(style: SeriesStyle, *, line: bool = False) -> SafeHtml:
    """Return a sample of a look for a legend. The hatch is drawn by hand, because patterns belong to their own drawing.
    """
    if line:
        inside = tag("path", d="M0 7 H26", class_=f"line {style.value}")
    elif style is SeriesStyle.ON_DEMAND:
        inside = join(tag("rect", width="26", height="14", class_="hatch-ground"),
                      tag("path", d="M-2 14 L12 0 M6 14 L20 0 M14 14 L28 0", class_="hatch-line"))
    else:
        inside = tag("rect", width="26", height="14", class_=f"band {style.value}")
    return tag("svg", inside, class_="swatch", viewBox="0 0 26 14", aria_hidden="true")


def mark_swatch() -> SafeHtml:
    return tag("svg", tag("path", d="M8 1 h10 l-5 9 Z", class_="mark"), tag("path", d="M13 8 V14", class_="mark-line"),
               class_="swatch", viewBox="0 0 26 14", aria_hidden="true")


def bar(begin: float, length: float, style: SeriesStyle, title: str) -> SafeHtml:
    """Return a bar from `begin` on, `length` long, both as shares of the whole width. A nonzero amount is always
    visible."""
    begin, length = min(1.0, max(0.0, begin)), max(0.0, length)
    wide = max(0.4, 100 * length) if length else 0.0
    return tag("svg", tag("title", title), tag("rect", x="0", y="0", width="100", height="10", class_="bar-ground"),
               tag("rect", x=_n(min(100 * begin, 100 - wide)), y="0", width=_n(wide), height="10",
                   class_=f"band {style.value}"),
               class_="bar", viewBox="0 0 100 10", preserveAspectRatio="none", role="img")


def _text(x: float, y: float, label: str, anchor: str) -> SafeHtml:
    return tag("text", text(label), x=_n(x), y=_n(y), text_anchor=anchor)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"
