"""Checkpoints that arrive file by file: whole when all are here, whatever is lost, repeated or killed on the way."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import shutil
import threading
from pathlib import Path

import pytest

from spotfleet.dispatcher.checkpoints import parts
from spotfleet.dispatcher.checkpoints import store as store_module
from spotfleet.dispatcher.checkpoints.seals import SealKey
from spotfleet.dispatcher.checkpoints.store import CheckpointStore, NoRoom, Outdated
from spotfleet.dispatcher.disk import files
from spotfleet.dispatcher.jobs.orders import worker_orders
from spotfleet.errors import UsageError
from spotfleet.membership import Membership
from spotfleet.protocol.messages import Checkpoint
from tests.support.dispatcher import checkpoint_sets
from tests.support.dispatcher.checkpoint_sets import file_of, files_of, sha
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

NAMES = ["__0_0.distcp", ".metadata", "manifest.json"]


async def body(data: bytes):
    yield data


def point(index: int, version: int = 10, generation: int = 1) -> Checkpoint:
    return file_of(files_of(version, generation), NAMES[index])


def data_of(index: int, version: int = 10, generation: int = 1) -> bytes:
    return files_of(version, generation)[NAMES[index]]


def whole(version: int = 10, generation: int = 1) -> Checkpoint:
    return checkpoint_sets.whole(files_of(version, generation))


def put(store: CheckpointStore, offered: Checkpoint, data: bytes, fence: int = 0) -> Checkpoint | None:
    return asyncio.run(store.put(offered, lambda: fence, body(data)))


def put_parts(store: CheckpointStore, *indices: int, version: int = 10, generation: int = 1) -> list[Checkpoint | None]:
    return [put(store, point(i, version, generation), data_of(i, version, generation)) for i in indices]


def restart(store: CheckpointStore) -> CheckpointStore:
    """After a kill: what `files.sweep` leaves is read again."""
    for part in store.folder.glob(".*.part"):
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    return CheckpointStore(store.folder, store.keep)


def join_all(store: CheckpointStore) -> None:
    """As `CheckpointMaintenance` does."""
    for ready in store.parts.ready():
        asyncio.run(store.join(ready.manifest, lambda: 0))


def names(store: CheckpointStore) -> list[str]:
    return sorted(p.name for p in store.folder.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, keep=2)


WHOLE = ["10-1", "10-1.json"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 2, 0, 0)])
def test_files_in_any_order_and_sent_again_become_one_folder(store, order):
    answers = put_parts(store, *order)
    assert whole() in answers  # whoever brings the last file hears of the whole
    assert store.kept == (whole(),)
    assert checkpoint_sets.read(store.path(whole())) == files_of(10)
    assert store.offer().checkpoint == whole()
    assert names(store) == WHOLE


def test_no_byte_is_written_twice(store):
    put_parts(store, 0, 1)
    before = {path.name.rpartition("-")[0]: path.stat().st_ino for path in (store.folder / "10-1.parts").iterdir()}
    put_parts(store, 2)
    assert before == {name: (store.path(whole()) / name).stat().st_ino for name in NAMES[:2]}


def test_all_at_once_become_one_folder_and_one_sender_hears_of_it(store):
    async def scene() -> list[Checkpoint | BaseException | None]:
        puts = (store.put(point(i), lambda: 0, body(data_of(i))) for i in (0, 1, 2, 2, 1))
        return await asyncio.gather(*puts, return_exceptions=True)  # one that arrives after the last is Outdated

    assert sum(answer == whole() for answer in asyncio.run(scene())) == 1
    assert names(store) == WHOLE


@pytest.mark.parametrize("some", [(0, 1), (0, 2), (1, 2)])
def test_some_of_the_files_are_no_checkpoint(store, some):
    assert put_parts(store, *some) == [None, None]
    assert (store.kept, store.offer().checkpoint) == ((), None)


def test_a_rank_that_wrote_its_piece_again_makes_the_one_that_its_manifest_names(store):
    """A worker that stood in for its group wrote all of it alone; the piece of the others' rank 0 arrives after it."""
    alone = files_of(10, pieces=(b"all of it",))
    put(store, file_of(alone, NAMES[0]), alone[NAMES[0]])
    put_parts(store, 0)
    assert put(store, file_of(alone, NAMES[2]), alone[NAMES[2]]) is None
    assert put(store, file_of(alone, NAMES[1]), alone[NAMES[1]]) == checkpoint_sets.whole(alone)
    assert checkpoint_sets.read(store.path(store.kept[0])) == alone


def test_files_of_one_name_cannot_fill_the_disk(store):
    for number in range(9):
        data = b"%d" % number
        put(store, Checkpoint(10, sha(data), 0, 1, name=NAMES[0]), data)
    assert len(list((store.folder / "10-1.parts").iterdir())) == parts.MOST_ALIKE


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"files": {}}', files_of(11)["manifest.json"],
                                  files_of(10)["manifest.json"].replace(b"__0_0.distcp", b"../../secrets")])
def test_a_manifest_of_nothing_or_of_another_checkpoint_is_refused(store, data):
    with pytest.raises(UsageError, match=r"manifest\.json"):
        put(store, Checkpoint(10, sha(data), 0, 1, name=NAMES[2]), data)
    assert names(store) == []


def test_parts_of_tars_of_an_earlier_release_are_removed(store):
    (store.folder / "10-1.parts").mkdir()
    (store.folder / "10-1.parts" / f"0-3-{sha(b'x')}").write_bytes(b"x")
    assert names(restart(store)) == []


def test_parts_outlive_the_dispatcher(store):
    put_parts(store, 0, 2)
    again = restart(store)
    assert put_parts(again, 1) == [whole()]
    assert checkpoint_sets.read(again.path(whole())) == files_of(10)
    assert names(again) == WHOLE


def test_a_part_with_another_digest_is_refused_and_nothing_is_left_of_it(store):
    with pytest.raises(UsageError, match="digest"):
        put(store, point(0), b"other bytes")
    assert names(store) == []


def test_parts_of_a_replaced_generation_are_refused_and_what_is_here_of_them_goes(store):
    put_parts(store, 0, 1)
    store.prune_parts(fence=2)
    assert names(store) == []
    with pytest.raises(Outdated):
        put(store, point(2), data_of(2), fence=2)


@pytest.mark.parametrize(("fences", "left"), [([0, 2], 2), ([0, 0, 2], 3)])  # on its way, and while they are linked
def test_a_generation_that_is_replaced_while_its_last_part_comes_becomes_no_checkpoint(store, fences, left):
    put_parts(store, 0, 1)
    fence = iter(fences)
    with pytest.raises(Outdated):
        asyncio.run(store.put(point(2), lambda: next(fence), body(data_of(2))))
    assert store.kept == ()
    assert len(list((store.folder / "10-1.parts").iterdir())) == left


def test_a_newer_whole_one_ends_the_wait_for_older_parts(store):
    put_parts(store, 0, 1)
    put(store, Checkpoint(20, sha(b"newer"), 0, 1), b"newer")
    assert names(store) == ["20-1.ckpt", "20-1.json"]
    with pytest.raises(Outdated):
        put_parts(store, 2)
    put_parts(store, 0, version=30)
    assert len(names(store)) == 3  # newer parts may still come together


def test_those_that_never_become_whole_cannot_fill_the_disk(store):
    for version in range(10, 20):
        put_parts(store, 0, version=version)
    assert names(store) == [f"{version}-1.parts" for version in (17, 18, 19)]


def test_rests_of_what_has_become_whole_are_gone_after_a_restart(store):
    put_parts(store, 0, 1)
    shutil.copytree(store.folder / "10-1.parts", store.folder / "kept")
    put_parts(store, 2)
    (store.folder / "kept").rename(store.folder / "10-1.parts")
    again = restart(store)
    assert (again.kept, names(again)) == ((whole(),), WHOLE)


def test_a_part_that_was_damaged_here_becomes_no_checkpoint_and_is_taken_again(store):
    put_parts(store, 0, 1)
    path = next((store.folder / "10-1.parts").glob("__0_0*"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    put_parts(store, 2)
    assert store.kept == ()
    why = f"its piece {path.name} is damaged on this disk"
    assert store.problem == f"checkpoint 10 was set aside, for {why}; no whole one is left"
    assert [(e.version, e.why) for e in store.take_news("j", 5.0)] == [(10, why)]
    assert put_parts(store, 0) == [whole()]


def test_a_piece_that_an_earlier_process_left_damaged_is_noticed_though_its_file_has_not_changed_since(store):
    put_parts(store, 0, 1)
    path = next((store.folder / "10-1.parts").glob("__0_0*"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    again = restart(store)
    put_parts(again, 2)
    assert (again.kept, again.problem.partition(";")[0]) == (
        (), f"checkpoint 10 was set aside, for its piece {path.name} is damaged on this disk")


@pytest.mark.parametrize("at", ["its bytes", "the whole"])
def test_a_full_disk_keeps_the_parts_and_says_so(store, monkeypatch, at):
    put_parts(store, 0, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*((files, "_sync") if at == "its bytes" else (parts.os, "link")), full)
        with pytest.raises(NoRoom, match="No space left"):
            put_parts(store, 2)
    assert names(store) == ["10-1.parts"]
    assert put_parts(store, 2) == [whole()]


def test_a_tar_that_an_agent_of_an_earlier_release_sends_counts_for_its_files(store):
    put_parts(store, 0, 1)
    data = b"alone"
    put(store, Checkpoint(10, sha(data), 0, 1), data)
    assert names(store) == ["10-1.ckpt", "10-1.json"]
    assert put_parts(store, 2) == [None]  # no harm: it is told that all is well
    assert store.path(store.kept[0]).read_bytes() == data


# ---- hosts that do not keep up


def late(store: CheckpointStore, *versions: int) -> None:
    """Of each of these one part comes, and no more."""
    for version in versions:
        put_parts(store, 0, version=version)


def test_parts_that_come_slower_than_they_are_made_are_made_less_often_until_they_come_whole(store):
    def told() -> float:
        job = Membership("j", 1, 3)
        return worker_orders(job, store, 60.0, ["h1/0/1"], save=False)["h1/0/1"].checkpoint_every_s

    late(store, 1, 2, 3)
    assert (told(), store.slow) == (60.0, "")
    late(store, 4)
    assert told() == 120.0
    assert store.slow == "hosts bring checkpoints slower than they are made: 2 times the interval for now"
    late(store, 5, 6, 7)  # 2 to 4 were begun before anybody knew
    assert told() == 120.0
    late(store, 8)
    assert told() == 240.0
    for version in range(10, 10 + parts.EASE):
        put_parts(store, 0, 1, 2, version=version)
    assert told() == 120.0
    late(store, *range(100, 200))
    assert told() == 60.0 * 2**parts.MOST_DOUBLINGS


def test_parts_of_generations_that_ended_say_nothing_of_how_fast_hosts_are(store):
    for generation in range(1, 10):
        put_parts(store, 0, version=10 + generation, generation=generation)
    assert store.parts.stretch == 1


def test_a_newer_one_that_comes_while_an_older_one_is_made_whole_is_no_damage(store, monkeypatch):
    real, data = store_module.assemble, b"newer"

    async def race() -> None:
        await store.put(point(0), lambda: 0, body(data_of(0)))
        await store.put(point(1), lambda: 0, body(data_of(1)))
        begun, go = asyncio.Event(), threading.Event()

        def slow(found: parts.CompleteSet, draft: Path) -> Checkpoint:
            loop.call_soon_threadsafe(begun.set)
            assert go.wait(30)
            return real(found, draft)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(store_module, "assemble", slow)
        last = asyncio.ensure_future(store.put(point(2), lambda: 0, body(data_of(2))))
        await begun.wait()
        await store.put(Checkpoint(11, sha(data), 0, 1), lambda: 0, body(data))
        go.set()
        await last

    asyncio.run(race())
    assert ([c.version for c in store.kept], store.problem) == ([11], "")


# ---- killed at any write


class Killed(BaseException):
    pass


def light(patch: pytest.MonkeyPatch, at: int) -> None:
    """From now on the process dies right after the `at`-th change of the disk; nothing that it still tries takes
    effect."""
    seen = [0]

    def tap(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def effect(*args: object, **named: object) -> object:
            if seen[0] >= at:
                raise Killed
            result = real(*args, **named)
            seen[0] += 1
            if seen[0] == at:
                raise Killed
            return result

        patch.setattr(owner, name, effect)

    for owner, name in ((Path, "replace"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir"), (shutil, "rmtree"),
                        (os, "link"), (os, "fsync"), (store_module, "write_json")):
        tap(owner, name)


def is_killed(store: CheckpointStore, at: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        light(patch, at)
        try:
            put_parts(store, 2)
        except Killed:
            return True
    return False


def test_killed_at_any_write_it_finds_parts_or_the_whole(tmp_path: Path):
    at = 0
    while True:
        at += 1
        store = CheckpointStore(tmp_path / str(at), keep=2)
        put_parts(store, 0, 1)
        if not is_killed(store, at):
            break
        again = restart(store)
        join_all(again)
        if not again.kept:
            assert put_parts(again, 2) == [whole()]  # the agent got no answer: it sends it again
        assert again.kept == (whole(),), at
        assert checkpoint_sets.read(again.path(whole())) == files_of(10)
        assert again.take_news("job", 0.0) == []
        assert names(again) == WHOLE
        assert json.loads((again.folder / "10-1.json").read_text())["digest"] == whole().digest
    assert at > 12  # places to die at


def test_comparing_a_large_one_lets_the_loop_go_on(store):
    large = files_of(10, pieces=(random.Random(7).randbytes(1 << 20) * 32,))
    put(store, file_of(large, NAMES[0]), large[NAMES[0]])
    put(store, file_of(large, NAMES[1]), large[NAMES[1]])
    again = restart(store)  # what an earlier process has compared

    async def scene() -> int:
        last, turns = asyncio.create_task(again.put(file_of(large, NAMES[2]), lambda: 0, body(large[NAMES[2]]))), 0
        while not last.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(scene()) > 10


# ---- with the whole dispatcher


async def trained(stage: Stage) -> tuple[str, str]:
    await stage.up(1)
    job = await stage.submit(Script(steps=10_000), (1, 1))
    return f"/v1/jobs/{job}/checkpoints", (await stage.at_version(job, 3)).workers[0].host


async def send(stage: Stage, path: str, host: str, its: Checkpoint, data: bytes, **other: object) -> tuple[int, dict]:
    asked = {"generation": its.generation, "digest": its.digest, "name": its.name} | other
    query = "&".join(f"{key}={value}" for key, value in asked.items())
    return await stage.call("PUT", f"{path}/{its.version}?{query}", token=stage.token(host), data=data, ok=False)


def test_parts_sent_by_hosts_become_the_checkpoint_that_a_job_goes_on_from(play):
    async def scene(stage: Stage) -> None:
        path, host = await trained(stage)
        for index in (2, 0, 0):
            await send(stage, path, host, point(index, 500), data_of(index, 500))
        assert await stage.events("CheckpointKept") == []
        assert (await stage.call("GET", f"{path}/500", ok=False))[0] == 404
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        await send(stage, path, host, point(1, 500), data_of(1, 500))
        for index, name in enumerate(NAMES):
            found = (await stage.call("GET", f"{path}/500/{name}"))[1]
            assert found == (json.loads(data_of(index, 500)) if name.endswith(".json") else data_of(index, 500))
        for name in ("__1_0.distcp", "..", "%2e%2e%2f%2e%2e%2fjob.json"):
            assert (await stage.call("GET", f"{path}/500/{name}", ok=False))[0] == 404
        assert [(e["version"], e["digest"], e["bytes"]) for e in await stage.events("CheckpointKept")] == [
            (500, whole(500).digest, whole(500).bytes)]
        stage.cloud.interrupt(host, None)
        await stage.until("a new generation", lambda: stage.world.history[-1][3] == 500)

    play(scene, spec(1))


def test_parts_that_a_killed_dispatcher_had_not_put_together_are_by_the_next_and_told(play):
    async def scene(stage: Stage) -> None:
        path, host = await trained(stage)
        for index in (0, 1):
            await send(stage, path, host, point(index, 500), data_of(index, 500))
        await stage.stop_dispatcher()
        job = path.split("/")[3]
        folder = stage.home / "jobs" / job / "checkpoints" / "500-1.parts"
        (folder / f"{NAMES[2]}-{point(2, 500).digest}").write_bytes(data_of(2, 500))
        await stage.start_dispatcher()
        await stage.until("the whole", lambda: joined(stage, job))
        assert [e["version"] for e in await stage.events("CheckpointKept")] == [500]

    play(scene, spec(1))


async def joined(stage: Stage, job: str) -> bool:
    return (await stage.job(job)).checkpoint == 500


def test_a_part_that_cannot_be_is_refused_by_field(play):
    async def scene(stage: Stage) -> None:
        path, host = await trained(stage)
        for words, other in (("part: expected a whole number below parts=3, got 3", {"part": 3, "parts": 3}),
                             ("name: '../job.json' is no file of a checkpoint", {"name": "../job.json"}),
                             ("name: '' is no file of a checkpoint", {"name": "", "parts": 3}),
                             ("parts: expected a whole number from 1 to 4096, got 4097", {"parts": 4097}),
                             ("parts: expected a whole number from 1 to 4096, got 0", {"parts": 0}),
                             ("parts: expected a number from 0 on, got 'x'", {"parts": "x"}),
                             ("digest: the body has sha256", {"digest": "0" * 64})):
            status, said = await send(stage, path, host, point(1, 500), data_of(1, 500), **other)
            assert (status, said["error"][:len(words)]) == (400, words)
        grant = SealKey(stage.boot.fleet_secret).grant(path.split("/")[3], 2)
        newer = Checkpoint(400, sha(b"newer"), 0, 2)
        assert (await send(stage, path, host, newer, b"newer", grant=grant, name=""))[0] == 200
        assert (await send(stage, path, host, point(1, 500), data_of(1, 500)))[0] == 409

    play(scene, spec(1))
