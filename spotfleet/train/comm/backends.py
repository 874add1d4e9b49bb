"""The choice between gloo and NCCL, and construction of the chosen group.

The job's first generation chooses, and all later ones keep its backend (`settled`): otherwise a change of membership
could change how a job trains, or end it where hosts then choose differently.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from spotfleet.errors import UsageError
from spotfleet.protocol.messages import Assignment
from spotfleet.train.comm.gloo import GlooGroup
from spotfleet.train.comm.group import BACKEND, Group
from spotfleet.train.comm.nccl import NcclGroup, visible_devices


class DeviceMissing(UsageError):
    """Lack of a device on a host that a job over NCCL needs; another host may have it."""

    blame_host = True


def make_group(assignment: Assignment, job: str, address: str, key: str = "",
               on_broken: Callable[[int], None] = lambda generation: None,
               on_stuck: Callable[[str, bool], None] = lambda why, host: None,
               environ: Mapping[str, str] = os.environ, settled: str = "") -> Group:
    """Make the group that `environ` requests or that suits this machine; UsageError where there can be none."""
    chosen = choose_here(assignment.local_rank, assignment.local_size, settled, environ)
    return {"gloo": GlooGroup, "nccl": NcclGroup}[chosen](assignment, job, address, key, on_broken, on_stuck)


def choose_here(local_rank: int, local_size: int, settled: str, environ: Mapping[str, str]) -> str:
    """Return the backend for a worker on this machine."""
    asked = environ.get(BACKEND, "auto")
    return choose_backend(asked, local_size, 0 if asked == "gloo" else visible_devices(), settled, local_rank)


def choose_backend(asked: str, local_size: int, devices: int, settled: str = "", local_rank: int = 0) -> str:
    """Return "gloo" or "nccl" for `local_size` workers on this host, each with `devices` visible that NCCL can use.

    A single device visible to several workers may be one for all or one for each: then NCCL must be requested.
    `settled`: what the job's first generation has chosen; UsageError where this worker cannot follow.
    """
    match asked:
        case "gloo":
            return "gloo"
        case "auto" | "nccl" if settled == "nccl" and (devices == 0 or 1 < devices <= local_rank):
            raise DeviceMissing(f"this job trains over NCCL, and worker {local_rank} of this host finds {devices} CUDA "
                                "devices", hint=f"give each worker a device, or set {BACKEND} to gloo for the job")
        case "auto" if settled:
            return settled
        case "auto":
            return "nccl" if devices >= max(1, local_size) else "gloo"
        case "nccl" if devices > 0:
            return "nccl"
        case "nccl":
            raise UsageError(f"{BACKEND} is 'nccl', but this worker has no CUDA device or a torch without NCCL",
                             hint=f"leave {BACKEND} out, or set it to auto or gloo")
    raise UsageError(f"{BACKEND} is {asked!r}", hint="set it to auto, gloo or nccl, or leave it out")
