"""Checkpoints in an object store: whole or none wherever a process is killed, checked when read, kept `keep`."""

from __future__ import annotations

import errno
import importlib
import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from spotfleet.protocol.messages import Checkpoint, WorkerOrders
from spotfleet.protocol.proofs import MemberProof
from spotfleet.storage import object_store
from spotfleet.storage.object_store import ObjectStore
from spotfleet.train.checkpoint import entries, restore, store_folder
from spotfleet.train.checkpoint.exchange import PartReport
from spotfleet.train.checkpoint.host_copy import HostFolder
from spotfleet.train.checkpoint.restore import CheckpointDamaged
from spotfleet.train.checkpoint.store_folder import METADATA
from tests.support.fakes.cloud_storage import CloudStorage
from tests.support.train.train_parts import restored_url
from tests.train.checkpoint.test_checkpoint_files import by_torch, held_state, odd_state
from tests.train.state.test_state import build, train

NO_PROOF = MemberProof()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch) -> None:
    monkeypatch.setattr(restore, "OTHER_LIMIT_S", 5.0)
    monkeypatch.setattr(restore, "FETCH_LIMIT_S", 5.0)


@pytest.fixture
def url() -> Iterator[str]:
    yield "memory://job"
    object_store.reset()


def test_memory_holds_what_was_put_there_until_it_is_reset(url):
    ObjectStore(url).put("name", [b"bytes"])
    assert object_store.open_store(url)[0].list().collect()
    object_store.reset()
    assert not object_store.open_store(url)[0].list().collect()


def write(state, url: str, world: int = 1, generation: int = 1, proof: MemberProof = NO_PROOF) -> Checkpoint:
    """What `world` ranks that hold `state` write there."""
    told: list[PartReport] = []
    for rank in [*range(1, world), 0]:
        shard = entries.rank_shard(state, generation, rank, world, state.tensors())
        done, said = store_folder.write(shard, url, lambda own_s, told=told: told, proof=proof)
        told += [said] if rank else []
    assert done is not None
    return done


def same(state, held) -> bool:
    return all(torch.equal(a, b) for a, b in zip(state.tensors(), held.tensors, strict=True))


@pytest.mark.parametrize("world", [1, 3])
def test_what_ranks_write_to_a_store_is_restored_and_read_by_torch_where_it_lies(alone, tmp_path, world):
    _, _, state = odd_state(alone)
    done = write(state, f"file://{tmp_path}/bucket/job", world)
    folder = tmp_path / "bucket" / "job" / "1-1"
    assert done.url == f"file://{folder}" and done.bytes == sum(p.stat().st_size for p in folder.iterdir())
    assert same(state, restored_url(done, HostFolder(tmp_path / "here")))
    assert by_torch(folder)["epoch"] == 7
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["lock"]  # nothing else is left of the restoring


@pytest.mark.parametrize("world", [1, 2])
def test_a_store_knows_before_how_large_a_file_may_become(alone, monkeypatch, url, world):
    """It divides a large one into parts, whose number is limited."""
    told: list[int] = []
    put = ObjectStore.put

    def noted(store, key, chunks, **limits):
        digest = put(store, key, chunks, **limits)
        if key.endswith(".distcp"):
            told.append(limits["at_most"] - sum(e.bytes for e in store.list(key)))
        return digest

    monkeypatch.setattr(ObjectStore, "put", noted)
    _, _, state = odd_state(alone)
    write(state, url, world)
    assert len(told) == world and all(0 <= more < 4096 * len(state.tensors()) for more in told)


@pytest.fixture(params=["s3", "gs"])
def bucket(request, monkeypatch) -> str:
    """A bucket of a server on this machine, in the environment as a worker finds it."""
    if request.param == "gs":
        with CloudStorage(["spot"]) as cloud:
            for name, value in cloud.environ().items():
                monkeypatch.setenv(name, value)
            yield "gs://spot/runs/job"
        return
    server = importlib.import_module("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in {"ENDPOINT_URL": address, "ALLOW_HTTP": "true", "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s",
                        "REGION": "us-east-1", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    importlib.import_module("boto3").client("s3", endpoint_url=address).create_bucket(Bucket="spot")
    yield "s3://spot/runs/job"
    server.stop()


def test_a_bucket_keeps_restores_and_loses_checkpoints_as_said(alone, tmp_path, bucket):
    model, optimizer, state = held_state(alone, 1)
    first = write(state, bucket, world=2)
    for _ in range(2):
        train(model, optimizer, 1)
        last = write(state, bucket, world=2)
        store_folder.prune(bucket, last, keep=2)
    assert {entry.key.partition("/")[0] for entry in ObjectStore(bucket).list()} == {"2-1", "3-1"}
    assert same(state, restored_url(last, HostFolder(tmp_path)))
    with pytest.raises(CheckpointDamaged, match=rf"version 1 at {bucket}/1-1 .*manifest\.json is not there"):
        restored_url(first, HostFolder(tmp_path))


class Killed(BaseException):
    pass


def test_killed_after_any_write_there_is_the_older_checkpoint_or_the_new_one_and_torch_finds_no_half(
        alone, tmp_path, monkeypatch):
    model, optimizer, state = held_state(alone, 1)
    put, drop, left = ObjectStore.put, ObjectStore.delete, itertools.count()

    def until_killed(do):
        def done(self, *args, **limits):
            result = do(self, *args, **limits)
            if next(left) == at:
                raise Killed
            return result
        return done

    survived = []
    for at in itertools.count():
        where = tmp_path / str(at)
        older = write(state, f"file://{where}", 2)
        store_folder.prune(f"file://{where}", older, keep=1)
        before = [t.clone() for t in state.tensors()]
        train(model, optimizer, 1)
        left = itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(ObjectStore, "put", until_killed(put))
            patch.setattr(ObjectStore, "delete", until_killed(drop))
            try:
                store_folder.prune(f"file://{where}", write(state, f"file://{where}", 2), keep=1)
            except Killed:
                pass
            else:
                break
        whole = [p.parent for p in where.glob(f"*/{METADATA}")]
        for folder in whole:  # every folder that torch takes for a checkpoint is one
            version = by_torch(folder)["spotfleet"]["version"]
            assert folder.name == f"{version}-1"
            named = Checkpoint(version,
                               store_folder.hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest(), 0,
                               1, url=f"file://{folder}")
            values = state.tensors() if version == state.version else before
            assert all(torch.equal(a, b) for a, b in
                       zip(restored_url(named, HostFolder(tmp_path)).tensors, values, strict=True))
        survived.append(sorted(int(f.name.partition("-")[0]) - older.version for f in whole))
    # two shares and the manifest: the old one; .metadata: both; the old one's .metadata removed: the new one
    assert survived == [[0], [0], [0], [0, 1], [1], [1], [1], [1]]


def test_rests_of_what_never_became_whole_go_with_the_next_and_newer_ones_stay(alone, url):
    _, _, state = held_state(alone, 5)
    folder = ObjectStore(url)
    for name in ("3-1/__0_0.distcp", "9-1/__1_0.distcp", "4-2/__1_0.distcp", "6-3/__0_0.distcp", "6-3/.metadata",
                 "7-3/__0_0.distcp", "x"):
        folder.put(name, [b"x"])
    store_folder.prune(url, write(state, url, generation=2), keep=1)
    assert {e.key.partition("/")[0] for e in folder.list()} == {"5-2", "6-3", "7-3", "x"}


def test_a_whole_checkpoint_is_not_written_again(alone, url, tmp_path):
    model, optimizer, state = held_state(alone, 2)
    first = write(state, url)
    train(model, optimizer, 1)
    state.mark(version=2)
    assert write(state, url) == first
    assert restored_url(first, HostFolder(tmp_path)).position.round != state._position.round


@pytest.mark.parametrize(("name", "content"), [
    ("__0_0.distcp", None), ("__0_0.distcp", b"other"), ("manifest.json", None), ("manifest.json", b"{}"),
    (METADATA, None), (METADATA, b"cno_such_module\nThing\n."),
])
def test_a_file_that_is_missing_or_changed_is_seen_before_anything_of_it_is_opened(alone, url, tmp_path, name, content):
    _, _, state = held_state(alone, 1)
    named = write(state, url)
    ObjectStore(named.url.replace("/1-1", "")).delete(f"1-1/{name}")
    if content is not None:
        ObjectStore(url).put(f"1-1/{name}", [content])
    with pytest.raises(CheckpointDamaged, match=rf"version 1 at {url}/1-1 .*{name} .*"):
        restored_url(named, HostFolder(tmp_path))


@dataclass
class Control:
    """Orders and the report of a worker; `on_damaged` is who gives the orders."""

    orders: WorkerOrders
    told: list[Checkpoint] = field(default_factory=list)
    cv: threading.Condition = field(default_factory=threading.Condition)
    on_damaged: object = lambda control: None

    fetched: list[int] = field(default_factory=list)
    beside: Checkpoint | None = None
    why: str = ""

    def update(self, damaged: Checkpoint | None = None, checkpoint: Checkpoint | None = None, fetched: int = 0,
               damaged_why: str = "") -> None:
        self.fetched += [fetched] if fetched else []
        if damaged is not None:
            self.told.append(damaged)
            self.why = damaged_why
            self.beside = checkpoint
            self.on_damaged(self)


def test_a_damaged_one_is_told_and_the_one_that_is_ordered_instead_is_restored(alone, url, tmp_path):
    model, optimizer, state = held_state(alone, 1)
    older = write(state, url)
    expected = [t.clone() for t in state.tensors()]
    train(model, optimizer, 1)
    newer = write(state, url)
    ObjectStore(url).delete("2-1/__0_0.distcp")

    def order_the_older(control: Control) -> None:
        control.orders = replace(control.orders, restore=older)

    control = Control(WorkerOrders(restore=newer), on_damaged=order_the_older)
    fresh = hvd.elastic.TorchState(*build(lr=9.0), epoch=5)
    fresh.attach(0, -1)
    restore.restore(control, fresh, tmp_path)
    assert (control.told, control.why) == ([newer], "__0_0.distcp is not there")
    assert fresh.version == 1
    assert all(torch.equal(a, b) for a, b in zip(fresh.tensors(), expected, strict=True))


def test_one_that_is_gone_because_workers_without_a_dispatcher_wrote_on_is_told_with_the_newest_they_left(
        alone, url, tmp_path):
    model, optimizer, state = held_state(alone, 1)
    known = write(state, url)
    train(model, optimizer, 1)
    left = write(state, url)
    store_folder.prune(url, left, keep=1)
    for name in ("7-1/__0_0.distcp", "8-1/.metadata", "9-1/.metadata", "9-1/manifest.json"):  # no checkpoints
        ObjectStore(url).put(name, [b"{}"])

    def order_what_was_found(control: Control) -> None:
        control.orders = replace(control.orders, restore=control.beside)

    control = Control(WorkerOrders(restore=known), on_damaged=order_what_was_found)
    restore.restore(control, state, tmp_path)
    assert (control.told, control.beside, state.version) == ([known], left, 2)


MEMBER, OTHERS = MemberProof("job-1", "its key", "a grant"), MemberProof("job-2", "another key", "a grant")


def test_beside_a_damaged_one_only_what_a_member_of_the_job_wrote_counts_and_the_rest_is_named(alone, url, tmp_path):
    model, optimizer, state = held_state(alone, 1)
    true = write(state, url, proof=MEMBER)
    train(model, optimizer, 1)
    damaged = replace(write(state, url, proof=MEMBER), seal="by the dispatcher")
    folder = ObjectStore(url)
    for version, proof in ((7, NO_PROOF), (8, OTHERS)):
        train(model, optimizer, 1)
        planted = write(state, url, generation=version, proof=proof)
        assert planted.version > true.version
    folder.put("9-9/manifest.json", [b"".join(folder.get("1-1/manifest.json"))])  # a true one, under another name
    folder.put("9-9/.metadata", [b""])
    folder.delete("2-1/__0_0.distcp")

    def order_what_was_found(control: Control) -> None:
        control.orders = replace(control.orders, restore=control.beside)

    control = Control(WorkerOrders(restore=damaged), on_damaged=order_what_was_found)
    restore.restore(control, state, tmp_path, MEMBER)
    assert (control.beside, state.version) == (MEMBER.marked(true), 1)
    assert control.why == ("__0_0.distcp is not there; 9-9, 4-8, 3-7 beside it: no mark of a worker of this job")


def test_what_others_put_under_the_next_name_is_written_over(alone, url, tmp_path):
    _, _, state = held_state(alone, 1)
    planted = write(state, url, proof=OTHERS)
    made = write(state, url, proof=MEMBER)
    assert made.digest != planted.digest and same(state, restored_url(made, HostFolder(tmp_path)))
    assert write(state, url, proof=MEMBER) == made


def test_while_it_comes_that_is_told(alone, url, tmp_path, monkeypatch):
    monkeypatch.setattr(restore, "REPORT_S", 0.0)
    _, _, state = held_state(alone, 1)
    named = write(state, url)
    control = Control(WorkerOrders(restore=named))
    restore.restore(control, state, tmp_path)
    assert control.fetched == sorted(set(control.fetched)) and control.fetched[-1] > named.bytes / 2


def test_a_damaged_one_for_which_no_other_is_ordered_ends_the_wait_and_says_what_to_do(
        alone, url, tmp_path, monkeypatch):
    monkeypatch.setattr(restore, "OTHER_LIMIT_S", 0.05)
    _, _, state = held_state(alone, 1)
    named = write(state, url)
    ObjectStore(url).delete("1-1/manifest.json")
    control = Control(WorkerOrders(restore=named))
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json is not there") as told:
        restore.restore(control, state, tmp_path)
    assert control.told == [named] and "starts from step 0" in told.value.hint


def test_a_store_that_does_not_answer_is_asked_again_and_then_the_error_names_what_it_may_lack(
        alone, url, tmp_path, monkeypatch):
    _, _, state = held_state(alone, 1)
    control, get = Control(WorkerOrders(restore=write(state, url))), ObjectStore.get
    monkeypatch.setattr(restore, "RETRY_S", 0.01)
    answers = itertools.chain([OSError("503 Slow Down"), OSError("403 Forbidden")], itertools.repeat(None))

    def now_and_then(self, name: str) -> Iterator[bytes]:
        if (trouble := next(answers)) is not None:
            raise trouble
        return get(self, name)

    monkeypatch.setattr(ObjectStore, "get", now_and_then)
    restore.restore(control, state, tmp_path)
    monkeypatch.setattr(restore, "FETCH_LIMIT_S", 0.0)
    answers = itertools.repeat(OSError("403 Forbidden"))
    with pytest.raises(Exception, match="403 Forbidden") as told:
        restore.restore(control, state, tmp_path)
    assert "AWS_" in told.value.hint


def test_a_host_without_room_for_it_is_blamed_after_a_while_and_not_the_script(alone, url, tmp_path, monkeypatch):
    _, _, state = held_state(alone, 1)
    control, fetch = Control(WorkerOrders(restore=write(state, url))), store_folder.fetch
    monkeypatch.setattr(restore, "RETRY_S", 0.01)
    answers = iter([OSError(errno.ENOSPC, "No space left on device"), None])

    def full(*given: object) -> None:
        if (trouble := next(answers)) is not None:
            raise trouble
        fetch(*given)

    monkeypatch.setattr(store_folder, "fetch", full)
    restore.restore(control, state, tmp_path)  # room that comes soon is all it needs
    monkeypatch.setattr(restore, "FULL_S", 0.0)
    answers = itertools.repeat(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(restore.NoRoomHere, match="checkpoint 1 finds no room here") as told:
        restore.restore(control, state, tmp_path)
    assert told.value.blame_host


def test_without_obstore_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(store_folder.importlib.sys.modules, "obstore", None)
    with pytest.raises(UsageError, match=r"s3://b/p, .*pip install 'obstore"):
        store_folder.require("s3://b/p")


def test_a_manifest_says_what_every_file_must_be(alone, url):
    _, _, state = held_state(alone, 1)
    write(state, url, 2)
    manifest = json.loads(b"".join(ObjectStore(url).get("1-1/manifest.json")))
    assert sorted(manifest["files"]) == [METADATA, "__0_0.distcp", "__1_0.distcp"]
    assert (manifest["version"], manifest["generation"]) == (1, 1)
