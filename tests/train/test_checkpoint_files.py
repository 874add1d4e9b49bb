"""Checkpoints as files of a worker: every bit comes back, or an error says whose trouble it is and what to do."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from test_state import build, train
from torch import nn

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.messages import Checkpoint, WorkerOrders
from spotfleet.train import checkpoint
from spotfleet.train.checkpoint import CheckpointDamaged, Checkpointer
from spotfleet.train.member import Place


def held_state(alone, steps: int):
    model, optimizer = build()
    state = hvd.elastic.TorchState(model, optimizer, epoch=0)
    state.attach(1, 0)
    alone.state = state
    train(model, optimizer, steps)
    return model, optimizer, state


def test_a_checkpoint_brings_back_every_bit(alone, tmp_path):
    model, optimizer, state = held_state(alone, 4)
    named = checkpoint.write(state.copy(), tmp_path, generation=3)
    expected = copy.deepcopy([t.detach().clone() for t in state.tensors()])
    train(model, optimizer, 3)
    fresh_model, fresh_optimizer = build(lr=9.0)
    fresh = hvd.elastic.TorchState(fresh_model, fresh_optimizer, epoch=5)
    fresh.attach(0, -1)
    fresh.install(checkpoint.read(named))
    assert named.version == 4 and named.generation == 3 and named.bytes == Path(named.path).stat().st_size
    assert all(torch.equal(a, b) for a, b in zip(fresh.tensors(), expected, strict=True))
    assert (fresh.version, fresh.epoch, fresh_optimizer.param_groups[0]["lr"]) == (4, 0, 0.1)


@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_checkpoint_that_is_not_the_one_named_is_refused(alone, tmp_path, damage):
    _, _, state = held_state(alone, 1)
    named = checkpoint.write(state.copy(), tmp_path, generation=1)
    path = Path(named.path)
    data = bytearray(path.read_bytes())
    if damage == "changed":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[:-1] if damage == "cut" else data)
    if damage == "missing":
        path.unlink()
    with pytest.raises(CheckpointDamaged, match="is not the one that was kept") as told:
        checkpoint.read(named)
    assert told.value.blame_peer  # nobody's script has failed
    assert not path.exists()  # so that it is fetched again


def test_a_state_of_another_model_is_refused_and_names_the_difference(alone, tmp_path):
    _, _, state = held_state(alone, 1)
    named = checkpoint.write(state.copy(), tmp_path, generation=1)
    other = nn.Linear(9, 9)
    wrong = hvd.elastic.TorchState(other, hvd.DistributedOptimizer(torch.optim.Adam(other.parameters())), epoch=0)
    wrong.attach(0, -1)
    with pytest.raises(UsageError, match=r"ckpt-1\.pt of version 1 does not fit .*model\.weight.*spotfleet train"):
        checkpoint.install(wrong, named)


@pytest.mark.parametrize("content", [
    b"no archive of torch's",
    {"format": 99, "version": 1},
    {"version": 1},
    {"format": checkpoint.FORMAT, "version": 1, "tensors": [], "about": torch.frombuffer(
        bytearray(b"cno_such_module\nThing\n."), dtype=torch.uint8)},
])
def test_a_whole_checkpoint_that_cannot_be_read_here_says_so_and_how_to_go_on_without_it(tmp_path, content):
    path = tmp_path / "ckpt-1.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    named = Checkpoint(1, checkpoint.digest_of(path), path.stat().st_size, 1, str(path))
    with pytest.raises(UsageError, match=r"ckpt-1\.pt of version 1 is whole, but .*`spotfleet train` again"):
        checkpoint.read(named)
    assert path.exists()


@dataclass
class Control:
    orders: WorkerOrders
    made: list[int] = field(default_factory=list)

    def update(self, checkpoint: Checkpoint) -> None:
        self.made.append(checkpoint.version)


@dataclass
class Leader:
    """Rank 0's runtime, as far as a Checkpointer knows it."""

    work: str
    control: Control
    generation: int = 1
    place: Place = field(default_factory=Place)


def test_a_checkpoint_ordered_while_another_is_written_follows_it_at_once(alone, tmp_path, monkeypatch):
    model, optimizer, state = held_state(alone, 1)
    leader = Leader(str(tmp_path), Control(WorkerOrders(checkpoint_every_s=0.001)))
    checkpointer, go_on, write = Checkpointer(leader), threading.Event(), checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *args, **more: go_on.wait(30) and write(*args, **more))
    checkpointer._due_from = 0.0
    checkpointer.at_boundary(state)
    leader.control.orders = WorkerOrders(checkpoint_every_s=1000.0, checkpoint_now=True)  # a notice to every host
    for _ in range(2):
        train(model, optimizer, 1)
        checkpointer.at_boundary(state)
    go_on.set()
    checkpointer._writer.join()
    checkpointer.at_boundary(state)
    checkpointer._writer.join()
    assert leader.control.made == [1, 3]
