"""Train a small byte-level GPT on the sources of the Python standard library, through interruptions.

    python examples/gpt.py --short                     alone, about a minute on a CPU
    spotfleet train examples/gpt.py --np 1:3           on the fleet

The text is real and on every machine that has Python. Each sample is used once per epoch through any number of
interruptions and changes of the world size: `ElasticSampler` keeps the position in one global order.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import spotfleet.train as hvd

CONTEXT = 128  # bytes


class Sources(Dataset):
    """Windows of CONTEXT + 1 bytes, (CONTEXT + 1,) int64 each, of the standard library's .py files in order of name."""

    def __init__(self, limit_bytes: int) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= limit_bytes:
                break
        self.data = torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.data) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index * CONTEXT : (index + 1) * CONTEXT + 1].long()


class Block(nn.Module):
    """Transformer block: causal self-attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Byte-level language model."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map bytes (B, T) to logits of the next byte (B, T, 256)."""
        hidden = self.bytes(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(hidden)))

    @torch.no_grad()
    def write(self, start: bytes, count: int) -> str:
        """Return `start` followed by `count` bytes, each the most likely one after those before it."""
        text = list(start)
        for _ in range(count):
            window = torch.tensor([text[-CONTEXT:]])
            text.append(int(self(window)[0, -1].argmax()))
        return bytes(text).decode("utf-8", "replace")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--kib", type=int, default=2048, help="how much text to learn from")
    parser.add_argument("--batch", type=int, default=16, help="windows per worker and step")
    parser.add_argument("--short", action="store_true", help="one epoch on 160 KiB")
    args = parser.parse_args()
    if args.short:
        args.epochs, args.kib = 1, 160
    return args


args = parse()
hvd.init()
torch.manual_seed(0)
data = Sources(args.kib * 1024)
model = GPT()
optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
sampler = hvd.elastic.ElasticSampler(data, batch_size=args.batch)
loader = DataLoader(data, batch_size=args.batch, sampler=sampler)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.epoch < args.epochs:
        for batch, windows in enumerate(loader):
            began = time.monotonic()
            logits = model(windows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            sampler.record_batch(batch, args.batch)
            state.step += 1
            state.commit()
            if hvd.rank() == 0 and state.step % 10 == 0:
                took_ms = (time.monotonic() - began) * 1000
                print(f"step {state.step:5d}  workers {hvd.size()}  loss {loss.item():.3f} nats "
                      f"({loss.item() / math.log(2):.3f} bits) per byte  {took_ms:.0f} ms", flush=True)
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0))
if hvd.rank() == 0:
    print(model.write(b"def ", 120), flush=True)
hvd.shutdown()
