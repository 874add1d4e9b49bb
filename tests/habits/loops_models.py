"""Precision, and models and losses of unusual make."""
# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import spotfleet.train as hvd
from tests.habits.kit import STEPS, Kit, Result, batch, fill, habit, loss_of, net, result
from tests.habits.shapes import NEVER, SGD, Adam, simple, steps

# ---- precision

@habit("precision")
def autocast(kit: Kit) -> Result:
    """bfloat16 autocast."""
    model = net()

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, i)

    return simple(kit, model, lambda p: torch.optim.AdamW(p, lr=0.01), loss=loss, each=NEVER)


@habit("precision")
def low_precision(kit: Kit) -> Result:
    """A model in bfloat16."""
    model = net().to(torch.bfloat16)

    def loss(i: int) -> torch.Tensor:
        x, y = (t.to(torch.bfloat16) for t in batch(i))
        return nn.functional.mse_loss(model(x), y)

    return simple(kit, model, lambda p: SGD(p, lr=0.1), loss=loss, each=NEVER)


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

    def loss(i: int) -> torch.Tensor:
        x, y = batch(i, rows=4, inputs=32)
        return nn.functional.mse_loss(model(x.view(4, 2, 4, 4)), y)

    return simple(kit, model, lambda p: Adam(p, lr=0.01, fused=True), loss=loss, each=NEVER)


# ---- models and collectives

@habit("models")
def embedding(kit: Kit) -> Result:
    """An embedding with dense gradients."""
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 1))
    fill(model)

    def loss(i: int) -> torch.Tensor:
        return model(torch.tensor([[i % 10, 3], [5, (i * 7) % 10]])).pow(2).mean()

    return simple(kit, model, lambda p: Adam(p, lr=0.01), loss=loss, each=NEVER)


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

    def loss(i: int) -> torch.Tensor:
        x = batch(i)[0].requires_grad_(True)
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out * 0.01 + slope.pow(2).mean()

    return simple(kit, model, lambda p: SGD(p, lr=0.1), loss=loss, each=NEVER)


@habit("models", "refused", "create_graph=True", "`torch.autograd.grad(..., create_graph=True)` for the inner gradient")
def penalty_of_reduced_gradients(kit: Kit) -> Result:
    """A penalty on `p.grad` after `backward(create_graph=True)`."""
    model = net()

    def penalty(i: int) -> torch.Tensor:
        loss_of(model, i).backward(create_graph=True)
        return 0.1 * torch.stack([p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None]).sum()

    return simple(kit, model, lambda p: SGD(p, lr=0.1), loss=penalty, each=NEVER)


@habit("models")
def second_wrapper(kit: Kit) -> Result:
    """A new optimizer over the same parameters for a second phase."""
    model = net()
    first = SGD(model.parameters(), lr=0.1)
    kit.optimizer(first)
    return simple(kit, model, lambda p: Adam(p, lr=0.01))


@habit("models")
def summed_twice(kit: Kit) -> Result:
    """`op=Sum` with the loss divided by the world size, two passes per step."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1), **({} if kit.plain else {"op": hvd.Sum}))

    def share(i: int) -> torch.Tensor:
        return loss_of(model, i) / (1 if kit.plain else hvd.size())

    def train(state: Any) -> None:
        steps(kit, state, model, opt, loss=share, before=lambda i: share(i + 100).backward(), each=NEVER)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("models")
def loss_through_allreduce(kit: Kit) -> Result:
    """A loss through the mean of features over all ranks."""
    model = net()

    def loss(i: int) -> torch.Tensor:
        x, y = batch(i)
        return nn.functional.mse_loss(kit.allreduce(model(x)), y)

    return simple(kit, model, lambda p: SGD(p, lr=0.1), loss=loss, each=NEVER)


@habit("models")
def parameter_replaced(kit: Kit) -> Result:
    """A parameter replaced by a longer one at the sixth step, in model and optimizer."""
    table = nn.Embedding(4, 3)
    fill(table)
    opt = kit.optimizer(SGD(table.parameters(), lr=0.1))

    def top(i: int) -> None:
        if i == 8 and table.weight.shape[0] == 4:
            longer = nn.Parameter(torch.cat([table.weight.detach(), torch.ones(2, 3)]))
            opt.param_groups[0]["params"][0] = table.weight = longer

    def loss(i: int) -> torch.Tensor:
        return table.weight[i % table.weight.shape[0]].pow(2).sum()

    kit.run(lambda state: steps(kit, state, table, opt, top, loss, each=NEVER))(kit.state(table, opt, i=0))
    return result(table, opt)


@habit("models")
def attribute_changed(kit: Kit) -> Result:
    """An attribute of a module, changed in the loop at the fourth step."""
    model = net(nn.Dropout(0.0))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.share = model, 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) * self.share

    scaled = Scaled()

    def top(i: int) -> None:
        if i == 3:
            scaled.share = 0.5

    return simple(kit, scaled, lambda p: SGD(p, lr=0.1), top=top)


@habit("models", "refused", "registered hooks of state.model.* again", "register it before `elastic.run`")
def hook_in_the_function(kit: Kit) -> Result:
    """A hook registered at the top of the function that is called again."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        model[0].weight.register_hook(lambda g: g * 0.5)
        steps(kit, state, model, opt)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)
