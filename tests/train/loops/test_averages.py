"""Moving averages: where the worker that the state was taken from is lost next, and wherever the loop changes them."""

# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from tests.support.train.loops import Disturbance, Job, bits, check, data, disturbances, fleet_of, linear, plain, seeded
from tests.support.train.thread_fleet import Lost

STEPS = 9


def averaged(update: Callable[[torch.Tensor, torch.Tensor], None], before: bool):
    """The first worker is lost in the iteration after the one in which a spare has joined."""

    def loop(job: Job):
        net = linear()
        average = seeded(copy.deepcopy(net), seed=8).requires_grad_(False)
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

        @torch.no_grad()
        def follow():
            for a, p in zip(average.parameters(), net.parameters(), strict=True):
                update(a, p)

        def train(state):
            while state.step < STEPS:
                opt.zero_grad()
                job.at("top", state.step)
                if before:
                    follow()
                if job.worker is not None and job.worker.name == "h0/0/1" and state.step == 6:
                    raise Lost
                if not before:
                    job.metric()
                (net(data(state.step)) - 1).pow(2).mean().backward()
                opt.step()
                if not before:
                    follow()
                state.step += 1
            return bits(net, average)

        return job.run(train, model=net, optimizer=opt, average=average, step=0)

    return loop


def counted(a, p):
    a.lerp_(p, 0.1)


def uncounted(a, p):
    a.data.mul_(0.9).add_(p.data, alpha=0.1)


@pytest.mark.parametrize("before", [False, True], ids=["after the step", "before the gradient"])
@pytest.mark.parametrize("update", [counted, uncounted])
def test_a_newcomer_left_alone_in_its_first_iterations_puts_the_average_back(threads, capfd, update, before):
    loop = averaged(update, before)
    fleet = fleet_of(threads, loop, Disturbance("kill", "top", 5, spares=1))
    assert fleet.workers["h2/0/1"].result == plain(loop), fleet.story()
    assert "was not what it was" not in capfd.readouterr().err


def for_loop(state, iterate):
    for state.step in range(state.step, STEPS):
        iterate(state.step)


def in_epochs(state, iterate):
    """Also the head of the inner loop belongs to the iteration."""
    for state.epoch in range(state.epoch, 3):
        iterate.before_each(state.epoch)
        for state.step in range(state.step, 3 * state.epoch + 3):
            iterate(state.step)


def while_loop(state, iterate):
    while state.step < STEPS:
        iterate(state.step)
        state.step += 1


def target_of(run, top=lambda i: False, after=lambda i: False, used=True, update=counted, make=linear):
    """A target network that follows before the gradient and after the step where `top` and `after` say so."""

    def loop(job: Job):
        net, target = make(), make().requires_grad_(False)
        seeded(target, seed=8)
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

        @torch.no_grad()
        def follow(_=0):
            for a, p in zip(target.parameters(), net.parameters(), strict=True):
                update(a, p)
            for a, b in zip(target.buffers(), net.buffers(), strict=True):
                a.copy_(0.5 * a + 0.5 * b)

        def iterate(i):
            job.at("top", i)
            if top(i):
                follow()
            opt.zero_grad()
            x = data(i)
            loss = (net(x) - (target(x) if used else 1)).pow(2).mean() + (net(x) - 1).pow(2).mean()
            loss.backward()
            job.at("reduced", i)
            opt.step()
            job.at("stepped", i)
            if after(i):
                follow()
            job.metric()

        iterate.before_each = follow
        values = {in_epochs: {"epoch": 0}, counts_after_the_step: {"newest": ""}}.get(run, {})

        def train(state):
            run(state, iterate)
            return bits(net, target)

        return job.run(train, model=net, optimizer=opt, target=target, step=0, **values)

    return loop


def normed() -> torch.nn.Module:
    return torch.nn.Sequential(linear(), torch.nn.BatchNorm1d(1))


EACH_SECOND = {"top": lambda i: i % 2 == 1}
FROM_THE_THIRD = {"top": lambda i: i >= 3}
AT_BOTH_PLACES = {"top": lambda i: i % 2 == 1, "after": lambda i: i % 3 != 1}
SET_FIRST = {"top": lambda i: i == 0, "after": lambda i: True}


@pytest.mark.parametrize("change", disturbances(["top", "reduced", "stepped"], 5), ids=str)
@pytest.mark.parametrize("when", [EACH_SECOND, FROM_THE_THIRD, AT_BOTH_PLACES, SET_FIRST],
                         ids=["each second", "from the third", "at both places", "set first"])
@pytest.mark.parametrize("make", [linear, normed])
def test_an_average_that_changes_in_a_loop_over_the_state_is_exact_wherever_it_changes(threads, make, when, change):
    check(threads, target_of(for_loop, **when, make=make), change)


@pytest.mark.parametrize("change", disturbances(["top", "reduced", "stepped"], 4), ids=str)
def test_an_average_that_changes_before_a_loop_over_the_state_changes_once(threads, change):
    check(threads, target_of(in_epochs, used=False), change)


@pytest.mark.parametrize("change", disturbances(["top", "reduced", "stepped"], 5), ids=str)
@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("when", [EACH_SECOND, FROM_THE_THIRD, AT_BOTH_PLACES], ids=[
    "each second", "from the third", "at both places"])
def test_in_another_loop_it_is_put_back_where_it_changes_twice_and_reported(threads, capfd, when, used, change):
    """So only the loss of one iteration may have used another value; none in a replay."""
    loop = target_of(while_loop, **when, used=used)
    fleet = fleet_of(threads, loop, change)
    err, is_exact = capfd.readouterr().err, fleet.workers["h0/0/1"].result == plain(loop)
    is_reported = "target.weight was not what it was the first time when its gradient began" in err
    assert is_exact or (is_reported and used), fleet.story()
    assert not is_reported or "loops/test_averages.py" in err
    if change is not None and (change.kind, change.point) == ("kill", "top"):
        assert is_reported


def test_an_update_after_the_step_that_is_lost_as_the_first_one_came_before_the_gradient_is_reported(threads, capfd):
    fleet_of(threads, target_of(while_loop, **SET_FIRST), Disturbance("kill", "top", 5))
    assert "target.weight was not what it was the first time" in capfd.readouterr().err


@pytest.mark.parametrize("change", disturbances(["top", "reduced", "stepped"], 5), ids=str)
@pytest.mark.parametrize("run", [for_loop, while_loop])
@pytest.mark.parametrize("when", [{"top": lambda i: True}, {"after": lambda i: True}, {"after": lambda i: i % 2 == 0}],
                         ids=["before each gradient", "after each step", "after each second step"])
def test_an_average_that_changes_at_one_place_is_exact_in_any_loop_and_not_reported(threads, capfd, when, run, change):
    check(threads, target_of(run, **when), change)
    assert "was not what it was" not in capfd.readouterr().err


@pytest.mark.parametrize("change", [Disturbance("kill", "top", 3), Disturbance("notice", "top", 3),
                                    Disturbance("kill", "stepped", 3)], ids=str)
@pytest.mark.parametrize("place", ["top", "after"])
def test_a_loss_in_the_iteration_that_changes_an_average_for_the_first_time_is_reported_unless_exact(threads, capfd,
                                                                                                     place, change):
    loop = target_of(for_loop, **{place: lambda i: i >= 3})
    fleet = fleet_of(threads, loop, change)
    is_reported = "was the first one to change target.weight, target.bias: there is no copy" in capfd.readouterr().err
    assert is_reported != (fleet.workers["h0/0/1"].result == plain(loop)), fleet.story()


def counts_after_the_step(state, iterate):
    """The loop over the names sets a value first, as one over batches does."""
    while state.step < STEPS:
        iterate(state.step)
        for name in ("a", "b"):
            state.newest = name
            iterate.before_each(state.step)
        state.step += 1


@pytest.mark.parametrize("change", disturbances(["top", "reduced"], 5), ids=str)
def test_a_loop_after_the_step_that_sets_a_value_is_none_that_trains(threads, capfd, change):
    check(threads, target_of(counts_after_the_step), change)
    assert "was not what it was" not in capfd.readouterr().err


@pytest.mark.parametrize("change", disturbances(["top", "reduced", "stepped"], 5), ids=str)
@pytest.mark.parametrize("run", [for_loop, while_loop])
@pytest.mark.parametrize("make", [linear, normed])
def test_an_average_that_changes_uncounted_before_each_gradient_is_exact(threads, run, make, change):
    check(threads, target_of(run, top=lambda i: True, update=uncounted, make=make), change)
