"""Records of spot markets, read from files in the formats of other projects (`simulate/formats/`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from spotfleet.simulate.formats import members, pings, prices, probes
from spotfleet.simulate.formats.pings import AVAILABLE, UNAVAILABLE
from spotfleet.simulate.formats.text import wrong
from spotfleet.simulate.values.trace import Trace

POLARITIES = (AVAILABLE, UNAVAILABLE)
GZIP = b"\x1f\x8b"
MOST_BYTES = 256 << 20  # limit for one file; records of public markets have a few MiB
# files that are no traces, in any folder
BESIDE = re.compile(r"LICEN[CS]E.*|README.*|SOURCE.*|COPYING.*|\..*", re.IGNORECASE)
KNOWN = ("known are: JSON of spot-traces or Frontier-CS (or a .tar.gz of them), Bamboo's CSV and counts, Parcae's JSON "
         "lines, training_on_a_dime's logs, AWS spot price histories, Azure's and GCP's price tables")


def read(path: Path | str, polarity: str = "", warn: Callable[[str], None] = lambda text: None) -> list[Trace]:
    """Read the pools in a file, at least one. The content determines the format.

    `polarity`: meaning of 1 in JSON of 0 and 1, "available" or "unavailable"; with "" the format determines it. `warn`
    gets messages about suspicious content that is read nevertheless. Raises UsageError, naming file and line or field,
    for unreadable content.
    """
    path = Path(path)
    if polarity not in ("", *POLARITIES):
        raise wrong("polarity", f"{polarity!r} is none", f"it is {' or '.join(POLARITIES)}")
    raw = _bytes(path)
    if raw.startswith(GZIP):
        return pings.read_archive(path, polarity, warn)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise wrong(path, "is no text", KNOWN) from None
    if not text.strip():
        raise wrong(path, "is empty", KNOWN)
    found = _read_object(raw, path, polarity, warn) if text.lstrip().startswith("{") else _read_lines(text, path)
    if polarity and not text.lstrip().startswith("{"):
        warn(f"{path}: --polarity is of no use to this format")
    return found


def traces_in(folder: Path | str) -> list[Path]:
    """Return the files of a folder and its subfolders that should be traces, by name, without licences and the like."""
    folder = Path(folder)
    if not folder.is_dir():
        raise wrong(folder, "is no folder", "give a folder of traces")
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not BESIDE.fullmatch(p.name))
    if not files:
        raise wrong(folder, "holds no traces", KNOWN)
    return files


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except IsADirectoryError:
        raise wrong(path, "is a folder", "give the files in it") from None
    except FileNotFoundError:
        raise wrong(path, "there is no such file", "give the path of a trace") from None
    except OSError as error:
        raise wrong(path, f"cannot be read: {error.strerror}", "give the path of a trace that you may read") from None
    if len(raw) > MOST_BYTES:
        raise wrong(path, f"is larger than {MOST_BYTES >> 20} MiB", "give a part of it: fewer pools, or a shorter time")
    return raw


def _read_object(raw: bytes, path: Path, polarity: str, warn: Callable[[str], None]) -> list[Trace]:
    data = pings.loaded(raw, path)
    if "SpotPriceHistory" in data:
        return prices.read_aws(data, path)
    if "data" in data or "metadata" in data:
        return [pings.read(data, path, path.stem, polarity, warn)]
    raise wrong(path, f"has neither data nor SpotPriceHistory, but {', '.join(sorted(data)[:5]) or 'nothing'}", KNOWN)


def _read_lines(text: str, path: Path) -> list[Trace]:
    first = next(line for line in text.splitlines() if line.strip()).strip()
    if first.split(",") == prices.GCP:
        return prices.read_gcp(text, path)
    if first.casefold().startswith("date,"):
        return prices.read_azure(text, path)
    if members.BAMBOO.match(first):
        return [members.read_bamboo(text, path)]
    if members.COUNTS.fullmatch(first):
        return [members.read_counts(text, path)]
    if probes.FIRST.match(first):
        return probes.read(text, path)
    if _is_parcae(first):
        return [members.read_parcae(text, path)]
    raise wrong(f"{path}:1", f"{first[:60]!r} begins no known format", KNOWN)


def _is_parcae(first: str) -> bool:
    try:
        line = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(line, list) and len(line) == 3 and isinstance(line[1], str)
