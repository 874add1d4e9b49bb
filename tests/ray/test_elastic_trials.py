"""Ray Tune over elastic trials on the cluster of this folder: resizes, Ray's own schedulers, a lost node."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from spotfleet.errors import UsageError
from spotfleet.protocol.messages import load
from spotfleet.protocol.ray_cluster import PlacedTrials
from spotfleet.ray.cluster.gcs import Gcs
from spotfleet.ray.tune import DistributedTrainableCreator, GrowBest, SizesClient, elastic, resize
from spotfleet.ray.tune.sizes import NAME, NAMESPACE
from spotfleet.version import install
from tests.ray.conftest import eventually

HAS_TUNE = all(importlib.util.find_spec(name) for name in ("ray", "pandas", "pyarrow"))  # not imported by `core`
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400),
              pytest.mark.skipif(not HAS_TUNE, reason=f"Ray Tune is not installed: {install('tune')}")]


@pytest.fixture(autouse=True)
def quiet_tune(monkeypatch):
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "0")


def train(config: dict[str, Any]) -> None:
    """A loop with Ray's own names. Each report has a checkpoint, if the config wants it."""
    import tempfile

    import torch
    from ray import tune

    import spotfleet.train as hvd

    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    first = 0
    if config.get("keeps") and (found := tune.get_checkpoint()) is not None:
        with found.as_directory() as folder:
            first = int(Path(folder, "step").read_text()) + 1

    @hvd.elastic.run
    def loop(state):
        for state.step in range(state.step, config["steps"]):  # noqa: B020
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            time.sleep(config.get("step_s", 0.02) / (1 + config.get("quality", 0.0)))  # the better, the faster
            result = {"step": state.step, "size": hvd.size(), "worker": os.getpid(), "at": time.monotonic(),
                      "score": config.get("quality", 0.0) - 1 / (state.step + 1)}
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "step").write_text(str(state.step))
                kept = tune.Checkpoint.from_directory(folder) if config.get("keeps") else None
                tune.report(result, checkpoint=kept)

    loop(hvd.elastic.TorchState(model, optimizer, step=first))


def run(trainable: type, folder: Path, space: dict[str, Any], callback: Any = None, **config: Any) -> Any:
    from ray import tune

    callbacks, stop = [c for c in (callback, config.pop("grow", None)) if c is not None], config.pop("stop", None)
    return tune.Tuner(
        trainable, param_space=space, tune_config=tune.TuneConfig(**config),
        run_config=tune.RunConfig(storage_path=str(folder), name="runs", verbose=0, callbacks=callbacks, stop=stop,
                                  checkpoint_config=tune.CheckpointConfig(num_to_keep=4))).fit()


class Here:
    """A function that stays in this process: Tune pickles its callbacks, and never loads them."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self.call = function

    def __reduce__(self) -> tuple:
        return Here, ()


def watcher(act: Callable[[str, list[dict[str, Any]]], None]) -> Any:
    """A callback of Tune that keeps all results by trial, and calls `act` after each."""
    from ray import tune

    here = Here(act)

    class Watcher(tune.Callback):
        def __init__(self) -> None:
            self.results: dict[str, list[dict[str, Any]]] = {}

        def on_trial_result(self, iteration, trials, trial, result, **info):
            rows = self.results.setdefault(trial.trial_id, [])
            rows.append(dict(result))
            here.call(trial.trial_id, rows)

    return Watcher()


def workers(cluster) -> list[str]:
    found = []
    for node in cluster.nodes:
        for process in cluster.workers_of(node):
            try:
                found.append(" ".join(process.cmdline()))
            except psutil.NoSuchProcess:
                continue
    return [name for name in found if "TrainingActor" in name]


def test_a_trial_grows_and_shrinks_live_and_twenty_resizes_leak_no_actor(cluster, tmp_path):
    """Rank 0 goes on in its process while the others come and go, and no step is made twice. The trial's own growth
    schedule makes the first change."""
    flips: list[int] = []
    left: list[int] = []  # processes of workers after the last resize, while the trial trains
    gcs, placed = Gcs(cluster.address), []

    def act(trial_id: str, rows: list[dict[str, Any]]) -> None:
        placed.extend(load(PlacedTrials, gcs.trials() or b"{}").trials)
        if len(rows) == 2:  # another actor takes over with what the trial claims
            cluster.ray.kill(cluster.ray.get_actor(NAME, namespace=NAMESPACE))
        elif len(flips) < 20 and any(r["size"] == 2 for r in rows):
            flips.append(2 - len(flips) % 2)
            assert resize(trial_id, flips[-1]) == flips[-1]
        elif len(flips) == 20 and rows[-1]["size"] == 1:
            left.append(len(workers(cluster)))
            if left[-1] == 1 or len(left) == 500:
                (tmp_path / "over").touch()

    seen = watcher(act)
    space = {"steps": 10**6, "elastic": {"max_join": 1, "growth": {3: 2}}}
    results = run(elastic(train, 1, 2, worker_usd_h=3.6), tmp_path, space, seen,
                  stop=lambda trial_id, result: (tmp_path / "over").exists())
    assert not results.errors
    [rows] = seen.results.values()
    assert [r["step"] for r in rows] == list(range(len(rows)))
    assert len({r["worker"] for r in rows}) == 1 == len({r["pid"] for r in rows})
    assert left[-1] == 1
    assert {1, 2} == {r["size"] for r in rows} and rows[-1]["workers"] in (1, 2)
    grown = next(n for n, r in enumerate(rows) if r["size"] == 2)
    print(f"live resize: gap {rows[grown]['at'] - rows[grown - 1]['at']:.2f} s")
    last = rows[-1]
    assert last["worker_s"] > last["at"] - rows[0]["at"] and last["cost_usd"] == pytest.approx(
        last["worker_s"] / 1000, abs=1e-5)
    eventually(lambda: not workers(cluster))
    assert SizesClient().sizes() == {}
    known = {n.node_id for n in cluster.nodes}
    assert {(p.trial, p.name, p.cpus) for p in placed} == {(last["trial_id"], f"train_{last['trial_id']}", 1.0)}
    assert {sum(p.nodes.values()) for p in placed} >= {1, 2} and {n for p in placed for n in p.nodes} <= known
    eventually(lambda: not load(PlacedTrials, gcs.trials()).trials)


def test_asha_stops_trials_and_their_atoms_go_to_the_best(cluster, tmp_path):
    from ray import tune

    def act(trial_id: str, rows: list[dict[str, Any]]) -> None:
        if rows[-1]["size"] > 1 and rows[-1]["config"]["quality"] == 3.0:
            (tmp_path / "over").touch()

    seen = watcher(act)
    space = {"steps": 10**6, "step_s": 0.3, "quality": tune.grid_search([3.0, 2.0, 1.0])}
    results = run(elastic(train, 1, 3, atoms=3), tmp_path, space, seen, metric="score", mode="max",
                  grow=GrowBest("score", "max", 3), max_concurrent_trials=3,
                  stop=lambda trial_id, result: (tmp_path / "over").exists(),
                  scheduler=tune.schedulers.ASHAScheduler(time_attr="training_iteration", grace_period=4,
                                                          reduction_factor=2, max_t=10**6))
    assert not results.errors and results.get_best_result().config["quality"] == 3.0
    sizes = {r.config["quality"]: {row["size"] for row in seen.results[r.metrics["trial_id"]]} for r in results}
    assert sizes[1.0] == {1} and sizes[3.0] != {1}, "an atom of a trial that was stopped has gone to the best"
    for rows in seen.results.values():
        assert [r["step"] for r in rows] == list(range(len(rows)))
    eventually(lambda: not workers(cluster))


def test_pbt_copies_the_best_trial_from_a_checkpoint_that_is_written_when_asked(cluster, tmp_path):
    from ray import tune

    (tmp_path / "saved").mkdir()

    def learns(config: dict[str, Any]) -> None:
        import torch

        import spotfleet.train as hvd
        from spotfleet.ray.tune import get_checkpoint, report

        hvd.init()
        first, level = 0, 0.0
        if (found := get_checkpoint()) is not None:
            with found.as_directory() as folder:
                first, level = json.loads(Path(folder, "state").read_text())
        model = torch.nn.Linear(1, 1)

        def save(folder: str) -> None:
            Path(folder, "state").write_text(json.dumps([state.step + 1, state.level]))
            Path(config["saved"], str(time.time_ns())).touch()

        @hvd.elastic.run
        def loop(state):
            for state.step in range(state.step, 10**6):  # noqa: B020
                state.level += config["rate"]
                time.sleep(0.05)
                report({"level": state.level, "step": state.step}, checkpoint=save)

        state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=first, level=level)
        loop(state)

    def act(trial_id: str, rows: list[dict[str, Any]]) -> None:
        if rows[0]["level"] == 0.0 < rows[-1]["level"]:
            (tmp_path / "over").touch()

    seen = watcher(act)
    space = {"rate": tune.grid_search([0.0, 1.0]), "saved": str(tmp_path / "saved")}
    pbt = tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration", perturbation_interval=12, quantile_fraction=0.5, resample_probability=0.0,
        hyperparam_mutations={"rate": [1.0, 2.0]}, log_config=False)
    results = run(elastic(learns, 1, 1), tmp_path, space, seen, metric="level", mode="max", scheduler=pbt,
                  reuse_actors=True, stop=lambda trial_id, result: (tmp_path / "over").exists())
    assert not results.errors
    assert min(r.metrics["level"] for r in results) > 0, "the one that learned nothing is a copy of the other"
    reported = sum(len(rows) for rows in seen.results.values())
    assert 0 < len(list((tmp_path / "saved").iterdir())) <= reported / 6, "not with each result"
    eventually(lambda: not workers(cluster))


def test_a_lost_node_touches_only_the_trial_that_trained_on_it(cluster, tmp_path):
    """Four trials on four nodes. One that loses its worker goes on from its checkpoint, in a new one elsewhere."""
    from ray import tune

    lost: list[str] = []

    def act(trial_id: str, rows: list[dict[str, Any]]) -> None:
        done = len(seen.results) == 4 and all(len(r) >= 5 for r in seen.results.values())
        if done and not lost:
            node, here = next((n, pids) for n in cluster.nodes
                              if rows[-1]["worker"] in (pids := [p.pid for p in cluster.workers_of(n)]))
            lost.extend(t for t, found in seen.results.items() if found[-1]["worker"] in here)
            cluster.lose(node)
        if lost and all(len({r["worker"] for r in seen.results[t]}) == 2 for t in lost):
            (tmp_path / "over").touch()

    seen = watcher(act)
    space = {"steps": 10**6, "keeps": True, "step_s": 0.1, "number": tune.grid_search([0, 1, 2, 3])}
    on_head = {"node:__internal_head__": 0.001}
    results = run(elastic(train, 1, 1, cpus_per_worker=0.5, coordinator=on_head), tmp_path, space, seen,
                  stop=lambda trial_id, result: (tmp_path / "over").exists())
    assert not results.errors
    assert len(lost) < 4
    for trial_id, rows in seen.results.items():
        at = [r["at"] for r in rows]
        gap = max(b - a for a, b in itertools.pairwise(at))
        print(f"{'lost' if trial_id in lost else 'untouched'}: longest gap {gap:.2f} s in {at[-1] - at[0]:.0f} s")
    for trial_id, rows in seen.results.items():
        assert len({r["worker"] for r in rows}) == (2 if trial_id in lost else 1)
        assert len({r["pid"] for r in rows}) == 1
        steps = [r["step"] for r in rows]
        assert steps == list(range(len(steps))), "from its checkpoint, and none twice"
    eventually(lambda: not workers(cluster))


def test_errors_of_the_function_and_of_the_arguments_are_clear(cluster, tmp_path):
    def early(config: dict[str, Any]) -> None:
        from ray import tune

        tune.report({"loss": 1.0})

    results = run(elastic(early), tmp_path, {})
    assert "tune.report() before hvd.init()" in str(results.errors[0])
    with pytest.raises(UsageError, match="max_workers is 1 and min_workers is 2"):
        elastic(early, 2, 1)
    with pytest.raises(UsageError, match="takes no argument"):
        elastic(lambda: None)
    with pytest.raises(UsageError, match="atoms is 1 and min_workers is 2"):
        elastic(early, 2, 3, atoms=1)
    with pytest.raises(UsageError, match="one of num_workers and num_hosts"):
        DistributedTrainableCreator(early, num_hosts=2, num_workers=2)
    assert DistributedTrainableCreator(early, num_hosts=2, num_slots=2, use_gpu=False).__name__ == "early"
