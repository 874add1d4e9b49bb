"""Accuracy by a deadline: HyperSched against ASHA on eight workers, on a virtual clock.

    python bench/on_ray/hypersched.py [--seeds N] [--resize SECONDS]

Both schedulers get the same 100 trials in the same order, on the curves of `curves.py`. ASHA is the rule of Ray's
`ASHAScheduler` with its defaults and a reduction factor of 4; each trial has one worker. A trial takes 3 s to begin. A
trial on n workers is n^0.9 times as fast; a resize pauses it. What counts is the accuracy, when time is up, of the
trial with the best reported score.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

import numpy as np
from curves import SEEDS, SETS, Curve, CurveSet

from spotfleet.ray.tune.hypersched import HyperSched, TrialResult

ATOMS, START_S, SCALING = 8, 3.0, 0.9


class Asha:
    """Rule of Ray 2.60's `AsyncHyperBandScheduler`, one bracket."""

    def __init__(self, max_epochs: int, eta: int = 4) -> None:
        rungs = int(math.log(max_epochs) / math.log(eta) + 1)
        self.rungs: list[tuple[int, dict[str, float]]] = [(eta**k, {}) for k in reversed(range(rungs))]
        self.max_epochs, self.eta = max_epochs, eta

    def observe(self, result: TrialResult) -> bool:
        if result.epochs >= self.max_epochs:
            return False
        for epochs, scores in self.rungs:
            if result.epochs < epochs or result.trial in scores:
                continue
            cutoff = np.percentile(list(scores.values()), (1 - 1 / self.eta) * 100) if scores else -math.inf
            scores[result.trial] = result.score
            return bool(result.score >= cutoff)
        return True


@dataclass
class Running:
    curve: Curve
    workers: int = 1
    epochs: float = 0.0
    since: float = 0.0  # trains from then on
    began_epoch: float = 0.0
    event: int = -1


@dataclass
class Cluster:
    """One experiment: trials that train on a virtual clock."""

    curves: CurveSet
    seed: int
    deadline_s: float
    scheduler: Asha | HyperSched
    resize_s: float
    running: dict[str, Running] = field(default_factory=dict)
    results: dict[str, tuple[float, float]] = field(default_factory=dict)  # trial -> best score, accuracy by now
    resizes: int = 0

    def play(self) -> tuple[float, int, int]:
        """Return the accuracy, the number of trials begun and that of resizes."""
        self.fresh = [(f"t{n}", curve) for n, curve in enumerate(self.curves.draw(self.seed))]
        self.events: list[tuple[float, int, str]] = []
        self.number = itertools.count()
        self.fill(0.0)
        while self.events:
            now, event, name = heapq.heappop(self.events)
            if now > self.deadline_s:
                break
            if name in self.running and self.running[name].event == event:
                self.finish_epoch(name, now)
                self.fill(now)
        _score, accuracy = max(self.results.values(), default=(0.0, 0.0))
        return accuracy, len(self.results), self.resizes

    def finish_epoch(self, name: str, now: float) -> None:
        trial = self.running[name]
        trial.epochs = float(math.floor(trial.epochs + 1e-9) + 1)
        score = trial.curve.reported(int(trial.epochs))
        best = max(score, self.results.get(name, (score, 0.0))[0])
        self.results[name] = best, trial.curve.accuracy(trial.epochs)
        epoch_s = self.curves.epoch_s / trial.workers**SCALING
        first_s = START_S + epoch_s if trial.epochs == 1 else None
        if self.scheduler.observe(TrialResult(name, int(trial.epochs), score, trial.workers, epoch_s, first_s)):
            trial.since = now
            self.expect(name, now)
        else:
            del self.running[name]

    def fill(self, now: float) -> None:
        explores = True
        if isinstance(self.scheduler, HyperSched):
            plan = self.scheduler.plan(list(self.running), bool(self.fresh), self.deadline_s - now)
            explores = plan.explores
            for name in sorted(plan.wishes, key=lambda n: plan.wishes[n] - self.running[n].workers):
                free = ATOMS - sum(t.workers for t in self.running.values())
                self.resize(name, min(plan.wishes[name], self.running[name].workers + free), now)
        while explores and self.fresh and sum(t.workers for t in self.running.values()) < ATOMS:
            name, curve = self.fresh.pop(0)
            self.running[name] = Running(curve, since=now + START_S)
            self.expect(name, now)

    def resize(self, name: str, workers: int, now: float) -> None:
        trial = self.running[name]
        if workers == trial.workers:
            return
        trial.epochs += max(0.0, now - trial.since) / self.curves.epoch_s * trial.workers**SCALING
        trial.workers, trial.since = workers, max(trial.since, now + self.resize_s)
        self.resizes += 1
        self.expect(name, now)

    def expect(self, name: str, now: float) -> None:
        trial = self.running[name]
        left = math.floor(trial.epochs + 1e-9) + 1 - trial.epochs
        trial.event = next(self.number)
        at = max(now, trial.since) + left * self.curves.epoch_s / trial.workers**SCALING
        heapq.heappush(self.events, (at, trial.event, name))


def cell(curves: CurveSet, deadline_s: int, seeds: Sequence[int], resize_s: float) -> dict[str, object]:
    """Return one line of the table. Accuracies in per cent, differences in points."""
    asha = [Cluster(curves, s, deadline_s, Asha(curves.max_epochs), 0.0).play() for s in seeds]
    hyper = [Cluster(curves, s, deadline_s, HyperSched(ATOMS, curves.max_epochs, resize_s=resize_s), resize_s).play()
             for s in seeds]
    gains = [100 * (h[0] - a[0]) for a, h in zip(asha, hyper, strict=True)]
    return {"curves": curves.name, "deadline_s": deadline_s, "asha": 100 * mean(a[0] for a in asha),
            "hypersched": 100 * mean(h[0] for h in hyper), "mean": mean(gains), "worst": min(gains),
            "best": max(gains), "begun": (mean(a[1] for a in asha), mean(h[1] for h in hyper)),
            "resizes": mean(h[2] for h in hyper)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="HyperSched against ASHA on fixed learning curves")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many of the fixed seeds (all)")
    parser.add_argument("--resize", type=float, default=0.2, help="pause of a trial that is resized, in seconds")
    args = parser.parse_args()
    print("| curves | deadline | ASHA | HyperSched | difference in points (worst to best) | begun | resizes |")
    print("|---|---|---|---|---|---|---|")
    failed = []
    for curves in SETS:
        for nth, deadline_s in enumerate(curves.deadlines_s):
            found = cell(curves, deadline_s, SEEDS[: args.seeds], args.resize)
            begun = found["begun"]
            print(f"| {curves.name} | {deadline_s} s | {found['asha']:.2f} | {found['hypersched']:.2f} | "
                  f"{found['mean']:+.2f} ({found['worst']:+.2f} to {found['best']:+.2f}) | "
                  f"{begun[0]:.0f}, {begun[1]:.0f} | {found['resizes']:.0f} |", flush=True)  # fmt: skip
            if found["mean"] < -0.2 or (nth == 0 and found["mean"] <= 0):
                failed.append(f"{curves.name} at {deadline_s} s")
    print("aim (no mean below -0.2, above 0 at each set's shortest deadline): "
          + (f"missed by {', '.join(failed)}" if failed else "kept"))


if __name__ == "__main__":
    main()
