"""The rules of HyperSched, without Ray and without a clock."""

from __future__ import annotations

import random

import numpy as np
import pytest

from spotfleet.ray.tune.hypersched import HyperSched, TrialResult


def observe(
    scheduler: HyperSched, trial: str, epochs: int, score: float, workers: int = 1, epoch_s: float = 1.0
) -> bool:
    return scheduler.observe(TrialResult(trial, epochs, score, workers, epoch_s))


def test_a_trial_below_the_best_quarter_of_a_rung_stops() -> None:
    scheduler = HyperSched(atoms=4, max_epochs=64)
    for n, score in enumerate((0.1, 0.2, 0.3, 0.4)):
        observe(scheduler, f"a{n}", 1, score)

    assert not observe(scheduler, "low", 1, 0.32)  # the quantile lies at 0.325
    assert observe(scheduler, "high", 1, 0.35)


def test_between_rungs_no_trial_stops() -> None:
    scheduler = HyperSched(atoms=4, max_epochs=64)
    observe(scheduler, "best", 1, 0.9)
    observe(scheduler, "best", 2, 0.95)
    observe(scheduler, "other", 1, 0.9)

    assert observe(scheduler, "other", 2, 0.1)
    assert observe(scheduler, "other", 3, 0.1)


def test_a_trial_with_all_its_epochs_is_complete() -> None:
    scheduler = HyperSched(atoms=1, max_epochs=3)

    assert [observe(scheduler, "a", epochs, 0.5) for epochs in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize("eta", [2, 3, 4])
def test_the_quantile_of_a_rung_is_numpys(eta: int) -> None:
    rng = random.Random(eta)
    scheduler, seen = HyperSched(atoms=1, eta=eta), []
    for n in range(60):
        score = rng.random()
        expected = not seen or score >= np.percentile(seen, (1 - 1 / eta) * 100)
        seen.append(score)

        assert observe(scheduler, f"t{n}", 1, score) == expected


def test_while_there_is_time_each_trial_has_one_worker_and_others_begin() -> None:
    scheduler = HyperSched(atoms=8)
    for n in range(3):
        observe(scheduler, f"t{n}", 1, 0.1 * n, epoch_s=10)

    plan = scheduler.plan(["t0", "t1", "t2"], waiting=True, left_s=100)

    assert plan.explores
    assert plan.wishes == {"t2": 1, "t1": 1, "t0": 1}


def test_when_a_newcomer_could_not_catch_up_the_best_trials_share_the_workers() -> None:
    scheduler = HyperSched(atoms=8)
    observe(scheduler, "good", 16, 0.9, epoch_s=10)  # took one worker 160 s
    observe(scheduler, "fair", 4, 0.5, epoch_s=10)

    assert scheduler.plan(["good", "fair"], waiting=True, left_s=81).explores
    plan = scheduler.plan(["good", "fair"], waiting=True, left_s=79)
    assert not plan.explores
    assert plan.wishes == {"good": 4, "fair": 4}
    assert "79 s are left" in plan.why
    assert "160 s" in plan.why


def test_after_exploration_a_trial_stops_where_others_have_passed_it_at_its_rung() -> None:
    """It was the first at the rung of 16 epochs, so nothing was there to stop it."""
    scheduler = HyperSched(atoms=3, max_epochs=64)
    observe(scheduler, "early", 16, 0.5, epoch_s=10)
    observe(scheduler, "late", 16, 0.9, epoch_s=10)
    live = ["early", "late", "new"]

    assert scheduler.plan(live, waiting=True, left_s=81).explores
    assert observe(scheduler, "early", 17, 0.5, epoch_s=10)

    assert not scheduler.plan(live, waiting=True, left_s=79).explores
    assert not observe(scheduler, "early", 18, 0.5, epoch_s=10)
    assert observe(scheduler, "late", 17, 0.9, epoch_s=10)
    assert scheduler.plan(["late", "new"], waiting=True, left_s=70).wishes == {"late": 2, "new": 1}


def test_after_exploration_the_best_trial_goes_on_though_others_have_passed_it_at_its_rung() -> None:
    scheduler = HyperSched(atoms=2, max_epochs=64)
    observe(scheduler, "slow", 16, 0.5, epoch_s=10)
    observe(scheduler, "fast", 16, 0.9, epoch_s=10)
    observe(scheduler, "slow", 17, 0.95, epoch_s=10)

    assert not scheduler.plan(["slow", "fast"], waiting=False, left_s=79).explores
    assert observe(scheduler, "slow", 18, 0.94)


def test_a_newcomers_time_to_its_first_result_counts_too() -> None:
    """The shortest one: a trial that waited for workers began no later than it could."""
    scheduler = HyperSched(atoms=8)
    for trial, first_s in (("waited", 900.0), ("good", 20.0)):
        scheduler.observe(TrialResult(trial, 1, 0.1, 1, None, first_s))
    observe(scheduler, "good", 16, 0.9, epoch_s=10)

    assert scheduler.plan(["good"], waiting=True, left_s=101).explores
    assert not scheduler.plan(["good"], waiting=True, left_s=99).explores


def test_the_leader_is_the_best_trial_that_still_trains() -> None:
    scheduler = HyperSched(atoms=2)
    observe(scheduler, "ended", 50, 0.99, epoch_s=10)
    observe(scheduler, "trains", 1, 0.2, epoch_s=10)

    assert scheduler.plan(["trains"], waiting=True, left_s=60).explores


def test_an_odd_worker_goes_to_the_best_trial_and_none_to_a_trial_without_a_result() -> None:
    scheduler = HyperSched(atoms=6)
    observe(scheduler, "good", 5, 0.9)
    observe(scheduler, "fair", 5, 0.5)

    plan = scheduler.plan(["fair", "new", "good"], waiting=False, left_s=100)

    assert plan.wishes == {"good": 3, "fair": 2, "new": 1}


def test_a_trial_grows_only_where_more_gets_done_in_the_time_left() -> None:
    slow = HyperSched(atoms=2)
    observe(slow, "a", 1, 0.5, workers=2, epoch_s=9.5)  # two workers are hardly faster than one
    observe(slow, "a", 2, 0.5, workers=1, epoch_s=10)
    late = HyperSched(atoms=2, resize_s=5)
    observe(late, "a", 1, 0.5, epoch_s=1)

    assert slow.plan(["a"], waiting=False, left_s=1000).wishes == {"a": 1}
    assert late.plan(["a"], waiting=False, left_s=8).wishes == {"a": 1}  # most of what is left would be the pause
    assert late.plan(["a"], waiting=False, left_s=80).wishes == {"a": 2}


def test_random_experiments_never_wish_for_more_workers_than_there_are() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        atoms, left_s, live, begun = rng.randint(1, 8), 100.0, {}, 0
        scheduler = HyperSched(atoms, max_epochs=rng.choice([8, 64]))
        while left_s > 0:
            plan = scheduler.plan(list(live), begun < 20, left_s)
            assert sum(plan.wishes.values()) <= atoms
            assert set(plan.wishes) == set(live)
            assert all(workers >= 1 for workers in plan.wishes.values())
            if plan.explores and sum(plan.wishes.values()) < atoms:
                live[f"t{begun}"], begun = 0, begun + 1
            for trial in [t for t in live if rng.random() < 0.5]:
                live[trial] += 1
                if not observe(scheduler, trial, live[trial], rng.random(), plan.wishes.get(trial, 1), rng.random()):
                    del live[trial]
            left_s -= rng.uniform(0.1, 5)
