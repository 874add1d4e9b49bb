"""JSON with one value per fixed interval, plain or many files in a .tar.gz.

SkyPilot's spot-traces contain the number of available hosts. The windows of Frontier-CS, cut out of them, are inverted:
1 means that the host was *not* available. They are recognised by keys that only they have.
"""

from __future__ import annotations

import json
import math
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.simulate.formats.text import hosts, instant, micros, steps, where, wrong
from spotfleet.simulate.values.trace import Trace

AVAILABLE, UNAVAILABLE = "available", "unavailable"
HINT = 'a trace is {"metadata": {"gap_seconds": 600}, "data": [1, 0, ...]}'
FOLDERS = ("frontier-cs", "frontier_cs", "cant_be_late", "random_start")  # folders with inverted windows
DATED = re.compile(r"(?:aws|gcp|azure)-(\d\d)-(\d\d)-(\d{4})")
FOR_HOSTS = re.compile(r"(\d+)-node")
NAMED = re.compile(r"(?P<zone>[a-z]+-[a-z]+-?\d+-?[a-z])_(?P<accelerator>[A-Za-z0-9]+?)_(?P<count>\d+)")
TYPES = {("V100", 1): "p3.2xlarge", ("V100", 4): "p3.8xlarge", ("V100", 8): "p3.16xlarge",
         ("K80", 1): "p2.xlarge", ("K80", 8): "p2.8xlarge", ("K80", 16): "p2.16xlarge"}  # fmt: skip

Warn = Callable[[str], None]


def is_window(data: dict[str, Any]) -> bool:
    """Return whether the data comes from Frontier-CS."""
    return "original_trace" in data or "random_start" in str(data.get("generator", ""))


def read(data: dict[str, Any], path: Path, name: str, polarity: str, warn: Warn) -> Trace:
    """Read a trace. `path` is for messages, and its folders give hints; `polarity` overrides the format's meaning."""
    metadata = data.get("metadata")
    gap_s = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if isinstance(gap_s, bool) or not isinstance(gap_s, (int, float)) or not math.isfinite(gap_s) or gap_s <= 0:
        raise wrong(path, f"metadata.gap_seconds is {gap_s!r}, not a number of seconds", HINT)
    values = data.get("data")
    if not isinstance(values, list) or not values:
        raise wrong(path, "data is empty" if values == [] else "data is no list", HINT)
    counts = [hosts(v, f"{path}: data[{i}]") for i, v in enumerate(values)]
    _within(metadata, counts, path, warn)
    if _meaning(data, path, polarity, warn) == UNAVAILABLE:
        counts = [1 - n for n in _flags(counts, path)]
    if not any(counts):
        warn(f"{path}: no spot host was ever available in it; if 1 means unavailable, say so with --polarity")
    zone, accelerator, count = _named(name, data)
    provider, region = where(zone)
    return Trace(name, gap_s * len(counts), steps((i * gap_s, n) for i, n in enumerate(counts)),
                 _prices(data, len(counts), gap_s, path), began_at=_began(path), provider=provider, region=region,
                 zone=zone, instance_type=TYPES.get((accelerator, count), "") if provider == "aws" else "",
                 accelerator=accelerator)


def read_archive(path: Path, polarity: str, warn: Warn) -> list[Trace]:
    """Read every .json of a .tar.gz, except for the files that macOS adds."""
    traces: list[Trace] = []
    warned: set[str] = set()

    def once(text: str) -> None:
        kind = text.partition(": ")[2]
        if kind not in warned:
            warned.add(kind)
            warn(text)

    try:
        with tarfile.open(path) as archive:
            for member in archive:
                inside = Path(member.name)
                if not member.isfile() or inside.suffix != ".json" or inside.name.startswith("._"):
                    continue
                file = archive.extractfile(member)
                assert file is not None
                within = Path(f"{path}/{member.name}")
                traces.append(read(loaded(file.read(), within), within, short(inside), polarity, once))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise wrong(path, f"the archive cannot be read: {error}", "give a .tar.gz of JSON traces") from None
    if not traces:
        raise wrong(path, "the archive holds no .json", "give a .tar.gz of JSON traces")
    return traces


def short(inside: Path) -> str:
    """Return a window's name without the folders that are in every name."""
    kept = [p for p in inside.with_suffix("").parts if p not in ("real", "traces", "random_start", "..", "/")]
    return "/".join(kept)


def loaded(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        data = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise wrong(path, f"is no JSON: {error}", HINT) from None
    if not isinstance(data, dict):
        raise wrong(path, "is no JSON object", HINT)
    return data


def _meaning(data: dict[str, Any], path: Path, polarity: str, warn: Warn) -> str:
    """Return the meaning of 1."""
    window = is_window(data)
    declared = data["metadata"].get("polarity", "")
    if declared and declared not in (AVAILABLE, UNAVAILABLE):
        raise wrong(path, f"metadata.polarity is {declared!r}", f"it is {AVAILABLE!r} or {UNAVAILABLE!r}")
    usual = declared or (UNAVAILABLE if window else AVAILABLE)
    if polarity and polarity != usual:
        it = "a window of Frontier-CS, where 1 means unavailable" if window and not declared else (
            f"a trace in which 1 means {usual}")
        warn(f"{path}: looks like {it}; read as --polarity {polarity} nevertheless")
    elif not polarity and not declared and not window and any(f in str(path).casefold() for f in FOLDERS):
        warn(f"{path}: lies in a folder of Frontier-CS, whose windows are inverted, but has not their keys: read as "
             f"1 = available; --polarity {UNAVAILABLE} reads it the other way")
    return polarity or usual


def _flags(counts: list[int], path: Path) -> list[int]:
    """Check that every value is 0 or 1: only one host can be marked unavailable, of several the number is unknown."""
    for i, n in enumerate(counts):
        if n > 1:
            raise wrong(path, f"data[{i}] is {n}, but where 1 means unavailable there is nothing above 1",
                        f"it counts available hosts: read it with --polarity {AVAILABLE}")
    return counts


def _within(metadata: dict[str, Any], counts: list[int], path: Path, warn: Warn) -> None:
    """Check against the number of requested hosts, if the file or its folder contains it."""
    most = max(counts)
    for key in ("max_nodes", "num_nodes", "nodes"):
        limit = metadata.get(key)
        if isinstance(limit, int) and not isinstance(limit, bool) and most > limit:
            raise wrong(path, f"data[{counts.index(most)}] is {most}, above metadata.{key}, {limit}",
                        "each value counts available hosts: correct the value, or metadata")
    folder = next((m for part in path.parts if (m := FOR_HOSTS.fullmatch(part))), None)
    if folder is not None and most > int(folder[1]):
        warn(f"{path}: data[{counts.index(most)}] is {most}, though its folder is called {folder[0]}")


def _prices(data: dict[str, Any], length: int, gap_s: float, path: Path) -> tuple[tuple[float, int], ...]:
    prices = data.get("prices")
    if prices is None or prices == []:
        return ()
    if not isinstance(prices, list) or len(prices) != length:
        many = len(prices) if isinstance(prices, list) else "no list of"
        raise wrong(path, f"prices: {many} values for the {length} of data", "give a price for each value, or none")
    return steps((i * gap_s, micros(p, f"{path}: prices[{i}]")) for i, p in enumerate(prices))


def _named(name: str, data: dict[str, Any]) -> tuple[str, str, int]:
    """Return zone, accelerator and count per host, from a name such as us-west-2a_v100_8."""
    for text in (name, Path(str(data.get("original_trace", ""))).stem):
        found = NAMED.search(text)
        if found:
            is_cpu = found["accelerator"].casefold() in ("intel", "amd", "arm")
            return found["zone"], "" if is_cpu else found["accelerator"].upper(), int(found["count"])
    zone = name.partition("_")[0]
    return (zone if where(zone)[0] else ""), "", 0


def _began(path: Path) -> float:
    """Return the start, from a folder's name such as aws-10-26-2022; 0 without one."""
    for part in reversed(path.parts[:-1]):
        if found := DATED.fullmatch(part):
            try:
                return instant(f"{found[3]}-{found[1]}-{found[2]}", part)
            except UsageError:
                return 0.0
    return 0.0
