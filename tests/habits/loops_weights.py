"""Loops that touch weights and buffers: averages, perturbations, layers set free later, statistics."""
# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.habits.kit import STEPS, Kit, Result, batch, fill, habit, loss_of, net, result
from tests.habits.shapes import NEVER, SGD, Adam, accumulated, simple, steps

# ---- averages of the weights


def _averaged(kit: Kit, model: Any, average: Any, update: Any) -> Result:
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))
    state = kit.state(model, opt, average=average, i=0)

    def after(i: int) -> None:
        update(i)
        kit.allreduce(torch.ones(1))

    kit.run(lambda state: steps(kit, state, model, opt, after=after))(state)
    return result(model, opt, average=average)


class Average:
    """A moving average as many scripts have it, without state_dict()."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self, _: int) -> None:
        for n, p in self.model.named_parameters():
            self.shadow[n] = 0.1 * p.detach() + 0.9 * self.shadow[n]


@habit("averages", "refused", "state.average .* refers to a model",
       "`state_dict()` and `load_state_dict()` in the class")
def ema_without_state_dict(kit: Kit) -> Result:
    """A moving average in the state that refers to the model and has no `state_dict()`."""
    model = net()
    average = Average(model)
    return _averaged(kit, model, average, average.update)


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


@habit("averages")
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


def _target(kit: Kit, follows: Any, after: Any, loop: Any) -> Result:
    model = net()
    target = copy.deepcopy(model).requires_grad_(False)
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    @torch.no_grad()
    def follow() -> None:
        for t, p in zip(target.parameters(), model.parameters(), strict=True):
            t.lerp_(p, 0.1)

    def iterate(i: int) -> None:
        if follows(i):
            follow()
        kit.point("forward", i)
        opt.zero_grad()
        x, _ = batch(i)
        (loss_of(model, i) + nn.functional.mse_loss(model(x), target(x))).backward()
        kit.point("reduced", i)
        opt.step()
        kit.point("stepped", i)
        if after(i):
            follow()
        kit.allreduce(torch.ones(1))

    kit.run(lambda state: loop(state, iterate))(kit.state(model, opt, target=target, i=0))
    return result(model, opt, target=target)


def _over_the_state(state: Any, iterate: Any) -> None:
    for state.i in range(state.i, STEPS):
        iterate(state.i)


def _while(state: Any, iterate: Any) -> None:
    while state.i < STEPS:
        iterate(state.i)
        state.i += 1


@habit("averages")
def target_each_second(kit: Kit) -> Result:
    """A target network that follows before the gradient, in each second iteration."""
    return _target(kit, lambda i: i % 2 == 1, lambda i: False, _over_the_state)


@habit("averages")
def target_set_first(kit: Kit) -> Result:
    """A target network that is set in the first iteration and follows after each step."""
    return _target(kit, lambda i: i == 0, lambda i: True, _over_the_state)


@habit("averages", "noticed", "target.* was not what it was the first time",
       "`for state.i in range(state.i, N)`, or the change after `step()`")
def target_in_a_while_loop(kit: Kit) -> Result:
    """A target network that follows before the gradient, in each second iteration of a `while` loop."""
    return _target(kit, lambda i: i % 2 == 1, lambda i: False, _while)


class Trace:
    """Sum of the weights' norms."""

    def __init__(self) -> None:
        self.sum = torch.zeros(())
        self.norms: list[float] = []

    def update(self, model: Any) -> None:
        self.sum = self.sum + torch.cat([p.detach().flatten() for p in model.parameters()]).norm()
        self.norms.append(float(self.sum))


@habit("averages")
def object_by_its_own_name(kit: Kit) -> Result:
    """An object of the script in the state, used by the name that it had before."""
    model = net()
    opt, trace = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9)), Trace()

    def after(_: int) -> None:
        trace.update(model)
        kit.allreduce(torch.ones(1))

    kit.run(lambda state: steps(kit, state, model, opt, after=after))(kit.state(model, opt, trace=trace, i=0))
    return result(model, opt, sum=trace.sum, norms=trace.norms)


# ---- weights touched by the script

@habit("weights")
def sam_borrowed(kit: Kit) -> Result:
    """Sharpness-aware minimisation: weights moved between two passes, inside `state.borrowed()`."""
    return _sam(kit, borrowed=True)


@habit("weights")
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


@habit("weights")
def clamped(kit: Kit) -> Result:
    """Weights clamped after each step (idempotent), then a metric."""
    return _touched(kit, lambda model: [p.clamp_(-0.4, 0.4) for p in model.parameters()])


@habit("weights")
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

    def top(i: int) -> None:
        for p in model[0].parameters():
            p.requires_grad_(i >= 4)

    return simple(kit, model, lambda p: SGD(p, lr=0.1), top=top, each=NEVER)


@habit("weights")
def group_added_later(kit: Kit) -> Result:
    """`add_param_group` at the fourth step."""
    model = net()
    opt = kit.optimizer(SGD(model[2].parameters(), lr=0.1, momentum=0.9))

    def top(i: int) -> None:
        if i >= 4 and len(opt.param_groups) == 1:
            opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})

    kit.run(lambda state: steps(kit, state, model, opt, top, each=NEVER))(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("weights")
def unused_parameters(kit: Kit) -> Result:
    """A part of the model that only every third step uses."""
    model, head = net(), nn.Linear(4, 1)
    fill(head, 3)

    def loss(i: int) -> torch.Tensor:
        return loss_of(model, i) + loss_of(head, i) if i % 3 == 0 else loss_of(model, i)

    return simple(kit, nn.ModuleList([model, head]), lambda p: Adam(p, lr=0.01), loss=loss, each=NEVER)


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
    return accumulated(kit, model, kit.optimizer(SGD(model.parameters(), lr=0.1)))


@habit("buffers")
def parts_called_alone(kit: Kit) -> Result:
    """`head(body(x))`: the parts of a model with BatchNorm called alone."""
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), "head": nn.Linear(5, 1)})
    fill(model)

    def loss(i: int) -> torch.Tensor:
        x, y = batch(i)
        return nn.functional.mse_loss(model["head"](model["body"](x)), y)

    return simple(kit, model, lambda p: SGD(p, lr=0.1), loss=loss, each=NEVER)


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


class Growing(nn.Module):
    """Keeps a cache of the length that came in, in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.arange(4.0).cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.cache):
            self.register_buffer("cache", torch.arange(float(len(x))).cos(), persistent=False)
        return x * self.cache[:len(x), None]


@habit("buffers")
def grown_cache(kit: Kit) -> Result:
    """A cache in a buffer that is registered anew when more comes in (rotary embeddings)."""
    model = net(Growing())

    def loss(i: int) -> torch.Tensor:
        x, y = batch(i, rows=3 + i)
        return nn.functional.mse_loss(model(x), y)

    return simple(kit, model, lambda p: SGD(p, lr=0.1), loss=loss, each=NEVER)


def _pruned(kit: Kit, prepared: bool) -> Result:
    model = net()
    if prepared:
        prune.identity(model[0], "weight")

    def top(i: int) -> None:
        if i == 3:
            prune.l1_unstructured(model[0], "weight", 0.4)

    return simple(kit, model, lambda p: SGD(p, lr=0.1, momentum=0.9), top=top, each=NEVER)


@habit("weights", "refused", "there also model.0.weight_orig", "`prune.identity(layer, \"weight\")` at first")
def pruned(kit: Kit) -> Result:
    """Pruning by torch.nn.utils.prune in the loop."""
    return _pruned(kit, prepared=False)


@habit("weights")
def pruned_after_identity(kit: Kit) -> Result:
    """Pruning in the loop of a layer that had `prune.identity` before the optimizer was made."""
    return _pruned(kit, prepared=True)
