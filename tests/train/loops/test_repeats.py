"""An iteration that is computed again, in loops that change values before its gradient or ignore the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from tests.support.train.loops import Disturbance, Job, bits, check, data, disturbances, fleet_of, linear

STEPS = 9


def loss_of(net, step: int) -> torch.Tensor:
    return (net(data(step)) - 1).pow(2).mean()


def before_the_gradient(job: Job):
    """scheduler.step() and a count of samples at the top of an iteration."""
    net = linear()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=STEPS + 3)
    opt = job.distributed(opt)

    def train(state):
        while state.step < STEPS:
            job.at("top", state.step)
            schedule.step()
            state.seen += len(data(state.step))
            state.share *= 0.9
            opt.zero_grad()
            loss = loss_of(net, state.step) * state.share
            job.at("forward", state.step)
            loss.backward()
            opt.step()
            job.at("metric", state.step)
            job.metric()
            state.step += 1
        return bits(net), schedule.last_epoch, schedule.get_last_lr(), state.seen, state.share

    return job.run(train, model=net, optimizer=opt, schedule=schedule, step=0, seen=0, share=1.0)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("change", disturbances(["top", "forward", "metric"], 4), ids=str)
def test_what_an_iteration_changes_before_its_gradient_is_changed_once(threads, change):
    fleet = fleet_of(threads, before_the_gradient, change)
    expected = before_the_gradient(Job())
    for found in (w.result for w in fleet.workers.values() if w.result is not None):
        assert found[1:4] == expected[1:4], fleet.story()


def set_at_the_top(job: Job):
    """A value that the top of the function sets for the world size; it is not put back."""
    net = linear()
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

    def train(state):
        state.workers = hvd.size()
        while state.step < STEPS:
            opt.zero_grad()
            job.at("top", state.step)
            loss_of(net, state.step).backward()
            opt.step()
            state.step += 1
        return state.workers

    return job.run(train, model=net, optimizer=opt, step=0, workers=0)


@pytest.mark.parametrize("kind", ["kill", "notice"])
def test_what_the_top_of_the_function_sets_stays(threads, kind):
    fleet = fleet_of(threads, set_at_the_top, Disturbance(kind, "top", 4))
    assert fleet.workers["h0/0/1"].result == 1


def starts_again(how: str):
    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

        def train(state):
            for step in range(STEPS):
                if how == "resets":
                    state.step = step
                opt.zero_grad()
                job.at("top", step)
                loss_of(net, step).backward()
                opt.step()
                job.note(step)
            return state.version

        return job.run(train, model=net, optimizer=opt, **({} if how == "keeps none" else {"step": 0}))

    return loop


@pytest.mark.parametrize("kind", ["kill", "notice"])
@pytest.mark.parametrize(("how", "message"), [("resets", "has begun again with its first batch"),
                                              ("ignores", r"state.step \(.*\) is as at the start")])
def test_a_function_that_begins_at_its_first_batch_again_is_an_error(threads, kind, how, message):
    with pytest.raises(UsageError, match=message) as caught:
        fleet_of(threads, starts_again(how), Disturbance(kind, "top", 4))
    assert "range(state.step, STEPS)" in (caught.value.hint or "")
    assert f"loops/test_repeats.py:{line_of('state.step = step')}" in str(caught.value)


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


def epochs_of(batches: Callable[[Any], Iterable[int]]):
    """Epochs in the state, each with a loop over `batches(state)`."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

        def train(state):
            while state.epoch < 3:
                for state.batch in batches(state):  # noqa: B020 - it goes on from the state
                    opt.zero_grad()
                    job.at("top", 4 * state.epoch + state.batch)
                    loss_of(net, 4 * state.epoch + state.batch).backward()
                    opt.step()
                state.batch = 0
                state.epoch += 1
            return state.version

        return job.run(train, model=net, optimizer=opt, epoch=0, batch=0)

    return loop


@pytest.mark.parametrize("kind", ["kill", "notice"])
@pytest.mark.parametrize("batches", [lambda state: range(4), lambda state: range(max(0, state.batch - 1), 4)],
                         ids=["from the first", "one batch early"])
def test_a_loop_that_begins_a_later_epoch_again_is_an_error_that_names_its_line(threads, kind, batches):
    with pytest.raises(UsageError, match=r"called with state.batch = [23] and has begun again") as caught:
        fleet_of(threads, epochs_of(batches), Disturbance(kind, "top", 6, spares=1))
    assert f"loops/test_repeats.py:{line_of('for state.batch in batches')}" in str(caught.value)


@pytest.mark.parametrize("kind", ["kill", "notice"])
def test_a_loop_that_goes_on_in_a_later_epoch_is_none(threads, kind):
    fleet = fleet_of(threads, epochs_of(lambda state: range(state.batch, 4)), Disturbance(kind, "top", 6))
    assert fleet.workers["h0/0/1"].result == 12


@pytest.mark.parametrize("kind", ["kill", "notice"])
def test_a_shorter_epoch_of_other_workers_may_go_on_with_the_next_one(threads, kind):
    fleet = fleet_of(threads, epochs_of(lambda state: range(state.batch, 2 * hvd.size())), Disturbance(kind, "top", 7))
    assert fleet.workers["h0/0/1"].result == (9 if kind == "kill" else 10)


def test_a_loop_that_keeps_no_loop_variable_may_begin_again(threads):
    fleet = fleet_of(threads, starts_again("keeps none"), Disturbance("kill", "top", 4))
    assert fleet.workers["h0/0/1"].result == 4 + STEPS


def numbered_by_a_sampler(job: Job):
    """The sampler tells where to go on; state.batch is a number of the loader's, which begins at 0 again."""
    net = linear()
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))
    sampler = hvd.elastic.ElasticSampler(36, batch_size=2)

    def train(state):
        for state.batch, _ in enumerate(sampler.batches()):
            opt.zero_grad()
            job.at("top", int(sampler.processed_num))
            loss_of(net, 0).backward()
            opt.step()
            sampler.record_batch()
        return sampler.processed_num

    return job.run(train, model=net, optimizer=opt, sampler=sampler, batch=0)


@pytest.mark.parametrize("kind", ["kill", "notice"])
def test_a_number_that_a_loader_counts_may_begin_again(threads, kind):
    fleet = fleet_of(threads, numbered_by_a_sampler, Disturbance(kind, "top", 16))
    assert fleet.workers["h0/0/1"].result == 36


def ahead(is_ahead: bool):
    """Draws each batch from a generator in the state, in the iteration or one ahead."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

        def train(state):
            x = torch.randn(8, 4, generator=state.draws) if is_ahead else None
            while state.step < STEPS:
                if not is_ahead:
                    x = torch.randn(8, 4, generator=state.draws)
                job.at("top", state.step)
                loss = net(x).pow(2).mean()
                if is_ahead:
                    x = torch.randn(8, 4, generator=state.draws)
                opt.zero_grad()
                loss.backward()
                opt.step()
                state.step += 1
            return bits(net)

        return job.run(train, model=net, optimizer=opt, step=0, draws=torch.Generator().manual_seed(1))

    return loop


@pytest.mark.parametrize("change", disturbances(["top"], 4), ids=str)
def test_batches_drawn_in_their_iteration_are_the_same_again(threads, change, capfd):
    check(threads, ahead(False), change)
    assert "state.draws" not in capfd.readouterr().err


@pytest.mark.parametrize("change", disturbances(["top"], 4)[1:], ids=str)
def test_a_batch_that_is_drawn_ahead_is_reported_when_another_takes_its_place(threads, change, capfd):
    fleet_of(threads, ahead(True), change)
    said = capfd.readouterr().err
    assert "is computed again, but has drawn other random numbers" in said and "state.draws" in said


def test_a_state_that_is_synchronised_outside_of_run_says_what_to_do(alone):
    with pytest.raises(UsageError, match=r"before elastic\.run") as caught:
        hvd.elastic.TorchState(linear(), None, step=0).sync()
    assert caught.value.hint


def test_a_tensor_in_the_state_is_copied_when_it_has_changed(alone):
    table = torch.zeros(4)
    state = hvd.elastic.ObjectState(table=table, i=0)
    alone.state = state
    state.attach(1, 0)
    first, again = (state.capture(1, 0).scalars["table"] for _ in range(2))
    table.add_(1)
    third = state.capture(1, 0).scalars["table"]
    assert first is again and third.tolist() == [1.0] * 4 and first.tolist() == [0.0] * 4


def test_a_frozen_parameter_of_8_bits_trains_beside_others(alone):
    net = linear()
    net.frozen = torch.nn.Parameter(torch.zeros(8).to(torch.float8_e4m3fn), requires_grad=False)
    opt = hvd.DistributedOptimizer(torch.optim.SGD([net.weight, net.bias], lr=0.1))

    @hvd.elastic.run
    def train(state):
        for state.step in range(state.step, 3):  # noqa: B020
            opt.zero_grad()
            loss_of(net, state.step).backward()
            opt.step()
        return state.version

    assert train(hvd.elastic.TorchState(net, opt, step=0)) == 3
