"""All checks and measurements that need a CUDA device, in one command that can be resumed part by part.

    python3 bench/gpu/run.py --rows rows.jsonl          all parts on one card, 22 minutes at most
    python3 bench/gpu/run.py --rows rows.jsonl --limit 560      again, until it prints "all parts have rows"
    python3 bench/gpu/run.py --rows rows.jsonl kill form        these parts, also if they have rows
    python3 bench/gpu/run.py --device cpu --short       a trial over gloo, in a minute

It needs python3 with torch 2.11 or newer and numpy, and this checkout; no other package, no network, no root. Each row
is a line of JSON in the file, written as it comes: {"part", "row", "ok", ...}; the last row of a part is "end". A part
is a process with a limit of its own, so one that hangs costs its time and no more; all that it started is then killed.
Parts that have ended are skipped. Status 1: a row is not ok. `--limit`: seconds; a part that would not fit is left for
the next call.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]
# The most needed first: a run that is cut short has them.
LIMITS_S = {"surface": 110, "quiet": 150, "kill": 240, "form": 240, "habits": 240, "whole": 170, "steps": 140}
CPU_PATIENCE = 5  # a trial over gloo measures nothing, and other processes may use its cores
MARK = "SPOTFLEET_GPU_BENCH"
Row = dict[str, Any]


def rows_of(part: str, device: str, short: bool, folder: Path) -> Iterator[Row]:
    """Run a part in this process."""
    match part:
        case "surface":
            import surface

            yield from surface.part(device, short, folder)
        case "steps":
            import alongside

            yield from alongside.part(device, short)
        case _:
            import ranks

            yield from ranks.part(part, device, short, folder)


def write(path: Path, row: Row) -> None:
    line = json.dumps(row)
    print(line[:2000], flush=True)
    with path.open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def be_part(part: str, options: argparse.Namespace) -> None:
    """Run one part, in the process that `watch` has started."""
    began, good = time.monotonic(), True
    with tempfile.TemporaryDirectory(prefix="spotfleet-gpu-") as scratch:
        try:
            for row in rows_of(part, options.device, options.short, Path(scratch)):
                good = good and row["ok"]
                write(options.rows, {"part": part, **row, "at_s": round(time.monotonic() - began, 1)})
        except Exception:  # noqa: BLE001 - it becomes a row
            good = False
            write(options.rows, {"part": part, "row": "error", "ok": False, "why": traceback.format_exc()[-3000:]})
        write(options.rows, {"part": part, "row": "end", "ok": good, "s": round(time.monotonic() - began, 1)})


def watch(part: str, options: argparse.Namespace) -> None:
    """Run one part in a process of its own, and kill it with all that it started when its time is over."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    command = [sys.executable, __file__, "--as-part", "--device", options.device, "--rows", str(options.rows), part]
    process = subprocess.Popen(command + ["--short"] * options.short, env={**os.environ, MARK: mark,
                                                                          "PYTHONUNBUFFERED": "1"})
    limit_s = LIMITS_S[part] * (CPU_PATIENCE if options.device == "cpu" else 1)
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
        process.kill()
        process.wait()
    kill_marked(mark)
    if not any(row["row"] == "end" for row in read(options.rows) if row["part"] == part):
        why = f"not within {limit_s} s" if code is None else f"the process ended with {code}"
        write(options.rows, {"part": part, "row": "end", "ok": False, "why": why})


def kill_marked(mark: str) -> None:
    """Kill the processes of one part, which are in sessions of their own."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue  # gone, or another user's


def read(path: Path) -> list[Row]:
    """Return the rows so far; a last line that was cut off is none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def drop(path: Path, part: str) -> None:
    """Remove the rows of a part that runs again."""
    kept = [row for row in read(path) if row["part"] != part]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*LIMITS_S, []], metavar="PART", help=", ".join(LIMITS_S))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--short", action="store_true", help="few and small trials, to try the parts themselves")
    parser.add_argument("--rows", type=Path, default=Path("gpu-rows.jsonl"))
    parser.add_argument("--limit", type=float, default=22 * 60.0, help="seconds for this call")
    parser.add_argument("--as-part", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_part:
        be_part(options.parts[0], options)
        return 0
    end = time.monotonic() + options.limit
    done = {row["part"] for row in read(options.rows) if row["row"] == "end"} - set(options.parts)
    left = [part for part in options.parts or LIMITS_S if part not in done]
    while left and time.monotonic() + LIMITS_S[left[0]] <= end:
        part = left.pop(0)
        drop(options.rows, part)
        watch(part, options)
    bad = [f"{row['part']}: {row['row']}" for row in read(options.rows) if not row["ok"]]
    rest = f"run it again for {', '.join(left)}" if left else "all parts have rows"
    print(f"{rest}; not ok: {', '.join(bad) or 'none'}", file=sys.stderr)
    return int(bool(bad or left))


if __name__ == "__main__":
    sys.exit(main())
