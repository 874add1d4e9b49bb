"""Random numbers of an iteration that is computed again."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import DataLoader

import spotfleet.train as hvd
from tests.support.train.loops import data, linear


def drawn(alone, between=lambda state: None, within=lambda state: None) -> list[list[float]]:
    """Numbers that each of four iterations draws first, of torch and `random`; `within` runs then, `between` after the
    step."""
    net, found = linear(), []
    opt = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))

    def train(state):
        for state.step in range(state.step, 4):  # noqa: B020
            found.append([*torch.rand(2).tolist(), random.random()])
            within(state)
            net(data(state.step)).sum().backward()
            opt.step()
            opt.zero_grad()
            between(state)

    alone.state, alone.optimizers = None, []
    hvd.elastic.run(train)(hvd.elastic.TorchState(net, opt, step=0))
    return found


def test_each_iteration_draws_other_numbers_and_each_run_the_same(alone):
    found = drawn(alone)
    assert found == drawn(alone) and len({tuple(numbers) for numbers in found}) == 4


def test_a_loader_that_begins_does_not_move_them(alone):
    def evaluate(state):
        for workers in (0, 1) if state.step == 1 else (0,):
            list(DataLoader(torch.zeros(4), batch_size=2, num_workers=workers))

    assert drawn(alone, evaluate) == drawn(alone)


def test_what_an_iteration_draws_does_not_move_the_next_ones(alone):
    """So one that begins after a change, without the earlier ones, draws what it drew the first time."""
    assert drawn(alone, within=lambda state: torch.rand(state.step)) == drawn(alone)
    assert drawn(alone, within=lambda state: [random.random() for _ in range(state.step)]) == drawn(alone)


def test_what_is_drawn_before_a_commit_does_not_move_them(alone):
    def sample(state):
        torch.rand(3 + int(random.random()))
        state.commit()

    assert drawn(alone, sample) == drawn(alone)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_drawn_ahead_from_the_global_generator_is_reported(alone, ahead, capfd):
    """One draw at the top of the function, one in the loop for the next iteration, or both in the loop."""
    net = linear()
    opt = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    state = alone.state = hvd.elastic.TorchState(net, opt, step=0)
    state.attach(1, 0)

    def call() -> None:
        state.enter()
        alone.restart_draws()
        x = torch.randn(8, 4) if ahead else None
        for state.step in range(state.step, state.step + 2):  # noqa: B020
            x = x if ahead else torch.randn(8, 4)
            loss = net(x).sum()
            x = torch.randn(8, 4) if ahead else None
            loss.backward()
            if state.step == 1:
                return
            opt.step()
            opt.zero_grad()

    call()
    state.restore()  # a peer is lost in the second iteration
    call()
    assert ("other random numbers than the first time (torch)" in capfd.readouterr().err) == ahead
