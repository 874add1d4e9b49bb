"""The choice between gloo and NCCL, and construction of the chosen group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from spotfleet.errors import UsageError
from spotfleet.protocol.messages import Assignment
from spotfleet.train.comm.gloo import GlooGroup
from spotfleet.train.comm.group import BACKEND, Group
from spotfleet.train.comm.nccl import NcclGroup, visible_devices


def make_group(assignment: Assignment, job: str, address: str, key: str = "",
               on_broken: Callable[[int], None] = lambda generation: None,
               on_stuck: Callable[[str], None] = lambda why: None,
               environ: Mapping[str, str] = os.environ) -> Group:
    """Make the group that `environ` requests or that suits this machine; UsageError where there can be none."""
    asked = environ.get(BACKEND, "auto")
    devices = 0 if asked == "gloo" else visible_devices()
    kind = {"gloo": GlooGroup, "nccl": NcclGroup}[choose_backend(asked, assignment.local_size, devices)]
    return kind(assignment, job, address, key, on_broken, on_stuck)


def choose_backend(asked: str, local_size: int, devices: int) -> str:
    """Return "gloo" or "nccl" for `local_size` workers on this host, each with `devices` visible that NCCL can use.

    A single device visible to several workers may be one for all or one for each: then NCCL must be requested.
    """
    match asked:
        case "gloo":
            return "gloo"
        case "auto":
            return "nccl" if devices >= max(1, local_size) else "gloo"
        case "nccl" if devices > 0:
            return "nccl"
        case "nccl":
            raise UsageError(f"{BACKEND} is 'nccl', but this worker has no CUDA device or a torch without NCCL",
                             hint=f"leave {BACKEND} out, or set it to auto or gloo")
    raise UsageError(f"{BACKEND} is {asked!r}", hint="set it to auto, gloo or nccl, or leave it out")
