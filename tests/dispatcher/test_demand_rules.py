"""What the dispatcher makes of the demand of its Ray cluster, without a fleet."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spotfleet.dispatcher import demand as demand_module
from spotfleet.dispatcher.cloud.group_sizes import GroupSizes
from spotfleet.dispatcher.demand import DemandController
from spotfleet.fleet.domain.events import DemandDecided, DemandUnmet
from spotfleet.fleet.planner.groups import OutsideDemand
from spotfleet.model import RAY_KIND, FleetSpec, HostState, JobState, Market, Nodes, Offer, Role
from spotfleet.protocol.ray_cluster import RayNode, RayRequest, RayState

SMALL = Offer("local", "local", "local-a", "cpu.small", Market.SPOT, 1, 30_000, 90_000)
TINY = Offer("local", "local", "local-a", "cpu.tiny", Market.SPOT, 1, 10_000, 30_000)
ONE = {"CPU": 1.0}


class Scene:
    """A fleet's hosts and jobs, and its Ray cluster."""

    def __init__(self, hosts: int = 0, nodes: Nodes = Nodes(0, 4, 4), *, job: bool = True, most: int = 4) -> None:
        self.views = [SimpleNamespace(host=_host(f"h-{n}"), closed=False) for n in range(hosts)]
        spec = SimpleNamespace(kind=RAY_KIND, min_workers=1, max_workers=most)
        self.job = SimpleNamespace(spec=spec, state=JobState.RUNNING, sizing=SimpleNamespace(asked=0, least=1),
                                   workers=SimpleNamespace(hosts=set))
        self.events: list[Any] = []
        self.accepts: set[str] = set()
        self.groups = SimpleNamespace(outside=OutsideDemand(), offered={"": (SMALL,)}, of_jobs=lambda: {"": 0})
        journal = SimpleNamespace(state=SimpleNamespace(hosts=()), note=lambda *e: self.events.extend(e))
        self.core: Any = SimpleNamespace(
            ray_state=None, jobs={"ray": self.job} if job else {}, ranges={"": nodes}, views=lambda: self.views,
            boot=SimpleNamespace(spec=FleetSpec("f")), drains={}, journal=journal, unix=lambda: 0.0,
            tick_soon=lambda: None)
        machines: Any = SimpleNamespace(groups=self.groups)
        self.demand = DemandController(self.core, machines, lambda host: host in self.accepts)

    def look(self, state: RayState | None) -> int:
        """Return the hosts that Ray wants, once the state has held for long enough."""
        self.core.ray_state = state
        self.demand.step()
        return sum(wish.hosts for wish in self.groups.outside.wished.values())


@pytest.fixture(autouse=True)
def passing_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is ten seconds later."""
    ticks = iter(range(0, 100_000, 10))
    monkeypatch.setattr(demand_module.time, "monotonic", lambda: float(next(ticks)))


def _host(name: str) -> Any:
    return SimpleNamespace(request_id=name, role=Role.WORKER, state=HostState.UP, group="", offer=SMALL)


def idle(host: str, idle_s: float = 400.0) -> RayNode:
    return RayNode(f"id-{host}", host, ONE, ONE, False, idle_s)


def waits(count: int, *nodes: RayNode, **resources: float) -> RayState:
    return RayState(True, nodes, (RayRequest(resources or ONE, count),))


def test_each_number_of_hosts_is_an_event_once():
    scene = Scene()
    assert [scene.look(waits(2)), scene.look(waits(2)), scene.look(waits(3))][-1] == 3
    assert scene.look(waits(3)) == 3
    assert [(e.hosts, e.why) for e in scene.events] == [
        (2, "2 tasks or actors wait for {'CPU': 1}"), (3, "3 tasks or actors wait for {'CPU': 1}")]
    assert all(isinstance(e, DemandDecided) for e in scene.events)


def test_a_shape_that_waits_in_vain_is_an_event_once_and_stands_in_the_status():
    scene = Scene()
    for count in (1, 2, 2):
        scene.look(waits(count, GPU=1.0))
    scene.look(waits(1))
    scene.look(waits(1))
    unmet = [set(e.shapes) for e in scene.events if isinstance(e, DemandUnmet)]
    assert unmet == [{"{'GPU': 1}"}, set()]
    scene.look(waits(2, GPU=1.0))
    scene.look(waits(2, GPU=1.0))
    assert scene.demand.lines() == ["Ray: 2 tasks or actors wait for {'GPU': 1}, which fits no host: the largest has "
                                    "{'CPU': 1}"]


def test_an_idle_host_leaves_once_ray_has_accepted_that_and_not_before():
    scene = Scene(2)
    state = RayState(True, (idle("h-0"), idle("h-1", 10.0)))
    scene.look(state)
    assert scene.core.drains == {}
    scene.accepts = {"h-0", "h-1"}
    scene.look(state)
    assert scene.core.drains == {"h-0": "idle for 7 min, and no task needs it"}


def test_a_host_leaves_although_ray_has_ended_its_node_before_the_next_look(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(2)
    monkeypatch.setattr(demand_module.time, "monotonic", lambda: 50.0)
    scene.look(RayState(True, (idle("h-0"), idle("h-1", 10.0))))
    scene.accepts = {"h-0"}
    scene.look(RayState(True, (idle("h-1", 11.0),)))
    assert scene.core.drains == {"h-0": "idle for 7 min, and no task needs it"}


def test_a_host_whose_node_ends_long_after_ray_has_refused_its_release_stays(monkeypatch: pytest.MonkeyPatch):
    scene, now = Scene(2), [50.0]
    monkeypatch.setattr(demand_module.time, "monotonic", lambda: now[0])
    scene.look(RayState(True, (idle("h-0"), idle("h-1", 10.0))))
    scene.accepts, now[0] = {"h-0"}, 50.0 + demand_module.ASKED_S
    scene.look(RayState(True, (idle("h-1", 11.0),)))
    assert scene.core.drains == {}


def test_the_cluster_keeps_its_hosts_and_gets_none_while_its_head_has_not_reported():
    scene = Scene(2)
    assert scene.look(None) == 2
    assert scene.groups.outside.wished[""].hosts == 2


def test_a_fleet_without_a_ray_cluster_has_no_wish_and_one_whose_cluster_ends_no_more():
    assert Scene(2, job=False).look(None) == 0
    scene = Scene(2)
    scene.look(waits(3))
    assert scene.groups.outside.wished
    scene.core.jobs = {}
    scene.look(None)
    assert scene.groups.outside == OutsideDemand()


def test_rays_job_gets_just_the_hosts_that_its_demand_makes_and_no_more_than_its_most():
    scene = Scene(most=3)
    scene.look(waits(2))
    scene.look(waits(2))
    assert (scene.job.sizing.asked, scene.job.sizing.least) == (2, 1)
    scene.look(waits(9))
    assert scene.look(waits(9)) == 3


def test_a_cluster_without_demand_begins_without_a_host_so_that_other_jobs_get_theirs_first():
    scene = Scene()
    scene.look(RayState(True))
    assert scene.job.sizing.least == 0


def test_a_job_that_waits_takes_no_host_with_rays_work():
    scene = Scene(4)
    scene.groups.of_jobs = lambda: {"": 2}
    scene.look(RayState(True, tuple(idle(f"h-{n}", 0.0) for n in range(4))))
    assert scene.job.sizing.asked == 4


def test_a_host_that_has_just_begun_to_leave_is_not_kept_by_having_worked_a_moment_ago():
    scene = Scene(2)
    hosts = [SimpleNamespace(request_id=f"h-{n}", role=Role.WORKER, group="", counts=True, notice_deadline=None)
             for n in range(2)]
    scene.core.journal.state.hosts = hosts
    for view in scene.views:
        view.slots = 1
    sizes = GroupSizes(scene.core)
    scene.core.jobs = {}
    assert sizes.sizes(0.0)[""].hosts == 2
    scene.core.drains["h-1"] = "idle for 5 min, and no task needs it"
    assert sizes.sizes(0.0)[""].hosts == 1


def test_the_cheaper_group_is_used_and_a_host_is_as_its_nodes_are():
    scene = Scene()
    scene.core.ranges = {"large": Nodes(0, 4, 4), "tiny": Nodes(0, 4, 4)}
    scene.groups.offered = {"large": (SMALL,), "tiny": (TINY,)}
    scene.groups.of_jobs = lambda: {}
    scene.look(waits(1))
    scene.look(waits(1))
    assert {g: w.hosts for g, w in scene.groups.outside.wished.items()} == {"tiny": 1, "large": 0}
    scene = Scene(1)
    big = RayNode("id", "h-0", {"CPU": 4.0}, {"CPU": 0.0})
    scene.look(waits(4, big))
    assert scene.look(waits(4, big)) == 2  # one host more has room for all four


@pytest.mark.parametrize(("kind", "gpu", "task", "expected"), [
    ("g4dn.2xlarge", "T4", {"CPU": 4.0}, 2), ("g4dn.2xlarge", "T4", {"GPU": 1.0}, 3),
    ("unheard.large", "", {"CPU": 64.0}, 1), ("unheard.large", "T4", {"GPU": 1.0}, 1)])
def test_before_a_node_is_up_a_host_is_as_the_catalog_has_its_machine_and_one_is_tried_of_an_unknown_kind(
    kind: str, gpu: str, task: dict[str, float], expected: int
):
    scene = Scene()
    scene.core.boot.spec = FleetSpec("f", "aws")
    scene.groups.offered = {"": (Offer("aws", "us-east-1", "us-east-1a", kind, Market.SPOT, 1, 70_000, 1, gpu),)}
    scene.look(waits(3, **task))
    assert scene.look(waits(3, **task)) == expected


def test_hosts_of_an_unknown_kind_stay_while_the_head_has_not_reported():
    scene = Scene(3)
    scene.core.boot.spec = FleetSpec("f", "aws")
    scene.groups.offered = {"": (replace(SMALL, provider="aws"),)}
    assert scene.look(None) == 3
