"""Random augmentation that a sample gets alike wherever it is drawn: numbers from (seed, epoch, sample index).

The index carries the epoch, because the copy of a dataset in a persistent loader process hears of nothing else.
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
    """A sample's index that knows in which epoch it is drawn."""

    epoch: int

    def __new__(cls, index: int, epoch: int) -> EpochIndex:
        made = super().__new__(cls, index)
        made.epoch = epoch
        return made

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return EpochIndex, (int(self), self.epoch)


class Seeded(Dataset):
    """`dataset`, whose random numbers depend on (seed, epoch, index) alone: see elastic.seeded."""

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
        with drawn(self.seed, epoch, index):
            return self.dataset[index]

    def index(self, index: int, epoch: int) -> EpochIndex:
        """What a sampler is to yield for this sample."""
        return EpochIndex(index, epoch)


def seeded(dataset: Any, seed: int = 0) -> Seeded:
    """`dataset`, each of whose samples is augmented alike, whichever worker of whichever world size draws it.

    Inside its `__getitem__` the global random numbers of torch, `random` and numpy begin from (seed, epoch, index).
    Give the result to ElasticSampler, which tells it the epoch, and to the DataLoader.
    """
    return Seeded(dataset, seed)


@contextmanager
def drawn(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Inside, random numbers of this sample; after it the process's own go on, but in a loader process, where nobody
    has any."""
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
