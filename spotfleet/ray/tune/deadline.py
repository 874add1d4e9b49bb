"""`HyperSchedScheduler`: HyperSched as a scheduler of Ray Tune, over elastic trials.

    tune.Tuner(elastic(train, 1, 8), tune_config=tune.TuneConfig(
        scheduler=HyperSchedScheduler(deadline_s=3600), metric="accuracy", mode="max",
        num_samples=200, max_concurrent_trials=8))

`max_concurrent_trials` should be the number of workers that all trials have together: more would only wait.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.ray.installed import load_tune
from spotfleet.ray.params import check_count
from spotfleet.ray.tune.hypersched import HyperSched, TrialResult
from spotfleet.ray.tune.sizes import SizesClient

EVERY_S = 0.5
HOLD_S = 10.0  # as long as trials are held back after the scheduler has been lost
CONTINUE, STOP = "CONTINUE", "STOP"  # Ray's decisions


def HyperSchedScheduler(deadline_s: float, metric: str | None = None, mode: str | None = None, max_t: int = 100,
                        grace_period: int = 1, reduction_factor: int = 4,
                        time_attr: str = "training_iteration") -> Any:
    """Return a scheduler for `tune.TuneConfig(scheduler=...)` that looks for the best trial within `deadline_s`.

    The time begins with the first trial; at its end all trials stop. The other arguments are those of Ray's
    `ASHAScheduler`. Raises UsageError for values out of range.
    """
    load_tune()
    if not deadline_s > 0:
        raise UsageError(f"deadline_s is {deadline_s!r}", hint="set it to the seconds that the search may take")
    check_count("max_t", max_t)
    check_count("grace_period", grace_period)
    if reduction_factor < 2:
        raise UsageError(f"reduction_factor is {reduction_factor!r}", hint="set it to a whole number from 2 on")
    if mode not in (None, "max", "min"):
        raise UsageError(f"mode is {mode!r}", hint='set it to "max" or "min"')
    base = importlib.import_module("ray.tune.schedulers").FIFOScheduler
    made = type("HyperSchedScheduler", (DeadlineScheduler, base), {})()
    made.begin(HyperSched(0, max_t, grace_period, reduction_factor), deadline_s, metric, mode, time_attr)
    return made


class DeadlineScheduler:
    """The methods that Ray Tune calls; with Ray's FIFOScheduler it is a scheduler."""

    def begin(self, rules: HyperSched, deadline_s: float, metric: str | None, mode: str | None,
              time_attr: str) -> None:
        self._rules, self._deadline_s, self._time_attr = rules, deadline_s, time_attr
        self._metric, self._mode = metric, mode
        self._end = self._next = 0.0
        self._workers: dict[str, int] = {}  # during the last epoch
        self._why, self._holds = "no trial has begun", False

    def set_search_properties(self, metric: str | None, mode: str | None, **_spec: Any) -> bool:
        if (self._metric and metric) or (self._mode and mode):
            return False
        self._metric, self._mode = metric or self._metric, mode or self._mode
        return bool(self._metric and self._mode)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if self._left_s() <= 0:
            return STOP
        if self._metric not in result or self._time_attr not in result:
            return CONTINUE
        workers = result.get("workers", 1)
        first_s = None if trial.trial_id in self._workers else result["time_this_iter_s"]
        timed = self._workers.get(trial.trial_id) == workers
        self._workers[trial.trial_id] = workers
        score = float(result[self._metric]) * (1 if self._mode == "max" else -1)
        epoch_s = result["time_this_iter_s"] if timed else None
        goes_on = self._rules.observe(
            TrialResult(trial.trial_id, int(result[self._time_attr]), score, workers, epoch_s, first_s))
        if goes_on:
            self._share(tune_controller)
        return CONTINUE if goes_on else STOP

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        if self._left_s() <= 0:
            stop_all(tune_controller)
            return None
        if time.monotonic() >= self._next:
            self._share(tune_controller)
        return None if self._holds else super().choose_trial_to_run(tune_controller)  # type: ignore[misc]

    def debug_string(self) -> str:
        return f"HyperSched: {self._why}"

    def _left_s(self) -> float:
        self._end = self._end or time.monotonic() + self._deadline_s
        return self._end - time.monotonic()

    def _share(self, tune_controller: Any) -> None:
        """Wish for the sizes that the rules give, and hold trials back once exploration has ended."""
        self._next = time.monotonic() + EVERY_S
        client = SizesClient()
        sizes = client.overview()
        states = {t.trial_id: t.status for t in tune_controller.get_trials()}
        least = max((t.least for t in sizes.trials.values()), default=1)
        self._rules.atoms = sizes.atoms // least
        live = [t for t, found in sizes.trials.items() if found.size and states.get(t) == "RUNNING"]
        waiting = (not tune_controller.search_alg.is_finished() or "PENDING" in states.values()
                   or any(not found.size for found in sizes.trials.values()))
        plan = self._rules.plan(live, waiting, self._left_s())
        self._why, held, self._holds = plan.why, self._holds, bool(live) and not plan.explores
        if held or self._holds:
            client.hold(HOLD_S if self._holds else 0.0)
        wishes = {t: least * n for t, n in plan.wishes.items()}
        if any(sizes.trials[t].goal != min(n, sizes.trials[t].most) for t, n in wishes.items()):
            client.wish_all(wishes)


def stop_all(tune_controller: Any) -> None:
    """Stop all trials that have not ended, also when they have not begun."""
    for trial in tune_controller.get_trials():
        if not trial.is_finished():
            if trial.status == "PENDING":
                trial.init_local_path()  # else Tune's ResultGrid fails: it asks each trial for its folder
            tune_controller.stop_trial(trial)
