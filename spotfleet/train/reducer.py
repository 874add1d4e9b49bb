"""Gradient reduction over all ranks while backward still runs, in flat buckets whose layout never changes.

    first hook      on_round(): the position is captured, a planned change interrupts here
    each hook       the gradient goes to its place in a bucket; full buckets are launched, strictly in index order
    end of backward the rest is launched, the tail last; wait; check the tail; on_reduced(change, save)

The tail is the end of the last bucket, or a bucket of its own if that is not float32. It holds flags for a change and
for a checkpoint, a 1 per rank (to check the world size), a hash of the position (positions.py), and one use count per
parameter. A parameter that no rank used gets `grad = None`, as in training without this reducer. The layout depends on
the parameters alone, so ranks that joined late reduce in the same order and the sums are the same, bit for bit.

With a `wire` type, float32 and float64 travel as float16 or bfloat16. Each rank's share, already divided, is rounded to
11 or 8 bits, and so is each partial sum. In float16 values above 65,504 become infinite, as GradScaler expects. The
tail stays exact, and nothing is rounded where a rank is alone.

Mean: each rank's gradient is divided once by (samples of all ranks / samples of this rank), which is exactly the
world size when all ranks have the same number. The samples of all backward passes of a step count together.

Limits: a backward pass inside another (torch.utils.checkpoint with use_reentrant=True) ends the round too early, as
in DDP; use use_reentrant=False. Sparse gradients are made dense.

Threads: the hooks run on autograd's threads while the caller waits in backward(). No two threads are in here at once,
so there are no locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from spotfleet.train import positions
from spotfleet.train.comm.group import Group

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
FLAG, WORLD, SAVE, POSITION = 0, 1, 2, 3  # places in the tail
USES = POSITION + positions.WIDTH  # use counts follow


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


class Reducer:
    """Gradient reduction for the parameters of one optimizer."""

    def __init__(self, params: Sequence[Parameter], passes: int, average: bool, group: Callable[[], Group | None],
                 on_round: Callable[[Reducer], None], on_reduced: Callable[[Reducer, bool, bool], None],
                 weight: Callable[[], tuple[float, float] | None], wire: torch.dtype | None = None) -> None:
        self.params = [p for p in params if p.requires_grad]
        self.round_open = False
        self.reduced = False  # a round has ended since the last step
        self.launched = False  # a bucket of this round has been launched
        self.passes_done = 0
        self.scalars: Callable[[], dict[str, int]] = dict  # equal on all ranks, else the reduction fails
        self._passes, self._average, self._wire = passes, average, wire
        self._group, self._on_round, self._on_reduced, self._weight = group, on_round, on_reduced, weight
        self._works: list[Any] = []
        self._in_pass, self._launching, self._hold_depth = False, False, 0
        self._samples = [0.0, 0.0]  # in this round, on this rank and on all; 0: plain mean
        self._lay_out()
        self._begin()
        self._hooks = [p.register_post_accumulate_grad_hook(partial(self._ready, i))
                       for i, p in enumerate(self.params)]

    def _lay_out(self) -> None:
        layout = bucket_layout(self.params)
        tail = USES + len(self.params)
        last = self.params[layout[-1][0]] if layout else torch.empty(0)
        own_tail = not layout or last.dtype != torch.float32 or self._narrows(last.dtype)
        self._bucket_of = [0] * len(self.params)
        self._views: list[torch.Tensor] = [torch.empty(0)] * len(self.params)
        self._flats: list[torch.Tensor] = []
        self._sizes = [len(b) for b in layout]
        for number, bucket in enumerate(layout):
            like = self.params[bucket[0]]
            body = sum(self.params[i].numel() for i in bucket)
            extra = tail if number == len(layout) - 1 and not own_tail else 0
            flat = torch.zeros(body + extra, dtype=like.dtype, device=like.device)
            offset = 0
            for i in bucket:
                p = self.params[i]
                self._views[i] = flat[offset:offset + p.numel()].view(p.shape)
                self._bucket_of[i] = number
                offset += p.numel()
            self._flats.append(flat)
        self._wires = [torch.empty_like(f, dtype=self._wire) if self._narrows(f.dtype) else f for f in self._flats]
        if own_tail:
            self._flats.append(torch.zeros(tail, device=last.device))
            self._wires.append(self._flats[-1])
            self._sizes.append(0)
        self._tail = self._flats[-1][-tail:]

    def _narrows(self, dtype: torch.dtype) -> bool:
        return self._wire is not None and dtype in (torch.float32, torch.float64)

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let backward passes inside this context accumulate without reducing."""
        self._hold_depth += 1
        try:
            yield
        finally:
            self._hold_depth -= 1

    def reset(self) -> None:
        """Drop the round and all gradients. Operations still in flight, if any, write only to memory that is not used
        any more."""
        group, works = self._group(), self._works
        self._works = []
        if works and group is not None:
            group.drain(works)
        if group is not None and group.abandoned:
            self._lay_out()
        self._begin()
        self.round_open = self.reduced = self.launched = self._in_pass = False
        self.passes_done = 0
        self._samples = [0.0, 0.0]
        for p in self.params:
            p.grad = None

    def finish_round(self) -> None:
        """Reduce the accumulated gradients unless that is done already; `step()` calls it for rounds cut short."""
        if self.reduced:
            return
        self._open()
        self._launching = True
        self._begin()
        self._reduce()

    def _begin(self) -> None:
        group, (own, total) = self._group(), self._samples
        self._left, self._next = list(self._sizes), 0
        self._placed = [False] * len(self.params)  # in its place and divided
        self._divisor = 0.0 if total and not own else 1.0  # 0: this rank's gradient has weight 0
        if self._divisor and self._average and group is not None:
            self._divisor = total / own if total else float(group.size)

    def _open(self) -> None:
        if not self.round_open:
            self._on_round(self)
            self.round_open, self.reduced, self.launched = True, False, False
            self.passes_done, self._samples = 0, [0.0, 0.0]

    def _ready(self, index: int, p: Parameter) -> None:
        if not self._in_pass:
            self._begin_pass()
        group = self._group()
        if group is None or group.size == 1:  # no peers, perhaps not yet
            return
        self._place_gradient(index, p)
        if self._launching:
            self._left[self._bucket_of[index]] -= 1
            while self._next < len(self._flats) - 1 and self._left[self._next] == 0:
                self._launch()

    def _place_gradient(self, index: int, p: Parameter) -> None:
        """Move a gradient to its place; in the pass that is reduced also divide it, in the same sweep of memory."""
        view, grad = self._views[index], p.grad
        fresh = None if grad is view else (grad.to_dense() if grad.is_sparse else grad).detach()
        if not self._launching:
            if fresh is not None:
                view.copy_(fresh)
        elif self._divisor == 0:
            view.zero_()
        elif self._divisor != 1 or fresh is not None:
            torch.div(view if fresh is None else fresh, self._divisor, out=view)
        if fresh is not None:
            p.grad = view
        self._placed[index] = self._launching

    def _begin_pass(self) -> None:
        self._open()
        self._add_samples()
        self._launching = not self._hold_depth and self.passes_done >= self._passes - 1
        self._begin()
        self._in_pass = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _add_samples(self) -> None:
        weight = self._weight()
        if weight is not None:
            self._samples[0] += weight[0]
            self._samples[1] += weight[1]

    def _end_pass(self) -> None:
        self._in_pass = False
        if self._launching:
            self._reduce()
        elif not self._hold_depth:
            self.passes_done += 1

    def _launch(self) -> None:
        group = self._group()
        assert group is not None
        flat, wire = self._flats[self._next], self._wires[self._next]
        if wire is not flat:
            wire.copy_(flat)
        self._works.append(group.launch(wire))
        self._next += 1
        self.launched = True

    def _reduce(self) -> None:
        group = self._group()
        if group is None:
            self._close(False, False)
            return
        if group.size == 1:
            self._close(group.change_waits, group.save_waits)
            return
        used = self._fill_gaps()
        while self._next < len(self._flats) - 1:
            self._launch()
        self._write_tail(group, used)
        self._launch()
        works, self._works = self._works, []
        group.finish(works)
        for flat, wire in zip(self._flats, self._wires, strict=True):
            if wire is not flat:
                flat.copy_(wire)
        self._close(*self._read_tail(group))

    def _close(self, change: bool, save: bool) -> None:
        self.round_open, self.reduced, self.passes_done = False, True, 0
        self._on_reduced(self, change, save)

    def _fill_gaps(self) -> list[bool]:
        """Write zeros for the gradients that this rank does not have; return which ones it has."""
        used = []
        for i, p in enumerate(self.params):
            if p.grad is None:
                self._views[i].zero_()
            elif not self._placed[i]:
                self._place_gradient(i, p)
            used.append(p.grad is not None)
        return used

    def _write_tail(self, group: Group, used: list[bool]) -> None:
        self._tail[USES:].fill_(1.0)
        if not all(used):
            self._tail[USES:].mul_(torch.tensor(used, device=self._tail.device))
        self._tail[FLAG] = float(group.change_waits)
        self._tail[WORLD] = 1.0
        self._tail[SAVE] = float(group.save_waits)
        positions.write(self._tail[POSITION:USES], self.scalars())

    def _read_tail(self, group: Group) -> tuple[bool, bool]:
        tail = self._tail.tolist()
        if tail[WORLD] != group.size:
            raise group.refuse(f"{tail[WORLD]:g} ranks took part in a reduction of {group.size}")
        if positions.differ(tail[POSITION:USES], group.size):
            raise positions.error(group, self.scalars())
        for p, view, uses in zip(self.params, self._views, tail[USES:], strict=True):
            if uses == 0:
                p.grad = None
            elif p.grad is None:
                p.grad = view
        return tail[FLAG] > 0, tail[SAVE] > 0

