"""A rank that is alone in its generation: an order to leave at once reaches it, although no call of it can fail."""

from __future__ import annotations

import pytest
import torch

import spotfleet.train as hvd
from spotfleet.protocol.messages import Assignment
from tests.support.train.thread_fleet import Worker

STEPS = 6


def order_at_once(worker: Worker) -> None:
    """Order generation 2, as after the loss of a member that this worker has never met."""
    fleet = worker.fleet
    with fleet.cv:
        if fleet.generation == 1:
            fleet.generation = 2
            store = worker.control.report.store
            worker.control.receive(assignment=Assignment(2, 0, (worker.name,), store, urgent=True))


def trained(place: str, copies: bool):
    def script(worker: Worker) -> tuple[int, float]:
        hvd.init()
        model = torch.nn.Linear(1, 1)
        with torch.no_grad():
            model.weight.fill_(0.0)
        opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

        @hvd.elastic.run(copy=copies)
        def train(state):
            worker.notes.append(worker.runtime.generation)
            while state.step < STEPS:
                if (place, state.step) == ("top", 3):
                    order_at_once(worker)
                opt.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                opt.step()
                state.step += 1
                if (place, state.step) == ("commit", 3):
                    order_at_once(worker)
                state.commit()
            if place == "end":
                order_at_once(worker)
            return state.step, model.weight.item()

        return train(hvd.elastic.TorchState(model, opt, step=0))

    return script


@pytest.mark.parametrize("copies", [False, True], ids=["steps", "copies"])
@pytest.mark.parametrize("place", ["top", "commit", "end"])
def test_it_leaves_and_forms_the_next_generation(threads, place, copies):
    fleet = threads(trained(place, copies), founders=1)
    (worker,) = fleet.finish()
    assert worker.notes == ([1, 2] if place != "end" else [1]), fleet.story()
    assert worker.runtime.generation == 2
    assert worker.result == (STEPS, -STEPS)
