"""Assignment of the pieces of a state to the ranks that write them. Pure: every rank computes the same alone.

Only tensors that are provably the same on all ranks are divided among them: parameters that a DistributedOptimizer
owns, and its state. Everything else (batch-norm statistics, frozen weights, a moving average, parameters of a plain
optimizer) may differ between ranks, and rank 0's counts: a mixture would be no rank's state. Bytes are balanced, rank
0's own included; a tensor on a border is cut along one dimension. No piece is larger than MOST_BYTES unless a single
slice is, so writing or reading one needs little extra memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

SPLIT_BYTES = 64 << 10  # smaller tensors stay whole: each piece costs about 1.3 kB in the file
MOST_BYTES = 16 << 20

Path = tuple[str, ...]


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a state."""

    paths: tuple[Path, ...]  # its keys for a reader, such as ("model", "0.weight"); several: tied weights
    dtype: torch.dtype
    shape: tuple[int, ...]
    shared: bool  # the same on all ranks

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


@dataclass(frozen=True)
class ShardBox:
    """Box of one tensor, which one rank writes."""

    row: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this piece as a view of `tensor`."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset, size)
        return tensor


def plan(rows: Sequence[TensorRow], world: int) -> list[list[ShardBox]]:
    """Return the pieces of each rank, in the order of `rows`; together they cover every tensor once."""
    parts: list[list[ShardBox]] = [[] for _ in range(world)]
    ends = _ends(rows, world)
    at = 0  # shared bytes before this row
    for i, row in enumerate(rows):
        dim, count = _cut_dimension(row, world)
        if not row.shared:
            parts[0] += _boxes(i, row, dim, 0, count)
            continue
        begin = 0
        for rank in range(world):
            cut = count if rank == world - 1 else round((ends[rank] - at) / max(1, row.bytes) * count)
            cut = min(count, max(begin, cut))
            if cut > begin:
                parts[rank] += _boxes(i, row, dim, begin, cut)
            begin = cut
        at += row.bytes
    return parts


def _ends(rows: Sequence[TensorRow], world: int) -> list[float]:
    """Return the end of each rank's run of the shared bytes, so that all write the same amount, as far as possible."""
    own, shared = sum(r.bytes for r in rows if not r.shared), sum(r.bytes for r in rows if r.shared)
    first = float(shared) if world == 1 else min(float(shared), max(0.0, (own + shared) / world - own))
    return [first + (shared - first) * r / max(1, world - 1) for r in range(world)]


def _cut_dimension(row: TensorRow, world: int) -> tuple[int, int]:
    """Return the dimension along which `row` is cut and its number of slices; a small row: one slice, dimension -1."""
    if not row.shape or row.bytes < SPLIT_BYTES:
        return -1, 1
    fine = max(4 * world, 2 * row.bytes // MOST_BYTES)
    dim = 0 if row.shape[0] >= fine else max(range(len(row.shape)), key=lambda d: row.shape[d])
    return dim, row.shape[dim]


def _boxes(i: int, row: TensorRow, dim: int, begin: int, end: int) -> list[ShardBox]:
    """Return slices `begin` to `end` of dimension `dim` as pieces of at most MOST_BYTES where a slice is no larger."""
    if dim < 0:
        return [ShardBox(i, (0,) * len(row.shape), row.shape)]
    step = max(1, MOST_BYTES * row.shape[dim] // row.bytes)
    boxes = []
    for first in range(begin, end, step):
        offsets, sizes = [0] * len(row.shape), list(row.shape)
        offsets[dim], sizes[dim] = first, min(step, end - first)
        boxes.append(ShardBox(i, tuple(offsets), tuple(sizes)))
    return boxes
