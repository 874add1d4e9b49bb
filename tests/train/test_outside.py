"""What a worker reports of optimizer steps outside elastic.run: their number, and whether they need its peers."""
# ruff: noqa: B020  `for state.batch in range(state.batch, ...)` is how a loop starts where training stands

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

import spotfleet.train as hvd
from tests.support.train import thread_fleet
from tests.support.train.thread_fleet import ThreadFleet, Worker

STEPS = 7


@pytest.fixture
def fleet_of(monkeypatch):
    thread_fleet.install(monkeypatch)
    made: list[ThreadFleet] = []

    def start(script: Any, founders: int = 2) -> ThreadFleet:
        made.append(ThreadFleet(script, founders))
        return made[-1]

    yield start
    for fleet in made:
        fleet.close()
    assert not torch_optimizer._global_optimizer_post_hooks


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def steps(model: torch.nn.Module, optimizer: Any, count: int = STEPS, averages: bool = False) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        if averages:
            for p in model.parameters():
                p.grad.copy_(hvd.allreduce(p.grad))
        optimizer.step()
        thread_fleet.here.runtime.control.report  # noqa: B018  as the control thread does each second


def reports(fleet: ThreadFleet) -> list[tuple[int, bool, int]]:
    fleet.finish()
    found = [(r.outside, r.together, r.version) for r in (w.control.report for w in fleet.workers.values())]
    for worker in fleet.workers.values():
        worker.runtime.outside.end()
    return found


def test_steps_of_a_distributed_optimizer_are_reported_and_need_the_peers(fleet_of):
    def script(worker: Worker) -> str:
        hvd.init()
        model, optimizer = model_and_optimizer()
        hvd.broadcast_parameters(model.state_dict(), 0)
        steps(model, hvd.DistributedOptimizer(optimizer))
        return "done"

    assert reports(fleet_of(script)) == [(STEPS, True, 0)] * 2


def test_steps_of_a_plain_optimizer_are_reported_and_need_nobody(fleet_of):
    def script(worker: Worker) -> str:
        hvd.init()
        model, optimizer = model_and_optimizer()
        hvd.broadcast_parameters(model.state_dict(), 0)
        steps(model, optimizer)
        return "done"

    assert reports(fleet_of(script)) == [(STEPS, False, 0)] * 2


def test_gradients_that_a_script_averages_itself_need_the_peers(fleet_of):
    def script(worker: Worker) -> str:
        hvd.init()
        model, optimizer = model_and_optimizer()
        steps(model, optimizer, averages=True)
        return "done"

    assert reports(fleet_of(script)) == [(STEPS, True, 0)] * 2


def test_inside_elastic_run_nothing_counts_and_no_hook_is_left(fleet_of):
    hooks: list[int] = []

    def script(worker: Worker) -> str:
        hvd.init()
        model, optimizer = model_and_optimizer()
        steps(model, optimizer, 1)  # builds the optimizer's state
        optimizer = hvd.DistributedOptimizer(optimizer)

        @hvd.elastic.run
        def train(state: Any) -> None:
            hvd.allreduce(torch.zeros(1))  # both are inside
            hooks.append(len(torch_optimizer._global_optimizer_post_hooks))
            for state.batch in range(state.batch, STEPS):
                steps(model, optimizer, 1)

        train(hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0))
        return "done"

    assert reports(fleet_of(script)) == [(0, False, STEPS)] * 2
    assert hooks == [0, 0]
