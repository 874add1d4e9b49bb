"""Bodies of a training iteration as users write them, for the part `habits`: each from zero_grad() to step().

A habit passes when a rank that is killed on the way does not change the bits. Add a function and its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Body = Callable[[torch.nn.Module, Any, torch.Tensor, torch.Tensor], None]
loss_of = torch.nn.functional.cross_entropy


def plain(model: torch.nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    opt.zero_grad()
    loss_of(model(x), y).backward()
    opt.step()


def clipped(model: torch.nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    opt.zero_grad()
    loss_of(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()


def bfloat16(model: torch.nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    opt.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = loss_of(model(x), y)
    loss.backward()
    opt.step()


def accumulated(model: torch.nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    opt.zero_grad()
    with opt.no_sync():
        loss_of(model(x[:8]), y[:8]).backward()
    loss_of(model(x[8:]), y[8:]).backward()
    opt.step()


def kept_gradients(model: torch.nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    opt.zero_grad(set_to_none=False)
    loss_of(model(x), y).backward()
    opt.step()


def logged(model: torch.nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    import spotfleet.train as hvd

    opt.zero_grad()
    loss = loss_of(model(x), y)
    loss.backward()
    opt.step()
    hvd.allreduce(loss.detach())


HABITS: dict[str, Body] = {f.__name__: f for f in (plain, clipped, bfloat16, accumulated, kept_gradients, logged)}
