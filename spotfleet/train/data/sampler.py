"""Samplers that yield each sample exactly once per epoch, through any number of resizes.

The position is one number: samples consumed of the permutation of (seed, epoch). At world size n the next global
batch is `permutation[position : position + n * b]`, and rank r takes its r-th slice of b. Where the global batch is
kept (`global_batch`, or the resize policy), it is `permutation[position : position + B]` at any world size, split as
evenly as possible. A short tail is split in the same way. A rank without samples repeats one with weight 0, so all
ranks take the same number of steps. `stream.py` does the same for iterables.

Threads: the main thread; loaders with worker processes draw indices there too.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from spotfleet.errors import UsageError
from spotfleet.train import current
from spotfleet.train.data.seeded import Seeded

_iterations = itertools.count(1)


def slice_for(position: int, total: int, world: int, rank: int, global_batch: int) -> tuple[int, int]:
    """Return start and end in the permutation of this rank's part of the global batch at `position`; may be empty."""
    left = min(global_batch, total - position)
    share, more = divmod(max(0, left), world)
    start = position + rank * share + min(rank, more)
    return start, start + share + (rank < more)


class Elastic:
    """Position, shared by all ranks, in a sequence of samples; the state keeps it."""

    def __init__(self, name: str, batch_size: int | None, global_batch: int | None) -> None:
        for field, value in (("batch_size", batch_size), ("global_batch", global_batch)):
            if value is not None and value < 1:
                raise UsageError(f"{name}: {field} is {value}", hint="use 1 or more")
        if global_batch is not None and batch_size is None:
            raise UsageError(f"{name}: global_batch is given without batch_size",
                             hint="also give batch_size, the most samples that one worker takes in one pass")
        self.batch_size = batch_size
        self.epoch = 0
        self.processed_num = 0
        self.batches_done = 0  # calls of record_batch() in this epoch, at any world sizes
        self.last_used = 0  # order of its last use (drawn from or recorded) among all Elastic objects here; 0: never
        self.keeps_global_batch = global_batch is not None  # the global batch is the same at any world size
        self._given, self._kept = global_batch or 0, 0
        self._repeat_world, self._repeat_batches = 0, 0  # world size that applied the next batches' step; their number
        self._recorded = 0  # batches since the gradients of a reduction began
        self._per_step = 1  # the most batches that one reduction has had

    @property
    def slice_size(self) -> int:
        return self.batch_size or 1

    @property
    def global_batch(self) -> int:
        """Number of samples that all ranks together take in one step."""
        return self._given or self._kept or current.runtime().place.size * self.slice_size

    @property
    def known_total(self) -> int | None:
        """Number of samples of this epoch; None until its end has been reached."""
        return None

    @property
    def is_weighted(self) -> bool:
        """Whether `weight` is the weight of the batch being computed."""
        return self.batch_size is not None and self.last_used > 0

    def _note_use(self) -> None:
        """Make this the sampler used last; after an evaluation in mid-epoch it becomes so again."""
        self.last_used = next(_iterations) if self.last_used else 0

    def keep_global_batch(self) -> None:
        """Keep the present global batch at any world size from now on."""
        if self.batch_size is None:
            raise UsageError(f"{type(self).__name__}: the resize policy keep-global-batch needs its batch_size",
                             hint="give it the batch size of the DataLoader")
        self.keeps_global_batch, self._kept = True, self._kept or self.global_batch

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` from its first sample; do nothing if it is the current one."""
        if epoch != self.epoch:
            self.epoch, self.processed_num, self._repeat_world, self._repeat_batches = epoch, 0, 0, 0
            self.batches_done = 0

    def round_begins(self) -> None:
        """Begin counting the batches of a reduction, at its first gradient and before a position is taken."""
        self._per_step, self._recorded = max(self._per_step, self._recorded), 0

    def repeat_step(self, world: int, rounds: int = 1) -> None:
        """Prepare to compute the next step again, which was applied at world size `world` after so many reductions.

        Its batches stay the same on the present ranks, and `record_batch` counts them as it did then. It ends with
        the last of them.
        """
        self._repeat_world = 0 if self._given or self._kept else world
        self._repeat_batches = rounds * self._per_step if self._repeat_world else 0

    def record_batch(self, batch_idx: int = 0, batch_size: int | None = None) -> None:
        """Count the batch just trained on as consumed on all ranks. `batch_idx` is Horovod's and not needed."""
        size = self.batch_size or batch_size
        if size is None:
            raise UsageError(f"{type(self).__name__}.record_batch: batch_size is missing",
                             hint="give it here or to the sampler")
        world = self._repeat_world if self._repeat_batches else current.runtime().place.size
        self._repeat_batches, self._recorded = max(0, self._repeat_batches - 1), self._recorded + 1
        self.batches_done += 1
        self._note_use()
        step = self._given or self._kept or world * size
        total = self.known_total
        self.processed_num += step if total is None else min(step, max(0, total - self.processed_num))

    def weight(self) -> tuple[float, float]:
        """Return the real samples of this rank and of all ranks in the global batch at the position."""
        place, count, total = current.runtime().place, self.global_batch, self.known_total
        total = self.processed_num + count if total is None else total
        start, end = slice_for(self.processed_num, total, place.size, place.rank, count)
        together = min(count, total - self.processed_num)
        return (float(end - start), float(together)) if together > 0 else (1.0, float(place.size))

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num, "global_batch": self._kept,
                "per_step": self._per_step, "batches_done": self.batches_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state["epoch"], state["processed_num"]
        self._kept = state.get("global_batch", 0)
        self.batches_done = state.get("batches_done", 0)
        self._per_step, self._recorded = state.get("per_step", 1), 0
        self._repeat_world, self._repeat_batches = 0, 0

    def _check_sample_by_sample(self, instead: str) -> None:
        if self.keeps_global_batch:
            raise UsageError(f"{type(self).__name__}: where the global batch is kept, a worker's share of it changes "
                             "with the world size, and no DataLoader(batch_size=...) can cut it",
                             hint=f"use {instead}, and elastic.micro_batches to split a large share")


class ElasticSampler(Elastic, Sampler):
    """Sampler for DataLoader(sampler=..., batch_size=batch_size), or DataLoader(batch_sampler=sampler.batches()).

    Put it into the state, call `record_batch` after each step and `set_epoch` when an epoch begins or ends. Without
    `batch_size` (as in Horovod) a global batch is one sample per rank, and a short tail is not weighted. With
    `global_batch` all ranks together take that many samples at any world size; only `batches()` then yields a
    worker's share. A loader over it begins in mid-epoch after a change, so count its batches from there:
    `enumerate(loader, sampler.batches_done)`. `dataset` may be an elastic.seeded one: the indices then carry the epoch.
    """

    def __init__(self, dataset: Sized | int, batch_size: int | None = None, shuffle: bool = True,
                 seed: int = 0, global_batch: int | None = None) -> None:
        super().__init__("ElasticSampler", batch_size, global_batch)
        self.total = dataset if isinstance(dataset, int) else len(dataset)
        if self.total < 1:
            raise UsageError(f"ElasticSampler: the dataset holds {self.total} samples", hint="give it at least one")
        self.shuffle, self.seed = shuffle, seed
        self._seeded = dataset if isinstance(dataset, Seeded) else None
        self._order: tuple[int, list[int]] | None = None

    @property
    def known_total(self) -> int:
        return self.total

    def order(self) -> list[int]:
        """Return the permutation of this epoch."""
        if not self.shuffle:
            return list(range(self.total))
        if self._order is None or self._order[0] != self.epoch:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % (1 << 63))
            self._order = (self.epoch, torch.randperm(self.total, generator=generator).tolist())
        return self._order[1]

    def _slices(self) -> Iterator[tuple[int, int]]:
        return self._slices_from(self.processed_num, self._repeat_world, self._repeat_batches)

    def _slices_from(self, position: int, world: int = 0, batches: int = 0) -> Iterator[tuple[int, int]]:
        place = current.runtime().place
        while position < self.total:
            size, rank, count = place.size, place.rank, self.global_batch
            if batches:
                size, rank, count, batches = world, rank % world, world * self.slice_size, batches - 1
            start, end = slice_for(position, self.total, size, rank, count)
            yield (start, end) if end > start else (position, position + 1)
            position += count

    def _begin(self) -> Iterator[list[int]]:
        """Return the indices of each batch from here on, all for the present world size and epoch."""
        self.last_used = next(_iterations)
        if self.processed_num >= self.total:
            warnings.warn(f"ElasticSampler: epoch {self.epoch} is consumed; call set_epoch for the next one",
                          stacklevel=3)
        order, seeded, epoch = self.order(), self._seeded, self.epoch
        batches = (order[start:end] for start, end in list(self._slices()))
        return self._after_reseed(batches if seeded is None else ([seeded.index(i, epoch) for i in b] for b in batches))

    def _after_reseed(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        """Restart random numbers, then yield `batches`: a DataLoader that begins draws a seed of its own, which would
        shift all later draws of this process."""
        current.runtime().restart_draws()
        for batch in batches:
            self._note_use()
            yield batch

    def __iter__(self) -> Iterator[int]:
        self._check_sample_by_sample("DataLoader(batch_sampler=sampler.batches())")
        return itertools.chain.from_iterable(self._begin())

    def __len__(self) -> int:
        """Return this rank's number of samples in a whole epoch at the present world size.

        It is the same at each batch and after a change: code computes learning rates from it, as in
        `epoch + batch / len(loader)`.
        """
        return sum(end - start for start, end in self._slices_from(0))

    def batches(self) -> Batches:
        """Return this sampler as a batch sampler: one list of indices per step."""
        return Batches(self)


class Batches:
    """Batch sampler over an ElasticSampler."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return self._sampler._begin()

    def __len__(self) -> int:
        return sum(1 for _ in self._sampler._slices_from(0))
