"""Imported by a worker of the chaos job: SIGKILL to itself at the point that DIE=POINT:N or DIE=POINT:N:M names.

With M, as many workers wait for each other there and die together.

In step N: "forward" (between two layers), "backward" (between two layers), "collective" (a bucket is on the wire),
"instep" (between the updates of two parameters), "stepped" (after it), "metric" (in the script's own collective, which
comes with some steps only). In generation N: "forming" (nobody met yet), "formed" (all met, nothing exchanged yet),
"sending", "receiving" (in the midst of a transfer of the state).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import chaos_net
import torch

from spotfleet.train import runtime
from spotfleet.train.comm.group import Group
from spotfleet.train.state import handover, sync

POINT, N, TOGETHER = ((os.environ.get("DIE") or "none:0") + ":1").split(":")[:3]
LIMIT_S = 120.0
sync.CHUNK_BYTES = handover.CHUNK_BYTES = 16 << 10  # so that a transfer has several chunks
handover.DIRECT_BYTES = 4 << 10

step = 0
chunks = 0


def reached(point: str, number: int) -> bool:
    return (point, str(number)) == (POINT, N)


def die_at(point: str, number: int) -> None:
    if reached(point, number):
        await_others()
        os.kill(os.getpid(), signal.SIGKILL)


def await_others() -> None:
    """Return when all who die together are at the point."""
    if int(TOGETHER) == 1:
        return
    here = Path(os.environ["SPOTFLEET_OUTPUT"], f"at-{POINT}-{N}")
    here.mkdir(exist_ok=True)
    (here / str(os.getpid())).touch()
    deadline = time.monotonic() + LIMIT_S
    while len(list(here.iterdir())) < int(TOGETHER):
        if time.monotonic() > deadline:
            raise AssertionError(f"not {TOGETHER} workers at {POINT}:{N} within {LIMIT_S} s")
        time.sleep(0.001)


def after_layer(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
    global step
    if isinstance(module, torch.nn.BatchNorm1d) and output.requires_grad:
        die_at("forward", step)
        output.register_hook(lambda grad: die_at("backward", step))


forward, launch, form = chaos_net.Net.forward, Group.launch, Group.form
send, arrive = sync._send, handover._Parcel.arrive


def _forward(self: chaos_net.Net, x: torch.Tensor) -> torch.Tensor:
    global step
    step = self.now[0]
    return forward(self, x)


def _launch(self: Group, tensor: torch.Tensor, *more: object, **named: object) -> object:
    work = launch(self, tensor, *more, **named)
    point = "metric" if tensor.numel() == 1 else "collective"
    if reached(point, step):
        await_others()
        threading.Thread(target=die_at, args=(point, step)).start()
    return work


def _form(self: Group) -> None:
    die_at("forming", self.generation)
    form(self)
    die_at("formed", self.generation)


def one_more_chunk(group: Group, comes: bool) -> None:
    global chunks
    chunks += 1
    if chunks % 3 == 0:
        die_at("receiving" if comes else "sending", group.generation)


def _send(group: Group, chunk: torch.Tensor, pieces: list, source: int) -> None:
    one_more_chunk(group, group.rank != source)
    send(group, chunk, pieces, source)


def _arrive(self: handover._Parcel, group: Group) -> None:
    one_more_chunk(group, self._receives)
    arrive(self, group)


addcdiv, optimizer_step = torch.Tensor.addcdiv_, torch.optim.lr_scheduler.CosineAnnealingLR.step
updates = 0


def _addcdiv(self: torch.Tensor, *args: object, **more: object) -> torch.Tensor:
    global updates
    updates += 1
    if updates % 4 == 0:
        die_at("instep", step)
    return addcdiv(self, *args, **more)


def _scheduled(self: object, *args: object) -> None:
    if getattr(self, "last_epoch", -1) >= 0 and runtime.current().state is not None:
        die_at("stepped", step)
    optimizer_step(self, *args)


torch.nn.modules.module.register_module_forward_hook(after_layer)
chaos_net.Net.forward, Group.launch, Group.form = _forward, _launch, _form
sync._send, handover._Parcel.arrive = _send, _arrive
torch.Tensor.addcdiv_, torch.optim.lr_scheduler.CosineAnnealingLR.step = _addcdiv, _scheduled
