"""Collectives for user code, with Horovod's names. All ranks must call them in the same order.

They raise CommBroken when a peer is lost. Before `elastic.run`, on a worker that joined a running job, broadcasts
return their input (`elastic.run` brings the state up to date), and all others raise a UsageError with a hint.

Gradients flow through `allgather` and `broadcast`, so that each input gets its part of the gradient of the sum of all
ranks' losses: for `allgather` the sum over ranks of its own rows, for `broadcast` the sum over ranks on the root, zero
elsewhere. DistributedOptimizer's mean makes it the gradient of the mean loss. (Horovod before 0.20 does the same; later
versions divide by the world size once more.) All ranks run the backward pass, too.

Threads: the main thread; a backward pass on one of autograd's.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch

from spotfleet.errors import UsageError
from spotfleet.train import runtime
from spotfleet.train.comm.group import Group
from spotfleet.train.gradients.optimizer import Compression, Sum
from spotfleet.train.reductions import Handle, check_tensors, describe, in_graph, mark, sum_gradients, synchronize
from spotfleet.worker.errors import CommBroken


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all ranks joined along the first dimension, in which they may differ."""
    check_tensors("allgather", [tensor])
    part = tensor.reshape(1) if tensor.dim() == 0 else tensor
    return _Allgather.apply(part) if in_graph(part) else synchronize(allgather_async(part))


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    """Begin an allgather; this returns once all ranks have begun it, since they exchange their sizes first."""
    check_tensors("allgather", [tensor])
    part = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach().contiguous()
    group = runtime.current().require_group("allgather")
    kind = describe([part[:0]]).replace("[0", "[*", 1)
    rows = group.order.compare(f"allgather of {kind}", rows=part.shape[0])
    return _gather(group, part, rows)


def _gather(group: Group, part: torch.Tensor, rows: list[int]) -> Handle:
    """Begin to gather `part`, of which each rank has as many rows as `rows` says."""
    data = part.reshape(-1).view(torch.uint8)  # every type travels as bytes
    row = part.shape[1:].numel() * part.element_size()
    padded = torch.zeros(max(1, row * max(rows)), dtype=torch.uint8, device=part.device)
    padded[:data.numel()] = data
    if group.size > 1:
        group.order.begin("allgather", padded)
        work, parts = group.begin_allgather(padded)
    else:
        work, parts = None, [padded]

    def collect() -> torch.Tensor:
        joined = torch.cat([p[:n * row] for p, n in zip(parts, rows, strict=True)])
        return joined.view(part.dtype).reshape(sum(rows), *part.shape[1:])

    return Handle(group, [work] if work is not None else [], collect)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        group = mark(ctx, "allgather")
        kind = describe([part[:0]]).replace("[0", "[*", 1)
        rows = group.order.compare(f"allgather of {kind}", rows=part.shape[0])
        ctx.start, ctx.rows = sum(rows[:group.rank]), part.shape[0]
        return synchronize(_gather(group, part.detach().contiguous(), rows))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return sum_gradients(ctx, [grad], Sum, Compression.none)[0].narrow(0, ctx.start, ctx.rows)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    check_tensors("broadcast", [tensor])
    group = _group_for_broadcast("broadcast", root_rank)
    if group is not None:
        _broadcast_or_join(lambda: _broadcast_all("broadcast", group, [tensor], root_rank))
    return tensor


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    check_tensors("broadcast", [tensor])
    if in_graph(tensor) and _group_for_broadcast("broadcast", root_rank) is not None:
        return _Broadcast.apply(tensor, root_rank)
    return broadcast_(tensor.clone(), root_rank, name)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int) -> torch.Tensor:
        mark(ctx, "broadcast")
        ctx.root = root
        return broadcast_(tensor.detach().clone(), root)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = sum_gradients(ctx, [grad], Sum, Compression.none)[0]
        return (total if ctx.group.rank == ctx.root else total * 0), None


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    check_tensors("broadcast", [tensor])
    return broadcast_async_(tensor.detach().clone(), root_rank, name)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Begin a broadcast into `tensor`, which is received once `synchronize` has returned, and not before.

    This returns once all ranks have begun it, since they compare their calls first.
    """
    check_tensors("broadcast", [tensor])
    group = _group_for_broadcast("broadcast", root_rank)
    if group is None or group.size == 1:
        return Handle(None, [], lambda: tensor)
    group.order.compare(_call("broadcast", root_rank, [tensor]))
    copy = tensor.detach().reshape(-1).clone().view(torch.uint8)  # every type travels as bytes

    @torch.no_grad()
    def collect() -> torch.Tensor:
        return tensor.copy_(copy.view(tensor.dtype).view(tensor.shape))

    return Handle(group, [group.begin_broadcast(copy, root_rank)] if copy.numel() else [], collect)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    from spotfleet.train.state import sync

    group = _group_for_broadcast("broadcast_object", root_rank)
    if group is None:
        return obj

    def exchange() -> list[Any]:
        group.order.compare(f"broadcast_object from rank {root_rank}")
        return [sync.broadcast_object(group, obj, root_rank)]

    found = _broadcast_or_join(exchange)
    return found[0] if found else obj


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return one object per rank, in the order of ranks."""
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    group = runtime.current().require_group("allgather_object")
    lengths = group.order.compare("allgather_object", rows=data.numel())
    joined, found = synchronize(_gather(group, data, lengths)).numpy().tobytes(), []
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
        _broadcast_or_join(lambda: _broadcast_all("broadcast_parameters", group, tensors, root_rank))


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
    runtime.current().require_group("barrier").order.compare("barrier")


def _call(what: str, root: int, tensors: list[torch.Tensor]) -> str:
    return f"{what} from rank {root} of {describe(tensors)}"


def _broadcast_all(what: str, group: Group, tensors: list[torch.Tensor], root: int) -> bool:
    from spotfleet.train.state import sync

    group.order.compare(_call(what, root, tensors))
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
