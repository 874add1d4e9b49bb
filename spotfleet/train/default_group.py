"""torch's default process group and the variables of torchrun, true in each generation.

    generation formed: `enter` -> dist.is_initialized(), RANK, WORLD_SIZE, ... -> group left or broken: `leave`

While a worker has no group (between generations, and on a joiner before `elastic.run`) there is no default group, and
none of the variables is set. A default group that the script made before `hvd.init()` is left alone, and so are the
variables if somebody else has set them.

`watch` makes a script's own `init_process_group` pass where it asks for what is there, and its
`destroy_process_group` do nothing, since the group ends with its generation.

Threads: the main thread.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch.distributed as dist

from spotfleet.addresses import split
from spotfleet.errors import UsageError
from spotfleet.protocol.messages import RankInfo
from spotfleet.train import current
from spotfleet.train.comm.group import BACKEND, Group
from spotfleet.train.comm.torch_group import NAME, TorchGroup

OURS = "_replaced_by_spotfleet"  # attribute of a replacement: torch's own function
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_entering: list[Group] = []  # the group that torch is about to wrap
_own_variables = False
_inits: dict[str, Any] = {}  # torch's own functions, while they are replaced


def enter(group: Group, place: RankInfo) -> None:
    """Make `group` torch's default one, unless the script has its own."""
    global _own_variables
    leave()
    if dist.is_available() and not dist.is_initialized():
        _make_default(group)
    if _own_variables or not any(name in os.environ for name in VARIABLES):
        _own_variables = True
        address, port = split(group.meets_at) if group.meets_at else ("127.0.0.1", 0)
        values = (place.rank, place.size, place.local_rank, place.local_size, address, port)
        os.environ.update({name: str(value) for name, value in zip(VARIABLES, values, strict=True)})


def leave() -> None:
    """Undo `enter`, if it was called."""
    global _own_variables
    if is_ours():
        _torchs("destroy_process_group")()
    if _own_variables:
        _own_variables = False
        for name in VARIABLES:
            os.environ.pop(name, None)


def is_ours() -> bool:
    """Return whether torch's default group is a generation's."""
    return dist.is_available() and dist.is_initialized() and isinstance(dist.group.WORLD, TorchGroup)


def _make_default(group: Group) -> None:
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _wrap, devices=["cpu", "cuda"])
    hook = sys.excepthook  # torch would wrap it once for each generation
    _entering.append(group)
    try:
        _torchs("init_process_group")(NAME, store=dist.HashStore(), rank=group.rank, world_size=group.size)
    finally:
        _entering.clear()
        sys.excepthook = hook


def _wrap(store: Any, rank: int, size: int, timeout: Any) -> TorchGroup:
    if not _entering:
        raise UsageError("dist.new_group: a generation has one group only",
                         hint="use the default group, which spans all workers")
    return TorchGroup(_entering[0])


def _torchs(name: str) -> Any:
    """Return torch's own function of this name."""
    found = getattr(dist, name)
    return _inits.get(name) or getattr(found, OURS, found)


# A script's own calls

def watch() -> None:
    """Replace torch's functions that make and destroy the default group. A repeated call does nothing."""
    if dist.is_available() and not _inits:
        for name, replacement in (("init_process_group", _init), ("destroy_process_group", _destroy)):
            found = _inits[name] = _torchs(name)
            setattr(replacement, OURS, found)
            for module in (dist, dist.distributed_c10d):
                setattr(module, name, functools.wraps(found)(replacement))


def _init(backend: str | None = None, init_method: str | None = None, timeout: Any = None, world_size: int = -1,
          rank: int = -1, store: Any = None, *args: Any, **options: Any) -> None:
    """Accept what is there already; UsageError where the script asks for another group."""
    runtime = current.runtime()
    if not getattr(runtime, "initialized", False) or (dist.is_initialized() and not is_ours()):
        _inits["init_process_group"](backend, init_method, timeout, world_size, rank, store, *args, **options)
        return
    if not is_ours():
        raise UsageError("dist.init_process_group: this worker joined a running job, so it has no peers before "
                         "elastic.run", hint="move the call into the function decorated with @hvd.elastic.run")
    group = dist.group.WORLD.group  # type: ignore[union-attr]
    if (world_size not in (-1, group.size)) or rank not in (-1, group.rank):
        raise UsageError(f"dist.init_process_group: rank {rank} of {world_size} was asked for, and this worker is rank "
                         f"{group.rank} of {group.size}", hint="leave both out, or call it once for each generation")
    if backend and group.backend not in str(backend).lower() and str(backend).lower() != NAME:
        raise UsageError(f"dist.init_process_group: {backend} was asked for, and this generation uses {group.backend}",
                         hint=f"leave the backend out, or set {BACKEND}")


def _destroy(group: Any = None) -> None:
    if not (is_ours() and group in (None, dist.group.WORLD)):
        _inits["destroy_process_group"](group)
