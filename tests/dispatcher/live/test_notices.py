"""Which events are notified, in which words: each host once, jobs at their end, budgets; only what was chosen."""

from __future__ import annotations

from spotfleet.dispatcher.live.notices import NotificationReader
from spotfleet.fleet.domain.events import BudgetReached, Event, HostListed, HostNoticed, JobChanged
from spotfleet.model import NOTIFY_ON, CloudState, JobState, Run


def listed(host: str, *taken: bool, state: CloudState = CloudState.TERMINATED) -> HostListed:
    return HostListed(9.0, host, "i-1", state, tuple(Run(1.0, 5.0, taken=t) for t in taken), why="reclaimed")


def texts(*events: Event, on: tuple[str, ...] = NOTIFY_ON) -> list[str]:
    reader = NotificationReader("lab", on)
    return [found.text for event in events if (found := reader.take(event)) is not None]


NOTICE = HostNoticed(1.0, "lab-3", 120.0, "terminate")


def test_a_host_with_a_notice_is_notified_at_the_notice_and_not_again_at_its_end():
    assert texts(NOTICE, listed("lab-3", True), listed("lab-3", True)) == [
        "spotfleet lab: host lab-3 is preempted: it will be terminated in 120 s"]


def test_a_host_that_is_taken_without_a_notice_is_notified_once_and_one_that_we_end_never():
    assert texts(listed("lab-4", True), listed("lab-4", True), listed("lab-5", False)) == [
        "spotfleet lab: host lab-4 was preempted without a notice: reclaimed"]


def test_each_end_of_a_host_that_comes_back_counts():
    again = HostNoticed(20.0, "lab-3", 30.0, "stop")
    stopped = CloudState.STOPPED
    found = texts(NOTICE, listed("lab-3", True, state=stopped), again, listed("lab-3", True, True, state=stopped),
                  listed("lab-3", True, True, True))
    assert [t.partition("lab-3 ")[2][:24] for t in found] == [
        "is preempted: it will be", "is preempted: it will be", "was preempted without a "]


def test_a_hint_is_none():
    assert texts(HostNoticed(1.0, "lab-3", 0.0, "", "rebalance")) == []


def test_the_end_of_a_job_and_a_budget_are_notified():
    running = JobChanged(1.0, "gpt-2", JobState.RUNNING, "")
    failed = JobChanged(2.0, "gpt-2", JobState.FAILED, "line 1\nline 2\x1b[2J", 120)
    done = JobChanged(3.0, "gpt-3", JobState.SUCCEEDED, "")
    budget = BudgetReached(4.0, "max_cost", 80, 8, 10, "$8 of $10 are spent")
    assert texts(running, failed, done, budget) == [
        "spotfleet lab: job gpt-2 has failed at step 120: line 1 line 2\\x1b[2J",
        "spotfleet lab: job gpt-3 has succeeded",
        "spotfleet lab: 80 % of max_cost: $8 of $10 are spent"]


def test_only_chosen_events_are_notified():
    failed = JobChanged(2.0, "gpt-2", JobState.FAILED, "why")
    assert texts(NOTICE, failed, on=("failed",)) == ["spotfleet lab: job gpt-2 has failed: why"]
