"""Copies of tensors in warm memory, made at the speed of memcpy.

A `Buffer` is one allocation, touched when it is made, in which each tensor has a storage of its own. Filling it again
costs no page fault and no allocation, and no tensor in it is a view of a live one. On CUDA the memory is pinned and
the copy runs on a stream of its own. `await_copies`, called before an optimizer steps or a forward pass changes
statistics, makes the computing stream wait for the copies in flight; the host never waits.

`BufferPool` keeps the copies of a job that copies at every commit: two, so that the last one stays whole while the
next is made. A third exists only while a checkpoint is written from one of them, and is freed afterwards.

Memory besides the state: in copy mode twice its bytes, three times while a checkpoint is written. In step mode the
rank's share of a checkpoint, 1/world of the state, from the first checkpoint on.

Threads: the main thread fills; `release` and `Buffer.wait` may be called by a thread that writes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

ALIGN = 64
COMMITS = 2

_in_flight: list[tuple[Any, Any]] = []  # (device, event) of copies that the computing streams do not wait for yet
_streams: dict[Any, Any] = {}


class Buffer:
    """Memory for one copy of tensors like `like`."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        sizes = [-(-t.numel() * t.element_size() // ALIGN) * ALIGN for t in like]
        self._pinned = any(t.is_cuda for t in like)
        self._flat = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._pinned).zero_()
        self._kinds = _kinds(like)
        self._event: Any = None
        self.holds = 0  # number of users of its contents; see BufferPool
        storage, at = self._flat.untyped_storage(), 0
        self.tensors: list[torch.Tensor] = []
        for tensor, size in zip(like, sizes, strict=True):
            exact = storage[at:at + tensor.numel() * tensor.element_size()]
            shape, stride = tuple(tensor.shape), _dense_stride(tensor)
            self.tensors.append(torch.empty(0, dtype=tensor.dtype).set_(exact, 0, shape, stride))
            at += size

    @property
    def bytes(self) -> int:
        return self._flat.numel()

    def fits(self, like: Sequence[torch.Tensor]) -> bool:
        return self._kinds == _kinds(like)

    @torch.no_grad()
    def fill(self, source: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy `source` here. On CUDA the copy may still be in flight: see `await_copies` and `wait`."""
        if not source:
            return self.tensors
        device = next((t.device for t in source if t.is_cuda), None)
        if device is None:
            torch._foreach_copy_(self.tensors, list(source))
            return self.tensors
        stream = _streams.get(device)
        if stream is None:
            stream = _streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            torch._foreach_copy_(self.tensors, list(source), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)
        _in_flight.append((device, self._event))
        return self.tensors

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._event is not None:
            self._event.synchronize()


def await_copies() -> None:
    """Make kernels launched from now on wait for the copies in flight, whose sources they may overwrite."""
    while _in_flight:
        device, event = _in_flight.pop()
        torch.cuda.current_stream(device).wait_event(event)


class BufferPool:
    """Buffers used in turn; `take` never returns one that is held."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        return sum(b.bytes for b in self._buffers)

    def take(self, like: Sequence[torch.Tensor]) -> Buffer:
        """Return a buffer for `like`, held once, and free the memory of surplus buffers."""
        with self._lock:
            free = [b for b in self._buffers if not b.holds and b.fits(like)]
            chosen = free[0] if free else None
            kept = [b for b in self._buffers if b.holds or b is chosen]
            spare = [b for b in free if b is not chosen]
            self._buffers = kept + spare[:max(0, COMMITS - len(kept))]
            if chosen is not None:
                chosen.holds = 1
                return chosen
        made = Buffer(like)
        made.holds = 1
        with self._lock:
            self._buffers.append(made)
        return made

    def hold(self, buffer: Buffer) -> None:
        with self._lock:
            buffer.holds += 1

    def release(self, buffer: Buffer) -> None:
        with self._lock:
            buffer.holds -= 1


def _kinds(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(t.dtype, t.shape, t.is_cuda, _dense_stride(t)) for t in tensors]


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return strides of a copy without gaps: channels_last where the tensor has that order, else contiguous."""
    if not tensor.is_contiguous() and tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.stride()
    stride, step = [], 1
    for size in reversed(tensor.shape):
        stride.append(step)
        step *= max(1, size)
    return tuple(reversed(stride))
