"""Checkpoint entries of a state: the keys of its tensors and values, and which tensors are the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from spotfleet.train.checkpoint.format import OWN_KEY, Shard
from spotfleet.train.checkpoint.shards import Path, TensorRow, plan
from spotfleet.train.gradients.optimizer_tag import is_distributed

if TYPE_CHECKING:
    from spotfleet.train.state.state import Position, Schema, State


def rows_of(state: State, schema: Schema) -> list[TensorRow]:
    """Return one row per tensor of `state.tensors()`, in that order, the same on every rank."""
    modules, names, shared = _modules(state), _param_names(state), _shared(state)
    rows = []
    for name, dtype, shape in schema.fixed:
        top, _, key = name.partition(".")
        if top in modules:
            tensor, paths = modules[top][key]
            rows.append(TensorRow(paths, dtype, shape, id(tensor) in shared))
        else:  # a parameter of no model in the state
            top, _, key = name.rpartition(".")
            p = _params(state._all_optimizers[top])[int(key)]
            rows.append(TensorRow(((top, "params", key),), dtype, shape, id(p) in shared))
    for top, per_param in schema.optimizers.items():
        for p, entries in zip(_params(state._all_optimizers[top]), per_param, strict=True):
            rows.extend(TensorRow(((top, "state", names[id(p)], key),), entry[0], entry[1], id(p) in shared)
                        for key, entry in entries.items() if isinstance(entry, tuple))
    return rows


def _modules(state: State) -> dict[str, dict[str, tuple[torch.Tensor, tuple[Path, ...]]]]:
    """Return each module's parameters and buffers, with their paths for a reader, as in its own state_dict."""
    found: dict[str, dict[str, Any]] = {}
    for top, module in state._modules.items():
        saved: dict[int, list[Path]] = {}
        for key, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                saved.setdefault(id(value), []).append((top, key))
        found[top] = {}
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
            paths = saved.get(id(tensor)) or [(OWN_KEY, "unsaved", f"{top}.{key}")]  # load_state_dict would refuse it
            found[top][key] = (tensor, tuple(paths))
    return found


def _param_names(state: State) -> dict[int, str]:
    """Name parameters as torch.distributed.checkpoint.state_dict does, with the model's name if there are several."""
    names = {id(p): str(i) for o in state._all_optimizers.values() for i, p in enumerate(_params(o))}
    for top, module in reversed(state._modules.items()):
        prefix = f"{top}." if len(state._modules) > 1 else ""
        names.update({id(p): f"{prefix}{key}" for key, p in module.named_parameters()})
    return names


def _shared(state: State) -> set[int]:
    """Return ids of parameters that only distributed optimizers own: equal gradients keep them equal on all ranks."""
    reduced: set[int] = set()
    others: set[int] = set()
    for optimizer in state._optimizers.values():
        (reduced if is_distributed(optimizer) else others).update(id(p) for p in _params(optimizer))
    return reduced - others


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def plain_of(state: State, position: Position, schema: Schema) -> dict[Path, Any]:
    """Return all entries besides tensors: hyper-parameters, the state's own values, its schedulers and samplers."""
    names = _param_names(state)
    found: dict[Path, Any] = {}
    for top, groups in position.hyper.items():
        params = [[names[id(p)] for p in group["params"]] for group in state._all_optimizers[top].param_groups]
        found[(top, "param_groups")] = [{**group, "params": own} for group, own in zip(groups, params, strict=False)]
    for top, per_param in schema.optimizers.items():
        for p, entries in zip(_params(state._all_optimizers[top]), per_param, strict=True):
            found.update({(top, "state", names[id(p)], key): entry[0]
                          for key, entry in entries.items() if isinstance(entry, list)})
    found.update({(top,): value for top, value in {**position.scalars, **position.stateful}.items() if top != OWN_KEY})
    return found


def whole_shard(state: State, generation: int, at_rest: bool = False) -> Shard:
    """Return all of `state` as one shard without a copy, so nothing may change it until it is written.

    `at_rest`: the iteration that has begun will be computed again. In copy mode the shard is the newest commit, since
    the position belongs to no other tensors.
    """
    held = None if state.step_mode else state._copy
    if held is not None and held.buffer is not None:
        held.buffer.wait()
        return rank_shard(state, generation, 0, 1, held.tensors, held.schema)
    return rank_shard(state, generation, 0, 1, sources(state) if at_rest else state.tensors())


def rank_shard(state: State, generation: int, rank: int, world: int, tensors: Sequence[torch.Tensor],
          schema: Schema | None = None) -> Shard:
    """Return the shard that `rank` of `world` writes of `tensors`, as views."""
    schema, position = schema or state.schema(), state._position
    fixed = [(n, dtype, tuple(t.shape)) for (n, dtype, _), t in zip(schema.fixed, tensors, strict=False)]
    schema = replace(schema, fixed=fixed)  # the forward pass may have given a live buffer another shape
    rows = rows_of(state, schema)
    values = [piece.view_of(tensors[piece.row]).detach() for piece in plan(rows, world)[rank]]
    plain = plain_of(state, position, schema) if rank == 0 else {}
    return Shard(state.version, generation, rank, world, rows, values, (position, schema), plain)


def is_shared(state: State) -> bool:
    """Return whether the state has tensors that any rank may write."""
    return bool(_shared(state))


def sources(state: State) -> list[torch.Tensor]:
    """Return the tensors that belong to the position held, in the order of `state.tensors()`.

    The forward pass of the iteration that has begun may have changed statistics. It will change them again, so these
    are the values from before it.
    """
    live = state.tensors()
    if state.step_mode:
        values = {id(tensor): value for tensor, value in state._extras.values_before(state._position.round)}
        if state._loan is not None:
            values.update((id(tensor), value) for tensor, value in state._loan.values)
        for i, (_, tensor) in enumerate(state._named()):
            live[i] = values.get(id(tensor), live[i])
    return live
