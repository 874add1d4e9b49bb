"""Why a step takes as long as it does: from what the ranks have measured to one line for people."""

from __future__ import annotations

import pytest

from spotfleet.fleet.domain.events import StepExplained
from spotfleet.fleet.domain.step_cost import AGAIN_S, ENOUGH, Explainer, RankStepCost, explain
from spotfleet.protocol.messages import StepCost

AT = 1000.0


def rank(number: int, step_s: float, wait_s: float, rtt_s: float = 0.0, to: int = 0, next_s: float | None = None,
         reductions: int = 1, moved: int = 4000, steps: int = ENOUGH, **more) -> RankStepCost:
    cost = StepCost(steps, wait_s, reductions, moved, more.pop("backend", "gloo"), rtt_s,
                    f"10.0.0.{to}" if rtt_s else "", rtt_s if next_s is None else next_s, **more)
    return RankStepCost(f"h-{number}/0/{number}", f"10.0.0.{number}", step_s, cost)


def ring(size: int, step_s: float, waits_s: list[float], rtt_s: float = 0.0, **more) -> list[RankStepCost]:
    return [rank(i, step_s, w, rtt_s, (i + 1) % size, **more) for i, w in enumerate(waits_s)]


FAR = "a step takes 0.110 s: 0.025 s computing, 0.085 s in reductions; 20 ms from h-0 to h-1 and back"
SAID = {
    "computing": (ring(2, 0.2, [0.01, 0.01]), "a step takes 0.200 s: 0.190 s computing, 0.010 s in reductions"),
    "a slow rank": (
        ring(3, 0.3, [0.19, 0.01, 0.21], 0.0002),
        "a step takes 0.300 s: 0.100 s computing, 0.190 s waiting for the slowest rank, h-1/0/1, which computes "
        "0.290 s, 0.010 s in reductions"),
    "a long way": (
        ring(3, 0.11, [0.085, 0.085, 0.086], 0.02),
        f"{FAR}; 1 reduction of 4 round trips in a row, about 0.080 s each"),
    "a long way, several times": (
        ring(3, 0.11, [0.085, 0.085, 0.086], 0.01, reductions=3),
        "a step takes 0.110 s: 0.025 s computing, 0.085 s in reductions; 10 ms from h-0 to h-1 and back; 3 reductions "
        "of 4 round trips in a row, 2 at a time, about 0.040 s each"),
    "one host far from the others": (  # at most 3 of the 4 messages that follow each other pass over its link
        [rank(0, 0.1, 0.065, 0.02, 2, 0.0001), rank(1, 0.1, 0.065, 0.02, 2, 0.02), rank(2, 0.1, 0.065, 0.02, 0, 0.02)],
        "a step takes 0.100 s: 0.035 s computing, 0.065 s in reductions; 20 ms from h-0 to h-2 and back; 1 reduction "
        "of 4 round trips in a row, about 0.060 s each"),
    "much to move": (
        ring(2, 1.0, [0.8, 0.81], 0.0002, moved=100_000_000),
        "a step takes 1 s: 0.200 s computing, 0.800 s in reductions; 100 MB sent by each rank in 0.800 s, 125 MB/s"),
    "a long way, and much to move": (
        ring(2, 0.3, [0.27, 0.27], 0.02, moved=20_000_000),
        "a step takes 0.300 s: 0.030 s computing, 0.270 s in reductions; 20 ms from h-0 to h-1 and back; 1 reduction "
        "of 2 round trips in a row, about 0.040 s each; 20 MB sent by each rank in the rest of it, 87 MB/s"),
    "losses": (
        ring(2, 0.3, [0.27, 0.27], 0.0005, sent=1000, resent=7),
        "a step takes 0.300 s: 0.030 s computing, 0.270 s in reductions; 0.7 % of 2000 segments were sent twice: the "
        "network loses some"),
    "some taken for lost": (
        ring(2, 0.3, [0.27, 0.27], 0.0005, sent=10_000, resent=7),
        "a step takes 0.300 s: 0.030 s computing, 0.270 s in reductions"),
    "NCCL": (
        ring(2, 0.1, [0.08, 0.08], 0.02, backend="nccl"),
        "a step takes 0.100 s: 0.020 s computing, 0.080 s in reductions; 20 ms from h-0 to h-1 and back"),
    "two on one host": (
        [rank(0, 0.1, 0.05), rank(1, 0.1, 0.05)], "a step takes 0.100 s: 0.050 s computing, 0.050 s in reductions"),
}


@pytest.mark.parametrize("ranks, why", SAID.values(), ids=SAID)
def test_one_line_says_what_a_step_consists_of(ranks: list[RankStepCost], why: str):
    assert explain("j", 2, ranks, AT).why == why


def test_the_parts_of_a_step_are_numbers_too():
    ranks = ring(3, 0.3, [0.19, 0.01, 0.21], 0.0002)
    found = explain("j", 2, ranks, AT)
    assert found == StepExplained(AT, "j", 2, 0.3, pytest.approx(0.1), pytest.approx(0.19), 0.01, 0.0002,
                                  ("h-0", "h-1"), "h-1/0/1", found.why)


def test_ranks_that_differ_by_little_have_no_slowest():
    found = explain("j", 2, ring(2, 0.3, [0.02, 0.03]), AT)
    assert (found.slowest, found.lag_s, found.compute_s) == ("", 0.0, pytest.approx(0.28))


def test_a_wait_that_is_longer_than_a_step_leaves_nothing_to_compute():
    assert explain("j", 2, ring(2, 0.3, [0.5, 0.31]), AT).compute_s == 0.0


TWO = ring(2, 0.1, [0.05, 0.05])


def test_it_is_said_once_in_a_generation_when_every_rank_has_made_enough_steps():
    explainer = Explainer("j")
    assert explainer.update(2, [TWO[0], rank(1, 0.1, 0.05, steps=ENOUGH - 1)], 0.0, AT) is None
    assert explainer.newest is None
    assert explainer.update(2, TWO, 1.0, AT) == explain("j", 2, TWO, AT)
    assert explainer.update(2, TWO, 99.0, AT + 98) is None
    assert explainer.newest == explain("j", 2, TWO, AT)
    assert explainer.update(3, TWO, 100.0, AT + 99) == explain("j", 3, TWO, AT + 99)


@pytest.mark.parametrize("step_s, told", [(0.14, False), (0.16, True), (0.07, False), (0.06, True)])
def test_it_is_said_again_when_a_step_takes_another_time_by_half(step_s: float, told: bool):
    explainer, other = Explainer("j"), ring(2, step_s, [0.05, 0.05])
    explainer.update(2, TWO, 0.0, AT)
    assert explainer.update(2, other, AGAIN_S - 1, AT) is None
    assert (explainer.update(2, other, AGAIN_S, AT) is not None) is told


def test_a_rank_alone_is_not_explained():
    explainer = Explainer("j")
    assert explainer.update(2, [rank(0, 0.1, 0.0)], 0.0, AT) is None


def test_a_generation_that_has_not_been_explained_yet_has_none():
    explainer = Explainer("j")
    explainer.update(2, TWO, 0.0, AT)
    explainer.update(3, [], 1.0, AT)
    assert explainer.newest is None
