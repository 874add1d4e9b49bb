"""The live tensors of a state, in one order on all ranks, and their schema."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch

from spotfleet.errors import UsageError
from spotfleet.train.gradients.optimizer_tag import is_distributed
from spotfleet.train.state.buffers import Extras
from spotfleet.train.state.hyper import params_of
from spotfleet.train.state.plain import PlainValues
from spotfleet.train.state.position import Schema


class LiveTensors:
    """Tensors of the modules and optimizers of a state."""

    _modules: dict[str, torch.nn.Module]
    _optimizers: dict[str, torch.optim.Optimizer]
    _all_optimizers: dict[str, torch.optim.Optimizer]  # with those inside others
    _extras: Extras
    _plain: PlainValues

    def owners(self) -> dict[str, torch.optim.Optimizer]:
        """Return all optimizers whose `state` is their own."""
        first: dict[int, str] = {}
        return {n: o for n, o in self._all_optimizers.items() if first.setdefault(id(o.state), n) == n}

    def tensors(self) -> list[torch.Tensor]:
        """Return the live tensors in the order of `schema()`."""
        found = [t for _, t in self._fixed()]
        for optimizer in self.owners().values():
            for p in params_of(optimizer):
                found.extend(v for _, v in sorted(optimizer.state.get(p, {}).items()) if isinstance(v, torch.Tensor))
        return found

    def move_memory(self) -> None:
        """Move the live tensors to other memory, since an operation may still write to where they are."""
        held = [v for o in self.owners().values() for p in params_of(o) for v in o.state.get(p, {}).values()]
        for tensor in [*(t for _, t in self._named()), *(v for v in held if isinstance(v, torch.Tensor))]:
            tensor.data = tensor.data.clone()

    def shared(self) -> list[bool]:
        """Return, for each of `tensors()`, whether it is the same on all ranks, as only a distributed optimizer changes
        it."""
        owners = [o for o in self._optimizers.values() if is_distributed(o)]
        others = {id(p) for o in self._optimizers.values() if o not in owners for p in params_of(o)}
        reduced = {id(p) for o in owners for p in params_of(o)} - others
        found = [id(t) in reduced for _, t in self._named()]
        for optimizer in self.owners().values():
            for p in params_of(optimizer):
                found += [id(p) in reduced for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
        return found

    @property
    def has_averages(self) -> bool:
        """Whether there are parameters that no optimizer owns. They may also be frozen weights."""
        return self._extras.has_loose

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """Return parameters and buffers, each once, with a name that is the same on all ranks."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, module in self._modules.items():
            for key, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
                found.setdefault(id(tensor), (f"{name}.{key}", tensor))
        for name, optimizer in self._all_optimizers.items():
            for i, p in enumerate(params_of(optimizer)):
                found.setdefault(id(p), (f"{name}.{i}", p))
        return list(found.values())

    def _fixed(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.data) for name, tensor in self._named()]

    def schema(self) -> Schema:
        optimizers = {}
        for name, optimizer in self.owners().items():
            optimizers[name] = [
                {k: (v.dtype, tuple(v.shape), v.device.type == "cpu") if isinstance(v, torch.Tensor)
                 else [copy.deepcopy(v)] for k, v in sorted(optimizer.state.get(p, {}).items())}
                for p in params_of(optimizer)
            ]
        return Schema([(n, t.dtype, tuple(t.shape)) for n, t in self._fixed()], optimizers, self._plain.capture())

    def _fit_buffers(self, schema: Schema) -> None:
        """Give buffers that have other shapes in `schema` those: a cache may grow with what comes in."""
        held = {name: (dtype, shape) for name, dtype, shape in schema.fixed}
        for name, tensor in self._named():
            dtype, shape = held.get(name, (tensor.dtype, tuple(tensor.shape)))
            if not isinstance(tensor, torch.nn.Parameter) and (dtype, shape) != (tensor.dtype, tuple(tensor.shape)):
                made = torch.zeros(shape, dtype=dtype, device=tensor.device)
                for buffers in (part._buffers for module in self._modules.values() for part in module.modules()):
                    buffers.update({key: made for key, b in buffers.items() if b is tensor})

    def allocate_tensors(self, schema: Schema) -> None:
        """Allocate optimizer state as in `schema`, and take over its values; UsageError when this process built another
        model."""
        self._fit_buffers(schema)
        own = [(n, t.dtype, tuple(t.shape)) for n, t in self._fixed()]
        differing = next((pair for pair in zip(own, schema.fixed, strict=False) if pair[0] != pair[1]), None)
        if differing or len(own) != len(schema.fixed) or set(schema.optimizers) != set(self.owners()):
            raise _does_not_fit(own, schema.fixed, differing)
        for name, per_param in schema.optimizers.items():
            optimizer = self._all_optimizers[name]
            params = params_of(optimizer)
            if len(params) != len(per_param):
                raise UsageError(f"state.{name}: {len(params)} parameters here, {len(per_param)} there",
                                 hint="give the optimizer the same parameters on every rank")
            for p, entries in zip(params, per_param, strict=True):
                held = optimizer.state[p]
                held.clear()
                for key, entry in entries.items():
                    held[key] = entry[0] if isinstance(entry, list) else _empty(p, *entry)
                if not entries:
                    del optimizer.state[p]
        if schema.plain is not None:
            self._plain.put(schema.plain)


def _does_not_fit(own: list[tuple[str, Any, Any]], there: list[tuple[str, Any, Any]],
                  differing: Any) -> UsageError:
    here = {n for n, _, _ in own}
    added = [n for n, _, _ in there if n not in here]
    what = f"here {differing[0]}, there {differing[1]}" if differing else f"here {len(own)} tensors, there {len(there)}"
    hint = "build the same model and optimizer on every rank, independent of rank and size"
    if added and len(added) < len(there):
        what += f"; there also {', '.join(added[:3])}{' and more' if len(added) > 3 else ''}"
        hint += ("; what the loop adds to a model (a layer, a buffer, the mask of torch.nn.utils.prune) must be there "
                 "before DistributedOptimizer(...) and TorchState(...) are called")
    if any(n.endswith("_orig") for n in added):
        hint += ": prune.identity(layer, \"weight\"), and prune in the loop"
    return UsageError(f"the state to be taken over does not fit the model built here: {what}", hint=hint)


def _empty(p: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], on_cpu: bool) -> torch.Tensor:
    """Return memory for optimizer state of `p`. It lies as `p` does: fused steps go by position in memory."""
    device = torch.device("cpu") if on_cpu else p.device
    if shape == tuple(p.shape):
        return torch.empty_like(p, dtype=dtype, device=device, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=device)
