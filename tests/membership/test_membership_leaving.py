"""Rules of Membership, continued: leaving, fencing, restarts, the end.

Faults that were sown to see these tests fail, and the first test that did:
- a noticed worker enters a new generation: a_noticed_worker_trains_on_until_its_replacement_is_warm
- it stays until its host is gone: without_a_replacement_it_leaves_shortly_before_the_end
- nobody carries the state over: when_all_leave_a_checkpoint_is_wanted_and_one_carries_the_state_over
- who holds the state is judged by reported versions: a_returning_member_with_old_state_is_no_substitute
- no fence at all: a_generation_without_an_old_member_waits_for_the_confirmed_end_of_all_old_ones
- the fence knows the newest group only: every_group_that_was_ordered_fences
- the last holder of the state is not awaited: a_generation_without_an_old_member_waits
- a hanging leaver keeps the planned change waiting: a_leaver_that_hangs
- a restarted dispatcher does not wait for reports: drops_no_survivor_only_because_another_reports_first
- numbers go on without a gap after a restart: leaves_a_gap_in_the_numbers
- generations form after the end: it_is_finished_when_every_member_is (and random histories)
- a broken last barrier is not repeated: a_last_barrier_broken_by_a_death
"""

from __future__ import annotations

import pytest

from spotfleet.membership import Evicted, Finished, Formed, Phase
from spotfleet.protocol.messages import Stage
from tests.support.membership.membership_desk import Desk, training

# ---- notices and drains


def test_a_noticed_worker_trains_on_until_its_replacement_is_warm():
    desk = training("a", "b", max_workers=2)
    desk.put("b", leaving_s=100.0, leaving_why="notice")
    assert desk.ordered() is None
    assert desk.core.why == "generation 1 on 2 workers; b leaves (notice) when replaced or in 90 s"
    desk.put("c", stage=Stage.READY)
    assert desk.ordered() == ("notice", ("a", "c"))
    leaver = desk.core.assignment("b")
    assert (leaver.rank, leaver.urgent) == (-1, False)


@pytest.mark.parametrize(("first_s", "leaves_at_s"), [(120.0, 10.0), (30.0, 10.0), (20.0, 5.0)])
def test_without_a_replacement_it_leaves_shortly_before_the_end(first_s: float, leaves_at_s: float):
    desk = training("a", "b")
    desk.put("b", leaving_s=first_s, leaving_why="notice")
    assert desk.ordered() is None
    desk.put("b", leaving_s=leaves_at_s + 0.1)
    assert desk.ordered() is None
    desk.put("b", leaving_s=leaves_at_s)
    assert desk.ordered() == ("notice", ("a",))


def test_a_notice_that_is_withdrawn_changes_nothing():
    desk = training("a", "b")
    desk.put("b", leaving_s=60.0, leaving_why="notice")
    desk.see()
    desk.put("b", leaving_s=None, leaving_why="")
    assert desk.ordered(after=100.0) is None


def test_below_min_all_stand_by_at_a_step_boundary_with_their_state():
    desk = training("a", "b", min_workers=2)
    desk.put("b", leaving_s=10.0, leaving_why="notice")
    desk.see()
    desk.put("b", leaving_s=5.0)
    assert desk.ordered() == ("notice", ())
    assert (desk.core.phase, desk.core.assignment("a").urgent) == (Phase.HOLDING, False)
    desk.put("a", "b", generation=0)
    desk.see()
    assert desk.core.why == "b leaves (notice); needs 2 workers, 1 can train"
    desk.put("c", stage=Stage.READY)
    assert desk.ordered() is None
    assert desk.ordered(after=0.3) == ("notice", ("a", "c"))
    assert desk.core.why == "b leaves (notice); 2 workers are ready"


def test_a_death_on_a_noticed_host_brings_it_into_no_new_generation():
    desk = training("a", "b", "c")
    desk.put("b", leaving_s=100.0, leaving_why="notice")
    desk.see()
    desk.put("c", exited=True)
    assert desk.ordered() == ("death", ("a",))


def test_a_leaver_that_hangs_does_not_keep_the_others_in_the_old_group():
    desk = training("a", "b", "c")
    desk.put("c", leaving_s=10.0, leaving_why="notice")
    desk.see()
    desk.put("c", leaving_s=5.0)
    assert desk.ordered() == ("notice", ("a", "b"))
    desk.put("c", silent=True)
    desk.see()
    assert not desk.core.assignment("a").urgent
    desk.see(after=3.0)
    assert desk.core.assignment("a").urgent


def test_when_all_leave_a_checkpoint_is_wanted_and_one_carries_the_state_over():
    desk = training("a", "b", max_workers=2)
    desk.put("a", leaving_s=100.0, leaving_why="notice")
    desk.see()
    assert not desk.core.orders("a").checkpoint_now
    desk.put("b", leaving_s=100.0, leaving_why="notice")
    desk.see()
    assert desk.core.orders("a").checkpoint_now
    desk.put("c", stage=Stage.READY)
    assert desk.ordered() == ("notice", ("a", "c"))
    desk.form(11)
    assert desk.ordered() is None  # a stays until it is replaced, too
    desk.put("d", stage=Stage.READY)
    assert desk.ordered() == ("notice", ("d", "c"))


def test_while_all_stand_by_one_alone_writes_the_checkpoint_the_leader_if_it_lives():
    desk = training("a", "b", "c", min_workers=3)
    desk.put("a", "b", "c", leaving_s=10.0, leaving_why="notice")
    desk.see()
    assert not any(desk.core.orders(w).stands_in for w in "abc")  # they train: rank 0 writes
    desk.put("a", "b", "c", leaving_s=5.0)
    assert desk.ordered() == ("notice", ())
    desk.put("a", "b", "c", generation=0)
    desk.see()
    assert [desk.core.orders(w).stands_in for w in "abc"] == [True, False, False]
    desk.put("a", exited=True)
    desk.see()
    assert [desk.core.orders(w).stands_in for w in "bc"] == [False, True]
    assert all(desk.core.orders(w).checkpoint_now for w in "bc")


@pytest.mark.parametrize("workers", ["a", "ab"])
def test_those_whose_time_is_up_stand_by_until_somebody_comes_and_begin_nothing_anew(workers):
    """A generation of leavers alone would fence the checkpoint that is on its way, and end at once."""
    desk = training(*workers)
    desk.put(*workers, leaving_s=4.0, leaving_why="notice")
    assert desk.ordered() == ("notice", ())
    desk.put(*workers, generation=0)
    for _ in range(30):
        assert desk.ordered(after=0.1) is None
    assert (desk.core.phase, desk.core.why) == (
        Phase.HOLDING, f"{', '.join(workers)} leaves (notice); needs a worker that stays")
    assert all(desk.core.orders(w).checkpoint_now for w in workers)
    desk.put("c", stage=Stage.READY)
    desk.see()
    assert desk.ordered(after=0.3) == ("notice", ("a", "c"))


def test_a_single_worker_hands_its_state_over():
    desk = training("a", max_workers=1)
    desk.put("a", leaving_s=100.0, leaving_why="notice")
    desk.put("b", stage=Stage.READY)
    assert desk.ordered() == ("notice", ("a", "b"))
    desk.form(11)
    assert desk.core.generation == 3
    assert desk.core.members == ("b",)


def test_a_survivor_with_the_state_is_not_displaced_by_a_spare():
    desk = training("a", max_workers=1)
    desk.put("a", leaving_s=100.0, leaving_why="notice")
    desk.put("b", stage=Stage.READY)
    assert desk.ordered() == ("notice", ("a", "b"))
    desk.put("a", "b", generation=2, version=11)
    desk.put("c", stage=Stage.READY)
    desk.put("a", exited=True)
    assert desk.ordered() == ("death", ("b",))


@pytest.mark.parametrize("version", [10, 50])  # what the other has reported last may be as old as its own
def test_a_returning_member_with_old_state_is_no_substitute_for_the_one_that_leaves(version):
    desk = training("a", "b", max_workers=2)
    desk.put("b", silent=True)
    desk.see()
    assert desk.ordered(after=3.0) == ("death", ("a",))
    desk.form(version=50)
    desk.put("b", silent=False, leaving_s=None, version=version)
    desk.put("a", leaving_s=100.0, leaving_why="notice")
    assert desk.ordered() == ("notice", ("a", "b"))


def test_a_drain_leaves_at_once_when_nobody_will_replace_it():
    desk = training("a", "b")
    desk.put("b", leaving_s=600.0, leaving_why="drain")
    assert desk.ordered() == ("drain", ("a",))


def test_a_drain_waits_for_its_replacement_but_not_for_ever():
    desk = training("a", "b")
    desk.expected = 1
    desk.put("b", leaving_s=600.0, leaving_why="drain")
    assert desk.ordered() is None
    assert desk.ordered(after=19.0) is None
    assert desk.ordered(after=1.0) == ("drain", ("a",))


# ---- never two at once


def test_a_generation_without_an_old_member_waits_for_the_confirmed_end_of_all_old_ones():
    desk = training("a", "b", min_workers=2)
    desk.put("c", "d", stage=Stage.READY)
    desk.put("a", "b", silent=True)
    desk.see()
    assert desk.ordered(after=60.0) is None
    assert desk.core.why.endswith("waits until one of a, b is confirmed gone: they may still train generation 1")
    desk.put("a", exited=True)
    assert desk.ordered() is None  # the old group is dead; b may hold the only copy of the state
    assert desk.core.why.endswith("waits for b: it may be the last that holds the state")
    desk.put("b", exited=True)
    assert desk.ordered() == ("resume", ("c", "d"))
    assert desk.core.orders("c").needs_restore


def test_an_old_generation_that_was_only_ordered_away_fences_too():
    desk = training("a")
    desk.put("b", stage=Stage.READY)
    desk.see()
    assert desk.ordered(after=0.3) == ("join", ("a", "b"))
    desk.put("a", silent=True)  # it may not have heard of that, and train on alone
    desk.see()
    assert desk.ordered(after=60.0) is None
    assert desk.core.phase is Phase.HOLDING


def test_every_group_that_was_ordered_fences():
    desk = training("a", "b", max_workers=2)
    desk.put("a", leaving_s=100.0, leaving_why="notice")
    desk.put("c", stage=Stage.READY)
    assert desk.ordered() == ("notice", ("c", "b"))
    desk.put("d", stage=Stage.READY)
    desk.put("c", silent=True)
    desk.see()
    assert desk.ordered(after=3.0) == ("death", ("d", "b"))
    desk.put("b", silent=True)  # with c it may have formed generation 2
    desk.put("a", leaving_s=None)
    desk.see()
    assert desk.ordered(after=60.0) is None
    assert desk.core.why.endswith("one of c, b is confirmed gone: they may still train generation 2")


def test_one_old_member_in_the_new_generation_is_fence_enough():
    desk = training("a", "b", min_workers=2)
    desk.put("c", stage=Stage.READY)
    desk.see()
    desk.put("a", silent=True)
    desk.see()
    assert desk.ordered(after=3.0) == ("death", ("c", "b"))


# ---- a restarted dispatcher


def test_a_restarted_dispatcher_goes_on_without_a_new_generation():
    desk = Desk(min_workers=2)
    desk.core.adopt(6, ("b",))
    desk.core.adopt(7, ("b", "a"))
    desk.put("a", "b", silent=True)
    assert desk.see() == []
    assert desk.see(after=10.0) == []
    desk.put("a", "b", silent=False, generation=7, stage=Stage.READY, version=40)
    assert desk.see() == [Formed(7, ("b", "a"), "resume", "the dispatcher was restarted", 40)]
    assert desk.core.phase is Phase.RUNNING


def test_a_restarted_dispatcher_takes_the_highest_generation_for_current():
    desk = Desk(min_workers=2)
    desk.core.adopt(7, ("a", "b"))
    desk.core.adopt(6, ("b", "c"))
    desk.put("a", "b", generation=7, stage=Stage.READY, version=40)
    assert desk.see() == [Formed(7, ("a", "b"), "resume", "the dispatcher was restarted", 40)]


def test_a_restarted_dispatcher_waits_for_survivors_to_report_and_leaves_a_gap_in_the_numbers():
    desk = Desk(min_workers=1)
    desk.core.adopt(7, ("a", "b"))
    desk.put("a", silent=True)
    desk.put("c", stage=Stage.READY)
    assert desk.ordered() is None  # b is gone, and a has not spoken yet
    desk.put("a", silent=False, stage=Stage.READY, version=40, failed=7)
    changes = desk.see(after=5.0)
    assert [(c.generation, c.members) for c in changes] == [(18, ("a", "c"))]


def test_a_restarted_dispatcher_drops_no_survivor_only_because_another_reports_first():
    desk = Desk()
    desk.core.adopt(7, ("a", "b", "c"))
    desk.put("b", silent=True)
    desk.put("c", stage=Stage.READY, version=40, failed=7)  # and a is gone
    assert desk.ordered() is None
    assert desk.core.why == "a has ended; waits for b to report to the restarted dispatcher"
    assert desk.ordered(after=14.0) is None
    assert desk.ordered(after=1.0) == ("resume", ("c",))


def test_a_restarted_dispatcher_awaits_those_that_stand_by_with_their_state():
    desk = Desk()
    desk.core.adopt(7, ("a",))
    desk.core.adopt(8, ())
    desk.put("a", silent=True)
    desk.put("b", stage=Stage.READY, version=3)  # an old version, of an earlier generation
    desk.see()
    assert desk.ordered(after=5.0) is None
    desk.put("a", silent=False, stage=Stage.READY, version=40)
    desk.see()
    assert desk.ordered(after=0.3) == ("resume", ("a", "b"))


# ---- the end


def test_it_is_finished_when_every_member_is():
    desk = training("a", "b")
    desk.put("a", stage=Stage.FINISHED)
    desk.put("c", stage=Stage.READY)
    assert desk.ordered(after=5.0) is None
    assert desk.core.phase is not Phase.FINISHED
    desk.put("b", stage=Stage.FINISHED)
    assert desk.see() == [Finished(1, ("a", "b"), 10)]
    assert desk.core.phase is Phase.FINISHED
    assert desk.see() == []


def test_a_death_after_one_has_finished_takes_nothing_back():
    desk = training("a", "b")
    desk.put("a", stage=Stage.FINISHED)
    desk.put("b", exited=True)
    assert desk.see() == [Finished(1, ("a", "b"), 10)]


def test_a_last_barrier_broken_by_a_death_is_passed_again_without_the_others():
    desk = training("a", "b", "c", min_workers=3)
    desk.put("d", stage=Stage.READY)
    desk.see()
    desk.put("a", stage=Stage.FINISHED)
    desk.put("b", failed=1, generation=0)
    desk.put("c", exited=True)
    assert desk.ordered() is None
    assert desk.ordered(after=0.6) == ("failure", ("b",))
    desk.put("b", stage=Stage.FINISHED)
    assert [type(c) for c in desk.see()] == [Finished]


def test_a_straggler_at_the_end_is_evicted():
    desk = training("a", "b")
    desk.put("a", stage=Stage.FINISHED)
    assert desk.see() == []
    assert [type(c) for c in desk.see(after=60.0)] == [Evicted, Finished]


def test_after_a_restart_while_all_stood_by_a_generation_that_nobody_forms_is_timed():
    desk = Desk(min_workers=2)
    desk.core.adopt(1, ("a", "b"))
    desk.core.adopt(2, ())
    desk.put("a", "b", stage=Stage.READY, version=10)
    desk.see()
    assert desk.ordered(after=0.2) == ("resume", ("a", "b"))
    desk.see()
    assert desk.ordered(after=29.9) is None
    assert desk.ordered(after=0.2) == ("failure", ("a", "b"))
