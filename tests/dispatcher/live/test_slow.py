"""Slow workers: named after 50 steps, by their own work and not by the step that all share."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.dispatcher.live.slow import SlowWorkers
from spotfleet.protocol.messages import SlowWorker, StepCost, WorkerReport

STEP_S = 0.2  # every rank's: the fast ones wait


def reports(compute_s: list[float], steps: int) -> list[tuple[int, WorkerReport]]:
    return [(rank, WorkerReport(f"h{rank}/0/1", "j", step_s=STEP_S, cost=StepCost(steps, wait_s=STEP_S - own)))
            for rank, own in enumerate(compute_s)]


def test_a_worker_is_named_once_it_was_slow_for_50_steps():
    slow = SlowWorkers()
    assert slow.update(reports([0.1, 0.1, 0.1, 0.2], 20)) == ()
    assert slow.update(reports([0.1, 0.1, 0.1, 0.2], 69)) == ()
    (found,) = slow.update(reports([0.1, 0.1, 0.1, 0.2], 70))
    assert (found.worker, found.rank, found.steps) == ("h3/0/1", 3, 50)
    assert replace(found, compute_s=round(found.compute_s, 6), median_s=round(found.median_s, 6)) == SlowWorker(
        "h3/0/1", 3, 0.2, 0.1, 50)


def test_one_that_was_fast_in_between_begins_anew():
    slow = SlowWorkers()
    for steps, own in ((20, 0.2), (60, 0.1), (100, 0.2), (140, 0.2)):
        assert slow.update(reports([0.1, 0.1, own], steps)) == ()
    assert [w.rank for w in slow.update(reports([0.1, 0.1, 0.2], 150))] == [2]


def test_30_percent_is_the_line_and_a_difference_below_the_clocks_noise_none():
    slow = SlowWorkers()
    for steps in (20, 200):
        found = slow.update(reports([0.1, 0.1, 0.129], steps))
        assert found == () and SlowWorkers().update(reports([0.001, 0.001, 0.0028], steps)) == ()


def test_of_two_workers_the_faster_is_the_measure_and_one_alone_is_never_slow():
    slow = SlowWorkers()
    slow.update(reports([0.1, 0.2], 20))
    assert [w.rank for w in slow.update(reports([0.1, 0.2], 90))] == [1]
    assert slow.update(reports([0.2], 500)) == ()


def test_a_new_generation_counts_its_steps_from_its_beginning():
    slow = SlowWorkers()
    slow.update(reports([0.1, 0.1, 0.2], 1000))
    assert slow.update(reports([0.1, 0.1, 0.2], 20)) == ()
    assert slow.update(reports([0.1, 0.1, 0.2], 69)) == ()
    assert [w.steps for w in slow.update(reports([0.1, 0.1, 0.2], 70))] == [50]
