"""HyperSched as a scheduler of Ray Tune, on the cluster of this folder."""

from __future__ import annotations

import time

import pytest

from spotfleet.errors import UsageError
from spotfleet.ray.tune import HyperSchedScheduler, SizesClient, elastic
from tests.ray.conftest import eventually
from tests.ray.test_elastic_trials import quiet_tune, run, train, watcher, workers

pytest.importorskip("ray.tune", reason="Ray Tune is not installed")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
__all__ = ["quiet_tune"]  # a fixture of these tests, too


def test_the_best_trial_gets_the_workers_of_trials_that_fell_behind(cluster, tmp_path):
    """The best one trains until it has grown; the others fall behind at a rung, sooner or later."""
    from ray import tune

    seen = watcher(lambda trial_id, rows: None)
    results = tune.Tuner(
        elastic(train, 1, 4),
        param_space={"steps": 10**6, "quality": tune.grid_search([4.0, 3.0, 2.0, 1.0])},
        tune_config=tune.TuneConfig(
            metric="score", mode="max", max_concurrent_trials=4,
            scheduler=HyperSchedScheduler(3600, grace_period=4, reduction_factor=2, max_t=10**6)),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0, callbacks=[seen],
                                  stop=lambda trial_id, result: result["size"] > 1)).fit()
    assert not results.errors
    best = next(rows for rows in seen.results.values() if rows[-1]["config"]["quality"] == 4.0)
    assert best[-1]["size"] > 1
    assert [r["step"] for r in best] == list(range(len(best))), "live resizes repeat no step"
    assert next(len(rows) for rows in seen.results.values() if rows[-1]["config"]["quality"] == 1.0) < len(best)
    eventually(lambda: not workers(cluster))
    assert SizesClient().sizes() == {}


def test_at_the_deadline_all_trials_end_and_none_begins(cluster, tmp_path):
    began = time.monotonic()
    reported: list[float] = []
    seen = watcher(lambda trial_id, rows: reported.append(time.monotonic() - began))
    results = run(elastic(train, 1, 1), tmp_path, {"steps": 10**6, "quality": 1.0}, seen, metric="score", mode="max",
                  num_samples=40, max_concurrent_trials=6, scheduler=HyperSchedScheduler(20))
    assert not results.errors and len(results) == 40
    trained = [r for r in results if r.metrics and r.metrics.get("training_iteration")]
    assert len(trained) < 40, "those that had not begun never do"
    eventually(lambda: not workers(cluster))


@pytest.mark.parametrize(("given", "named"), [
    ({"deadline_s": 0}, "deadline_s is 0"), ({"deadline_s": 9, "reduction_factor": 1}, "reduction_factor is 1"),
    ({"deadline_s": 9, "mode": "best"}, "mode is 'best'"), ({"deadline_s": 9, "max_t": 0}, "max_t"),
])  # fmt: skip
def test_arguments_out_of_range_are_named(given, named):
    with pytest.raises(UsageError, match=named):
        HyperSchedScheduler(**given)
