"""What the dispatcher knows of a job's workers from what their agents say."""

from __future__ import annotations

from spotfleet.dispatcher.workers import Crew
from spotfleet.messages import AgentReport, Exit, WorkerReport, WorkerState

NAME = "h/0/1"


def heard(crew: Crew, **state: object) -> None:
    worker = WorkerState(WorkerReport(NAME, "j"), 0, **state)
    crew.hear(AgentReport("h", "a", "127.0.0.1", 1, (worker,)))


def test_a_worker_is_gone_when_its_process_has_ended_though_its_log_is_still_on_its_way():
    crew = Crew("j")
    worker = crew.add(NAME, 0)
    heard(crew)
    assert not worker.gone  # its start is being prepared
    heard(crew, pid=7)
    assert not worker.gone
    heard(crew, pid=0)
    assert (worker.gone, worker.ended) == (True, False)  # its slot is still taken
    heard(crew, exit=Exit(-9))
    assert worker.ended


def test_silence_is_counted_from_the_last_report_and_ends_with_the_next():
    crew = Crew("j")
    worker = crew.add(NAME, 0)
    heard(crew, pid=7)
    assert worker.unheard_s(now=100.0) == 0.0
    crew.silence("h", heard_at=95.0)
    assert worker.unheard_s(now=100.0) == 5.0
    heard(crew, pid=7)
    assert worker.unheard_s(now=100.0) == 0.0
