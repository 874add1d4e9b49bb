"""Whom a dispatcher believes that asks hosts for jobs which it does not know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfleet.dispatcher.disk.jobfile import JobRecord, name_for
from spotfleet.dispatcher.recovery.job_adoption import Adoption, check, ended_in
from spotfleet.fleet.domain.events import JobChanged, JobsPruned, TakenOver
from spotfleet.model import JobSpec, JobState
from spotfleet.protocol.messages import AgentReport, Assignment, HeldJob, WorkerLaunch, WorkerReport, WorkerState


def report(host: str = "f-0", job: str = "j-1", *, generation: int = 0, held: tuple[HeldJob, ...] = ()) -> AgentReport:
    worker = WorkerState(WorkerReport(f"{host}/0/1", job, generation=generation), 0)
    return AgentReport(host, "a", "127.0.0.1", 1, (worker,), held=held)


def held(job: str = "j-1", generation: int = 3, members: tuple[str, ...] = ("f-0/0/1",), **more: object) -> HeldJob:
    launch = WorkerLaunch(job, JobSpec("j", run="x"), {"KEY": "value"}, age_s=50.0)
    return HeldJob(job, launch, (Assignment(generation, 0, members, ""),), **more)


def told(*reports: AgentReport, until: float = 1000.0) -> Adoption:
    adoption = Adoption()
    adoption.open_until = until
    for said in reports:
        adoption.receive(replace(said, held=()), {}, 0.0, settled=False)
        adoption.receive(said, {}, 0.0, settled=False)
    return adoption


def test_a_job_is_made_of_what_its_hosts_hold_with_the_highest_generation():
    adoption = told(report(held=(held(generation=3),)), report("f-1", held=(held(generation=4, members=("f-1/0/1",)),)))
    found = adoption.found((), ("f-0", "f-1"), [], unix=100.0)
    assert [(a.record.job, a.record.submitted_at, a.secrets, a.hosts) for a in found] == [
        ("j-1", 50.0, {"KEY": "value"}, ("f-0", "f-1"))]
    assert found[0].record.groups == ((3, ("f-0/0/1",)), (4, ("f-1/0/1",)))


@pytest.mark.parametrize(("grants", "ordered", "seals"), [
    (("right", ""), 3, True), (("right", "wrong"), 3, True), (("", ""), 0, False)])
def test_of_the_generations_that_hosts_name_those_count_as_ordered_that_a_dispatcher_granted(
        grants: tuple[str, str], ordered: int, seals: bool):
    adoption = Adoption(lambda job, given: given.grant == "right")
    adoption.open_until = 1000.0
    for generation, grant in zip((3, 40), grants, strict=True):
        mine = held(generation=generation)
        mine = replace(mine, assignments=tuple(replace(a, grant=grant) for a in mine.assignments))
        said = report(f"f-{generation}", held=(mine,))
        adoption.receive(replace(said, held=()), {}, 0.0, settled=False)
        adoption.receive(said, {}, 0.0, settled=False)
    (found,) = adoption.found((), ("f-3", "f-40"), [], unix=100.0)
    assert (found.record.ordered, found.record.seals) == (ordered, seals)


def test_no_number_of_a_job_is_given_twice_nor_one_that_a_lost_dispatcher_may_have_given():
    assert name_for(JobSpec("my job"), ["a-7", "b-2"], above=0) == "my-job-8"
    assert name_for(JobSpec("j"), [], above=2000) == "j-2001"


def test_what_a_host_says_that_the_cloud_does_not_list_makes_no_job():
    assert told(report(held=(held(),))).found((), ("f-1",), [], unix=0.0) == []


def test_unknown_jobs_are_believed_in_after_a_takeover_only():
    adoption = told(report(held=(held(),)), until=0.0)
    assert adoption.asked("f-0") == () and adoption.found((), ("f-0",), [], unix=0.0) == []


def test_a_job_that_has_ended_is_not_taken_from_a_host_that_still_holds_it():
    adoption = Adoption()
    adoption.open_until, adoption.ended = 1000.0, {"j-1"}
    for said in (report(), report(held=(held(),))):
        adoption.receive(said, {}, 0.0, settled=False)
        adoption.receive(said, {}, 0.0, settled=True)
    assert adoption.asked("f-0") == () and adoption.found((), ("f-0",), [], unix=0.0) == []


def test_the_ledger_tells_which_jobs_had_ended_before_the_takeover():
    def changed(job: str, state: JobState) -> JobChanged:
        return JobChanged(1.0, job, state, "")

    events = [changed("done-1", JobState.SUCCEEDED), changed("live-2", JobState.RUNNING),
              changed("back-3", JobState.FAILED), changed("gone-4", JobState.RUNNING),
              TakenOver(2.0, "f-d-1", False, ""),
              changed("back-3", JobState.RECOVERING), changed("lost-5", JobState.FAILED),
              JobsPruned(3.0, ("gone-4",), 9)]
    assert ended_in(events) == {"done-1", "gone-4"}  # a late host may still hold lost-5


def test_what_nobody_asked_for_is_not_heard():
    adoption = Adoption()
    adoption.open_until = 1000.0
    adoption.receive(report(held=(held("other-1"),)), {}, 0.0, settled=False)
    assert adoption.found((), ("f-0",), [], unix=0.0) == []


def test_repeated_and_late_words_change_nothing():
    once = told(report(held=(held(),)))
    again = told(report(held=(held(),)), report(held=(held(),)), report())
    assert again.found((), ("f-0",), [], unix=9.0) == once.found((), ("f-0",), [], unix=9.0) != []


def test_a_worker_without_a_launch_is_left_alone_only_until_the_dispatcher_has_settled():
    bare = HeldJob("j-1")
    adoption = told(report(held=(bare,)))
    assert adoption.asked("f-0") == ("j-1",) and not adoption.awaits_answer("f-0")
    adoption.receive(report(held=(bare,)), {}, 0.0, settled=True)
    assert adoption.asked("f-0") == ()


def test_a_known_job_is_asked_about_only_where_an_agent_knows_more_than_the_disk():
    record, adoption = JobRecord("j-1", JobSpec("j", run="x"), 0.0, groups=((3, ("f-0/0/1",)),)), Adoption()
    adoption.receive(report(generation=3), {"j-1": record}, 0.0, settled=False)
    assert adoption.asked("f-0") == ()
    adoption.receive(report(generation=4), {"j-1": record}, 0.0, settled=False)
    assert adoption.asked("f-0") == ("j-1",)


@pytest.mark.parametrize("odd", [
    held("../../etc"), held(".hidden"), held(members=("f-0/x/1",)), held(members=("one",)), held(generation=-1),
    replace(held(), launch=WorkerLaunch("another", JobSpec("j"), {})),
    replace(held(), launch=WorkerLaunch("j-1", JobSpec("j", min_workers=2, max_workers=1), {})),
    replace(held(), launch=WorkerLaunch("j-1", JobSpec("j", bundle="../boot.json"), {})),
    replace(held(), launch=WorkerLaunch("j-1", JobSpec("j", max_workers=1 << 40), {})),
    replace(held(), launch=WorkerLaunch("j-1", JobSpec("j"), {"A=B": "x"})),
])
def test_what_no_agent_would_hold_is_refused(odd: HeldJob):
    with pytest.raises(ValueError, match=r"AgentReport\.held"):
        check(report(held=(odd,)))
