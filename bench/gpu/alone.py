"""Cost of forming, aborting and waiting with NCCL at world size 1 on one CUDA device. A row of JSON per result.

    python bench/gpu/alone.py card reform spin steps [--times 100] [--pairs 30]

World size 1 is enough for latencies and for the cost of hooks and of the event that gates a step. It has no kernel that
waits for a dead peer; `spin` uses a long kernel instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spotfleet.protocol.messages import Assignment
from spotfleet.train.comm.group import Group
from spotfleet.train.comm.nccl import NcclGroup
from spotfleet.train.gradients.reducer import WORLD, Reducer
from spotfleet.worker.errors import CommBroken
from spotfleet.worker.store import open_store

ADDRESS, KEY = "127.0.0.1", "key"
SPIN_CYCLES = 3_000_000_000  # one to two seconds
MANY = 1000  # parameters
STEPS = 20  # a block of a pair


class Alone(NcclGroup):
    """Group with a real communicator at world size 1, which a usual group of one does not make."""

    def form(self) -> None:
        self.forming = True
        try:
            self._connect_abortably()
        finally:
            self._own_sockets, self.forming = {}, False


class Counted(Reducer):
    """Reducer that reduces although its rank is alone: it writes the expected world size into the tail itself."""

    def _write_tail(self, group: Group, used: list[bool]) -> None:
        super()._write_tail(group, used)
        self._tail[WORLD] = group.size


def formed(generation: int, store: str) -> Alone:
    group = Alone(Assignment(generation, 0, ("h/0/1",), store), "bench", ADDRESS, KEY)
    group.form()
    return group


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def card(options: argparse.Namespace) -> dict[str, Any]:
    return {"card": torch.cuda.get_device_name(), "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())), "cores": os.cpu_count()}


def reform(options: argparse.Namespace) -> dict[str, Any]:
    """Measure forming, reducing, aborting and forming again, and the device memory lost by it."""
    _held, store = open_store(ADDRESS, KEY)
    data = torch.ones(1 << 20, device="cuda")
    forms, aborts, free = [], [], []
    for generation in range(1, options.times + 1):
        began = time.perf_counter()
        group = formed(generation, store)
        forms.append(time.perf_counter() - began)
        group.finish([group.launch(data)])
        aborts.append(timed(group.end))
        group.retire().join()
        free.append(torch.cuda.mem_get_info()[0])
    return {"what": "reform", "times": options.times, "form_ms": spread(forms[1:]), "abort_ms": spread(aborts[1:]),
            "first_form_ms": 1e3 * forms[0], "lost_mib": (free[len(free) // 10] - free[-1]) / (1 << 20)}


def spin(options: argparse.Namespace) -> dict[str, Any]:
    """Abort while a kernel runs: it must not block its caller, must fail the wait and leave a working device."""
    _held, store = open_store(ADDRESS, KEY)
    group, data = formed(1, store), torch.ones(1000, device="cuda")
    torch.cuda._sleep(SPIN_CYCLES)
    work = group.launch(data)
    abort_s: list[float] = []
    order = threading.Timer(0.1, lambda: abort_s.append(timed(group.abort)))
    order.start()
    began = time.perf_counter()
    try:
        group.finish([work])
        failed = False
    except CommBroken:
        failed = True
    waited_s = time.perf_counter() - began
    order.join()
    group.retire().join()
    again = formed(2, store)
    data.fill_(3.0)
    again.finish([again.launch(data)])
    again.end()
    return {"what": "spin", "wait_failed": failed, "abort_call_ms": 1e3 * abort_s[0], "waited_ms": 1e3 * waited_s,
            "works_after": bool((data == 3.0).all())}


def steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the wall time of a step, interleaved: plain, with DDP, with Reducer, whose last event the host awaits."""
    with tempfile.NamedTemporaryFile() as file:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method=f"file://{file.name}", rank=0, world_size=1)
        rows = [compare("10.2 M parameters", wide, options.pairs), compare(f"{MANY} parameters", many, options.pairs)]
        dist.destroy_process_group()
    return rows


def wide() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*[nn.Linear(1010, 1010) for _ in range(10)]).cuda(), torch.randn(256, 1010, device="cuda")


def many() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(MANY // 2)]).cuda(), torch.randn(64, 64, device="cuda")


def compare(what: str, build: Callable[[], tuple[nn.Module, torch.Tensor]], pairs: int) -> dict[str, Any]:
    _held, store = open_store(ADDRESS, KEY)
    group = formed(1, store)
    group.size = 2  # so that the reducer does its work; see Counted
    makers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "plain": lambda model: model,
        "ddp": lambda model: nn.parallel.DistributedDataParallel(model, device_ids=[0]),
        "spotfleet": lambda model: reduced(model, group),
    }
    runs = {name: block(make, build) for name, make in makers.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for pair in range(pairs + 1):
        for name, run in runs.items():
            took = run()
            if pair:  # the first of each includes one-time costs
                found[name].append(took)
    group.end()
    row: dict[str, Any] = {"what": f"steps, {what}", **{f"{name}_ms": spread(took) for name, took in found.items()}}
    for name in ("plain", "ddp"):
        ratios = [a / b for a, b in zip(found["spotfleet"], found[name], strict=True)]
        row[f"against_{name}"] = round(statistics.median(ratios), 4)
    return row


def reduced(model: nn.Module, group: Group) -> nn.Module:
    model.reducer = Counted(list(model.parameters()), 1, True, lambda: group, lambda r: None,  # type: ignore[assignment]
                            lambda r, change, save: None, lambda: None)
    return model


def block(make: Callable[[nn.Module], nn.Module], build: Callable[[], tuple[nn.Module, torch.Tensor]]) -> Any:
    torch.manual_seed(0)
    inner, inputs = build()
    optimizer, model = torch.optim.Adam(inner.parameters(), foreach=True), make(inner)

    def run() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / STEPS

    return run


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": round(1e3 * statistics.median(ordered), 3),
            "p95": round(1e3 * ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 3)}


if __name__ == "__main__":
    findings = {"card": card, "reform": reform, "spin": spin, "steps": steps}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", choices=list(findings))
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=30)
    given = parser.parse_args()
    for name in given.what:
        rows = findings[name](given)
        for row in rows if isinstance(rows, list) else [rows]:
            print(json.dumps(row), flush=True)
