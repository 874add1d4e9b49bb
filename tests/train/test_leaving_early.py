"""`check_host_updates` in a job that copies: it goes on from the newest commit, whole."""

from __future__ import annotations

import torch

import spotfleet.train as hvd
from tests.support.train.thread_fleet import Worker

STEPS, COMMIT_EVERY = 9, 3


def between_commits(worker: Worker) -> tuple[float, float]:
    """Each step takes 1 from the weight; a worker is told to leave in the step after a commit."""
    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=1.0), step=0)

    @hvd.elastic.run
    def train(state):
        while state.step < STEPS:
            if state.step == COMMIT_EVERY + 1 and worker.name == "h0/0/1":
                worker.fleet.drain(worker.name)
            state.optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            state.optimizer.step()
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                state.commit()
            else:
                state.check_host_updates()
        return model.weight.item(), state.step

    return train(state)


def test_steps_since_the_last_commit_are_made_once(threads):
    fleet = threads(between_commits, spares=1)
    assert [w.result for w in fleet.finish()] == [(-9.0, 9)] * 2
    assert fleet.members == ("h2/0/1", "h1/0/1")
