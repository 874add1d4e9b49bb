"""Ranks that should hold equal states: a difference in any bit is found at a change of membership, and named."""

from __future__ import annotations

import math
import random
import time
from enum import Enum

import numpy as np
import pytest
import torch
from torch import nn

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.train.gradients.optimizer_tag import OptimizerList
from spotfleet.train.state import digest, divergence
from spotfleet.train.state.sync import synchronize
from spotfleet.worker.errors import StateDiverged, StateLost
from tests.support.train.thread_fleet import Lost, ThreadFleet, Worker

# ---- digests of tensors

SIZES = [1, 7, 4096, 4097, 1 << 20]


def noise(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", [0.0, 0.5, 0.999])
def test_one_changed_bit_anywhere_changes_the_digest(size, place):
    tensor = noise(size)
    before, at = digest.of_tensors([tensor]), int(place * size)
    tensor.view(torch.int32)[at] ^= 1
    assert digest.of_tensors([tensor]) != before
    tensor.view(torch.int32)[at] ^= 1
    assert digest.of_tensors([tensor]) == before


def test_values_at_other_places_are_another_state():
    a, b, large = noise(3000), noise(3000) + 1, noise(1 << 20)
    assert digest.of_tensors([a, b]) != digest.of_tensors([b, a])
    assert digest.of_tensors([a.flip(0)]) != digest.of_tensors([a])  # small: each word has its place
    moved = torch.cat([large[1 << 19:], large[:1 << 19]])
    assert digest.of_tensors([moved]) != digest.of_tensors([large])
    assert digest.of_tensor(large.view(1024, 1024).t()) != digest.of_tensor(large.view(1024, 1024))


def test_what_is_added_here_and_taken_away_there_is_seen():
    tensor = torch.zeros(1 << 18, dtype=torch.int64)
    before = digest.of_tensors([tensor])
    tensor[5] += 1
    tensor[1 << 17] -= 1
    assert digest.of_tensors([tensor]) != before


def negated_column(t: torch.Tensor) -> None:
    t.view(32, 32)[:, 7].neg_()


def exchanged(t: torch.Tensor) -> None:
    t.view(torch.int64)[4:8] = t.view(torch.int64)[4:8].flip(0)


def upper_signs(t: torch.Tensor) -> None:  # the highest bit of each 64-bit word
    t[1::2].neg_()


@pytest.mark.parametrize("change", [torch.Tensor.neg_, negated_column, exchanged, upper_signs])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_changes_that_cancel_each_other_in_a_sum_are_seen(change, dtype):
    tensor = noise(8192).to(dtype)
    before = digest.of_tensors([tensor])
    change(tensor[:1024])
    assert digest.of_tensors([tensor]) != before


def test_last_bits_that_differ_at_several_places_are_seen():
    draw = random.Random(1)
    tensor = noise(8192)
    before = digest.of_tensors([tensor])
    for _ in range(300):
        other = tensor.clone()
        for at in draw.sample(range(8192), draw.choice([2, 4, 8])):
            other.view(torch.int32)[at] += draw.choice([-1, 1])
        assert digest.of_tensors([other]) != before


def test_devices_without_integer_products_have_the_same_digest(monkeypatch):
    tensor = noise(3 * digest.CHUNK * 1024)
    expected = digest.of_tensors([tensor])
    monkeypatch.setattr(digest, "_products", digest._products_in_pieces)
    assert digest.of_tensors([tensor]) == expected


TYPES = [torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int8, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (130, 70)])
def test_every_type_and_shape_has_a_digest_that_a_copy_shares(dtype, shape):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    assert digest.of_tensor(tensor) == digest.of_tensor(tensor.clone())
    if tensor.numel():
        assert digest.of_tensor(tensor) != digest.of_tensor(torch.zeros_like(tensor))


def test_the_layout_in_memory_does_not_count_for_a_tensor_of_its_own():
    images = torch.randn(8, 16, 12, 12)
    assert digest.of_tensor(images) == digest.of_tensor(images.to(memory_format=torch.channels_last))
    assert digest.of_tensor(images[:, ::2]) == digest.of_tensor(images[:, ::2].clone())
    odd = torch.randn(20_001)[1:]  # not aligned to 8 bytes
    assert digest.of_tensors([odd]) == digest.of_tensors([odd.clone()])


# ---- digests of values

class Colour(Enum):
    RED = 1


class Thing:
    def __init__(self, size: int) -> None:
        self.size = size


VALUES = [None, True, 1, 2, 1.0, 1.5, "1", b"1", 1j, (1, 2), [2, 1], {1, 2}, {"a": 1}, {"a": 2}, {"b": 1}, Colour.RED,
          torch.ones(3), torch.zeros(3), np.ones(3), np.zeros(3), Thing(1), Thing(2), random.Random(0).getstate()]


def test_different_values_have_different_digests():
    assert len({digest.of_value(v) for v in VALUES}) == len(VALUES)


def test_order_of_sets_and_dicts_identity_and_numpy_numbers_do_not_count():
    part = [1]
    assert digest.of_value([part, part]) == digest.of_value([[1], [1]])
    assert digest.of_value({"a": 1, "b": 2}) == digest.of_value({"b": 2, "a": 1})
    assert digest.of_value({"x", "yy", "zzz"}) == digest.of_value({"zzz", "yy", "x"})
    assert digest.of_value(np.int64(3)) == digest.of_value(3)
    assert digest.of_value(Thing(1)) == digest.of_value(Thing(1))
    assert digest.of_value(math.nan) == digest.of_value(math.nan)
    loop: list = []
    loop.append(loop)
    assert digest.of_value(loop) == digest.of_value(loop)


def test_without_floats_only_the_rest_of_a_value_counts():
    def loose(value: object) -> int:
        return digest.of_value(value, floats=False)

    assert loose({"loss": [0.1, 2]}) == loose({"loss": [0.7, 2]}) != loose({"loss": [0.1, 3]})
    assert loose(torch.ones(3)) == loose(torch.zeros(3)) != loose(torch.zeros(4))
    assert loose(torch.ones(3, dtype=torch.int64)) != loose(torch.zeros(3, dtype=torch.int64))


# ---- what a rank compares

class Scheduler:
    def state_dict(self) -> dict:
        return {"best": 0.5}

    def load_state_dict(self, held: dict) -> None:
        pass


def state_of(runtime, **values) -> hvd.elastic.TorchState:
    """A state after one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    state = hvd.elastic.TorchState(model, optimizer, **{"step": 0, "loss": 0.5, "plan": Scheduler(), **values})
    runtime.state = state
    state.attach(2, 0)
    model(torch.ones(5, 3)).square().mean().backward()
    optimizer.step()
    state.mark(held=True)
    return state


CHANGES = {
    "model.0.weight": lambda s: s.model[0].weight.data[0].add_(1e-7),
    "model.2.bias": lambda s: s.model[2].bias.data.neg_(),
    "optimizer.exp_avg of model.0.weight": lambda s: s.optimizer.state[s.model[0].weight]["exp_avg"].add_(1),
    "optimizer.step of model.2.bias": lambda s: s.optimizer.state[s.model[2].bias]["step"].add_(1),
    "step": lambda s: s._position.scalars.update(step=1),
    "plan.best": lambda s: s._position.stateful["plan"].update(best=0.4),
    "optimizer.param_groups[0].lr": lambda s: s._position.hyper["optimizer"][0].update(lr=0.5),
}


def compare(alone, ranks, *changes, **values) -> list:
    """Synchronise ranks that have changed their states so; what each raises, or None."""
    states = []
    for change in changes:
        alone.optimizers = OptimizerList()
        states.append(state_of(alone, **values))
        change(states[-1])
    found = ranks(len(states)).each(lambda group: synchronize(group, states[group.rank]))
    assert len({str(f) for f in found}) == 1  # on every rank alike
    return [found[0], *states]


def nothing(state) -> None:
    pass


@pytest.mark.parametrize("name", CHANGES)
def test_survivors_that_differ_are_noticed_and_the_first_difference_is_named(alone, ranks, name):
    error, *states = compare(alone, ranks, nothing, CHANGES[name], nothing)
    assert isinstance(error, StateDiverged)
    assert f"at version 1, ranks that should hold equal training states differ: state.{name} is" in str(error)
    assert "on ranks 0, 2, " in str(error) and "on rank 1" in str(error)
    assert [s.reported_version for s in states] == [-1] * 3  # nobody offers it any more


def test_a_difference_is_found_by_digests_that_were_begun_while_the_rank_waited(alone, ranks):
    def begun(state) -> None:
        divergence.begin(state)

    def differs(state) -> None:
        CHANGES["model.2.bias"](state)
        divergence.begin(state)

    assert isinstance(compare(alone, ranks, begun, differs)[0], StateDiverged)
    assert not isinstance(compare(alone, ranks, begun, begun)[0], Exception)


def test_digests_begun_before_a_restore_do_not_count_after_it(alone, ranks):
    def restored(state) -> None:
        divergence.begin(state)
        state._digest_task.take()
        state.mark(version=2, position=state.capture(2, 0))

    def restored_otherwise(state) -> None:
        restored(state)
        CHANGES["model.2.bias"](state)

    assert isinstance(compare(alone, ranks, restored, restored_otherwise)[0], StateDiverged)


def test_statistics_of_each_rank_and_plain_floats_may_differ_and_the_latter_is_said(alone, ranks, capfd, monkeypatch):
    def slow(tensor) -> int:
        raise AssertionError("a digest of each tensor, where none differs")

    monkeypatch.setattr(digest, "of_tensor", slow)

    def differs(state) -> None:
        state.model[1].running_mean.add_(1)
        state._position.scalars.update(loss=0.7)

    error, *_ = compare(alone, ranks, nothing, differs)
    assert not isinstance(error, Exception)
    assert capfd.readouterr().err.startswith("spotfleet: state.loss is 0.5 on rank 0, 0.7 on rank 1; after a change")


@pytest.mark.parametrize(("declared", "name"), [("step", "step"), ("model.2", "model.2.bias"), ("plan", "plan.best"),
                                                ("optimizer", "optimizer.exp_avg of model.0.weight")])
def test_what_is_declared_to_differ_by_rank_is_not_compared(alone, ranks, declared, name):
    assert not isinstance(compare(alone, ranks, nothing, CHANGES[name], per_rank=(declared,))[0], Exception)
    with pytest.raises(UsageError, match="per_rank names 'setp', which is not in the state"):
        hvd.elastic.TorchState(step=0, per_rank=("step", "setp"))


def test_ranks_that_came_less_far_are_not_compared_with_those_ahead(alone, ranks):
    def behind(state) -> None:
        CHANGES["model.0.weight"](state)
        state.mark(version=0)

    error, ahead, behind_then = compare(alone, ranks, nothing, behind)
    assert not isinstance(error, Exception) and torch.equal(ahead.model[0].weight, behind_then.model[0].weight)


def test_memory_in_another_order_with_equal_values_is_no_difference(alone, ranks):
    def turned(state) -> None:
        weight = state.model[0].weight
        weight.data = weight.data.t().contiguous().t()

    assert not isinstance(compare(alone, ranks, nothing, turned)[0], Exception)


# ---- a job

def drifting(where: str):
    """A script whose rank 1 adds to a weight, or to a value, in step 3, unseen by anybody."""
    def script(worker: Worker):
        hvd.init()
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @hvd.elastic.run
        def train(state):
            while state.step < 12:
                if state.step == 3 and hvd.rank() == 1 and where == "weight":
                    model.weight.data += 1e-3
                if state.step == 6 and worker.name == "h2/0/1":
                    raise Lost
                optimizer.zero_grad()
                model(torch.ones(2, 3) * state.step).sum().backward()
                optimizer.step()
                if state.step == 4 and hvd.rank() == 1 and where == "value":
                    state.phase = "late"
                state.step += 1
            return state.step

        return train(hvd.elastic.TorchState(model, optimizer, step=0, phase="early"))

    return script


@pytest.mark.parametrize(("where", "name"), [("weight", "state.model.weight is of norm"), ("value", "state.phase is ")])
def test_a_job_whose_ranks_have_drifted_apart_does_not_train_on_after_a_loss(threads, where, name):
    fleet: ThreadFleet = threads(drifting(where), founders=3, spares=1)
    fleet.wait(lambda: not any(w.alive for w in fleet.workers.values()), "the end")
    left = [w for w in fleet.workers.values() if w.name != "h2/0/1"]
    assert all(isinstance(w.error, StateLost) for w in left), fleet.story()  # one may learn only that its peers ended
    told = [w.control.report.diverged for w in left if isinstance(w.error, StateDiverged)]
    assert told and all(name in text for text in told)
    assert all(w.control.report.version == -1 for w in left)


def test_digests_keep_pace_with_the_memory():
    """A bound that a slip (a pass over each word in Python, a copy of all) breaks by far; figures: bench/digests.py."""
    tensors = [torch.zeros(1 << 22) for _ in range(4)]
    digest.of_tensors(tensors)
    quickest = min(_timed(lambda: digest.of_tensors(tensors)) for _ in range(5))
    assert quickest < 20 * min(_timed(lambda: [t.sum() for t in tensors]) for _ in range(5)) + 0.1


def _timed(work) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
