"""Loops that need a process of their own: global random numbers, forked loaders, profilers, compilers.

Plain torch cannot give their bits, as each rank draws its own. `test_processes.py` compares with an undisturbed run.
"""
# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

import spotfleet.train as hvd
from tests.habits.kit import STEPS, Habit, Kit, Loop, Result, batch, loss_of, net, result
from tests.habits.shapes import NEVER, SGD, Adam, simple

OWN: list[Habit] = []


def own_process(loop: Loop) -> Loop:
    OWN.append(Habit((loop.__doc__ or "").strip().splitlines()[0].rstrip("."), "processes", loop))
    return loop


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """24 points, with noise that is drawn when one is fetched."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch(i, rows=1)
        return x[0] + 0.1 * torch.randn(4) + 0.1 * random.random(), y[0] + 0.1 * float(np.random.rand())


class Stream(IterableDataset[torch.Tensor]):
    """Its workers share an endless stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, 10**6, step):
            yield batch(i, rows=1)[0][0]


def _epochs(kit: Kit, loader: Any, sampler: Any, model: nn.Module) -> Result:
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))
    state = kit.state(model, opt, sampler=sampler, epoch=0)

    def train(state: Any) -> None:
        for state.epoch in range(state.epoch, 4):
            sampler.set_epoch(state.epoch)
            for x, y in loader:
                opt.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                opt.step()
                sampler.record_batch()
                state.commit()

    kit.run(train)(state)
    return result(model, opt)


@own_process
def loader_workers(kit: Kit) -> Result:
    """A shuffled DataLoader with an ElasticSampler, and two persistent workers that draw noise (`elastic.seeded`)."""
    data = hvd.elastic.seeded(Points())
    sampler = hvd.elastic.ElasticSampler(data, batch_size=3)
    loader = DataLoader(data, batch_size=3, sampler=sampler, num_workers=2, persistent_workers=True)
    return _epochs(kit, loader, sampler, net(nn.Dropout(0.2)))


@own_process
def loader_workers_anew(kit: Kit) -> Result:
    """The same with one worker, started anew each epoch, that prefetches."""
    data = hvd.elastic.seeded(Points())
    sampler = hvd.elastic.ElasticSampler(data, batch_size=3)
    loader = DataLoader(data, batch_size=3, sampler=sampler, num_workers=1, prefetch_factor=4)
    return _epochs(kit, loader, sampler, net())


def _drawn(kit: Kit, model: nn.Module, draw: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> Result:
    def loss(i: int) -> torch.Tensor:
        x, y = draw(i)
        return nn.functional.mse_loss(model(x), y)

    return simple(kit, model, lambda p: Adam(p, lr=0.01), loss=loss, each=NEVER)


@own_process
def random_batches(kit: Kit) -> Result:
    """Batches drawn with torch's, Python's and numpy's global generators, and dropout."""
    return _drawn(kit, net(nn.Dropout(0.3)), lambda i: (
        torch.randn(6, 4) * random.random(), torch.from_numpy(np.random.rand(6, 1)).float()))


@own_process
def mixup(kit: Kit) -> Result:
    """Mixup: numpy draws the share, torch the permutation."""

    def draw(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch(i)
        share, other = float(np.random.beta(0.4, 0.4)), torch.randperm(6)
        return share * x + (1 - share) * x[other], share * y + (1 - share) * y[other]

    return _drawn(kit, net(), draw)


@own_process
def activation_checkpointing(kit: Kit) -> Result:
    """Activation checkpointing with dropout, `use_reentrant=False`."""
    model = net(nn.Dropout(0.3))

    def loss(i: int) -> torch.Tensor:
        x, y = batch(i)
        return nn.functional.mse_loss(checkpoint(model, x.requires_grad_(True), use_reentrant=False), y)

    return simple(kit, model, lambda p: Adam(p, lr=0.01), loss=loss, each=NEVER)


@own_process
def compiled(kit: Kit) -> Result:
    """`torch.compile` (the graph is captured, run by eager kernels)."""
    model = net()
    fast = torch.compile(model, backend="eager", fullgraph=True)
    return simple(kit, model, lambda p: Adam(p, lr=0.01), loss=lambda i: loss_of(fast, i), each=NEVER)


@own_process
def profiled(kit: Kit) -> Result:
    """torch.profiler around the loop, with its step() in each iteration."""
    model = net()
    opt = kit.optimizer(Adam(model.parameters(), lr=0.01))
    state = kit.state(model, opt, i=0)

    def train(state: Any) -> None:
        with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=2)) as profiler:
            for state.i in range(state.i, STEPS):
                opt.zero_grad()
                with torch.profiler.record_function("forward"):
                    loss = loss_of(model, state.i)
                loss.backward()
                opt.step()
                profiler.step()
                state.commit()

    kit.run(train)(state)
    return result(model, opt)


@own_process
def deterministic(kit: Kit) -> Result:
    """`torch.use_deterministic_algorithms(True)`."""
    torch.use_deterministic_algorithms(True)
    return simple(kit, net(nn.Dropout(0.3)), lambda p: SGD(p, lr=0.1, momentum=0.9))


@own_process
def by_torch_distributed(kit: Kit) -> Result:
    """A metric by dist.all_reduce and a barrier after each step."""
    model, seen = net(), torch.zeros(1)

    def after(i: int) -> None:
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.barrier()
        seen.copy_(total)

    return simple(kit, model, lambda p: SGD(p, lr=0.1), after=after)


@own_process
def stream(kit: Kit) -> Result:
    """An iterable data set with a loader process, advanced to where training stands at each call."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))
    state = kit.state(model, opt, i=0)

    def train(state: Any) -> None:
        batches = iter(DataLoader(Stream(), batch_size=4, num_workers=1))
        for _ in range(state.i):
            next(batches)
        for state.i in range(state.i, STEPS):
            opt.zero_grad()
            model(next(batches)).pow(2).mean().backward()
            opt.step()

    kit.run(train)(state)
    return result(model, opt)


@own_process
def hidden_state(kit: Kit) -> Result:
    """A recurrent network whose hidden state goes on from batch to batch, detached, as a value of the state."""
    model = nn.ModuleDict({"cell": nn.GRUCell(4, 5), "out": nn.Linear(5, 1)})
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))
    state = kit.state(model, opt, i=0, hidden=torch.zeros(6, 5))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            x, y = batch(state.i)
            hidden = model["cell"](x, state.hidden)
            opt.zero_grad()
            nn.functional.mse_loss(model["out"](hidden), y).backward()
            opt.step()
            state.hidden = hidden.detach()

    kit.run(train)(state)
    return result(model, opt)


@own_process
def local_shuffle(kit: Kit) -> Result:
    """Each worker walks through its own shuffle of the whole data set."""
    model = net()
    opt = kit.optimizer(SGD(model.parameters(), lr=0.1))

    def train(state: Any) -> None:
        for state.i in range(state.i, STEPS):
            order = torch.randperm(24, generator=torch.Generator().manual_seed(100 * (state.i // 6) + kit.rank()))
            opt.zero_grad()
            loss_of(model, int(order[state.i % 6])).backward()
            opt.step()
            state.commit()

    kit.run(train)(kit.state(model, opt, i=0))
    return result(model, opt)
