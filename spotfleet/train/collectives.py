"""Collectives for user code, with Horovod's names. All ranks must call them in the same order.

They raise CommBroken when a peer is lost. Before `elastic.run`, on a worker that joined a running job, broadcasts
return their input (`elastic.run` brings the state up to date), and all others raise a UsageError with a hint.

Threads: the main thread.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch

from spotfleet.errors import UsageError
from spotfleet.train import runtime
from spotfleet.train.comm.group import Group
from spotfleet.worker.errors import CommBroken


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all ranks joined along the first dimension, in which they may differ."""
    group = runtime.current().require_group("allgather")
    part = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach().contiguous()
    rest = part.shape[1:].numel()
    sizes = [(int(n), int(r)) for n, r in group.allgather(torch.tensor([part.shape[0], rest]))]
    if len({r for _, r in sizes}) > 1:
        raise UsageError(f"allgather: the ranks' tensors have {[r for _, r in sizes]} elements in a row",
                         hint="tensors may differ in their first dimension only")
    data = part.reshape(-1).view(torch.uint8)  # every type travels as bytes
    row = rest * part.element_size()
    padded = torch.zeros(max(1, row * max(n for n, _ in sizes)), dtype=torch.uint8, device=part.device)
    padded[:data.numel()] = data
    parts = [p[:n * row] for p, (n, _) in zip(group.allgather(padded), sizes, strict=True)]
    return torch.cat(parts).view(part.dtype).reshape(sum(n for n, _ in sizes), *part.shape[1:])


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    group = _group_for_broadcast("broadcast", root_rank)
    if group is not None:
        _broadcast_or_join(lambda: _broadcast_all(group, [tensor], root_rank))
    return tensor


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    return broadcast_(tensor.detach().clone(), root_rank, name)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    from spotfleet.train.state import sync

    group = _group_for_broadcast("broadcast_object", root_rank)
    if group is None:
        return obj
    found = _broadcast_or_join(lambda: [sync.broadcast_object(group, obj, root_rank)])
    return found[0] if found else obj


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return one object per rank, in the order of ranks."""
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
        _broadcast_or_join(lambda: _broadcast_all(group, tensors, root_rank))


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Make the optimizer's state and hyper-parameters equal to those of `root_rank`."""
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
    from spotfleet.train.state import sync

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


def _broadcast_or_join(broadcast: Any) -> Any:
    """Call `broadcast`. A founder that loses a peer before `elastic.run` goes on as a joiner: the state is synchronised
    there."""
    current = runtime.current()
    try:
        return broadcast()
    except CommBroken:
        if current.state is not None:
            raise
        current.become_joiner()
        return None
