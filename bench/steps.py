"""The workload of recovery.py: a small network on random numbers, the same under spotfleet and under torchrun.

Each process appends a JSON line {pid, rank, world, step, at} per finished step to FOLDER/PID.jsonl; `at` is the
machine's monotonic clock. Under torchrun rank 0 saves a checkpoint each step (to memory, /dev/shm, where there is
one), so that a restart loses as little as it can.
"""
# ruff: noqa: B020  `for state.step in range(state.step, ...)` is how a loop starts where training stands

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Diary:
    def __init__(self, folder: Path) -> None:
        self.file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def note(self, rank: int, world: int, step: int) -> None:
        line = {"pid": os.getpid(), "rank": rank, "world": world, "step": step, "at": time.monotonic()}
        self.file.write(json.dumps(line) + "\n")


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.optim.Adam(model.parameters())


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    inputs, labels = torch.randn(32, 64, generator=generator), torch.randint(0, 10, (32,), generator=generator)
    return F.cross_entropy(model(inputs), labels)


def with_spotfleet(args: argparse.Namespace) -> None:
    import spotfleet.train as hvd

    hvd.init()
    diary, (model, optimizer) = Diary(args.folder), make()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        for state.step in range(state.step, args.steps):
            optimizer.zero_grad()
            loss_of(model, state.step, hvd.rank()).backward()
            optimizer.step()
            state.commit()
            diary.note(hvd.rank(), hvd.size(), state.step)
            time.sleep(args.step_s)

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


def with_torchrun(args: argparse.Namespace) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    diary, (model, optimizer) = Diary(args.folder), make()
    first, saved = 0, args.folder / "checkpoint.pt"
    if saved.exists():
        held = torch.load(saved)
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        first = held["step"] + 1
    ddp = DistributedDataParallel(model)
    for step in range(first, args.steps):
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{saved}.new")
            os.replace(f"{saved}.new", saved)
        diary.note(dist.get_rank(), dist.get_world_size(), step)
        time.sleep(args.step_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--under", choices=["spotfleet", "torchrun"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--step-s", type=float, default=0.02)
    parsed = parser.parse_args()
    {"spotfleet": with_spotfleet, "torchrun": with_torchrun}[parsed.under](parsed)
