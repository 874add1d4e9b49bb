"""The tables of `docs/recovery.md`: every file in a dispatcher's home and in a host's folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "recovery.md"
DISPATCHER, HOST = "### In the dispatcher's home", "### In a host's folder"
COLUMNS = 4


@dataclass(frozen=True)
class FileRow:
    names: tuple[str, ...]  # with PLACEHOLDERS, and ** for anything
    writer: str
    loss: str
    damage: str


def rows(heading: str) -> list[FileRow]:
    """The rows below a heading of the document."""
    section = DOCUMENT.read_text().partition(f"{heading}\n")[2].partition("\n#")[0]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")]
    assert cells and all(len(row) == COLUMNS and all(row) for row in cells), f"{heading}: a table of {COLUMNS} columns"
    return [FileRow(tuple(re.findall(r"`([^`]+)`", row[0])), *row[1:]) for row in cells]


def unknown(folder: Path, heading: str) -> list[str]:
    """The files below `folder` that the table does not have."""
    patterns = [_pattern(name) for row in rows(heading) for name in row.names]
    files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir() or p.is_symlink()]
    return sorted(name for name in files if not any(p.fullmatch(name) for p in patterns))


def _pattern(name: str) -> re.Pattern[str]:
    """"jobs/JOB/job.json" as an expression: a word in capitals is one part of a path, ** is anything."""
    found = re.sub(r"\\\*\\\*", ".*", re.escape(name))
    return re.compile(re.sub(r"\b[A-Z][A-Z0-9]+\b", "[^/]+", found))
