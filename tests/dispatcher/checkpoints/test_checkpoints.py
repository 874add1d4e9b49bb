"""Checkpoints on the dispatcher's disk: whole ones only, and the next older where one is damaged."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from spotfleet.dispatcher.checkpoints import archive
from spotfleet.dispatcher.checkpoints import store as store_module
from spotfleet.dispatcher.checkpoints.store import CheckpointStore, NoRoom, Outdated, RestoreInstruction
from spotfleet.dispatcher.disk import files
from spotfleet.errors import UsageError
from spotfleet.fleet.domain.events import CheckpointLost
from spotfleet.protocol.messages import Checkpoint
from tests.support.dispatcher.checkpoint_sets import file_of, files_of, whole, write


async def body(*chunks: bytes, then: Exception | None = None):
    for chunk in chunks:
        yield chunk
    if then:
        raise then


def point(version: int, generation: int, data: bytes) -> Checkpoint:
    return Checkpoint(version, hashlib.sha256(data).hexdigest(), 0, generation)


def put(store: CheckpointStore, version: int, generation: int, data: bytes = b"state", fence: int = 0) -> Checkpoint:
    return asyncio.run(store.put(point(version, generation, data), lambda: fence, body(data)))


def given(folder: Path, *versions: int, keep: int = 2) -> CheckpointStore:
    """A store with these versions of generation 1, each with other bytes."""
    store = CheckpointStore(folder, keep)
    for version in versions:
        put(store, version, 1, data_of(version))
    return store


def data_of(version: int) -> bytes:
    return b"state %d" % version * 100


def restart(store: CheckpointStore) -> CheckpointStore:
    return CheckpointStore(store.folder, store.keep)


def settled(store: CheckpointStore) -> CheckpointStore:
    """Once everything that was unsure has been read."""
    while unsure := store.unsure():
        asyncio.run(store.check(unsure[0]))
    return store


def version_of(offer: RestoreInstruction) -> int:
    assert not offer.wait
    return offer.checkpoint.version if offer.checkpoint else 0


def lost(store: CheckpointStore) -> list[tuple[int, str]]:
    return [(e.version, e.why) for e in store.take_news("job-1", 1.0) if isinstance(e, CheckpointLost)]


# ---- what is kept


def test_the_newest_checkpoints_are_kept_and_survive_a_restart(tmp_path: Path):
    store = given(tmp_path, 10, 20, 30)
    again = restart(store)
    assert again.kept == store.kept
    assert [c.version for c in again.kept] == [20, 30]
    assert again.find(10) is None
    path = again.find(20)
    assert path is not None and path.read_bytes() == data_of(20)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["20-1.ckpt", "20-1.json", "30-1.ckpt", "30-1.json"]


def test_a_checkpoint_of_a_replaced_generation_is_refused(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2)
    put(store, 10, 3)
    for generation, fence in ((2, 0), (3, 4)):
        with pytest.raises(Outdated):
            put(store, 50, generation, fence=fence)
    assert [c.version for c in store.kept] == [10]


def test_a_refused_copy_of_what_is_kept_takes_nothing_away(tmp_path: Path):
    store = given(tmp_path, 10)
    put(store, 20, 5, b"newer")
    with pytest.raises(Outdated):
        put(store, 10, 1, data_of(10))  # sent again by a host that was replaced
    assert store.find(10) is not None


def test_a_newer_generation_wins_although_its_version_is_lower(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=1)
    put(store, 50, 1, b"old")
    put(store, 40, 2, b"new")
    assert store.newest == Checkpoint(40, hashlib.sha256(b"new").hexdigest(), 3, 2)


def test_a_checkpoint_sent_twice_is_kept_once(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2)
    assert put(store, 10, 1) == put(store, 10, 1)
    assert sorted(os.listdir(tmp_path)) == ["10-1.ckpt", "10-1.json"]


# ---- uploads that fail


def test_a_transfer_that_breaks_off_leaves_the_kept_checkpoint_and_nothing_else(tmp_path: Path):
    store = given(tmp_path, 10)
    before = sorted(os.listdir(tmp_path))
    for version in (20, 10):  # another one, and the kept one's successor under the same name
        with pytest.raises(ConnectionError):
            asyncio.run(store.put(point(version, 1, b"whole"), lambda: 0, body(b"who", then=ConnectionError("gone"))))
    with pytest.raises(UsageError, match="digest"):
        asyncio.run(store.put(point(20, 1, b"whole"), lambda: 0, body(b"other")))
    assert sorted(os.listdir(tmp_path)) == before
    assert version_of(store.offer()) == 10


def test_a_checkpoint_is_refused_when_its_generation_is_replaced_while_it_is_on_its_way(tmp_path: Path):
    fence = [0]

    async def slow():
        yield b"sta"
        fence[0] = 2
        yield b"te"

    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(Outdated):
        asyncio.run(store.put(point(50, 1, b"state"), lambda: fence[0], slow()))
    assert store.newest is None and os.listdir(tmp_path) == []


@pytest.mark.parametrize("at", ["its bytes", "its record"])
def test_a_full_disk_keeps_the_older_one_says_so_and_takes_the_next_when_there_is_room(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str):
    store = given(tmp_path, 10)
    before = sorted(os.listdir(tmp_path))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*((files, "_sync") if at == "its bytes" else (store_module, "write_json")), full)
        with pytest.raises(NoRoom, match="No space left") as told:
            put(store, 20, 1, data_of(20))
    assert told.value.hint == "make room on the dispatcher's disk"
    assert store.problem == "checkpoint 20 cannot be kept: No space left on device"
    assert sorted(os.listdir(tmp_path)) == before
    assert version_of(store.offer()) == 10
    put(store, 20, 1, data_of(20))
    assert (version_of(store.offer()), store.problem) == (20, "")


# ---- damage on the disk


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """One bit, with neither size nor time changed, as a disk does it."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(("file", "damage", "why"), [
    ("20-1.ckpt", cut, "not the one that it came with"),
    ("20-1.ckpt", flip, "not the one that it came with"),
    ("20-1.ckpt", Path.unlink, "its file 20-1.ckpt is missing"),
    ("20-1.json", cut, "its record 20-1.json cannot be read"),
    ("20-1.json", Path.unlink, "its record 20-1.json cannot be read"),
    ("20-1.json", lambda path: path.write_text("[]"), "its record 20-1.json cannot be read"),
    ("20-1.json", lambda path: path.write_bytes(b"\xff\x00"), "its record 20-1.json cannot be read"),
])
def test_what_is_damaged_while_no_dispatcher_runs_is_set_aside_and_the_older_one_offered(
        tmp_path: Path, file: str, damage: Callable[[Path], object], why: str):
    store = given(tmp_path, 10, 20)
    damage(tmp_path / file)
    again = settled(restart(store))
    assert version_of(again.offer()) == 10
    ((version, said),) = lost(again)
    assert version == 20 and why in said
    assert again.problem.startswith("checkpoint 20 was set aside") and "10 is the newest whole one" in again.problem
    corrupt = ["20-1.ckpt.corrupt"] if file.endswith("json") or damage is not Path.unlink else []
    assert sorted(os.listdir(tmp_path)) == ["10-1.ckpt", "10-1.json", *corrupt]
    assert lost(settled(restart(again))) == []  # told once


def given_folders(folder: Path, *versions: int) -> CheckpointStore:
    store = CheckpointStore(folder, 2)
    for version in versions:
        for name, data in files_of(version).items():
            asyncio.run(store.put(file_of(files_of(version), name), lambda: 0, body(data)))
    return store


@pytest.mark.parametrize(("file", "damage", "why"), [
    ("20-1/__0_0.distcp", cut, "its file 20-1/__0_0.distcp has sha256"),
    ("20-1/__0_0.distcp", flip, "its file 20-1/__0_0.distcp has sha256"),
    ("20-1/__0_0.distcp", Path.unlink, "its file 20-1/__0_0.distcp is missing"),
    ("20-1/.metadata", flip, "its file 20-1/.metadata has sha256"),
    ("20-1/manifest.json", flip, "its file 20-1/manifest.json has sha256"),
    ("20-1/manifest.json", Path.unlink, "its file 20-1/manifest.json is missing"),
    ("20-1", shutil.rmtree, "its file 20-1 is missing"),
    ("20-1.json", cut, "its record 20-1.json cannot be read"),
    ("20-1.json", Path.unlink, "its record 20-1.json cannot be read"),
])
def test_a_damaged_file_of_a_folder_sets_the_checkpoint_aside(
        tmp_path: Path, file: str, damage: Callable[[Path], object], why: str):
    store = given_folders(tmp_path, 10, 20)
    assert (store.kept, restart(store).kept) == ((whole(files_of(10)), whole(files_of(20))),) * 2
    damage(tmp_path / file)
    again = settled(restart(store))
    assert version_of(again.offer()) == 10
    ((version, said),) = lost(again)
    assert version == 20 and why in said
    corrupt = [] if damage is shutil.rmtree else ["20-1.corrupt"]
    assert sorted(os.listdir(tmp_path)) == ["10-1", "10-1.json", *corrupt]
    assert lost(settled(restart(again))) == []  # told once
    for number in (30, 40):
        given_folders(tmp_path, number)
    flip(tmp_path / "40-1/.metadata")
    settled(restart(again))
    assert sorted(os.listdir(tmp_path)) == ["30-1", "30-1.json", "40-1.corrupt"]  # they must not fill the disk


@pytest.mark.parametrize("damage", [cut, Path.unlink])
@pytest.mark.parametrize("file", list(files_of(20)))
def test_a_folder_whose_file_changes_while_we_run_is_read_again_before_it_is_offered(tmp_path: Path, file, damage):
    store = given_folders(tmp_path, 10, 20)
    assert version_of(store.offer()) == 20
    damage(tmp_path / "20-1" / file)
    assert store.offer().wait
    assert version_of(settled(store).offer()) == 10


def test_the_checkpoints_of_an_earlier_release_count_beside_those_of_this_one(tmp_path: Path):
    store = given(tmp_path, 10)
    again = given_folders(tmp_path, 20)
    assert [(c.version, c.name) for c in again.kept] == [(10, ""), (20, "manifest.json")]
    again = given_folders(tmp_path, 30)
    assert sorted(os.listdir(tmp_path)) == ["20-1", "20-1.json", "30-1", "30-1.json"]
    assert store.kept[0].version == 10


def test_nothing_is_offered_before_it_has_been_read(tmp_path: Path):
    again = restart(given(tmp_path, 10))
    assert again.offer() == RestoreInstruction(wait="reads checkpoint 10 to see that it is whole")
    assert version_of(settled(again).offer()) == 10


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_file_that_changes_while_we_run_is_read_again_before_it_is_offered(tmp_path: Path, damage):
    store = given(tmp_path, 10, 20)
    assert version_of(store.offer()) == 20
    damage(tmp_path / "20-1.ckpt")
    assert store.offer().wait
    assert version_of(settled(store).offer()) == 10


def test_a_hosts_doubt_finds_what_no_time_of_change_shows_but_is_no_reason_to_read_all_day(tmp_path: Path):
    store = given(tmp_path, 10, 20)
    twenty = store.newest
    assert twenty is not None
    store.report_damaged(20, "0" * 64, now=0.0)  # the digest of another file
    assert store.unsure() == []
    store.report_damaged(20, twenty.digest, now=0.0)
    assert store.unsure() == [twenty]
    assert version_of(settled(store).offer()) == 20  # it is right here: the trouble is on the host
    flip(store.path(twenty))
    store.report_damaged(20, twenty.digest, now=29.0)
    assert store.unsure() == []
    store.report_damaged(20, twenty.digest, now=30.0)
    assert version_of(settled(store).offer()) == 10


def test_one_that_arrives_again_while_its_damaged_file_is_read_is_not_set_aside(tmp_path: Path, monkeypatch):
    store = given(tmp_path, 10)
    cut(tmp_path / "10-1.ckpt")

    async def scene() -> bool:
        read, begun = asyncio.Event(), asyncio.Event()

        async def slowly(work, *args):
            found = work(*args)
            begun.set()
            await read.wait()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "to_thread", slowly)
            reading = asyncio.create_task(store.check(store.kept[0]))
            await begun.wait()
        await store.put(point(10, 1, data_of(10)), lambda: 0, body(data_of(10)))
        read.set()
        return await reading

    assert asyncio.run(scene())
    assert (version_of(store.offer()), lost(store)) == (10, [])


def test_with_none_left_it_begins_anew_and_says_so(tmp_path: Path):
    store = given(tmp_path, 10, 20)
    for path in tmp_path.glob("*.ckpt"):
        cut(path)
    again = settled(restart(store))
    assert again.offer() == RestoreInstruction(None)
    assert again.problem.endswith("no whole one is left")
    assert [version for version, _ in lost(again)] == [20, 10]
    assert len(list(tmp_path.glob("*.corrupt"))) == 1  # they must not fill the disk
    put(again, 5, 2, b"anew")
    assert (version_of(again.offer()), again.problem) == (5, "")


@pytest.mark.parametrize("left", ["5-1.ckpt", "5-1.json", "20-0.ckpt", "5-1"])
def test_a_rest_of_pruning_is_no_damage(tmp_path: Path, left: str):
    store = given(tmp_path, 10, 20)
    if "." in left:
        (tmp_path / left).write_text("{}")
    else:
        write(files_of(5), tmp_path / left)
    again = settled(restart(store))
    assert (version_of(again.offer()), lost(again), again.problem) == (20, [], "")
    assert not (tmp_path / left).exists()


def test_what_is_brought_home_is_the_newest_that_is_whole(tmp_path: Path):
    folder = tmp_path / "jobs" / "job-1" / "checkpoints"
    given(folder, 10, 20)
    assert [n for n, _ in archive.members(tmp_path)] == ["jobs/job-1/checkpoints/20-1.ckpt"]
    flip(folder / "20-1.ckpt")
    assert [n for n, _ in archive.members(tmp_path)] == ["jobs/job-1/checkpoints/10-1.ckpt"]


def test_of_a_folder_that_is_brought_home_all_files_are_in_the_archive(tmp_path: Path):
    folder = tmp_path / "jobs" / "job-1" / "checkpoints"
    given_folders(folder, 10, 20)
    for version, damaged in ((20, "20-1/__0_0.distcp"), (10, "10-1/.metadata")):
        assert {n: b"".join(content.read(0, content.size())) for n, content in archive.members(tmp_path)} == {
            f"jobs/job-1/checkpoints/{version}-1/{name}": data for name, data in files_of(version).items()}
        flip(folder / damaged)
    assert list(archive.members(tmp_path)) == []


def test_reading_a_large_file_lets_the_loop_go_on(tmp_path: Path):
    store = restart(given(tmp_path, 10))
    with open(store.path(store.kept[0]), "ab") as file:
        file.truncate(64 << 20)

    async def scene() -> int:
        reading, turns = asyncio.create_task(store.check(store.kept[0])), 0
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(scene()) > 10
