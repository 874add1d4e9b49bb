"""An optimizer's parameter groups as plain values: hyper-parameters and the names of the parameters.

Groups may be added while training goes on. Parameters travel by name, so a rank that joins later, or that goes back to
before a group was added, gets the same groups.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch

from spotfleet.errors import UsageError

PLAIN = (int, float, str, bool, bytes, complex, type(None))
NAMES = "params"  # in a captured group: by name


def copied(value: Any) -> Any:
    return value if isinstance(value, PLAIN) else copy.deepcopy(value)


def with_inner(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, torch.optim.Optimizer]:
    """Return these optimizers, and those that they keep as attributes by names such as "optimizer.base"."""
    found, queue = dict(optimizers), list(optimizers.items())
    for name, optimizer in queue:
        for attribute, value in vars(optimizer).items():
            parts = value.items() if type(value) is dict else enumerate(value) if type(value) in (list, tuple) else ()
            for key, part in ((f"{name}.{attribute}", value), *((f"{name}.{attribute}[{k}]", v) for k, v in parts)):
                if isinstance(part, torch.optim.Optimizer) and not any(part is o for o in found.values()):
                    found[key] = part
                    queue.append((key, part))
    return found


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def capture(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[dict[str, Any]]:
    """Return one dict per group. `names` is by id of the parameter; a parameter without a name gets ""."""
    return [{**{k: copied(v) for k, v in group.items() if k != "params"},
             NAMES: tuple([names.get(id(p), "") for p in group["params"]])}
            for group in optimizer.param_groups]


def fit(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], by_name: dict[str, torch.Tensor]) -> None:
    """Remove or add groups of the optimizer until it has as many as `groups`."""
    for group in optimizer.param_groups[len(groups):]:
        for p in group["params"]:
            optimizer.state.pop(p, None)
    del optimizer.param_groups[len(groups):]
    for held in groups[len(optimizer.param_groups):]:
        missing = [n for n in held[NAMES] if n not in by_name]
        if missing:
            raise UsageError(f"the optimizer of the running job has a group with a parameter that is not in the state "
                             f"here: {missing[0] or 'one without a name'}",
                             hint="give every model whose parameters are trained to TorchState(...)")
        values = {k: copied(v) for k, v in held.items() if k != NAMES}
        optimizer.add_param_group({"params": [by_name[n] for n in held[NAMES]], **values})


def put_back(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]],
             keep: Collection[tuple[int, str]] = ()) -> None:
    """Write the captured values into the optimizer's groups, which must fit, except at (index, key) of `keep`."""
    for i, (group, held) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        group.update({k: copied(v) for k, v in held.items() if k != NAMES and (i, k) not in keep})
