"""Records of hosts that joined and left: Bamboo's CSV and lists of counts, Parcae's JSON lines."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from spotfleet.simulate.formats.text import MOST_HOSTS, hosts, instant, steps, where, wrong
from spotfleet.simulate.values.trace import Trace

BAMBOO = re.compile(r"\s*\d+\s*,\s*(add|remove|no-op)\s*,")
COUNTS = re.compile(r"(\d{4}-\d\d-\d\d),\s*(\d\d:\d\d:\d\d),\s*(-?[\d.]+)\s*")
REPEATED_S = 60.0  # Bamboo's lists repeat every count this much later, and once more
GCLOUD = re.compile(r"(?P<accelerator>[a-z]+\d+)x\d+-(?P<region>[a-z]+\d)(?P<letter>[a-z])")  # v100x1-east1c


def read_bamboo(text: str, path: Path) -> Trace:
    """Read lines `ms,add,node` and `ms,remove,node`, ordered by time."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        parts = [p.strip() for p in line.split(",")]
        if len(parts) != 3 or not parts[0].isdigit():
            raise wrong(f"{path}:{number}", f"{line[:60]!r} is no event", "each line is `ms,add,node` or "
                        "`ms,remove,node`")
        rows.append((number, int(parts[0]), parts[1], (parts[2],)))
    return _trace(rows, path, path.stem, 0.0)


def read_parcae(text: str, path: Path) -> Trace:
    """Read lines `[ms, "add", {"nodes": [...], "duration": ms}]`; "no-op" changes nothing."""
    rows: list[tuple[int, int, str, tuple[str, ...]]] = []
    end_s = 0.0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            match json.loads(line):
                case [int() as ms, str() as kind, {"nodes": list() as nodes} as more] if ms >= 0:
                    rows.append((number, ms, kind, tuple(str(n) for n in nodes)))
                    end_s = max(end_s, (ms + _ms(more.get("duration", 0))) / 1000)
                case _:
                    raise ValueError("not an event")
        except (ValueError, RecursionError) as error:
            raise wrong(f"{path}:{number}", f"{line[:60]!r}: {error}",
                        'each line is [ms, "add" or "remove" or "no-op", {"nodes": [...], "duration": ms}]') from None
    return _trace(rows, path, path.stem, end_s)


def read_counts(text: str, path: Path) -> Trace:
    """Read lines `date, time, hosts`. Each change occurs three times: at t, t + 60 s and t + 120 s."""
    rows: list[tuple[float, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        found = COUNTS.fullmatch(line)
        if found is None:
            raise wrong(f"{path}:{number}", f"{line[:60]!r} is no count", "each line is `2021-12-10, 13:07:45, 80`")
        try:
            count = hosts(float(found[3]), f"{path}:{number}")
        except ValueError:
            raise wrong(f"{path}:{number}", f"{found[3]!r} is no number", "the third field counts hosts") from None
        rows.append((instant(f"{found[1]}T{found[2]}", f"{path}:{number}"), count))
    if not rows:
        raise wrong(path, "is empty", "each line is `2021-12-10, 13:07:45, 80`")
    changes = _without_echoes(rows)
    began = changes[0][0]
    for (before, _), (after, _) in pairwise(changes):
        if after < before:
            raise wrong(path, f"goes back in time by {before - after:.0f} s", "lines are in the order of time")
    length_s = max(at for at, _ in rows) - began
    if length_s <= 0:
        raise wrong(path, "covers no time", "a record has at least two instants")
    named = GCLOUD.search(path.stem.casefold())
    zone = f"us-{named['region']}-{named['letter']}" if named else ""
    provider, region = where(zone)
    return Trace(path.stem, length_s, steps((at - began, n) for at, n in changes), began_at=began, provider=provider,
                 region=region, zone=zone, accelerator=named["accelerator"].upper() if named else "")


def _without_echoes(rows: list[tuple[float, int]]) -> list[tuple[float, int]]:
    changes: list[tuple[float, int]] = []
    i = 0
    while i < len(rows):
        changes.append(rows[i])
        (at, count), i = rows[i], i + 1
        for n in (1, 2):
            if i < len(rows) and rows[i] == (at + n * REPEATED_S, count):
                i += 1
    return changes


def _trace(rows: list[tuple[int, int, str, tuple[str, ...]]], path: Path, name: str, end_s: float) -> Trace:
    """Make a trace of `rows`: (line, ms, kind, nodes)."""
    alive: set[str] = set()
    points: list[tuple[float, int]] = [(0.0, 0)]
    for number, ms, kind, nodes in rows:
        place = f"{path}:{number}"
        if ms / 1000 < points[-1][0]:
            raise wrong(place, f"{ms} ms comes after {points[-1][0] * 1000:.0f} ms", "lines are in the order of time")
        for node in nodes:
            if kind == "add" and node not in alive:
                alive.add(node)
            elif kind == "remove" and node in alive:
                alive.remove(node)
            elif kind in ("add", "remove"):
                raise wrong(place, f"{kind} {node}: it is {'already' if kind == 'add' else 'not'} there",
                            "a node is added before it is removed, and not twice")
            elif kind != "no-op":
                raise wrong(place, f"{kind!r} is no event", "events are add, remove and no-op")
        if len(alive) > MOST_HOSTS:
            raise wrong(place, f"{len(alive)} hosts", f"at most {MOST_HOSTS}")
        points.append((ms / 1000, len(alive)))
    length_s = max(end_s, points[-1][0])
    if length_s <= 0:
        raise wrong(path, "covers no time", "a record has at least two instants")
    return Trace(name, length_s, steps(points), provider="aws" if "p3" in name or "g4dn" in name else "")


def _ms(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError(f"duration is {value!r}")
    return float(value)
