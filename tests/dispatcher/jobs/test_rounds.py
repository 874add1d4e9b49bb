"""Rounds of a job that is started anew at each change: when one begins, what ends it, and when the job fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfleet.dispatcher.hosts import Departure
from spotfleet.fleet.domain.events import JobChanged
from spotfleet.model import JobState
from tests.support.dispatcher.anew_job import AnewJob


@pytest.fixture(autouse=True)
def _without_a_disk(monkeypatch):
    monkeypatch.setattr("spotfleet.dispatcher.disk.jobfile.try_save", lambda *_: True)


def running(tmp_path: Path, **spec: object) -> AnewJob:
    """A job whose first round runs on two hosts."""
    job = AnewJob(tmp_path / "j", **spec)
    job.step(2)
    assert [restarts for restarts, _ in job.rounds] == [0] and job.job.state is JobState.RUNNING
    return job


def whys(job: AnewJob) -> list[str]:
    return [e.why for e in job.events if isinstance(e, JobChanged) and e.state is JobState.RECOVERING]


def test_after_a_host_is_lost_all_start_anew_without_it_and_an_event_names_the_reason(tmp_path):
    job = running(tmp_path)
    first = job.rounds[0][1]
    job.lose("h1")
    job.step(15)
    (restarts, members), = job.rounds[1:]
    assert restarts == 1 and len(members) == 1 and not set(members) & set(first)
    assert whys(job) == [f"{first[1]} has ended; all workers start anew"]
    assert job.job.record.restarts == 1 and job.job.record.failures == 0


def test_a_rank_that_runs_on_long_after_the_others_ended_well_is_named_with_its_host(tmp_path):
    job = running(tmp_path)
    job.ends(0, 0, done=True)
    job.step(50)
    assert job.job.state is JobState.RUNNING and "still runs" not in job.job.record.why
    job.step(20)
    assert job.job.record.why == (
        "rank 1 on h1 still runs, over 60 s after the others ended with status 0: see `spotfleet logs j --rank 1`; if "
        "it hangs at its exit, call torch.distributed.destroy_process_group() at the script's end")
    job.ends(1, 0, done=True)
    job.step(2)
    assert job.job.state is JobState.SUCCEEDED and job.job.record.restarts == 0


def test_no_process_of_the_next_round_starts_while_one_of_the_last_round_runs(tmp_path):
    job = running(tmp_path)
    job.lingering = {job.rounds[0][1][0]}
    job.lose("h1")
    job.hosts.append("h2")
    job.step(30)
    assert len(job.rounds) == 1 and "waits for h0/0/1 to end" in job.job.record.why
    job.lingering = set()
    job.step(15)
    assert len(job.rounds) == 2 and len(job.live()) == 1


def test_a_host_that_is_silent_holds_no_round_up_and_its_port_is_not_met_again(tmp_path):
    job = running(tmp_path)
    stores = {o.orders.assignment.store for o, _ in job.processes.values()}
    job.silent = {"h1"}
    job.step(20)
    assert len(job.rounds) == 2
    assert job.processes[job.rounds[1][1][0]][0].orders.assignment.store not in stores


def test_a_join_starts_all_anew_once_no_other_host_comes(tmp_path):
    job = AnewJob(tmp_path / "j", hosts=1, max_workers=3)
    job.step(12)
    assert len(job.rounds[0][1]) == 1
    job.hosts.append("h1")
    job.step(6)
    assert len(job.rounds) == 1
    job.hosts.append("h2")
    job.step(8)
    assert len(job.rounds) == 1
    job.step(10)
    assert [len(members) for _, members in job.rounds] == [1, 3]


def test_a_noticed_host_is_left_early_enough_for_its_processes_to_save(tmp_path):
    job = running(tmp_path, grace_s=40.0)
    job.leaving = {"h0": Departure(120.0, "notice")}
    left_s = 120.0
    while len(whys(job)) == 0 and left_s > 0:
        job.leaving = {"h0": Departure(left_s, "notice")}
        job.step(0.5)
        left_s -= 0.5
    assert 45.0 <= left_s <= 52.0
    job.step(15)
    assert job.rounds[-1][0] == 1 and all(m.startswith("h1/") for m in job.rounds[-1][1])


def preempt(job: AnewJob) -> None:
    """The schedule gives its hosts to another job."""
    job.preempted, job.waits = "u, which has priority 5 over 0 and needs 2 hosts", "needs 1 host, 0 free"
    job.step()


def test_a_preempted_job_saves_waits_in_the_queue_and_goes_on_once_it_has_hosts_again(tmp_path):
    job = running(tmp_path)
    job.lingering = set(job.rounds[0][1])
    preempt(job)
    why = "preempted by u, which has priority 5 over 0 and needs 2 hosts"
    last = [e for e in job.events if isinstance(e, JobChanged)][-1]
    assert (last.state, last.why) == (JobState.QUEUED, f"{why}; its processes get 30 s to save")
    assert job.job.leads(job.rounds[0][1][0], 1), "the end of its checkpoint folder still counts"
    job.step()
    assert job.job.record.why == f"{why}; waits for {job.rounds[0][1][0]} to end" and not job.job.orders()
    job.lingering = set()
    job.step(5)
    assert (job.job.state, job.job.record.why) == (JobState.QUEUED, f"{why}; needs 1 host, 0 free")
    job.waits = ""
    job.step(15)
    assert job.job.state is JobState.RUNNING and [restarts for restarts, _ in job.rounds] == [0, 1]
    assert job.job.record.failures == 0 and not job.job.record.preempted


def test_a_restarted_dispatcher_lets_the_processes_of_a_preempted_job_end(tmp_path):
    job = running(tmp_path)
    job.lingering = set(job.rounds[0][1])
    preempt(job)
    job.restart_dispatcher()
    job.step()
    assert not job.job.orders() and job.job.state is JobState.QUEUED
    job.lingering, job.waits = set(), ""
    job.step(15)
    assert [restarts for restarts, _ in job.rounds] == [0, 1] and job.job.state is JobState.RUNNING


def test_a_command_runs_only_once_all_of_its_processes_have_started(tmp_path):
    job = AnewJob(tmp_path / "j", kind="command", argv=(), run="x", min_workers=2)
    job.slow = {"h1"}
    job.step(4)
    assert len(job.rounds) == 1 and job.job.state is JobState.STARTING
    job.slow = set()
    job.step(1)
    assert job.job.state is JobState.RUNNING


@pytest.mark.parametrize("code", [3, -9])
def test_a_script_that_fails_by_itself_fails_the_job_with_its_rank_and_status(tmp_path, code):
    job = running(tmp_path)
    job.ends(1, code, "the script left with sys.exit(3)" if code > 0 else "")
    job.step(10)
    status = 3 if code > 0 else 137
    how = "failed with status 3" if code > 0 else "was ended by SIGKILL"
    assert job.job.state is JobState.FAILED and job.job.record.exit_status == status
    assert job.job.record.why == f"rank 1 ({job.rounds[0][1][1]}) {how}" and len(job.rounds) == 1


def test_a_failing_script_starts_anew_max_restarts_times(tmp_path):
    job = running(tmp_path, max_restarts=2)
    for failures in (1, 2):
        job.ends(0, 1, "no")
        job.step(20)
        assert len(job.rounds) == failures + 1 and job.job.record.failures == failures
    job.ends(0, 1, "no")
    job.step(20)
    assert job.job.state is JobState.FAILED and job.job.record.why.endswith(", after 2 of 2 restarts")
    assert whys(job)[1].endswith("all workers start anew (restart 2 of 2)")


def test_a_failure_beside_a_lost_host_counts_as_the_loss(tmp_path):
    job = running(tmp_path)
    job.ends(0, 1, "RuntimeError: Connection closed by peer")
    job.step(1)
    job.lose("h1")
    job.step(20)
    assert job.job.state is not JobState.FAILED and job.job.record.failures == 0
    assert [restarts for restarts, _ in job.rounds] == [0, 1]


def test_a_process_that_has_ended_well_waits_for_the_others_and_the_job_succeeds(tmp_path):
    job = running(tmp_path)
    job.ends(0, 0, done=True)
    job.step(20)
    assert len(job.rounds) == 1 and not job.job.state.ended
    job.ends(1, 0, done=True)
    job.step(1)
    assert job.job.state is JobState.SUCCEEDED


def test_the_loss_of_a_host_on_which_the_process_had_ended_well_starts_nothing_anew(tmp_path):
    job = running(tmp_path)
    job.ends(1, 0, done=True)
    job.step(1)
    job.lose("h1")
    job.step(20)
    assert len(job.rounds) == 1
    job.ends(0, 0, done=True)
    job.step(1)
    assert job.job.state is JobState.SUCCEEDED


def test_with_no_retry_a_loss_fails_the_job(tmp_path):
    job = running(tmp_path, kind="command", retry=False)
    job.lose("h1")
    job.step(10)
    assert job.job.state is JobState.FAILED and job.job.record.why.endswith("it was submitted with --no-retry")


def test_a_command_is_not_started_anew_for_a_host_more(tmp_path):
    job = AnewJob(tmp_path / "j", hosts=1, kind="command")
    job.step(12)
    job.hosts.append("h1")
    job.step(40)
    assert [len(members) for _, members in job.rounds] == [1]


def test_a_gang_learns_its_hosts_addresses_in_the_order_of_ranks_and_its_newest_folder(tmp_path):
    job = AnewJob(tmp_path / "j", hosts=2, slots=2, max_workers=4)
    job.step(2)
    order, _ = job.processes[job.rounds[0][1][3]]
    assert order.gang.addresses == ("10.0.0.0", "10.0.0.1") and order.orders.assignment.local_rank == 1
    leader = job.rounds[0][1][0]
    assert job.job.leads(leader, 1) and not job.job.leads(job.rounds[0][1][1], 1) and not job.job.leads(leader, 2)
    job.job.save_folder("d1", 5.0)
    assert job.job.save_folder("d2", 6.0) == {"d1"} and job.job.record.saved == ("d2", "d1")
    job.lose("h1")
    job.step(15)
    assert job.processes[job.rounds[1][1][0]][0].gang.saved == "d2"
    assert not job.job.leads(leader, 1)


def test_a_round_waits_for_a_checkpoint_folder_that_is_not_whole(tmp_path):
    job = running(tmp_path)
    whole = {"d1"}
    job.job.is_whole = lambda bundle: bundle in whole
    job.job.save_folder("d1", 5.0)
    job.job.save_folder("d2", 6.0)
    job.lose("h1")
    job.step(20)
    assert len(job.rounds) == 1 and "waits for its checkpoint folder" in job.job.record.why
    job.step(80)
    assert job.processes[job.rounds[1][1][0]][0].gang.saved == "d1"


def test_a_dispatcher_that_is_restarted_goes_on_with_the_round_and_starts_anew_at_the_next_loss(tmp_path):
    job = running(tmp_path)
    job.restart_dispatcher()
    job.step(5)
    assert len(job.rounds) == 1 and job.job.state is JobState.RUNNING and len(job.live()) == 1
    job.lose("h1")
    job.step(20)
    assert [restarts for restarts, _ in job.rounds] == [0, 1] and len(job.live()) == 1
