"""A batch whose step is applied and that is computed again, by other ranks than before: it counts as it was applied."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import spotfleet.train as hvd
from spotfleet.train import runtime
from spotfleet.worker.member import RankInfo

TOTAL, BATCH = 29, 2


@pytest.fixture
def at(alone):
    def move(rank: int, size: int) -> None:
        runtime.current().place = RankInfo(rank=rank, size=size)

    return move


def make(kind: str):
    """What goes into the state, and a function that begins to iterate over this rank's batches."""
    if kind.startswith("stream"):
        stream = hvd.elastic.ElasticIterable(range(TOTAL), BATCH)
        workers = 2 if kind == "stream loader" else 0
        return stream, lambda: iter(DataLoader(stream.batches(), batch_size=None, num_workers=workers))
    sampler = hvd.elastic.ElasticSampler(TOTAL, batch_size=BATCH, shuffle=False)
    if kind == "sampler":
        return sampler, lambda: iter(sampler.batches())
    return sampler, lambda: iter(DataLoader(torch.arange(TOTAL), batch_size=BATCH, sampler=sampler))


def step(state) -> None:
    state.mark(version=state.version + 1)
    state.step_ended()


def one_rank(at, kind: str, before: tuple[int, int], after: tuple[int, int], steps: int,
             each: int = 1) -> tuple[list, list]:
    """The batches of one rank: those before a replay, the last step of them applied; those after it, that step's again.
    `each`: batches of a step."""
    at(*before)
    data, batches = make(kind)
    model = torch.nn.Linear(1, 1)
    state = hvd.elastic.TorchState(model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0)),
                                   data=data)
    state.attach(before[1], before[0])
    one, two = [], []
    for found, place, replay in ((one, before, 0), (two, after, 1)):
        at(*place)
        if replay:
            step(state)
            state.rewind(state._position)
        for number, batch in enumerate(batches()):
            found.append([int(i) for i in batch])
            if number % each == 0:
                state.round_begins(place[1], place[0])  # the first gradient
            data.record_batch()
            if not replay and number == steps * each - 1:
                break  # a peer is lost after the step
            if number % each == each - 1:
                step(state)
    assert data.processed_num == TOTAL
    return one, two


CASES = [(kind, old, new, steps) for kind in ("sampler", "stream") for steps in ("2", "last", "last but one")
         for old, new in ((3, 2), (2, 3), (3, 1), (1, 4))]


@pytest.mark.processes
@pytest.mark.parametrize("kind, old, new, steps", [*CASES, ("loader", 3, 2, "2"), ("stream loader", 3, 2, "2")])
def test_samples_of_a_replayed_batch_are_counted_once_at_any_world_size(at, kind, old, new, steps):
    whole = -(-TOTAL // (old * BATCH))
    steps = {"2": 2, "last": whole, "last but one": whole - 1}[steps]
    applied = [i for rank in range(old) for batch in one_rank(at, kind, (rank, old), (0, new), steps)[0] for i in batch]
    ranks = [one_rank(at, kind, (0, old), (rank, new), steps)[1] for rank in range(new)]
    later = [i for rank in ranks for batch in rank[1:] for i in batch]
    assert len({len(rank) for rank in ranks}) == 1  # all take equally many steps
    assert set(applied) | set(later) == set(range(TOTAL)) and set(applied).isdisjoint(later)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["sampler", "stream", "loader", "stream loader"])
@pytest.mark.parametrize("old, new", [(3, 2), (2, 3)])
def test_of_a_step_with_several_passes_all_batches_are_counted_as_they_were(at, kind, old, new):
    steps, each = 2, 2
    applied = [i for rank in range(old) for b in one_rank(at, kind, (rank, old), (0, new), steps, each)[0] for i in b]
    ranks = [one_rank(at, kind, (0, old), (rank, new), steps, each)[1] for rank in range(new)]
    later = [i for rank in ranks for batch in rank[each:] for i in batch]
    assert set(applied) | set(later) == set(range(TOTAL)) and set(applied).isdisjoint(later)


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_an_evaluation_in_mid_epoch_does_not_make_its_sampler_that_of_the_next_step(at, kind):
    at(0, 2)
    data, batches = make(kind)
    rest = hvd.elastic.ElasticSampler(5, batch_size=5)
    model = torch.nn.Linear(1, 1)
    state = hvd.elastic.TorchState(model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0)),
                                   data=data, rest=rest)
    state.attach(2, 0)
    training, found = batches(), []
    for step in range(3):
        next(training)
        found.append(runtime.current().sampler_of(state))
        data.record_batch()
        if step == 0:
            list(rest.batches())
    assert found == (["data"] * 3 if kind == "sampler" else ["data", "rest", "data"])  # a stream is read in loaders
