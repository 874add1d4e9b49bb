"""Records of prices alone, without availability."""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from spotfleet.simulate.formats.text import DAY_S, instant, micros, steps, where, wrong
from spotfleet.simulate.values.trace import Trace

GCP = ["date", "instance_type", "region", "on_demand_usd_h", "spot_usd_h"]
LINUX = "Linux/UNIX"
US_DATE = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})")


def read_aws(data: dict[str, Any], path: Path) -> list[Trace]:
    """Read the output of `aws ec2 describe-spot-price-history`: one trace for each zone, type and product."""
    lines = data["SpotPriceHistory"]
    if not isinstance(lines, list) or not lines:
        raise wrong(path, "SpotPriceHistory is empty", "give a price history that covers some time")
    points: dict[tuple[str, str, str], list[tuple[float, int]]] = defaultdict(list)
    for i, line in enumerate(lines):
        place = f"{path}: SpotPriceHistory[{i}]"
        match line:
            case {"AvailabilityZone": str() as zone, "InstanceType": str() as kind, "SpotPrice": price,
                  "Timestamp": at}:
                product = str(line.get("ProductDescription", LINUX))
                points[zone, kind, product].append((instant(at, f"{place}.Timestamp"),
                                                    micros(price, f"{place}.SpotPrice")))
            case _:
                raise wrong(place, "lacks AvailabilityZone, InstanceType, SpotPrice or Timestamp",
                            "give the output of `aws ec2 describe-spot-price-history -o json`")
    end = max(at for of_pool in points.values() for at, _ in of_pool)
    traces = []
    for (zone, kind, product), of_pool in sorted(points.items()):
        changes = sorted(of_pool, key=lambda p: p[0])
        more = "" if product == LINUX else f" {product}"
        traces.append(_trace(f"{path.stem}/{zone} {kind}{more}", changes, end, "aws", where(zone)[1], zone, kind))
    return _some(traces, path)


def read_azure(text: str, path: Path) -> list[Trace]:
    """Read a column for each type, a row for each day: `Date,NC6,...` and `2/24/2020,$0.12276,...`."""
    rows = list(csv.reader(io.StringIO(text)))
    head = [name.strip() for name in rows[0]]
    points: list[list[tuple[float, int]]] = [[] for _ in head]
    end = 0.0
    for number, row in enumerate(rows[1:], 2):
        if not any(row):
            continue
        if len(row) != len(head):
            raise wrong(f"{path}:{number}", f"{len(row)} fields, the heading has {len(head)}",
                        "give each row a field for each column")
        at = _day(row[0], f"{path}:{number}")
        end = max(end, at + DAY_S)
        for i, price in enumerate(row[1:], 1):
            if price.strip():
                points[i].append((at, micros(price, f"{path}:{number}: {head[i]}")))
    region = path.stem.replace("_", "-")
    traces = [_trace(f"{path.stem}/{head[i]}", sorted(changes), end, "azure", region, "",
                     "Standard_" + head[i].replace(" ", "_")) for i, changes in enumerate(points) if changes]
    return _some(traces, path)


def read_gcp(text: str, path: Path) -> list[Trace]:
    """Read a log of changes, `date,instance_type,region,on_demand_usd_h,spot_usd_h`; each holds until the next.

    If an on-demand price changed, the trace has the last one.
    """
    points: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    on_demand: dict[tuple[str, str], tuple[float, int]] = {}
    end = 0.0
    for number, row in enumerate(list(csv.reader(io.StringIO(text)))[1:], 2):
        if not any(row):
            continue
        if len(row) != len(GCP):
            raise wrong(f"{path}:{number}", f"{len(row)} fields instead of {len(GCP)}", f"a row is {','.join(GCP)}")
        at, pool = instant(row[0], f"{path}:{number}"), (row[2], row[1])
        points[pool].append((at, micros(row[4], f"{path}:{number}: spot_usd_h")))
        on_demand[pool] = max(on_demand.get(pool, (0.0, 0)), (at, micros(row[3], f"{path}:{number}: on_demand_usd_h")))
        end = max(end, at + DAY_S)
    traces = [_trace(f"{path.stem}/{region} {kind}", sorted(changes), end, "gcp", region, "", kind,
                     on_demand[region, kind][1]) for (region, kind), changes in sorted(points.items())]
    return _some(traces, path)


def _trace(name: str, changes: list[tuple[float, int]], end: float, provider: str, region: str, zone: str, kind: str,
           on_demand_micros_h: int = 0) -> Trace:
    began = changes[0][0]
    return Trace(name, end - began, (), steps((at - began, price) for at, price in changes), on_demand_micros_h, began,
                 provider, region, zone, kind)


def _some(traces: list[Trace], path: Path) -> list[Trace]:
    kept = [t for t in traces if t.length_s > 0]
    if not kept:
        raise wrong(path, "covers no time", "give a price history that covers some time")
    return kept


def _day(text: str, place: str) -> float:
    found = US_DATE.fullmatch(text.strip())
    return instant(f"{found[3]}-{int(found[1]):02d}-{int(found[2]):02d}" if found else text, place)
