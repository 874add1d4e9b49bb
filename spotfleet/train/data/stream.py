"""ElasticIterable: the counterpart of ElasticSampler for a stream in an order fixed by (seed, epoch).

The position is the number of samples consumed of the stream. Each rank, and each loader process of a rank, reads the
stream from there, keeps its part of each global batch and skips the rest. So every process finds the end, which need
not be known beforehand. Keep the records cheap (lines, paths, keys) and do the rest in `transform`, which runs for the
rank's own samples alone.

Loader processes hold copies of this object. A new one is pickled with the position. Persistent ones read it from shared
memory, which the main process keeps up to date. When an iteration begins, process 0 notes the position there: no batch
of it has been delivered yet. The other processes may begin after the first batches were consumed, so they read that
note and wait for it for at most NOTE_LIMIT_S. Process k modulo their number makes batch k, as DataLoader expects.

Threads: the main thread, and the main threads of loader processes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from spotfleet.errors import UsageError
from spotfleet.train import current
from spotfleet.train.data.sampler import Elastic, _iterations, slice_for
from spotfleet.train.data.seeded import seeded_draws

NOTE_LIMIT_S = 60.0
NOW, NOTED = 0, 7  # in the shared memory: the position now, and at the beginning of the newest iteration
LOADER, ITERATION = 14, 15  # loader and number of that iteration
BEGUN, END_EPOCH, END = 16, 17, 18  # iterations begun; epoch of the newest end reached (-1: none yet), and that end


class StreamPosition(NamedTuple):
    """Position from which a stream is read, and the rank that reads it."""

    epoch: int
    position: int
    size: int
    rank: int
    global_batch: int
    repeat_world: int  # world size of the first batches, if they are computed again
    repeat_batches: int  # their number


class ElasticIterable(Elastic, IterableDataset):
    """Stream for DataLoader(it, batch_size=batch_size), or DataLoader(it.batches(), batch_size=None).

    The loader may have any `num_workers`.

    `source` is an iterable that yields the same samples in the same order each time, or a function of the epoch that
    returns one. If it has `set_epoch(epoch)`, that is called before it is read. If it has `iter_from(n)`, which
    iterates without the first n samples, a resumed epoch does not read consumed samples again. `transform(sample)`
    draws its random numbers from (seed, epoch, number of the sample). Put the stream into the state; `record_batch` and
    `set_epoch` are as in ElasticSampler.
    """

    def __init__(self, source: Iterable[Any] | Callable[[int], Iterable[Any]], batch_size: int, *,
                 global_batch: int | None = None, transform: Callable[[Any], Any] | None = None, seed: int = 0) -> None:
        Elastic.__init__(self, "ElasticIterable", batch_size, global_batch)
        if not callable(source) and not hasattr(source, "__iter__"):
            raise UsageError(f"ElasticIterable: {type(source).__name__} is no iterable",
                             hint="give an iterable, or a function of the epoch that returns one")
        if isinstance(source, Iterator):
            raise UsageError("ElasticIterable: the source can be read only once",
                             hint="give an object whose __iter__ begins anew, or a function of the epoch")
        self.seed, self._source, self._transform = seed, source, transform
        self._shared = torch.zeros(19, dtype=torch.int64).share_memory_()
        self._shared[END_EPOCH] = -1
        self._begun = 0  # value of BEGUN at the last check
        self._iterations = 0  # begun by this copy
        self._pickled_at: StreamPosition | None = None  # position when this copy was pickled for a loader process

    # In the main process

    @property
    def known_total(self) -> int | None:
        if int(self._shared[END_EPOCH]) == self.epoch:
            return int(self._shared[END])
        try:
            return len(self._source)  # type: ignore[arg-type]
        except TypeError:
            return None

    @property
    def is_weighted(self) -> bool:
        begun = int(self._shared[BEGUN])
        if begun != self._begun:
            self._begun, self.last_used = begun, next(_iterations)
        return super().is_weighted

    def keep_global_batch(self) -> None:
        super().keep_global_batch()
        self._publish()

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._publish()

    def record_batch(self, batch_idx: int = 0, batch_size: int | None = None) -> None:
        super().record_batch(batch_idx, batch_size)
        self._publish()

    def repeat_step(self, world: int, rounds: int = 1) -> None:
        super().repeat_step(world, rounds)
        self._publish()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._publish()

    def _current_position(self) -> StreamPosition:
        place = current.runtime().place
        return StreamPosition(self.epoch, self.processed_num, place.size, place.rank, self.global_batch,
                              self._repeat_world, self._repeat_batches)

    def _publish(self) -> None:
        self._shared[NOW:NOW + 7] = torch.tensor(self._current_position())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pickled_at": self._pickled_at or self._current_position()}

    # In the process that reads it

    def __iter__(self) -> Iterator[Any]:
        self._check_sample_by_sample("DataLoader(stream.batches(), batch_size=None)")
        return itertools.chain.from_iterable(self._begin())

    def batches(self, collate_fn: Callable[[list[Any]], Any] = default_collate) -> StreamBatches:
        """Return the same stream batch by batch."""
        return StreamBatches(self, collate_fn)

    def _begin(self) -> Iterator[list[Any]]:
        """Return this rank's batches from here on; in a loader process only its own."""
        info = get_worker_info()
        if info is not None:
            self._iterations += 1
        if self._iterations > 1:
            assert info is not None
            origin = self._noted_position(info.seed - info.id, info.id)
        else:
            origin = self._pickled_at or self._current_position()
        if info is None or info.id == 0:
            self._shared[BEGUN] += 1
        return self._read(origin, *((0, 1) if info is None else (info.id, info.num_workers)))

    def _noted_position(self, loader: int, worker: int) -> StreamPosition:
        """Return the position at which this iteration of a persistent loader begins."""
        shared, iteration = self._shared, (loader, self._iterations)
        if worker == 0:
            shared[NOTED:NOTED + 7] = shared[NOW:NOW + 7].clone()
            shared[LOADER:ITERATION + 1] = torch.tensor(iteration)
        deadline = time.monotonic() + NOTE_LIMIT_S
        while int(shared[LOADER]) != loader or int(shared[ITERATION]) < self._iterations:
            if time.monotonic() > deadline:
                raise RuntimeError(f"ElasticIterable: loader process 0 has not begun within {NOTE_LIMIT_S:.0f} s")
            time.sleep(0.001)
        return StreamPosition(*shared[NOTED:NOTED + 7].tolist())

    def _read(self, origin: StreamPosition, worker: int, workers: int) -> Iterator[list[Any]]:
        stream, position = self._open(origin), origin.position
        for number in itertools.count():
            held, count, is_own = [], 0, number % workers == worker
            size, rank, wanted = origin.size, origin.rank, origin.global_batch
            if number < origin.repeat_batches:
                size = origin.repeat_world
                rank, wanted = rank % size, size * self.slice_size
            for sample in itertools.islice(stream, wanted):
                count += 1
                if is_own:
                    held.append(sample)
            if count < wanted:
                self._shared[END] = position + count
                self._shared[END_EPOCH] = origin.epoch
            if is_own and count:
                start, end = slice_for(position, position + count, size, rank, wanted)
                start, end = (start, end) if end > start else (position, position + 1)
                yield [self._transformed(origin.epoch, i, held[i - position]) for i in range(start, end)]
            if count < wanted:
                return
            position += count

    def _open(self, origin: StreamPosition) -> Iterator[Any]:
        source = self._source(origin.epoch) if callable(self._source) else self._source
        if hasattr(source, "set_epoch"):
            source.set_epoch(origin.epoch)
        if hasattr(source, "iter_from"):
            return iter(source.iter_from(origin.position))
        return itertools.islice(source, origin.position, None)

    def _transformed(self, epoch: int, index: int, sample: Any) -> Any:
        if self._transform is None:
            return sample
        with seeded_draws(self.seed, epoch, index):
            return self._transform(sample)


class StreamBatches(IterableDataset):
    """Iterable of the batches of an ElasticIterable."""

    def __init__(self, stream: ElasticIterable, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._stream, self._collate = stream, collate_fn

    def __iter__(self) -> Iterator[Any]:
        return map(self._collate, self._stream._begin())
