"""Document around charts and tables: one file, no script, no request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spotfleet.report.charts import Bar, Chart
from spotfleet.report.html import Node, SafeHtml, join, short, tag
from spotfleet.report.style import STYLE
from spotfleet.report.svg import bar, figure, mark_swatch, swatch
from spotfleet.words import money, percent

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
OPEN_ROWS = 25  # longer tables are folded
MOST_ROWS = 300  # rows of a table
LONG_NAME = 80


@dataclass(frozen=True)
class Tile:
    """Figure in large digits."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Column:
    head: str
    right: bool = False


def document(title: str, *sections: Node) -> str:
    """Return the file. `title` is escaped like all other text."""
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", short(title, LONG_NAME)), tag("link", rel="icon", href="data:,"), tag("style", SafeHtml(STYLE)))
    body = tag("body", tag("main", *sections))
    return f"<!doctype html>\n{tag('html', tag('head', head), body, lang='en')}\n"


def header(kicker: str, title: str, lines: Sequence[str], tiles: Sequence[Tile] = ()) -> SafeHtml:
    """Return the head of the page: its subject, and the result in a sentence or two."""
    shown = [tag("div", tag("dt", t.name), tag("dd", t.value, tag("small", t.note) if t.note else None), class_="tile")
             for t in tiles]
    return tag("header", tag("p", kicker, class_="kicker"), tag("h1", short(title, LONG_NAME)),
               *(tag("p", line, class_="lead" if not i else "more") for i, line in enumerate(lines)),
               tag("dl", *shown, class_="tiles") if shown else None)


def section(title: str, description: str, *content: Node) -> SafeHtml:
    """Return a section: a heading, a sentence that describes the content, and the content."""
    return tag("section", tag("h2", title), tag("p", description, class_="says") if description else None, *content)


def chart(value: Chart, heading: str = "") -> SafeHtml:
    return tag("figure", tag("h3", heading) if heading else None, legend(value), figure(value))


def legend(value: Chart) -> SafeHtml:
    items = [(swatch(b.style), b.name, b.value) for b in value.bands]
    items += [(swatch(c.style, line=True), c.name, c.value) for c in value.curves]
    items += [(mark_swatch(), value.marked, "")] if value.marks and value.marked else []
    return tag("ul", *(tag("li", sample, tag("span", short(name, LONG_NAME)), tag("b", text) if text else None)
                       for sample, name, text in items), class_="legend")


def bars(rows: Sequence[Bar], total: int, head: str) -> SafeHtml:
    """Return amounts that add up to `total`; each bar begins where the previous one ends."""
    places = digits(total)
    lines, begin = [], 0
    for row in rows:
        share = percent(row.micros, total)
        lines.append(tag(
            "tr", tag("th", tag("span", row.name, class_="name"), tag("small", row.description), scope="row"),
            tag("td", bar(begin / total if total else 0.0, row.micros / total if total else 0.0, row.style,
                          f"{row.name}: {money(row.micros, places)}, {share}"), class_="wide-cell"),
            tag("td", money(row.micros, places), class_="number"), tag("td", share, class_="number")))
        begin += row.micros
    sums = tag("tr", tag("th", "in all", scope="row"), tag("td"), tag("td", money(total, places), class_="number"),
               tag("td", "100 %" if total else "", class_="number"))
    heads = tag("tr", tag("th", head, scope="col"), tag("td"), tag("th", "dollars", scope="col", class_="number"),
                tag("th", "share", scope="col", class_="number"))
    return tag("div", tag("table", tag("thead", heads), tag("tbody", *lines), tag("tfoot", sums), class_="bars"),
               class_="scroll")


def table(title: str, description: str, columns: Sequence[Column], rows: Iterable[Sequence[str]],
          total: Sequence[str] = (), whole: str = "-o csv") -> SafeHtml:
    """Return a table of the rows in their order, at most MOST_ROWS of them (`whole`: where to get all). Long tables are
    folded until a reader opens them."""
    rows = list(rows)
    shown = rows[:MOST_ROWS]
    left = len(rows) - len(shown)
    body = [tag("tr", *(_cell(column, cell, i) for i, (column, cell) in enumerate(zip(columns, row, strict=True))))
            for row in shown]
    heads = tag("tr", *(tag("th", c.head, scope="col", class_="number" if c.right else None) for c in columns))
    foot = tag("tfoot", tag("tr", *(_cell(c, cell, i) for i, (c, cell) in enumerate(zip(columns, total, strict=True))))
               ) if total else None
    found = tag("div", tag("table", tag("caption", title), tag("thead", heads), tag("tbody", *body), foot),
                class_="scroll", tabindex="0", role="region", aria_label=title)
    more = tag("p", f"{left:,} more rows are left out here; {whole} has them all.", class_="says") if left else None
    if len(rows) > OPEN_ROWS:
        found = tag("details", tag("summary", f"{len(rows):,} rows"), found)
    return tag("section", tag("h2", title), tag("p", description, class_="says"), found, more)


def definitions(words: Iterable[tuple[str, str]]) -> SafeHtml:
    return tag("section", tag("h2", "What the words mean"),
               tag("dl", *(join(tag("dt", word), tag("dd", means)) for word, means in words), class_="words"))


def note(*lines: str) -> SafeHtml | None:
    """Return a note that a reader must know before trusting a figure."""
    return tag("aside", *(tag("p", line[:1].upper() + line[1:]) for line in lines), class_="note") if lines else None


def _cell(column: Column, text: str, place: int) -> SafeHtml:
    return tag("td" if place else "th", short(text, 2 * LONG_NAME), class_="number" if column.right else None,
               scope=None if place else "row")


def digits(total: int) -> int:
    """Return the number of decimals for the amounts of a table that add up to `total`."""
    return next((n for n, least in ((2, 10_000_000), (3, 1_000_000), (4, 10_000)) if total >= least), 6)
