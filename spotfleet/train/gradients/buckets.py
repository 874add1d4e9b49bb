"""Flat memory in which gradients travel: a few buckets, whose layout depends on the parameters alone.

Parameters fill buckets from the last to the first, one type and device in each. The tail is the end of the last bucket,
or a bucket of its own if that is not float32.

A gradient is a view of its bucket, with the strides of its parameter, so it takes no second memory. A script may keep
such a view over `zero_grad()`; then its bucket gets new memory before anything is written there (`free`, `free_all`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount

import torch
from torch.nn import Parameter

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20

_storage_users: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda cdata: 0)
_tensor_users: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda tensor: 0)


def bucket_layout(params: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return indices into `params` per bucket: from the last parameter to the first, one dtype and device in each."""
    buckets: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}  # -> bucket, bytes in it
    for index in reversed(range(len(params))):
        p = params[index]
        kind, size = (p.dtype, p.device), p.numel() * p.element_size()
        bucket, held = filling.get(kind, (-1, 0))
        if bucket < 0 or held >= (FIRST_BUCKET_BYTES if bucket == 0 else BUCKET_BYTES):
            buckets.append([])
            bucket, held = len(buckets) - 1, 0
        buckets[bucket].append(index)
        filling[kind] = (bucket, held + size)
    return buckets


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a stretch of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


class Buckets:
    """Buckets for the gradients of `params`, with a tail of `tail` numbers. float types travel as `wire`, if given."""

    @torch.enable_grad()
    def __init__(self, params: Sequence[Parameter], tail: int, wire: torch.dtype | None) -> None:
        self._params, self._wire = params, wire
        self.members = bucket_layout(params)
        last = params[self.members[-1][0]] if self.members else torch.empty(0)
        own_tail = not self.members or last.dtype != torch.float32 or self._narrows(last.dtype)
        self.bucket_of = [0] * len(params)
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(params)
        self.bodies: list[int] = []  # elements of each bucket without the tail
        self.flats: list[torch.Tensor] = []
        for number, bucket in enumerate(self.members):
            like = params[bucket[0]]
            self.bodies.append(sum(params[i].numel() for i in bucket))
            extra = tail if number == len(self.members) - 1 and not own_tail else 0
            self.flats.append(torch.zeros(self.bodies[-1] + extra, dtype=like.dtype, device=like.device))
            for i in bucket:
                self.bucket_of[i] = number
            self._set_views(number)
        self.wires = [torch.empty_like(f, dtype=wire) if self._narrows(f.dtype) else f for f in self.flats]
        if own_tail:
            self.flats.append(torch.zeros(tail, device=last.device))
            self.wires.append(self.flats[-1])
            self.members.append([])
            self.bodies.append(0)
        self._tail_size = tail
        self._storages = [f.untyped_storage() for f in self.flats]
        self.tail = self.flats[-1][-tail:]
        self._users = [self._users_of(k) for k in range(len(self.flats))]
        self._unheld = self._references(0) if params else (0, 0)

    def _narrows(self, dtype: torch.dtype) -> bool:
        return self._wire is not None and dtype in (torch.float32, torch.float64)

    def _set_views(self, number: int) -> None:
        flat, offset = self.flats[number], 0
        for i in self.members[number]:
            p = self._params[i]
            part = flat[offset:offset + p.numel()]
            self.views[i] = part.as_strided(p.shape, p.stride()) if is_dense(p) else part.view(p.shape)
            offset += p.numel()

    def _users_of(self, number: int) -> int:
        return _storage_users(self._storages[number]._cdata)

    def _references(self, index: int) -> tuple[int, int]:
        """Count the references to a view, by Python and by torch; they are more when a script keeps it."""
        view = self.views[index]
        return getrefcount(view), _tensor_users(view)

    def free(self, index: int) -> torch.Tensor:
        """Return the view of a parameter that has another gradient, or none, in memory that no script has kept."""
        view = self.views[index]
        if getrefcount(view) != self._unheld[0] or _tensor_users(view) != self._unheld[1]:  # as in _references
            self._replace(self.bucket_of[index])
        return self.views[index]

    def free_all(self) -> None:
        """Give new memory to every bucket of which a script keeps a part under another name, such as `grad.view(-1)`.

        Nothing of a bucket may be in flight.
        """
        for number, users in enumerate(self._users):
            if self._users_of(number) != users:
                self._replace(number)

    @torch.enable_grad()
    def _replace(self, number: int) -> None:
        """Give a bucket new memory; its present gradients move there."""
        narrow = self.wires[number] is not self.flats[number]
        before = [(i, self.views[i]) for i in self.members[number]]
        last = number == len(self.flats) - 1
        if last:
            self.tail = torch.empty(0)
        self.flats[number] = torch.zeros_like(self.flats[number])
        self._storages[number] = self.flats[number].untyped_storage()
        if not narrow:
            self.wires[number] = self.flats[number]
        self._set_views(number)
        for i, old in before:
            p = self._params[i]
            if p.grad is old:
                self.views[i].detach().copy_(old)
                p.grad = self.views[i]
        if last:
            self.tail = self.flats[number][-self._tail_size:]
        self._users[number] = self._users_of(number)
