"""What the chaos job and its reference share: model, data, and the two rules they must agree on. No spotfleet in here.

The rules are those of docs/commit.md and of ElasticSampler's docstring, written down a second time.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

SAMPLES, BATCH = 389, 4  # a prime, so that epochs end in short batches, split unevenly
SEED = 11
CLIP = 1.0
MAX_STEPS = 40_000


class Net(nn.Module):
    """Series (B, 4, 12) to logits (B, 5). It also notes whose forward passes its running statistics come from.

    `lineage[step]` is `label(generation, rank)` of the forward pass that this rank's buffers went through in that
    step. As a buffer it goes where the other buffers go.
    """

    lineage: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv1d(4, 16, 3, padding=1), nn.BatchNorm1d(16)
        self.second, self.norm2 = nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16)
        self.last = nn.Linear(16 * 12, 5)
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("lineage", torch.zeros(MAX_STEPS))
        self.now = (0, 0, 0)  # step, generation, rank

    def forward(self, x: Tensor) -> Tensor:
        step, generation, rank = self.now
        self.lineage[step] = label(generation, rank)
        x = self.dropout(torch.relu(self.norm1(self.first(x))))
        x = self.dropout(torch.relu(self.norm2(self.second(x))))
        return self.last(x.flatten(1))


def label(generation: int, number: int) -> int:
    """Two numbers in one that a float32 holds exactly."""
    assert number < 16 and generation < 1 << 20
    return 16 * generation + number


def unlabel(value: float) -> tuple[int, int]:
    return divmod(int(value), 16)


def make() -> tuple[Net, torch.optim.AdamW]:
    """The same untrained model and optimizer in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 97, eta_min=1e-4)


def data() -> tuple[Tensor, Tensor]:
    """Noise with a label in it: (SAMPLES, 4, 12), (SAMPLES,)."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 5, (SAMPLES,), generator=generator)
    series = torch.randn(SAMPLES, 4, 12, generator=generator)
    series[torch.arange(SAMPLES), 0, labels] += 2.0
    return series, labels


def permutation(epoch: int) -> list[int]:
    """The order of an epoch's samples."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + epoch)
    return torch.randperm(SAMPLES, generator=generator).tolist()


def shares(position: int, world: int) -> list[tuple[int, int]]:
    """Start and end, in the permutation, of each rank's part of the global batch at `position`."""
    left = SAMPLES - position
    if left >= world * BATCH:
        return [(position + r * BATCH, position + (r + 1) * BATCH) for r in range(world)]
    found, at = [], position
    for r in range(world):
        more = left // world + (r < left % world)
        found.append((at, at + more))
        at += more
    return found


def reseed(rank: int, step: int) -> None:
    """Random numbers of one forward pass: they depend on (seed 0, rank, iteration, microbatch 0)."""
    digest = hashlib.blake2b(repr((0, rank, step, 0)).encode(), digest_size=8).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest, "big") >> 1)


def digest(tensors: list[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()[:24]


def learnt(model: Net, optimizer: torch.optim.Optimizer) -> str:
    """Digest of the weights and of what Adam holds of them."""
    params = list(model.parameters())
    return digest(params + [optimizer.state[p][k] for p in params for k in ("exp_avg", "exp_avg_sq", "step")])


def statistics(model: Net) -> str:
    """Digest of the batch-norm statistics."""
    return digest([b for name, b in model.named_buffers() if name != "lineage"])
