"""Workload of recovery.py and overhead.py, the same under every system: an MLP of 10.2 million float32 parameters.

1024-3072-1024-3072-256, mean squared error, Adam, batch 16 per worker, one thread, random data made from the step.
Each process appends a JSON line {pid, rank, world, step, at, label} per finished step to FOLDER/PID.jsonl; `at` is the
machine's monotonic clock, `label` identifies the membership (see diary.py). Each system commits in its own way:
spotfleet commits at every step, torchrun's rank 0 saves every tenth step (to memory, /dev/shm, if there is one) as in
the published measurements, torchft commits at every step.

With --meter PATH a worker takes orders from overhead.py over that Unix socket: it answers "N" with a JSON line with the
times of N steps. Needs only torch (and the measured system): torchft may be in another interpreter.
"""
# ruff: noqa: B020  `for state.step in range(state.step, ...)` is how a loop starts where training stands

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTHS = (1024, 3072, 1024, 3072, 256)
BATCH = 16
STEPS = 1_000_000
SAVE_EVERY = 10  # number of torchrun's steps between two checkpoints


class Diary:
    def __init__(self, folder: Path) -> None:
        self.file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def note(self, rank: int, world: int, step: int, label: object) -> None:
        line = {"pid": os.getpid(), "rank": rank, "world": world, "step": step, "at": time.monotonic(),
                "label": str(label)}
        self.file.write(json.dumps(line) + "\n")


class Meter:
    """Runner of steps on request; without a path it never waits."""

    def __init__(self, path: str) -> None:
        self.left, self.file = 0, None
        if path:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(path)
            self.file = sock.makefile("rw")

    def step_done(self) -> None:
        """Report the times of the last block when it is over, and wait for the next."""
        if self.file is None:
            return
        if self.left == 0:
            self._wait()
            return
        self.left -= 1
        if self.left == 0:
            wall_s, cpu_s = time.monotonic() - self.wall_at, time.process_time() - self.cpu_at
            self.file.write(json.dumps({"pid": os.getpid(), "wall_s": wall_s, "cpu_s": cpu_s}) + "\n")
            self.file.flush()
            self._wait()

    def _wait(self) -> None:
        line = self.file.readline()
        if not line:
            os._exit(0)  # the bench has ended
        self.left = int(line)
        self.wall_at, self.cpu_at = time.monotonic(), time.process_time()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers: list[nn.Module] = []
    for i in range(len(WIDTHS) - 1):
        layers += [nn.Linear(WIDTHS[i], WIDTHS[i + 1]), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    return model, torch.optim.Adam(model.parameters())


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    inputs = torch.randn(BATCH, WIDTHS[0], generator=generator)
    targets = torch.randn(BATCH, WIDTHS[-1], generator=generator)
    return F.mse_loss(model(inputs), targets)


def with_spotfleet(args: argparse.Namespace) -> None:
    import spotfleet.train as hvd
    from spotfleet.train import runtime

    hvd.init()
    diary, meter, (model, optimizer) = Diary(args.folder), Meter(args.meter), make()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        for state.step in range(state.step, STEPS):
            optimizer.zero_grad()
            loss_of(model, state.step, hvd.rank()).backward()
            optimizer.step()
            state.commit()
            diary.note(hvd.rank(), hvd.size(), state.step, runtime.current().generation)
            meter.step_done()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


def with_ddp(args: argparse.Namespace) -> None:
    """Train with plain DistributedDataParallel; RANK, WORLD_SIZE and MASTER_* come from the environment."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    diary, meter, (model, optimizer) = Diary(args.folder), Meter(args.meter), make()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=args.views)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
        diary.note(dist.get_rank(), dist.get_world_size(), step, "ddp")
        meter.step_done()


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
    label = torch.tensor([time.monotonic_ns(), first])
    dist.broadcast(label, 0)
    ddp = DistributedDataParallel(model)
    for step in range(int(label[1]), STEPS):
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % SAVE_EVERY == SAVE_EVERY - 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{saved}.new")
            os.replace(f"{saved}.new", saved)
        diary.note(dist.get_rank(), dist.get_world_size(), step, int(label[0]))


def with_torchft(args: argparse.Namespace) -> None:
    """Train with torchft, in three replica groups of one.

    Its own DistributedDataParallel asserts in survivors when a peer dies (torchft 0.2.0 under torch 2.13), so gradients
    are averaged by one flat managed allreduce."""
    import torch.distributed as dist
    from torchft import Manager, Optimizer, ProcessGroupGloo

    model, plain = make()
    limit = timedelta(seconds=args.limit_s)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), min_replica_size=2, timeout=limit, quorum_timeout=timedelta(seconds=60),
        load_state_dict=lambda held: (model.load_state_dict(held["model"]), plain.load_state_dict(held["optimizer"])),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"bench_{args.replica}_{os.getpid()}", lighthouse_addr=args.lighthouse, store_addr="127.0.0.1",
        store_port=store.port, rank=0, world_size=1)
    optimizer, diary, leaving = Optimizer(manager, plain), Diary(args.folder), []
    signal.signal(signal.SIGTERM, lambda *_: leaving.append(True))
    while not leaving:
        step = manager.current_step()
        optimizer.zero_grad()
        loss_of(model, step, args.replica).backward()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        manager.allreduce(flat).wait()
        for p, grad in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            p.grad.copy_(grad.view_as(p))
        optimizer.step()
        if manager.current_step() > step and manager.is_participating():
            world = manager.num_participants()  # a joiner takes part one step after its quorum has begun
            diary.note(manager.participating_rank(), world, step, f"{manager._quorum_id}/{world}")
    manager.shutdown()
    os._exit(0)  # its threads would keep this process alive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--under", choices=["spotfleet", "ddp", "torchrun", "torchft"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--meter", default="")
    parser.add_argument("--views", action="store_true", help="of ddp: gradients are views of its buckets")
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--limit-s", type=float, default=60.0)
    parsed = parser.parse_args()
    run = {"spotfleet": with_spotfleet, "ddp": with_ddp, "torchrun": with_torchrun, "torchft": with_torchft}
    run[parsed.under](parsed)
