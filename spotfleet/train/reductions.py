"""Sums, means and extremes of tensors over all ranks, blocking or by handle, with Horovod's names.

    handle = allreduce_async_(t) -> [poll(handle)] -> synchronize(handle) -> t, or CommBroken

All ranks begin the same operations in the same order; handles may be waited for in any order. Ranks that differ get a
UsageError (comm/order.py): the blocking forms before anything is reduced, handles from `synchronize`. Nothing is
reduced in the caller's memory: an operation cut short by a lost peer may still write to its own copy, never to a tensor
in use.

Types:
- Average of integers is rounded towards minus infinity; that of 8- and 16-bit integers is taken in 32 bits. Their sums
  wrap around, as in Horovod.
- float16 and bfloat16 are added as they are: each partial sum is rounded to their 11 or 8 bits. So are float32 and
  float64 with `compression`.
- bool has Min (all) and Max (any); complex numbers have no Min and Max. Sparse tensors become dense.

Gradients flow through `allreduce` and `grouped_allreduce` as in Horovod: the gradient of an input is the allreduce of
the outputs' gradients with the same op. All ranks run the backward pass, too. Min and Max have none.

A handle belongs to its generation: after a change of membership the function is entered again and begins new ones.

Threads: the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from spotfleet.errors import UsageError
from spotfleet.train import runtime
from spotfleet.train.comm.group import Group
from spotfleet.train.gradients.optimizer import Average, Compression, Compressor, Max, Min, Sum, check_compression

_OPS = {Average: dist.ReduceOp.SUM, Sum: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN, Max: dist.ReduceOp.MAX}
_WIDER = {torch.int16: torch.int32}  # no backend adds 16-bit integers
_WIDER_MEAN = {torch.int8: torch.int32, torch.uint8: torch.int32, torch.int16: torch.int32}


@dataclass
class Handle:
    """Operation in progress; opaque to users."""

    group: Group | None  # None: nothing is awaited
    works: list[Any]
    collect: Callable[[], Any]  # the results, once the works are done
    header: tuple[Any, list[torch.Tensor]] | None = None  # comparison of the ranks' calls, which ends first
    results: list[Any] = field(default_factory=list)  # one, after `synchronize`


def allreduce_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
               op: str | None = None) -> torch.Tensor:
    return _copy_into([tensor], reduce_now([tensor], which_op(average, op), Compression.none))[0]


def allreduce(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
              compression: Any = Compression.none, op: str | None = None) -> torch.Tensor:
    return _differentiable([tensor], which_op(average, op), compression)[0]


def allreduce_async_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
                     op: str | None = None) -> Handle:
    """Begin an allreduce into `tensor`, which holds the result once `synchronize` has returned, and not before."""
    handle = _begin([tensor], which_op(average, op), Compression.none)
    return _then(handle, lambda found: _copy_into([tensor], found)[0])


def allreduce_async(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
                    compression: Any = Compression.none, op: str | None = None) -> Handle:
    return _then(_begin([tensor], which_op(average, op), compression), lambda found: found[0])


def grouped_allreduce(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                      compression: Any = Compression.none, op: str | None = None) -> list[torch.Tensor]:
    """Reduce all tensors, with one operation per type and device."""
    return _differentiable(list(tensors), which_op(average, op), compression)


def grouped_allreduce_(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                       op: str | None = None) -> list[torch.Tensor]:
    held = list(tensors)
    return _copy_into(held, reduce_now(held, which_op(average, op), Compression.none))


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                            compression: Any = Compression.none, op: str | None = None) -> Handle:
    return _begin(list(tensors), which_op(average, op), compression)


def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                             op: str | None = None) -> Handle:
    held = list(tensors)
    return _then(_begin(held, which_op(average, op), Compression.none), lambda found: _copy_into(held, found))


def synchronize(handle: Handle) -> Any:
    """Wait for the result and return it; CommBroken when a peer is lost."""
    _check_handle("synchronize", handle)
    if not handle.results:
        if handle.group is not runtime.current().group:
            raise UsageError("synchronize: this handle is of an earlier generation",
                             hint="begin and finish operations inside the function decorated with @hvd.elastic.run")
        if handle.group is not None and handle.header is not None:
            handle.group.finish([handle.header[0]])
            handle.group.order.end_compare(handle.header)
        if handle.group is not None:
            handle.group.finish(handle.works)
        handle.results = [handle.collect()]
    return handle.results[0]


def poll(handle: Handle) -> bool:
    """Return whether `synchronize` would return (or raise) at once."""
    _check_handle("poll", handle)
    works = handle.works if handle.header is None else [handle.header[0], *handle.works]
    return bool(handle.results) or handle.group is None or all(handle.group.is_done(work) for work in works)


def _check_handle(what: str, handle: Any) -> None:
    if not isinstance(handle, Handle):
        raise UsageError(f"{what}: expected a handle, got {type(handle).__name__}",
                         hint="pass what allreduce_async_ and its like return")


def which_op(average: bool | None, op: str | None) -> str:
    if op is None:
        op = Sum if average is False else Average
    if op not in _OPS:
        raise UsageError(f"allreduce: unknown op {op!r}", hint="use Average, Sum, Min or Max")
    return op


def reduce_now(tensors: list[torch.Tensor], op: str, compression: Any, compare: bool = True) -> list[torch.Tensor]:
    """Reduce copies of `tensors`. `compare`: first compare this call with the other ranks'."""
    handle = _begin(tensors, op, compression, wait=compare, compare=compare)
    if handle.works:
        handle.group.finish(handle.works)
    return handle.collect()


def _begin(tensors: list[torch.Tensor], op: str, compression: Any, wait: bool = False, compare: bool = True) -> Handle:
    """Begin to reduce copies of `tensors`, joined by type and device; the results have the tensors' own types.

    The ranks' calls are compared first (`wait`), or when the handle is synchronized.
    """
    check_tensors("allreduce", tensors)
    check_compression("allreduce", compression)
    kinds = [_kind(t, op, compression) for t in tensors]
    group = runtime.current().require_group("allreduce")
    members: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, (t, kind) in enumerate(zip(tensors, kinds, strict=True)):
        members.setdefault((kind, t.device), []).append(i)
    flats = {key: torch.cat([_dense(tensors[i]).reshape(-1).to(key[0]) for i in which])
             for key, which in members.items()}
    header = None
    if compare and group.size > 1:
        header = group.order.begin_compare(f"allreduce {op} of {describe(tensors)}{_on_wire(compression)}")
        if wait:
            group.finish([header[0]])
            group.order.end_compare(header)
    works = [group.launch(flat, _OPS[op]) for flat in flats.values() if flat.numel()] if group.size > 1 else []

    def collect() -> list[torch.Tensor]:
        found: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
        for key, which in members.items():
            flat = _mean(flats[key], group.size) if op == Average else flats[key]
            parts = flat.split([tensors[i].numel() for i in which])
            for i, part in zip(which, parts, strict=True):
                found[i] = part.view(tensors[i].shape).to(tensors[i].dtype)
        return found

    return Handle(group, works, collect, None if wait else header)


def check_tensors(what: str, tensors: Sequence[Any]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{what}: expected a tensor, got {type(tensor).__name__}",
                             hint="a gradient is None until backward() has made it; other values: broadcast_object, "
                                  "allgather_object")


def describe(tensors: Sequence[torch.Tensor]) -> str:
    """Return types and shapes, which are the same on all ranks in a proper call."""
    texts = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors]
    return texts[0] if len(texts) == 1 else f"{len(texts)} tensors: {', '.join(texts)}"


def _on_wire(compression: Compressor) -> str:
    return f" as {str(compression.dtype).removeprefix('torch.')}" if compression.dtype is not None else ""


def _kind(tensor: torch.Tensor, op: str, compression: Compressor) -> torch.dtype:
    """Return the type in which `tensor` is reduced."""
    dtype = tensor.dtype
    if dtype == torch.bool:
        if op not in (Min, Max):
            raise UsageError("allreduce: bool has no sum and no mean",
                             hint="use op=Min (all) or op=Max (any), or convert: tensor.int()")
        return torch.uint8
    if dtype.is_complex and op in (Min, Max):
        raise UsageError(f"allreduce: complex numbers have no {op}", hint="reduce the real and imaginary parts")
    if compression.dtype is not None and dtype in (torch.float32, torch.float64):
        return compression.dtype
    return (_WIDER_MEAN if op == Average else _WIDER).get(dtype, dtype)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_dense() if tensor.is_sparse else tensor).detach()


def _mean(total: torch.Tensor, count: int) -> torch.Tensor:
    return total.div_(count) if total.is_floating_point() or total.is_complex() else total.floor_divide_(count)


@torch.no_grad()
def _copy_into(tensors: list[torch.Tensor], found: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor, result in zip(tensors, found, strict=True):
        tensor.copy_(result)
    return tensors


def _then(handle: Handle, after: Callable[[list[torch.Tensor]], Any]) -> Handle:
    collect = handle.collect
    handle.collect = lambda: after(collect())
    return handle


# Gradients


def in_graph(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)


def mark(ctx: Any, what: str) -> Group:
    """Note in `ctx`, in the forward pass of a differentiable collective, which group its backward pass needs."""
    ctx.group, ctx.ran_in = runtime.current().require_group(what), -1  # autograd's number of the newest backward pass
    ctx.group.graph_calls.add(ctx)
    return ctx.group


def sum_gradients(ctx: Any, grads: Sequence[torch.Tensor], op: str, compression: Any) -> list[torch.Tensor]:
    """Reduce gradients in the backward pass of a collective that `mark` has noted."""
    if ctx.group is not runtime.current().group:
        raise UsageError("backward: this graph holds a collective of an earlier generation",
                         hint="compute the loss inside the function decorated with @hvd.elastic.run")
    ctx.ran_in = torch._C._current_graph_task_id()
    if in_graph(*grads):  # create_graph=True
        return _differentiable(list(grads), op, compression)
    return reduce_now(list(grads), op, compression, compare=False)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, compression: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mark(ctx, "allreduce")
        ctx.op, ctx.compression = op, compression
        return tuple(reduce_now(list(tensors), op, compression))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.op not in (Average, Sum):
            raise UsageError(f"allreduce: {ctx.op} has no gradient", hint="use Average or Sum, or pass x.detach()")
        return None, None, *sum_gradients(ctx, grads, ctx.op, ctx.compression)


def _differentiable(tensors: list[torch.Tensor], op: str, compression: Any) -> list[torch.Tensor]:
    if in_graph(*tensors):
        return list(_Allreduce.apply(op, compression, *tensors))
    return reduce_now(tensors, op, compression)
