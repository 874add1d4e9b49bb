"""HyperSched: the best trial by a deadline, on a fixed number of workers. Pure: no Ray, no clock.

After Liaw et al., "HyperSched: Dynamic Resource Reallocation for Model Development on a Deadline" (SoCC 2019): explore
with one worker per trial first, then give the workers to the best trials. Trials that fall behind are stopped by the
rule of ASHA (Li et al. 2018), with the quantile of Ray's `ASHAScheduler`. Where the rules differ from the paper's:

- Exploration ends by the leader. Once the time left, without that until a first result, is less than `CATCH_UP` of what
  the leader's epochs took one worker, a trial that began now could not come near it. The paper's bounds come from the
  longest trial.
- A trial that falls behind is stopped, not paused: it keeps no checkpoint that could bring it back.
- A rung is judged again only once exploration has ended. Then a trial whose value there has fallen out of the best
  1/eta meanwhile stops, too, and the better ones get its workers. The paper does so from the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

CATCH_UP = 0.5  # chosen on curves with other seeds than those that bench/on_ray/hypersched.py reports
GAIN = 1.1  # a larger trial must get this much more done in the time left, as in the paper
SCALING = 0.9  # exponent of the speed in workers, until it has been measured
KEPT = 20  # epochs whose durations are kept for each number of workers


@dataclass(frozen=True)
class TrialResult:
    trial: str
    epochs: int  # finished so far
    score: float  # higher is better
    workers: int  # that it had during the last epoch
    epoch_s: float | None  # how long that epoch took; None: not known, or with the start or a resize in it
    first_s: float | None = None  # from its beginning to this result, if this is its first one


@dataclass(frozen=True)
class SizesPlan:
    wishes: dict[str, int]  # trial -> workers, the best first
    explores: bool  # other trials may begin
    why: str


@dataclass
class HyperSched:
    """Decides which trials go on and how many workers each has.

    Args:
        atoms: workers of all trials together.
        max_epochs: a trial that has finished so many is complete.
        grace: epochs before a trial may be stopped; the first rung.
        eta: a rung keeps the best 1/eta; rungs are at grace * eta^k epochs.
        resize_s: pause of a trial when it changes its size.
    """

    atoms: int
    max_epochs: int = 100
    grace: int = 1
    eta: int = 4
    resize_s: float = 0.25
    _rungs: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    _best: dict[str, float] = field(default_factory=dict)
    _epochs: dict[str, int] = field(default_factory=dict)
    _took_s: dict[int, list[float]] = field(default_factory=dict)  # workers -> durations of epochs
    _sizes: dict[str, int] = field(default_factory=dict)
    _first_s: float | None = None  # least time to a first result: others have waited for atoms as well
    _leader: str | None = None  # the best trial that trains, once exploration has ended

    def __post_init__(self) -> None:
        rungs = int(math.log(self.max_epochs / self.grace, self.eta) + 1e-9) + 1
        self._rungs = [(self.grace * self.eta**k, {}) for k in reversed(range(rungs))]

    def observe(self, result: TrialResult) -> bool:
        """Record a result; return whether the trial goes on."""
        self._best[result.trial] = max(result.score, self._best.get(result.trial, -math.inf))
        self._epochs[result.trial] = result.epochs
        self._sizes[result.trial] = result.workers
        if result.epoch_s is not None:
            took = self._took_s.setdefault(result.workers, [])
            took.append(result.epoch_s)
            del took[:-KEPT]
        if result.first_s is not None:
            self._first_s = result.first_s if self._first_s is None else min(self._first_s, result.first_s)
        keeps_up = result.epochs < self.max_epochs and self._keeps_up(result)
        return keeps_up and (self._leader is None or result.trial == self._leader or self._is_ahead(result.trial))

    def plan(self, live: Sequence[str], waiting: bool, left_s: float) -> SizesPlan:
        """Share the atoms among the trials that train. `live`: in the order of their beginnings; `waiting`: others
        could begin; `left_s`: seconds to the deadline."""
        order = sorted(live, key=lambda trial: -self._best.get(trial, -math.inf))
        known = [trial for trial in order if trial in self._best]
        explores, why = self._explores(known, left_s) if waiting else (False, "no trial is left to begin")
        self._leader = known[0] if known and not explores else None
        if explores or not known:
            return SizesPlan({trial: 1 for trial in order}, explores, why)
        wishes = {trial: 1 for trial in order}
        for n in range(self.atoms - len(order)):
            wishes[known[n % len(known)]] += 1
        kept = [t for t in known if wishes[t] > self._sizes[t] and not self._gains(self._sizes[t], wishes[t], left_s)]
        return SizesPlan(wishes | {trial: self._sizes[trial] for trial in kept}, False, why)

    def _keeps_up(self, result: TrialResult) -> bool:
        """Apply ASHA's rule: at a rung, a trial stops below the top 1/eta of the trials that have reached it."""
        for epochs, scores in self._rungs:
            if result.epochs < epochs or result.trial in scores:
                continue
            behind = bool(scores) and result.score < self._cutoff(scores)
            scores[result.trial] = result.score
            return not behind
        return True

    def _is_ahead(self, trial: str) -> bool:
        """Apply ASHA's rule again at the highest rung that the trial has reached, with all values there by now."""
        scores = next((found for _epochs, found in self._rungs if trial in found), {})
        return trial not in scores or scores[trial] >= self._cutoff(scores)

    def _cutoff(self, scores: Mapping[str, float]) -> float:
        return _quantile(list(scores.values()), 1 - 1 / self.eta)

    def _explores(self, known: Sequence[str], left_s: float) -> tuple[bool, str]:
        if not known or not self._took_s:
            return True, "no epoch has been timed yet"
        took_s = self._epochs[known[0]] * self._epoch_s(1)
        first_s = self._first_s or 0.0
        if left_s - first_s >= CATCH_UP * took_s:
            return True, f"{left_s:.0f} s are left; a trial that begins now can come near the best"
        return False, (f"{left_s:.0f} s are left, a first result takes {first_s:.0f} s, and the best trial's epochs "
                       f"took one worker {took_s:.0f} s")

    def _gains(self, workers: int, more: int, left_s: float) -> bool:
        return (left_s - self.resize_s) / self._epoch_s(more) > GAIN * left_s / self._epoch_s(workers)

    def _epoch_s(self, workers: int) -> float:
        """Return the duration of an epoch on so many workers: measured, else scaled from the nearest number."""
        if not self._took_s:
            return workers**-SCALING  # in any unit
        nearest = min(self._took_s, key=lambda n: (abs(n - workers), n))
        return median(self._took_s[nearest]) * (nearest / workers) ** SCALING


def _quantile(values: list[float], share: float) -> float:
    """Return a quantile as numpy's `percentile` does: linear between the two nearest values."""
    if len(values) == 1:
        return values[0]
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[round(share * 100) - 1]
