"""Optimizer state that a script changes by itself: after a step, before a gradient, between gradient and step."""

from __future__ import annotations

import collections

import pytest
import torch

from spotfleet.errors import UsageError
from tests.support.train.loops import Disturbance, Job, bits, check, data, disturbances, fleet_of, linear

STEPS = 8


def change(opt, how: str) -> None:
    if how == "clear":
        opt.state = collections.defaultdict(dict)
    for held in opt.state.values():
        if how == "halve":
            held["momentum_buffer"].mul_(0.5)
        elif how == "zero":
            held["momentum_buffer"].zero_()
        else:
            held["momentum_buffer"] = held["momentum_buffer"] * 0.5


def restarting(how: str, where: str, begin: int = 1):
    """Momentum is changed by hand in every other iteration from `begin` on."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))

        def at(place: str, step: int) -> None:
            if place == where and step >= begin and (step - begin) % 2 == 0:
                change(opt, how)

        def train(state):
            while state.step < STEPS:
                at("top", state.step)
                opt.zero_grad()
                (net(data(state.step)) - 1).pow(2).mean().backward()
                job.at("gradient", state.step)
                at("between", state.step)
                if where == "between":
                    job.at("between", state.step)
                    job.metric()
                opt.step()
                at("after", state.step)
                job.at("metric", state.step)
                job.metric()
                state.step += 1
            return bits(net), [opt.state[p]["momentum_buffer"].tolist() for p in net.parameters()
                               if "momentum_buffer" in opt.state[p]]

        return job.run(train, model=net, optimizer=opt, step=0)

    return loop


@pytest.mark.parametrize("how", ["halve", "replace", "zero", "clear"])
@pytest.mark.parametrize("where", ["top", "after"])
@pytest.mark.parametrize("disturbance", disturbances(["gradient", "metric"], 5), ids=str)
def test_optimizer_state_changed_by_hand_is_changed_once(threads, how, where, disturbance):
    check(threads, restarting(how, where), disturbance)


@pytest.mark.parametrize("how", ["halve", "replace"])
@pytest.mark.parametrize("disturbance", disturbances(["gradient", "between"], 5), ids=str)
def test_optimizer_state_changed_between_gradient_and_step_is_changed_once(threads, how, disturbance):
    check(threads, restarting(how, "between"), disturbance)


def test_a_copy_is_kept_of_what_is_changed_in_place_and_a_line_says_so(threads, capfd):
    check(threads, restarting("halve", "after"))
    assert "changes momentum_buffer of the optimizer's state after step(): a copy, 0.0 MB" in capfd.readouterr().err
    check(threads, restarting("replace", "after"))
    assert "spotfleet" not in capfd.readouterr().err


def test_at_the_first_change_in_place_there_is_no_copy_and_a_loss_is_an_error(threads):
    with pytest.raises(UsageError, match="changes the optimizer's state between gradients or after step"):
        fleet_of(threads, restarting("halve", "after", begin=5), Disturbance("kill", "metric", 5))


@pytest.mark.parametrize("how", ["zero", "replace", "clear"])
@pytest.mark.parametrize("where", ["top", "after"])
@pytest.mark.parametrize("point", ["gradient", "metric"])
def test_the_first_change_needs_no_copy_where_it_can_be_made_twice_or_undone(threads, how, where, point):
    check(threads, restarting(how, where, begin=5), Disturbance("kill", point, 5))
