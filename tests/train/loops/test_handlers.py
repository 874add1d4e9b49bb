"""Scripts that catch errors of a batch to skip it: a change of membership is none, and what they miss is found out."""

from __future__ import annotations

import pytest
import torch

import spotfleet.train as hvd
from tests.support.train.loops import Disturbance, Job, bits, check, data, disturbances, linear

STEPS = 12


def skipping(caught):
    """Skips a batch whose step raises one of `caught`."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

        def train(state):
            for state.step in range(state.step, STEPS):  # noqa: B020
                job.at("top", state.step)
                try:
                    opt.zero_grad()
                    loss = net(data(state.step)).pow(2).mean()
                    if state.step == 2:
                        raise RuntimeError("out of memory")
                    loss.backward()
                    job.at("backward", state.step)
                    opt.step()
                    job.at("stepped", state.step)
                    job.metric()
                    state.made += 1
                except caught as error:
                    if type(error).__name__ == "Lost":
                        raise
                    state.skipped += 1
            return bits(net), state.made, state.skipped

        return job.run(train, model=net, optimizer=opt, step=0, made=0, skipped=0)

    return loop


@pytest.mark.parametrize("change", disturbances(["top", "backward", "stepped"], 5), ids=str)
@pytest.mark.parametrize("caught", [RuntimeError, Exception, BaseException])
def test_a_handler_around_a_batch_does_not_swallow_a_change(threads, caught, change):
    check(threads, skipping(caught), change)


def test_code_that_names_horovods_exceptions_still_catches_them(threads):
    caught = []

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

        def train(state):
            while state.step < STEPS:
                job.at("top", state.step)
                opt.zero_grad()
                try:
                    net(data(state.step)).pow(2).mean().backward()
                except hvd.HorovodInternalError as error:
                    caught.append(type(error))
                    raise
                opt.step()
                state.step += 1
            return bits(net)

        return job.run(train, model=net, optimizer=opt, step=0)

    check(threads, loop, Disturbance("kill", "top", 5))
    assert caught == [hvd.CommBroken] and not issubclass(hvd.CommBroken, Exception)


def committing(job: Job):
    """A job that copies, and that catches everything."""
    net = linear()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(state):
        while state.step < STEPS:
            job.at("top", state.step)
            opt.zero_grad()
            net(data(state.step)).pow(2).mean().backward()
            opt.step()
            state.step += 1
            if state.step % 3 == 0:
                try:
                    state.commit()
                except BaseException as error:  # noqa: BLE001
                    job.note(type(error).__name__)
        return bits(net), state.step

    return job.run(train, model=net, optimizer=opt, step=0)


@pytest.mark.parametrize("kind", ["kill", "notice"])
def test_in_a_job_that_copies_the_newest_commit_counts(threads, kind):
    fleet = check(threads, committing, Disturbance(kind, "top", 4))
    assert set(fleet.workers["h0/0/1"].notes) == {"MembershipChanged" if kind == "notice" else "CommBroken"}
