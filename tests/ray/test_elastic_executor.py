"""Elastic training on a Ray cluster whose workers and nodes are really killed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from spotfleet.ray import ElasticRayExecutor
from tests.ray.conftest import eventually

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def train_until(folder: str, steps: int):
    """A script of Horovod's documentation, with a file that shows its progress."""
    import torch

    import spotfleet.train as hvd

    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01),
                                         named_parameters=model.named_parameters())
    pid = os.getpid()

    @hvd.elastic.run
    def train(state):
        for state.batch in range(state.batch, 10**6):  # noqa: B020
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            with open(f"{folder}/{pid}", "a") as file:
                file.write(f"{time.monotonic()} {state.batch} {hvd.size()} {hvd.rank()}\n")
            time.sleep(0.01)
            if os.path.exists(f"{folder}/stop") and state.batch >= steps:
                break

    train(hvd.elastic.TorchState(model, optimizer, batch=0))
    return hvd.rank(), hvd.size(), model.weight.sum().item()


def steps(folder) -> dict[int, list[tuple[float, int, int, int]]]:
    found = {}
    for file in folder.iterdir():
        if file.name.isdigit():
            rows = [line.split() for line in file.read_text().splitlines() if line.count(" ") == 3]
            found[int(file.name)] = [(float(a), int(b), int(c), int(d)) for a, b, c, d in rows]
    return found


def sizes(folder) -> set[int]:
    """World sizes in the newest steps of processes that train."""
    now = time.monotonic()
    return {rows[-1][2] for rows in steps(folder).values() if rows and now - rows[-1][0] < 2.0}


def begin(executor, folder):
    import threading

    done: list = []

    def run() -> None:
        try:
            done.append(executor.run(lambda: train_until(str(folder), 20)))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return done


def test_training_survives_a_killed_worker_and_a_joiner(cluster, shut_down, tmp_path):
    settings = ElasticRayExecutor.create_settings(verbose=1, min_np=2, max_np=4)
    executor = shut_down(ElasticRayExecutor(settings, cpus_per_slot=1, override_discovery=True))
    executor.start()
    done = begin(executor, tmp_path)
    eventually(lambda: done or sizes(tmp_path) == {4})
    assert not done, done
    victim = next(iter(steps(tmp_path)))
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    eventually(lambda: done or any(r[2] == 3 for rows in steps(tmp_path).values() for r in rows))
    after = min(r[0] for rows in steps(tmp_path).values() for r in rows if r[2] == 3 and r[0] > killed) - killed
    print("kill -> next step", after)
    eventually(lambda: done or sizes(tmp_path) == {4})
    (tmp_path / "stop").touch()
    eventually(lambda: done)
    results = done[0]
    assert [r[0] for r in results] == [0, 1, 2, 3] and len({r[2] for r in results}) == 1
