"""Sweep of the flows of one cloud: its table and its command line, for `aws_sweep` and `gcp_sweep`."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.support.sweep.sweep_flows import Flow, Point, distinct
from tests.sweep.kill_sweep import HEAD, Line, trouble

LAGS_S = (0.0, 3.0)  # how late listings are


@dataclass(frozen=True)
class CloudSweep:
    """How the flows of one cloud are killed."""

    cloud: str  # as a reader calls it
    flows: Sequence[Flow]
    points: Callable[[Flow, float], list[Point]]
    kill: Callable[[Point], None]

    def sweep(self, flows: Sequence[Flow], most: int, tell: Callable[[object], None],
              lags_s: Sequence[float] = LAGS_S, at: int = 0, whole: bool = False) -> list[Line]:
        """Kill each of `flows` in all of its states, or in `most` of them, drawn by lot, 0: all; or at request number
        `at` only. `whole`: at all of its points."""
        lines = []
        for flow in flows:
            line, everywhere = Line(flow), [p for lag_s in lags_s for p in self.points(flow, lag_s) if at in (0, p.at)]
            line.points, line.states = len(everywhere), len(distinct(everywhere))
            found = everywhere if whole else distinct(everywhere)
            for point in found if not most else random.sample(found, min(most, len(found))):
                line.tried += 1
                if why := trouble(self.kill, point):
                    line.bad.append((point, why))
                    print(f"{point}\n{why}", file=sys.stderr, flush=True)
            lines.append(line)
            tell(line)
        return lines

    def table(self, flows: Sequence[Flow], most: int = 0, tell: Callable[[object], None] = print,
              lags_s: Sequence[float] = LAGS_S, at: int = 0, whole: bool = False) -> list[str]:
        """Sweep, told line by line; the answer is every trouble in full."""
        begun = time.monotonic()
        tell(HEAD)
        lines = self.sweep(flows, most, tell, lags_s, at, whole)
        total, tried = sum(line.points for line in lines), sum(line.tried for line in lines)
        states = sum(line.states for line in lines)
        bad = [f"{point}\n{why}" for line in lines for point, why in line.bad]
        late = " and ".join(f"{s:g}" for s in lags_s)
        tell(f"{total} points (each request to {self.cloud} x before/after, listings late by {late} s), {states} "
             f"states, {tried} tried in {time.monotonic() - begun:.0f} s: {len(bad)} leaks or losses")
        return bad

    def main(self, doc: str | None) -> int:
        parser = argparse.ArgumentParser(description=doc)
        parser.add_argument("--most", type=int, default=0, metavar="N", help="try N states of each flow only")
        parser.add_argument("--flow", default="", help="flows of this name only")
        parser.add_argument("--victim", default="", help="laptop or dispatcher only")
        parser.add_argument("--at", type=int, default=0, metavar="N", help="request number N only")
        parser.add_argument("--whole", action="store_true", help="try every point, also those of one state")
        given = parser.parse_args()
        logging.disable()  # what dispatchers say about their deaths
        flows = [f for f in self.flows if given.flow in ("", f.name) and given.victim in ("", f.victim)]
        bad = self.table(flows, given.most, lambda line: print(line, flush=True), at=given.at, whole=given.whole)
        print("\n".join(bad), end="")
        return 1 if bad else 0
