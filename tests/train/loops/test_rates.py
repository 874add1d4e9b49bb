"""Hyper-parameters that a script changes by itself, before a gradient or after a step."""

from __future__ import annotations

import pytest
import torch

import spotfleet.train as hvd
from tests.support.train.loops import Disturbance, Job, bits, check, data, disturbances, fleet_of, linear

STEPS = 8


def rated(change, where: str):
    """`change(value, step)` gives the next rate, at the top or after the step."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5))

        def at(place: str, step: int) -> None:
            if place == where:
                for group in opt.param_groups:
                    group["lr"] = change(group["lr"], step)
            if place == "after":
                for group in opt.param_groups:
                    group["weight_decay"] *= 0.9

        def train(state):
            while state.step < STEPS:
                job.at("top", state.step)
                at("top", state.step)
                opt.zero_grad()
                (net(data(state.step)) - 1).pow(2).mean().backward()
                job.at("gradient", state.step)
                opt.step()
                at("after", state.step)
                job.at("metric", state.step)
                job.metric()
                state.step += 1
            group = opt.param_groups[0]
            return bits(net), float(group["lr"]), group["weight_decay"]

        return job.run(train, model=net, optimizer=opt, step=0)

    return loop


CHANGES = {"falls": lambda value, step: value * 0.9,
           "is set": lambda value, step: 0.1 / (1 + step),
           "falls now and then": lambda value, step: value * 0.5 if step % 5 == 4 else value}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("where", ["top", "after"])
@pytest.mark.parametrize("disturbance", [*disturbances(["top", "gradient", "metric"], 4), Disturbance("kill", "top", 0),
                                         Disturbance("kill", "gradient", 0)], ids=str)
def test_a_rate_changed_by_hand_changes_once(threads, change, where, disturbance):
    check(threads, rated(change, where), disturbance)


def test_a_rate_set_by_the_world_size_is_that_of_the_new_one(threads):
    loop = rated(lambda value, step: 0.05 * hvd.size() / (1 + step), "top")
    fleet = fleet_of(threads, loop, Disturbance("kill", "top", STEPS - 1))
    assert [w.result[1] for w in fleet.workers.values() if w.result] == [0.05 / STEPS]


def resized(job: Job):
    """The rate falls at the top, and a reset callback sets it for the new world size."""
    net = linear()
    opt = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    state = hvd.elastic.TorchState(net, opt, step=0, size=hvd.size())

    def resize():
        opt.param_groups[0]["lr"] *= hvd.size() / state.size
        state.size = hvd.size()

    def train(state):
        while state.step < STEPS:
            opt.param_groups[0]["lr"] *= 0.5
            opt.zero_grad()
            (net(data(state.step)) - 1).pow(2).mean().backward()
            job.at("gradient", state.step)
            opt.step()
            state.step += 1
        return opt.param_groups[0]["lr"]

    state.register_reset_callbacks([resize])
    return hvd.elastic.run(train)(state)


def test_a_rate_that_falls_by_hand_and_is_resized_by_a_callback_changes_once_by_each(threads):
    fleet = fleet_of(threads, resized, Disturbance("kill", "gradient", 4))
    assert [w.result for w in fleet.workers.values() if w.result] == [0.5 ** STEPS / 2]
