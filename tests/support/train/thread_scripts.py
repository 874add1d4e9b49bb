"""Training scripts for workers that are threads (thread_fleet.py), and the points of an iteration at which they die."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import spotfleet.train as hvd
from tests.support.train.thread_fleet import Lost, Worker

STEPS, BATCH = 9, 8
SKIPPED, ADDED = 2, 3  # the step that the user skips on all ranks; the one before which a layer begins to train

# In the order of an iteration. "instep" is between the updates of two parameters.
POINTS = ["top", "forward", "backward", "second", "reduced", "clipped", "instep", "stepped", "metric", "committed"]


@dataclass(frozen=True)
class Plan:
    """`worker` (by number) dies at `point` of `step`; commits come each `every` steps, 0: never."""

    worker: int = -1
    point: str = ""
    step: int = -1
    every: int = 1
    copies: bool = False  # two optimizers that step apart
    drain_at: int = -1  # this worker is told to leave in this step

    def reach(self, worker: Worker, point: str, step: int) -> None:
        if worker.name == f"h{self.worker}/0/1" and (point, step) == (self.point, self.step):
            raise Lost

    def passing(self, worker: Worker, step: int) -> None:
        if worker.name == f"h{self.worker}/0/1" and step == self.drain_at:
            worker.fleet.drain(worker.name)


def digest(tensors: list[torch.Tensor]) -> str:
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:12]


class Net(nn.Module):
    """Batch norm, a tied parameter, an unused one, a frozen one, one that begins to train later."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.first, self.norm, self.middle = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False)
        self.late, self.unused, self.frozen = nn.Linear(6, 6), nn.Linear(2, 2), nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(70_000))  # large: copied only when it has changed
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g) / 3)
        self.middle.weight = self.first.weight
        self.late.requires_grad_(False)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, at: Callable[[], None] = lambda: None) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        if self.training:
            with torch.no_grad():
                self.seen[:6] += x.mean(0)
        at()
        return self.late(self.frozen(self.middle(x)))


class Halting(torch.optim.AdamW):
    """Steps one parameter after the other, and calls `at` half-way."""

    at: Callable[[], None] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> None:
        groups = self.param_groups
        halves = [[{**g, "params": g["params"][part]} for g in groups] for part in (slice(0, 2), slice(2, None))]
        for number, half in enumerate(halves):
            if number:
                self.at()
            self.param_groups = [g for g in half if g["params"]]
            super().step()
        self.param_groups = groups


def everything(plan: Plan) -> Callable[[Worker], Any]:
    """A script that uses all that a state can hold. What it returns must not depend on deaths and notices."""

    def script(worker: Worker) -> Any:
        hvd.init()
        net, head = Net(), nn.Linear(6, 3)
        with torch.no_grad():
            head.weight.copy_(torch.arange(18.0).view(3, 6) / 20)
            head.bias.zero_()
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        slow = Net()  # a moving average by hand, through .data
        own = [p for p in net.parameters() if p.requires_grad]
        opt = Halting([{"params": own}, *([] if plan.copies else [{"params": head.parameters()}])], lr=0.05)
        inner = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9)
        early = torch.optim.lr_scheduler.StepLR(opt, 2, 0.8)
        opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=2)
        optimizers = {"opt": opt}
        if plan.copies:
            optimizers["inner"] = hvd.DistributedOptimizer(inner, backward_passes_per_step=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2, growth_factor=2.0**60,
                                      backoff_factor=2.0**-60)  # overflows now and then
        state = hvd.elastic.TorchState(
            net=net, head=head, average=average, slow=slow, **optimizers, early=early, scaler=scaler,
            mix=torch.Generator().manual_seed(3), noise=np.random.default_rng(4), step=0, history=[])
        train = hvd.elastic.run(lambda state: _loop(plan, worker, state, list(optimizers.values())))
        train(state)
        if not state.history:
            return None  # came after the end
        return {
            "weights": digest([*net.parameters(), *head.parameters()]), "statistics": digest(list(net.buffers())),
            "average": digest([*average.parameters(), *average.buffers()]), "slow": digest(list(slow.parameters())),
            "momenta": digest([v for o in optimizers.values() for g in o.param_groups for p in g["params"]
                               for _, v in sorted(o.state.get(p, {}).items())]),
            "scale": scaler.get_scale(), "version": state.version if not plan.copies else 0,
            "lr": [g["lr"] for o in optimizers.values() for g in o.param_groups],
            "draws": [torch.rand(1, generator=state.mix).item(), state.noise.random()],
            "history": state.history, "step": state.step, "early": early.last_epoch}

    return script


def _loop(plan: Plan, worker: Worker, state: Any, optimizers: list[Any]) -> None:
    worker.notes.append((state.step, "replay" if state._replay else "", hvd.size()))
    opt = optimizers[0]
    opt.at = lambda: plan.reach(worker, "instep", state.step)
    while state.step < STEPS:
        if state.step >= ADDED and len(opt.param_groups) < 3 - plan.copies:
            state.net.late.requires_grad_(True)
            opt.add_param_group({"params": list(state.net.late.parameters()), "lr": 0.01})
        _one_step(plan, worker, state, optimizers)
        if plan.every and state.step % plan.every == 0:
            state.commit()
        plan.reach(worker, "committed", state.step - 1)


def _one_step(plan: Plan, worker: Worker, state: Any, optimizers: list[Any]) -> None:
    step, net, scaler = state.step, state.net, state.scaler
    plan.reach(worker, "top", step)
    plan.passing(worker, step)
    mixed = torch.rand(6, generator=state.mix) + float(state.noise.random())
    for o in optimizers:
        o.zero_grad(set_to_none=step % 2 == 0)
    for micro in range(2):
        g = torch.Generator().manual_seed(1000 * step + 100 * micro + hvd.rank())
        x, y = torch.randn(BATCH, 6, generator=g) * mixed, torch.randint(0, 3, (BATCH,), generator=g)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # its cache is shared by all threads
            scores = state.head(net(x, lambda: plan.reach(worker, "forward", step)))
            loss = 4 * nn.functional.cross_entropy(scores, y)
        if micro == 1:
            plan.reach(worker, "second", step)
        scaled = scaler.scale(loss)
        if micro == 1:
            scaled.register_hook(lambda grad: plan.reach(worker, "backward", step))
        scaled.backward()
    plan.reach(worker, "reduced", step)
    for o in optimizers:
        scaler.unscale_(o)
    nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], 0.5)
    plan.reach(worker, "clipped", step)
    for o in optimizers:
        if step != SKIPPED:
            scaler.step(o)
    scaler.update()
    plan.reach(worker, "stepped", step)
    state.early.step()
    with torch.no_grad():
        for mine, theirs in zip(state.slow.parameters(), net.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
    state.average.update_parameters(net)
    plan.reach(worker, "metric", step)
    total = float(hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum))
    net.eval()
    net(torch.ones(2, 6)).sum()  # an evaluation that forgets no_grad
    net.train()
    state.history = [*state.history, (step, total)]
    state.step += 1
