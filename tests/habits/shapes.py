"""Loops in which entries of the table differ by one part."""
# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

from typing import Any

import torch

from tests.habits.kit import STEPS, Kit, Result, loss_of, net, result

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
NEVER = 10**9  # for `each`: no commit


def steps(kit: Kit, state: Any, model: Any, opt: Any, top: Any = None, loss: Any = None, before: Any = None,
          after: Any = None, each: int = 1) -> None:
    """Iterate `state.i` to STEPS, a step per batch, a commit in `each` of so many.

    `top(i)` runs first, `loss(i)` is the loss, `before(i)` runs between backward and step, and `after(i)` after it.
    """
    for state.i in range(state.i, STEPS):
        i = state.i
        if top:
            top(i)
        kit.point("forward", i)
        opt.zero_grad()
        (loss(i) if loss else loss_of(model, i)).backward()
        kit.point("reduced", i)
        if before:
            before(i)
        opt.step()
        kit.point("stepped", i)
        if after:
            after(i)
        if (i + 1) % each == 0:
            state.commit()


def simple(kit: Kit, model: Any, make: Any, **more: Any) -> Result:
    """Train `model` by `steps` with the optimizer that `make` returns; `more` is for `steps`."""
    opt = kit.optimizer(make(model.parameters()))
    kit.run(lambda state: steps(kit, state, model, opt, **more))(kit.state(model, opt, i=0))
    return result(model, opt)


def accumulated(kit: Kit, model: Any, opt: Any, commits: bool = False) -> Result:
    """Train `model` with a step on every fourth backward."""

    def train(state: Any) -> None:
        for state.i in range(state.i, 24):
            kit.point("forward", state.i)
            (loss_of(model, state.i) / 4).backward()
            kit.point("reduced", state.i)
            if (state.i + 1) % 4 == 0:
                opt.step()
                opt.zero_grad()
            if commits:
                state.commit()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)


def inner_loop(kit: Kit, **options: Any) -> Result:
    """Train with four backward passes and then a step."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9), **options)

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            kit.point("forward", state.i)
            for micro in range(4):
                (loss_of(model, state.i * 4 + micro) / 4).backward()
            kit.point("reduced", state.i)
            opt.step()
            opt.zero_grad()
            kit.point("stepped", state.i)

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)
