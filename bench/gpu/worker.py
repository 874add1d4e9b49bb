"""One worker of the trainings in ranks.py: deterministic, and killed at the point that DIE names.

DIE="WORKER:POINT:AT;...", where AT is a step, for `meet` and `warm` a generation, for `send` and `receive` the number
of the message.
"""

from __future__ import annotations

import ctypes
import datetime
import hashlib
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import spotfleet.train as hvd
from spotfleet.train.comm.group import Group
from spotfleet.train.comm.nccl import NcclGroup
from spotfleet.train.gradients import reducer
from spotfleet.worker import control

sys.path.insert(0, str(Path(__file__).parent))
habits = importlib.import_module("habits")

control.PERIOD_S = 0.02  # so that the dispatcher's part sees versions soon
ME = os.environ["SPOTFLEET_WORKER"]
DEVICE = torch.device(os.environ["DEVICE"])
STEPS, WIDTH = int(os.environ["STEPS"]), int(os.environ["WIDTH"])
DEATHS = {point: int(at) for who, point, at in (d.split(":") for d in os.environ.get("DIE", "").split(";") if d)
          if who == ME}
reducer.FIRST_BUCKET_BYTES = reducer.BUCKET_BYTES = 4 * WIDTH * WIDTH  # several buckets
_counts = {"send": 0, "receive": 0}


def die_at(point: str, now: int) -> None:
    if DEATHS.get(point) == now:
        os.kill(os.getpid(), signal.SIGKILL)


def counted(point: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        _counts[point] += 1
        die_at(point, _counts[point])
        return call(*args)

    return wrapped


def dying(point: str, call: Callable[..., Any], after: bool) -> Callable[..., Any]:
    """Die before or after a call of a group's method, in the generation that DIE names."""
    def wrapped(group: Group, *args: Any) -> Any:
        if not after:
            die_at(point, group.generation)
        result = call(group, *args)
        if after:
            die_at(point, group.generation)
        return result

    return wrapped


Group.send = counted("send", Group.send)  # type: ignore[method-assign]
Group.receive = counted("receive", Group.receive)  # type: ignore[method-assign]
Group._meet = dying("meet", Group._meet, after=True)  # type: ignore[method-assign]
NcclGroup._warm_up = dying("warm", NcclGroup._warm_up, after=False)  # type: ignore[method-assign]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    h = hashlib.sha256()
    for t in tensors:
        held = t.detach().cpu().contiguous()
        h.update(ctypes.string_at(held.data_ptr(), held.numel() * held.element_size()))
    return h.hexdigest()[:16]


def die_behind_a_kernel(step: int) -> None:
    """Queue a long kernel, so that this rank's reductions are launched and not begun when the process ends."""
    if DEATHS.get("kernel") != step:
        return
    if DEVICE.type == "cuda":
        torch.cuda._sleep(3_000_000_000)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    if DEVICE.type == "cpu":
        layers[0].weight.register_post_accumulate_grad_hook(lambda p: time.sleep(5))


class OwnGroup:
    """Process group of the user's own beside the runtime's, of OWNERS alone, which live longer than the killed worker.

    It is torch's class itself, since `dist.init_process_group` would be given the runtime's group.
    """

    def __init__(self, port: int) -> None:
        dist, limit = torch.distributed, datetime.timedelta(seconds=60)
        me = OWNERS.index(ME)
        self._store = dist.TCPStore("127.0.0.1", port, len(OWNERS), me == 0, limit)
        socket.create_connection(("127.0.0.1", port), 10).close()  # the script's port, not one of the runtime's
        if DEVICE.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group: Any = dist.ProcessGroupNCCL(self._store, me, len(OWNERS), options)
        else:
            self._group = dist.ProcessGroupGloo(self._store, me, len(OWNERS), limit)

    def use(self, step: int) -> None:
        one = torch.full((1,), 1.0 + OWNERS.index(ME), device=DEVICE)
        self._group.allreduce([one], torch.distributed.AllreduceOptions()).wait()
        guard = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "unset")  # torch's guards are as the user has them
        print("OWN", int(one.item()), guard, type(self._group).__name__, step, flush=True)


OWNERS = ("h0/0/1", "h2/0/1")
own: OwnGroup | None = None


def use_own_group(step: int) -> None:
    """Make the own group early in the training, use it then, and once more after the kill."""
    global own
    if "OWN_PORT" not in os.environ or ME not in OWNERS:
        return
    if own is None and step == 3:
        own = OwnGroup(int(os.environ["OWN_PORT"]))
        own.use(step)
    elif own is not None and step == STEPS:
        own.use(step)


hvd.init()
if DEVICE.type == "cuda":
    torch.cuda.set_device(0)
torch.use_deterministic_algorithms(True)
torch.manual_seed(sum(os.environ["SPOTFLEET_WORKER"].encode()))  # reading the rank here would bind a replacement
layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
ballast = torch.nn.Parameter(torch.zeros(int(os.environ.get("BALLAST", "0")) // 4, device=DEVICE), requires_grad=False)
model = torch.nn.Sequential(layers[0], torch.nn.BatchNorm1d(WIDTH), layers[1], torch.nn.Dropout(0.3), layers[2],
                            torch.nn.ReLU(), layers[3], torch.nn.Linear(WIDTH, 4)).to(DEVICE)
model.register_parameter("ballast", ballast)
opt = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
body = habits.HABITS[os.environ.get("HABIT", "plain")]
layers[2].weight.register_post_accumulate_grad_hook(lambda p: die_at("buckets", state.batch))
opt.register_step_pre_hook(lambda *_: die_at("before step", state.batch))
opt.register_step_post_hook(lambda *_: die_at("after step", state.batch))


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * step + hvd.rank())
    return torch.randn(16, WIDTH, generator=g).to(DEVICE), torch.randint(0, 4, (16,), generator=g).to(DEVICE)


@hvd.elastic.run
def train(state: Any) -> None:
    while state.batch < STEPS:
        x, y = batch_of(state.batch)
        die_at("forward", state.batch)
        die_behind_a_kernel(state.batch)
        body(model, opt, x, y)
        state.batch += 1
        state.commit()
        use_own_group(state.batch)
        time.sleep(float(os.environ.get("NAP", "0")))
    print("ENDED", flush=True)


state = hvd.elastic.TorchState(model, opt, batch=0)
train(state)
held = [opt.state[p][k] for p in model.parameters() if p in opt.state for k in ("exp_avg", "exp_avg_sq")]
print("DIGEST", digest([*model.parameters(), *held]), hvd.rank(), hvd.size(), flush=True)
if os.environ.get("LATE") == ME:
    time.sleep(4.0)
