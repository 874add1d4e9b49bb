"""Collectives for user code, with Horovod's names. All ranks must call them in the same order.

They raise CommBroken when a peer is lost. Before `elastic.run`, on a worker that joined a running job, broadcasts
return their input (the state will be brought up to date there), anything else says what to do.

Threads: the main thread.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from spotfleet.errors import UsageError
from spotfleet.train import runtime
from spotfleet.train.errors import CommBroken
from spotfleet.train.group import Group
from spotfleet.train.optimizer import Average, Compression, Max, Min, Sum

_OPS = {Average: dist.ReduceOp.SUM, Sum: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN, Max: dist.ReduceOp.MAX}


def allreduce_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
               op: str | None = None) -> torch.Tensor:
    """Reduce in place; the mean of integers is rounded towards minus infinity."""
    if op is None:
        op = Sum if average is False else Average
    if op not in _OPS:
        raise UsageError(f"allreduce: unknown op {op!r}", hint="use Average, Sum, Min or Max")
    group = runtime.current().require_group("allreduce")
    flat = tensor if tensor.is_contiguous() else tensor.contiguous()
    group.allreduce(flat, _OPS[op])
    if op == Average:
        flat.div_(group.size) if flat.is_floating_point() or flat.is_complex() else flat.floor_divide_(group.size)
    if flat is not tensor:
        tensor.copy_(flat)
    return tensor


def allreduce(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
              compression: Any = Compression.none, op: str | None = None) -> torch.Tensor:
    return allreduce_(tensor.detach().clone(), average, name, op)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """The tensors of all ranks joined along the first dimension, in which they may differ."""
    group = runtime.current().require_group("allgather")
    part = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach().contiguous()
    lengths = [int(n) for n in group.allgather(torch.tensor([part.shape[0]]))]
    padded = torch.zeros((max(lengths), *part.shape[1:]), dtype=part.dtype, device=part.device)
    padded[:part.shape[0]] = part
    return torch.cat([p[:n] for p, n in zip(group.allgather(padded), lengths, strict=True)])


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    group = _group_for_broadcast("broadcast", root_rank)
    if group is not None:
        _or_join(lambda: _broadcast_all(group, [tensor], root_rank))
    return tensor


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    return broadcast_(tensor.detach().clone(), root_rank, name)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    from spotfleet.train import sync

    group = _group_for_broadcast("broadcast_object", root_rank)
    if group is None:
        return obj
    found = _or_join(lambda: [sync.broadcast_object(group, obj, root_rank)])
    return found[0] if found else obj


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """One object per rank, in the order of ranks."""
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    group = runtime.current().require_group("allgather_object")
    lengths = [int(n) for n in group.allgather(torch.tensor([data.numel()]))]
    joined, found = allgather(data).numpy().tobytes(), []
    for length in lengths:
        found.append(pickle.loads(joined[:length]))
        joined = joined[length:]
    return found


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Make a state_dict or named parameters equal to those of `root_rank`, in place."""
    named: Iterable[tuple[str, Any]] = sorted(params.items()) if hasattr(params, "items") else list(params)
    group = _group_for_broadcast("broadcast_parameters", root_rank)
    if group is not None:
        tensors = [value.data for _, value in named if isinstance(value, torch.Tensor)]
        _or_join(lambda: _broadcast_all(group, tensors, root_rank))


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Make the optimizer's state and hyper-parameters those of `root_rank`."""
    if runtime.current().group is None:
        _group_for_broadcast("broadcast_optimizer_state", root_rank)
        return
    held = broadcast_object(optimizer.state_dict(), root_rank)
    if runtime.current().place.rank != root_rank:
        optimizer.load_state_dict(held)


def barrier() -> None:
    """Return when all ranks have called it."""
    runtime.current().require_group("barrier").allreduce(torch.zeros(1))


def _broadcast_all(group: Group, tensors: list[torch.Tensor], root: int) -> bool:
    from spotfleet.train import sync

    sync.broadcast_tensors(group, tensors, root)
    return True


def _group_for_broadcast(what: str, root: int) -> Group | None:
    current = runtime.current()
    if current.group is None and current.initialized and current.state is None:
        return None
    group = current.require_group(what)
    if not 0 <= root < group.size:
        raise UsageError(f"{what}: root_rank {root} is not a rank", hint=f"use 0 to {group.size - 1}")
    return group


def _or_join(broadcast: Any) -> Any:
    """A founder whose peer is lost before `elastic.run` goes on as one who joins: the state is brought there."""
    current = runtime.current()
    try:
        return broadcast()
    except CommBroken:
        if current.state is not None:
            raise
        current.become_joiner()
        return None
