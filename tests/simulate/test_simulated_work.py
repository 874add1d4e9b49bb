"""Training in a simulation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfleet.simulate.world.work import MembersChanged, Pauses, Work

NONE = Pauses(0.0, 0.0, 0.0)


def work(target: int = 2, left_s: float = 1000.0, pauses: Pauses = NONE, **more) -> Work:
    return Work(target, left_s, 0.0, pauses, **more)


def test_each_member_does_a_second_of_work_per_second():
    it = work()
    it.regroup(["a", "b"], lost=False)
    it.advance(100.0)
    assert (it.useful_s, it.left_s, it.finish_at()) == (200.0, 800.0, 500.0)
    it.advance(500.0)
    assert it.done


def test_nothing_is_done_while_all_wait_for_a_change():
    it = work(pauses=Pauses(loss_s=5.0, leave_s=3.0, join_s=2.0))
    assert it.regroup(["a"], lost=False) == MembersChanged(("a",), "start", 2.0, 0.0)
    it.advance(10.0)
    assert it.useful_s == 8.0
    assert it.regroup(["a", "b"], lost=False) == MembersChanged(("a", "b"), "join", 2.0, 0.0)
    it.advance(20.0)
    assert it.useful_s == 24.0
    assert it.regroup(["a"], lost=True) == MembersChanged(("a",), "death", 5.0, 0.0)
    it.advance(30.0)
    assert it.useful_s == 29.0


def test_who_takes_part_stays_and_others_fill_the_places():
    it = work()
    it.regroup(["b"], lost=False)
    it.regroup(["a", "b", "c"], lost=False)
    assert it.members == ("b", "a")
    assert it.regroup(["c", "b", "a"], lost=False) is None


def test_a_gang_works_whole_or_not_at_all():
    it = work(gang=True)
    assert it.regroup(["a"], lost=False) is None
    it.regroup(["a", "b"], lost=False)
    it.advance(10.0)
    it.regroup(["a"], lost=True)
    it.advance(20.0)
    assert it.useful_s == 20.0


def test_a_loss_costs_what_came_after_the_last_checkpoint():
    it = work(checkpoint_s=60.0, gang=True)
    it.regroup(["a", "b"], lost=False)
    for at in (50.0, 130.0):
        it.advance(at)
    assert it.regroup(["a"], lost=True) == MembersChanged((), "death", 0.0, 20.0)
    assert (it.useful_s, it.left_s, it.repeated_s) == (240.0, 760.0, 20.0)


@given(st.lists(st.tuples(st.floats(0, 500), st.sets(st.sampled_from("abc"))), max_size=12))
def test_work_is_neither_lost_nor_made_up(changes):
    it, now = work(left_s=1500.0, pauses=Pauses(7.0, 3.0, 2.0), checkpoint_s=60.0), 0.0
    for after, ready in changes:
        now += after
        ahead = it.left_at(now)
        it.advance(now)
        assert it.left_s == pytest.approx(ahead)
        it.regroup(sorted(ready), lost=True)
        assert it.left_s + it.useful_s == pytest.approx(1500.0)
        assert it.useful_s >= -1e-9
