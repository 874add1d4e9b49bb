"""Part `steps`: wall time of a step with our reducer against DDP, interleaved in the same three processes.

Each process is one rank: `alongside.py RANK SIZE STORE PORT PAIRS MODEL...`. All share one card, so that only the
ratios mean something. DDP uses a process group of its own, made as a user makes one.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spotfleet.protocol.messages import Assignment
from spotfleet.train.comm.backends import make_group
from spotfleet.train.comm.group import Group
from spotfleet.train.gradients.reducer import Reducer
from spotfleet.worker.store import open_store

KEY, SIZE, LIMIT_S, STEPS = "key", 3, 120.0, 4
FEW = {"GPT-2, 124 M": 4}  # pairs of a model whose steps take long where three ranks share a card
Built = tuple[nn.Module, torch.Tensor]


class Gpt2(nn.Module):
    """GPT-2 with its 124 million parameters, or a small one of the same form."""

    def __init__(self, width: int, layers: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def wide(device: torch.device) -> Built:
    return nn.Sequential(*[nn.Linear(1010, 1010) for _ in range(10)]).to(device), torch.randn(64, 1010, device=device)


def many(device: torch.device) -> Built:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(500)]).to(device), torch.randn(64, 64, device=device)


def gpt2(device: torch.device) -> Built:
    return Gpt2(768, 12, 50257, 256).to(device), torch.randint(0, 50257, (2, 256), device=device)


def small(device: torch.device) -> Built:
    return Gpt2(64, 2, 100, 16).to(device), torch.randint(0, 100, (2, 16), device=device)


MODELS: dict[str, Callable[[torch.device], Built]] = {
    "10.2 M parameters": wide, "1000 small tensors": many, "GPT-2, 124 M": gpt2, "small GPT": small}


def one(rank: int, size: int, store: str, port: str, pairs: int, names: list[str]) -> None:
    """Be a rank; the first one prints a row for each model."""
    device = torch.device(os.environ["DEVICE"])
    members = tuple(f"h{r}/0/1" for r in range(size))
    group = make_group(Assignment(1, rank, members, store), "bench", f"127.0.0.{rank + 2}", KEY)
    group.form()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{port}",
                            rank=rank, world_size=size, timeout=datetime.timedelta(seconds=LIMIT_S))
    for name in names:
        row = compare(name, group, device, min(pairs, FEW.get(name, pairs)))
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()
    group.retire().join(LIMIT_S)


def compare(name: str, group: Group, device: torch.device, pairs: int) -> dict[str, Any]:
    reducers: list[Reducer] = []  # a reducer that nobody holds is collected, with its hooks

    def reduced(model: nn.Module) -> nn.Module:
        reducers.append(Reducer(list(model.parameters()), 1, True, lambda: group, lambda r: None,
                                lambda r, change, save: None, lambda: None))
        return model

    makers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "plain": lambda model: model, "ddp": nn.parallel.DistributedDataParallel, "spotfleet": reduced}
    models = {kind: build_one(MODELS[name], device, group.rank) for kind in makers}
    runs = {kind: block(make, *models[kind], device) for kind, make in makers.items()}
    found: dict[str, list[float]] = {kind: [] for kind in runs}
    for pair in range(pairs + 1):
        for kind, run in runs.items():
            took = run()
            if pair:  # the first of each includes one-time costs
                found[kind].append(took)
    equal = {kind: equal_on_all_ranks(model) for kind, (model, _) in models.items()}
    row: dict[str, Any] = {"row": f"steps, {name}", "ok": equal == {"plain": False, "ddp": True, "spotfleet": True},
                           "equal_weights": equal, "ranks": group.size, "pairs": pairs,
                           **{f"{kind}_ms": round(1e3 * statistics.median(took), 3) for kind, took in found.items()}}
    for kind in ("plain", "ddp"):
        ratios = [a / b for a, b in zip(found["spotfleet"], found[kind], strict=True)]
        row[f"against_{kind}"] = round(statistics.median(ratios), 4)
    return row


def build_one(build: Callable[[torch.device], Built], device: torch.device, rank: int) -> Built:
    """Make the same weights on each rank, and inputs of its own: only a reduction keeps the weights equal."""
    torch.manual_seed(0)
    model, _ = build(device)
    torch.manual_seed(1 + rank)
    return model, build(device)[1]


def equal_on_all_ranks(model: nn.Module) -> bool:
    """Compare the weights of all ranks bit for bit, by their sums as integers."""
    mine = torch.stack([p.detach().contiguous().view(torch.int32).sum(dtype=torch.int64) for p in model.parameters()])
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    return all(torch.equal(mine, other) for other in all_ranks)


def block(make: Callable[[nn.Module], nn.Module], inner: nn.Module, inputs: torch.Tensor, device: torch.device) -> Any:
    optimizer, model = torch.optim.Adam(inner.parameters(), foreach=True), make(inner)

    def run() -> float:
        settle(device)
        began = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        settle(device)
        return (time.perf_counter() - began) / STEPS

    return run


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def part(device: str, short: bool) -> Iterator[dict[str, Any]]:
    import stage

    _held, store = open_store("127.0.0.1", KEY)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    names, pairs = (["small GPT"], 2) if short else (["10.2 M parameters", "1000 small tensors", "GPT-2, 124 M"], 15)
    arguments = [str(SIZE), store, str(port), str(pairs), *names]
    processes = [subprocess.Popen([sys.executable, __file__, str(rank), *arguments], text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  env={**os.environ, **stage.variables(device, f"h{rank}")})
                 for rank in range(SIZE)]
    said: list[str] = []
    try:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:  # each row as it comes; run.py has the limit
            said.append(line)
            if line.startswith("{"):
                yield json.loads(line)
        codes = [process.wait(LIMIT_S) for process in processes]
        why = "" if not any(codes) else "".join(said)[-2000:]
        yield {"row": "steps, ends", "ok": not any(codes), "exits": codes, "why": why}
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    one(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6:])
