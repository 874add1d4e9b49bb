"""Benchmark of strategies on recorded spot markets: ours beside others, in the worlds of policy_worlds.py.

    python bench/policy.py FOLDER [--only B1,B3] [-o json] [--plots FOLDER] [--sensitivity] [--jobs 2] [--every 4]

Files are recognized by their content (spotfleet.simulate.read). A line under each table names the files used, and why
others were left out. Files named preemption*, and logs of many pools, record hosts that were held until taken; other
files record available hosts. If both kinds are found, B1 uses the second.

    B1  48 h of work on one host, deadlines of 52, 60, 70 h, changeovers of 0.05 and 0.2 h; records of one host
    UP  hours of B1's Uniform Progress beside the hours that its authors report
    B2  useful work on spot alone, N the most that a record had
    B3  48 h x N hosts, deadlines of 53, 60, 70 h, spot and on demand mixed; records of 4 and 16 hosts
    B5  the ledger's bill for a host, from a price log, beside the integral of the prices
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import policy_goodput
import policy_prices
import policy_tables
from results import markdown

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.simulate.read import read, traces_in
from spotfleet.simulate.values.trace import Trace

TABLES = ("B1", "UP", "B2", "B3", "B5")


@dataclass(frozen=True)
class Table:
    """Table of results; the first row is the head. `used`, and `skipped` with a reason each, name files or pools."""

    name: str
    title: str
    rows: list[list[str]]
    used: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)  # for plots and programs


def load(folder: Path, log: Callable[[str], None]) -> tuple[list[Trace], dict[str, str]]:
    """Return all pools of all files of `folder`, named by their path in it, and why files could not be read."""
    found: list[Trace] = []
    unread: dict[str, str] = {}
    for path in traces_in(folder):
        name = str(path.relative_to(folder))
        try:
            traces = read(path)
        except SpotfleetError as error:
            unread[name] = str(error).replace(str(path), "the file")
            continue
        for trace in traces:
            parts = name if len(traces) == 1 else f"{name}: {trace.name}"
            found.append(Trace(**{**{k: getattr(trace, k) for k in trace.__dataclass_fields__}, "name": parts}))
    log(f"read {len({t.name.split(': ')[0] for t in found})} files, {len(found)} pools; {len(unread)} not to be read")
    if not found:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(unread.items())[:3])
        raise UsageError(f"{folder} has no trace that can be read ({why})", hint="give a folder of spot records")
    return found, unread


def run(function: Callable[..., Any], tasks: Sequence[tuple], jobs: int, log: Callable[[str], None],
        what: str) -> list[Any]:
    """Return `function(*task)` of each task, computed in `jobs` processes, in the tasks' order."""
    done, began = [], time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        for k, result in enumerate(pool.map(function, *zip(*tasks, strict=True)) if tasks else ()):
            done.append(result)
            if (k + 1) % max(1, len(tasks) // 20) == 0:
                log(f"{what}: {k + 1} of {len(tasks)}, {time.monotonic() - began:.0f} s")
    return done


def show(table: Table, unread: dict[str, str]) -> str:
    lines = [f"## {table.name}. {table.title}", ""]
    lines += markdown(table.rows) if len(table.rows) > 1 else ["No record in this folder is of use to this table."]
    lines += ["", *(f"{note}" for note in table.notes)]
    lines.append(f"Used {len(table.used)} record{'s' * (len(table.used) != 1)}" + _names(table.used))
    by_reason: dict[str, list[str]] = {}
    for name, why in {**table.skipped, **unread}.items():
        by_reason.setdefault(why, []).append(name)
    lines += [f"Skipped {len(names)}, {why}" + _names(names) for why, names in by_reason.items()]
    return "\n".join(lines) + "\n"


def _names(names: Sequence[str], most: int = 24) -> str:
    """Return the files' names, with the number of pools used of each."""
    files = [f"{file} ({n} pools)" if n > 1 else file for file, n in Counter(n.split(": ")[0] for n in names).items()]
    shown = ", ".join(files[:most]) + (f" and {len(files) - most} more" if len(files) > most else "")
    return f": {shown}." if names else "."


def commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True,
                           cwd=Path(__file__).parent)
    return found.stdout.strip()


def tables(traces: Sequence[Trace], only: Iterable[str], args: argparse.Namespace,
           log: Callable[[str], None]) -> Iterator[Table]:
    def each(function: Callable[..., Any], tasks: Sequence[tuple], what: str) -> list[Any]:
        return run(function, tasks, args.jobs, log, what)

    makers = {"B1": policy_tables.one_host, "UP": policy_tables.published, "B2": policy_goodput.goodput,
              "B3": policy_tables.many_hosts, "B5": policy_prices.bills}
    for name in TABLES:
        if name in only:
            yield Table(name, **makers[name](traces, args.every * 3600.0, each))
    if args.sensitivity:
        yield Table("Sensitivity", **policy_tables.sensitivity(traces, 3 * args.every * 3600.0, each))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(TABLES), help="tables, by comma")
    parser.add_argument("-o", choices=["text", "json"], default="text", dest="output")
    parser.add_argument("--plots", type=Path, help="folder for PNGs")
    parser.add_argument("--sensitivity", action="store_true", help="also what other constants of our policy would cost")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--every", type=float, default=4.0, help="hours from one window's start to the next")
    args = parser.parse_args()
    if unknown := [name for name in args.only.split(",") if name not in TABLES]:
        parser.error(f"no table {', '.join(unknown)}; there are {', '.join(TABLES)}")

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        traces, unread = load(args.folder, log)
    except SpotfleetError as error:
        log(f"error: {error}\nhint: {error.hint}")
        return 2
    if args.output == "text":
        print(f"{time.strftime('%Y-%m-%d', time.gmtime())}, commit {commit() or 'unknown'}\n")
    found = []
    for table in tables(traces, args.only.split(","), args, log):
        found.append(table)
        if args.output == "text":
            print(show(table, unread), flush=True)
    if args.output == "json":
        about = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit(), "unread": unread}
        print(json.dumps(about | {"tables": [asdict(table) for table in found]}, indent=1, allow_nan=False), flush=True)
    if args.plots:
        import policy_plot

        args.plots.mkdir(parents=True, exist_ok=True)
        for path in policy_plot.draw(args.plots, found):
            log(f"wrote {path}")
    if not any(table.used for table in found):
        log("error: none of the tables found a record of use to it\nhint: the lines above say why, for each of them")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
