"""Hosts that follow demand, and named groups of hosts: how many there should be, and the plan of all together."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.fleet.cost.groups import FleetLedgers, grouped
from spotfleet.fleet.domain.actions import group_of, request_id
from spotfleet.fleet.domain.events import (
    FleetCreated,
    HostListed,
    LaunchIntended,
    LaunchRefused,
    NodesChanged,
    PolicyDecided,
)
from spotfleet.fleet.domain.state import FleetState, Host, fold, of_group
from spotfleet.fleet.planner.groups import (
    GroupHosts,
    IdleTime,
    JobAsk,
    Wish,
    by_group,
    demanded,
    follows_demand,
    in_use,
    limits_of_groups,
)
from spotfleet.fleet.planner.listing_diff import new_events
from spotfleet.fleet.planner.plan import Drain, Launch, Observed, Terminate, Wanted, missing_needs, plan
from spotfleet.model import (
    BillingRules,
    CloudHost,
    CloudState,
    GroupSpec,
    HostState,
    Market,
    Need,
    Nodes,
    Offer,
    Role,
    Run,
    all_nodes,
)

UP, LAUNCHING = HostState.UP, HostState.LAUNCHING
CPU = Offer("fake", "r", "a", "c5", Market.SPOT, 1, 100_000, 300_000)
GPU = Offer("fake", "r", "a", "g5", Market.SPOT, 4, 1_000_000, 3_000_000, "A10G")
ANY, CARD = (Need(instance_type="c5"),), (Need(accelerator="A10G"),)
NONE = Nodes(0, 4, 4, 300.0)


def host(name: str, group: str = "", state: HostState = UP, offer: Offer = CPU, **more) -> Host:
    return Host(name, Role.WORKER, offer, state, 0.0, 0.0, 0.0, provider_id=f"i-{name}", cloud=CloudState.RUNNING,
                group=group, **more)


def state(*hosts: Host) -> FleetState:
    return FleetState(hosts=hosts, launches=len(hosts))


def want(cpu: int, gpu: int, **more) -> Wanted:
    whole = Wanted("f", Role.WORKER, cpu + gpu, (*ANY, *CARD), stays=True, **more)
    parts = (replace(whole, hosts=cpu, any_of=ANY, group="cpu"), replace(whole, hosts=gpu, any_of=CARD, group="gpu"))
    return replace(whole, parts=parts)


# ---- how many


def test_without_a_job_a_fleet_that_follows_demand_has_no_host():
    assert follows_demand(NONE) and not follows_demand(Nodes(1, 4, 4))
    assert demanded(NONE, 1, []) == GroupHosts(0, "no job needs a host")


def test_a_job_makes_the_hosts_come_that_its_workers_need():
    assert demanded(NONE, 4, [JobAsk("a-1", 6, 2)]) == GroupHosts(2, "a-1 asks for 6 workers")
    assert demanded(NONE, 4, [JobAsk("a-1", 3, 3, per_host=True)]) == GroupHosts(3, "a-1 asks for 3 hosts")


def test_jobs_on_their_own_hosts_add_up_to_the_target_and_their_least_to_the_max():
    few = Nodes(0, 2, 4)
    assert demanded(few, 1, [JobAsk("a-1", 4, 1), JobAsk("b-2", 1, 1)]).hosts == 2
    assert demanded(few, 1, [JobAsk("a-1", 3, 3)]).hosts == 3
    assert demanded(few, 1, [JobAsk("a-1", 9, 9)]) == GroupHosts(4, "a-1 asks for 9 workers, nodes.max is 4")


def test_while_no_offer_shows_the_slots_a_job_gets_one_host():
    assert demanded(NONE, 0, [JobAsk("a-1", 8, 8)]).hosts == 1


def test_hosts_stay_until_they_have_been_idle_for_long():
    assert demanded(NONE, 1, [], kept=2) == GroupHosts(2, "2 hosts not idle for 5 min yet")
    assert demanded(NONE, 1, [JobAsk("a-1", 1, 1)], kept=2) == GroupHosts(
        2, "a-1 asks for 1 worker, 1 host not idle for 5 min yet")


def test_a_wish_comes_on_top_of_the_jobs_within_the_range():
    wish = Wish(2, "Ray: 2 tasks wait for a GPU")
    assert demanded(NONE, 1, [JobAsk("a-1", 1, 1)], wish).hosts == 3
    assert demanded(NONE, 1, [], replace(wish, hosts=9)) == GroupHosts(4, f"{wish.why}, nodes.max is 4")
    assert demanded(Nodes(1, 4, 4), 1, [], Wish(0, "")) == GroupHosts(1, "no job needs a host, nodes.min is 1")
    assert follows_demand(Nodes(1, 4, 4), wish)


def test_a_job_of_no_group_takes_the_room_of_groups_that_have_hosts_anyway_first():
    ranges = {"new": Nodes(0, 2, 2), "old": Nodes(2, 2, 2)}
    asks = by_group([JobAsk("a-1", 3, 1), JobAsk("b-2", 1, 1, group="new")], ranges, {"new": 1, "old": 1})
    assert asks == {"new": [JobAsk("b-2", 1, 1, group="new"), JobAsk("a-1", 1, 0, group="new")],
                    "old": [JobAsk("a-1", 2, 1, group="old")]}
    assert by_group([JobAsk("a-1", 3, 1)], {"": NONE}, {}) == {"": [JobAsk("a-1", 3, 1)]}


def test_a_host_is_idle_from_the_end_of_its_work():
    idle = IdleTime().after(["f-0", "f-1"], frozenset({"f-0"}), 10.0)
    assert idle.over(5.0, 15.0) == {"f-1": 5.0}
    idle = idle.after(["f-0", "f-1"], frozenset({"f-1"}), 20.0)
    assert idle.over(5.0, 24.0) == {} and idle.over(5.0, 25.0) == {"f-0": 5.0}
    assert idle.after(["f-1"], frozenset(), 30.0).over(0.0, 30.0) == {"f-1": 0.0}


def test_hosts_that_leave_or_have_been_idle_for_long_do_not_count_as_used():
    hosts = state(host("f-0"), host("f-1"), host("f-2", notice_deadline=9.0), host("f-3", state=HostState.DRAINING),
                  host("f-4", state=LAUNCHING), host("f-5", "gpu"))
    assert in_use(hosts, "", {"f-0": 300.0}) == 2


# ---- the plan


def test_each_group_gets_its_own_machines_and_the_numbers_of_hosts_stay_unique():
    actions = plan(want(1, 1), state(), [CPU, GPU], Observed(), 0.0)
    assert [(a.request_id, a.offer, a.group) for a in actions if isinstance(a, Launch)] == [
        ("f-cpu-0", CPU, "cpu"), ("f-gpu-1", GPU, "gpu")]
    assert set(missing_needs(want(1, 0), state(), Observed(), 0.0)) == set(ANY)


def test_a_lost_host_is_replaced_in_its_group():
    lost = state(host("f-cpu-0", "cpu"), host("f-gpu-1", "gpu", HostState.DRAINING, GPU))
    assert [a.request_id for a in plan(want(1, 1), lost, [CPU, GPU], Observed(), 0.0)] == ["f-gpu-2"]


def test_one_group_without_hosts_is_no_fleet_that_goes_down():
    up = state(host("f-cpu-0", "cpu"), host("f-gpu-1", "gpu", offer=GPU))
    (drain,) = plan(want(1, 0), up, [CPU, GPU], Observed(idle={"f-gpu-1": 300.0}), 0.0)
    assert drain == Drain("f-gpu-1", "without work for 5 min; 1 host, 0 wanted")


def test_a_fleet_without_demand_gives_its_idle_hosts_back_with_the_reason():
    wanted = Wanted("f", Role.WORKER, 0, stays=True, why="no job needs a host")
    actions = plan(wanted, state(host("f-0")), [], Observed(idle={"f-0": 300.0}), 0.0)
    assert actions == [Drain("f-0", "without work for 5 min; 1 host, 0 wanted: no job needs a host")]


def test_the_host_that_has_been_idle_for_long_goes_before_one_that_boots():
    wanted = Wanted("f", Role.WORKER, 1, stays=True)
    (end,) = plan(wanted, state(host("f-0"), host("f-1", state=LAUNCHING)), [], Observed(idle={"f-0": 300.0}), 0.0)
    assert end.request_id == "f-0"


def test_a_launch_names_the_job_that_asked_for_it():
    wanted = Wanted("f", Role.WORKER, 1, stays=True, why="a-1 asks for 1 worker")
    (launch,) = plan(wanted, state(), [CPU], Observed(), 0.0)
    assert launch.why == "1 host missing; $0.10/h in fake/a/c5/spot: a-1 asks for 1 worker"


def test_a_fleet_that_goes_down_ends_the_hosts_of_all_groups():
    up = state(host("f-cpu-0", "cpu"), host("f-gpu-1", "gpu", LAUNCHING, GPU))
    assert plan(Wanted("f", Role.WORKER, 0), up, [], Observed(), 0.0) == [
        Drain("f-cpu-0", "the fleet goes down"), Terminate("f-gpu-1", "the fleet goes down")]


def test_a_host_of_no_group_is_given_back():
    (end,) = plan(want(0, 0), state(host("f-tpu-0", "tpu")), [], Observed(), 0.0)
    assert end == Drain("f-tpu-0", "1 host, 0 wanted: in no group of the fleet file")


def test_the_limit_on_the_price_is_that_of_all_groups_together():
    up = state(host("f-cpu-0", "cpu"), host("f-gpu-1", "gpu", offer=GPU))
    assert limits_of_groups(want(1, 1, max_micros_h=1_500_000), up) == {"cpu": 500_000, "gpu": 1_400_000}
    assert limits_of_groups(want(1, 1, max_micros_h=800_000), up) == {"cpu": 100_000, "gpu": 700_000}
    actions = plan(want(4, 1, max_micros_h=1_250_000), state(), [CPU, GPU], Observed(), 0.0)
    launched = [a.offer for a in actions if isinstance(a, Launch)]
    assert launched == [CPU] * 4  # $0.85 are left, and a host with a GPU costs $1.00
    over = plan(want(1, 1, max_micros_h=1_000_000), up, [CPU, GPU], Observed(), 0.0)
    assert [a.request_id for a in over if isinstance(a, Drain)] == ["f-gpu-1"]


# ---- names


def test_the_name_of_a_host_shows_its_group_to_a_dispatcher_that_lost_the_ledger():
    wanted = Wanted("my-fleet", Role.WORKER, 1, group="gpu")
    assert request_id(wanted, 7) == "my-fleet-gpu-7"
    assert group_of("my-fleet", "my-fleet-gpu-7") == group_of("my-fleet", "my-fleet-gpu-7~i-0") == "gpu"
    assert [group_of("my-fleet", name) for name in ("my-fleet-7", "my-fleet-d-0", "my-fleet-a-b-0")] == ["", "", ""]


def test_groups_share_jobs_if_their_machines_are_of_one_kind():
    spot = GroupSpec("a", Nodes(), (Need(accelerator="T4", accelerator_count=1),))
    assert spot.kind == replace(spot, any_of=(Need(accelerator="T4", accelerator_count=1, use_spot=False),)).kind
    assert spot.kind != replace(spot, any_of=ANY).kind
    assert all_nodes([Nodes(0, 2, 4, 60.0), Nodes(1, 1, 1)]) == Nodes(1, 3, 5, 300.0)


def test_a_host_that_only_the_cloud_lists_is_adopted_into_its_group():
    line = CloudHost("f-gpu-3", "i-3", "f", Role.WORKER, GPU, CloudState.RUNNING, (Run(1.0),))
    assert fold(new_events(None, line, 5.0)).hosts[0].group == "gpu"


# ---- the ledger


def launched(name: str, group: str, at: float = 1.0) -> LaunchIntended:
    return LaunchIntended(at, name, Role.WORKER, GPU, "", group=group)


CREATED = FleetCreated(0.0, "f", "fake", Nodes(0, 4, 4), BillingRules(), {"cpu": NONE, "gpu": NONE})


def test_the_range_of_one_group_changes_and_the_whole_with_it():
    found = fold([CREATED, NodesChanged(1.0, Nodes(1, 1, 1), "asked", "gpu")])
    assert found.groups == {"cpu": NONE, "gpu": Nodes(1, 1, 1)} and found.nodes == Nodes(1, 5, 5)


def test_refusals_and_decisions_of_one_group_are_no_news_for_another():
    found = fold([CREATED, launched("f-gpu-0", "gpu"), LaunchRefused(2.0, "f-gpu-0", "pool", "none left"),
                  launched("f-cpu-1", "cpu", 3.0), PolicyDecided(4.0, 1, 1, "refused", "auto", group="gpu")])
    gpu, cpu = of_group(found, "gpu"), of_group(found, "cpu")
    assert [p.available for p in gpu.history.availability.periods] == [False] and gpu.history.decided is not None
    assert not cpu.history.availability.periods and cpu.history.decided is None
    assert not gpu.hosts and [h.request_id for h in cpu.hosts] == ["f-cpu-1"]


def test_where_demand_decides_spot_is_available_if_half_of_those_that_were_asked_for_come():
    """Not half of `nodes.target`, which nobody may have asked for."""
    up = HostListed(2.0, "f-gpu-0", "i-0", CloudState.RUNNING, (Run(2.0),))
    found = of_group(fold([CREATED, launched("f-gpu-0", "gpu"), up]), "gpu")
    assert [p.available for p in found.history.availability.periods] == [True]


def test_the_bill_by_group_has_a_row_for_each_group_and_for_the_dispatcher():
    def ran(name: str, group: str, role: Role, until: float) -> list:
        return [LaunchIntended(0.0, name, role, CPU, "", group=group),
                HostListed(0.0, name, f"i-{name}", CloudState.TERMINATED, (Run(0.0, until),))]

    events = [CREATED, *ran("f-d-0", "", Role.DISPATCHER, 7200.0), *ran("f-cpu-0", "cpu", Role.WORKER, 3600.0),
              *ran("f-gpu-1", "gpu", Role.WORKER, 1800.0), *ran("f-gpu-2", "gpu", Role.WORKER, 1800.0)]
    rows = grouped([FleetLedgers("f", tuple(events), 7200.0)], "group")
    assert sorted((row.key, row.micros, row.seconds) for row in rows) == [
        ("(dispatcher)", 200_000, 7200), ("cpu", 100_000, 3600), ("gpu", 100_000, 3600)]
