"""Gradients that a script accumulates over several batches by itself: a change repeats the whole step, or nothing."""

from __future__ import annotations

import pytest
import torch

import spotfleet.train as hvd
from tests.support.train.loops import Disturbance, Job, bits, check, data, disturbances, fleet_of, linear, plain

EVERY, BATCHES = 4, 16
CHANGES = disturbances(["top", "forward", "backward"], 6)


def loss_of(model, step: int) -> torch.Tensor:
    return (model(data(step)) - 1).pow(2).mean() / EVERY


def each_fourth(job: Job):
    """`loss.backward()` for each batch, a step and zero_grad after each fourth."""
    net = linear()
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

    def train(state):
        for state.batch in range(state.batch, BATCHES):  # noqa: B020 - as docs/commit.md has it
            job.note((state.batch, opt.state[net.weight] == {}))
            job.at("top", state.batch)
            loss = loss_of(net, state.batch)
            job.at("forward", state.batch)
            loss.backward()
            job.at("backward", state.batch)
            if (state.batch + 1) % EVERY == 0:
                opt.step()
                opt.zero_grad()
        return bits(net), opt.state[net.weight]["momentum_buffer"].tolist()

    return job.run(train, model=net, optimizer=opt, batch=0)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_steps_of_several_backward_passes_are_made_of_all_of_them(threads, change):
    check(threads, each_fourth, change)


def test_a_planned_change_waits_for_the_step_and_repeats_nothing(threads):
    fleet = check(threads, each_fourth, Disturbance("notice", "top", 5))
    survivor = fleet.workers["h0/0/1"]
    batches = [batch for batch, _ in survivor.notes]
    assert batches in ([*range(9), *range(8, 16)], [*range(13), *range(12, 16)])  # left at the first gradient of a step
    assert survivor.control.report.repeated == 0


def test_after_a_loss_the_step_begins_again_with_its_first_batch(threads):
    fleet = check(threads, each_fourth, Disturbance("kill", "forward", 6))
    assert [batch for batch, _ in fleet.workers["h0/0/1"].notes] == [*range(7), *range(4, 16)]


def with_metric(job: Job):
    """A collective of the script after each step: its failure replays all batches of the step."""
    net = linear()
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

    def train(state):
        for state.batch in range(state.batch, BATCHES):  # noqa: B020 - as docs/commit.md has it
            loss_of(net, state.batch).backward()
            if (state.batch + 1) % EVERY == 0:
                opt.step()
                opt.zero_grad()
                job.at("metric", state.batch)
                job.metric()
                state.seen += 1
        return bits(net), state.seen

    return job.run(train, model=net, optimizer=opt, batch=0, seen=0)


@pytest.mark.parametrize("change", disturbances(["metric"], 7), ids=str)
def test_a_replay_repeats_the_whole_step_without_applying_it(threads, change):
    check(threads, with_metric, change)


def skipping(job: Job):
    """Steps whose gradients are thrown away, by a GradScaler that overflows and by the script."""
    net = linear()
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2, growth_factor=2.0**60,
                                  backoff_factor=2.0**-60)

    def train(state):
        while state.step < 12:
            opt.zero_grad()
            job.at("top", state.step)
            scaler.scale(loss_of(net, state.step) * 1e3).backward()
            job.at("backward", state.step)
            scaler.unscale_(opt)
            if state.step % 5 != 2:
                scaler.step(opt)
            scaler.update()
            state.step += 1
        return bits(net), scaler.get_scale(), state.step

    return job.run(train, model=net, optimizer=opt, scaler=scaler, step=0)


@pytest.mark.parametrize("step", [3, 4, 7, 8])
@pytest.mark.parametrize("kind", ["kill", "notice"])
def test_gradients_that_are_thrown_away_belong_to_the_step_that_follows(threads, kind, step):
    check(threads, skipping, Disturbance(kind, "backward" if kind == "kill" else "top", step))


TOTAL, BATCH, PASSES = 96, 2, 3


def sampled(stream: bool):
    """Weight i falls by one for each time that sample i is in an applied step; a sampler, a step per three batches."""

    def loop(job: Job):
        net = torch.nn.Linear(TOTAL, 1, bias=False)
        torch.nn.init.zeros_(net.weight)
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=1.0), op=hvd.Average)
        sampler = (hvd.elastic.ElasticIterable(range(TOTAL), BATCH) if stream
                   else hvd.elastic.ElasticSampler(TOTAL, batch_size=BATCH))

        def train(state):
            batches = iter(sampler.batches())
            while True:
                for number in range(PASSES):
                    ids = next(batches, None)
                    if ids is None:
                        return net.weight.flatten().tolist(), state.step
                    ids = torch.as_tensor(ids)
                    rows = torch.nn.functional.one_hot(ids, TOTAL).float()
                    job.at(f"batch {number}", state.step)
                    (net(rows).sum() * hvd.size()).backward()
                    if number < PASSES - 1:
                        sampler.record_batch()
                opt.step()
                opt.zero_grad()
                job.at("stepped", state.step)
                job.metric()
                sampler.record_batch()
                state.step += 1

        return job.run(train, model=net, optimizer=opt, sampler=sampler, step=0)

    return loop


@pytest.mark.parametrize("stream", [False, True], ids=["sampler", "stream"])
@pytest.mark.parametrize("change", [Disturbance(kind, point, 3, spares) for kind in ("kill", "notice")
                                    for point in ("batch 1", "batch 2", "stepped") for spares in (0, 1)], ids=str)
def test_each_sample_is_in_one_applied_step(threads, change, stream):
    """World sizes at which every step is whole: 96 samples are 8 steps of 12 at two workers, of 6 at one."""
    fleet = fleet_of(threads, sampled(stream), change)
    for found in (w.result for w in fleet.workers.values() if w.result is not None):
        assert set(found[0]) == {-1.0}, fleet.story()


def test_a_window_of_plain_torch_is_what_these_loops_compute():
    assert plain(each_fourth) == plain(each_fourth) != plain(with_metric)
