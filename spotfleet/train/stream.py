"""ElasticIterable: what ElasticSampler is for map-style datasets, for a stream in an order fixed by (seed, epoch).

The position is the number of samples consumed of the stream. Each rank, and each loader process of a rank, reads the
stream from there, keeps its part of each global batch and passes over the rest: only so does everybody see the
end, of which nobody need know beforehand. Keep the records cheap (lines, paths, keys) and do the rest in `transform`,
which runs for the rank's own samples alone.

Loader processes hold copies of this object. New ones are born with the position; persistent ones are told by shared
memory, in which the main process keeps the position up to date. When an iteration begins, process 0 notes the position
there: no batch of it has been delivered yet. The others, which the first batches may have overtaken, take that note;
they wait at most NOTE_LIMIT_S for it. Batch k is made by process k modulo their number, as DataLoader expects.

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
from spotfleet.train import runtime
from spotfleet.train.sampler import Elastic, _iterations, slice_for
from spotfleet.train.seeded import drawn

NOTE_LIMIT_S = 60.0
NOW, NOTED = 0, 7  # in the shared memory: the position now, and at the beginning of the newest iteration
LOADER, ITERATION = 14, 15  # whose iteration that is
BEGUN, END_EPOCH, END = 16, 17, 18  # iterations that began; the end that was seen, and of which epoch; -1: none yet


class Turn(NamedTuple):
    """From where, and for whom, a stream is read."""

    epoch: int
    position: int
    size: int
    rank: int
    global_batch: int
    again: int  # world size of the first batches, if they are computed once more
    again_batches: int  # so many of them


class ElasticIterable(Elastic, IterableDataset):
    """For DataLoader(it, batch_size=batch_size), or DataLoader(it.batches(), batch_size=None); any number of workers.

    `source` is an iterable that yields the same samples in the same order each time, or a function of the epoch that
    returns one. If it has `set_epoch(epoch)`, that is called before it is read; if it has `iter_from(n)`, which
    iterates without the first n samples, a resumed epoch does not read what is consumed. `transform(sample)` draws its
    random numbers from (seed, epoch, number of the sample). Put it into the state; `record_batch` and `set_epoch` are
    as in ElasticSampler.
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
        self._begun = 0  # as last seen
        self._iterations = 0  # by this copy
        self._born: Turn | None = None  # of a copy that was pickled for a loader process

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
    def weighs(self) -> bool:
        begun = int(self._shared[BEGUN])
        if begun != self._begun:
            self._begun, self.iterated = begun, next(_iterations)
        return super().weighs

    def keep_global_batch(self) -> None:
        super().keep_global_batch()
        self._tell()

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._tell()

    def record_batch(self, batch_idx: int = 0, batch_size: int | None = None) -> None:
        super().record_batch(batch_idx, batch_size)
        self._tell()

    def compute_again(self, world: int) -> None:
        super().compute_again(world)
        self._tell()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._tell()

    def _turn(self) -> Turn:
        place = runtime.current().place
        return Turn(self.epoch, self.processed_num, place.size, place.rank, self.global_batch, self._again,
                    self._again_batches)

    def _tell(self) -> None:
        self._shared[NOW:NOW + 7] = torch.tensor(self._turn())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_born": self._born or self._turn()}

    # Where it is read

    def __iter__(self) -> Iterator[Any]:
        self._check_sample_by_sample("DataLoader(stream.batches(), batch_size=None)")
        return itertools.chain.from_iterable(self._begin())

    def batches(self, collate_fn: Callable[[list[Any]], Any] = default_collate) -> StreamBatches:
        """The same batch by batch."""
        return StreamBatches(self, collate_fn)

    def _begin(self) -> Iterator[list[Any]]:
        """This rank's batches from here on; in a loader process those that are its own."""
        info = get_worker_info()
        if info is not None:
            self._iterations += 1
        if self._iterations > 1:
            assert info is not None
            turn = self._noted(info.seed - info.id, info.id)
        else:
            turn = self._born or self._turn()
        if info is None or info.id == 0:
            self._shared[BEGUN] += 1
        return self._read(turn, *((0, 1) if info is None else (info.id, info.num_workers)))

    def _noted(self, loader: int, worker: int) -> Turn:
        """Where this iteration of a persistent loader begins."""
        shared, mine = self._shared, (loader, self._iterations)
        if worker == 0:
            shared[NOTED:NOTED + 7] = shared[NOW:NOW + 7].clone()
            shared[LOADER:ITERATION + 1] = torch.tensor(mine)
        deadline = time.monotonic() + NOTE_LIMIT_S
        while int(shared[LOADER]) != loader or int(shared[ITERATION]) < self._iterations:
            if time.monotonic() > deadline:
                raise RuntimeError(f"ElasticIterable: loader process 0 has not begun within {NOTE_LIMIT_S:.0f} s")
            time.sleep(0.001)
        return Turn(*shared[NOTED:NOTED + 7].tolist())

    def _read(self, turn: Turn, worker: int, workers: int) -> Iterator[list[Any]]:
        stream, position = self._open(turn), turn.position
        for number in itertools.count():
            held, count, mine = [], 0, number % workers == worker
            size, rank, wanted = turn.size, turn.rank, turn.global_batch
            if number < turn.again_batches:
                size, rank, wanted = turn.again, rank % turn.again, turn.again * self.slice_size
            for sample in itertools.islice(stream, wanted):
                count += 1
                if mine:
                    held.append(sample)
            if count < wanted:
                self._shared[END] = position + count
                self._shared[END_EPOCH] = turn.epoch
            if mine and count:
                start, end = slice_for(position, position + count, size, rank, wanted)
                start, end = (start, end) if end > start else (position, position + 1)
                yield [self._made(turn.epoch, i, held[i - position]) for i in range(start, end)]
            if count < wanted:
                return
            position += count

    def _open(self, turn: Turn) -> Iterator[Any]:
        source = self._source(turn.epoch) if callable(self._source) else self._source
        if hasattr(source, "set_epoch"):
            source.set_epoch(turn.epoch)
        if hasattr(source, "iter_from"):
            return iter(source.iter_from(turn.position))
        return itertools.islice(source, turn.position, None)

    def _made(self, epoch: int, index: int, sample: Any) -> Any:
        if self._transform is None:
            return sample
        with drawn(self.seed, epoch, index):
            return self._transform(sample)


class StreamBatches(IterableDataset):
    """An ElasticIterable seen batch by batch."""

    def __init__(self, stream: ElasticIterable, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._stream, self._collate = stream, collate_fn

    def __iter__(self) -> Iterator[Any]:
        return map(self._collate, self._stream._begin())
