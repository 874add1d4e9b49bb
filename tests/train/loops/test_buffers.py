"""Buffers that a forward pass changes in other ways than in place, or that are no memory of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from spotfleet.errors import UsageError
from spotfleet.train.checkpoint import entries
from tests.support.train.loops import Disturbance, Job, bits, check, data, disturbances, fleet_of, linear

# ruff: noqa: B020  `for state.i in range(state.i, ...)` is how a loop starts where training stands

STEPS = 8
POINTS = ["top", "reduced", "stepped"]


class Centre(nn.Module):
    """Subtracts a moving mean, which it sets anew."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean.mean()


class Masked(nn.Module):
    """Multiplies by a mask that shows one row, which changes, several times."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.register_buffer("row", torch.ones(1, width))
        self.register_buffer("mask", self.row.expand(8, width))

    def forward(self, x):
        self.row.mul_(0.9)
        return x * self.mask


def loop_of(make):
    def loop(job: Job):
        net = make()
        opt = job.distributed(torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05, momentum=0.9))

        def train(state):
            for state.step in range(state.step, STEPS):
                opt.zero_grad()
                job.at("top", state.step)
                (net(data(state.step)) - 1).pow(2).mean().backward()
                job.at("reduced", state.step)
                opt.step()
                job.at("stepped", state.step)
                job.metric()
            return bits(net)

        return job.run(train, model=net, optimizer=opt, step=0)

    return loop


@pytest.mark.parametrize("change", disturbances(POINTS, 4), ids=str)
@pytest.mark.parametrize("size", [3, (1 << 16) + 1], ids=["small", "large"])
def test_a_buffer_that_is_set_anew_is_exact(threads, size, change):
    check(threads, loop_of(lambda: nn.Sequential(linear(), Centre(size))), change)


@pytest.mark.parametrize("change", disturbances(POINTS, 4), ids=str)
def test_a_buffer_made_by_expand_is_exact(threads, change):
    check(threads, loop_of(lambda: nn.Sequential(Masked(), linear())), change)


def evaluating(job: Job):
    """An evaluation in training mode after each step changes the statistics."""
    net = nn.Sequential(linear(), nn.BatchNorm1d(1))
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))

    def train(state):
        for state.step in range(state.step, STEPS):
            opt.zero_grad()
            job.at("top", state.step)
            (net(data(state.step)) - 1).pow(2).mean().backward()
            job.at("reduced", state.step)
            opt.step()
            with torch.no_grad():
                net(data(state.step + 1))
            job.at("stepped", state.step)
            job.metric()
        return bits(net)

    return job.run(train, model=net, optimizer=opt, step=0)


@pytest.mark.parametrize("change", disturbances(POINTS, 4), ids=str)
def test_statistics_that_code_after_a_step_changes_are_exact_in_a_loop_over_the_state(threads, change):
    check(threads, evaluating, change)


class Growing(nn.Module):
    """Keeps a cache, in no state_dict, of the length that came in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.arange(4.0).cos(), persistent=False)

    def forward(self, x):
        if len(x) > len(self.cache):
            self.register_buffer("cache", torch.arange(float(len(x))).cos(), persistent=False)
        return x * self.cache[:len(x), None]


def growing(job: Job):
    net = nn.Sequential(Growing(), linear())
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))

    def train(state):
        for state.step in range(state.step, STEPS):
            opt.zero_grad()
            job.at("top", state.step)
            (net(data(state.step, rows=3 + state.step)) - 1).pow(2).mean().backward()
            job.at("reduced", state.step)
            opt.step()
            job.at("stepped", state.step)
            job.metric()
        return bits(net), len(net[0].cache)

    return job.run(train, model=net, optimizer=opt, step=0)


@pytest.mark.parametrize("change", disturbances(POINTS, 4), ids=str)
def test_a_buffer_that_has_grown_is_exact(threads, change):
    check(threads, growing, change)


class Resized(nn.Module):
    """Keeps a moving mean in a buffer that each forward pass resizes in place by the batch, as observers of QAT do."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))

    def forward(self, x):
        mean = 0.9 * self.mean.mean() + 0.1 * x.detach().mean()
        self.mean.resize_(max(1, self.mean.numel() + (1 if len(x) % 2 else -1))).fill_(mean)
        return x - self.mean.mean() - len(self.mean) % 5


def resized(shape):
    def loop(job: Job):
        net = nn.Sequential(Resized(shape), linear())
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))

        def train(state):
            for state.step in range(state.step, STEPS):
                opt.zero_grad()
                job.at("top", state.step)
                (net(data(state.step, rows=3 + (state.step + 1) // 2)) - 1).pow(2).mean().backward()
                job.at("reduced", state.step)
                opt.step()
                job.at("stepped", state.step)
                job.metric()
            return bits(net), len(net[0].mean)

        return job.run(train, model=net, optimizer=opt, step=0)

    return loop


@pytest.mark.parametrize("change", disturbances(POINTS, 4), ids=str)
@pytest.mark.parametrize("shape", [(), ((1 << 16) + 9,)], ids=["small", "large"])
def test_a_buffer_that_is_resized_in_place_is_exact(threads, shape, change):
    check(threads, resized(shape), change)


def test_a_checkpoint_has_the_shape_of_the_values_that_it_holds(threads):
    def loop(job: Job):
        net = nn.Sequential(Resized(()), linear())
        opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05))

        def train(state):
            for state.step in range(state.step, 3):
                opt.zero_grad()
                net(data(state.step, rows=3)).mean().backward()
                held = entries.whole_shard(state, 1, at_rest=True)
                job.note(([row.shape for row in held.rows], [tuple(v.shape) for v in held.values], len(net[0].mean)))
                opt.step()

        return job.run(train, model=net, optimizer=opt, step=0)

    notes = fleet_of(threads, loop).workers["h0/0/1"].notes
    assert [rows for rows, _, _ in notes] == [values for _, values, _ in notes]
    assert [grown for _, _, grown in notes] == [2, 3, 4]


def pruned(job: Job):
    net = linear()
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))

    def train(state):
        for state.step in range(state.step, STEPS):
            if state.step == 2:
                prune.l1_unstructured(net, "weight", 2)
            opt.zero_grad()
            (net(data(state.step)) - 1).pow(2).mean().backward()
            job.at("reduced", state.step)
            opt.step()

    return job.run(train, model=net, optimizer=opt, step=0)


def test_a_newcomer_without_what_the_loop_has_added_is_refused_with_what_to_do(threads):
    with pytest.raises(UsageError, match=r"there also model\.weight_orig, model\.weight_mask") as caught:
        fleet_of(threads, pruned, Disturbance("kill", "reduced", 4, spares=1))
    assert "prune.identity(layer" in (caught.value.hint or "")
