"""Explanation of the time that a training step takes. Pure.

All ranks of a job make a step in the same time, because each reduction needs all of them. The ranks' waits in
reductions therefore show where the time goes:

    rank 0   |--computes--|-------------waits-------------|
    rank 1   |--computes------------|--------waits--------|      the slowest: it waits least
                          '-- lag --'---- reductions -----'

- `compute_s`: the time in which a usual rank does not wait (the median of all). Reductions that overlap with backward
  are included.
- `lag_s`: how much longer a usual rank waits than the slowest one, which waits least. The network is not the cause.
- `reduce_s`: the wait of the slowest rank, for which all others are ready: the reductions themselves.

The time of a reduction at this distance is derived, and printed with "about". gloo sends parts around the ring of
ranks in 2 (n - 1) messages. Each needs the one before and waits until the receiver accepts it, so each costs a round
trip as the kernel measured it; two reductions run at a time. (Ranks 20 ms apart, 40 bytes: 2 of them take 2.04 round
trips, 3 of them 4.1, 5 of them 8.4; twice that from the third reduction on.) NCCL chooses its routes itself, so no such
estimate is printed for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from spotfleet.fleet.domain.events import StepExplained
from spotfleet.protocol.messages import StepCost

ENOUGH = 8  # steps that each rank has made in the generation
AGAIN_S = 30.0  # between two explanations for one generation
CHANGED = 1.5  # factor by which the step time must change for another explanation
GLOO_AT_ONCE = 2  # reductions that run at the same time: train/comm/gloo.py gives it two threads
WORTH = 0.1  # share of a step below which a part is not explained
LONG_RTT_S = 0.001  # a round trip within one data center room takes less
REST = 0.3  # share of the reductions' time that the distance leaves unexplained, from which bytes are reported
LOSSY, MANY_RESENT = 0.001, 10  # resent segments, as share and as count, that are reported; a few are normal
MUCH_BYTES = 100_000  # fewer take negligible time


@dataclass(frozen=True)
class RankStepCost:
    """Measurements of one member of the generation."""

    worker: str
    address: str
    step_s: float
    cost: StepCost

    @property
    def host(self) -> str:
        return self.worker.partition("/")[0]


@dataclass(frozen=True)
class _LastExplained:
    generation: int
    step_s: float
    at: float


class Explainer:
    """Explanations of one job's step time, rate-limited."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._last = _LastExplained(0, 0.0, 0.0)
        self.newest: StepExplained | None = None  # for the generation in the latest call of `update`

    def update(self, generation: int, ranks: Sequence[RankStepCost], now: float, unix: float) -> StepExplained | None:
        """Return an explanation if there is a new one. `ranks` are in order; `now` is monotonic, `unix` Unix time."""
        if self.newest is not None and self.newest.generation != generation:
            self.newest = None
        if len(ranks) < 2 or any(r.cost.steps < ENOUGH or r.step_s <= 0 for r in ranks):
            return None
        last, step_s = self._last, median(r.step_s for r in ranks)
        if last.generation == generation:
            same = last.step_s / CHANGED < step_s < last.step_s * CHANGED
            if same or now - last.at < AGAIN_S:
                return None
        self._last = _LastExplained(generation, step_s, now)
        self.newest = explain(self._job, generation, ranks, unix)
        return self.newest


def explain(job: str, generation: int, ranks: Sequence[RankStepCost], unix: float) -> StepExplained:
    """Return why a step of two or more `ranks` takes as long as it does."""
    step_s, waits = median(r.step_s for r in ranks), [min(r.cost.wait_s, r.step_s) for r in ranks]
    reduce_s = min(waits)
    slow = ranks[waits.index(reduce_s)]
    lag_s = median(w for r, w in zip(ranks, waits, strict=True) if r is not slow) - reduce_s
    has_lag = lag_s >= WORTH * step_s
    lag_s = lag_s if has_lag else 0.0  # no rank is slow: ranks differ a little
    compute_s = max(0.0, step_s - reduce_s - lag_s)
    far = max(ranks, key=lambda r: r.cost.rtt_s)
    between = (far.host, _host_at(far.cost.rtt_to, ranks)) if far.cost.rtt_s > 0 else ()
    parts = [f"{_s(compute_s)} computing"]
    if has_lag:
        parts.append(f"{_s(lag_s)} waiting for the slowest rank, {slow.worker}, which computes {_s(compute_s + lag_s)}")
    parts.append(f"{_s(reduce_s)} in reductions")
    why = f"a step takes {_s(step_s)}: {', '.join(parts)}"
    if reduce_s >= WORTH * step_s:
        why = "; ".join([why, *_reductions(ranks, reduce_s, between, far.cost.rtt_s)])
    return StepExplained(unix, job, generation, step_s, compute_s, lag_s, reduce_s, far.cost.rtt_s, between,
                         slow.worker if has_lag else "", why)


def _reductions(ranks: Sequence[RankStepCost], reduce_s: float, between: Sequence[str], rtt_s: float) -> list[str]:
    """Return what explains the time of the reductions, as parts of a sentence."""
    cost, size, parts = ranks[0].cost, len(ranks), []
    if between and rtt_s >= LONG_RTT_S:
        parts.append(f"{_ms(rtt_s)} from {between[0]} to {between[1]} and back")
    count, each_s = max(1, cost.reductions), _each_s(ranks) if cost.backend == "gloo" else 0.0
    far_s, rest_s = math.ceil(count / GLOO_AT_ONCE) * each_s, reduce_s
    if far_s >= max(LONG_RTT_S, WORTH * reduce_s):
        turns = f", {GLOO_AT_ONCE} at a time" if count > 1 else ""
        trips = f"{2 * (size - 1)} round trips in a row"
        parts.append(f"{_many(count, 'reduction')} of {trips}{turns}, about {_s(each_s)} each")
        rest_s -= far_s
    moved = 2 * (size - 1) * cost.bytes / size
    if rest_s >= REST * reduce_s and moved >= MUCH_BYTES:
        rest = "the rest of it" if rest_s < reduce_s else _s(rest_s)
        parts.append(f"{_bytes(moved)} sent by each rank in {rest}, {_bytes(moved / rest_s)}/s")
    sent, resent = sum(r.cost.sent for r in ranks), sum(r.cost.resent for r in ranks)
    if resent >= MANY_RESENT and resent >= LOSSY * sent:
        parts.append(f"{100 * resent / sent:.2g} % of {sent} segments were sent twice: the network loses some")
    return parts


def _each_s(ranks: Sequence[RankStepCost]) -> float:
    """Return the seconds of one reduction at this distance: the longest path of 2 (n - 1) messages around the ring."""
    size = len(ranks)
    hops_s = [r.cost.next_s for r in ranks]
    return max(sum(hops_s[(first + i) % size] for i in range(2 * (size - 1))) for first in range(size))


def _host_at(address: str, ranks: Sequence[RankStepCost]) -> str:
    return next((r.host for r in ranks if r.address == address), address)


def _s(seconds: float) -> str:
    """Format seconds with two or three digits: 0.310 s, 12.0 s, 4.2 ms."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds:.3f} s" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
