"""List of amounts that vary: each mean as a bar, and a thin line from the minimum to the maximum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spotfleet.report.charts import SeriesStyle
from spotfleet.report.html import SafeHtml, tag
from spotfleet.report.page import digits
from spotfleet.words import money


@dataclass(frozen=True)
class Range:
    name: str
    style: SeriesStyle
    least: int  # micro-dollars
    mean: int
    most: int
    first: str = ""  # text of two more columns
    second: str = ""


def ranges(rows: Sequence[Range], heads: tuple[str, str]) -> SafeHtml:
    top = max((r.most for r in rows), default=0) or 1
    places = digits(top)
    body = [tag("tr", tag("th", r.name, scope="row"), tag("td", _drawn(r, top), class_="wide-cell"),
                tag("td", money(r.mean, places), class_="number"), tag("td", r.first, class_="number"),
                tag("td", r.second, class_="number")) for r in rows]
    head = tag("tr", tag("th", "strategy", scope="col"), tag("td"),
               *(tag("th", h, scope="col", class_="number") for h in ("mean", *heads)))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="bars four"), class_="scroll")


def _drawn(row: Range, top: int) -> SafeHtml:
    least, mean, most = (f"{100 * v / top:.2f}" for v in (row.least, row.mean, row.most))
    return tag("svg", tag("title", f"{row.name}: mean {money(row.mean)}, from {money(row.least)} to {money(row.most)}"),
               tag("rect", x="0", y="0", width="100", height="12", class_="bar-ground"),
               tag("rect", x="0", y="2.5", width=mean, height="7", class_=f"band {row.style.value}"),
               tag("line", x1=least, x2=most, y1="6", y2="6", class_="whisker"),
               *(tag("line", x1=x, x2=x, y1="2", y2="10", class_="whisker") for x in (least, most)),
               class_="bar", viewBox="0 0 100 12", preserveAspectRatio="none", role="img")
