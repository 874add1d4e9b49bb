"""Completion of names in the shell, from files in SPOTFLEET_HOME alone: no request is sent. Light imports, as in
`app.py`: the shell starts this at every press of the key.

`spotfleet --install-completion` sets the shell up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import typer


def fleets(incomplete: str) -> list[str]:
    return _matching((folder.name for folder in _folders("")), incomplete)


def jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    return _matching((job for folder in _folders(_fleet(ctx)) for job in (
        *_names(folder, "jobs"), *(path.name for path in (folder / "archive" / "jobs").glob("*")))), incomplete)


def hosts(ctx: typer.Context, incomplete: str) -> list[str]:
    return _matching((host for folder in _folders(_fleet(ctx)) for host in _names(folder, "hosts")), incomplete)


def machines(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return fleets, each of which names its dispatcher's machine, and hosts."""
    return [*fleets(incomplete), *hosts(ctx, incomplete)]


def _fleet(ctx: typer.Context) -> str:
    return str(ctx.params.get("cluster") or "")


def _folders(name: str) -> list[Path]:
    home = Path(os.environ.get("SPOTFLEET_HOME") or "~/.spotfleet").expanduser()
    return [file.parent for file in sorted((home / "fleets").glob(f"{name or '[!.]*'}/fleet.json"))]


def _names(folder: Path, kind: str) -> Iterator[str]:
    """Yield the names that the last `status` found; none if the file is missing or damaged."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        yield from map(str, json.loads((folder / "names.json").read_text()).get(kind) or ())


def _matching(names: Iterator[str], incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]
