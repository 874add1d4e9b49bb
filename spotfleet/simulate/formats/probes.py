"""Logs of a program that tries to hold one instance in each of several pools: training_on_a_dime's, on GCP and AWS.

    [2020-03-01T10:11:21.000Z] Created instance instance0 with 1 GPU(s) of type nvidia-tesla-v100 in zone us-west1-b
    [2020-03-01T10:12:22.000Z] Instance instance0 not running in zone us-west1-b

A pool counts as available from the line that shows this until the line that shows the contrary. Between its probes,
about ten minutes apart, the state is unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from spotfleet.simulate.formats.text import instant, steps, where, wrong
from spotfleet.simulate.values.trace import Trace

LINE = re.compile(r"\[(?P<at>[^\]]+)\] (?P<message>.*)")
CREATED = re.compile(r"Created instance (\S+) with (\d+) GPU\(s\) of type (\S+) in zone (\S+)")
SEEN = re.compile(r"Instance (\S+) (not )?running in zone (\S+)")
FAILED = re.compile(r"Instance with (\d+) GPU\(s\) of type (\S+) creation failed")
OTHER = re.compile(r"Instance \S+ creation failed|Successfully deleted instance \S+|Deleting .*|Failed .*")
FIRST = re.compile(r"\[\d{4}-\d\d-\d\dT[\d:.]+Z\] (Created instance|Instance)")


@dataclass
class _Pool:
    zone: str
    accelerator: str = ""
    count: int = 0
    points: list[tuple[float, int]] = field(default_factory=list)

    @property
    def held(self) -> bool:
        return bool(self.points) and self.points[-1][1] > 0


def read(text: str, path: Path) -> list[Trace]:
    lines = _lines(text, path)
    kinds = _kinds(message for _, _, message in lines)
    # (zone, accelerator, count), or (zone, instance) of an instance that was never created
    pools: dict[tuple, _Pool] = {}
    of: dict[str, tuple] = {}  # instance -> its pool
    for at, _, message in lines:
        if found := CREATED.fullmatch(message):
            of[found[1]] = key = (found[4], found[3], int(found[2]))
            pools.setdefault(key, _Pool(*key)).points.append((at, 1))
        elif found := SEEN.fullmatch(message):
            key = of.get(found[1]) or kinds.get(found[1], (found[3], found[1]))
            pools.setdefault(key, _Pool(*key) if len(key) == 3 else _Pool(found[3])).points.append(
                (at, 0 if found[2] else 1))
        elif found := FAILED.fullmatch(message):  # the line lacks the zone: it applies to pools that hold no instance
            for zone in {k[0] for k in kinds.values()}:
                key = (zone, found[2], int(found[1]))
                if key not in pools or not pools[key].held:
                    pools.setdefault(key, _Pool(*key)).points.append((at, 0))
    traces = [_trace(pool, path) for _, pool in sorted(pools.items(), key=lambda p: [str(x) for x in p[0]])]
    kept = [t for t in traces if t is not None]
    if not kept:
        raise wrong(path, "covers no time", "a record has at least two probes of a pool")
    return kept


def _lines(text: str, path: Path) -> list[tuple[float, int, str]]:
    lines: list[tuple[float, int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        found = LINE.fullmatch(line.strip())
        if found is None or not any(shape.fullmatch(found["message"]) for shape in (CREATED, SEEN, FAILED, OTHER)):
            raise wrong(f"{path}:{number}", f"{line[:80]!r} is no line of such a log",
                        "lines are `[TIME] Created instance ...` or `[TIME] Instance X [not] running in zone Z`")
        at = instant(found["at"], f"{path}:{number}")
        if lines and at < lines[-1][0]:
            raise wrong(f"{path}:{number}", "goes back in time", "lines are in the order of time")
        lines.append((at, number, found["message"]))
    return lines


def _kinds(message: object) -> dict[str, tuple[str, str, int]]:
    """Map instance to pool, also for instances that were requested before their first creation."""
    found = (CREATED.fullmatch(line) for line in message)  # type: ignore[attr-defined]
    return {m[1]: (m[4], m[3], int(m[2])) for m in found if m}


def _trace(pool: _Pool, path: Path) -> Trace | None:
    began, length_s = pool.points[0][0], pool.points[-1][0] - pool.points[0][0]
    if length_s <= 0:
        return None
    provider, region = where(pool.zone)
    accelerator = pool.accelerator.removeprefix("nvidia-tesla-").upper()
    name = f"{path.stem}/{pool.zone}" + (f"_{accelerator.lower()}_{pool.count}" if accelerator else "")
    return Trace(name, length_s, steps((at - began, n) for at, n in pool.points), began_at=began, provider=provider,
                 region=region, zone=pool.zone, accelerator=accelerator)
