"""Kill each flow in every state that its crash points have, and print what was left: nothing.

A crash point is before or after a call or a write; points between which nothing changed but the memory of the process
that dies have one state (`tests/support/sweep/sweep_states.py`). `python -m tests.sweep.kill_sweep --help`.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.support.sweep.sweep_flows import FLOWS, Flow, Point, distinct, kill, points
from tests.support.sweep.sweep_world import World

LAGS_S = (0.0, 3.0)  # how late listings are
HEAD = f"{'killed':12}{'in':28}{'points':>8}{'states':>8}{'tried':>8}{'bad':>8}"


@dataclass
class Line:
    """What the kills of one flow have left."""

    flow: Flow
    points: int = 0
    states: int = 0
    tried: int = 0
    bad: list[tuple[Point, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return (f"{self.flow.victim:12}{self.flow.name:28}{self.points:8}{self.states:8}{self.tried:8}"
                f"{len(self.bad):8}")


def sweep(flows: Sequence[Flow] = FLOWS, part: int = 1, first: int = 0,
          tell: Callable[[object], None] = lambda line: None, whole: bool = False) -> list[Line]:
    """Kill each of `flows` in every `part`-th of its states, counted through from number `first` on; `whole`: at the
    points instead."""
    lines, number = [], 0
    for flow in flows:
        line, everywhere = Line(flow), [p for lag_s in LAGS_S for p in points(flow, lag_s)]
        line.points, line.states = len(everywhere), len(distinct(everywhere))
        for point in everywhere if whole else distinct(everywhere):
            if number % part == first:
                line.tried += 1
                if why := trouble(kill, point):
                    line.bad.append((point, why))
            number += 1
        lines.append(line)
        tell(line)
    return lines


def trouble(kill: Callable[[Point], None], point: Point) -> str:
    """What was wrong after that kill; empty if nothing was."""
    try:
        kill(point)
    except Exception:  # noqa: BLE001 - whatever it is, it is told
        return traceback.format_exc(limit=-6)
    return ""


def nothing_bad_is_left(flows: Sequence[Flow], world: type[World], kill: Callable[[Point], None], part: int) -> None:
    """Kill the flows of `world` in one state of `part`, in each run in others, and print how many. AssertionError for
    what is left, lost or doubled."""
    everywhere = [p for flow in flows for lag_s in LAGS_S for p in points(flow, lag_s, world)]
    states = distinct(everywhere)
    tried = states[random.randrange(part)::part]
    bad = [f"{point}\n{why}" for point in tried if (why := trouble(kill, point))]
    print(f"{len(everywhere)} crash points, {len(states)} states, {len(tried)} tried: {len(bad)} leaks or losses")
    assert not bad, "\n\n".join(bad)


def table(flows: Sequence[Flow] = FLOWS, part: int = 1, tell: Callable[[object], None] = print,
          whole: bool = False) -> list[str]:
    """Sweep, told line by line; the answer is every trouble in full."""
    begun, first = time.monotonic(), random.randrange(part)
    tell(HEAD)
    lines = sweep(flows, part, first, tell, whole)
    total, tried = sum(line.points for line in lines), sum(line.tried for line in lines)
    states = sum(line.states for line in lines)
    bad = [f"{point}\n{why}" for line in lines for point, why in line.bad]
    which = f"{tried}" if part == 1 else f"every {part}th from number {first} on, {tried},"
    tell(f"{total} crash points (each call and each write x before/after, prompt and late listings), {states} states, "
         f"{which} tried in {time.monotonic() - begun:.0f} s: {len(bad)} leaks or losses")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, default=1, metavar="N", help="try one state of N only")
    parser.add_argument("--flow", default="", help="one flow by its name")
    parser.add_argument("--whole", action="store_true", help="try every point, also those of one state")
    given = parser.parse_args()
    logging.disable()  # what dispatchers say about their deaths
    bad = table([f for f in FLOWS if given.flow in ("", f.name)], given.part, whole=given.whole)
    print("\n".join(bad), end="")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
