"""Tables of the section "CPU" of bench/RESULTS.md, from the output of `recovery.py -o json`.

    python bench/recovery.py -o json > run.json && python bench/results.py run.json [--machine TEXT]

Several files, of runs with different `--only`, become one: events add up, of other figures the last file's count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aims


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *rest]


def joined(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the figures of several runs into one, which began with the first and ended with the last."""
    found: dict[str, Any] = {"rows": [], "skipped": {}}
    for run in runs:
        found |= run | {"rows": [*found["rows"], *run["rows"]], "skipped": found["skipped"] | run["skipped"]}
    return found | {key: runs[0][key] for key in ("at", "load_before")}


def section(found: dict[str, Any], machine: str) -> list[str]:
    """Return the section's lines: where and when, all systems, the aims."""
    words = {True: "yes", False: "no", None: "-"}
    judged = [(a.line, a.aim, a.measured, words[a.holds]) for a in aims.judge(found)]
    load = f"load average {found['load_before']:.1f} before and {found['load_after']:.1f} after"
    return [f"{found['at'][:10]}, commit {found['commit'] or 'unknown'}, {machine}{found['cores']} cores,",
            f"torch {found['torch']}, {load}.", "", *markdown(aims.rows(found)), "",
            *markdown([("", "aim, at most", "measured", "holds"), *judged]),
            *(f"\nNot measured, {what}: {why}." for what, why in found["skipped"].items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, nargs="+")
    parser.add_argument("--machine", default="", help="words about it, put before its number of cores")
    args = parser.parse_args()
    found = joined([json.loads(path.read_text()) for path in args.json])
    print("\n".join(section(found, f"{args.machine}, " if args.machine else "")))


if __name__ == "__main__":
    main()
