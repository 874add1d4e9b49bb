"""Members between whom the network does not carry: both are named, and the one that is in most people's way goes."""

from __future__ import annotations

import pytest

from spotfleet.membership import Evicted, WorkerView
from spotfleet.membership.blame import parted
from spotfleet.protocol.messages import Stage
from tests.support.membership.membership_desk import Desk, training


def forming(*workers: str) -> Desk:
    """`a` and `b` have trained; the others join, and nobody holds the new generation yet."""
    desk = training("a", "b", max_workers=len(workers))
    desk.put(*workers[2:], stage=Stage.READY)
    desk.see()
    assert desk.ordered(after=0.5) == ("join", workers)
    desk.put("a", "b", generation=0)
    desk.put(*workers, store="10.0.0.1:7")
    desk.see()
    return desk


def evicted(desk: Desk, after: float) -> list[tuple[tuple[str, ...], str]]:
    return [(c.workers, c.why) for c in desk.see(after) if isinstance(c, Evicted)]


def test_a_joiner_that_cannot_reach_a_member_is_named_at_once_and_goes_after_seconds():
    desk = forming("a", "b", "c")
    desk.put("c", unreached=("b at 10.0.0.2",), store="10.0.0.3:7")
    why = "c at 10.0.0.3 cannot reach b at 10.0.0.2"
    assert evicted(desk, 0.0) == []
    assert desk.core.why.endswith(f"0 of 3 have joined generation 2; {why}")
    assert evicted(desk, desk.core.tuning.parted_s - 0.1) == []
    assert evicted(desk, 0.2) == [(("c",), why)]
    assert desk.core.members == ("a", "b")
    assert desk.core.assignment("a").urgent


def test_who_is_cut_off_from_all_goes_and_not_those_who_miss_it():
    desk = forming("a", "b", "c", "d")
    desk.put("a", "c", "d", unreached=("b at 10.0.0.2",))
    desk.see()
    (gone,) = evicted(desk, desk.core.tuning.parted_s)
    assert gone == (("b",), "a at 10.0.0.1 cannot reach b at 10.0.0.2, and 2 other pairs")


def test_a_way_that_is_found_in_time_costs_nobody_the_place():
    desk = forming("a", "b", "c")
    desk.put("c", unreached=("b at 10.0.0.2",))
    desk.see()
    desk.put("c", unreached=())
    assert evicted(desk, desk.core.tuning.parted_s) == []
    assert "cannot reach" not in desk.core.why


def test_packets_that_are_lost_now_between_these_and_now_between_those_cost_nobody_the_place():
    """Each look misses somebody else: on a network that loses some, of many connections one is always late."""
    desk, gone = forming("a", "b", "c", "d"), []
    for here, there in [("a", "b"), ("c", "d"), ("b", "c"), ("d", "a")] * 2:
        desk.put("a", "b", "c", "d", unreached=())
        desk.put(here, unreached=(f"{there} at 10.0.0.9",))
        gone += evicted(desk, desk.core.tuning.parted_s / 2)
    assert gone == []


def test_who_is_missed_for_a_moment_does_not_go_for_two_others_that_are_parted():
    desk = forming("a", "b", "c", "d", "e")
    desk.put("e", unreached=("d at 10.0.0.4",))
    desk.see()
    desk.put("a", "c", "d", unreached=("b at 10.0.0.2",))
    assert evicted(desk, desk.core.tuning.parted_s) == [(("e",), "e at 10.0.0.1 cannot reach d at 10.0.0.4")]


def test_a_generation_that_fails_at_once_evicts_one_of_the_two_and_nobody_else():
    """The last of the members goes otherwise, which would be d."""
    desk, gone = forming("a", "b", "c", "d"), []
    for generation in (2, 3, 4):
        desk.put("b", unreached=("c at 10.0.0.3",))
        desk.put("a", "b", "c", "d", failed=generation)
        desk.see()
        gone += evicted(desk, 1.0)
    assert gone == [(("c",), "b at 10.0.0.1 cannot reach c at 10.0.0.3")]


@pytest.mark.parametrize("said", [(), ("z at 10.0.0.9",), ("a at 10.0.0.1",)])
def test_only_other_members_count(said: tuple[str, ...]):
    views = [WorkerView(w, w, 0, Stage.READY, store="10.0.0.1:7", unreached=said if w == "a" else ()) for w in "ab"]
    assert parted(views).suspects == ()
