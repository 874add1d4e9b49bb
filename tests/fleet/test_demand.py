"""What waits in a Ray cluster becomes hosts, by group; idle hosts end. Random histories: `test_demand_histories.py`."""

from __future__ import annotations

from spotfleet.fleet.planner.demand import CONFIRM_S, DemandGroup, DemandHost, DemandPlan, RecentStates, plan_demand
from spotfleet.protocol.ray_cluster import RayGang, RayNode, RayRequest, RayState

CPU_HOST, GPU_HOST = {"CPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}


def node(host: str, total: dict[str, float], used: dict[str, float] | None = None, *, idle_s: float = 1.0,
         draining: bool = False) -> RayNode:
    free = {r: amount - (used or {}).get(r, 0.0) for r, amount in total.items()}
    return RayNode(f"id-{host}", host, total, free, draining, 0.0 if used else idle_s)


def cpus(*hosts: DemandHost, least: int = 0, most: int = 9, jobs: int = 0) -> DemandGroup:
    return DemandGroup("cpu", least, most, CPU_HOST, hosts, jobs=jobs)


def gpus(*hosts: DemandHost, least: int = 0, most: int = 9) -> DemandGroup:
    return DemandGroup("gpu", least, most, GPU_HOST, hosts)


def state(*nodes: RayNode, waits: tuple[RayRequest, ...] = (), gangs: tuple[RayGang, ...] = (),
          keeps: tuple[RayRequest, ...] = ()) -> RayState:
    return RayState(True, nodes, waits, gangs, keeps)


def task(count: int = 1, **resources: float) -> RayRequest:
    return RayRequest(resources, count)


def plan(found: RayState, *groups: DemandGroup) -> DemandPlan:
    return plan_demand([found], groups)


def new(found: RayState, *groups: DemandGroup) -> list[int]:
    return [g.new for g in plan(found, *groups).groups]


def unmet(found: DemandPlan) -> list[str]:
    return [one.why for one in found.unmet]


def ends(found: RayState, *groups: DemandGroup) -> list[str]:
    return [host for host, _ in plan(found, *groups).ends]


# ---- what waits


def test_tasks_that_wait_make_as_many_hosts_as_first_fit_takes_with_the_reason():
    [found] = plan(state(waits=(task(5, CPU=1),)), cpus()).groups
    assert (found.hosts, found.new, found.why) == (2, 2, "5 tasks or actors wait for {'CPU': 1}")


def test_the_largest_pieces_are_packed_first():
    assert new(state(waits=(task(2, CPU=1), task(2, CPU=3))), cpus()) == [2]


def test_free_room_of_nodes_that_stay_is_used_before_a_host_is_bought():
    used = state(node("h-0", CPU_HOST, {"CPU": 3.0}), waits=(task(1, CPU=1),))
    assert new(used, cpus(DemandHost("h-0"))) == [0]
    full = state(node("h-0", CPU_HOST, {"CPU": 4.0}), waits=(task(1, CPU=1),))
    assert new(full, cpus(DemandHost("h-0"))) == [1]


def test_a_host_that_boots_counts_as_free():
    assert new(state(waits=(task(4, CPU=1),)), cpus(DemandHost("h-0"))) == [0]
    assert new(state(waits=(task(5, CPU=1),)), cpus(DemandHost("h-0"))) == [1]


def test_a_draining_node_offers_no_room():
    drains = state(node("h-0", CPU_HOST, draining=True), waits=(task(1, CPU=1),))
    assert new(drains, cpus(DemandHost("h-0", leaving=True))) == [1]
    assert new(drains, cpus(DemandHost("h-0"))) == [1]  # drained by others: the fleet does not know it yet


def test_the_work_of_a_host_that_leaves_is_replaced_before_it_is_gone():
    leaves = state(node("h-0", CPU_HOST, {"CPU": 2.0}, draining=True))
    [found] = plan(leaves, cpus(DemandHost("h-0", leaving=True))).groups
    assert (found.hosts, found.why) == (1, "h-0 leaves and runs {'CPU': 2}")


def test_what_waits_may_be_the_work_that_leaves_so_both_are_not_added():
    leaves = state(node("h-0", CPU_HOST, {"CPU": 4.0}, draining=True), waits=(task(1, CPU=4),))
    assert new(leaves, cpus(DemandHost("h-0", leaving=True))) == [1]


def test_a_gpu_task_makes_a_gpu_host_and_a_cpu_task_does_not():
    both = state(waits=(task(1, GPU=1), task(1, CPU=1)))
    assert new(both, cpus(), gpus()) == [0, 1]  # the GPU host has room for the other as well
    assert new(state(waits=(task(1, CPU=1),)), cpus(), gpus()) == [1, 0]


def test_the_next_group_that_fits_is_used_once_there_may_be_no_more_of_the_first():
    small, large = DemandGroup("small", 0, 1, {"CPU": 2.0}), DemandGroup("large", 0, 9, {"CPU": 4.0})
    assert new(state(waits=(task(6, CPU=1),)), small, large) == [1, 1]


def test_a_gpu_host_is_bought_for_a_cpu_task_only_where_no_other_kind_fits():
    full = plan(state(waits=(task(5, CPU=1),)), cpus(most=1), gpus())
    assert [g.new for g in full.groups] == [1, 0]
    assert unmet(full) == ["5 tasks or actors wait for {'CPU': 1}: there may be no more hosts than 1 of group cpu"]
    assert new(state(waits=(task(1, CPU=6),)), cpus(), gpus()) == [0, 1]


def test_a_request_that_fits_no_host_is_reported_with_the_largest_one_and_not_bought():
    found = plan(state(waits=(task(2, GPU=2),)), cpus(), gpus())
    assert [g.new for g in found.groups] == [0, 0]
    assert unmet(found) == ["2 tasks or actors wait for {'GPU': 2}, which fits no host: the largest of group gpu has "
                            "{'CPU': 8, 'GPU': 1}"]
    assert unmet(plan(state(waits=(task(1, TPU=1),)), cpus())) == [
        "1 task or actor waits for {'TPU': 1}, which fits no host: the largest of group cpu has {'CPU': 4}"]


def test_the_range_of_a_group_limits_what_is_bought():
    assert new(state(waits=(task(99, CPU=1),)), cpus(DemandHost("h-0"), most=3)) == [2]
    assert [g.hosts for g in plan(state(), cpus(least=2)).groups] == [2]


def test_the_cluster_gets_no_more_hosts_than_it_may_have_in_all_groups():
    waits = state(waits=(task(2, GPU=1), task(25, CPU=1)))
    limited = plan_demand([waits], [cpus(DemandHost("h-0", held=True)), gpus()], 3)
    assert [g.new for g in limited.groups] == [1, 2]
    assert unmet(limited)[-1] == "25 tasks or actors wait for {'CPU': 1}: there may be no more hosts than 3 for Ray"


def test_hosts_up_to_min_are_room_for_what_waits():
    assert new(state(waits=(task(8, CPU=1),)), cpus(least=2)) == [2]


def test_work_inside_a_placed_group_is_no_request_for_a_host():
    inside = RayRequest({"CPU_group_0_1f": 1.0, "bundle_group_0_1f": 0.001}, 3)
    assert plan(state(waits=(inside,)), cpus()) == plan(state(), cpus())


# ---- placement groups, and room to keep


def test_a_placement_group_gets_all_of_its_hosts_or_none():
    gang = RayGang((task(3, CPU=4),))
    assert new(state(gangs=(gang,)), cpus(most=3)) == [3]
    none = plan(state(gangs=(gang,)), cpus(most=2))
    assert none.groups[0].new == 0
    assert unmet(none) == ["a placement group waits for 3 x {'CPU': 4}: there may be no more hosts than 2 of group cpu"]


def test_a_placement_group_that_does_not_fit_takes_no_room_from_what_waits():
    both = state(gangs=(RayGang((task(3, CPU=4),)),), waits=(task(8, CPU=1),))
    assert new(both, cpus(most=2)) == [2]


def test_strict_spread_takes_a_host_for_each_bundle_and_strict_pack_one_for_all():
    bundles = (task(2, CPU=1),)
    assert new(state(gangs=(RayGang(bundles, spread=True),)), cpus()) == [2]
    assert new(state(gangs=(RayGang((task(1, CPU=1), task(1, CPU=1)), spread=True),)), cpus()) == [2]
    assert new(state(gangs=(RayGang(bundles, pack=True),)), cpus()) == [1]
    over = plan(state(gangs=(RayGang((task(5, CPU=1),), pack=True),)), cpus())
    assert over.groups[0].new == 0
    assert unmet(over) == ["a placement group waits for 5 x {'CPU': 1} on one host, which fits no host: the largest of "
                           "group cpu has {'CPU': 4}"]


def test_room_to_keep_is_that_of_whole_hosts_whatever_runs_there():
    full = node("h-0", CPU_HOST, {"CPU": 4.0})
    assert new(state(full, keeps=(task(4, CPU=1),)), cpus(DemandHost("h-0"))) == [0]
    [found] = plan(state(full, keeps=(task(6, CPU=1),)), cpus(DemandHost("h-0"))).groups
    assert (found.new, found.why) == (1, "a program keeps room for 6 x {'CPU': 1}")


def test_an_idle_host_stays_while_a_program_keeps_its_room():
    idle = node("h-0", CPU_HOST, idle_s=999.0)
    assert ends(state(idle, keeps=(task(1, CPU=1),)), cpus(DemandHost("h-0"))) == []


# ---- ends


def test_the_host_that_has_been_idle_longest_ends_first_within_the_range():
    nodes = [node(f"h-{n}", CPU_HOST, idle_s=s) for n, s in enumerate((301.0, 299.0, 400.0, 350.0))]
    hosts = [DemandHost(f"h-{n}") for n in range(4)]
    assert ends(state(*nodes), cpus(*hosts)) == ["h-2", "h-3", "h-0"]
    assert ends(state(*nodes), cpus(*hosts, least=2)) == ["h-2", "h-3"]
    why = dict(plan(state(*nodes), cpus(*hosts)).ends)["h-2"]
    assert why == "idle for 7 min, and no task needs it"


def test_no_host_ends_that_runs_something_or_that_a_waiting_request_fits():
    busy, idle = node("h-0", CPU_HOST, {"CPU": 1.0}), node("h-1", CPU_HOST, idle_s=999.0)
    hosts = DemandHost("h-0"), DemandHost("h-1")
    assert ends(state(busy, idle), cpus(*hosts)) == ["h-1"]
    assert ends(state(busy, idle, waits=(task(1, CPU=1),)), cpus(*hosts)) == []  # it fits h-0, but h-1, too
    assert ends(state(busy, idle, waits=(task(1, GPU=1),)), cpus(*hosts)) == ["h-1"]


def test_work_that_leaves_holds_the_idle_host_that_it_fits():
    leaves, idle = node("h-0", CPU_HOST, {"CPU": 2.0}, draining=True), node("h-1", CPU_HOST, idle_s=999.0)
    assert ends(state(leaves, idle), cpus(DemandHost("h-0", leaving=True), DemandHost("h-1"))) == []


def test_a_host_that_never_gets_a_node_ends_once_nothing_waits_for_it():
    late = DemandHost("h-0", unseen_s=400.0)
    assert ends(state(waits=(task(1, CPU=1),)), cpus(late)) == []
    assert plan(state(), cpus(late)).ends == (
        ("h-0", "without a node in the Ray cluster for 7 min, and no task needs it"),)


def test_nothing_is_bought_and_nothing_ends_while_the_cluster_does_not_answer():
    hosts = DemandHost("h-0", unseen_s=999.0), DemandHost("h-1")
    down = RayState(False, problem="the head is lost")
    assert [g.hosts for g in plan(down, cpus(*hosts)).groups] == [2]
    assert plan(down, cpus(*hosts)).ends == ()
    before = state(node("h-0", CPU_HOST, idle_s=999.0), waits=(task(9, CPU=4),))
    assert plan_demand([down, before], [cpus(*hosts)]).groups[0].new == 0
    assert [g.hosts for g in plan_demand([], [cpus(*hosts, least=3)]).groups] == [3]


# ---- observations that disagree


def test_only_what_every_observation_of_the_last_moments_asks_for_is_bought():
    waits, runs = state(waits=(task(4, CPU=1),)), state(waits=(task(9, CPU=1),))
    assert [g.new for s in ([waits], [waits, runs], [state(), waits])
            for g in plan_demand(s, [cpus()]).groups] == [1, 1, 0]


def test_a_task_that_waits_and_runs_in_the_same_report_buys_nothing():
    host = cpus(DemandHost("h-0"))
    before = state(node("h-0", CPU_HOST), waits=(task(4, CPU=1),))
    both = state(node("h-0", CPU_HOST, {"CPU": 4.0}), waits=(task(4, CPU=1),))
    assert plan_demand([before, both], [host]).groups[0].new == 0


def test_no_host_ends_that_an_earlier_observation_of_the_last_moments_saw_in_use():
    idle, busy = node("h-0", CPU_HOST, idle_s=400.0), node("h-0", CPU_HOST, {"CPU": 1.0})
    assert plan_demand([state(busy), state(idle)], [cpus(DemandHost("h-0"))]).ends == ()


def test_an_observation_is_confirmed_once_it_has_held_for_long_enough():
    recent, first, second = RecentStates(), state(), state(waits=(task(1, CPU=1),))
    assert recent.update(first, 10.0) == (first,)
    assert recent.update(second, 20.0) == (first, second)
    assert recent.update(second, 20.0 + CONFIRM_S / 2) == (first, second)
    assert recent.update(second, 20.0 + CONFIRM_S) == (second,)


def test_what_has_just_begun_to_wait_is_not_reported_yet():
    waits = state(waits=(task(1, GPU=1),))
    assert unmet(plan_demand([waits], [cpus()])) != []
    assert unmet(plan_demand([state(), waits], [cpus()])) == []


# ---- jobs of the fleet itself


def test_jobs_get_hosts_besides_those_of_ray():
    waits = state(node("h-0", CPU_HOST, {"CPU": 4.0}), waits=(task(4, CPU=1),))
    [found] = plan(waits, cpus(DemandHost("h-0"), jobs=2)).groups
    assert (found.hosts, found.new) == (4, 3)
    [found] = plan(state(), cpus(jobs=2)).groups
    assert (found.new, found.why) == (2, "jobs need 2 hosts")


def test_a_job_that_waits_gets_hosts_that_boot_and_none_that_ray_has():
    idle = state(node("h-0", CPU_HOST, idle_s=10.0), waits=(task(1, CPU=1),))
    hosts = DemandHost("h-0"), DemandHost("h-1")
    assert new(idle, cpus(*hosts, jobs=1)) == [0]  # the job gets h-1, Ray has h-0
    assert new(idle, cpus(*hosts, jobs=2)) == [1]
    late = DemandHost("h-0", in_ray=True, unseen_s=999.0), DemandHost("h-1", unseen_s=999.0)
    assert ends(state(), cpus(*late, jobs=1)) == ["h-0"]  # the job gets h-1


def test_the_hosts_that_a_job_has_are_no_room_and_do_not_end():
    held = cpus(DemandHost("h-0", held=True, unseen_s=999.0), jobs=1)
    assert new(state(waits=(task(1, CPU=1),)), held) == [1]
    assert ends(state(), held) == []
