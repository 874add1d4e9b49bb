"""Ray's own message about its resources, as the fleet reads it: the names and enums of the installed release."""

from __future__ import annotations

import pytest

from spotfleet.protocol.ray_cluster import RayGang, RayNode, RayRequest, RayState
from spotfleet.ray.cluster.gcs import Gcs, state_of

pb = pytest.importorskip("ray.core.generated.autoscaler_pb2")


def node(number: int, status: str, host: str = "", idle_ms: int = 0) -> object:
    found = pb.NodeState(node_id=bytes([number]), status=pb.NodeStatus.Value(status), idle_duration_ms=idle_ms)
    found.total_resources.update({"CPU": 2.0, "node:10.0.0.1": 1.0})
    found.available_resources.update({"CPU": 1.0})
    if host:
        found.labels["spotfleet-host"] = host
    return found


def test_nodes_requests_gangs_and_constraints_are_read_from_rays_message():
    message = pb.ClusterResourceState()
    message.node_states.extend([node(1, "RUNNING"), node(2, "IDLE", "f-1", 2500), node(3, "DRAINING", "f-2"),
                                node(4, "DEAD", "f-3")])
    waits = message.pending_resource_requests.add(count=2)
    waits.request.resources_bundle.update({"GPU": 1.0, "CPU": 1.0})
    gang = message.pending_gang_resource_requests.add()
    for _ in range(2):
        bundle = gang.requests.add()
        bundle.resources_bundle["CPU"] = 1.0
        bundle.placement_constraints.add().anti_affinity.label_name = "_PG"
    asked = message.cluster_resource_constraints.add().resource_requests.add(count=3)
    asked.request.resources_bundle["CPU"] = 4.0
    total, free, one = {"CPU": 2.0}, {"CPU": 1.0}, RayRequest({"CPU": 1.0})
    assert state_of(message, pb.NodeStatus) == RayState(
        True, (RayNode("01", "", total, free), RayNode("02", "f-1", total, free, idle_s=2.5),
               RayNode("03", "f-2", total, free, draining=True)),
        (RayRequest({"CPU": 1.0, "GPU": 1.0}, 2),), (RayGang((one, one), spread=True),), (RayRequest({"CPU": 4.0}, 3),))


def test_a_head_that_refuses_the_token_or_does_not_answer_counts_as_a_lost_connection(monkeypatch):
    from ray.exceptions import RpcError

    def refuse(address: str) -> None:
        raise RpcError("Unauthenticated")

    monkeypatch.setattr("ray._raylet.GcsClient", refuse)
    with pytest.raises(ConnectionError, match="Unauthenticated"):
        Gcs("127.0.0.9:6379")


def test_the_calls_that_drain_and_observe_exist():
    from ray._raylet import InnerGcsClient as GcsClient

    assert callable(GcsClient.get_cluster_resource_state) and callable(GcsClient.drain_node)
    assert pb.DRAIN_NODE_REASON_PREEMPTION != pb.DRAIN_NODE_REASON_IDLE_TERMINATION
