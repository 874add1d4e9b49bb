"""A host stays while its results arrive, and for a limited time without one; results that end with it are recorded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spotfleet.dispatcher.disk.files import WrongDigest
from spotfleet.dispatcher.http import jobs
from spotfleet.dispatcher.http.requests import CORE
from spotfleet.dispatcher.lifecycle import unsent
from spotfleet.dispatcher.lifecycle.unsent import ASKED, BY_ITSELF, DISCARD, LIMITED, STAYS, UnsentTracker, patience_of
from spotfleet.errors import DiskFull
from spotfleet.fleet.domain.events import ResultsLost
from spotfleet.protocol.messages import AgentReport, Checkpoint, Unsent, WorkerReport, WorkerState

DIGEST = "0" * 64
JOB, WORKER = "one-1", "f-1/0/1"
OUTPUT = Unsent(JOB, "output", 1000, 0, WORKER)
FULL = "its output waits: the dispatcher's disk is full"
TIMES = {"stays": STAYS, "asked": ASKED, "by itself": BY_ITSELF, "limited": LIMITED, "discard": DISCARD}


def report(*results: Unsent, incarnation: str = "a", why: str = FULL) -> AgentReport:
    return AgentReport("f-1", incarnation, "10.0.0.1", 1, why=why, unsent=results)


def old(why: str) -> AgentReport:
    """An agent that does not know the field."""
    ended = WorkerState(WorkerReport(WORKER, JOB), 0)
    return AgentReport("f-1", "a", "10.0.0.1", 1, (ended,), why=why)


def held(*results: Unsent, notice_s: float = 0.0) -> UnsentTracker:
    """A host that holds `results` and drains since 0."""
    tracker = UnsentTracker("/target")
    tracker.receive(report(*results), JOB.__eq__, 0.0)
    tracker.note_draining({"f-1": notice_s}, 0.0)
    return tracker


def lost(tracker: UnsentTracker, now: float, patience: unsent.Patience = ASKED) -> list[ResultsLost]:
    return tracker.give_up(patience, lambda _job: False, now, 5.0)


def test_a_host_stays_while_bytes_arrive_and_a_limited_time_without_one():
    tracker = held(OUTPUT)
    assert tracker.stays_s(ASKED, 100.0) == {"f-1": 3500.0}
    tracker.note_arrival("f-1", 3000.0)
    tracker.receive(report(replace(OUTPUT, bytes=900, sent=100)), JOB.__eq__, 3000.0)
    assert tracker.stays_s(ASKED, 3000.0) == {"f-1": 3600.0}
    tracker.receive(report(replace(OUTPUT, bytes=950, sent=100)), JOB.__eq__, 4000.0)  # it grew, and nothing arrived
    assert tracker.stays_s(ASKED, 4000.0) == {"f-1": 2600.0} and lost(tracker, 6599.0) == []
    assert lost(tracker, 6600.0) == [ResultsLost(5.0, JOB, "f-1", "output", 950, FULL)]
    assert lost(tracker, 6601.0) == []  # recorded once
    tracker.receive(report(), JOB.__eq__, 6602.0)
    assert not tracker.holds("f-1") and tracker.stays_s(ASKED, 6602.0) == {}


@pytest.mark.parametrize("what", ["sent", "results", "copies", "agents", "on and off"])
def test_nothing_that_a_host_reports_gives_it_more_time(what: str):
    tracker = held(OUTPUT)
    for n in range(1, 600):
        results = {"sent": (replace(OUTPUT, sent=n),), "results": (OUTPUT, Unsent(JOB, "log", 7, 0, f"f-1/0/{n}")),
                   "copies": (replace(OUTPUT, stored=n % 2 > 0),)}.get(what, (OUTPUT,))
        if what == "on and off":
            tracker.receive(report(), JOB.__eq__, float(n))
        tracker.receive(report(*results, incarnation=f"{n * (what == 'agents')}"), JOB.__eq__, float(n))
        tracker.note_draining({"f-1": 0.0}, float(n))
    tracker.receive(report(OUTPUT, incarnation="0" if what != "agents" else "599"), JOB.__eq__, 599.0)
    assert tracker.stays_s(BY_ITSELF, 599.0) == {"f-1": 1.0}


@pytest.mark.parametrize(("what", "quiet_s", "most_s"), [
    ("stays", 120.0, 3600.0), ("asked", 3600.0, None), ("by itself", 600.0, 3600.0), ("limited", 240.0, 240.0),
    ("discard", 10.0, 120.0)])
def test_the_time_depends_on_the_reason_of_the_end(what: str, quiet_s: float, most_s: float | None):
    tracker, patience = held(OUTPUT), TIMES[what]
    assert tracker.stays_s(patience, 0.0) == {"f-1": quiet_s}
    for n in range(1, 2000):  # a byte each 5 s
        tracker.note_arrival("f-1", n * 5.0)
        left_s = min(quiet_s, quiet_s if most_s is None else max(0.0, most_s - n * 5.0))
        assert tracker.stays_s(patience, n * 5.0) == {"f-1": left_s}


def test_the_reason_of_the_end_gives_the_time():
    assert patience_of(going_down=False) is STAYS
    assert patience_of(going_down=True) is ASKED
    assert patience_of(going_down=True, by_ourselves=True) is BY_ITSELF
    assert patience_of(going_down=True, by_ourselves=True, limited=True) is LIMITED
    assert patience_of(going_down=True, by_ourselves=True, limited=True, discard=True) is DISCARD


def test_the_time_before_the_drain_does_not_count():
    tracker = UnsentTracker()
    tracker.receive(report(OUTPUT), JOB.__eq__, 0.0)
    assert tracker.stays_s(STAYS, 5000.0) == {}  # it does not drain
    tracker.note_draining({"f-1": 0.0}, 5000.0)
    assert tracker.stays_s(STAYS, 5000.0) == {"f-1": 120.0}


def test_a_silent_agent_is_waited_for_as_long_as_any_drain():
    tracker = held(OUTPUT)
    tracker.mark_away("f-1", 10.0)
    tracker.mark_away("f-1", 50.0)  # each try to connect may break
    assert tracker.stays_s(ASKED, 30.0) == {"f-1": 100.0}
    assert lost(tracker, 130.0) == [ResultsLost(5.0, JOB, "f-1", "output", 1000, FULL)]
    tracker.receive(report(OUTPUT), JOB.__eq__, 131.0)
    assert tracker.stays_s(ASKED, 131.0) == {"f-1": 3469.0}  # back again, and it has the rest of its time


def test_a_host_with_a_notice_has_it_to_the_end():
    assert held(OUTPUT, notice_s=500.0).stays_s(STAYS, 300.0) == {"f-1": 200.0}


def test_results_of_a_host_that_has_ended_are_recorded():
    tracker = held(OUTPUT, Unsent(JOB, "log", 7, 3, WORKER), Unsent(JOB, "output", 24, 0, "f-1/1/2"))
    assert tracker.forget((), lambda _job: False, 5.0) == []
    assert tracker.forget({"f-1"}, lambda _job: False, 5.0) == [
        ResultsLost(5.0, JOB, "f-1", "output", 1024, FULL), ResultsLost(5.0, JOB, "f-1", "log", 7, FULL)]
    assert tracker.forget({"f-1"}, lambda _job: False, 5.0) == []


def test_a_new_agent_on_the_host_has_lost_the_files_of_the_last_one():
    tracker = held(OUTPUT)
    tracker.receive(report(incarnation="b"), JOB.__eq__, 1.0)
    assert tracker.forget((), lambda _job: False, 5.0) == [ResultsLost(5.0, JOB, "f-1", "output", 1000, FULL)]


def test_a_checkpoint_counts_as_lost_only_with_the_end_of_its_job():
    checkpoint = Unsent(JOB, "checkpoint", 50)
    assert held(checkpoint).forget({"f-1"}, lambda job: job == JOB, 5.0) == []
    assert held(checkpoint).forget({"f-1"}, lambda _job: False, 5.0) == [
        ResultsLost(5.0, JOB, "f-1", "checkpoint", 50, FULL)]


def test_what_is_in_the_checkpoint_target_is_waited_for_no_longer():
    tracker = held(replace(OUTPUT, stored=True), Unsent(JOB, "log", 7, 0, WORKER))
    assert tracker.stays_s(BY_ITSELF, 1.0) == {"f-1": 599.0}
    tracker = held(replace(OUTPUT, stored=True))
    assert tracker.stays_s(BY_ITSELF, 1.0) == {"f-1": 0.0}
    assert lost(tracker, 1.0, BY_ITSELF) == [ResultsLost(5.0, JOB, "f-1", "output", 1000, FULL, "/target")]


def test_a_host_whose_bytes_do_not_arrive_is_to_use_the_target():
    tracker = held(OUTPUT)
    assert tracker.stuck(BY_ITSELF, 19.0) == frozenset()
    assert tracker.stuck(BY_ITSELF, 20.0) == {"f-1"}
    tracker.note_arrival("f-1", 239.0)
    assert tracker.stuck(BY_ITSELF, 239.0) == frozenset() and tracker.stuck(LIMITED, 239.0) == {"f-1"}


def test_a_host_can_report_only_what_it_was_given():
    tracker = UnsentTracker()
    tracker.receive(report(replace(OUTPUT, job="another-2"), replace(OUTPUT, kind="\x1b[2J")), JOB.__eq__, 0.0)
    assert not tracker.holds("f-1")
    tracker.receive(report(OUTPUT, why="x" * 5000 + "\nfleet is up"), JOB.__eq__, 0.0)
    (event,) = tracker.forget({"f-1"}, lambda _job: False, 5.0)
    assert event.why == "x" * 300


def test_an_older_agent_has_the_old_time_and_its_reason_is_recorded():
    for why in ("one-1: sending what it left", f"one-1: {FULL}"):
        tracker = UnsentTracker()
        tracker.receive(old(why), JOB.__eq__, 0.0)
        tracker.note_draining({"f-1": 0.0}, 0.0)
        assert tracker.stays_s(ASKED, 100.0) == {"f-1": 20.0}
        assert lost(tracker, 120.0) == [ResultsLost(5.0, JOB, "f-1", "output", 0, why)]
    tracker = UnsentTracker()
    tracker.receive(old("importing torch"), JOB.__eq__, 0.0)
    assert not tracker.holds("f-1")


def test_bytes_of_a_checkpoint_with_a_wrong_digest_give_no_more_time():
    tracker = held(Unsent(JOB, "checkpoint", 1000))
    for n in range(1, 100):
        tracker.note_piece("f-1", n * 10.0)
        if n % 3 == 0:
            tracker.note_checkpoint("f-1", n * 10.0, right=False)
    assert tracker.stays_s(LIMITED, 240.0) == {"f-1": 0.0}
    assert tracker.stays_s(ASKED, 1000.0) == {"f-1": 30.0 + 3600.0 - 1000.0}  # the first might have been right
    tracker.note_checkpoint("f-1", 1000.0, right=True)
    tracker.note_piece("f-1", 1500.0)
    assert tracker.stays_s(ASKED, 1500.0) == {"f-1": 3600.0}


def test_a_checkpoint_that_arrives_is_noted_as_right_or_wrong_by_its_digest(monkeypatch: pytest.MonkeyPatch):
    noted: list[tuple[str, bool]] = []
    tracker = SimpleNamespace(note_checkpoint=lambda host, _now, right: noted.append((host, right)))
    answer: list[Exception | None] = [WrongDigest("digest: another"), DiskFull("full"), None]  # None: others lack

    async def put(_offered: Checkpoint, *_: object) -> Checkpoint | None:
        if isinstance(found := answer.pop(0), Exception):
            raise found
        return found

    job = SimpleNamespace(id=JOB, takes_checkpoints_of=lambda _host: True, checkpoints=SimpleNamespace(put=put))
    monkeypatch.setattr(jobs, "_job", lambda _request: job)
    monkeypatch.setattr(jobs, "host_of", lambda _request: "f-1")
    request: Any = SimpleNamespace(app={CORE: SimpleNamespace(unsent=tracker)}, match_info={"version": "5"},
                                   query={"digest": DIGEST, "generation": "1"})
    for error in (WrongDigest, DiskFull):
        with pytest.raises(error):
            asyncio.run(jobs.put_checkpoint(request))
    asyncio.run(jobs.put_checkpoint(request))
    assert noted == [("f-1", False), ("f-1", True)]  # a full disk is not the sender's fault


def test_people_read_what_is_late_and_where():
    tracker = UnsentTracker()
    tracker.receive(report(OUTPUT), JOB.__eq__, 0.0)
    assert tracker.lines(STAYS, 1.0) == []
    assert tracker.lines(STAYS, 20.0) == ["f-1 still holds 1.0 kB of the output of one-1"]
    (status,) = tracker.status(STAYS, 20.0)
    assert (status.quiet_s, status.stays_s, status.why) == (20.0, None, FULL)


def test_the_time_since_the_drain_began_is_that_of_all_agents_of_a_host():
    tracker = held(OUTPUT)
    for n in range(1, 25):  # each new agent sends some bytes
        tracker.receive(report(OUTPUT, incarnation=str(n)), JOB.__eq__, n * 10.0)
        tracker.note_arrival("f-1", n * 10.0)
        tracker.note_draining({"f-1": 0.0}, n * 10.0)
    assert tracker.stays_s(LIMITED, 239.0) == {"f-1": 1.0}
    tracker.note_draining({}, 240.0)  # it is kept, and drains again later
    tracker.note_draining({"f-1": 0.0}, 300.0)
    assert tracker.stays_s(LIMITED, 300.0) == {"f-1": 240.0}


def test_a_copy_in_the_target_is_recorded_also_after_a_loss():
    tracker = held(OUTPUT)
    assert [e.kept_at for e in lost(tracker, 3600.0)] == [""]
    for stored, expected in ((False, []), (True, ["/target"]), (True, [])):
        tracker.receive(report(replace(OUTPUT, stored=stored)), JOB.__eq__, 3600.0)
        tracker.note_draining({"f-1": 0.0}, 3600.0)
        assert [e.kept_at for e in lost(tracker, 3601.0)] == expected
