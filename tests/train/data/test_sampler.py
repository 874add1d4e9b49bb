"""Each sample exactly once, whatever the world sizes on the way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from spotfleet.errors import UsageError
from spotfleet.train import runtime
from spotfleet.train.data.sampler import ElasticSampler, slice_for
from spotfleet.worker.member import RankInfo

sizes = st.integers(1, 7)


@settings(max_examples=200, deadline=None)
@given(total=st.integers(1, 200), batch=st.integers(1, 9), worlds=st.lists(sizes, min_size=1, max_size=20))
def test_any_sequence_of_resizes_sees_each_sample_exactly_once(total, batch, worlds):
    seen, position, step = [], 0, 0
    while position < total:
        world = worlds[step % len(worlds)]
        parts = [slice_for(position, total, world, rank, world * batch) for rank in range(world)]
        seen += [i for start, end in parts for i in range(start, end)]
        position, step = min(total, position + world * batch), step + 1
    assert seen == list(range(total))


@settings(max_examples=200, deadline=None)
@given(left=st.integers(1, 100), batch=st.integers(1, 9), world=sizes)
def test_a_short_tail_is_split_as_evenly_as_can_be(left, batch, world):
    parts = [end - start for start, end in (slice_for(0, left, world, rank, world * batch) for rank in range(world))]
    assert max(parts) - min(parts) <= 1 and max(parts) <= batch and sum(parts) == min(left, world * batch)


@pytest.fixture
def at(alone):
    def move(rank: int, size: int) -> None:
        runtime.current().place = RankInfo(rank=rank, size=size)

    return move


@pytest.mark.parametrize("total", [1, 2, 5, 12, 13, 17])
def test_all_ranks_take_equally_many_steps_also_through_a_data_loader(at, total):
    data, steps, seen = TensorDataset(torch.arange(total)), [], []
    for rank in range(3):
        at(rank, 3)
        sampler = ElasticSampler(data, batch_size=4)
        batches = [b.tolist() for (b,) in DataLoader(data, batch_size=4, sampler=sampler)]
        assert batches == [list(b) for b in sampler.batches()]
        assert (len(sampler), len(sampler.batches())) == (sum(map(len, batches)), len(batches))
        steps.append(len(batches))
        for number, b in enumerate(batches):
            sampler.processed_num = number * 12
            seen += b if sampler.weight()[0] else []
    assert len(set(steps)) == 1 and sorted(seen) == list(range(total))


def test_the_length_is_that_of_a_whole_epoch_wherever_it_stands(at):
    data, found = TensorDataset(torch.arange(26)), []
    at(1, 3)
    sampler = ElasticSampler(data, batch_size=4)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for _ in loader:
        found.append((len(sampler), len(loader), len(sampler.batches())))
        sampler.record_batch()
    assert found == [(9, 3, 3)] * 3 and len(loader) == 3
    sampler.load_state_dict({**sampler.state_dict(), "processed_num": 12})
    assert len(loader) == 3 and len(list(loader)) == 2


def test_weights_are_the_real_samples_of_the_batch_at_the_position(at):
    sampler, found = ElasticSampler(14, batch_size=4, shuffle=False), []
    for position in (0, 12):
        for rank in range(3):
            at(rank, 3)
            sampler.processed_num = position
            found.append(sampler.weight())
    assert found == [(4.0, 12.0)] * 3 + [(1.0, 2.0), (1.0, 2.0), (0.0, 2.0)]


def test_recording_moves_by_the_exact_size_of_the_global_batch(at):
    at(1, 3)
    sampler, moves = ElasticSampler(14, batch_size=4), []
    for _ in range(2):
        sampler.record_batch(0, 4)
        moves.append(sampler.processed_num)
    assert moves == [12, 14]


def test_an_epoch_goes_on_where_it_was_and_a_new_one_starts_anew(at):
    at(0, 1)
    sampler = ElasticSampler(10, batch_size=2)
    first = list(sampler)
    sampler.record_batch(0, 2)
    saved = sampler.state_dict()
    sampler.set_epoch(0)
    assert list(sampler) == first[2:]
    sampler.set_epoch(1)
    assert sorted(sampler) == list(range(10)) and list(sampler) != first
    sampler.load_state_dict(saved)
    assert list(sampler) == first[2:]


def test_a_consumed_epoch_yields_nothing_and_says_so(at):
    at(0, 1)
    sampler = ElasticSampler(2, batch_size=2)
    sampler.record_batch(0, 2)
    with pytest.warns(UserWarning, match="set_epoch"):
        assert list(sampler) == []


def test_without_a_batch_size_any_loader_may_choose_one_as_in_horovod(at):
    seen = []
    for rank in range(2):
        at(rank, 2)
        sampler = ElasticSampler(range(8))
        seen.append(list(DataLoader(range(8), batch_size=2, sampler=sampler)))
        sampler.record_batch(0, 2)
        assert sampler.processed_num == 4
    first = sorted(torch.cat([s[0] for s in seen]).tolist())
    assert sorted(sampler.order()[:4]) == first


@pytest.mark.parametrize("bad", [{"dataset": 0}, {"dataset": 5, "batch_size": 0}])
def test_an_impossible_sampler_is_refused(bad):
    with pytest.raises(UsageError):
        ElasticSampler(**bad)
