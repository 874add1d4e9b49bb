"""What waits in the fleet's Ray cluster makes hosts, and hosts that Ray gives up end. The cluster's state is given
here: the decisions have tests of their own, and tests/ray has a real cluster."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.dispatcher.dispatcher import Dispatcher
from spotfleet.model import CloudState, GroupSpec, Need, Nodes, Role
from spotfleet.protocol.ray_cluster import RayNode, RayRequest, RayState
from tests.support.dispatcher.fake_fleet import Stage, spec

ONE_CPU = {"CPU": 1.0}
HEAD = RayNode("head")


def node(host: str, *, idle_s: float = 0.0, draining: bool = False) -> RayNode:
    return RayNode(f"id-{host}", host, ONE_CPU, ONE_CPU if idle_s else {"CPU": 0.0}, draining, idle_s)


def waits(count: int, **resources: float) -> RayState:
    return RayState(True, (HEAD,), (RayRequest(resources, count),))


def give(stage: Stage, state: RayState) -> None:
    core = _dispatcher(stage).core
    core.ray_state = state
    core.step_soon()


def _dispatcher(stage: Stage) -> Dispatcher:
    assert stage.daemon is not None
    return stage.daemon.dispatcher


async def decided(stage: Stage) -> list[tuple[str, int, str]]:
    return [(e["group"], e["hosts"], e["why"]) for e in await stage.events("DemandDecided")]


def test_tasks_that_wait_make_hosts_and_an_idle_host_ends_once_ray_has_given_it_up(play):
    async def scene(stage: Stage) -> None:
        give(stage, waits(2, CPU=1.0))
        first, second = await stage.up(2)
        why = (await stage.call("GET", "/v1/status"))[1]["why"]
        assert "Ray: 2 tasks or actors wait" in why or "Ray: 2 not in the cluster yet" in why, why
        assert await decided(stage) == [("", 2, "2 tasks or actors wait for {'CPU': 1}")]

        give(stage, RayState(True, (HEAD, node(first), node(second, idle_s=400.0))))
        await stage.until("Ray is asked", lambda: second in _dispatcher(stage).ray._wish().releases)
        assert await stage.up(2) == [first, second]

        give(stage, RayState(True, (HEAD, node(first), node(second, idle_s=400.0, draining=True))))
        await stage.until("the idle host is gone", lambda: _running(stage) == [first])
        assert [e["request_id"] for e in await stage.events("HostDraining")] == [second]
        assert (await decided(stage))[-1] == ("", 1, "1 host with Ray's work")

    play(scene, spec(3, 0))


def test_a_gpu_task_makes_a_host_of_the_gpu_group_and_one_that_fits_no_group_is_reported(play):
    groups = tuple(GroupSpec(name, Nodes(0, 2, 2), (Need(instance_type=kind),))
                   for name, kind in (("gpu", "gpu.small"), ("cpu", "cpu.small")))
    fleet = replace(spec(4, 0), groups=groups, any_of=tuple(n for g in groups for n in g.any_of))

    async def scene(stage: Stage) -> None:
        give(stage, RayState(True, (HEAD,), (RayRequest({"GPU": 1.0}), RayRequest({"GPU": 8.0}, 3))))
        await stage.up(1)
        assert [e["offer"]["instance_type"] for e in await stage.events("LaunchIntended")] == ["gpu.small"]
        assert [group for group, _, _ in await decided(stage)] == ["gpu"]
        [unmet] = await stage.events("DemandUnmet")
        assert list(unmet["shapes"]) == ["{'GPU': 8}"]
        assert "3 tasks or actors wait for {'GPU': 8}, which fits no host" in (
            await stage.call("GET", "/v1/status"))[1]["why"]

    play(scene, fleet)


def _running(stage: Stage) -> list[str]:
    return sorted(h.request_id for h in stage.cloud.hosts("f") if h.role is Role.WORKER
                  and h.state is CloudState.RUNNING)
