"""Loaders that begin anew after a change, in scripts of which the state names the epoch alone."""

# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from tests.support.train.loops import Disturbance, Job, bits, check, data, fleet_of, linear

EPOCHS, BATCHES = 4, 3


def epochs(batches: Any, copy: bool = False, after: Any = lambda state: None, evaluates: bool = False, **values: Any):
    """Epochs of `batches(state)`; `after(state)` follows each batch, a commit each epoch."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.01))

        def train(state):
            for state.epoch in range(state.epoch, EPOCHS):
                if evaluates:
                    list(DataLoader(torch.zeros(2)))
                for number, rows in batches(state):
                    at = state.epoch * BATCHES + number
                    job.at("top", at)
                    opt.zero_grad()
                    (net(rows) - 1).pow(2).mean().backward()
                    opt.step()
                    job.at("stepped", at)
                    after(state)
                if copy:
                    state.commit()
            return bits(net)

        return job.run(train, options={"copy": copy}, model=net, optimizer=opt, epoch=0, **values)

    return loop


def from_a_loader(state):
    rows = torch.cat([data(i) for i in range(BATCHES)])
    return enumerate(DataLoader(rows, batch_size=8))


def by_number(state):
    for state.batch in range(state.batch, BATCHES):
        yield state.batch, data(state.batch)
    state.batch = 0


@pytest.mark.parametrize("kind", ["kill", "notice"])
@pytest.mark.parametrize("more", [{}, {"loss": 0.0}], ids=["epoch alone", "and a loss"])
def test_a_loader_that_begins_anew_in_mid_epoch_is_an_error_that_names_it(threads, kind, more):
    def measured(state):
        state.loss = state.epoch + torch.rand(1).item() if more else None

    message = r"anew at loops/test_beginnings\.py:\d+, but .* \(state\.epoch = 1\)"
    with pytest.raises(UsageError, match=message) as found:
        fleet_of(threads, epochs(from_a_loader, after=measured, **more), Disturbance(kind, "top", 4 + (kind == "kill")))
    assert "ElasticSampler" in found.value.hint and "state.batch" in found.value.hint


def by_hand(state):
    rows = torch.cat([data(i) for i in range(BATCHES)])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(state.epoch))
    for start in range(0, len(rows), 8):
        yield start // 8, rows[order[start:start + 8]]


def one_after_the_other(job: Job):
    """Two steps in each iteration over the state."""
    net = linear()
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.01))

    def train(state):
        for state.epoch in range(state.epoch, EPOCHS):
            for step in (by_two, by_two):
                step(job, net, opt, state.epoch)
        return bits(net)

    return job.run(train, model=net, optimizer=opt, epoch=0)


def by_two(job, net, opt, epoch):
    job.at("top", epoch)
    opt.zero_grad()
    net(data(epoch)).pow(2).mean().backward()
    opt.step()
    job.at("stepped", epoch)


@pytest.mark.parametrize("more", [{}, {"loss": 0.5}], ids=["epoch alone", "and a loss"])
@pytest.mark.parametrize(("kind", "at"), [("kill", 5), ("notice", 4), ("kill", 8)])
def test_a_loop_that_begins_anew_in_mid_epoch_is_an_error_that_names_it(threads, kind, at, more):
    with pytest.raises(UsageError, match=r"loops/test_beginnings\.py:\d+ has begun with its first step, but .* "
                                         rf"\(state\.epoch = {at // BATCHES}\)") as found:
        fleet_of(threads, epochs(by_hand, **more), Disturbance(kind, "top", at))
    assert "range(state.batch, BATCHES)" in found.value.hint


def test_a_second_step_at_one_value_is_an_error(threads):
    with pytest.raises(UsageError, match="has begun with its first step"):
        fleet_of(threads, one_after_the_other, Disturbance("kill", "stepped", 2))


@pytest.mark.parametrize("at", [3, 6])
def test_a_loop_by_hand_that_has_only_begun_begins_again(threads, at):
    check(threads, epochs(by_hand), Disturbance("kill", "top", at))


def by_the_loss(net, state, step):
    """Epochs that each end at a lower loss."""
    for state.epoch in range(state.epoch, 3):
        made = 0
        while (net(data(0)) - 1).pow(2).mean().item() > 0.9 - 0.35 * state.epoch:
            step(10 * state.epoch + made)
            made += 1


def by_a_float(net, state, step):
    """A loop over a fraction, with one of its own inside."""
    while state.progress < 3:
        for _ in range(1):
            step(round(10 * state.progress))
        state.progress += 0.25


@pytest.mark.parametrize(("steps", "at"), [(by_the_loss, 12), (by_a_float, 15)])
def test_a_loop_that_goes_by_the_weights_or_a_float_begins_where_it_was(threads, steps, at):
    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.01))

        def step(number: int) -> None:
            job.at("top", number)
            opt.zero_grad()
            (net(data(0)) - 1).pow(2).mean().backward()
            opt.step()

        def train(state):
            steps(net, state, step)
            return bits(net)

        return job.run(train, model=net, optimizer=opt, epoch=0, progress=0.0)

    check(threads, loop, Disturbance("kill", "top", at))


@pytest.mark.parametrize("spares", [0, 1])
def test_an_epoch_that_has_only_begun_begins_again(threads, spares):
    check(threads, epochs(from_a_loader), Disturbance("kill", "top", 3, spares))


@pytest.mark.parametrize("at", [3, 4, 5])
def test_a_job_that_commits_each_epoch_does_the_epoch_again(threads, at):
    for point in ("top", "stepped"):
        check(threads, epochs(from_a_loader, copy=True), Disturbance("kill", point, at))


def test_a_job_that_commits_in_mid_epoch_is_told(threads):
    loop = epochs(from_a_loader, copy=True, after=lambda state: state.commit())
    with pytest.raises(UsageError, match="does not name the batch"):
        fleet_of(threads, loop, Disturbance("kill", "top", 5))


def test_an_evaluation_at_the_top_of_an_epoch_begins_anew(threads):
    check(threads, epochs(by_number, evaluates=True, batch=0), Disturbance("kill", "top", 5))


def test_a_sampler_in_the_state_names_the_batch(threads):
    def loop(job: Job):
        net, rows = linear(), torch.cat([data(i) for i in range(BATCHES)])
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.01))
        sampler = hvd.elastic.ElasticSampler(rows, batch_size=8) if job.worker else None

        def train(state):
            for state.epoch in range(state.epoch, EPOCHS):
                sampler.set_epoch(state.epoch)
                for x in DataLoader(rows, batch_size=8, sampler=sampler):
                    job.at("top", state.epoch)
                    net(x).sum().backward()
                    opt.step()
                    sampler.record_batch()
            return bits(net)

        return job.run(train, model=net, optimizer=opt, sampler=sampler, epoch=0)

    assert fleet_of(threads, loop, Disturbance("kill", "top", 2)).generation == 2


@pytest.mark.parametrize("change", [Disturbance(k, p, 5, s) for k in ("kill", "notice") for p in ("top", "stepped")
                                    for s in (0, 1)], ids=str)
def test_a_sampler_names_the_batch_at_which_a_loader_begins(threads, change):
    """An epoch ends after three batches, whatever the world size."""
    def loop(job: Job):
        net, rows = linear(), torch.cat([data(i) for i in range(16)])
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.01))
        sampler = hvd.elastic.ElasticSampler(rows, batch_size=8)

        def train(state):
            for state.epoch in range(state.epoch, EPOCHS):
                sampler.set_epoch(state.epoch)
                for number, x in enumerate(DataLoader(rows, batch_size=8, sampler=sampler), sampler.batches_done):
                    if number >= BATCHES:
                        break
                    job.at("top", state.epoch * BATCHES + number)
                    opt.zero_grad()
                    net(x).sum().backward()
                    opt.step()
                    job.note((state.epoch, number))
                    job.at("stepped", state.epoch * BATCHES + number)
                    job.metric()
                    sampler.record_batch()

        return job.run(train, model=net, optimizer=opt, sampler=sampler, epoch=0)

    fleet = fleet_of(threads, loop, change)
    noted = fleet.workers["h0/0/1"].notes
    batches = [(epoch, number) for epoch in range(EPOCHS) for number in range(BATCHES)]
    assert fleet.generation > 1 and list(dict.fromkeys(noted)) == batches
    assert len(noted) <= EPOCHS * BATCHES + 1  # one of them replayed
