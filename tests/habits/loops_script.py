"""Ways to draw data, to keep values, and to handle errors."""
# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.habits.kit import STEPS, Kit, Result, batch, habit, loss_of, net, result
from tests.habits.shapes import SGD, simple, steps

# ---- data

@habit("data")
def shuffle_per_epoch(kit: Kit) -> Result:
    """Each rank walks through its own permutation, seeded by the epoch."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.epoch in range(state.epoch, 3):
            order = torch.randperm(4, generator=torch.Generator().manual_seed(state.epoch)).tolist()
            for state.at in range(state.at, 4):
                i = state.epoch * 4 + state.at
                kit.point("forward", i)
                opt.zero_grad()
                loss_of(model, order[state.at]).backward()
                kit.point("reduced", i)
                opt.step()
                kit.point("stepped", i)
            state.at = 0

    kit.run(train)(kit.state(model, opt, epoch=0, at=0))
    return result(model, opt)


@habit("data", "noticed", "has drawn other random numbers", "draw the batch at the top of the loop's body")
def drawn_ahead_from_a_generator(kit: Kit) -> Result:
    """The next batch is drawn ahead, inside the loop, from a generator in the state (nanoGPT's habit)."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(5)

    def draw() -> int:
        return int(torch.randint(100, (1,), generator=generator))

    def train(state: Any) -> None:
        at = draw()
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            loss = loss_of(model, at)
            at = draw()
            opt.zero_grad()
            loss.backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0, generator=generator))
    return result(model, opt)


@habit("data")
def seen_samples_counted(kit: Kit) -> Result:
    """Samples counted in the state after each step."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        while state.i < STEPS:
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)
            kit.allreduce(torch.ones(1))
            state.seen += 6
            state.i += 1

    state = kit.state(model, opt, i=0, seen=0)
    kit.run(train)(state)
    return result(model, opt, seen=state.seen)


@habit("data")
def counted_before_the_gradient(kit: Kit) -> Result:
    """Samples counted in the state before the gradient."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        while state.i < STEPS:
            state.seen += 6
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)
            state.i += 1

    state = kit.state(model, opt, i=0, seen=0)
    kit.run(train)(state)
    return result(model, opt, seen=state.seen)


def counted(kit: Kit, count: Callable[[Any], None], seen: Any = 0, metric: bool = False, copy: bool = False) -> Result:
    """Train with a loss that depends on `state.seen`, which `count(state)` changes at the top of each iteration."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        while state.i < STEPS:
            i = state.i
            count(state)
            kit.point("forward", i)
            opt.zero_grad()
            (loss_of(model, i) * (1 + state.seen)).backward()
            kit.point("reduced", i)
            opt.step()
            kit.point("stepped", i)
            if metric:
                kit.allreduce(torch.ones(1))
            state.i += 1
            state.commit()

    state = kit.state(model, opt, i=0, seen=seen)
    kit.run(train, **({"copy": True} if copy else {}))(state)
    return result(model, opt, seen=state.seen)


def one_more(state: Any) -> None:
    state.seen += 1


@habit("data")
def counted_and_used(kit: Kit) -> Result:
    """A number counted before the gradient and used in the loss."""
    return counted(kit, one_more)


@habit("data")
def counted_and_used_with_a_metric(kit: Kit) -> Result:
    """The same with a metric after each step."""
    return counted(kit, one_more, metric=True)


@habit("data")
def counted_and_used_in_copies(kit: Kit) -> Result:
    """The same with `copy=True`."""
    return counted(kit, one_more, copy=True)


def _epochs(kit: Kit, copy: bool = False) -> Result:
    """Train epochs of a DataLoader, of which the state names the epoch alone."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))
    rows = torch.stack([torch.cat(batch(i), 1) for i in range(4)])

    def train(state: Any) -> None:
        for state.epoch in range(state.epoch, 3):
            for number, (part,) in enumerate(DataLoader(TensorDataset(rows), batch_size=1)):
                kit.point("forward", state.epoch * 4 + number)
                opt.zero_grad()
                nn.functional.mse_loss(model(part[0, :, :4]), part[0, :, 4:]).backward()
                kit.point("reduced", state.epoch * 4 + number)
                opt.step()
                kit.point("stepped", state.epoch * 4 + number)
            if copy:
                state.commit()

    kit.run(train, copy=copy)(kit.state(model, opt, epoch=0))
    return result(model, opt)


@habit("data", "refused", "a loader begins anew", "`ElasticSampler` in the state, or `state.batch`")
def epoch_alone(kit: Kit) -> Result:
    """Epochs of a plain loader, and the state names the epoch alone."""
    return _epochs(kit)


@habit("data")
def epoch_alone_in_copies(kit: Kit) -> Result:
    """The same with `copy=True` and a commit at the end of each epoch."""
    return _epochs(kit, copy=True)


@habit("data")
def counted_each_second_step(kit: Kit) -> Result:
    """A number counted before each second gradient and used in the loss."""
    return counted(kit, lambda state: one_more(state) if state.i % 2 == 0 else None, metric=True)


@habit("data")
def counted_from_the_third_step(kit: Kit) -> Result:
    """A number counted before the gradient from the third step on, and used in the loss."""
    return counted(kit, lambda state: one_more(state) if state.i > 2 else None)


@habit("data")
def temperature_annealed(kit: Kit) -> Result:
    """A temperature that falls before each gradient and is used in the loss."""
    def cool(state: Any) -> None:
        state.seen *= 0.9

    return counted(kit, cool, seen=1.0)


@habit("data", "noticed", "state.seen was not what it was", "change it after the step, or compute it from `state.i`")
def temperature_annealed_later(kit: Kit) -> Result:
    """A temperature that falls before the gradient from the third step on, and is used in the loss."""
    def cool(state: Any) -> None:
        if state.i > 2:
            state.seen *= 0.9

    return counted(kit, cool, seen=1.0)


@habit("data")
def counted_per_epoch(kit: Kit) -> Result:
    """A number counted at the top of each epoch and used in the loss."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.epoch in range(state.epoch, 3):
            state.seen += 1
            for state.at in range(state.at, 4):
                i = state.epoch * 4 + state.at
                kit.point("forward", i)
                opt.zero_grad()
                (loss_of(model, i) * state.seen).backward()
                kit.point("reduced", i)
                opt.step()
                kit.point("stepped", i)
            state.at = 0

    state = kit.state(model, opt, epoch=0, at=0, seen=0)
    kit.run(train)(state)
    return result(model, opt, seen=state.seen)


@habit("data")
def history_in_a_list(kit: Kit) -> Result:
    """Losses appended to a list in the state after each step."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        while state.i < STEPS:
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)
            state.history.append(state.i)
            state.i += 1

    state = kit.state(model, opt, i=0, history=[])
    kit.run(train)(state)
    return result(model, opt, history=state.history)


# ---- control flow

@habit("control flow")
def batches_from_one(kit: Kit) -> Result:
    """`for state.i in range(state.i + 1, N + 1)`: the state names the last batch begun."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i + 1, STEPS + 1):
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("control flow")
def first_batch_from_elsewhere(kit: Kit) -> Result:
    """A first batch other than 0: `range(state.i or first, N)`."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i or 2, STEPS):
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("control flow")
def except_runtime_error(kit: Kit) -> Result:
    """`except RuntimeError: skip this batch` around the step."""
    return _swallowing(kit, RuntimeError)


@habit("control flow")
def except_exception(kit: Kit) -> Result:
    """`except Exception: skip this batch` around the step."""
    return _swallowing(kit, Exception)


def _swallowing(kit: Kit, kind: type[Exception]) -> Result:
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            try:
                opt.zero_grad()
                loss_of(model, state.i).backward()
                kit.point("reduced", state.i)
                opt.step()
            except kind:
                opt.zero_grad()
                continue
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


class OutOfMemory(RuntimeError):
    """A made-up failure of a backward pass."""


class Failing(torch.autograd.Function):
    """A backward pass that raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise OutOfMemory("CUDA out of memory")


@habit("control flow")
def backward_that_raises(kit: Kit) -> Result:
    """A backward pass that raises on all ranks is caught, and the batch is left out."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            opt.zero_grad()
            try:
                x, y = batch(state.i)
                out = model[0](x)
                out = Failing.apply(out) if state.i == 3 else out
                nn.functional.mse_loss(model[1:](out), y).backward()
            except OutOfMemory:
                opt.zero_grad()
                continue
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("control flow")
def rank_zero_evaluates(kit: Kit) -> Result:
    """Rank 0 alone evaluates and keeps the best loss outside the state."""
    model = net()

    def evaluate(i: int) -> None:
        if kit.rank() == 0:
            with torch.no_grad():
                loss_of(model, 0).item()

    return simple(kit, model, lambda p: SGD(p, lr=0.1), after=evaluate)


@habit("control flow")
def host_updates(kit: Kit) -> Result:
    """`state.check_host_updates()` after each step."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))
    state = kit.state(model, opt, i=0)
    kit.run(lambda state: steps(kit, state, model, opt, after=lambda i: state.check_host_updates()))(state)
    return result(model, opt)


@habit("control flow")
def finally_with_a_collective(kit: Kit) -> Result:
    """A collective in `finally` around each iteration."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            try:
                opt.zero_grad()
                loss_of(model, state.i).backward()
                kit.point("reduced", state.i)
                opt.step()
            finally:
                kit.allreduce(torch.ones(1))

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)
