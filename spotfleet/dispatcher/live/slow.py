"""Workers that are slower than the others of their job. Pure.

In a step of a synchronous job all ranks take the same time: the fast ones wait in the collectives for the slow one. So
the time compared is that of a step without these waits. Each worker reports both as medians of its last 20 steps.

Where the fleet file asks for it, the host of a slow worker is replaced, once for each rank: if its successor is slow as
well, that rank's part of the work is larger, and no host is at fault.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from spotfleet.protocol.messages import SlowWorker, WorkerReport

SLOWER = 1.3  # times the median
STEPS = 50  # it must have been so slow for so many steps
LEAST_S = 0.002  # smaller differences are noise of the clock and the scheduler


class SlowWorkers:
    """Slow workers of one job, from one look at its reports after the other."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}  # worker -> its number of steps at the first look that found it slow
        self.found: tuple[SlowWorker, ...] = ()

    def update(self, reports: Iterable[tuple[int, WorkerReport]]) -> tuple[SlowWorker, ...]:
        """Return the slow ones. `reports` are (rank, report) of the members of one generation that have made steps."""
        times = {r.worker: (rank, max(0.0, r.step_s - r.cost.wait_s), r.cost.steps)
                 for rank, r in reports if r.cost.steps > 0 and r.step_s > 0}
        if len(times) < 2:
            self._since, self.found = {}, ()
            return ()
        middle = median_low(took for _, took, _ in times.values())
        slow = {w: t for w, t in times.items() if t[1] > SLOWER * middle and t[1] - middle > LEAST_S}
        # a new generation counts its steps from 0
        self._since = {w: min(self._since.get(w, steps), steps) for w, (_, _, steps) in slow.items()}
        self.found = tuple(SlowWorker(w, rank, took, middle, steps - self._since[w])
                           for w, (rank, took, steps) in slow.items() if steps - self._since[w] >= STEPS)
        return self.found


@dataclass(frozen=True)
class SlowHost:
    """A host to replace."""

    host: str
    ranks: frozenset[int]  # those of its workers
    why: str


def host_to_replace(job: str, found: Iterable[SlowWorker], members: Sequence[str], min_workers: int,
                    replaced: Collection[int]) -> SlowHost | None:
    """Return the host of the slowest worker that may leave: `min_workers` of the generation's `members`, which are
    sorted by rank, are left without it, and it has none of the ranks whose hosts were `replaced` before."""
    for worker in sorted(found, key=lambda w: -w.compute_s):
        host = worker.worker.partition("/")[0]
        ranks = frozenset(rank for rank, name in enumerate(members) if name.partition("/")[0] == host)
        if ranks and not ranks & set(replaced) and len(members) - len(ranks) >= min_workers:
            return SlowHost(host, ranks, f"replace_slow: rank {worker.rank} of {job} computes "
                                         f"{worker.compute_s * 1e3:.1f} ms in a step, the median "
                                         f"{worker.median_s * 1e3:.1f} ms, for {worker.steps} steps")
    return None
