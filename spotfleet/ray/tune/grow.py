"""`GrowBest`: free atoms go to the best trials, under any of Ray Tune's schedulers.

The rule is pure. It only grows trials; `Sizes` takes atoms back where another trial begins.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.ray.installed import load_tune
from spotfleet.ray.params import check_count
from spotfleet.ray.tune.sizes import SizesClient, SizesOverview

EVERY_S = 0.5


def growth(overview: SizesOverview, values: Mapping[str, float], coming: int) -> dict[str, int]:
    """Return the wishes that give the free atoms to the trials with the highest values, each up to its most workers.

    `coming` trials will begin, and keep their first atoms. Trials without a value yet get none. A trial that has lost
    atoms to another gets none back by an older wish.
    """
    least = max((t.least for t in overview.trials.values()), default=1)
    free, wishes = overview.free - coming * least, {}
    for trial_id in sorted((t for t in overview.trials if t in values), key=lambda t: values[t], reverse=True):
        found = overview.trials[trial_id]
        more = min(free, found.most - found.size) if found.size else 0
        if found.size and found.size + max(0, more) != found.goal:
            wishes[trial_id] = found.size + max(0, more)
        free -= max(0, more)
    return wishes


def coming_trials(states: Mapping[str, str], begun: Container[str], total: int, at_once: int | None) -> int:
    """Return how many trials will claim their first atoms soon: Tune has started them, or may start them.

    `states`: Tune's state of each trial; `begun`: trials that have claimed atoms; `total` samples in all; `at_once`:
    Tune's limit of trials at a time.
    """
    waiting = sum(s in ("PENDING", "PAUSED") for s in states.values()) + max(0, total - len(states))
    runs = [t for t, s in states.items() if s == "RUNNING"]
    more = waiting if at_once is None else max(0, min(waiting, at_once - len(runs)))
    return more + sum(t not in begun for t in runs)


def GrowBest(metric: str, mode: str = "max", max_concurrent_trials: int | None = None) -> Any:
    """Return a callback for `tune.RunConfig(callbacks=[...])`: atoms that no trial needs go to the best trials.

    `max_concurrent_trials`: as in TuneConfig, so that no atoms are kept for trials that Tune does not start yet.
    """
    if mode not in ("max", "min"):
        raise UsageError(f"mode is {mode!r}", hint='set it to "max" or "min"')
    if max_concurrent_trials is not None:
        check_count("max_concurrent_trials", max_concurrent_trials)
    sign, tune = (1.0 if mode == "max" else -1.0), load_tune()

    class GrowBestCallback(tune.Callback):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self._values: dict[str, float] = {}
            self._total = 0
            self._next = 0.0
            self._sizes = SizesClient()

        def setup(self, stop: Any = None, num_samples: Any = None, total_num_samples: int | None = None,
                  **info: Any) -> None:
            self._total = total_num_samples or 0

        def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any],
                            **info: Any) -> None:
            if metric in result:
                self._values[trial.trial_id] = sign * float(result[metric])

        def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
            now = time.monotonic()
            if now < self._next or not self._values:
                return
            self._next = now + EVERY_S
            states = {t.trial_id: t.status for t in trials}
            live = {t: v for t, v in self._values.items() if states.get(t) == "RUNNING"}
            overview = self._sizes.overview()
            coming = coming_trials(states, overview.trials, self._total, max_concurrent_trials)
            if wishes := growth(overview, live, coming):
                self._sizes.wish_all(wishes)

    return GrowBestCallback()
