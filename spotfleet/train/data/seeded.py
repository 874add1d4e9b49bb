"""Random augmentation that is the same wherever a sample is drawn: random numbers from (seed, epoch, sample index).

The index carries the epoch, because a persistent loader process receives nothing else for its copy of the dataset.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from spotfleet.errors import UsageError


class EpochIndex(int):
    """Sample index with the epoch in which it is drawn."""

    epoch: int

    def __new__(cls, index: int, epoch: int) -> EpochIndex:
        made = super().__new__(cls, index)
        made.epoch = epoch
        return made

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return EpochIndex, (int(self), self.epoch)


class Seeded(Dataset):
    """Dataset wrapper whose random numbers depend on (seed, epoch, index) alone: see elastic.seeded."""

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UsageError(f"elastic.seeded: {type(dataset).__name__} has no __getitem__ and __len__",
                             hint="for an iterable use elastic.ElasticIterable(..., transform=...)")
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if not isinstance(index, EpochIndex):
            raise UsageError(f"elastic.seeded: index {index!r} carries no epoch",
                             hint="draw from elastic.ElasticSampler(SEEDED, ...), or call SEEDED.sample(index, epoch)")
        return self.sample(int(index), index.epoch)

    def sample(self, index: int, epoch: int) -> Any:
        with seeded_draws(self.seed, epoch, index):
            return self.dataset[index]

    def index(self, index: int, epoch: int) -> EpochIndex:
        """Return the index that a sampler yields for this sample."""
        return EpochIndex(index, epoch)


def seeded(dataset: Any, seed: int = 0) -> Seeded:
    """Wrap `dataset` so that each sample is augmented in the same way by any worker at any world size.

    Inside its `__getitem__` the global random numbers of torch, `random` and numpy begin from (seed, epoch, index).
    Give the result to ElasticSampler, whose indices carry the epoch, and to the DataLoader.
    """
    return Seeded(dataset, seed)


@contextmanager
def seeded_draws(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Seed random numbers from this sample inside the context, and restore the process's own after it.

    A loader process has none of its own, so nothing is restored there.
    """
    numpy, own = sys.modules.get("numpy"), get_worker_info() is None
    before = (torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None) if own else None
    value = int.from_bytes(hashlib.blake2b(repr((seed, epoch, index)).encode(), digest_size=8).digest(), "big") >> 1
    torch.default_generator.manual_seed(value)
    random.seed(value)
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)
    try:
        yield
    finally:
        if before is not None:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            if numpy is not None and before[2] is not None:
                numpy.random.set_state(before[2])
