"""Tables of the section "CPU" of bench/RESULTS.md, from the output of `recovery.py -o json`.

    python bench/recovery.py --rows run.jsonl && python bench/results.py run.jsonl [--machine TEXT]

A file is the output of `-o json`, or the rows of one run or several (`--rows`), also of one that was interrupted.
Several runs with different `--only` become one: events add up, of other figures the last run's count.
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


def load(path: Path) -> list[dict[str, Any]]:
    """Return the runs in a file: one from `-o json`, any number from `--rows`, an interrupted one without its end."""
    text = path.read_text()
    runs: list[dict[str, Any]] = []
    if not text.startswith('{"about": '):
        return [json.loads(text)]
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # the run was killed while it wrote this line
        if "about" in entry:
            runs.append(entry["about"] | {"rows": [], "skipped": {}})
        elif "row" in entry:
            runs[-1]["rows"].append(entry["row"])
        else:
            runs[-1] |= entry["figures"]
    return runs


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
    load = f"load average {found['load_before']:.1f} before"
    load += f" and {found['load_after']:.1f} after" if "load_after" in found else "; interrupted"
    return [f"{found['at'][:10]}, commit {found['commit'] or 'unknown'}, {machine}{found['cores']} cores,",
            f"torch {found['torch']}, {load}.", "", *(f"- {line}" for line in aims.headline(found)), "",
            *markdown(aims.rows(found)), "",
            *markdown([("", "aim, at most", "measured", "holds"), *judged]),
            *(f"\nNot measured, {what}: {why}." for what, why in found["skipped"].items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, nargs="+", help="output of -o json or --rows")
    parser.add_argument("--machine", default="", help="words about it, put before its number of cores")
    args = parser.parse_args()
    found = joined([run for path in args.json for run in load(path)])
    print("\n".join(section(found, f"{args.machine}, " if args.machine else "")))


if __name__ == "__main__":
    main()
