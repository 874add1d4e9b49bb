"""The everyday loops: one step per batch, epochs, accumulation, gradients changed before the step."""
# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.habits.kit import STEPS, Kit, Result, batch, habit, loss_of, net, result
from tests.habits.shapes import NEVER, SGD, Adam, accumulated, inner_loop, simple


@habit("usual")
def plain_sgd(kit: Kit) -> Result:
    """SGD with momentum, one step per batch, a commit after each."""
    return simple(kit, net(), lambda p: SGD(p, lr=0.1, momentum=0.9))


@habit("usual")
def seldom_commits(kit: Kit) -> Result:
    """A commit only every fifth step."""
    return simple(kit, net(), lambda p: SGD(p, lr=0.1, momentum=0.9), each=5)


@habit("usual")
def no_commit(kit: Kit) -> Result:
    """No commit at all."""
    return simple(kit, net(), lambda p: Adam(p, lr=0.01), each=NEVER)


@habit("usual")
def while_loop(kit: Kit) -> Result:
    """`while state.i < N`, counted up at the end of the body."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        while state.i < STEPS:
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)
            state.i += 1
            state.commit()

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("usual")
def nested_epochs(kit: Kit) -> Result:
    """Epochs of batches, both loop variables in the state."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.epoch in range(state.epoch, 3):
            for state.batch in range(state.batch, 4):
                i = state.epoch * 4 + state.batch
                kit.point("forward", i)
                opt.zero_grad()
                loss_of(model, i).backward()
                kit.point("reduced", i)
                opt.step()
                kit.point("stepped", i)
                state.commit()
            state.batch = 0

    kit.run(train)(kit.state(model, opt, epoch=0, batch=0))
    return result(model, opt)


@habit("usual")
def zero_grad_at_the_end(kit: Kit) -> Result:
    """`zero_grad()` after the step instead of before the gradient."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)
            opt.zero_grad()

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("usual")
def gradients_to_zero(kit: Kit) -> Result:
    """`zero_grad(set_to_none=False)`."""
    model = net()
    opt = kit.optimizer(Adam(model.parameters(), lr=0.01))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            opt.zero_grad(set_to_none=False)
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("usual")
def model_zero_grad(kit: Kit) -> Result:
    """`model.zero_grad()` instead of the optimizer's."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            model.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("usual")
def closure(kit: Kit) -> Result:
    """`opt.step(closure)`."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            def closure() -> torch.Tensor:
                opt.zero_grad()
                loss = loss_of(model, state.i)
                loss.backward()
                return loss

            kit.point("forward", state.i)
            opt.step(closure)
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("usual")
def metric_after_the_step(kit: Kit) -> Result:
    """A metric averaged over ranks after each step."""
    return simple(kit, net(), lambda p: SGD(p, lr=0.1, momentum=0.9), after=lambda i: kit.allreduce(torch.ones(1)))


@habit("usual")
def early_stopping(kit: Kit) -> Result:
    """The loop ends early, by a loss that all ranks have averaged."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.05))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            opt.step()
            kit.point("stepped", state.i)
            with torch.no_grad():
                seen = kit.allreduce(loss_of(model, 0)).item()
            if seen < 0.1 or state.i >= 9:
                break

    state = kit.state(model, opt, i=0)
    kit.run(train)(state)
    return result(model, opt)


# ---- accumulation

@habit("accumulation")
def accumulation(kit: Kit) -> Result:
    """Accumulation by hand: a step on every fourth backward."""
    model = net()
    return accumulated(kit, model, kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9)))


@habit("accumulation")
def accumulation_while(kit: Kit) -> Result:
    """Accumulation by hand in a while loop with a count of its own."""
    model = net()
    opt = kit.optimizer(Adam(model.parameters(), lr=0.01))

    def train(state: Any) -> None:
        while state.i < 24:
            kit.point("forward", state.i)
            (loss_of(model, state.i) / 3).backward()
            kit.point("reduced", state.i)
            state.i += 1
            if state.i % 3 == 0:
                opt.step()
                opt.zero_grad()
                state.commit()
            kit.point("stepped", state.i - 1)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("accumulation")
def accumulation_with_commits_between(kit: Kit) -> Result:
    """Accumulation by hand with a commit after each microbatch."""
    model = net()
    return accumulated(kit, model, kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9)), commits=True)


@habit("accumulation")
def accumulation_in_an_inner_loop(kit: Kit) -> Result:
    """Four microbatches in an inner loop, then a step."""
    return inner_loop(kit)


@habit("accumulation")
def passes_per_step(kit: Kit) -> Result:
    """`backward_passes_per_step=4`."""
    return inner_loop(kit, backward_passes_per_step=4)


@habit("accumulation")
def two_losses(kit: Kit) -> Result:
    """Two losses, a backward for each, one step."""
    model = net()
    return simple(kit, model, lambda p: SGD(p, lr=0.1), each=NEVER,
                  before=lambda i: (model(batch(i)[0]).pow(2).mean() * 0.1).backward())


# ---- between gradient and step

@habit("gradients")
def clipping_by_norm(kit: Kit) -> Result:
    """`clip_grad_norm_` between backward and step."""
    model = net()
    return simple(kit, model, lambda p: Adam(p, lr=0.01),
                  before=lambda i: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@habit("gradients")
def clipping_by_value(kit: Kit) -> Result:
    """`clip_grad_value_`."""
    model = net()
    return simple(kit, model, lambda p: SGD(p, lr=0.1),
                  before=lambda i: nn.utils.clip_grad_value_(model.parameters(), 0.01))


@habit("gradients")
def scaled_by_hand(kit: Kit) -> Result:
    """Gradients multiplied by hand before the step."""
    model = net()

    def halve(i: int) -> None:
        for p in model.parameters():
            p.grad.mul_(0.5)

    return simple(kit, model, lambda p: SGD(p, lr=0.1, momentum=0.9), before=halve)


@habit("gradients")
def gradient_noise(kit: Kit) -> Result:
    """Noise from a generator seeded by the step is added to gradients."""
    model = net()

    def add(i: int) -> None:
        generator = torch.Generator().manual_seed(i)
        for p in model.parameters():
            p.grad.add_(torch.randn(p.shape, generator=generator), alpha=0.01)

    return simple(kit, model, lambda p: SGD(p, lr=0.1), before=add)


@habit("gradients")
def skipped_step(kit: Kit) -> Result:
    """A step that all ranks leave out (a bad batch), with `zero_grad()`."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            loss_of(model, state.i).backward()
            kit.point("reduced", state.i)
            if state.i % 3 != 1:
                opt.step()
            opt.zero_grad()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


@habit("gradients")
def gradients_kept(kit: Kit) -> Result:
    """Gradients of two losses kept over `zero_grad()` and combined (PCGrad)."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            opt.zero_grad()
            loss_of(model, state.i).backward()
            first = [p.grad for p in model.parameters()]
            opt.zero_grad()
            kit.point("reduced", state.i)
            (model(batch(state.i)[0]).pow(2).mean() * 0.3).backward()
            for p, other in zip(model.parameters(), first, strict=True):
                p.grad = p.grad - 0.5 * other
            opt.step()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)
