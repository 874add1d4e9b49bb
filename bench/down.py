"""Benchmark of `spotfleet down`: seconds for a fleet of four hosts, if every call of the cloud takes half a second.

    python bench/down.py [--hosts 4] [--latency 0.5] [--repeat 3] [-o json]

The fleet is one of the `local` provider: real processes, real agents, an emulated cloud. EC2 answers in 0.3 to 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from spotfleet.api import Fleet
from spotfleet.model import FleetSpec, Need, Nodes
from spotfleet.providers.local import LocalCloud

LIMIT_S = 120.0


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def down_s(home: Path, hosts: int, latency_s: float) -> float:
    """Start a fleet without latency, then time its `down` with latency."""
    cloud = LocalCloud(home)
    fleet = Fleet(FleetSpec("bench", any_of=(Need(instance_type="cpu.small"),), nodes=Nodes(hosts, hosts, hosts)), home)
    try:
        fleet.up(timeout_s=LIMIT_S)
        cloud.latency(latency_s)
        began = time.monotonic()
        fleet.down(progress=lambda line: log(f"  {time.monotonic() - began:5.2f} s  {line}"))
        took_s = time.monotonic() - began
        cloud.latency(0.0)
        assert not cloud.truth(), f"left behind: {cloud.truth()}"
        return took_s
    finally:
        cloud.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--latency", type=float, default=0.5, help="seconds, added to every call of the cloud")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    args = parser.parse_args()
    os.environ["SPOTFLEET_LOCAL_OWNER_PID"] = str(os.getpid())
    found, load = [], os.getloadavg()[0]
    log(f"{args.hosts} hosts, {args.latency:g} s a call; {os.cpu_count()} cores, load average {load:.2f}")
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory(prefix="spotfleet-down-") as home:
            found.append(down_s(Path(home), args.hosts, args.latency))
    figures = {"hosts": args.hosts, "latency_s": args.latency, "down_s": found, "load_before": load,
               "load_after": os.getloadavg()[0]}
    if args.output == "json":
        print(json.dumps(figures, indent=1))
    else:
        print(f"down of {args.hosts} hosts: median {statistics.median(found):.1f} s, max {max(found):.1f} s")


if __name__ == "__main__":
    main()
