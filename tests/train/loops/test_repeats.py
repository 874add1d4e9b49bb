"""An iteration that is computed again, in loops that change values before its gradient or ignore the state."""

# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
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
    check(threads, before_the_gradient, change)


def loop_of(function, **values):
    """A loop that is `function(state, step)`; `step(at, used)` makes a step whose loss depends on both."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5))

        def step(at: int, used: float) -> None:
            job.at("forward", at)
            opt.zero_grad()
            (loss_of(net, at) * (1 + used)).backward()
            opt.step()
            job.at("metric", at)
            job.metric()

        def train(state):
            job.note("called")
            function(state, step)
            return bits(net), {name: getattr(state, name) for name in values}

        return job.run(train, model=net, optimizer=opt, **values)

    return loop


def reset_after_the_step(state, step):
    for state.i in range(state.i, STEPS):
        state.seen += 1
        step(state.i, state.seen)
        if state.i % 2 == 0:
            state.seen = 0


def wraps_before_the_gradient(state, step):
    for state.i in range(state.i, STEPS):
        state.seen += 1
        if state.seen == 3:
            state.seen = 0
        step(state.i, state.seen)


def counts_while(state, step):
    while state.i < STEPS:
        state.i += 1
        step(state.i - 1, state.i)


def counts_late(state, step):
    for state.i in range(state.i, STEPS):
        if state.i > 2:
            state.seen += 1
        step(state.i, state.seen)


def counts_twice(state, step):
    def count():
        state.seen += 1

    for state.i in range(state.i, STEPS):
        count()
        step(state.i, state.seen)
        count()


def counts_by_epoch(state, step):
    for state.epoch in range(state.epoch, 3):
        state.seen += 1
        for state.i in range(state.i, 3):
            step(state.epoch * 3 + state.i, state.seen)
        state.i = 0


def sets_after_the_step(state, step):
    if state.i == 0:
        state.share = 0.5
    for state.i in range(state.i, STEPS):
        step(state.i, state.share)
        state.share *= 1.5


def falls_and_rises(state, step):
    for state.i in range(state.i, STEPS):
        if state.i % 3 == 0:
            state.share *= 0.5
        step(state.i, state.share)
        state.share += 0.125


def toggles(state, step):
    for state.i in range(state.i, STEPS):
        state.on = not state.on
        step(state.i, float(state.on))


def skips(state, step):
    for i in range(STEPS):
        if i > state.i:
            state.i = i
            step(i, 0)


def begins_elsewhere(state, step):
    for state.i in range(max(state.i, 0), STEPS):
        step(state.i, 0)


COUNTING = [(reset_after_the_step, {"i": 0, "seen": 0}), (wraps_before_the_gradient, {"i": 0, "seen": 0}),
            (counts_while, {"i": 0}), (counts_late, {"i": 0, "seen": 0}), (counts_twice, {"i": 0, "seen": 0}),
            (counts_by_epoch, {"i": 0, "epoch": 0, "seen": 0}), (sets_after_the_step, {"i": 0, "share": 0.0}),
            (falls_and_rises, {"i": 0, "share": 1.0}), (toggles, {"i": 0, "on": False}),
            (skips, {"i": -1}), (begins_elsewhere, {"i": -1})]


@pytest.mark.parametrize("change", disturbances(["forward", "metric"], 4)[1:], ids=str)
@pytest.mark.parametrize(("function", "values"), COUNTING, ids=[f.__name__ for f, _ in COUNTING])
def test_the_forward_pass_finds_the_values_of_the_first_time(threads, function, values, change, capfd):
    check(threads, loop_of(function, **values), change)
    assert "was not what it was" not in capfd.readouterr().err


@pytest.mark.parametrize(("function", "values", "calls"), [
    (counts_while, {"i": 0}, 2), (begins_elsewhere, {"i": -1}, 3)])
def test_a_call_with_the_wrong_values_is_made_again_and_counts_as_one(threads, function, values, calls):
    fleet = check(threads, loop_of(function, **values), Disturbance("kill", "metric", 4))
    report = fleet.workers["h0/0/1"].control.report
    assert fleet.workers["h0/0/1"].notes == ["called"] * calls
    assert (report.recomputed, report.repeated, fleet.generation) == (1, 0, 2)


def counts_what_all_do(state, step):
    for state.i in range(state.i, STEPS):
        state.seen += hvd.size()
        step(state.i, 0)


@pytest.mark.parametrize(("point", "seen"), [("forward", 4 * 2 + 5), ("metric", 5 * 2 + 4)])
def test_what_is_counted_by_the_world_size_is_that_of_the_step_which_was_applied(threads, point, seen):
    fleet = fleet_of(threads, loop_of(counts_what_all_do, i=0, seen=0), Disturbance("kill", point, 4))
    assert fleet.workers["h0/0/1"].result[1] == {"i": STEPS - 1, "seen": seen}


def counts_calls(state, step):
    state.calls += 1
    for state.i in range(state.i, STEPS):
        step(state.i, 0)


def test_what_the_function_counts_outside_of_its_loop_is_counted_by_each_call(threads):
    fleet = fleet_of(threads, loop_of(counts_calls, i=0, calls=0), Disturbance("kill", "forward", 4))
    assert fleet.workers["h0/0/1"].result[1]["calls"] == 2


def falls_late(state, step):
    for state.i in range(state.i, STEPS):
        if state.i > 2:
            state.share *= 0.5
        step(state.i, state.share)


def begins_at_one_again(state, step):
    for i in range(1, STEPS):
        state.i = i
        step(i, 0)


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize(("function", "values", "name"), [
    (falls_late, {"i": 0, "share": 1.0}, "share"), (begins_at_one_again, {"i": 0}, "i")])
def test_a_value_that_no_call_makes_right_is_reported_and_put_back(threads, function, values, name, spares, capfd):
    loop = loop_of(function, **values)
    fleet = fleet_of(threads, loop, Disturbance("kill", "forward", 4, spares))
    assert fleet.workers["h0/0/1"].result[1] == loop(Job())[1]
    assert f"state.{name} was not what it was the first time" in capfd.readouterr().err


@pytest.mark.parametrize(("earlier", "called_with", "used"), [(False, 4, 5), (True, 5, 6)])
def test_a_position_in_a_checkpoint_tells_what_to_begin_with(alone, earlier, called_with, used):
    """One of an earlier release does not; the value is put back as the gradient begins."""
    net = linear()
    opt = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))

    def iterate(state):
        state.seen += 1
        opt.zero_grad()
        loss = loss_of(net, 0) * state.seen
        forward = state.seen
        loss.backward()
        return forward

    @hvd.elastic.run
    def train(state):
        for state.i in range(state.i, 5):
            iterate(state)
            if state.i < 4:
                opt.step()
        position = pickle.loads(pickle.dumps(state._position))
        state.rewind(replace(position, tries=(), counted=()) if earlier else position)
        state.enter()
        assert (state.i, state.seen) == (4, called_with)
        for state.i in range(state.i, 5):
            assert (iterate(state), state.seen) == (used, 5)

    train(hvd.elastic.TorchState(net, opt, i=0, seen=0))


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
                for state.batch in batches(state):
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


@pytest.mark.parametrize("kind", ["kill", "notice"])
def test_a_loop_that_keeps_no_loop_variable_may_begin_again_and_that_is_said(threads, capfd, kind):
    fleet = fleet_of(threads, starts_again("keeps none"), Disturbance(kind, "top", 4))
    assert fleet.workers["h0/0/1"].result == (4 if kind == "kill" else 5) + STEPS
    assert "nothing that tells its loop where to go on" in capfd.readouterr().err


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
        for state.step in range(state.step, 3):
            opt.zero_grad()
            loss_of(net, state.step).backward()
            opt.step()
        return state.version

    assert train(hvd.elastic.TorchState(net, opt, step=0)) == 3


def grows(begin: Any, add: Callable[[Any], Any]):
    """An object of the state is changed before each gradient."""

    def loop(job: Job):
        net = linear()
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

        def train(state):
            for state.step in range(state.step, STEPS):
                opt.zero_grad()
                state.held = add(state.held)
                job.at("forward", state.step)
                loss_of(net, state.step).backward()
                opt.step()
            return bits(net), str(state.held)

        return job.run(train, model=net, optimizer=opt, step=0, held=begin())

    return loop


@pytest.mark.parametrize(("begin", "add"), [
    (list, lambda held: [*held, 1]), (lambda: torch.zeros(()), lambda held: held + 1),
    (dict, lambda held: {**held, len(held): 1})], ids=["list", "tensor", "dict"])
@pytest.mark.parametrize("change", [Disturbance(kind, "forward", 4, spares=1) for kind in ("kill", "notice")], ids=str)
def test_an_object_that_changes_before_the_gradient_changes_once_and_the_repeat_is_reported(threads, capfd, begin, add,
                                                                                            change):
    check(threads, grows(begin, add), change)
    err = capfd.readouterr().err
    assert "state.held was not what it was the first time" in err
    assert f"Change it after step(): loops/test_repeats.py:{line_of('state.held = add(')}" in err


def test_an_object_may_be_another_one_at_another_world_size(threads):
    """So a list of the world sizes, as of examples/digits.py, gets the new one also before the gradient."""

    def begin():
        return []

    fleet = fleet_of(threads, grows(begin, lambda held: held if held[-1:] == [hvd.size()] else [*held, hvd.size()]),
                     Disturbance("kill", "forward", 4))
    assert fleet.workers["h0/0/1"].result[1] == "[2, 1]"


class Meter:
    """Counts as many scripts do; its parts refer to it."""

    def __init__(self) -> None:
        self.sum = 0.0
        self.seen = []
        self.add = self._add

    def _add(self, value: float) -> None:
        self.sum += value
        self.seen.append(value)

    def values(self) -> Any:
        return self.sum, self.seen


class Series(list):
    """A list with methods of its own is no plain one: another object takes its place."""


CHUNKS = [[i] for i in range(STEPS)]


def by_another_name(job: Job):
    """Objects of the state that the loop uses by names that were given before."""
    net, chunks = linear(), [list(c) for c in CHUNKS]
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))
    meter, losses, counts, recent, seen = Meter(), [], Counter(), deque(maxlen=3), set()
    series = Series()

    def train(state):
        for state.step in range(state.step, STEPS):
            job.at("top", state.step)
            state.chunk = chunks[state.step]
            opt.zero_grad()
            loss = loss_of(net, state.step) * (1 + 0.1 * len(recent))
            loss.backward()
            opt.step()
            value = float(state.chunk[0])
            meter.add(value)
            losses.append(meter.sum)
            counts[state.step % 2] += 1
            recent.append(value)
            seen.add(value)
            state.series.append(value)
            job.at("stepped", state.step)
            job.metric()
        assert job.worker is None or (state.meter is meter and state.losses is losses and state.seen is seen)
        return bits(net), meter.values(), losses, counts, recent, seen, list(state.series), chunks

    return job.run(train, model=net, optimizer=opt, step=0, meter=meter, losses=losses, counts=counts, recent=recent,
                   seen=seen, series=series, chunk=[])


@pytest.mark.parametrize("change", disturbances(["top", "stepped"], 4), ids=str)
def test_an_object_of_the_state_stays_the_one_that_has_other_names(threads, change):
    check(threads, by_another_name, change)
