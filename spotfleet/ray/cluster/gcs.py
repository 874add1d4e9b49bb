"""Calls of Ray's GCS without a driver. These parts of Ray are private: they are used here only, and tested.

`get_cluster_resource_state` is what Ray's own autoscaler reads, `drain_node` what it calls. Neither makes a driver.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from spotfleet.protocol.ray_cluster import (
    LABEL,
    TRIALS_KEY,
    TRIALS_NAMESPACE,
    RayGang,
    RayNode,
    RayRequest,
    RayState,
)

CALL_S = 3.0  # limit of one call
DRAIN_S = 1.0  # the same for a drain, which waits for the node's raylet


class Gcs:
    """Client of one GCS. Every method raises ConnectionError where it does not answer."""

    def __init__(self, address: str) -> None:
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        self._pb = autoscaler_pb2
        self._client = self._call(GcsClient, address=address)

    def state(self) -> RayState:
        """Return the state of the cluster."""
        answer = self._pb.GetClusterResourceStateReply()
        answer.ParseFromString(self._call(self._client.get_cluster_resource_state, timeout_s=CALL_S))
        return state_of(answer.cluster_resource_state, self._pb.NodeStatus)

    def trials(self) -> bytes | None:
        """Return what trials of Ray Tune have published, `PlacedTrials` in JSON; None if there was none yet."""
        found: bytes | None = self._call(self._client.internal_kv_get, TRIALS_KEY, TRIALS_NAMESPACE, timeout=CALL_S)
        return found

    def drain(self, node_id: str, why: str, left_s: float, *, idle_only: bool) -> str:
        """Drain a node: it goes on with what it runs, and gets nothing new. With `idle_only` its raylet ends, provided
        that nothing runs there. Return "", or why Ray refuses."""
        reason = (self._pb.DRAIN_NODE_REASON_IDLE_TERMINATION if idle_only
                  else self._pb.DRAIN_NODE_REASON_PREEMPTION)
        deadline_ms = 0 if idle_only else int((time.time() + left_s) * 1000)
        done, refused = self._call(self._client.drain_node, node_id, reason, why, deadline_ms, timeout=DRAIN_S)
        return "" if done else str(refused or "refused")

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        from ray.exceptions import RayError

        try:
            return function(*args, **kwargs)
        except (RayError, RuntimeError) as error:  # RpcError is one of these
            raise ConnectionError(str(error)) from error


def state_of(found: Any, status: Any) -> RayState:
    """Return a message `ClusterResourceState` in our words. `status`: Ray's enum NodeStatus."""
    nodes = [node for node in found.node_states if status.Name(node.status) != "DEAD"]
    return RayState(
        True, tuple(_node(n, status.Name(n.status)) for n in nodes),
        _counted((dict(r.request.resources_bundle), r.count) for r in found.pending_resource_requests),
        tuple(_gang(g.requests) for g in found.pending_gang_resource_requests),
        _counted((dict(r.request.resources_bundle), r.count)
                 for c in found.cluster_resource_constraints for r in c.resource_requests))


def _node(node: Any, status: str) -> RayNode:
    idle = status == "IDLE" or (status == "DRAINING" and node.idle_duration_ms > 0)
    return RayNode(node.node_id.hex(), dict(node.labels).get(LABEL, ""), _plain(node.total_resources),
                   _plain(node.available_resources), status == "DRAINING",
                   node.idle_duration_ms / 1000 if idle else 0.0)


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Return a node's resources without those that each node has one of, its address and its role."""
    return {name: amount for name, amount in sorted(resources.items()) if not name.startswith("node:")}


def _counted(found: Iterable[tuple[dict[str, float], int]]) -> tuple[RayRequest, ...]:
    return tuple(RayRequest(dict(sorted(resources.items())), count) for resources, count in found)


def _gang(requests: Any) -> RayGang:
    constraints = [c for r in requests for c in r.placement_constraints]
    return RayGang(_counted((dict(r.resources_bundle), 1) for r in requests),
                   spread=any(c.HasField("anti_affinity") for c in constraints),
                   pack=any(c.HasField("affinity") for c in constraints))
