"""The section "CPU" of bench/RESULTS.md, from what `recovery.py -o json` printed.

    python bench/recovery.py -o json > run.json && python bench/results.py run.json [--machine TEXT]
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


def section(found: dict[str, Any], machine: str) -> list[str]:
    """Its lines: where and when, all systems, the aims."""
    words = {True: "yes", False: "no", None: "-"}
    judged = [(a.line, a.aim, a.measured, words[a.holds]) for a in aims.judge(found)]
    load = f"load average {found['load_before']:.1f} before and {found['load_after']:.1f} after"
    return [f"{found['at'][:10]}, commit {found['commit'] or 'unknown'}, {machine}{found['cores']} cores,",
            f"torch {found['torch']}, {load}.", "", *markdown(aims.rows(found)), "",
            *markdown([("", "aim, at most", "measured", "holds"), *judged]),
            *(f"\nNot measured, {what}: {why}." for what, why in found["skipped"].items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--machine", default="", help="words about it, put before its number of cores")
    args = parser.parse_args()
    print("\n".join(section(json.loads(args.json.read_text()), f"{args.machine}, " if args.machine else "")))


if __name__ == "__main__":
    main()
