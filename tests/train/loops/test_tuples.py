"""Tuples and other values without attributes of their own in the state, and the stages of a GradScaler."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.train.loops import Job, bits, check, data, disturbances, linear, seeded

# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

STEPS = 8
POINTS = ["top", "reduced", "stepped"]


class Best(NamedTuple):
    loss: float
    step: int


def with_tuples(job: Job):
    """A loop whose hidden state, best value and history are tuples, which each step uses and changes."""
    cell, net = seeded(nn.LSTMCell(4, 4), 3).requires_grad_(False), linear()
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))

    def train(state):
        for state.step in range(state.step, STEPS):
            job.at("top", state.step)
            opt.zero_grad()
            hidden = cell(data(state.step), state.hidden)
            loss = (net(hidden[0]) - state.size[0]).pow(2).mean()
            loss.backward()
            job.at("reduced", state.step)
            opt.step()
            job.at("stepped", state.step)
            job.metric()
            state.best = min(state.best, Best(data(state.step).mean().item(), state.step))
            state.history = [*state.history, (state.best, np.float32(state.single * state.step))]
            state.hidden = tuple(h.detach() for h in hidden)
        return bits(net), state.best, state.history, state.hidden[1].tolist(), state.size

    zeros = (torch.zeros(8, 4), torch.zeros(8, 4))
    return job.run(train, cell=cell, model=net, optimizer=opt, step=0, size=(1, 32), hidden=zeros, empty=(),
                   best=Best(1e9, -1), history=[], single=np.float32(2.0))


@pytest.mark.parametrize("change", disturbances(POINTS, 4), ids=str)
def test_tuples_in_the_state_are_exact(threads, change):
    check(threads, with_tuples, change)


def scaled(optimizers: int):
    """A loop of one GradScaler for all its optimizers, with a collective between `unscale_` and the end of the step."""

    def loop(job: Job):
        nets = [linear() for _ in range(optimizers)]
        opts: list[Any] = [job.distributed(torch.optim.SGD(net.parameters(), lr=0.01)) for net in nets]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

        def train(state):
            while state.step < STEPS:
                job.at("top", state.step)
                for net, opt in zip(nets, opts, strict=True):
                    opt.zero_grad()
                    scaler.scale((net(data(state.step)) - 1).pow(2).mean()).backward()
                    job.at("reduced", state.step)
                    scaler.unscale_(opt)
                    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                    job.metric()
                    scaler.step(opt)
                    job.at("stepped", state.step)
                    job.metric()
                scaler.update()
                state.step += 1
                state.commit()
            return bits(*nets), scaler.get_scale()

        parts = {f"model{i}": net for i, net in enumerate(nets)} | {f"opt{i}": opt for i, opt in enumerate(opts)}
        return job.run(train, scaler=scaler, step=0, **parts)

    return loop


@pytest.mark.parametrize("change", disturbances(POINTS, 4), ids=str)
@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_gradscaler_begins_a_repeated_iteration_anew(threads, optimizers, change):
    check(threads, scaled(optimizers), change)
