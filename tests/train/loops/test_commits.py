"""Commits of jobs that copy, at the end of a loop's body and elsewhere in it."""

# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spotfleet.errors import UsageError
from tests.support.train.loops import Disturbance, Job, bits, check, data, fleet_of, linear

STEPS, BATCHES = 11, 3
Body = Callable[[Any, Callable[..., None], Callable[[], None]], None]


def copying(function: Body, plain_optimizers: bool = False, **values: Any):
    """A GAN's loop `function(state, step, commit)`: `step(at, of)` steps one of two optimizers, or both."""

    def loop(job: Job):
        nets = linear(), linear()
        opts = [torch.optim.SGD(n.parameters(), lr=0.01, momentum=0.5) for n in nets]
        opts = opts if plain_optimizers else [job.distributed(o) for o in opts]
        total = torch.zeros(1)

        def step(at: int, of: tuple[int, ...] = (0, 1)) -> None:
            job.at("top", at)
            for number in of:
                opts[number].zero_grad()
                (nets[number](data(at)) - number).pow(2).mean().backward()
                job.at("reduced", at)
                opts[number].step()
            job.at("stepped", at)
            job.metric()

        def commit(at: int) -> None:
            state.commit()
            job.at("committed", at)

        def train(given):
            nonlocal state
            state = given
            function(state, step, commit)
            return bits(*nets), total.item(), {n: getattr(state, n) for n in values}

        state: Any = None
        return job.run(train, one=nets[0], other=nets[1], o1=opts[0], o2=opts[1], **values)

    return loop


def at_the_end(state, step, commit):
    for state.i in range(state.i, STEPS):
        step(state.i)
        commit(state.i)


def at_each_third(state, step, commit):
    for state.i in range(state.i, STEPS):
        step(state.i)
        if state.i % 3 == 2:
            commit(state.i)


def before_the_work(state, step, commit):
    for state.i in range(state.i, STEPS):
        commit(state.i)
        step(state.i)


def every_second_number(state, step, commit):
    for state.i in range(state.i, STEPS, 2):
        step(state.i)
        commit(state.i)


def the_last_one_begun(state, step, commit):
    for state.i in range(state.i + 1, STEPS):
        step(state.i)
        commit(state.i)


def counted_first(state, step, commit):
    while state.i < STEPS:
        step(state.i)
        state.i += 1
        commit(state.i - 1)


def counted_at_the_top(state, step, commit):
    while state.i < STEPS:
        state.i += 1
        step(state.i)
        commit(state.i)


def nested(state, step, commit):
    for state.epoch in range(state.epoch, 3):
        for state.i in range(state.i, BATCHES):
            step(state.epoch * BATCHES + state.i)
            commit(state.epoch * BATCHES + state.i)
        state.i = 0


def once_per_epoch(state, step, commit):
    for state.epoch in range(state.epoch, 3):
        for batch in range(BATCHES):
            step(state.epoch * BATCHES + batch)
        commit(state.epoch)


def with_work_behind_the_loop(state, step, commit):
    for state.i in range(state.i, 8):
        step(state.i)
        commit(state.i)
    step(8)


EXACT = [at_the_end, at_each_third, before_the_work, every_second_number, the_last_one_begun, counted_first,
         counted_at_the_top, nested, with_work_behind_the_loop]


@pytest.mark.parametrize("point", ["top", "reduced", "stepped", "committed"])
@pytest.mark.parametrize("function", EXACT, ids=lambda f: f.__name__)
def test_a_loss_costs_no_iteration_and_repeats_none(threads, function, point):
    for kind in ("kill", "notice"):
        for spares in (0, 1):
            check(threads, copying(function, i=0, epoch=0), Disturbance(kind, point, 4 if point != "committed" or
                  function is not at_each_third else 5, spares))


@pytest.mark.parametrize("point", ["top", "reduced", "stepped"])
def test_one_commit_per_epoch_repeats_the_whole_epoch(threads, point):
    for spares in (0, 1):
        check(threads, copying(once_per_epoch, epoch=0), Disturbance("kill", point, 4, spares))


def test_weights_tell_of_steps_by_plain_optimizers(threads):
    for point in ("top", "committed"):
        check(threads, copying(at_the_end, plain_optimizers=True, i=0), Disturbance("kill", point, 4))


def between_two_steps(state, step, commit):
    for state.i in range(state.i, STEPS):
        step(state.i, (0,))
        commit(state.i)
        step(state.i, (1,))


def counted_afterwards(state, step, commit):
    while state.i < STEPS:
        step(state.i)
        state.commit()
        state.i += 1


def begun_again(state, step, commit):
    for state.i in range(STEPS):
        step(state.i)
        commit(state.i)


def numbers(first):
    yield from range(first, STEPS)


def of_its_own(state, step, commit):
    for state.i in numbers(state.i):
        step(state.i)
        commit(state.i)


@pytest.mark.parametrize("kind", ["kill", "notice"])
@pytest.mark.parametrize("function, message", [
    (between_two_steps, r"stands between the steps of one iteration of state\.i \(loops/test_commits\.py:\d+"),
    (counted_afterwards, r"state\.i is set after state\.commit\(\), in the same iteration"),
    (begun_again, r"completed the iteration state\.i = \d, but the loop begins with 0 again: loops/test_commits"),
], ids=lambda given: getattr(given, "__name__", ""))
def test_a_commit_that_cannot_be_resumed_from_is_an_error_once_that_matters(threads, function, message, kind):
    with pytest.raises(UsageError, match=message):
        fleet_of(threads, copying(function, i=0), Disturbance(kind, "stepped", 4))


def test_a_planned_change_at_the_first_commit_waits_until_it_is_known_where_that_stands(threads):
    with pytest.raises(UsageError, match="stands between the steps of one iteration"):
        fleet_of(threads, copying(between_two_steps, i=0), Disturbance("notice", "stepped", 0))


def test_a_text_that_shows_no_next_value_is_refused_at_a_loss(threads):
    with pytest.raises(UsageError, match=r"the loop over state\.i has completed 0, and what comes next is not known"):
        fleet_of(threads, copying(of_its_own, i=0), Disturbance("kill", "top", 1))
    check(threads, copying(of_its_own, i=0), Disturbance("kill", "top", 4))


def between_two_steps_and_at_the_end(state, step, commit):
    for state.i in range(state.i, STEPS):
        step(state.i, (0,))
        state.commit()
        step(state.i, (1,))
        state.commit()


def test_a_planned_change_waits_for_the_commit_that_ends_an_iteration(threads):
    check(threads, copying(between_two_steps_and_at_the_end, i=0), Disturbance("notice", "top", 4))


def test_one_optimizer_that_copies_commits_in_the_same_way(threads):
    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

        def train(state):
            for state.i in range(state.i, STEPS):
                job.at("top", state.i)
                opt.zero_grad()
                net(data(state.i)).sum().backward()
                opt.step()
                state.commit()
            return bits(net)

        return job.run(train, options={"copy": True}, model=net, optimizer=opt, i=0)

    for spares in (0, 1):
        check(threads, loop, Disturbance("kill", "top", 4, spares))
