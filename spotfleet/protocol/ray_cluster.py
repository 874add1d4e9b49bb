"""State of a fleet's Ray cluster, as a helper process reports it to the dispatcher: one JSON line per observation.

The dispatcher never imports Ray. The helper asks Ray's GCS (`get_cluster_resource_state`) and leaves out what the
fleet does not need. Resources are Ray's: "CPU", "GPU" and custom ones, as numbers of units; "memory" in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RayNode:
    node_id: str  # Ray's, in hex
    host: str = ""  # name of the fleet's host; "" for the head
    total: dict[str, float] = field(default_factory=dict)
    free: dict[str, float] = field(default_factory=dict)
    draining: bool = False
    idle_s: float = 0.0  # 0 while it runs something


@dataclass(frozen=True)
class RayRequest:
    """Tasks, actors or bundles of one shape."""

    resources: dict[str, float]
    count: int = 1


@dataclass(frozen=True)
class RayGang:
    """A placement group that waits: all of its bundles at once, or none."""

    bundles: tuple[RayRequest, ...]
    spread: bool = False  # STRICT_SPREAD: no two bundles on one node
    pack: bool = False  # STRICT_PACK: all bundles on one node


@dataclass(frozen=True)
class RayState:
    up: bool  # the head answers
    nodes: tuple[RayNode, ...] = ()  # alive ones
    pending: tuple[RayRequest, ...] = ()  # tasks and actors for which no node has room
    gangs: tuple[RayGang, ...] = ()
    constraints: tuple[RayRequest, ...] = ()  # room that a program asked to keep (`request_cluster_resources`)
    problem: str = ""  # why it is not up
