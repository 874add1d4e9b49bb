"""Members that stand still: stopped ones and those that hang. Time is moved by hand."""

from __future__ import annotations

from spotfleet.membership import Evicted, Formed, Ordered, Phase
from tests.support.membership.membership_desk import Desk, training

# ---- stopped: SIGSTOP, a debugger


def test_a_stopped_member_is_replaced_after_a_second_and_not_ended():
    desk = training("a", "b")
    desk.put("b", stopped=True)
    assert desk.ordered() is None
    assert desk.ordered(after=0.9) is None
    changes = desk.see(after=0.2)
    assert [(type(c), c.why) for c in changes] == [(Ordered, "b is stopped")]
    assert desk.core.members == ("a",)
    assert (desk.core.assignment("b").rank, desk.core.assignment("b").urgent) == (-1, True)


def test_a_member_that_goes_on_within_a_second_disturbs_nobody():
    desk = training("a", "b")
    desk.put("c", stage=desk.views["a"].stage)
    desk.put("b", stopped=True)
    desk.see()
    assert desk.ordered(after=0.9) is None
    desk.put("b", stopped=False)
    assert desk.ordered() is None
    assert desk.ordered(after=5.0) == ("join", ("a", "b", "c"))


def test_a_stopped_member_is_lost_at_once_when_a_collective_broke():
    desk = training("a", "b", "c")
    desk.put("b", stopped=True)
    desk.put("a", failed=1, generation=0)
    assert desk.ordered() == ("death", ("a", "c"))


def test_a_continued_worker_comes_back_as_a_spare():
    desk = training("a", "b")
    desk.put("b", stopped=True)
    desk.see()
    assert desk.ordered(after=1.0) == ("death", ("a",))
    desk.form()
    assert desk.ordered(after=60.0) is None
    desk.put("b", stopped=False, generation=1)
    desk.see()
    assert desk.ordered(after=0.3) == ("join", ("a", "b"))


def test_below_min_the_state_is_held_until_the_stopped_member_goes_on():
    desk = training("a", "b", min_workers=2)
    desk.put("b", stopped=True)
    desk.see()
    assert desk.ordered(after=1.0) is None
    assert (desk.core.phase, desk.core.why) == (Phase.HOLDING, "b is stopped; needs 2 workers, 1 can train")
    desk.put("b", stopped=False)  # nothing was ordered: their generation is as it was
    assert desk.ordered(after=100.0) is None
    assert desk.core.phase is Phase.RUNNING


def test_below_min_a_spare_takes_the_stopped_ones_place():
    desk = training("a", "b", min_workers=2)
    desk.put("b", stopped=True)
    desk.see()
    desk.see(after=1.0)
    desk.put("c", stage=desk.views["a"].stage)
    assert desk.ordered(after=0.3) == ("resume", ("a", "c"))


def test_the_only_holder_of_the_state_is_waited_for_but_not_for_ever():
    desk = training("a")
    desk.put("c", stage=desk.views["a"].stage)
    desk.see()
    desk.put("a", stopped=True)
    desk.core.max_workers = 1
    desk.see()
    assert desk.ordered(after=100.0) is None
    assert desk.core.phase is Phase.HOLDING
    assert desk.see(after=600.0) == [Evicted(1, ("a",), "a was stopped for 600 s")]


def test_a_stopped_worker_founds_nothing():
    desk = Desk()
    desk.put("a", stopped=True)
    desk.put("b")
    assert desk.ordered() == ("start", ("b",))


# ---- hanging


def stuck(*, waits: str, quiet_s: float, desk: Desk | None = None, step_s: float = 0.5) -> Desk:
    """No member has made a step for `quiet_s`; those named in `waits` are in a collective."""
    desk = desk or training("a", "b", "c")
    for name in desk.core.members:
        desk.put(name, waits=name in waits, quiet_s=quiet_s, step_s=step_s, resumed=desk.core.generation)
    return desk


def test_the_one_for_whom_the_others_wait_is_evicted_after_thirty_seconds():
    desk = stuck(waits="ac", quiet_s=29.0)
    assert desk.see() == []
    stuck(waits="ac", quiet_s=30.0, desk=desk)
    evicted, ordered = desk.see()
    assert evicted == Evicted(1, ("b",), "no step for 30 s: the others wait for b")
    assert (ordered.cause, ordered.members, ordered.why) == ("death", ("a", "c"), evicted.why)


def test_slow_steps_get_twenty_times_their_length():
    desk = stuck(waits="ac", quiet_s=99.0, step_s=5.0)
    assert desk.see() == []
    assert [type(c) for c in stuck(waits="ac", quiet_s=100.0, desk=desk, step_s=5.0).see()] == [Evicted, Ordered]


def test_the_first_step_of_a_generation_may_take_two_minutes():
    desk = stuck(waits="ac", quiet_s=119.0)
    desk.put("b", resumed=0)
    assert desk.see() == []
    assert desk.core.why.endswith("no step for 119 s: the others wait for b")
    stuck(waits="ac", quiet_s=120.0, desk=desk)
    desk.put("b", resumed=0)
    assert [type(c) for c in desk.see()] == [Evicted, Ordered]


def test_nobody_is_evicted_while_all_are_in_their_own_code():
    desk = stuck(waits="", quiet_s=95.0)
    assert desk.see(after=1000.0) == []
    assert desk.core.why == "generation 1 on 3 workers; no step for 95 s"


def test_where_all_wait_for_each_other_the_same_members_form_again():
    desk = stuck(waits="abc", quiet_s=30.0)
    (ordered,) = desk.see()
    assert (ordered.cause, ordered.members) == ("failure", ("a", "b", "c"))
    assert ordered.why == "no step for 30 s: every rank waits for the others"
    assert desk.core.assignment("a").urgent


def test_an_eviction_that_did_not_help_doubles_the_limit_so_that_long_work_on_one_rank_comes_through():
    desk = stuck(waits="ac", quiet_s=30.0)
    desk.see()
    desk.form()
    assert stuck(waits="c", quiet_s=59.0, desk=desk).see() == []  # a does what b did, and takes as long
    assert [type(c) for c in stuck(waits="c", quiet_s=60.0, desk=desk).see()] == [Evicted, Ordered]


def test_work_that_came_through_is_given_its_time_whenever_it_comes_again():
    desk = stuck(waits="ac", quiet_s=30.0)
    desk.see()
    desk.form()
    stuck(waits="c", quiet_s=45.0, desk=desk)
    desk.put("a", "c", resumed=0)  # the first step of its generation, which might have taken two minutes anyway
    assert desk.see() == []
    desk.form(version=1000)  # the next evaluation
    assert stuck(waits="c", quiet_s=45.0, desk=desk).see() == []
    assert [type(c) for c in stuck(waits="c", quiet_s=60.0, desk=desk).see()] == [Evicted, Ordered]


def test_a_hang_elsewhere_later_is_ended_as_fast_as_the_first():
    desk = stuck(waits="ac", quiet_s=30.0)
    desk.see()
    desk.form(version=11)
    assert [type(c) for c in stuck(waits="c", quiet_s=30.0, desk=desk).see()] == [Evicted, Ordered]


def test_a_hang_in_the_old_generation_does_not_keep_a_planned_change_waiting():
    desk = training("a", "b")
    desk.put("c", stage=desk.views["a"].stage)
    desk.see()
    assert desk.ordered(after=0.3) == ("join", ("a", "b", "c"))
    for name in "ab":
        desk.put(name, waits=name == "a", quiet_s=30.0, resumed=1)
    evicted, ordered = desk.see(after=30.0)
    assert (evicted.workers, ordered.members) == (("b",), ("a", "c"))


def test_nobody_is_blamed_for_a_generation_that_was_not_sent():
    desk = training("a", "b")
    desk.put("b", exited=True)
    desk.core.is_withheld = True
    assert desk.ordered() == ("death", ("a",))
    for _ in range(20):
        assert desk.see(after=120.0) == []
    desk.core.is_withheld = False
    assert desk.see(after=29.0) == []
    assert [type(c) for c in desk.form()] == [Formed]
