"""Loops that touch weights, buffers, control flow or data in ways of their own."""
# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import spotfleet.train as hvd
from tests.habits.kit import STEPS, Kit, Result, batch, fill, habit, loss_of, net, result
from tests.habits.loops_usual import SGD, Adam, simple, steps

# ---- averages of the weights


def _averaged(kit: Kit, model: Any, average: Any, update: Any) -> Result:
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))
    state = kit.state(model, opt, average=average, i=0)

    def after(i: int) -> None:
        update(i)
        kit.allreduce(torch.ones(1))

    kit.run(lambda state: steps(kit, state, model, opt, after=after))(state)
    return result(model, opt, average=average)


@habit("averages")
def ema(kit: Kit) -> Result:
    """A moving average of the weights by AveragedModel, in the state."""
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return _averaged(kit, model, average, lambda i: average.update_parameters(model))


@habit("averages")
def swa(kit: Kit) -> Result:
    """Stochastic weight averaging from the sixth step on."""
    model = net()
    average = AveragedModel(model)
    return _averaged(kit, model, average, lambda i: average.update_parameters(model) if i >= 6 else None)


@habit("averages")
def ema_by_hand(kit: Kit) -> Result:
    """A moving average by hand in a deepcopy of the model, under no_grad."""
    model = net()
    average = copy.deepcopy(model)

    @torch.no_grad()
    def update(i: int) -> None:
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.lerp_(p, 0.1)

    return _averaged(kit, model, average, update)


@habit("averages", "refused", "the loop changes weights", "swap inside `with state.borrowed():`")
def ema_swapped_in(kit: Kit) -> Result:
    """Averaged weights swapped in for an evaluation, with try/finally."""
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def update(i: int) -> None:
        average.update_parameters(model)
        held = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.module.state_dict())
        try:
            kit.allreduce(loss_of(model, 0).detach())
        finally:
            model.load_state_dict(held)

    return _averaged(kit, model, average, update)


# ---- weights touched by the script

@habit("weights")
def sam_borrowed(kit: Kit) -> Result:
    """Sharpness-aware minimisation: weights moved between two passes, inside `state.borrowed()`."""
    return _sam(kit, borrowed=True)


@habit("weights", "refused", "the loop changes weights", "wrap the two passes in `with state.borrowed():`")
def sam(kit: Kit) -> Result:
    """Sharpness-aware minimisation: weights moved between two passes, as others write it."""
    return _sam(kit, borrowed=False)


def _sam(kit: Kit, borrowed: bool) -> Result:
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1), backward_passes_per_step=1)
    params = list(model.parameters())

    def two_passes(i: int) -> None:
        loss_of(model, i).backward()
        kit.point("reduced", i)
        moved = [p.grad.clone().mul_(0.05) for p in params]
        with torch.no_grad():
            for p, e in zip(params, moved, strict=True):
                p.add_(e)
        opt.zero_grad()
        loss_of(model, i).backward()
        if not borrowed:
            with torch.no_grad():
                for p, e in zip(params, moved, strict=True):
                    p.sub_(e)

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            opt.zero_grad()
            if borrowed:
                with state.borrowed():
                    two_passes(state.i)
            else:
                two_passes(state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


def _touched(kit: Kit, touch: Any) -> Result:
    model = net()

    def after(i: int) -> None:
        with torch.no_grad():
            touch(model)
        kit.allreduce(torch.ones(1))

    return simple(kit, model, lambda p: SGD(p, lr=0.1, momentum=0.9), after=after)


@habit("weights", "refused", "the loop changes weights", "clamp in `opt.register_step_post_hook`")
def clamped(kit: Kit) -> Result:
    """Weights clamped after each step (idempotent), then a metric."""
    return _touched(kit, lambda model: [p.clamp_(-0.4, 0.4) for p in model.parameters()])


@habit("weights", "refused", "the loop changes weights", "do it in `opt.register_step_post_hook`")
def decayed_by_hand(kit: Kit) -> Result:
    """Weights decayed by hand after each step, then a metric."""
    return _touched(kit, lambda model: [p.mul_(0.99) for p in model.parameters()])


@habit("weights")
def decayed_in_a_step_hook(kit: Kit) -> Result:
    """Weights decayed in `register_step_post_hook`."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    @torch.no_grad()
    def decay(*given: Any) -> None:
        for p in model.parameters():
            p.mul_(0.99)

    opt.register_step_post_hook(decay)
    state = kit.state(model, opt, i=0)
    kit.run(lambda state: steps(kit, state, model, opt, after=lambda i: kit.allreduce(torch.ones(1))))(state)
    return result(model, opt)


@habit("weights")
def tied(kit: Kit) -> Result:
    """Two layers that share their weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
    model[2].weight = model[0].weight
    fill(model)
    return simple(kit, model, lambda p: Adam(p, lr=0.01))


@habit("weights")
def frozen(kit: Kit) -> Result:
    """A frozen layer."""
    model = net()
    for p in model[0].parameters():
        p.requires_grad_(False)
    return simple(kit, model, lambda p: Adam([q for q in p if q.requires_grad], lr=0.01))


@habit("weights")
def unfrozen_later(kit: Kit) -> Result:
    """A layer set free at the fourth step."""
    model = net()
    for p in model[0].parameters():
        p.requires_grad_(False)
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            if state.i >= 4:
                for p in model[0].parameters():
                    p.requires_grad_(True)
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("weights")
def group_added_later(kit: Kit) -> Result:
    """`add_param_group` at the fourth step."""
    model = net()
    opt = kit.optimizer(SGD(model[2].parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            if state.i >= 4 and len(opt.param_groups) == 1:
                opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("weights")
def unused_parameters(kit: Kit) -> Result:
    """A part of the model that only every third step uses."""
    model, head = net(), nn.Linear(4, 1)
    fill(head, 3)
    both = nn.ModuleList([model, head])
    opt = kit.optimizer(Adam(both.parameters(), lr=0.01))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            opt.zero_grad()
            loss = loss_of(model, state.i)
            if state.i % 3 == 0:
                loss = loss + loss_of(head, state.i)
            loss.backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(both, opt, i=0))
    return result(both, opt)


# ---- buffers

@habit("buffers")
def batch_norm(kit: Kit) -> Result:
    """BatchNorm, statistics included."""
    return simple(kit, net(nn.BatchNorm1d(5)), lambda p: SGD(p, lr=0.1))


@habit("buffers")
def batch_norm_evaluated(kit: Kit) -> Result:
    """BatchNorm with an evaluation in eval mode after each step."""
    model = net(nn.BatchNorm1d(5))

    def evaluate(i: int) -> None:
        model.eval()
        with torch.no_grad():
            kit.allreduce(loss_of(model, 0))
        model.train()

    return simple(kit, model, lambda p: SGD(p, lr=0.1), after=evaluate)


@habit("buffers")
def batch_norm_accumulated(kit: Kit) -> Result:
    """BatchNorm with accumulation by hand."""
    model = net(nn.BatchNorm1d(5))
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i, 24):
            kit.point("forward", state.i)
            (loss_of(model, state.i) / 4).backward()
            kit.point("reduced", state.i)
            if (state.i + 1) % 4 == 0:
                opt.step()
                opt.zero_grad()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("buffers")
def parts_called_alone(kit: Kit) -> Result:
    """`head(body(x))`: the parts of a model with BatchNorm called alone."""
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), "head": nn.Linear(5, 1)})
    fill(model)
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            x, y = batch(state.i)
            kit.point("forward", state.i)
            opt.zero_grad()
            nn.functional.mse_loss(model["head"](model["body"](x)), y).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


class Counter(nn.Module):
    """A layer that counts its calls in a buffer, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return x * (1 + 0.01 * self.calls)


@habit("buffers")
def buffer_by_hand(kit: Kit) -> Result:
    """A buffer that a layer changes by hand in its forward pass."""
    return simple(kit, net(Counter()), lambda p: SGD(p, lr=0.1))


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


# ---- precision

@habit("precision")
def autocast(kit: Kit) -> Result:
    """bfloat16 autocast."""
    model = net()
    opt = kit.optimizer(AdamW_(model))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, state.i)
            loss.backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


def AdamW_(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@habit("precision")
def low_precision(kit: Kit) -> Result:
    """A model in bfloat16."""
    model = net().to(torch.bfloat16)

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            x, y = (t.to(torch.bfloat16) for t in batch(state.i))
            kit.point("forward", state.i)
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))
    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("precision")
def grad_scaler(kit: Kit) -> Result:
    """A GradScaler whose scale makes some steps infinite."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    state = kit.state(model, opt, scaler=scaler, i=0)

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            opt.zero_grad()
            scaler.scale(loss_of(model, state.i)).backward()
            kit.point("reduced", state.i)
            scaler.step(opt)
            scaler.update()
            kit.point("stepped", state.i)

    kit.run(train)(state)
    return result(model, opt, scaler=scaler)


@habit("precision")
def channels_last_fused(kit: Kit) -> Result:
    """A convolution in channels_last with a fused optimizer."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 1))
    fill(model)
    model = model.to(memory_format=torch.channels_last)
    opt = kit.optimizer(Adam(model.parameters(), lr=0.01, fused=True))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            x, y = batch(state.i, rows=4, inputs=32)
            kit.point("forward", state.i)
            opt.zero_grad()
            nn.functional.mse_loss(model(x.view(4, 2, 4, 4)), y).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


# ---- models and collectives

@habit("models")
def embedding(kit: Kit) -> Result:
    """An embedding with dense gradients."""
    table = nn.Embedding(10, 4)
    fill(table)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(8, 1))
    fill(model)
    opt = kit.optimizer(Adam(model.parameters(), lr=0.01))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            words = torch.tensor([[state.i % 10, 3], [5, (state.i * 7) % 10]])
            kit.point("forward", state.i)
            opt.zero_grad()
            model(words).pow(2).mean().backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


class Extra(nn.Linear):
    """A layer that keeps a count by get_extra_state."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 0.01 * self.calls)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, calls: int) -> None:
        self.calls = calls


@habit("models")
def extra_state(kit: Kit) -> Result:
    """A module with get_extra_state, changed after each step."""
    model = nn.Sequential(Extra(4, 1))
    fill(model)

    def count(i: int) -> None:
        model[0].calls += 1

    return simple(kit, model, lambda p: SGD(p, lr=0.1), after=count)


@habit("models")
def gradient_penalty(kit: Kit) -> Result:
    """A gradient penalty: autograd.grad with create_graph inside the loss."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            x, _ = batch(state.i)
            x.requires_grad_(True)
            kit.point("forward", state.i)
            opt.zero_grad()
            out = model(x).sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            (out * 0.01 + slope.pow(2).mean()).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("models")
def second_wrapper(kit: Kit) -> Result:
    """A new optimizer over the same parameters for a second phase."""
    model = net()
    SGD_ = SGD(model.parameters(), lr=0.1)
    kit.optimizer(SGD_)
    return simple(kit, model, lambda p: Adam(p, lr=0.01))


@habit("models")
def summed_twice(kit: Kit) -> Result:
    """`op=Sum` with the loss divided by the world size, two passes per step."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1), **({} if kit.plain else {"op": hvd.Sum}))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            n = 1 if kit.plain else hvd.size()
            kit.point("forward", state.i)
            opt.zero_grad()
            (loss_of(model, state.i) / n).backward()
            kit.point("reduced", state.i)
            (loss_of(model, state.i + 100) / n).backward()
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("models")
def loss_through_allreduce(kit: Kit) -> Result:
    """A loss through the mean of features over all ranks."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            x, y = batch(state.i)
            kit.point("forward", state.i)
            opt.zero_grad()
            nn.functional.mse_loss(kit.allreduce(model(x)), y).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("models")
def parameter_replaced(kit: Kit) -> Result:
    """A parameter replaced by a longer one at the sixth step, in model and optimizer."""
    table = nn.Embedding(4, 3)
    fill(table)
    opt = kit.optimizer(SGD(table.parameters(), lr=0.1))

    def grow() -> None:
        longer = nn.Parameter(torch.cat([table.weight.detach(), torch.ones(2, 3)]))
        opt.param_groups[0]["params"][0] = table.weight = longer

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            if state.i == 8 and table.weight.shape[0] == 4:
                grow()
            kit.point("forward", state.i)
            opt.zero_grad()
            table.weight[state.i % table.weight.shape[0]].pow(2).sum().backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(table, opt, i=0))
    return result(table, opt)
