"""Nodes of a Ray cluster: which are alive, their resources, and which drain.

Ray has no public call for drains and for a node's GPUs, so this file holds the private ones; tests/ray try them with
each version.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from spotfleet.ray.installed import load_ray

UNKNOWN_S = 120.0  # for a drain without a deadline


def alive_nodes() -> dict[str, dict[str, float]]:
    """Return the resources of each node that is alive, by its id."""
    return {n["NodeID"]: n["Resources"] for n in load_ray().nodes() if n["Alive"]}


def draining() -> dict[str, float]:
    """Return the seconds left of each node that drains, by its id."""
    state: Any = importlib.import_module("ray._private.state").state
    found: dict[str, int] = state.get_draining_nodes()
    now_ms = 1000 * time.time()
    return {node: (deadline - now_ms) / 1000 if deadline else UNKNOWN_S for node, deadline in found.items()}


def visible_gpus() -> tuple[str, ...]:
    """Return the ids of the GPUs that the raylet of this process was limited to by CUDA_VISIBLE_DEVICES; () for all."""
    worker: Any = importlib.import_module("ray._private.worker").global_worker
    return tuple(worker.original_visible_accelerator_ids.get("GPU") or ())


def drain_node(gcs_address: str, node: str, why: str, seconds_left: float) -> bool:
    """Drain a node; return whether Ray has accepted it. Needs no driver."""
    raylet: Any = importlib.import_module("ray._raylet")
    pb: Any = importlib.import_module("ray.core.generated.autoscaler_pb2")
    deadline_ms = int(1000 * (time.time() + seconds_left))
    accepted, _ = raylet.GcsClient(address=gcs_address).drain_node(
        node, pb.DRAIN_NODE_REASON_PREEMPTION, why, deadline_ms)
    return bool(accepted)
