"""What a job that lost all its workers goes on from, with the whole dispatcher and hosts that fetch."""

from __future__ import annotations

import asyncio
import hashlib
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from spotfleet.dispatcher.checkpoints.store import RestoreInstruction
from spotfleet.dispatcher.jobs.orders import worker_orders
from spotfleet.membership.views import Orders
from spotfleet.protocol.messages import Checkpoint
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = 10_000


async def trained(stage: Stage, *versions: int) -> str:
    """A job that trains on one host and has kept these checkpoints; the job."""
    await stage.up(1)
    job = await stage.submit(Script(steps=LONG), (1, 1))
    status = await stage.at_version(job, 3)
    for version in versions:
        await keep(stage, job, status.workers[0].host, version, status.generation)
    return job


async def keep(stage: Stage, job: str, host: str, version: int, generation: int) -> None:
    data = b"state %d" % version
    digest = hashlib.sha256(data).hexdigest()
    path = f"/v1/jobs/{job}/checkpoints/{version}?generation={generation}&digest={digest}"
    await stage.call("PUT", path, token=stage.token(host), data=data)


def file_of(stage: Stage, job: str, name: str) -> Path:
    return stage.home / "jobs" / job / "checkpoints" / name


def flip(path: Path) -> None:
    """One bit, with neither size nor time changed, as a disk does it."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


async def loses_all(stage: Stage) -> int:
    """The version from which it goes on."""
    before = len(stage.world.history)
    for host in list(stage.agents):
        stage.cloud.interrupt(host, None)
    await stage.until("a new generation", lambda: len(stage.world.history) > before)
    return stage.world.history[before][3]


async def lost(stage: Stage) -> list[int]:
    return [e["version"] for e in await stage.events("CheckpointLost")]


def test_it_goes_on_from_the_newest(play):
    async def scene(stage: Stage) -> None:
        await trained(stage, 500, 600)
        assert await loses_all(stage) == 600

    play(scene, spec(1))


def test_where_a_host_finds_the_newest_damaged_it_goes_on_from_the_older(play):
    async def scene(stage: Stage) -> None:
        job = await trained(stage, 500, 600)
        flip(file_of(stage, job, "600-1.ckpt"))
        assert await loses_all(stage) == 500
        assert await lost(stage) == [600]
        assert "500 is the newest whole one" in (await stage.job(job)).why

    play(scene, spec(1))


def test_what_was_cut_short_while_the_dispatcher_was_away_is_not_sent_to_anybody(play):
    async def scene(stage: Stage) -> None:
        job = await trained(stage, 500, 600)
        await stage.stop_dispatcher()
        path = file_of(stage, job, "600-1.ckpt")
        os.truncate(path, path.stat().st_size // 2)
        for host in list(stage.agents):
            stage.cloud.interrupt(host, None)
        await stage.start_dispatcher()
        await stage.until("a new generation", lambda: len(stage.world.history) > 1)
        assert stage.world.history[1][3] == 500
        assert await lost(stage) == [600]

    play(scene, spec(1))


def test_with_none_left_it_begins_anew_and_says_so(play):
    async def scene(stage: Stage) -> None:
        job = await trained(stage, 600)
        file_of(stage, job, "600-1.ckpt").unlink()
        assert await loses_all(stage) == 0
        assert await lost(stage) == [600]
        assert "no whole one is left" in (await stage.job(job)).why

    play(scene, spec(1))


def test_nobody_begins_anew_while_a_checkpoint_is_being_read(play, monkeypatch):
    async def scene(stage: Stage) -> None:
        job = await trained(stage, 600)
        store = stage.daemon.dispatcher.core.jobs[job].checkpoints
        reading = asyncio.Event()

        async def slow(checkpoint) -> bool:
            await reading.wait()
            return await type(store).check(store, checkpoint)

        monkeypatch.setattr(store, "check", slow)
        os.utime(file_of(stage, job, "600-1.ckpt"))
        going_on = asyncio.create_task(loses_all(stage))
        await stage.until("its word", lambda: why_of(stage, job, "reads checkpoint 600"))
        await stage.until("another worker that is ready", lambda: is_ready(stage))
        assert not going_on.done()
        reading.set()
        assert await going_on == 600

    play(scene, spec(1))


async def why_of(stage: Stage, job: str, words: str) -> bool:
    return words in (await stage.job(job)).why


def is_ready(stage: Stage) -> bool:
    name = stage.world.started[-1]
    return name in stage.world.workers and stage.world.workers[name].stage.value == "ready"


def test_hosts_share_what_comes_from_the_dispatcher_and_each_reads_an_object_store():
    def sharers(kept: Checkpoint | None) -> tuple[str, ...]:
        checkpoints = SimpleNamespace(offer=lambda: RestoreInstruction(kept), parts=SimpleNamespace(stretch=1), url="",
                                      keep=2, seals=None)
        group = SimpleNamespace(leaves_s=None, orders_of=lambda workers: dict.fromkeys(
            workers, Orders(None, founded=True, needs_restore=True)))
        found = worker_orders(group, checkpoints, 60.0, ["b/0/1", "a/0/1", "b/1/1"], save=False)  # type: ignore[arg-type]
        assert {o.restore for o in found.values()} == {kept}
        (hosts,) = {o.sharers for o in found.values()}
        return hosts

    kept = Checkpoint(5, "d" * 64, 0, 1, name="manifest.json")
    assert sharers(kept) == ("a", "b")
    assert sharers(replace(kept, url="s3://bucket/5-1")) == sharers(None) == ()
