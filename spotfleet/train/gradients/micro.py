"""Micro-batches: a worker's share of the global batch in pieces that fit in memory, with one gradient reduction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from spotfleet.errors import UsageError


def micro_batches(optimizer: Any, batch: Any, size: int) -> Iterator[tuple[Any, float]]:
    """Yield (piece, weight) for pieces of `batch` of at most `size` samples.

        for (x, y), weight in hvd.elastic.micro_batches(optimizer, (images, labels), 32):
            (loss_of(model(x), y) * weight).backward()
        optimizer.step()

    `batch` is a tensor, or a tuple, list or dict of values that can be cut along their first dimension. `weight` is
    the piece's fraction of the samples, so gradients of mean losses add up to the gradient of the whole share. They
    are reduced with the last piece only; all pieces count as one of the `backward_passes_per_step`.
    """
    if size < 1:
        raise UsageError(f"micro_batches: size is {size}", hint="give the most samples that fit in one pass")
    count = _count(batch)
    for start in range(0, count, size):
        end = min(start + size, count)
        with optimizer.no_sync() if end < count else nullcontext():
            yield _cut(batch, start, end), (end - start) / count


def _count(batch: Any) -> int:
    if isinstance(batch, dict):
        counts = {_count(v) for v in batch.values()}
    elif isinstance(batch, (tuple, list)) and any(isinstance(v, (torch.Tensor, tuple, list, dict)) for v in batch):
        counts = {_count(v) for v in batch}
    else:
        counts = {len(batch)}
    if len(counts) != 1 or 0 in counts:
        raise UsageError(f"micro_batches: the parts of the batch hold {sorted(counts)} samples",
                         hint="give tensors of the same first dimension, of 1 sample at least")
    return counts.pop()


def _cut(batch: Any, start: int, end: int) -> Any:
    if isinstance(batch, dict):
        return {k: _cut(v, start, end) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)) and any(isinstance(v, (torch.Tensor, tuple, list, dict)) for v in batch):
        cut = [_cut(v, start, end) for v in batch]
        return type(batch)(*cut) if hasattr(batch, "_fields") else type(batch)(cut)
    return batch[start:end]
