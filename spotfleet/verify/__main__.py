"""Command: `python -m spotfleet.verify [--workers N] [--steps N] [-o json] SCRIPT [ARGS]`; see `--help`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from spotfleet.errors import SpotfleetError
from spotfleet.verify.scenarios import DISTURBED
from spotfleet.verify.verdict import EXACT, Verdict, verify
from spotfleet.verify.world import RunFailed


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="spotfleet.train.verify", description="Run a script's first steps undisturbed and through kills, a "
        "notice, a late join and a restore, and compare every bit. Exit status 0: exact; 1: not; 2: usage.")
    parser.add_argument("script", type=Path)
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's own arguments")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default=",".join(DISTURBED), help=f"some of {','.join(DISTURBED)}")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    only = [name for name in args.only.split(",") if name]
    if not only or not set(only) <= set(DISTURBED):
        print(f"error: --only {args.only}: use some of {','.join(DISTURBED)}", file=sys.stderr)
        return 2
    return run(args.script, args.args, args.workers, args.steps, only, args.output == "json")


def run(script: Path, args: Sequence[str], workers: int, steps: int, only: Sequence[str], as_json: bool) -> int:
    """Verify and print; return the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    try:
        verdict = verify(script, args, workers, steps, _show, only)
    except KeyboardInterrupt:
        print("interrupted; every process of it has ended", file=sys.stderr)
        return 130
    except SpotfleetError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(_to_json(verdict), indent=1) if as_json else _to_text(verdict, script))
    return 0 if verdict.result == EXACT else 1


def _show(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def _to_json(verdict: Verdict) -> dict[str, object]:
    d = verdict.difference
    return {
        "result": verdict.result, "text": verdict.text, "steps": verdict.steps, "workers": verdict.workers,
        "difference": None if d is None else {
            "run": d.run, "name": d.name, "step": d.version, "ranks": list(d.ranks), "part": d.part.value,
            "values": d.text, "after": d.after.text if d.after else ""},
        "causes": [{"text": c.text, "hint": c.hint, "lines": list(c.lines)} for c in verdict.causes],
        "remarks": list(verdict.remarks), "runs": verdict.runs}


def _to_text(verdict: Verdict, script: Path) -> str:
    lines = [verdict.text, *(f"note: {remark}" for remark in verdict.remarks)]
    if verdict.causes:
        lines.append("usual causes:")
    for number, cause in enumerate(verdict.causes, 1):
        at = f" (see {script.name}, line{'s' * (len(cause.lines) > 1)} {', '.join(map(str, cause.lines[:6]))})"
        lines += [f"  {number}. {cause.text}{at if cause.lines else ''}", f"     {cause.hint}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
