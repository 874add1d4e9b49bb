"""Checkpoints as files of a worker: every bit comes back, or an error says whose trouble it is and what to do."""

from __future__ import annotations

import copy
import pickle
import tarfile
import threading
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.protocol.messages import Checkpoint, WorkerOrders
from spotfleet.protocol.proofs import MemberProof
from spotfleet.storage import verified
from spotfleet.storage.checkpoint_folder import digest_of, problem_in
from spotfleet.train.checkpoint import entries, format, restore, store_folder
from spotfleet.train.checkpoint.exchange import PartReport
from spotfleet.train.checkpoint.restore import CheckpointDamaged
from spotfleet.train.checkpoint.writer import Checkpointer
from spotfleet.train.state.state import Position
from spotfleet.worker.member import RankInfo
from tests.support.train.train_parts import Kept, restored
from tests.train.state.test_state import build, train

EARLIER = (b"ccopy_reg\n_reconstructor\n(cspotfleet.train.state\nPosition\nc__builtin__\nobject\nNtR("
           b"dVversion\nI7\nsVround\nI7\nsVworld\nI2\nsVrank\nI0\nsVscalars\n(dVepoch\nI3\nssVstateful\n(d"
           b"sVhyper\n(dsVgenerators\n(dsVtrained\n(I01\nI00\ntsVsampler\nVsampler\nsb.")


@pytest.mark.parametrize(("where", "name"), [
    ("spotfleet.train.state", "Position"), ("spotfleet.train.state", "Schema"),
    ("spotfleet.train.resize", "Ramp")])
def test_what_checkpoints_pickle_keeps_its_place_for_those_of_earlier_and_later_releases(where, name):
    found = pickle.loads(f"c{where}\n{name}\n.".encode())  # as a checkpoint of any release names it
    assert (found.__module__, found.__qualname__) == (where, name)  # as one that is written now does


def test_a_position_of_an_earlier_checkpoint_is_read_field_by_field():
    """Bytes that were written once, in pickle's text protocol, and stay."""
    held = pickle.loads(EARLIER)
    assert held == Position(7, 7, 2, 0, {"epoch": 3}, {}, {}, {}, (True, False), "sampler")


def held_state(alone, steps: int):
    model, optimizer = build()
    state = hvd.elastic.TorchState(model, optimizer, epoch=0)
    state.attach(1, 0)
    alone.state = state
    train(model, optimizer, steps)
    return model, optimizer, state


def write(state, folder: Path, generation: int = 1) -> Checkpoint:
    done = store_folder.write_here(entries.whole_shard(state, generation), folder)[0]
    return replace(done, path=str(Path(done.path).parent))


def write_parts(state, folder: Path, world: int) -> Checkpoint:
    """What `world` ranks that hold `state` write, put together as the dispatcher does it."""
    told: list[PartReport] = []
    kept = Kept(folder / "kept")
    for rank in [*range(1, world), 0]:  # rank 0 needs what the others tell
        shard = entries.rank_shard(state, 1, rank, world, state.tensors())
        done, said = store_folder.write_here(shard, folder / str(rank), lambda own_s, told=told: told)
        told += [said] if rank else []
        kept.take(done)
    assert kept.newest is not None
    return kept.newest


def packed(named: Checkpoint, tar: Path) -> Checkpoint:
    """The same as an earlier release kept it: a tar."""
    with tarfile.open(tar, "w") as out:
        for path in sorted(Path(named.path).iterdir(), reverse=True):
            out.add(path, path.name)
    return Checkpoint(named.version, digest_of(tar), tar.stat().st_size, named.generation, str(tar))


def by_torch(folder: Path) -> dict:
    """The checkpoint as somebody reads it who has torch and none of our code or of the script's."""
    dcp_to_torch_save(folder, folder.parent / "plain.pt")
    return torch.load(folder.parent / "plain.pt", weights_only=True)


def test_a_checkpoint_brings_back_every_bit(alone, tmp_path):
    model, optimizer, state = held_state(alone, 4)
    named = write(state, tmp_path, generation=3)
    expected = copy.deepcopy([t.detach().clone() for t in state.tensors()])
    train(model, optimizer, 3)
    fresh_model, fresh_optimizer = build(lr=9.0)
    fresh = hvd.elastic.TorchState(fresh_model, fresh_optimizer, epoch=5)
    fresh.attach(0, -1)
    compared: list[int] = []
    fresh.install(restored(named, compared.append))
    assert sum(compared) == named.bytes
    assert (named.version, named.generation) == (4, 3)
    assert named.bytes == sum(path.stat().st_size for path in Path(named.path).iterdir())
    assert all(torch.equal(a, b) for a, b in zip(fresh.tensors(), expected, strict=True))
    assert (fresh.version, fresh.epoch, fresh_optimizer.param_groups[0]["lr"]) == (4, 0, 0.1)


def test_the_lines_in_the_docs_begin_a_job_from_a_checkpoint_of_an_earlier_one(alone, tmp_path):
    _, _, state = held_state(alone, 4)
    torch.save(by_torch(Path(write(state, tmp_path).path)), tmp_path / "model.pt")
    docs = (Path(__file__).parents[3] / "docs/checkpoints.md").read_text()
    lines = docs.partition("## Beginning from a checkpoint")[2].partition("```python")[2].partition("```")[0]
    model, optimizer = build(lr=9.0)
    known = {"torch": torch, "hvd": hvd, "model": model, "optimizer": optimizer}
    exec(lines.replace("model.pt", str(tmp_path / "model.pt")), known)
    begun = known["state"]
    assert all(torch.equal(a, b) for a, b in zip(begun.tensors(), state.tensors(), strict=True))
    assert (begun.epoch, begun.version, optimizer.param_groups[0]["lr"]) == (0, 0, 0.1)


def test_what_the_agent_has_compared_is_not_compared_again_unless_it_has_changed(alone, tmp_path, monkeypatch):
    _, _, state = held_state(alone, 1)
    named = write(state, tmp_path)
    verified.note(Path(named.path), named.digest)
    compared: list[Path] = []
    monkeypatch.setattr(restore, "problem_in",
                        lambda folder, *args: compared.append(folder) or problem_in(folder, *args))
    progress: list[int] = []
    assert restored(named, progress.append).version == 1
    assert (compared, progress) == ([], [named.bytes])
    with open(Path(named.path) / ".metadata", "ab") as out:
        out.write(b"?")
    with pytest.raises(restore.CheckpointDamaged):
        restored(named)
    assert compared == [Path(named.path)] and not list(tmp_path.glob("*.verified"))


class Odd(nn.Module):
    """Tied, frozen, large, empty, 0-dim and 8-bit: whatever a model may hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(300, 64)
        self.head = nn.Linear(64, 300, bias=False)
        self.head.weight = self.table.weight
        self.wide = nn.Parameter(torch.randn(1, 50_000))
        self.frozen = nn.Parameter(torch.randn(64, 8).to(torch.bfloat16), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("bytes", torch.arange(256, dtype=torch.uint8))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.ones(4), persistent=False)


@dataclass
class Note:
    text: str


def odd_state(alone):
    model = Odd()
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.5))
    state = hvd.elastic.TorchState(model, optimizer, epoch=7, note=Note("mine"))
    alone.state = state
    state.attach(1, 0)
    (model.head(model.norm(model.table(torch.arange(9)))).sum() * model.scale + model.wide.square().sum()).backward()
    optimizer.step()
    return model, optimizer, state


@pytest.mark.parametrize("world", [1, 3, 8])
def test_torch_reads_what_several_ranks_wrote_into_a_model_and_an_optimizer_of_its_own(alone, tmp_path, world):
    model, optimizer, state = odd_state(alone)
    plain = by_torch(Path(write_parts(state, tmp_path, world).path))
    read = Odd()
    read.load_state_dict(plain["model"], strict=True)
    assert {k: v.tolist() for k, v in read.state_dict().items()} == \
        {k: v.tolist() for k, v in model.state_dict().items()}
    other = torch.optim.AdamW([p for p in read.parameters() if p.requires_grad], lr=0.1)
    set_optimizer_state_dict(read, other, plain["optimizer"])
    assert other.param_groups[0]["lr"] == 0.5
    for ours, theirs in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert {k: v.tolist() for k, v in optimizer.state[ours].items()} == \
            {k: v.tolist() for k, v in other.state[theirs].items()}
    assert plain["epoch"] == 7 and plain["spotfleet"]["version"] == state.version == 1
    assert "note" not in plain  # nobody but the script could read it


@pytest.mark.parametrize("world", [2, 3, 8])
def test_parts_of_several_ranks_bring_back_every_bit(alone, tmp_path, world):
    _, _, state = odd_state(alone)
    held = restored(write_parts(state, tmp_path, world))
    assert held.position.scalars["note"] == Note("mine")
    for mine, theirs in zip(state.tensors(), held.tensors, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_the_tar_of_an_earlier_release_brings_back_every_bit_and_is_compared_first(alone, tmp_path):
    _, _, state = odd_state(alone)
    tar = packed(write_parts(state, tmp_path, 3), tmp_path / "1-1.ckpt")
    held = restored(tar)
    assert held.position.scalars["note"] == Note("mine")
    assert all(torch.equal(a, b) for a, b in zip(state.tensors(), held.tensors, strict=True))
    Path(tar.path).write_bytes(Path(tar.path).read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged, match="is not the one that was kept"):
        restored(tar)


def test_a_restore_holds_one_tensor_at_a_time(alone, tmp_path):
    _, _, state = odd_state(alone)
    named, alive = write_parts(state, tmp_path, 3), []
    with restore.opened(named) as held:
        for tensor in held.tensors:
            alive.append(weakref.ref(tensor))
            assert sum(found() is not None for found in alive) <= 2  # the last one, until the next has been read
    assert len(alive) == len(state.tensors())


def test_what_three_ranks_wrote_two_others_go_on_from_and_torch_reads_what_they_write(alone, tmp_path):
    _, _, state = odd_state(alone)
    first = write_parts(state, tmp_path / "three", 3)
    _, _, other = odd_state(alone)
    for tensor in other.tensors():
        tensor.zero_()
    restore.install(other, first)
    plain = [by_torch(Path(made.path)) for made in (first, write_parts(other, tmp_path / "two", 2))]
    for top in ("model", "optimizer"):
        flat = [torch.utils._pytree.tree_flatten(p[top])[0] for p in plain]
        assert len(flat[0]) == len(flat[1]) > 10
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*flat, strict=True))


def test_the_same_state_makes_the_same_parts(alone, tmp_path):
    _, _, state = odd_state(alone)
    first, second = (write_parts(state, tmp_path / n, 3) for n in ("a", "b"))
    assert first.digest == second.digest


@pytest.mark.parametrize("file", ["__0_0.distcp", "manifest.json", ".metadata"])
@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_checkpoint_that_is_not_the_one_named_is_refused(alone, tmp_path, damage, file):
    _, _, state = held_state(alone, 1)
    named = write(state, tmp_path)
    path = Path(named.path) / file
    data = bytearray(path.read_bytes())
    if damage == "changed":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[:-1] if damage == "cut" else data)
    if damage == "missing":
        path.unlink()
    with pytest.raises(CheckpointDamaged, match="is not the one that was kept") as told:
        restored(named)
    assert told.value.blame_peer  # nobody's script has failed
    assert not Path(named.path).exists()  # so that it is fetched again


def test_a_state_of_another_model_is_refused_and_names_the_difference(alone, tmp_path):
    _, _, state = held_state(alone, 1)
    named = write(state, tmp_path)
    other = nn.Linear(9, 9)
    wrong = hvd.elastic.TorchState(other, hvd.DistributedOptimizer(torch.optim.Adam(other.parameters())), epoch=0)
    wrong.attach(0, -1)
    with pytest.raises(UsageError, match=r"1-1 of version 1 does not fit .*model\.weight.*spotfleet train"):
        restore.install(wrong, named)


@pytest.mark.parametrize("content", ["no archive", "no .metadata", "no pickle of ours", "another format"])
def test_a_whole_checkpoint_that_cannot_be_read_here_says_so_and_how_to_go_on_without_it(
        alone, tmp_path, monkeypatch, content):
    path = tmp_path / "ckpt-1.tar"
    path.write_bytes(b"no archive of anybody's")
    if content == "another format":
        monkeypatch.setattr(format, "FORMAT", 99)
        packed(write(held_state(alone, 1)[2], tmp_path), path)
        monkeypatch.undo()
    elif content != "no archive":
        member = tmp_path / ("other" if content == "no .metadata" else ".metadata")
        member.write_bytes(b"cno_such_module\nThing\n.")
        with tarfile.open(path, "w") as tar:
            tar.add(member, member.name)
    named = Checkpoint(1, digest_of(path), path.stat().st_size, 1, str(path))
    with pytest.raises(UsageError, match=r"ckpt-1\.tar of version 1 is whole, but .*`spotfleet train` again"):
        restored(named)
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
    place: RankInfo = field(default_factory=RankInfo)
    group: None = None
    proof: MemberProof = field(default_factory=MemberProof)


def test_a_checkpoint_ordered_while_another_is_written_follows_it_at_once(alone, tmp_path, monkeypatch):
    model, optimizer, state = held_state(alone, 1)
    leader = Leader(str(tmp_path), Control(WorkerOrders(checkpoint_every_s=0.001)))
    checkpointer, go_on, write = Checkpointer(leader), threading.Event(), store_folder.write_here
    monkeypatch.setattr(store_folder, "write_here", lambda *args, **more: go_on.wait(30) and write(*args, **more))
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
