"""A moving average where the worker that the state was taken from is lost next."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from tests.support.train.loops import Disturbance, Job, bits, data, fleet_of, linear, plain
from tests.support.train.thread_fleet import Lost

STEPS = 9


def averaged(update: Callable[[torch.Tensor, torch.Tensor], None]):
    """The first worker is lost in the iteration after the one in which a spare has joined."""

    def loop(job: Job):
        net = linear()
        average = copy.deepcopy(net).requires_grad_(False)
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

        def train(state):
            while state.step < STEPS:
                opt.zero_grad()
                job.at("top", state.step)
                if job.worker is not None and job.worker.name == "h0/0/1" and state.step == 6:
                    raise Lost
                job.metric()
                (net(data(state.step)) - 1).pow(2).mean().backward()
                opt.step()
                with torch.no_grad():
                    for a, p in zip(average.parameters(), net.parameters(), strict=True):
                        update(a, p)
                state.step += 1
            return bits(net, average)

        return job.run(train, model=net, optimizer=opt, average=average, step=0)

    return loop


def counted(a, p):
    a.lerp_(p, 0.1)


def uncounted(a, p):
    a.data.mul_(0.9).add_(p.data, alpha=0.1)


@pytest.mark.parametrize("update", [counted, uncounted])
def test_a_newcomer_left_alone_in_its_first_iterations_puts_the_average_back(threads, update):
    loop = averaged(update)
    fleet = fleet_of(threads, loop, Disturbance("kill", "top", 5, spares=1))
    assert fleet.workers["h2/0/1"].result == plain(loop), fleet.story()
