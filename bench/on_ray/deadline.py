"""Accuracy on digits after a minute on two workers: HyperSched against Ray's ASHA, with real trials.

    python bench/on_ray/deadline.py [--seeds N] [--seconds S] [--rows FILE]

Both schedulers get the same random hyperparameters in the same order, as elastic trials of `spotfleet.ray.tune`. They
take turns on one local Ray cluster. A batch of 128 is divided among a trial's workers, and each sample costs 0.25 ms of
sleep besides, so that two workers are nearly twice as fast as one. What counts is the validation accuracy of the best
result until the time is up, which begins before the first trial's process starts.

The workload is one in which the number of workers can matter within a minute, chosen with other seeds on a virtual
clock: an epoch takes one worker 0.3 s, learning rates are low enough that the better trials still learn after the
minute, and no trial completes all of its epochs. The first rung is at 8 epochs: before it the order in which trials
start decides, which is chance. Trials begin quickly: Tune reuses their processes, and the data is in a file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

SLOTS, TRIALS = 2, 40
MAX_EPOCHS, GRACE = 400, 8
QUIET = {
    "RAY_AUTH_MODE": "disabled", "RAY_memory_monitor_refresh_ms": "0", "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "180", "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "OMP_NUM_THREADS": "1",
    "RAY_worker_niceness": "0",  # else 15: they would wait for all other work on the machine
}  # fmt: skip


def train(config: dict[str, Any]) -> None:
    """Train a network with one hidden layer on digits, and report its validation accuracy after each epoch."""
    import numpy as np
    import torch

    import spotfleet.train as hvd
    from spotfleet.ray.tune import report

    config = config["given"]
    hvd.init()
    torch.manual_seed(config["seed"])
    torch.set_num_threads(1)
    with np.load(config["data"]) as data:
        inputs, labels = torch.tensor(data["inputs"]), torch.tensor(data["labels"])
    model = torch.nn.Sequential(torch.nn.Linear(64, config["width"]), torch.nn.Tanh(),
                                torch.nn.Linear(config["width"], 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), config["lr"], config["momentum"]))

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.epoch < MAX_EPOCHS:
            shuffled = torch.randperm(1152, generator=torch.Generator().manual_seed(state.epoch)).split(128)
            while state.batch < len(shuffled):
                mine = shuffled[state.batch].tensor_split(hvd.size())[hvd.rank()]
                time.sleep(0.00025 * len(mine))
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs[mine]), labels[mine]).backward()
                optimizer.step()
                state.batch += 1
                state.commit()
            with torch.no_grad():
                right = (model(inputs[1152:]).argmax(1) == labels[1152:]).float().mean()
            state.epoch, state.batch = state.epoch + 1, 0
            report({"accuracy": float(right), "size": hvd.size()})

    loop(hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0))


def write_digits(path: str) -> None:
    import numpy as np
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    np.savez(path, inputs=(data.data[order] / 16).astype(np.float32), labels=data.target[order])


def configs(seed: int, data: str) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"seed": n, "lr": 10 ** rng.uniform(-4, -1.5), "momentum": rng.choice([0.0, 0.5, 0.9]),
             "width": rng.choice([4, 8, 16, 32]), "data": data} for n in range(TRIALS)]


def search(scheduler: str, seed: int, seconds: float, data: str) -> dict[str, Any]:
    """Search once; return the best accuracy, and how it came about."""
    from ray import tune

    from spotfleet.ray.tune import HyperSchedScheduler, elastic
    from spotfleet.ray.tune.deadline import stop_all

    best, began, grew, epochs = [0.0], [0.0], [0.0], [0]

    class Watch(tune.Callback):
        def on_step_begin(self, iteration: int, trials: Any, **info: Any) -> None:
            began[0] = began[0] or time.monotonic()  # as HyperSchedScheduler: before the first trial's process starts

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
            if time.monotonic() - began[0] <= seconds:
                best[0] = max(best[0], result["accuracy"])
                epochs[0] = max(epochs[0], result["training_iteration"])
                if result["size"] > 1:
                    grew[0] = grew[0] or time.monotonic() - began[0]

    class Asha(tune.schedulers.ASHAScheduler):
        def choose_trial_to_run(self, tune_controller: Any) -> Any:
            if began[0] and time.monotonic() - began[0] > seconds:
                return stop_all(tune_controller)
            return super().choose_trial_to_run(tune_controller)

    hyper = scheduler == "HyperSched"
    rules = (HyperSchedScheduler(seconds, max_t=MAX_EPOCHS, grace_period=GRACE) if hyper else
             Asha(max_t=MAX_EPOCHS, grace_period=GRACE, reduction_factor=4))
    with tempfile.TemporaryDirectory() as folder:
        results = tune.Tuner(
            elastic(train, 1, SLOTS if hyper else 1, atoms=SLOTS),
            param_space={"given": tune.grid_search(configs(seed, data))},
            tune_config=tune.TuneConfig(scheduler=rules, metric="accuracy", mode="max", max_concurrent_trials=SLOTS,
                                        reuse_actors=True),
            run_config=tune.RunConfig(storage_path=folder, verbose=0, callbacks=[Watch()])).fit()
    begun = sum(bool(r.metrics and r.metrics.get("training_iteration")) for r in results)
    return {"seed": seed, "scheduler": scheduler, "accuracy": round(100 * best[0], 2), "begun": begun,
            "epochs": epochs[0], "grew_at_s": round(grew[0], 1), "load": round(os.getloadavg()[0], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="HyperSched against ASHA on two workers, for real")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=Path, help="a file to which each result is added as a line of JSON")
    args = parser.parse_args()
    os.environ.update(QUIET)
    import ray

    with tempfile.TemporaryDirectory(prefix="sf") as home:
        os.environ["HOME"] = home
        ray.init(address="local", num_cpus=SLOTS, include_dashboard=False, object_store_memory=100 << 20,
                 log_to_driver=False, logging_level="ERROR", _temp_dir=f"{home}/r", _node_ip_address="127.0.0.1")
        won, data = 0, f"{home}/digits.npz"
        write_digits(data)
        print("| seed | ASHA | HyperSched | begun | epochs of the longest | a trial grew after | load |\n"
              "|---|---|---|---|---|---|---|")
        try:
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                order = ["ASHA", "HyperSched"] if seed % 2 == 0 else ["HyperSched", "ASHA"]
                rows = {name: search(name, seed, args.seconds, data) for name in order}
                if args.rows:
                    with args.rows.open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in rows.values())
                asha, hyper = rows["ASHA"], rows["HyperSched"]
                won += hyper["accuracy"] >= asha["accuracy"]
                print(f"| {seed} | {asha['accuracy']:.2f} | {hyper['accuracy']:.2f} | "
                      f"{asha['begun']}, {hyper['begun']} | {asha['epochs']}, {hyper['epochs']} | "
                      f"{hyper['grew_at_s']:.0f} s | {max(asha['load'], hyper['load']):.0f} |", flush=True)
        finally:
            ray.shutdown()
    print(f"HyperSched reached at least ASHA's accuracy in {won} of {args.seeds} seeds (aim: 4 of 5)")


if __name__ == "__main__":
    main()
