"""Each sample exactly once per epoch, through any number of resizes.

The position is one number: samples consumed of the permutation of (seed, epoch). At world size n the next global
batch is `permutation[position : position + n * b]`, and rank r takes its r-th slice of b. A short tail is split as
evenly as possible; a rank that gets nothing repeats one sample with weight 0. So all ranks take equally many steps.

Threads: the main thread; loaders with worker processes draw indices from it there too.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from spotfleet.errors import UsageError
from spotfleet.train import runtime

_iterations = itertools.count(1)


def slice_for(position: int, total: int, world: int, rank: int, batch: int) -> tuple[int, int]:
    """Start and end, in the permutation, of this rank's part of the global batch at `position`; may be empty."""
    left = min(world * batch, total - position)
    if left == world * batch:
        return position + rank * batch, position + (rank + 1) * batch
    share, more = divmod(max(0, left), world)
    start = position + rank * share + min(rank, more)
    return start, start + share + (rank < more)


class ElasticSampler(Sampler):
    """For DataLoader(sampler=..., batch_size=batch_size), or DataLoader(batch_sampler=sampler.batches()).

    Put it into the state, call `record_batch` after each step and `set_epoch` when an epoch begins or ends. Without
    `batch_size` (as in Horovod) a global batch is one sample per rank, and a short tail is not weighted.
    """

    def __init__(self, dataset: Sized | int, batch_size: int | None = None, shuffle: bool = True,
                 seed: int = 0) -> None:
        self.total = dataset if isinstance(dataset, int) else len(dataset)
        if self.total < 1:
            raise UsageError(f"ElasticSampler: the dataset holds {self.total} samples", hint="give it at least one")
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"ElasticSampler: batch_size is {batch_size}", hint="use 1 or more, as for the DataLoader")
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.iterated = 0  # when it was last iterated, among all samplers of the process; 0: never
        self._order: tuple[int, list[int]] | None = None

    @property
    def slice_size(self) -> int:
        return self.batch_size or 1

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` from its first sample; the epoch under way is left as it is."""
        if epoch != self.epoch:
            self.epoch, self.processed_num = epoch, 0

    def record_batch(self, batch_idx: int, batch_size: int | None = None) -> None:
        """The batch just trained on is consumed, on all ranks. `batch_idx` is Horovod's and not needed."""
        size = self.batch_size or batch_size
        if size is None:
            raise UsageError("ElasticSampler.record_batch: batch_size is missing",
                             hint="give it here or to the sampler")
        self.processed_num = min(self.total, self.processed_num + runtime.current().place.size * size)

    def weight(self) -> tuple[float, float]:
        """Real samples of this rank in the global batch at the position, and of all ranks."""
        place = runtime.current().place
        start, end = slice_for(self.processed_num, self.total, place.size, place.rank, self.slice_size)
        total = min(place.size * self.slice_size, self.total - self.processed_num)
        return (float(end - start), float(total)) if total > 0 else (1.0, float(place.size))

    def order(self) -> list[int]:
        """The permutation of this epoch."""
        if not self.shuffle:
            return list(range(self.total))
        if self._order is None or self._order[0] != self.epoch:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % (1 << 63))
            self._order = (self.epoch, torch.randperm(self.total, generator=generator).tolist())
        return self._order[1]

    def _slices(self) -> Iterator[tuple[int, int]]:
        place = runtime.current().place
        for position in range(self.processed_num, self.total, place.size * self.slice_size):
            start, end = slice_for(position, self.total, place.size, place.rank, self.slice_size)
            yield (start, end) if end > start else (position, position + 1)

    def _begin(self) -> None:
        self.iterated = next(_iterations)
        if self.processed_num >= self.total:
            warnings.warn(f"ElasticSampler: epoch {self.epoch} is consumed; call set_epoch for the next one",
                          stacklevel=3)

    def __iter__(self) -> Iterator[int]:
        self._begin()
        order = self.order()
        return itertools.chain.from_iterable(order[start:end] for start, end in list(self._slices()))

    def __len__(self) -> int:
        return sum(end - start for start, end in self._slices())

    def batches(self) -> Batches:
        """The same as a batch sampler: one list of indices per step."""
        return Batches(self)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state["epoch"], state["processed_num"]


class Batches:
    """An ElasticSampler seen batch by batch."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        self._sampler._begin()
        order = self._sampler.order()
        return iter([order[start:end] for start, end in self._sampler._slices()])

    def __len__(self) -> int:
        return sum(1 for _ in self._sampler._slices())
