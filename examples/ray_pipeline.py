"""One script on a Ray cluster: Dask prepares the data, elastic workers train, and Tune searches from their weights.

    spotfleet ray submit examples/ray_pipeline.py            on the Ray cluster of a fleet
    python examples/ray_pipeline.py --address HEAD:6379      on a cluster that exists
    python examples/ray_pipeline.py --address local          on this machine alone

It needs `ray[tune]` and `dask[array]` beside spotfleet. Nodes may come and go while it trains. At the end it prints one
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time

import dask.array
import numpy as np
import ray
import torch
from ray import tune
from ray.util.dask import disable_dask_on_ray, enable_dask_on_ray

import spotfleet.train as hvd
from spotfleet.ray import ElasticExecutor, ray_logger

FEATURES, BATCH = 16, 32


def prepare(rows: int, pieces: int) -> tuple[np.ndarray, np.ndarray]:
    """Make features of mean 0 and deviation 1, and labels: each piece is a task of Ray."""
    enable_dask_on_ray()
    try:
        random = dask.array.random.default_rng(1)
        features = random.normal(3.0, 2.0, size=(rows, FEATURES), chunks=(rows // pieces, FEATURES))
        labels = (features @ np.arange(1.0, FEATURES + 1)).reshape(-1, 1)
        x, y = (features - features.mean(axis=0)) / features.std(axis=0), (labels - labels.mean()) / labels.std()
        found_x, found_y = dask.compute(x, y)
    finally:
        disable_dask_on_ray()
    return found_x.astype(np.float32), found_y.astype(np.float32)


def training(x: np.ndarray, y: np.ndarray, steps: int) -> tuple[dict, int]:
    """Train; return the weights, and how many steps this process has made again."""
    hvd.init()
    torch.manual_seed(1)
    inputs, targets = torch.from_numpy(x.copy()), torch.from_numpy(y.copy())
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
    made = []

    @hvd.elastic.run
    def train(state) -> None:
        for state.step in range(state.step, steps):  # noqa: B020
            rows = torch.randint(len(inputs), (BATCH,), generator=torch.Generator().manual_seed(state.step))
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows])
            loss.backward()
            optimizer.step()
            made.append(state.step)
            if hvd.rank() == 0 and state.step % 20 == 0:
                ray_logger.log({"step": state.step, "size": hvd.size(), "loss": loss.item()})
            time.sleep(0.02)

    train(hvd.elastic.TorchState(model, optimizer, step=0))
    return {name: value.tolist() for name, value in model.state_dict().items()}, len(made) - len(set(made))


def trial(config: dict) -> None:
    """Go on from the trained weights at one learning rate."""
    x, y, weights = ray.get(config["data"])
    model = torch.nn.Linear(FEATURES, 1)
    model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(torch.from_numpy(x.copy())), torch.from_numpy(y.copy()))
        loss.backward()
        optimizer.step()
        tune.report({"loss": loss.item()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS", "auto"))
    parser.add_argument("--workers", type=int, nargs=2, default=(2, 3), metavar=("MIN", "MAX"))
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--node-ip", help="this machine's address in the cluster, where Ray does not find it")
    given = parser.parse_args()
    own = {"_node_ip_address": given.node_ip} if given.node_ip else {}
    ray.init(address=given.address, log_to_driver=False, **own)

    x, y = prepare(given.rows, pieces=8)
    print(f"prepared {len(x)} rows", flush=True)

    executor = ElasticExecutor(min_workers=given.workers[0], max_workers=given.workers[1])
    executor.start()
    results = executor.run(training, args=[x, y, given.steps], callbacks=[lambda info: print(info, flush=True)])
    changes = executor.changes
    executor.shutdown()
    weights, repeated = results[0]

    with tempfile.TemporaryDirectory() as folder:
        data = ray.put((x, y, weights))
        found = tune.Tuner(
            trial, param_space={"lr": tune.grid_search([0.001, 0.01]), "data": data},
            tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=2),
            run_config=tune.RunConfig(storage_path=folder, verbose=0)).fit()
        best = found.get_best_result()
    print(json.dumps({"rows": len(x), "workers": len(results), "repeated": repeated, "changes": changes,
                      "trials": len(found), "lr": best.config["lr"], "loss": best.metrics["loss"]}), flush=True)


if __name__ == "__main__":
    main()
