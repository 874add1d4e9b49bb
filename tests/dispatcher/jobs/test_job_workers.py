"""What the dispatcher knows of a job's workers from what their agents say."""

from __future__ import annotations

from spotfleet.dispatcher.jobs.workers import JobWorkers
from spotfleet.protocol.messages import AgentReport, Exit, WorkerReport, WorkerState

NAME = "h/0/1"


def heard(workers: JobWorkers, **state: object) -> None:
    worker = WorkerState(WorkerReport(NAME, "j"), 0, **state)
    workers.receive(AgentReport("h", "a", "127.0.0.1", 1, (worker,)))


def test_a_worker_is_gone_when_its_process_has_ended_though_its_log_is_still_on_its_way():
    workers = JobWorkers("j")
    worker = workers.add(NAME, 0)
    heard(workers)
    assert not worker.gone  # its start is being prepared
    heard(workers, pid=7)
    assert not worker.gone
    heard(workers, pid=0)
    assert (worker.gone, worker.ended) == (True, False)  # its slot is still taken
    heard(workers, exit=Exit(-9))
    assert worker.ended


def test_silence_is_counted_from_the_last_report_and_ends_with_the_next():
    workers = JobWorkers("j")
    worker = workers.add(NAME, 0)
    heard(workers, pid=7)
    assert worker.silent_for_s(now=100.0) == 0.0
    workers.mark_silent("h", last_report_at=95.0)
    assert worker.silent_for_s(now=100.0) == 5.0
    heard(workers, pid=7)
    assert worker.silent_for_s(now=100.0) == 0.0
