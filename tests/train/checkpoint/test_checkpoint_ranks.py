"""Ranks that write one checkpoint together: each its share, all of one version, and what becomes of it without one."""

from __future__ import annotations

import errno
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

import spotfleet.train as hvd
from spotfleet.protocol.checkpoint_files import MANIFEST
from spotfleet.protocol.messages import Checkpoint, WorkerOrders
from spotfleet.protocol.proofs import MemberProof
from spotfleet.storage.checkpoint_folder import files_of
from spotfleet.train import runtime
from spotfleet.train.checkpoint import entries, exchange, store_folder, writer
from spotfleet.train.checkpoint.exchange import PartReport
from spotfleet.train.checkpoint.shards import MOST_BYTES, TensorRow, plan
from spotfleet.train.checkpoint.writer import Checkpointer
from spotfleet.train.state.copies import Buffer
from spotfleet.worker.member import RankInfo
from tests.support.train.train_parts import Kept, restored
from tests.train.state.test_state import train


@dataclass
class Control:
    orders: WorkerOrders
    made: list[Checkpoint] = field(default_factory=list)

    def update(self, checkpoint: Checkpoint) -> None:
        self.made.append(checkpoint)


@dataclass
class Worker:
    """A rank's runtime, as far as a Checkpointer knows it, with a state of its own."""

    group: object
    work: str
    control: Control
    state: object
    place: RankInfo
    generation: int = 1
    saver: Checkpointer = None
    proof: MemberProof = field(default_factory=lambda: MemberProof("job", "the job's key", "a grant"))

    def boundary(self) -> None:
        self.saver.at_boundary(self.state)

    def written(self) -> list[Checkpoint]:
        if self.saver._writer is not None:
            self.saver._writer.join(30)
        return self.control.made


def trained(alone, steps: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 200), nn.BatchNorm1d(200), nn.Linear(200, 300))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    state = alone.state = hvd.elastic.TorchState(model, optimizer, epoch=0)
    state.attach(1, 0)
    train(model, optimizer, steps)
    return state


@pytest.fixture
def team(alone, ranks, tmp_path, monkeypatch):
    """Three ranks that hold the same, in a generation of their own."""
    monkeypatch.setattr(exchange, "GRACE_S", 0.2)
    groups = ranks(3).groups
    made = []
    for group in groups:
        worker = Worker(group, str(tmp_path / f"w{group.rank}"), Control(WorkerOrders(checkpoint_every_s=3600.0)),
                        trained(alone, 2), RankInfo(group.rank, 3))
        worker.saver = Checkpointer(worker)
        made.append(worker)
    yield made
    for worker in made:
        worker.written()


def agree(team) -> None:
    """What the next reduction does."""
    save = any(w.group.save_waits for w in team)
    for worker in team:
        worker.group.save_agreed |= save


def due(team) -> None:
    team[0].saver._due_from -= 3600.0
    for worker in team:
        worker.boundary()
    agree(team)


def test_one_that_is_due_is_written_by_all_ranks_at_the_boundary_after_the_next_reduction(team, tmp_path):
    due(team)
    assert [w.written() for w in team] == [[], [], []]
    for worker in team:
        worker.boundary()
    kept = Kept(tmp_path / "kept")
    for worker in team:
        (made,) = worker.written()
        kept.take(made)
    assert [(w.control.made[0].part, w.control.made[0].parts) for w in team] == [(2, 3), (0, 3), (1, 3)]
    assert all(w.proof.has_marked(w.control.made[0]) and w.control.made[0].grant == "a grant" for w in team)
    held = restored(kept.newest)
    assert held.version == 2
    assert all(torch.equal(a, b) for a, b in zip(held.tensors, entries.sources(team[0].state), strict=True))
    sizes = [sum(file.bytes for file in files_of(w.control.made[0]) if file.name != MANIFEST) for w in team]
    assert max(sizes) < kept.newest.bytes / 3 + 30_000  # rank 0's position, values and metadata
    assert [(w.group.save_waits, w.group.save_agreed) for w in team] == [(False, False)] * 3


def test_the_next_one_of_a_generation_is_joined_from_what_ranks_say_of_that_one(team, tmp_path, alone):
    kept = Kept(tmp_path / "kept")
    for _ in range(2):
        due(team)
        for worker in team:
            worker.boundary()
        for worker in team:
            kept.take(worker.written()[-1])
            alone.state = worker.state
            train(worker.state.model, worker.state.optimizer, 1)
    assert [c.version for c in kept.whole] == [2, 3]
    assert restored(kept.newest).version == 3


def test_what_is_trained_while_it_is_written_is_not_in_it(team, tmp_path, alone, monkeypatch):
    go_on, write = threading.Event(), store_folder.write_here
    monkeypatch.setattr(store_folder, "write_here", lambda *args: go_on.wait(30) and write(*args))
    expected = [t.clone() for t in entries.sources(team[0].state)]
    due(team)
    for worker in team:
        worker.boundary()
    for worker in team:
        alone.state = worker.state
        train(worker.state.model, worker.state.optimizer, 1)
    go_on.set()
    kept = Kept(tmp_path / "kept")
    for worker in team:
        kept.take(worker.written()[0])
    assert all(torch.equal(a, b) for a, b in zip(restored(kept.newest).tensors, expected, strict=True))


def test_one_whose_rank_is_lost_is_given_up_and_due_again_at_once(team, capsys):
    due(team)
    for worker in team[:2]:
        worker.boundary()
    team[0].group.abort()  # rank 2 died before it wrote
    assert team[0].written() == []
    assert re.fullmatch("spotfleet: checkpoint of version 2 is given up: rank 2 did not report its part before it was "
                        "lost; the next one follows\n", capsys.readouterr().out)
    assert team[0].saver._due()
    assert not [path for path in Path(team[0].work).rglob("*") if path.is_file()]


def test_a_part_that_cannot_be_written_is_told_tried_again_and_at_last_rank_0_writes_all(team, tmp_path, monkeypatch):
    write = store_folder.write_here

    def full(shard, *args):
        if shard.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(shard, *args)

    monkeypatch.setattr(store_folder, "write_here", full)
    monkeypatch.setattr(writer, "RETRY_S", 0.0)
    said = []
    monkeypatch.setattr(Checkpointer, "_log", lambda self, line: said.append(line))
    due(team)
    for _ in range(2):
        for worker in team:
            worker.boundary()
        for worker in team:
            worker.written()
        team[0].boundary()
        agree(team)
    assert sum("rank 1: it cannot be written: No space left on device; the next one follows" in s for s in said) == 2
    (made,) = team[0].written()
    assert (made.part, made.parts) == (0, 1)
    assert restored(made).version == 2


def test_a_rank_that_still_writes_the_last_one_says_so_and_nobody_waits_for_it(team, monkeypatch, capsys):
    go_on, write = threading.Event(), store_folder.write_here
    monkeypatch.setattr(store_folder, "write_here", lambda shard, *args: (shard.rank != 1 or go_on.wait(30)) and
                        write(shard, *args))
    due(team)
    for worker in team:
        worker.boundary()
    team[0].group.aborted = True  # rank 0 hears nothing in time
    team[0].written()
    team[0].group.aborted = False
    team[0].boundary()
    agree(team)
    for worker in team:
        worker.boundary()
    begun = time.monotonic()
    assert team[0].written() == []
    assert time.monotonic() - begun < 20
    assert "rank 1: it still writes the last one" in capsys.readouterr().out
    go_on.set()


def test_ranks_that_hold_other_tensors_make_no_checkpoint(team, capsys, alone):
    team[1].state = trained(alone, 1)  # another version
    due(team)
    for worker in team:
        worker.boundary()
    assert team[0].written() == []
    assert "rank 1 holds other tensors than rank 0, or those of another version" in capsys.readouterr().out


def test_one_ordered_now_rides_on_the_reduction_under_way_and_says_whether_it_was_in_time(team, capsys):
    orders = WorkerOrders(checkpoint_every_s=3600.0, checkpoint_now=True, seconds_left=60.0)
    for worker in team:
        worker.control.orders = orders
        worker.saver.on_orders(orders)
    assert [w.group.save_waits for w in team] == [True, False, False]
    agree(team)
    for worker in team:
        worker.boundary()
    assert [len(w.written()) for w in team] == [1, 1, 1]
    assert re.fullmatch(r"spotfleet: checkpoint of version 2 written in \d\.\d s, [56]\d\.\d s before the host goes\n",
                        capsys.readouterr().out)
    for worker in team:
        worker.boundary()
        worker.saver.on_orders(orders)  # said again
    assert not any(w.group.save_waits for w in team)


def test_no_other_one_is_begun_that_would_not_be_done_before_the_host_goes(team):
    saver = team[0].saver
    orders = WorkerOrders(checkpoint_every_s=0.001, checkpoint_now=True, seconds_left=3.0)
    team[0].control.orders = orders
    saver.on_orders(orders)
    saver._due()
    saver._note_begin()
    saver._due_from -= 10.0
    saver._last_took_s = 2.0
    assert not saver._due()
    saver._last_took_s = 0.1
    assert saver._due()


def test_one_that_comes_too_late_or_not_at_all_says_so(team, capsys, monkeypatch):
    saver = team[0].saver
    for seconds, trouble in ((-1.0, None), (9.0, OSError(errno.ENOSPC, "No space left on device"))):
        team[0].control.orders = WorkerOrders(checkpoint_now=True, seconds_left=seconds)
        saver.on_orders(team[0].control.orders)
        with monkeypatch.context() as patch:
            if trouble is not None:
                patch.setattr(store_folder, "write_here", lambda *args, trouble=trouble: (_ for _ in ()).throw(trouble))
            saver.at_rest(team[0].state)
    first, _, last = capsys.readouterr().out.splitlines()
    this = "spotfleet: checkpoint of version 2 "
    assert re.fullmatch(this + r"written in \d\.\d s, \d\.\d s after the host was to go", first)
    assert re.fullmatch(this + r"not written: No space left on device, [89]\.\d s before the host goes", last)


@pytest.mark.parametrize("told", [
    PartReport(3, 70, 5, "d", (1, 2**40, 3), "x"), PartReport(1, 2, problem="why"),
    PartReport(1, 2, lengths=tuple(range(2_000, 52_000))),
])
def test_words_of_a_rank_arrive_as_they_were(told):
    assert exchange.unpack(exchange.pack(told)) == told


def test_more_items_than_fit_in_a_word_are_a_problem_that_is_told():
    generator = torch.Generator().manual_seed(0)
    lengths = tuple(torch.randint(0, 2**60, (140_000,), generator=generator).tolist())
    assert "140000 items" in exchange.unpack(exchange.pack(PartReport(1, 2, lengths=lengths))).problem


def test_a_job_that_commits_copies_agrees_on_a_checkpoint_in_the_commit_itself(ranks, monkeypatch):
    group = ranks(2).groups
    group[0].save_waits = True

    def agreed(mine) -> tuple[bool, bool]:
        holder = runtime.Runtime({})
        holder.initialized, holder.group = True, mine
        return holder._agree_change(), mine.save_agreed

    done = [None, None]
    threads = [threading.Thread(target=lambda g=g: done.__setitem__(g.rank, agreed(g))) for g in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done == [(False, True), (False, True)]


def test_only_what_all_ranks_provably_hold_alike_is_shared_out(alone):
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Linear(2, 2)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    state = hvd.elastic.TorchState(model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), momentum=0.9)),
                                   other=other, plain=torch.optim.SGD(other.parameters()), frozen=frozen)
    state.attach(1, 0)
    rows = entries.rows_of(state, state.schema())
    assert [row.paths[0][0] + "." + row.paths[0][1] for row in rows if row.shared] == [
        "model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]


def rows(*shapes: tuple[int, ...], shared: bool = True):
    return [TensorRow((("m", str(i)),), torch.float32, s, shared) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("world", [1, 2, 3, 7, 16])
def test_shares_cover_everything_once_and_no_rank_has_much_more_than_its_part(world):
    kinds = rows((1000, 300), (1, 500_000), (7,), (), (0, 4), (300, 300), (3000, 3000)) + rows((50,), (), shared=False)
    parts = plan(kinds, world)
    counts = [torch.zeros(k.shape, dtype=torch.int32) for k in kinds]
    for part in parts:
        for piece in part:
            piece.view_of(counts[piece.row]).add_(1)
    assert all((c == 1).all() for c in counts)
    sizes = [sum(4 * torch.Size(p.sizes).numel() for p in part) for part in parts]
    whole = sum(k.bytes for k in kinds)
    assert max(sizes) <= whole / world + 64 * 1024
    assert all(4 * torch.Size(p.sizes).numel() <= MOST_BYTES for part in parts for p in part)
    assert all(p.row < 7 for part in parts[1:] for p in part)  # rank 0 alone writes what may differ


def test_memory_that_is_still_being_made_for_a_generation_is_not_made_for_the_next_one_beside_it(team, monkeypatch):
    """It would come late, over the memory in which a share lies by then."""
    go_on, made = threading.Event(), []

    def slow(like) -> object:
        made.append(len(like))
        go_on.wait(30)
        return Buffer(like)

    monkeypatch.setattr(writer, "Buffer", slow)
    worker = team[1]
    worker.boundary()
    worker.generation = 2
    worker.boundary()
    assert len(made) == 1
    go_on.set()
    worker.saver._warmer.join(30)
    worker.boundary()  # it is looked at once more
    assert worker.saver._warmed == 2 and len(made) == 1  # what was made fits
