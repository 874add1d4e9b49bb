"""Trials of Ray Tune in the ledger: an event for each change, also across a restart of the dispatcher."""

from __future__ import annotations

from spotfleet.dispatcher.ray.trials import TrialLog
from spotfleet.fleet.domain.events import TrialHeld, event_from_json, event_to_json
from spotfleet.protocol.ray_cluster import RayState, RayTrial

A = RayTrial("a", "train_a", 1, {"f-0": 500_000})
A2 = RayTrial("a", "train_a", 2, {"f-0": 500_000, "f-1": 500_000})
B = RayTrial("b", "train_b", 1, {"f-1": 1_000_000})


def state(*trials: RayTrial) -> RayState:
    return RayState(True, trials=trials)


def written(log: TrialLog, found: RayState | None, at: float = 1.0, job: str = "ray-1") -> list[tuple[str, int, dict]]:
    return [(e.trial, e.workers, e.hosts) for e in log.changes(job, found, at)]


def test_each_change_of_a_trial_is_one_event():
    log = TrialLog()
    assert written(log, state(A)) == [("a", 1, A.hosts)]
    assert written(log, state(A)) == []
    assert written(log, state(A2, B)) == [("a", 2, A2.hosts), ("b", 1, B.hosts)]
    assert written(log, state(B)) == [("a", 0, {})]
    assert written(log, state(B)) == []


def test_a_head_that_does_not_answer_ends_no_trial():
    log = TrialLog()
    written(log, state(A))
    assert written(log, RayState(False)) == [] and written(log, None) == []
    assert written(log, state(A)) == []


def test_a_new_process_ends_the_trials_that_ended_meanwhile():
    log = TrialLog()
    events = [*log.changes("ray-1", state(A, B), 1.0), TrialHeld(2.0, "ray-1", "b", "train_b", 0)]
    again = TrialLog()
    again.load(event_from_json(event_to_json(e)) for e in events)
    assert written(again, state()) == [("a", 0, {})]


def test_another_cluster_begins_without_trials():
    log = TrialLog()
    written(log, state(A))
    assert written(log, state(), job="ray-2") == []
    assert written(log, state(A), job="") == []
