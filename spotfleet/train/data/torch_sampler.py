"""torch's DistributedSampler, made from this worker's rank and world size: kept true when they change.

Such a sampler keeps the numbers of its creation. Made before `elastic.run`, it would leave out samples after each
change, and a worker that joins would take another number of batches than the others. So a sampler that was made with
the numbers of this worker takes the present ones whenever it is iterated or measured, and warns once. Any other, such
as one of a single replica for an evaluation, is left alone.

`DistributedSampler(data)` asks torch's default group for the numbers. A worker that joins has none before
`elastic.run`; there it gets those of the place that it will take, as from `hvd.rank()`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from spotfleet.train import current

OWN = "_spotfleet_own"  # attribute of a sampler that was made with this worker's numbers


def watch(read: Callable[[str], int]) -> None:
    """Follow samplers that are made from now on. A repeated call does nothing. `read` is that of `process.py`."""
    if not hasattr(DistributedSampler, OWN):
        setattr(DistributedSampler, OWN, False)
        DistributedSampler.__init__ = _noting(DistributedSampler.__init__, read)  # type: ignore[method-assign]
        for name in ("__iter__", "__len__"):
            setattr(DistributedSampler, name, _refitting(getattr(DistributedSampler, name)))


def _noting(made: Callable[..., None], read: Callable[[str], int]) -> Callable[..., None]:
    @functools.wraps(made)
    def __init__(self: Any, dataset: Any, num_replicas: int | None = None, rank: int | None = None, *args: Any,
                 **options: Any) -> None:
        if not dist.is_initialized():
            num_replicas = read("size") if num_replicas is None else num_replicas
            rank = read("rank") if rank is None else rank
        made(self, dataset, num_replicas, rank, *args, **options)
        place = current.runtime().place
        setattr(self, OWN, (self.num_replicas, self.rank) == (place.size, place.rank))

    __init__.unwatched = made  # type: ignore[attr-defined]
    return __init__


def _refitting(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(method)
    def refitted(self: Any) -> Any:
        _refit(self)
        return method(self)

    return refitted


def _refit(sampler: Any) -> None:
    place = current.runtime().place
    if not getattr(sampler, OWN) or (sampler.num_replicas, sampler.rank) == (place.size, place.rank):
        return
    warnings.warn(
        f"DistributedSampler: made for rank {sampler.rank} of {sampler.num_replicas}, used as rank {place.rank} of "
        f"{place.size} from now on. In an epoch in which the number of workers changes it repeats or leaves out "
        "samples; hvd.elastic.ElasticSampler does not", stacklevel=3)
    epoch = sampler.epoch
    init: Any = DistributedSampler.__init__
    init.unwatched(sampler, sampler.dataset, place.size, place.rank, sampler.shuffle, sampler.seed, sampler.drop_last)
    sampler.epoch = epoch
