"""An ElasticIterable yields each sample of a stream once per epoch, also through loader processes and resizes."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from spotfleet.errors import UsageError
from spotfleet.train import runtime
from spotfleet.train.data.stream import BEGUN
from spotfleet.train.elastic import ElasticIterable
from spotfleet.worker.member import RankInfo


class Lines:
    """A stream of numbers that can begin anywhere; it counts what is read of it in this process."""

    def __init__(self, total: int) -> None:
        self.total, self.read, self.epoch = total, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def iter_from(self, n: int):
        for i in range(n, self.total):
            self.read += 1
            yield 1000 * self.epoch + i

    def __iter__(self):
        return self.iter_from(0)


@pytest.fixture
def at(alone):
    def move(rank: int, size: int) -> None:
        runtime.current().place = RankInfo(rank=rank, size=size)

    return move


def moved(rank: int, size: int) -> None:
    runtime.current().place = RankInfo(rank=rank, size=size)


Given = tuple[list[int], tuple[float, float]]  # a batch with its weight


def step_of_all(streams: list[ElasticIterable], size: int, loaders: dict) -> list[Given]:
    """The next batch of each rank with its weight; [] at the end, which all must reach at once."""
    found = []
    for rank in range(size):
        moved(rank, size)
        batch = next(loaders[rank], None)
        if batch is not None:
            found.append(([int(x) for x in batch], streams[rank].weight() if streams[rank].is_weighted else (0.0, 0.0)))
    assert len(found) in (0, size), "not all ranks take equally many steps"
    for rank in range(size):
        moved(rank, size)
        if found:
            streams[rank].record_batch()
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(total=st.integers(0, 60), batch=st.integers(1, 5), known=st.booleans(), workers=st.integers(0, 3),
       kept=st.none() | st.integers(1, 12), changes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)),
                                                             min_size=1, max_size=5))
def test_any_sequence_of_resizes_sees_each_sample_exactly_once(alone, total, batch, known, workers, kept, changes):
    """`workers` loader processes are played by reading each one's part in turn, as DataLoader does."""
    seen, state, weights = [], None, 0.0
    source = list(range(total)) if known else (lambda epoch: iter(range(total)))
    for size, steps in [*changes, (2, 1000)]:
        streams = []
        for rank in range(size):
            moved(rank, size)
            streams.append(ElasticIterable(source, batch, global_batch=kept))
            if state is not None:
                streams[rank].load_state_dict(state)
        loaders = {}
        for rank in range(size):
            moved(rank, size)
            loaders[rank] = in_turn(streams[rank], max(1, workers))
        for _ in range(steps):
            found = step_of_all(streams, size, loaders)
            if not found:
                break
            assert {w[1] for _, w in found} == {sum(w[0] for _, w in found)}
            for samples, (own, _) in found:
                assert len(samples) == max(1, own)
                seen += samples if own else []
                weights += own
        assert len({s.processed_num for s in streams}) == 1
        state = streams[0].state_dict()
    assert seen == list(range(total)) and weights == total


def in_turn(stream: ElasticIterable, workers: int):
    """Batches in the order in which a loader with so many processes hands them out."""
    turn = stream._current_position()
    stream._shared[BEGUN] += 1  # an iteration has begun
    parts = [stream._read(turn, w, workers) for w in range(workers)]
    while parts:
        for part in parts:
            batch = next(part, None)
            if batch is None:
                return
            yield batch


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_loader_processes_hand_out_the_batches_of_one_process_also_in_later_epochs(at, workers, persistent):
    at(1, 3)
    stream, alone = ElasticIterable(Lines(103), 4), ElasticIterable(Lines(103), 4)
    loader = DataLoader(stream, batch_size=4, num_workers=workers, persistent_workers=persistent)
    for epoch in range(3):
        stream.set_epoch(epoch)
        alone.set_epoch(epoch)
        expected = list(DataLoader(alone.batches(), batch_size=None))
        found = []
        for batch in loader:
            found.append((batch.tolist(), stream.weight() if stream.is_weighted else None))
            stream.record_batch()
            if epoch == 1 and len(found) == 3:
                break  # what is prefetched is dropped, and comes again below
        if epoch == 1:
            for batch in loader:
                found.append((batch.tolist(), stream.weight()))
                stream.record_batch()
        assert [b for b, _ in found] == [b.tolist() for b in expected]
        assert [w for _, w in found] == [(4.0, 12.0)] * 8 + [(2.0, 7.0)]
        assert stream.processed_num == 103


def test_a_resumed_epoch_does_not_read_what_is_consumed(at):
    at(0, 2)
    lines = Lines(1000)
    stream = ElasticIterable(lines, 5)
    stream.load_state_dict({"epoch": 0, "processed_num": 980})
    assert [b.tolist() for b in DataLoader(stream.batches(), batch_size=None)] == [
        [980, 981, 982, 983, 984], [990, 991, 992, 993, 994]]
    assert lines.read == 20


def test_a_transform_runs_for_own_samples_alone_and_draws_the_same_numbers_on_whichever_worker(at):
    def noisy(sample: int) -> float:
        ran.append(sample)
        return sample + float(torch.rand(()))

    found = []
    for size in (1, 2):
        for rank in range(size):
            at(rank, size)
            ran: list[int] = []
            stream = ElasticIterable(range(8), 8 // size, transform=noisy, seed=3)
            found += [x for batch in DataLoader(stream.batches(list), batch_size=None) for x in batch]
            assert len(ran) == 8 // size
    assert found[:8] == found[8:] and len({round(x % 1, 6) for x in found}) == 8


def test_the_numbers_of_the_process_itself_go_on_as_if_no_sample_had_been_drawn(at):
    at(0, 1)
    torch.manual_seed(5)
    before = torch.rand(3)
    torch.manual_seed(5)
    list(ElasticIterable(range(4), 2, transform=lambda x: torch.rand(())))
    assert torch.equal(torch.rand(3), before)


def test_where_the_global_batch_is_kept_samples_one_by_one_are_refused(at):
    at(0, 2)
    with pytest.raises(UsageError, match="share"):
        iter(ElasticIterable(range(8), 4, global_batch=8))


@pytest.mark.parametrize("source", [5, iter([1, 2])])
def test_a_source_that_cannot_be_read_again_is_refused(source):
    with pytest.raises(UsageError):
        ElasticIterable(source, 4)


def test_a_persistent_process_that_begins_late_begins_where_the_first_one_did(at):
    at(0, 2)
    stream = ElasticIterable(range(40), 2)
    stream.set_epoch(3)
    stream._iterations = 2
    first = stream._noted_position(loader=7, worker=0)
    stream.record_batch()
    assert stream._noted_position(loader=7, worker=1) == first and first.position == 0 and first.epoch == 3


def test_a_process_that_is_started_anew_is_told_the_position_and_rank_with_its_copy(at):
    at(1, 3)
    stream = ElasticIterable(Lines(20), 2)
    stream.record_batch()
    copied = pickle.loads(pickle.dumps(stream))
    at(0, 1)  # what a process that was not forked takes itself for
    assert list(copied.batches(list)) == [[8, 9], [14, 15], [19]]


def test_persistent_processes_that_wait_for_the_first_one_give_up_in_time(at, monkeypatch):
    at(0, 1)
    monkeypatch.setattr("spotfleet.train.data.stream.NOTE_LIMIT_S", 0.05)
    stream = ElasticIterable(range(4), 2)
    stream._iterations = 2
    with pytest.raises(RuntimeError, match="has not begun"):
        stream._noted_position(loader=7, worker=1)
