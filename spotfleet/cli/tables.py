"""Tables and lines of text that fit the terminal. No output here; the only input is the terminal's width.

Text from hosts and clouds may hold escape sequences and line breaks. A cell and `shown` make one line of each text, and
`flow` leaves only its caller's line breaks, so such text cannot forge a row or command the terminal.

Into a pipe or a file a table is as wide as it needs. On a terminal that is too narrow for it, in this order:

1. columns without any content are left out;
2. the column of free text (`words`) wraps at its spaces, or continues below its row;
3. columns are left out, the least important first (`drop`), and a last line names them;
4. each row becomes a list of `column: content`.

No word is broken that fits into one line.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TextIO, TypeVar

from spotfleet.words import harmless, harmless_lines

GAP = "  "
INDENT = "    "  # indent of free text that continues below its row
LEAST_WORDS = 28  # characters: a column of free text that would be narrower continues below its row


def columns(stream: TextIO | None = None) -> int:
    """Return the width of the terminal behind `stream` (default: stdout); 0, for no limit, if it is no terminal."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return 0
    try:
        return int(os.environ.get("COLUMNS", "")) or os.get_terminal_size(stream.fileno()).columns
    except (ValueError, OSError):
        pass
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (ValueError, OSError):
        return 0


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = (), *,
          drop: Sequence[str] = (), words: str = "", width: int | None = None) -> str:
    """Format columns with two spaces between them. `right`: names of right-aligned columns."""
    grid = _Grid(tuple(head), tuple(tuple(harmless(str(cell)) for cell in row) for row in rows), frozenset(right))
    return "\n".join(_fitted(grid, tuple(drop), words, columns() if width is None else width))


def flow(text: str, width: int | None = None) -> str:
    """Wrap lines of prose at spaces where they are longer than the terminal is wide."""
    width = columns() if width is None else width
    return "\n".join(part for line in harmless_lines(text).split("\n") for part in _flowed(line, width))


T = TypeVar("T")


def shown(value: T) -> T:
    """Return `value` with each text in it as one harmless line: before a line of prose is made of it."""
    if isinstance(value, str):
        return harmless(value) if type(value) is str else value  # type: ignore[return-value]  # enums stay
    if isinstance(value, tuple):
        return tuple(map(shown, value))  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: shown(getattr(value, f.name)) for f in fields(value) if f.init})
    return value


@dataclass(frozen=True)
class _Grid:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str]

    @property
    def widths(self) -> list[int]:
        return [max(len(line[i]) for line in (self.head, *self.rows)) for i in range(len(self.head))]

    @property
    def width(self) -> int:
        return sum(self.widths) + len(GAP) * (len(self.head) - 1)

    def lines(self) -> list[str]:
        text, widths = [], self.widths
        for line in (self.head, *self.rows):
            cells = [c.rjust(w) if h in self.right else c.ljust(w)
                     for c, w, h in zip(line, widths, self.head, strict=True)]
            text.append(GAP.join(cells).rstrip())
        return text

    def without(self, names: Iterable[str]) -> _Grid:
        kept = [i for i, name in enumerate(self.head) if name not in set(names)]
        return _Grid(tuple(self.head[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in self.rows),
                     self.right)

    def column(self, name: str) -> list[str]:
        return [row[self.head.index(name)] for row in self.rows] if name in self.head else []


def _fitted(grid: _Grid, drop: tuple[str, ...], words: str, width: int) -> list[str]:
    if not width or grid.width <= width:
        return grid.lines()
    grid = grid.without([name for name in grid.head[1:] if not any(c.strip("-") for c in grid.column(name))])
    for dropped in range(len(drop) + 1):
        gone = [name for name in drop[:dropped] if name in grid.head]
        if (lines := _narrow(grid.without(gone), words, width)) is not None:
            return [*lines, *(_flowed(f"(not shown at this width: {', '.join(gone)})", width) if gone else [])]
    return _records(grid, width)


def _narrow(grid: _Grid, words: str, width: int) -> list[str] | None:
    """Return all columns in `width`, with only `words` wrapped; None if that is impossible."""
    if grid.width <= width:
        return grid.lines()
    texts, rest = grid.column(words), grid.without([words])
    if not words or not texts or rest.width > width:
        return None
    room = width - rest.width - len(GAP)
    if room >= max(min(LEAST_WORDS, max(map(len, texts))), len(words), *map(_longest, texts)):
        lines = rest.lines()
        found = [f"{lines[0].ljust(rest.width)}{GAP}{words}"]
        for line, text in zip(lines[1:], texts, strict=True):
            first, *more = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
            found.append(f"{line.ljust(rest.width)}{GAP}{first}".rstrip())
            found += [" " * (rest.width + len(GAP)) + part for part in more]
        return found
    lines = rest.lines()
    found = lines[:1]
    for line, text in zip(lines[1:], texts, strict=True):
        found += [line, *(_wrapped(text, width, INDENT, INDENT) if text.strip("-") else [])]
    return found


def _records(grid: _Grid, width: int) -> list[str]:
    found: list[str] = []
    for row in grid.rows:
        found += [""] if found else []
        for number, (name, cell) in enumerate(zip(grid.head, row, strict=True)):
            if cell:
                found += _wrapped(f"{name}: {cell}" if name else cell, width, GAP if number else "", INDENT)
    return found


def _flowed(line: str, width: int) -> list[str]:
    if not width or len(line) <= width:
        return [line]
    indent = line[:len(line) - len(line.lstrip())]
    return _wrapped(line.lstrip(), width, indent, indent + GAP)


def _wrapped(text: str, width: int, first: str, more: str) -> list[str]:
    """Wrap at spaces; indent, unless a word fits only without indentation. A word that is too long for any line, such
    as a path, stays whole, so that it can be copied."""
    if width >= _longest(text) > width - max(len(first), len(more)):
        first = more = ""
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=more, break_on_hyphens=False,
                         break_long_words=False)


def _longest(text: str) -> int:
    return max(map(len, text.split()), default=0)
