"""A sample is augmented alike, whichever loader process of whichever world size draws it, and anew in each epoch."""

from __future__ import annotations

import pickle
import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from spotfleet.errors import UsageError
from spotfleet.train import runtime
from spotfleet.train.data.seeded import EpochIndex
from spotfleet.train.elastic import ElasticSampler, seeded
from spotfleet.worker.member import RankInfo


class Noisy(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int):
        assert type(i) is int
        return torch.tensor([i, torch.rand(()).item(), random.random(), numpy.random.rand()], dtype=torch.float64)


def draw(size: int, workers: int, epochs: int = 2) -> list[dict[int, tuple[float, ...]]]:
    """By epoch: each sample's numbers, drawn by all ranks of a world."""
    found: list[dict[int, tuple[float, ...]]] = [{} for _ in range(epochs)]
    for rank in range(size):
        runtime.current().place = RankInfo(rank=rank, size=size)
        data = seeded(Noisy(), seed=4)
        sampler = ElasticSampler(data, batch_size=2)
        loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for row in (row for batch in loader for row in batch.tolist()):
                found[epoch][int(row[0])] = tuple(row[1:])
    return found


def test_numbers_depend_on_epoch_and_sample_alone_also_in_persistent_loader_processes(alone):
    torch.manual_seed(1)
    one = draw(size=1, workers=0)
    torch.manual_seed(2)
    assert draw(size=3, workers=1) == one == draw(size=1, workers=2)
    numbers = [n for epoch in one for sample in epoch.values() for n in sample]
    assert len(one[0]) == 12 and len(set(numbers)) == len(numbers)


def test_another_seed_draws_other_numbers(alone):
    assert not torch.equal(seeded(Noisy(), 1).sample(3, 0), seeded(Noisy(), 2).sample(3, 0))


def test_what_the_process_itself_draws_next_does_not_change(alone):
    def following() -> tuple:
        return torch.rand(()).item(), random.random(), numpy.random.rand()

    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    before = following()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    seeded(Noisy()).sample(3, 0)
    assert following() == before


def test_an_index_without_an_epoch_is_refused(alone):
    with pytest.raises(UsageError, match="no epoch"):
        seeded(Noisy())[3]


def test_an_index_keeps_its_epoch_on_its_way_to_a_loader_process():
    found = pickle.loads(pickle.dumps(EpochIndex(3, 7)))
    assert (found, found.epoch) == (3, 7)


def test_what_cannot_be_indexed_is_refused():
    with pytest.raises(UsageError, match="no __getitem__"):
        seeded(iter([1]))
