"""A generation's group in the form of torch's own process group, for code that calls `torch.distributed`.

It has no connections of its own: every operation goes through `Group`, so it is counted, a lost peer ends it with
CommBroken, and an abort unblocks it. What the backend may not know (a type of numbers, memory that is not contiguous)
is converted first: an error of gloo's or NCCL's own would count as a broken generation.

Threads: as in group.py; operations are begun by the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spotfleet.errors import UsageError
from spotfleet.train.comm.group import Group

NAME = "spotfleet"  # the backend's, in torch
_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
_WIDER = {torch.int16: torch.int32}


class PendingWork(dist.Work):
    """Operations in progress, and what follows them."""

    def __init__(self, group: Group, works: list[Any], after: Callable[[], None]) -> None:
        super().__init__()
        self._group, self._works, self._after = group, works, after
        self._ended = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._ended:
            if self._works:
                self._group.finish(self._works)
            self._after()
            self._ended = True
        return True

    def is_completed(self) -> bool:
        return self._ended or all(self._group.is_done(work) for work in self._works)

    def is_success(self) -> bool:
        return self._ended

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


class TorchGroup(dist.ProcessGroup):
    """torch's process group over one generation."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        self._name = NAME

    def getBackendName(self) -> str:
        return self.group.backend

    # torch keeps names with its own backends, and there is none here.

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return NAME

    def _set_group_desc(self, text: str) -> None:
        pass

    def shutdown(self) -> None:
        """Nothing to free: the group belongs to the runtime."""

    # Reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> PendingWork:
        tensors = _listed(tensors)
        return self._together([self._reduce(t, opts, t) for t in tensors])

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> PendingWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> PendingWork:
        into = tensors[0] if opts.rootRank == self.group.rank else None
        return self._reduce(tensors[0], opts, into)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        return self._together([self._reduce(torch.stack(list(parts)), opts, output, self.group.rank)
                               for output, parts in zip(outputs, inputs, strict=True)])

    def _reduce_scatter_base(self, output: torch.Tensor, data: torch.Tensor, opts: Any = None) -> PendingWork:
        return self._reduce(data.reshape(self.group.size, *output.shape), opts, output, self.group.rank)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        return self._together([self._reduce_scatter_base(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def barrier(self, opts: Any = None) -> PendingWork:
        return self.allreduce([torch.zeros(1)])

    def _reduce(self, tensor: torch.Tensor, opts: Any, into: torch.Tensor | None, part: int = -1) -> PendingWork:
        """Reduce a copy of `tensor`, and write it, or its part of that number, to `into`."""
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        kind, op, mean = _kind(self.group, tensor.dtype, op)
        held = tensor.detach().to(kind, copy=True).contiguous()

        def after() -> None:
            if into is not None:
                found = held if part < 0 else held[part]
                with torch.no_grad():
                    into.copy_(found / self.group.size if mean else found)

        works = [self.group.launch(held, op)] if self.group.size > 1 and held.numel() else []
        return PendingWork(self.group, works, after)

    # Copies

    def broadcast(self, tensors: Any, opts: Any) -> PendingWork:
        held = [_bytes(t) for t in _listed(tensors)]
        root, options = opts.rootRank, dist.BroadcastOptions()
        options.rootRank = root
        works = self._begin(lambda pg, data: pg.broadcast([data], options), [[data] for data in held])

        def after() -> None:
            if self.group.rank != root:
                for tensor, data in zip(_listed(tensors), held, strict=True):
                    _write(tensor, data)

        return PendingWork(self.group, works, after)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        held = [_bytes(t) for t in inputs]
        found = [[torch.empty_like(data) for _ in range(self.group.size)] for data in held]
        works = self._begin(lambda pg, data, *into: pg.allgather([list(into)], [data]),
                            [[data, *into] for data, into in zip(held, found, strict=True)])

        def after() -> None:
            for targets, parts, own in zip(outputs, found, held, strict=True):
                for tensor, part in zip(targets, parts if works else [own], strict=True):
                    _write(tensor, part)

        return PendingWork(self.group, works, after)

    def _allgather_base(self, output: torch.Tensor, data: torch.Tensor, opts: Any = None) -> PendingWork:
        parts = [torch.empty_like(data) for _ in range(self.group.size)]
        return self._then(self.allgather([parts], [data]), lambda: _join(output, parts))

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        return self._together([self._allgather_base(o, i) for o, i in zip(outputs, inputs, strict=True)])

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> PendingWork:
        parts = [torch.empty_like(inputs[0]) for _ in range(self.group.size)]

        def after() -> None:
            if opts.rootRank == self.group.rank:
                for tensor, part in zip(outputs[0], parts, strict=True):
                    tensor.copy_(part)

        return self._then(self.allgather([parts], inputs), after)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> PendingWork:
        own = outputs[0]
        whole = (torch.stack(list(inputs[0])) if opts.rootRank == self.group.rank
                 else own.new_empty(self.group.size, *own.shape))
        return self._then(self.broadcast([whole], opts), lambda: own.copy_(whole[self.group.rank]))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Every rank receives all data and keeps its own part: right, and not fast."""
        own = [_bytes(t) for t in inputs]
        sizes = self.group.allgather(torch.tensor([data.numel() for data in own]))
        flat = own[0].new_zeros(max(1, *(int(row.sum()) for row in sizes)))
        torch.cat(own, out=flat[:sum(data.numel() for data in own)])
        rows = self.group.allgather(flat)
        for tensor, row, counts in zip(outputs, rows, sizes, strict=True):
            start = int(counts[:self.group.rank].sum())
            _write(tensor, row[start:start + int(counts[self.group.rank])])
        return PendingWork(self.group, [], lambda: None)

    def alltoall_base(self, output: torch.Tensor, data: torch.Tensor, output_splits: list[int],
                      input_splits: list[int], opts: Any = None) -> PendingWork:
        size = self.group.size
        into = output.split(output_splits or [output.shape[0] // size] * size)
        return self.alltoall(list(into), list(data.split(input_splits or [data.shape[0] // size] * size)))

    def send(self, tensors: Any, to: int, tag: int = 0) -> PendingWork:
        return PendingWork(self.group, [self.group.send(_bytes(tensors[0]), to, tag)], lambda: None)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> PendingWork:
        held = torch.empty_like(_bytes(tensors[0]))
        works = [self.group.receive(held, source, tag)]
        return PendingWork(self.group, works, lambda: _write(tensors[0], held))

    # Names since torch 2.13

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # Helpers

    def _begin(self, begin: Callable[..., Any], calls: Sequence[list[torch.Tensor]]) -> list[Any]:
        """Begin one operation for each list of tensors in `calls`, unless this rank is alone."""
        return [self.group._start(begin, *call) for call in calls if call[0].numel()] if self.group.size > 1 else []

    def _together(self, works: list[PendingWork]) -> PendingWork:
        return PendingWork(self.group, [], lambda: [work.wait() for work in works] and None)

    def _then(self, work: PendingWork, after: Callable[[], Any]) -> PendingWork:
        def both() -> None:
            work.wait()
            with torch.no_grad():
                after()

        return PendingWork(self.group, [], both)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _kind(group: Group, dtype: torch.dtype, op: Any) -> tuple[torch.dtype, Any, bool]:
    """Return the type in which `dtype` is reduced, the operation for it, and whether the mean is wanted."""
    mean = op == dist.ReduceOp.AVG
    op = dist.ReduceOp.SUM if mean else op
    if dtype == torch.bool:
        logical = {dist.ReduceOp.SUM: dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT: dist.ReduceOp.MIN}
        return torch.uint8, next((to for of, to in logical.items() if of == op), op), False
    kind = _WIDER.get(dtype, dtype)
    bitwise = any(op == o for o in _BITWISE)
    if not (kind in group.reduces or kind.is_complex) or (bitwise and (kind.is_floating_point or kind.is_complex)):
        raise UsageError(f"torch.distributed: {group.backend} does not reduce {dtype} with {op}",
                         hint="convert it first, to torch.float32 for instance")
    return kind, op, mean


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes: every type travels as such."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@torch.no_grad()
def _write(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.copy_(data.clone().view(tensor.dtype).reshape(tensor.shape))


def _join(output: torch.Tensor, parts: list[torch.Tensor]) -> None:
    output.copy_(torch.stack(parts).reshape(output.shape))
