"""Nobody holds the state and a large checkpoint is on its way to the new workers."""

from __future__ import annotations

from spotfleet.dispatcher.jobs.workers import JobWorkers
from spotfleet.membership import Evicted
from spotfleet.membership.desk import STALL_S
from spotfleet.protocol.messages import AgentReport, Stage, WorkerReport, WorkerState
from tests.support.membership.membership_desk import Desk, training

HOUR_S = 3600.0


def all_lost() -> Desk:
    """A new generation has been ordered on hosts that must restore first."""
    desk = training("a", "b")
    desk.put("a", "b", exited=True)
    desk.put("c", "d", stage=Stage.READY)
    assert desk.ordered() is not None and set(desk.core.members) == {"c", "d"}
    return desk


def test_members_to_which_a_checkpoint_still_comes_are_waited_for_however_long_that_takes():
    desk = all_lost()
    desk.put("c", "d", fetches=True)
    for _ in range(10):
        assert desk.see(after=HOUR_S / 10) == []
    desk.put("c", fetches=False)
    assert desk.see(after=HOUR_S) == []  # the other is still waited for
    desk.put("d", fetches=False)
    assert desk.see() == []
    generation = desk.core.generation
    assert desk.see(after=29.0) == []  # from now on the time counts
    desk.put("c", generation=generation)
    desk.see()
    changes = desk.see(after=30.0)
    assert [c.workers for c in changes if isinstance(c, Evicted)] == [("d",)]


def test_a_transfer_that_stands_still_is_no_transfer():
    crew = JobWorkers("job")
    worker = crew.add("h/0/1", 0)

    def hear(fetched: int, now: float, generation: int = 0) -> bool:
        report = WorkerReport("h/0/1", "job", Stage.READY, generation, fetched=fetched)
        crew.receive(AgentReport("h", "agent", "127.0.0.1", 1, (WorkerState(report, 0),)))
        return worker.watch_fetch(now)

    assert not hear(0, 0.0)
    assert hear(10, 1.0)
    assert hear(10, STALL_S)
    assert not hear(10, 1.0 + STALL_S)
    assert hear(11, 50.0)
    assert hear(0, 51.0)  # all of it is here, and is read
    assert not hear(0, 52.0, generation=3)
