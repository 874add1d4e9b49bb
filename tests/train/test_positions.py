"""Ranks whose positions drift apart are found at the next reduction."""

from __future__ import annotations

import random

import pytest
import torch

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.train.gradients import positions
from spotfleet.train.gradients.positions import FIELDS, MOST_RANKS, differ, hashes
from spotfleet.train.gradients.reducer import Reducer
from tests.support.train.thread_fleet import Worker


def summed(rows: list[dict[str, int]]) -> list[float]:
    """The tail of ranks with these scalars, added in float32 in an order of chance."""
    random.shuffle(rows)
    total = torch.zeros(positions.WIDTH)
    for row in rows:
        own = torch.zeros(positions.WIDTH)
        positions.write(own, row)
        total += own
    return total.tolist()


@pytest.mark.parametrize("size", [2, 3, 7, MOST_RANKS])
def test_one_rank_elsewhere_is_found_among_any_number_and_none_is_where_all_agree(size):
    most = max(({"step": n} for n in range(500)), key=lambda row: sum(hashes(row)))  # the largest sums
    assert not differ(summed([most] * size), size)
    assert differ(summed([most] * (size - 1) + [{"step": 500}]), size)


def test_hashes_depend_on_names_and_values_and_fit_into_seven_bits():
    found = [hashes(row) for row in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": 1, "b": 1}, {}, {"a": -1 << 70})]
    assert len({tuple(row) for row in found}) == len(found)
    assert all(len(row) == FIELDS and 0 <= min(row) <= max(row) < 128 for row in found)


def reducing(scalars):
    def work(group):
        model = torch.nn.Linear(2, 1)
        made = Reducer(list(model.parameters()), 1, True, lambda: group, lambda r: None, lambda r, change, save: None,
                       lambda: None)
        made.scalars = lambda: scalars(group.rank)
        model(torch.ones(1, 2)).sum().backward()
        return model.weight.grad.tolist()

    return work


def test_every_rank_fails_at_the_reduction_and_names_who_is_where(ranks):
    found = ranks(3).each(reducing(lambda rank: {"epoch": 1 + (rank == 2), "batch": 7}))
    assert all(isinstance(error, UsageError) for error in found)
    assert {str(error) for error in found} == {
        "the ranks train at different positions: state.epoch is 1 on rank 0, 1; 2 on rank 2"}
    assert "ElasticSampler" in found[0].hint and "per_rank=('epoch',)" in found[0].hint


def test_ranks_at_one_position_reduce_as_before(ranks):
    assert ranks(3).each(reducing(lambda rank: {"epoch": 1, "batch": 7})) == [[[1.0, 1.0]]] * 3


def test_a_value_that_only_one_rank_has_is_named(ranks):
    found = ranks(2).each(reducing(lambda rank: {"epoch": 1} if rank else {}))
    assert "state.epoch is None on rank 0; 1 on rank 1" in str(found[0])


def drifting(per_rank: tuple[str, ...], values: dict[str, object], grow):
    """A script in which `grow(state, rank)` changes the state after each of four steps."""

    def script(worker: Worker):
        hvd.init()
        model = torch.nn.Linear(1, 1)
        opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def train(state):
            while state.step < 4:
                worker.notes.append(state.step)
                opt.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                opt.step()
                grow(state, hvd.rank())
                state.step += 1
            return True

        return hvd.elastic.run(train)(hvd.elastic.TorchState(model, opt, step=0, per_rank=per_rank, **values))

    return script


def count(state, rank):
    state.seen += 3 + rank


def test_a_whole_number_that_drifts_ends_the_job_at_the_next_step(threads):
    fleet = threads(drifting((), {"seen": 0}, count))
    with pytest.raises(UsageError, match="state.seen is 3 on rank 0; 4 on rank 1".replace(".", r"\.")):
        fleet.finish()
    assert [w.notes for w in fleet.workers.values()] == [[0, 1]] * 2


def test_what_is_declared_to_differ_may(threads):
    assert len(threads(drifting(("seen",), {"seen": 0}, count)).finish()) == 2


def test_losses_flags_and_other_values_may_differ(threads):
    def grow(state, rank):
        state.loss, state.best, state.log = 0.5 * rank, rank == 0, [rank]

    assert len(threads(drifting((), {"loss": 0.0, "best": False, "log": []}, grow)).finish()) == 2


def test_only_values_of_the_state_can_be_declared():
    with pytest.raises(UsageError, match="per_rank names 'sen'"):
        hvd.elastic.ObjectState(seen=0, per_rank=("sen",))
