"""The restart policy: who is to blame decides."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from spotfleet.dispatcher.jobs.restart import (
    Cause,
    End,
    History,
    JobFailure,
    cause_of,
    ended,
    progressed,
    ready_at,
    set_up,
    unfit,
)
from spotfleet.protocol.messages import STUCK_EXIT, Exit, WorkerReport

A, B = ("h-a", 0), ("h-b", 0)


def crash(slot=A, at=0.0, *, n=1, cause=Cause.USER, rank=-1, error="boom") -> End:
    return End(f"{slot[0]}/{slot[1]}/{n}", slot, cause, at, rank, error)


def killed(at: float, n: int, cause: Cause = Cause.SIGNAL) -> End:
    """SIGKILL to a worker of slot A that has made steps."""
    return replace(crash(A, at, n=n, cause=cause, error="ended by SIGKILL"), stepped=True)


def after(ends: list[End], group: frozenset[str] = frozenset({"another"}), history: History | None = None):
    """The history and the verdict on the last of `ends`."""
    history, verdict = history or History(), None
    for end in ends:
        history, verdict = ended(history, end, group)
        if verdict:
            break
    return history, verdict


@pytest.mark.parametrize(("exit", "report", "cause"), [
    (Exit(0, done=True), {}, Cause.DONE),
    (Exit(1), {"error": "Traceback"}, Cause.USER),
    (Exit(1), {"error": "Traceback", "blame_peer": True}, Cause.PEER),
    (Exit(1), {"error": "setup failed", "setup_tries": 1}, Cause.SETUP),
    (Exit(1), {"error": "setup failed", "setup_tries": 1, "blame_host": True}, Cause.HOST),
    (Exit(-9), {}, Cause.SIGNAL),
    (Exit(3), {}, Cause.USER),
    (Exit(0), {}, Cause.USER),
    (Exit(STUCK_EXIT), {}, Cause.PEER),
    (Exit(STUCK_EXIT), {"error": "the script left with sys.exit(75)"}, Cause.USER),
])
def test_an_exit_is_blamed_on_whom_it_belongs_to(exit, report, cause):
    assert cause_of(exit, WorkerReport("h/0/1", "j", **report))[0] is cause


def test_an_exit_without_a_traceback_says_how_it_ended():
    assert cause_of(Exit(-signal.SIGKILL), WorkerReport("h/0/1", "j"))[1] == "ended by SIGKILL"
    assert cause_of(Exit(3), WorkerReport("h/0/1", "j"))[1] == "the process exited with status 3"


def test_a_script_that_fails_on_every_worker_fails_the_job_at_once_with_the_traceback_of_rank_0():
    one, two = crash(A, 0.0, rank=1, error="of rank 1"), crash(B, 1.5, rank=0, error="of rank 0")
    group = frozenset({one.worker, two.worker})
    assert after([one], group)[1] is None
    assert after([one, two], group)[1] == JobFailure("the script failed on every worker", "of rank 0")


def setup_end(slot, at=0.0, tries=1, sure=False, n=0):
    error = "setup failed: line 1 (`pip install nothing`) exited with code 1\nits last output:\n  no"
    return replace(crash(slot, at, n=n, cause=Cause.SETUP, error=error), tries=tries, sure=sure)


def test_a_host_whose_device_is_lost_is_replaced_and_three_of_them_in_a_row_fail_the_job():
    error = "torch.AcceleratorError: CUDA error: unspecified launch failure\nCompile with `TORCH_USE_CUDA_DSA`."
    lost = [crash((host, 0), float(n), n=n, cause=Cause.HOST, error=error) for host in "abc" for n in (1, 2)]
    history, verdict = after(lost[:2])
    assert verdict is None and unfit(history, 3.0) == {"a": f"2 workers failed there: {error.splitlines()[0]}"}
    assert after(lost)[1] == JobFailure("3 hosts in a row had no working CUDA device", error)


def test_a_setup_that_fails_on_one_host_blames_the_host_and_two_tries_replace_it():
    history, verdict = after([setup_end(A), setup_end(("h-a", 1), n=1)], frozenset({"another"}))  # they shared one try
    assert (verdict, unfit(history, 0.0)) == (None, {})
    history, verdict = after([setup_end(A, 900.0, tries=2, n=2)], history=history)  # a try may take long
    assert verdict is None
    assert unfit(history, 900.0) == {
        "h-a": "2 workers failed there: setup failed: line 1 (`pip install nothing`) exited with code 1"}


def test_a_setup_that_fails_on_three_hosts_in_a_row_fails_the_job_for_then_it_is_the_setup():
    ends = [setup_end((name, 0), n=n) for n, name in enumerate("abc")]
    assert after(ends[:2], frozenset(e.worker for e in ends[:2]))[1] is None  # though it is every worker of the job
    why = "on 3 hosts in a row: setup failed: line 1 (`pip install nothing`) exited with code 1"
    assert after(ends)[1] == JobFailure(why, ends[-1].error)
    assert after(ends[2:], history=set_up(after(ends[:2])[0]))[1] is None  # it worked somewhere in between
    assert after(ends[2:], history=progressed(after(ends[:2])[0], 1))[1] is None


def test_what_another_host_would_hear_too_replaces_no_host_and_fails_the_job_at_the_third_answer():
    ends = [setup_end(A, n=n, tries=n + 1, sure=True) for n in range(3)]
    history, verdict = after(ends)
    assert (unfit(history, 0.0), after(ends[:2])[1]) == ({}, None)
    assert verdict is not None and verdict.why.endswith("(asked 3 times, from 1 hosts)")


def test_crashes_far_apart_are_not_taken_for_one_cause():
    one, two = crash(A, 0.0), crash(B, 2.5)
    assert after([one, two], frozenset({one.worker, two.worker}))[1] is None


def test_the_only_worker_that_fails_fails_the_job():
    assert after([crash()], frozenset({crash().worker}))[1] == JobFailure("the script failed", "boom")


def test_three_crashes_in_a_row_fail_the_job_but_progress_between_them_forgives():
    ends = [crash(A, 10.0 * n, n=n) for n in range(3)]
    history, verdict = after(ends[:2])
    assert verdict is None
    assert after(ends[2:], history=history)[1] == JobFailure("the script failed 3 times in a row without progress",
                                                             "boom")
    assert after(ends[2:], history=progressed(history, 5))[1] is None


def test_a_peers_loss_never_fails_the_job_and_restarts_at_once():
    history, verdict = after([crash(cause=Cause.PEER, at=7.0)])
    assert (verdict, ready_at(history, A)) == (None, 7.0)
    assert after([crash(cause=Cause.PEER, n=n) for n in range(20)])[1] is None
    assert after([crash(cause=Cause.PEER)], frozenset({crash().worker}))[1] is None


def test_a_lost_host_leaves_no_mark():
    assert after([crash(cause=Cause.LOST, n=n) for n in range(20)]) == (History(), None)


def test_a_crashing_slot_waits_one_second_then_twice_as_long_each_time_up_to_a_minute():
    history, waits = History(), []
    for n in range(9):
        history, _ = ended(history, crash(A, at=100.0 * n, n=n), frozenset({"another"}))
        waits.append(ready_at(history, A) - 100.0 * n)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_other_slots_do_not_wait_for_a_crashing_one():
    history, _ = after([crash(A, 50.0)])
    assert ready_at(history, B) == 0.0


def test_a_slot_that_was_well_for_long_starts_from_nothing_again():
    history, _ = after([crash(A, at, n=n, cause=Cause.PEER) for n, at in enumerate([0.0, 1.0, 2.0])])
    assert ready_at(history, A) > 2.0
    history, _ = ended(history, crash(A, 1000.0, cause=Cause.PEER), frozenset({"another"}))
    assert ready_at(history, A) == 1000.0


def test_five_signals_at_one_slot_fail_the_job_four_and_one_elsewhere_do_not():
    ends = [crash(A, 100.0 * n, n=n, cause=Cause.SIGNAL, error="ended by SIGKILL") for n in range(5)]
    assert after([*ends[:4], crash(B, 500.0, cause=Cause.SIGNAL)])[1] is None
    verdict = after(ends)[1]
    assert verdict is not None and "5th time" in verdict.why


@pytest.mark.parametrize("cause", [Cause.SIGNAL, Cause.PEER])
def test_a_worker_that_trained_and_is_lost_again_and_again_starts_at_once_each_time(cause):
    history, waits = History(), []
    for n in range(20):
        history = progressed(history, n + 1)
        history, verdict = ended(history, killed(3.0 * n, n, cause), frozenset({"another"}))
        waits.append(ready_at(history, A) - 3.0 * n)
        assert verdict is None
    assert waits == [0.0] * 20


def test_a_worker_killed_before_its_first_step_waits_although_the_others_come_further():
    history, waits = History(), []
    for n in range(4):
        history = progressed(history, n + 1)
        history, _ = ended(history, crash(A, 100.0 * n, n=n, cause=Cause.SIGNAL), frozenset({"another"}))
        waits.append(ready_at(history, A) - 100.0 * n)
    assert waits == [0.0, 1.0, 2.0, 4.0]


def test_a_worker_that_repeats_the_same_steps_and_is_killed_for_them_waits_and_fails_the_job_at_last():
    """As one that runs out of memory at the same step after each restart."""
    history = progressed(History(), 100)
    waits, verdict = [], None
    for n in range(6):
        history, verdict = ended(history, killed(at=10.0 * n, n=n), frozenset({"another"}))
        waits.append(ready_at(history, A) - 10.0 * n)
    assert waits == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0]
    assert verdict is not None and "5th time" in verdict.why


def test_progress_forgives_signals():
    ends = [crash(A, 100.0 * n, n=n, cause=Cause.SIGNAL) for n in range(5)]
    history, _ = after(ends[:4])
    assert after(ends[4:], history=progressed(history, 1))[1] is None
