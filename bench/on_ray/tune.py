"""Pause of a trial of Ray Tune that changes its size: spotfleet's live resize and Ray's ResourceChangingScheduler.

    python bench/on_ray/tune.py [--turns N] [-o json] [--rows FILE]

One local Ray of four CPUs. A trial trains an MLP with 50 ms of sleep in each step and reports each step; from 1 worker
it grows to 2, and shrinks again. The systems take turns, another one first in each.

- spotfleet   `elastic(train, 1, 2)`: two workers over gloo; `resize` changes the number while the trial trains
- Ray         ResourceChangingScheduler: the trial is paused, its process ends, and another begins from its checkpoint.
              It trains in the trial's process alone, with a placement group of one bundle and of two: no worker has
              to connect to another, which favours Ray

The *gap* is the time between the last step before a change and the first one after it, on rank 0. Needs the extra
`tune`. Exit status 0 whatever the result.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recovery import end_all

RAY = {"RAY_AUTH_MODE": "disabled", "RAY_memory_monitor_refresh_ms": "0", "RAY_DEDUP_LOGS": "0",
       "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "180", "RAY_AIR_NEW_OUTPUT": "0",
       "RAY_CHDIR_TO_TRIAL_DIR": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
       "RAY_enable_metrics_collection": "0", "OMP_NUM_THREADS": "1"}
CHANGE_EVERY = 25  # steps
STEP_SLEEP_S = 0.05


@dataclass(frozen=True)
class ResizeRow:
    """One change of one trial. Times in seconds."""

    system: str
    change: str  # "1 -> 2"
    gap_s: float
    step_s: float  # median of all steps
    repeated: int  # steps that were made again
    process: str  # "same" or "another"
    load: float


def model() -> tuple[Any, Any]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    return net, torch.optim.SGD(net.parameters(), lr=0.01)


def step(net: Any, optimizer: Any) -> None:
    import torch

    optimizer.zero_grad()
    net(torch.randn(32, 256)).square().mean().backward()
    optimizer.step()
    time.sleep(STEP_SLEEP_S)


def ours(config: dict[str, Any]) -> None:
    from ray import tune

    import spotfleet.train as hvd

    hvd.init()
    net, optimizer = model()
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())

    @hvd.elastic.run
    def loop(state: Any) -> None:
        for state.step in range(state.step, 10**9):  # noqa: B020
            step(net, optimizer)
            tune.report({"step": state.step, "size": hvd.size(), "at": time.monotonic(), "process": os.getpid()})

    loop(hvd.elastic.TorchState(net, optimizer, step=0))


def theirs(config: dict[str, Any]) -> None:
    import torch
    from ray import tune

    net, optimizer = model()
    begin = 0
    if (kept := tune.get_checkpoint()) is not None:
        with kept.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt", weights_only=True)
            net.load_state_dict(saved["net"])
            begin = saved["step"] + 1
    size = len(tune.get_context().get_trial_resources().bundles)
    for number in range(begin, 10**9):
        step(net, optimizer)
        with tempfile.TemporaryDirectory() as made:
            torch.save({"net": net.state_dict(), "step": number}, f"{made}/state.pt")
            tune.report({"step": number, "size": size, "at": time.monotonic(), "process": os.getpid()},
                        checkpoint=tune.Checkpoint.from_directory(made))


def wanted(rows: list[dict[str, Any]]) -> int:
    """Return the size to change to after these results; 0: none."""
    since = len(rows) - next((n for n in range(len(rows) - 1, 0, -1) if rows[n]["size"] != rows[n - 1]["size"]), 0)
    return 3 - rows[-1]["size"] if since == CHANGE_EVERY else 0


def over(rows: list[dict[str, Any]]) -> bool:
    """Return whether the trial has grown and shrunk, and has trained for a while after that."""
    changes = [n for n in range(1, len(rows)) if rows[n]["size"] != rows[n - 1]["size"]]
    return len(changes) >= 2 and len(rows) - changes[-1] >= CHANGE_EVERY - 1


def recorder(rows: list[dict[str, Any]], resizes: bool) -> Any:
    from ray import tune

    from spotfleet.ray.tune import resize

    class Recorder(tune.Callback):
        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
            rows.append({**result, "load": os.getloadavg()[0]})
            if resizes and (size := wanted(rows)):
                resize(trial.trial_id, size)

    return Recorder()


def turn(system: str, folder: Path) -> list[dict[str, Any]]:
    """Run one trial through both changes; return its results."""
    from ray import tune
    from ray.tune.schedulers import FIFOScheduler, ResourceChangingScheduler

    from spotfleet.ray.tune import elastic

    rows: list[dict[str, Any]] = []

    def allocate(controller: Any, trial: Any, result: dict[str, Any], scheduler: Any) -> Any:
        size = wanted([*rows, result])
        return tune.PlacementGroupFactory([{"CPU": 1}] * size) if size else None

    live = system == "spotfleet"
    trainable = elastic(ours, 1, 2) if live else tune.with_resources(theirs, tune.PlacementGroupFactory([{"CPU": 1}]))
    scheduler = FIFOScheduler() if live else ResourceChangingScheduler(FIFOScheduler(), allocate)
    results = tune.Tuner(
        trainable, tune_config=tune.TuneConfig(scheduler=scheduler, metric="step", mode="max"),
        run_config=tune.RunConfig(storage_path=str(folder), verbose=0, callbacks=[recorder(rows, live)],
                                  checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
                                  stop=lambda trial_id, result: over(rows))).fit()
    if results.errors:
        print(results.errors[0], file=sys.stderr)
    return rows


def changes(system: str, rows: list[dict[str, Any]]) -> list[ResizeRow]:
    pairs = list(itertools.pairwise(rows))
    step_s = statistics.median(b["at"] - a["at"] for a, b in pairs) if pairs else 0.0
    return [ResizeRow(system, f"{a['size']} -> {b['size']}", b["at"] - a["at"], step_s,
                      max(0, a["step"] + 1 - b["step"]),
                      "same" if a["process"] == b["process"] else "another", b["load"])
            for a, b in pairs if a["size"] != b["size"]]


def table(rows: list[ResizeRow]) -> str:
    lines = ["| system | change | n | gap: median (min-max), s | step, s | repeated | process | load |",
             "|---|---|---|---|---|---|---|---|"]
    for key in dict.fromkeys((r.system, r.change) for r in rows):
        made = [r for r in rows if (r.system, r.change) == key]
        gaps, loads = [r.gap_s for r in made], [r.load for r in made]
        lines.append(f"| {key[0]} | {key[1]} | {len(made)} | {statistics.median(gaps):.2f} "
                     f"({min(gaps):.2f}-{max(gaps):.2f}) | {statistics.median(r.step_s for r in made):.3f} | "
                     f"{max(r.repeated for r in made)} | {'/'.join(dict.fromkeys(r.process for r in made))} | "
                     f"{min(loads):.0f}-{max(loads):.0f} |")
    by = {s: statistics.median(r.gap_s for r in rows if r.system == s) for s in dict.fromkeys(r.system for r in rows)}
    if len(by) == 2:
        lines += ["", f"Gap of Ray / spotfleet = {by['Ray'] / by['spotfleet']:.1f}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("-o", dest="output", choices=("table", "json"), default="table")
    given = parser.parse_args()
    top = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    root = str(Path(__file__).parents[2])
    sys.path.insert(0, root)
    os.environ.update(RAY, RAY_TMPDIR=str(top), PYTHONPATH=os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    rows: list[ResizeRow] = []
    try:
        import ray

        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                 object_store_memory=100 << 20)
        for number in range(given.turns):
            for system in ("spotfleet", "Ray") if number % 2 == 0 else ("Ray", "spotfleet"):
                made = changes(system, turn(system, top / f"{number}-{system}"))
                for row in made:
                    print(row, file=sys.stderr, flush=True)
                rows += made
        ray.shutdown()
    finally:
        end_all(str(top))
        shutil.rmtree(top, ignore_errors=True)
    if given.rows:
        with given.rows.open("a") as file:
            file.writelines(json.dumps(asdict(r)) + "\n" for r in rows)
    date = datetime.date.today().isoformat()
    print(json.dumps([asdict(r) for r in rows]) if given.output == "json" else f"{date}\n\n{table(rows)}", flush=True)
    os._exit(0)  # Ray's threads would wait for the cluster that has ended


if __name__ == "__main__":
    main()
