"""Which job holds which hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotfleet.membership.schedule import Allocation, HostRoom, JobNeed, allocate, by_priority, shares

A, B, C = JobNeed("a", 1, 3, 1), JobNeed("b", 2, 2, 2), JobNeed("c", 1, 1, 3)


def hosts(*names: str, **fields) -> list[HostRoom]:
    return [HostRoom(name, 1, **fields) for name in names]


def test_jobs_share_a_fleet_in_order_of_submission():
    assert allocate([B, A], hosts("h1", "h2", "h3", "h4"), {}) == Allocation(
        {"a": ("h1", "h4"), "b": ("h2", "h3")}, {"a": "holds 2 hosts", "b": "holds 2 hosts"}
    )


def test_a_job_with_one_process_for_each_host_takes_whole_hosts():
    rooms = [HostRoom(name, 8) for name in ("h1", "h2", "h3")]
    now = allocate([JobNeed("a", 2, 2, 1, per_host=True), JobNeed("b", 1, 8, 2)], rooms, {})
    assert now.held == {"a": ("h1", "h2"), "b": ("h3",)}
    assert allocate([JobNeed("a", 4, 4, 1, per_host=True)], rooms, {}).why == {"a": "needs 4 hosts, 3 free"}


def test_a_queued_job_says_for_what_it_waits():
    now = allocate([A, B], hosts("h1", "h2", "h3", "h4"), {"a": ("h1", "h2", "h3")})
    assert now.held == {"a": ("h1", "h2", "h3")}
    assert now.why["b"] == "needs 2 hosts, 1 free: 3 of 4 held by a"


def test_a_running_job_keeps_its_hosts_from_an_older_one():
    assert allocate([A, B], hosts("h1", "h2"), {"b": ("h1", "h2")}).held == {"b": ("h1", "h2")}


def test_a_job_below_its_min_comes_before_one_that_could_use_more():
    now = allocate([A, B], hosts("h1", "h2", "h3"), {"a": ("h1",), "b": ("h2",)})
    assert now.held == {"a": ("h1",), "b": ("h2", "h3")}


def test_a_higher_priority_goes_before_an_earlier_submission_and_takes_nothing_from_a_running_job():
    priorities = {"a": 0, "b": 0, "u": 5, "l": -1}
    queue = by_priority([JobNeed("l", 1, 1, 0), A, B, JobNeed("u", 1, 2, 9)], priorities)
    assert [(need.job, need.order) for need in queue] == [("u", 0), ("a", 1), ("b", 2), ("l", 3)]
    assert allocate(queue, hosts("h1", "h2"), {}).held == {"u": ("h1",), "a": ("h2",)}
    assert allocate(queue, hosts("h1", "h2", "h3", "h4"), {}).held == {"u": ("h1",), "a": ("h2",), "b": ("h3", "h4")}
    assert allocate(queue, hosts("h1", "h2"), {"b": ("h1", "h2")}).held == {"b": ("h1", "h2")}
    assert allocate(queue, hosts("h1", "h2"), {"b": ("h1", "gone")}).held == {"b": ("h1", "h2")}


def need(job: str, least: int, most: int, order: int, priority: int = 0, **fields) -> JobNeed:
    return JobNeed(job, least, most, order, priority=priority, **fields)


ANEW = need("anew", 2, 4, 1, yields=True)
URGENT = need("urgent", 2, 2, 0, priority=5, takes=True)
WHY = "urgent, which has priority 5 over 0 and needs 2 hosts"


def test_a_higher_priority_takes_the_hosts_of_a_job_that_can_start_again_which_is_queued():
    now = allocate([URGENT, ANEW], hosts("h1", "h2", "h3"), {"anew": ("h1", "h2", "h3")})
    assert now.held == {"urgent": ("h1", "h2")} and now.preempted == {"anew": WHY}
    assert now.why["anew"] == "needs 2 hosts, 1 free: 2 of 3 held by urgent" and now.lacking == {"anew"}
    again = allocate([URGENT, ANEW], hosts("h1", "h2", "h3"), now.held)
    assert (again.held, again.preempted) == (now.held, {})
    assert allocate([ANEW], hosts("h1", "h2", "h3"), now.held).held == {"anew": ("h1", "h2", "h3")}


def test_a_preempted_job_starts_again_at_once_on_hosts_that_are_left():
    now = allocate([URGENT, ANEW], hosts("h1", "h2", "h3", "h4"), {"anew": ("h1", "h2", "h3", "h4")})
    assert now.held == {"urgent": ("h1", "h2"), "anew": ("h3", "h4")} and now.preempted == {"anew": WHY}


@pytest.mark.parametrize("other", [
    need("other", 1, 4, 1),  # its loss would fail it
    need("other", 1, 4, 1, priority=5, yields=True),
    need("other", 1, 4, 1, priority=6, shrinks=True),
])
def test_a_job_that_cannot_start_again_or_has_no_lower_priority_keeps_its_hosts(other):
    now = allocate([URGENT, other], hosts("h1", "h2", "h3"), {"other": ("h1", "h2", "h3")})
    assert now.held == {"other": ("h1", "h2", "h3")} and not (now.preempted or now.shrunk)


def test_a_job_that_adapts_gives_up_hosts_above_its_min_before_another_one_is_ended():
    elastic = need("elastic", 1, 4, 2, priority=1, shrinks=True)
    held = {"anew": ("h1", "h2"), "elastic": ("h3", "h4", "h5")}
    now = allocate([URGENT, ANEW, elastic], hosts("h1", "h2", "h3", "h4", "h5"), held)
    assert now.held == {"urgent": ("h5", "h4"), "anew": ("h1", "h2"), "elastic": ("h3",)} and not now.preempted
    assert now.shrunk == {"elastic": "urgent, which has priority 5 over 1 and needs 2 hosts"}
    held = {"elastic": ("h1", "h2")}  # one of them is its fewest
    assert allocate([URGENT, elastic], hosts("h1", "h2"), held).held == held


def test_nothing_is_taken_where_it_would_not_be_enough_or_where_hosts_are_coming():
    held = {"anew": ("h1", "h2")}
    large = need("u", 3, 3, 0, priority=5, takes=True)
    wait = allocate([large, ANEW], hosts("h1", "h2"), held)
    assert (wait.held, wait.preempted) == (held, {})
    coming = [*hosts("h1", "h2"), *hosts("h3", "h4", ready=False)]
    assert allocate([URGENT, ANEW], coming, held).held == held


def test_a_ray_cluster_gives_what_it_can_spare_and_ends_where_that_is_not_enough():
    ray = need("ray", 1, 4, 1, yields=True, shrinks=True, per_host=True)
    held = {"ray": ("h1", "h2", "h3")}
    spare = allocate([URGENT, ray], hosts("h1", "h2", "h3"), held)
    assert spare.held == {"urgent": ("h3", "h2"), "ray": ("h1",)}
    assert set(spare.shrunk) == {"ray"} and not spare.preempted
    whole = allocate([need("u", 3, 3, 0, priority=5, takes=True), ray], hosts("h1", "h2", "h3"), held)
    assert set(whole.held) == {"u"} and sorted(whole.held["u"]) == ["h1", "h2", "h3"]
    assert set(whole.preempted) == {"ray"} and not whole.shrunk


def test_no_more_jobs_are_ended_than_must_be_and_the_lowest_priority_first():
    low, middle = need("low", 1, 1, 3, yields=True), need("middle", 3, 3, 2, priority=1, yields=True)
    held, fleet = {"low": ("h1",), "middle": ("h2", "h3", "h4")}, hosts("h1", "h2", "h3", "h4")
    one = allocate([need("u", 1, 1, 0, priority=5, takes=True), middle, low], fleet, held)
    assert one.held == {"u": ("h1",), "middle": ("h2", "h3", "h4")} and set(one.preempted) == {"low"}
    three = allocate([need("u", 3, 3, 0, priority=5, takes=True), middle, low], fleet, held)
    assert three.held == {"u": ("h2", "h3", "h4"), "low": ("h1",)} and set(three.preempted) == {"middle"}


def test_a_job_that_has_just_begun_to_lack_hosts_takes_none_yet_and_names_the_jobs_it_will_take_them_from():
    now = allocate([replace(URGENT, takes=False), ANEW], hosts("h1", "h2"), {"anew": ("h1", "h2")})
    assert now.held == {"anew": ("h1", "h2")}
    assert now.why["urgent"] == "needs 2 hosts, 0 free: 2 of 2 held by anew; takes hosts of anew soon"


def test_a_job_that_small_ones_have_overtaken_for_long_is_overtaken_no_more():
    large, running = need("large", 2, 2, 1), need("running", 1, 1, 0)
    fleet, held = hosts("h1", "h2"), {"running": ("h1",)}
    assert allocate([running, large, C], fleet, held).held == {"running": ("h1",), "c": ("h2",)}
    late = replace(large, overdue=True)
    now = allocate([running, late, C], fleet, held)
    assert now.held == held
    assert now.why["c"] == "needs 1 host, 1 free: 1 of 2 held by running; large has waited for long and goes first"
    assert allocate([running, replace(late, min_workers=3), C], fleet, held).held == {**held, "c": ("h2",)}
    assert allocate([C, running, replace(late, order=5)], fleet, held).held == {**held, "c": ("h2",)}
    grows = replace(running, max_workers=2)
    assert allocate([grows, late, C], fleet, held).held == {"running": ("h1", "h2")}, "no paid host is idle"


def test_a_small_job_does_not_wait_behind_one_that_cannot_start():
    now = allocate([B, C], hosts("h1"), {})
    assert now.held == {"c": ("h1",)}


def test_free_hosts_are_kept_for_a_queued_job_when_more_are_coming():
    now = allocate([A, B], [*hosts("h1", "h2"), *hosts("h3", ready=False)], {"a": ("h1",)})
    assert now.held == {"a": ("h1",)}
    assert now.why["b"] == "needs 2 hosts, 1 free: 1 of 3 held by a"


def test_a_leaving_host_is_replaced_before_it_is_gone():
    leaving = HostRoom("h1", 1, leaving=True)
    need = JobNeed("a", 1, 1, 1)
    assert allocate([need], [leaving], {"a": ("h1",)}).held == {"a": ("h1",)}
    assert allocate([need], [leaving, *hosts("h2")], {"a": ("h1",)}).held == {"a": ("h1", "h2")}
    assert allocate([need], hosts("h2"), {"a": ("h1", "h2")}).held == {"a": ("h2",)}


def test_a_leaving_host_is_given_to_nobody():
    now = allocate([A], hosts("h1", leaving=True), {})
    assert now == Allocation({}, {"a": "needs 1 host, 0 free"}, lacking=frozenset({"a"}))


def test_when_a_notice_is_withdrawn_the_newest_surplus_host_is_freed():
    need = JobNeed("a", 1, 1, 1)
    assert allocate([need], hosts("h1", "h2"), {"a": ("h1", "h2")}).held == {"a": ("h1",)}


def test_a_freed_surplus_host_starts_a_queued_job_at_once():
    now = allocate([JobNeed("a", 1, 1, 1), C], hosts("h1", "h2"), {"a": ("h1", "h2")})
    assert now.held == {"a": ("h1",), "c": ("h2",)}


def test_a_host_with_several_slots_counts_for_all_of_them():
    now = allocate([JobNeed("a", 4, 6, 1)], [HostRoom("h1", 4), HostRoom("h2", 4), HostRoom("h3", 4)], {})
    assert now.held == {"a": ("h1", "h2")}
    wait = allocate([JobNeed("a", 6, 6, 1)], [HostRoom("h1", 4)], {})
    assert wait.why == {"a": "needs room for 6 workers, 1 free"}


def test_a_job_that_lost_all_its_hosts_takes_the_first_that_comes():
    now = allocate([B], [], {"b": ("h1", "h2")})
    assert now.held == {"b": ()}
    assert allocate([B], hosts("h3"), now.held).held == {"b": ("h3",)}


def test_hosts_of_an_ended_job_are_free():
    assert allocate([B], hosts("h1", "h2"), {"a": ("h1", "h2")}).held == {"b": ("h1", "h2")}


rooms = st.lists(
    st.builds(
        HostRoom,
        host=st.sampled_from([f"h{n}" for n in range(8)]),
        slots=st.integers(1, 3),
        leaving=st.booleans(),
        ready=st.booleans(),
    ),
    unique_by=lambda r: r.host,
)
needs = st.lists(
    st.builds(
        lambda n, least, more: JobNeed(f"j{n}", least, least + more, n),
        st.integers(0, 4), st.integers(1, 4), st.integers(0, 4),
    ),
    unique_by=lambda j: j.job,
)  # fmt: skip
before = st.dictionaries(
    st.sampled_from([f"j{n}" for n in range(6)]), st.lists(st.sampled_from([f"h{n}" for n in range(10)])).map(tuple)
)


def counting(room: HostRoom) -> int:
    return room.slots if room.ready and not room.leaving else 0


@settings(max_examples=300, deadline=None)
@given(needs, rooms, before)
def test_any_allocation_is_disjoint_complete_and_useful(jobs, fleet, held):
    now = allocate(jobs, fleet, held)
    room, given_out = {r.host: r for r in fleet}, [h for names in now.held.values() for h in names]
    assert len(given_out) == len(set(given_out)) and set(given_out) <= set(room), "held once, and existing"
    assert set(now.why) == {j.job for j in jobs} and all(now.why.values())
    for job in jobs:
        mine = now.held.get(job.job, ())
        slots = sum(counting(room[h]) for h in mine)
        assert job.job in held or not mine or slots >= job.min_workers, "a job starts whole"
        new = [h for h in mine if h not in held.get(job.job, ())]
        assert all(counting(room[h]) for h in new), "only ready hosts that stay are given out"
        newest = next((counting(room[h]) for h in reversed(mine) if counting(room[h])), 0)
        assert slots - newest < job.max_workers, "no host after the job has its max"
    free = [r for r in fleet if r.host not in given_out and counting(r)]
    if all(r.ready or r.leaving for r in fleet):
        hungry = [j for j in jobs if j.job in now.held
                  and sum(counting(room[h]) for h in now.held[j.job]) < j.max_workers]  # fmt: skip
        assert not (free and hungry), "nothing paid lies idle while somebody could use it"
        room_left = sum(r.slots for r in free)
        assert not [j for j in jobs if j.job not in now.held and j.min_workers <= room_left]


@settings(max_examples=200, deadline=None)
@given(needs, rooms, before)
def test_an_allocation_stays_when_nothing_changes(jobs, fleet, held):
    once = allocate(jobs, fleet, held)
    assert allocate(jobs, fleet, once.held) == once


@settings(max_examples=200, deadline=None)
@given(needs, rooms, before, st.data())
def test_a_lost_host_takes_no_other_host_from_a_job(jobs, fleet, held, data):
    once = allocate(jobs, fleet, held)
    if not fleet:
        return
    lost = data.draw(st.sampled_from(fleet)).host
    later = allocate(jobs, [r for r in fleet if r.host != lost], once.held)
    for job, names in once.held.items():
        assert [h for h in names if h != lost] == [h for h in later.held[job] if h in names]


def test_shares_are_what_each_job_has_once_all_hosts_are_up():
    one, two, three = JobNeed("one", 1, 2, 0), JobNeed("two", 1, 8, 1), JobNeed("three", 2, 2, 2)
    assert shares([one, two], {}, hosts=4, slots=1) == {"one": 2, "two": 2}
    assert shares([one, two], {"one": (), "two": ("f-1", "f-2", "f-3")}, hosts=4, slots=1) == {"one": 1, "two": 3}
    assert shares([two, three], {"two": ()}, hosts=4, slots=2) == {"two": 3, "three": 1}
    assert shares([one, three], {"three": ("f-0", "f-1")}, hosts=2, slots=1) == {"one": 0, "three": 2}
    assert shares([one], {"one": ("f-0",)}, hosts=0, slots=1) == {"one": 0}


def test_a_job_of_a_group_takes_hosts_of_that_group_alone():
    rooms = [*hosts("c1", "c2", group="cpu"), *hosts("g1", group="gpu")]
    now = allocate([JobNeed("a", 1, 3, 1, group="gpu"), JobNeed("b", 1, 1, 2)], rooms, {})
    assert now.held == {"a": ("g1",), "b": ("c1",)}
    assert allocate([JobNeed("a", 2, 2, 1, group="gpu")], rooms, {}).why == {"a": "needs 2 hosts of group gpu, 1 free"}


def test_hosts_of_another_group_are_neither_reserved_nor_taken_for_a_job():
    rooms = [*hosts("c1", group="cpu"), *hosts("g1", group="gpu", ready=False)]
    waits, other = JobNeed("a", 1, 1, 1, group="gpu"), JobNeed("b", 1, 1, 2, group="cpu")
    assert allocate([waits, other], rooms, {}).held == {"b": ("c1",)}
    above = replace(waits, priority=5, takes=True)
    now = allocate([above, replace(other, yields=True, shrinks=True)], [*hosts("c1", group="cpu")], {"b": ("c1",)})
    assert now.held == {"b": ("c1",)} and not now.preempted


def test_an_overdue_job_holds_up_no_job_of_another_group():
    rooms = [*hosts("c1", group="cpu"), *hosts("g1", "g2", group="gpu")]
    late, other = JobNeed("a", 2, 2, 1, group="gpu", overdue=True), JobNeed("b", 1, 1, 2, group="cpu")
    runs = JobNeed("r", 1, 1, 0, group="gpu")
    assert allocate([runs, late, other], rooms, {"r": ("g1",)}).held == {"r": ("g1",), "b": ("c1",)}
