"""Ray itself: whether it is installed, connected, and the same everywhere."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.version import install


@dataclass(frozen=True)
class About:
    """A worker's process: its node, and the versions that must agree."""

    node: str  # Ray's id
    address: str
    pid: int
    ray: str
    python: str  # "3.11"
    gpus: tuple[str, ...] = ()  # ids of the GPUs that Ray has assigned to it
    visible: tuple[str, ...] = ()  # ids of the GPUs that Ray may use on its node; () for all
    warm_s: float = 0.0  # since the start of its process


def load_ray() -> Any:
    """Return the module `ray`. Raises UsageError where it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UsageError(f"Ray cannot be imported: {error}", hint=install("ray")) from error


def load_tune() -> Any:
    """Return the module `ray.tune`. Raises UsageError where it, or a package that it needs, is not installed."""
    load_ray()
    try:
        return importlib.import_module("ray.tune")
    except ImportError as error:
        raise UsageError(f"Ray Tune cannot be imported: {error}", hint=install("tune")) from error


def connected_ray() -> Any:
    """Return the module `ray`. Raises UsageError where it is not connected: an executor never connects by itself. So it
    does for Ray Client, since the workers have to reach the process that coordinates them."""
    ray = load_ray()
    if ray.util.client.ray.is_connected():
        raise UsageError("Ray is connected by Ray Client (ray://), and workers cannot reach this process",
                         hint='run this program on a machine of the cluster, with ray.init(address="auto"); on a '
                              "fleet: `spotfleet ray submit`")
    if not ray.is_initialized():
        raise UsageError("Ray is not connected to a cluster",
                         hint='call ray.init(address="HEAD:6379") first, or ray.init(address="local") for this machine')
    return ray


def own_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def check_same(found: About, ray: str, python: str) -> None:
    """Raise UsageError if a worker's process has another Ray or another minor version of Python than the driver."""
    for name, theirs, ours in (("Ray", found.ray, ray), ("Python", found.python, python)):
        if theirs != ours:
            raise UsageError(f"node {found.node[:12]} ({found.address}) has {name} {theirs}, and the driver {ours}",
                             hint=f"install the same {name} on all nodes and in the driver's environment")
