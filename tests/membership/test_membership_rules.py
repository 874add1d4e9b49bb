"""Each rule of Membership by itself; more in test_membership_leaving.py, whole histories in test_random_histories.py.

Faults that were sown to see these tests fail, and the first test that did:
- spares go to the end instead of the dead rank: a_warm_spare_fills_the_dead_rank
- a worker in INIT may join: a_founder_left_in_init_by_a_death_is_told_to_go_on_and_awaited
- a join or leave is ordered while another generation forms: members_that_do_not_form_in_time_are_evicted
- no grace after a failure: a_failure_waits_for_the_evidence_of_a_death
- silence alone is never death: a_silent_member_is_given_three_seconds
- silence is not death at once when a collective broke: a_silent_member_is_dead_at_once_when_a_collective_broke
- forming has no time limit: members_that_do_not_form_in_time_are_evicted (and random histories)
- a planned generation is late from its order on: a_planned_change_may_take_as_long_as_the_step
- failures in a row blame nobody: after_three_failures_in_a_row (and random histories)
- stragglers of older groups are not aborted: a_straggler_in_an_old_group_aborts_it
- the last rank's store is used: workers_of_one_host_have_neighbouring_ranks
"""

from __future__ import annotations

from spotfleet.membership import Evicted, Formed, Ordered, Phase
from spotfleet.protocol.messages import Assignment, RankInfo, Stage
from tests.support.membership.membership_desk import Desk, training

# ---- the first generation


def test_the_first_generation_waits_for_all_that_are_starting():
    desk = Desk(min_workers=1, max_workers=3)
    desk.put("a", "b")
    desk.expected = 1
    assert desk.ordered() is None
    assert desk.core.why == "2 workers started, waits for 1 more"
    desk.put("c")
    desk.expected = 0
    assert desk.ordered() == ("start", ("a", "b", "c"))


def test_the_first_generation_does_not_wait_for_a_slow_starter_for_ever():
    desk = Desk(min_workers=1, max_workers=3)
    desk.put("a", "b")
    desk.expected = 1
    assert desk.ordered() is None
    assert desk.ordered(after=9.9) is None
    assert desk.ordered(after=0.2) == ("start", ("a", "b"))


def test_below_min_nothing_starts():
    desk = Desk(min_workers=2)
    desk.put("a")
    assert desk.ordered(after=100.0) is None
    assert (desk.core.phase, desk.core.why) == (Phase.STARTING, "needs 2 workers, 1 started, 0 starting")


def test_workers_of_one_host_have_neighbouring_ranks():
    desk = Desk()
    desk.put("a/1", local_rank=1)
    desk.put("b/0")
    desk.put("a/0")
    assert desk.ordered() == ("start", ("a/0", "a/1", "b/0"))
    assert desk.core.assignment("a/1") == Assignment(
        1, 1, ("a/0", "a/1", "b/0"), store="a/0:1", local_rank=1, local_size=2, urgent=True
    )


def test_a_worker_without_a_store_founds_nothing():
    desk = Desk()
    desk.put("a", store="")
    desk.put("b")
    assert desk.ordered() == ("start", ("b",))


def test_founders_are_not_told_that_the_job_is_founded_and_joiners_are():
    desk = training("a", "b")
    desk.put("c")
    desk.see()
    assert not desk.core.orders("a").founded
    orders = desk.core.orders("c")
    assert (orders.founded, orders.provisional) == (True, RankInfo(2, 3, cross_rank=2, cross_size=3))


def test_a_founder_left_in_init_by_a_death_is_told_to_go_on_and_awaited():
    desk = Desk()
    desk.put("a", "b")
    desk.see()
    desk.put("b", exited=True)
    assert desk.ordered() is None
    assert desk.core.phase is Phase.HOLDING
    assert desk.core.why == "b has ended; needs 1 worker, 0 can train"
    assert desk.core.orders("a").founded
    desk.put("a", stage=Stage.READY)
    assert desk.ordered() == ("resume", ("a",))


def test_founders_on_their_way_to_elastic_run_are_awaited_after_a_death_but_not_for_ever():
    desk = Desk()
    desk.put("a", "b", "c")
    desk.see()
    desk.put("a", stage=Stage.READY, failed=1)
    desk.put("c", exited=True)
    assert desk.ordered() is None
    assert desk.core.why == "c has ended; waits for b to reach hvd.elastic.run"
    assert desk.ordered(after=9.9) is None
    assert desk.ordered(after=0.1) == ("resume", ("a",))


# ---- deaths


def test_survivors_keep_their_ranks_and_a_warm_spare_fills_the_dead_rank():
    desk = training("a", "b", "c", max_workers=3)
    desk.put("d", stage=Stage.READY)
    desk.see()
    desk.put("b", exited=True)
    assert desk.ordered() == ("death", ("a", "d", "c"))
    assert desk.core.assignment("a").urgent


def test_a_spare_on_another_host_than_the_lost_workers_is_preferred():
    desk = training("a/0", "b/0", max_workers=2)
    desk.put("b/1", "c/0", stage=Stage.READY)
    desk.see()
    desk.put("b/0", exited=True)
    assert desk.ordered() == ("death", ("a/0", "c/0"))


def test_a_spare_beyond_max_fills_the_hole_in_the_same_generation_and_nothing_follows():
    desk = training("a", "b", max_workers=2)
    desk.put("c", stage=Stage.READY)
    assert desk.ordered(after=10.0) is None
    desk.put("b", exited=True)
    assert desk.ordered() == ("death", ("a", "c"))
    desk.form()
    desk.put("d", stage=Stage.READY)  # the spare's successor
    desk.see()
    assert desk.ordered(after=10.0) is None


def test_ranks_close_up_without_a_spare():
    desk = training("a", "b", "c")
    del desk.views["a"]
    assert desk.ordered() == ("death", ("b", "c"))
    assert desk.core.assignment("c").store == "b:1"


def test_a_joiner_that_is_not_warm_keeps_nobody_waiting():
    desk = training("a", "b")
    desk.put("c", stage=Stage.INIT)
    desk.put("b", exited=True)
    assert desk.ordered() == ("death", ("a",))


def test_a_death_while_a_generation_forms_pre_empts_it():
    desk = training("a", "b")
    desk.put("c", stage=Stage.READY)
    desk.see()
    assert desk.ordered(after=0.3) == ("join", ("a", "b", "c"))
    desk.put("c", exited=True)
    assert desk.ordered() == ("death", ("a", "b"))
    assert desk.core.assignment("a").urgent


def test_a_silent_member_is_given_three_seconds():
    desk = training("a", "b")
    desk.put("b", silent=True)
    assert desk.ordered() is None
    assert desk.ordered(after=2.9) is None
    assert desk.ordered(after=0.2) == ("death", ("a",))


def test_a_member_that_said_nothing_before_its_connection_ended_has_been_silent_for_as_long():
    desk = training("a", "b")
    desk.put("b", silent=True, report_age_s=2.9)
    assert desk.ordered() is None
    desk.put("b", report_age_s=3.0)
    assert desk.ordered(after=0.1) == ("death", ("a",))


def test_a_silent_member_is_dead_at_once_when_a_collective_broke():
    desk = training("a", "b")
    desk.put("b", silent=True)
    desk.put("a", failed=1, generation=0)
    assert desk.ordered() == ("death", ("a",))


def test_an_agent_that_restarts_disturbs_nobody():
    desk = training("a", "b", min_workers=2)
    desk.put("b", silent=True)
    assert desk.ordered(after=2.0) is None
    desk.put("b", silent=False)
    assert desk.ordered(after=60.0) is None
    assert desk.core.phase is Phase.RUNNING


def test_a_returning_member_is_a_spare_like_any_other_and_is_fenced_meanwhile():
    desk = training("a", "b")
    desk.put("b", silent=True)
    desk.see()
    assert desk.ordered(after=3.0) == ("death", ("a",))
    desk.form()
    desk.put("b", silent=False, generation=1)
    desk.see()
    assert (desk.core.assignment("b").rank, desk.core.assignment("b").urgent) == (-1, True)
    assert desk.ordered(after=0.3) == ("join", ("a", "b"))


def test_a_straggler_in_an_old_group_aborts_it_also_while_the_others_change_by_plan():
    desk = training("a", "b")
    desk.put("b", silent=True)
    desk.see()
    assert desk.ordered(after=3.0) == ("death", ("a",))
    desk.form()
    desk.put("b", generation=1)
    desk.put("c", stage=Stage.READY)
    desk.see()
    assert desk.ordered(after=0.3) == ("join", ("a", "c"))
    assert (desk.core.assignment("a").urgent, desk.core.assignment("b").urgent) == (False, True)


# ---- failures without a death


def test_a_failure_waits_for_the_evidence_of_a_death():
    desk = training("a", "b", "c")
    desk.put("a", failed=1, generation=0)
    assert desk.ordered() is None
    desk.put("c", exited=True)
    assert desk.ordered(after=0.2) == ("death", ("a", "b"))


def test_a_failure_without_a_death_forms_the_same_members_again():
    desk = training("a", "b", "c")
    desk.put("a", failed=1, generation=0)
    desk.see()
    assert desk.ordered(after=0.6) == ("failure", ("a", "b", "c"))


def test_after_three_failures_in_a_row_the_one_that_never_answered_is_evicted():
    desk = training("a", "b", "c")
    evicted = []
    for _ in range(3):
        desk.put("a", "c", failed=desk.core.generation, generation=0)
        desk.see()
        evicted += [c.workers for c in desk.see(after=0.6) if isinstance(c, Evicted)]
    assert evicted == [("b",)]
    assert desk.core.members == ("a", "c")


def test_progress_between_failures_forgives():
    desk = training("a", "b")
    for version in range(11, 20):
        desk.put("a", "b", failed=desk.core.generation, generation=0)
        desk.see()
        assert not any(isinstance(c, Evicted) for c in desk.see(after=0.6))
        desk.form(version)


def test_the_last_holder_of_the_state_is_never_evicted_for_a_failure():
    desk = training("a", max_workers=2)
    desk.put("b", stage=Stage.READY)
    desk.see()
    desk.see(after=0.3)
    evicted = []
    for _ in range(4):
        desk.put("b", failed=desk.core.generation)
        desk.see()
        evicted += [c.workers for c in desk.see(after=0.6) if isinstance(c, Evicted)]
    assert evicted == [("b",)]


def test_a_last_holder_that_never_answers_is_evicted_in_the_end():
    desk = training("a", max_workers=2)
    desk.put("b", "c", stage=Stage.READY)
    desk.see()
    desk.see(after=0.3)
    evicted = []
    for _ in range(6):
        desk.put(desk.core.members[1], failed=desk.core.generation)
        desk.see()
        evicted += [c.workers for c in desk.see(after=0.6) if isinstance(c, Evicted)]
    assert evicted == [("b",), ("a",)]


def test_a_founder_that_hangs_in_init_is_evicted():
    desk = Desk(min_workers=2)
    desk.put("a", "b")
    desk.see()
    desk.put("a", failed=1, stage=Stage.READY)
    desk.see()
    desk.see(after=0.6)
    assert desk.see(after=29.0) == []
    assert desk.see(after=1.0) == [Evicted(1, ("b",), "b does not answer in init()")]


def test_members_that_do_not_form_in_time_are_evicted_and_the_rest_forms_again():
    desk = training("a", "b", "c")
    desk.put("c", exited=True)
    assert desk.ordered() == ("death", ("a", "b"))
    desk.put("a", generation=2)
    assert desk.see() == []
    changes = desk.see(after=30.0)
    assert [type(c) for c in changes] == [Evicted, Ordered]
    assert (changes[0].workers, changes[1].members) == (("b",), ("a",))


def test_a_slow_transfer_gets_twice_the_time_on_the_next_try():
    desk = training("a", "b", "c")
    desk.put("c", exited=True)
    assert desk.ordered() == ("death", ("a", "b"))
    desk.see()
    assert desk.ordered(after=30.0) == ("failure", ("a", "b"))
    assert desk.ordered() is None
    assert desk.ordered(after=59.0) is None
    assert desk.ordered(after=1.0) == ("failure", ("a", "b"))


def test_a_planned_change_may_take_as_long_as_the_step():
    desk = training("a", "b")
    desk.put("c", stage=Stage.READY)
    desk.see()
    assert desk.ordered(after=0.3) == ("join", ("a", "b", "c"))
    desk.see()
    assert desk.ordered(after=600.0) is None
    assert not desk.core.assignment("a").urgent
    desk.put("a", "b", generation=0)  # they have come to the boundary; c hangs
    desk.see()
    assert desk.ordered(after=30.0) == ("failure", ("a", "b", "c"))


# ---- joins


def test_joins_close_together_share_one_generation():
    desk = training("a")
    desk.put("b", stage=Stage.READY)
    assert desk.ordered() is None
    desk.put("c", stage=Stage.READY)
    assert desk.ordered(after=0.15) is None
    assert desk.ordered(after=0.25) == ("join", ("a", "b", "c"))
    assert not desk.core.assignment("a").urgent


def test_a_join_while_a_generation_forms_waits():
    desk = training("a")
    desk.put("b", stage=Stage.READY)
    desk.see()
    desk.see(after=0.3)
    desk.put("c", stage=Stage.READY)
    assert desk.ordered(after=5.0) is None
    assert desk.form() == [Formed(2, ("a", "b"), "join", "1 worker joined", 10)]
    assert desk.ordered(after=0.3) == ("join", ("a", "b", "c"))


def test_more_than_max_are_spares():
    desk = training("a", "b", max_workers=2)
    desk.put("c", stage=Stage.READY)
    desk.see()
    assert desk.ordered(after=60.0) is None


def test_nothing_changes_while_a_founder_is_on_its_way_to_elastic_run():
    desk = training("a", "b")
    desk.put("b", stage=Stage.INIT)
    desk.put("c", stage=Stage.READY)
    desk.see()
    assert desk.ordered(after=60.0) is None
    assert desk.core.why == "generation 1 on 2 workers; waits for b to reach hvd.elastic.run"
