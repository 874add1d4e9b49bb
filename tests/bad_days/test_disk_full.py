"""The dispatcher's disk is full: it says so, refuses what needs room, loses nothing, and goes on by itself."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import os
import sqlite3
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.dispatcher.agent_orders import OrderSender
from spotfleet.dispatcher.disk import jobfile, space
from spotfleet.errors import DiskFull, SpotfleetError
from spotfleet.fleet import reconcile
from spotfleet.fleet.ledger import Ledger
from spotfleet.model import JobSpec, Need, Nodes, Role
from spotfleet.protocol.messages import Exit, SlotOrder, WorkerOrders
from spotfleet.providers import Boot
from spotfleet.providers.local.inprocess import InProcessProvider
from spotfleet.transport.client import DispatcherClient, Endpoint
from tests.support.dispatcher.fake_fleet import ADMIN, Stage, spec
from tests.support.dispatcher.fake_workers import Script
from tests.support.local.small_disk import SmallDisk, small_disk

LONG = 1_000_000
LONGER = pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="the long form only (SPOTFLEET_LONG=1)")
DISK_MIB, RESERVE_MIB = 24, 4


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    monkeypatch.setattr(space, "RESERVE_BYTES", RESERVE_MIB << 20)
    with small_disk(tmp_path / "disk", DISK_MIB) as disk:
        yield disk


def staged(home: Path, scene: Callable, hosts: int = 1) -> None:
    async def main() -> None:
        async with Stage(home, spec(hosts)) as stage:
            await scene(stage)

    asyncio.run(main())


def alive(stage: Stage) -> bool:
    """Has nothing of the dispatcher failed?"""
    return not any(task.done() and task.exception() for task in stage.daemon._tasks)


def user(stage: Stage) -> DispatcherClient:
    return DispatcherClient(Endpoint(stage.url, ADMIN, stage.ca), patience_s=5.0)


async def refused(work: Callable[[], object]) -> SpotfleetError:
    """What a user reads."""
    with pytest.raises(SpotfleetError) as caught:
        await asyncio.to_thread(work)
    return caught.value


async def has_room(stage: Stage) -> bool:
    return "full" not in await whys(stage)


async def whys(stage: Stage) -> str:
    return (await stage.call("GET", "/v1/status"))[1]["why"]


def test_a_dispatcher_whose_disk_fills_up_refuses_what_needs_room_trains_on_and_goes_on_by_itself(small, tmp_path):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        job = await stage.submit(Script(steps=LONG), (1, 1))
        worker = (await stage.at_version(job, 3)).workers[0].worker
        data, bundle = b"tensors" * 1000, tmp_path / "bundle"
        digest = hashlib.sha256(data).hexdigest()
        bundle.write_bytes(bytes(1 << 20))
        packed = hashlib.sha256(bundle.read_bytes()).hexdigest()
        kept = f"/v1/jobs/{job}/checkpoints/5?generation=1&digest={digest}"
        later = kept.replace("/5?", "/6?")
        logs = f"/v1/jobs/{job}/logs/{worker}?offset="
        mine = {"token": stage.token(host), "ok": False}
        assert (await stage.call("PUT", kept, data=data, **mine))[0] == 200
        assert (await stage.call("POST", logs + "0", data=b"one\n", **mine))[1] == {"size": 4}

        small.fill()
        version = (await stage.job(job)).version
        full = "the dispatcher's disk is full: 0.0 MB of 25.2 MB free"
        effect = "new jobs are refused, logs and checkpoints wait for room, training goes on"
        assert f"; {full}; {effect}" in await whys(stage)
        client = user(stage)
        for work in (lambda: client.submit(JobSpec("more", run="true"), {}, wait=True),
                     lambda: client.put_bundle(packed, bundle)):
            error = await refused(work)
            assert (type(error), str(error), error.exit_code) == (DiskFull, full, 1)
            assert error.hint.startswith("running jobs go on by themselves, and `spotfleet train` works again")
        assert (await stage.call("PUT", later, data=data, **mine))[0] == 507
        assert (await stage.call("POST", logs + "4", data=b"two\n", **mine))[0] == 507
        assert (await stage.call("GET", f"/v1/jobs/{job}/checkpoints/5", **mine))[1] == data
        archive = (await stage.call("GET", "/v1/archive"))[1]
        assert brought(archive, tmp_path) > 5  # the history comes home from a full disk
        await stage.at_version(job, version + 20)
        assert alive(stage)

        small.free()
        assert (await stage.call("PUT", later, data=data, **mine))[0] == 200
        assert (await stage.call("POST", logs + "4", data=b"two\n", **mine))[1] == {"size": 8}
        await asyncio.to_thread(client.put_bundle, packed, bundle)
        await asyncio.to_thread(client.submit, JobSpec("more", run="true"), {}, wait=True)
        await stage.until("no word of a full disk", lambda: has_room(stage))
        assert list(stage.home.rglob("*.part")) == []

    staged(small.path / "dispatcher", scene)


def test_a_death_on_a_full_disk_costs_no_training(small, tmp_path):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=LONG), (1, 2))
        await stage.at_version(job, 3)
        small.fill()
        for _ in range(2):
            formed = len(stage.world.history)
            stage.kill_worker(next(iter(stage.agents)), Exit(-9))
            await stage.until("the next generation", lambda before=formed: len(stage.world.history) > before)
            await stage.at_version(job, (await stage.job(job)).version + 5)
        assert not stage.daemon.dispatcher.core.jobs[job].unsaved
        small.free()

    staged(small.path / "dispatcher", scene, hosts=2)


def brought(archive: bytes, folder: Path) -> int:
    """How many events the ledger in the archive holds."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extract("ledger.db", folder, filter="data")
    with sqlite3.connect(folder / "ledger.db") as db:
        return db.execute("SELECT count(*) FROM events").fetchone()[0]


def test_large_things_leave_room_for_what_a_restart_needs(small, tmp_path):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        big = bytes((DISK_MIB - RESERVE_MIB) << 20)
        path = f"/v1/bundles/{hashlib.sha256(big).hexdigest()}"
        status, said = await stage.call("PUT", path, data=big, ok=False)
        assert (status, said["kind"]) == (507, "DiskFull")
        assert "full" not in await whys(stage)  # for it left nothing
        small.fill(leave=1 << 20)
        await stage.call("PUT", "/v1/nodes", {"min": 1, "target": 1, "max": 7})
        assert [e["nodes"]["max"] for e in await stage.events("NodesChanged")] == [7]
        assert "the dispatcher's disk is full: 1.0 MB" in await whys(stage)

    staged(small.path / "dispatcher", scene)


@LONGER
def test_a_dispatcher_that_starts_on_a_full_disk_waits_for_room(small, caplog):
    async def scene(stage: Stage) -> None:
        hosts = await stage.up(1)
        await stage.stop_dispatcher()
        for left in stage.home.glob("ledger.db-*"):
            left.unlink()
        small.fill()
        starting = asyncio.create_task(stage.start_dispatcher())
        await stage.until("it to say so", lambda: any("cannot be written" in r.message for r in caplog.records))
        assert not starting.done()
        small.free()
        await starting
        assert await stage.up(1) == hosts

    staged(small.path / "dispatcher", scene)


def test_a_fleet_goes_down_with_a_full_disk_for_room_was_laid_by(small):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        small.fill()
        await asyncio.to_thread(user(stage).down)

        async def down() -> bool:
            return (await stage.call("GET", "/v1/status"))[1]["state"] == "down"

        await stage.until("no host", down)
        assert [name for name in stage.cloud.living() if "-d-" not in name] == []
        assert len(await stage.events("TerminateIntended")) == 2

    staged(small.path / "dispatcher", scene, 2)


class FullLedger(Ledger):
    """Takes nothing while `full`."""

    full = False

    def append(self, *events):
        if FullLedger.full and events:
            raise DiskFull(f"{self.path} cannot be written: database or disk is full", hint="make room on its disk")
        return super().append(*events)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[FullLedger]:
    FullLedger.full = False
    ledger = FullLedger(tmp_path / "ledger.db")
    try:
        yield ledger
    finally:
        FullLedger.full = False
        ledger.close()


@pytest.mark.parametrize("target", [2, 0], ids=["launch", "terminate"])
def test_a_tick_that_cannot_write_its_intent_calls_nobody(ledger: FullLedger, target: int):
    cloud = InProcessProvider()

    def tick(hosts: int) -> None:
        wanted = reconcile.Wanted("f", Role.WORKER, hosts, (Need(instance_type="cpu.small"),))
        now = cloud.clock.advance(1.0)  # type: ignore[attr-defined]
        joined = {h.request_id: "1" for h in cloud.hosts("f")}
        released = frozenset(joined)
        seen = reconcile.Observed(joined, released=released)
        reconcile.tick(wanted, ledger, cloud, lambda *_: Boot("none"), seen, now)

    reconcile.create(ledger, cloud, "f", Nodes(1, 1, 2), cloud.clock())
    tick(1)
    tick(1)
    before = cloud.living()
    FullLedger.full = True
    for _ in range(3):
        with pytest.raises(DiskFull, match="cannot be written"):
            tick(target)
    assert cloud.living() == before
    FullLedger.full = False
    for _ in range(4):
        tick(target)
    assert len(cloud.living()) == target


def test_events_wait_in_memory_and_are_written_in_order_when_there_is_room(play, monkeypatch):
    monkeypatch.setattr("spotfleet.dispatcher.recovery.first_start.Ledger", FullLedger)
    monkeypatch.setattr("spotfleet.dispatcher.journal.AGAIN_S", 0.05)
    FullLedger.full = False

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        FullLedger.full = True
        try:
            error = await refused(lambda: user(stage).set_nodes(Nodes(1, 1, 3)))
            assert isinstance(error, DiskFull) and "ledger.db cannot be written" in str(error)
            assert "the dispatcher's disk is full" in await whys(stage)
            job = await stage.submit(Script(steps=LONG), (1, 1))
            await stage.at_version(job, 3)
            assert alive(stage)
        finally:
            FullLedger.full = False
        await stage.until("the ledger", lambda: stage.daemon.dispatcher.core.journal.full is None)
        kinds = [e["kind"] for e in await stage.events()]
        assert kinds.index("NodesChanged") < kinds.index("JobSubmitted") < kinds.index("GenerationFormed")

    play(scene, spec(1))


@LONGER
def test_a_dispatcher_ends_at_once_also_with_a_full_disk(play, monkeypatch):
    monkeypatch.setattr("spotfleet.dispatcher.recovery.first_start.Ledger", FullLedger)
    FullLedger.full = False

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        FullLedger.full = True
        try:
            await refused(lambda: user(stage).set_nodes(Nodes(1, 1, 3)))
            async with asyncio.timeout(10):
                await stage.stop_dispatcher()
        finally:
            FullLedger.full = False

    play(scene, spec(1))


def test_a_restart_on_a_full_disk_orders_no_end_of_workers_whose_record_cannot_be_written(monkeypatch):
    """Else a restart would send empty orders, which end every worker of the job."""
    full = True
    monkeypatch.setattr(jobfile, "try_save", lambda _folder, _record: not full)
    order = SlotOrder("f-1/0/1", "one-1", 0, 0, WorkerOrders())
    job = SimpleNamespace(id="one-1", unsaved=True, folder=Path(), record=None, orders=lambda: {"f-1": [order]},
                          workers=SimpleNamespace(hosts=lambda: {"f-1"}))
    connections = {host: SimpleNamespace(host=host, connected=True, due=True, orders=None, wake=lambda: None)
                   for host in ("f-1", "f-2")}
    core = SimpleNamespace(jobs={"one-1": job}, connections=connections, fleet_clock=SimpleNamespace(asks=False))
    takeover = SimpleNamespace(asked=lambda host: False, missing_bundles=lambda host: ())
    sender = OrderSender(core, takeover, lambda: frozenset())

    sender.send()
    assert connections["f-1"].orders is None and connections["f-1"].due
    assert connections["f-2"].orders.workers == ()  # it has no worker of the job
    full = False
    sender.send()
    assert connections["f-1"].orders.workers == (order,)
    full, job.unsaved, job.orders = True, True, lambda: {}
    sender.send()
    assert connections["f-1"].orders.workers == (order,)  # the last ones that a restart would know


def test_no_worker_hears_of_a_generation_that_could_not_be_written_down(play, monkeypatch):
    """Else a restarted dispatcher might form another one beside it."""
    write = jobfile.write_json
    full = False

    def refuse(path: Path, value: object) -> None:
        if full and path.name == "job.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, value)

    monkeypatch.setattr(jobfile, "write_json", refuse)

    async def scene(stage: Stage) -> None:
        nonlocal full
        await stage.up(2)
        job = await stage.submit(Script(steps=LONG), (1, 2))
        await stage.at_version(job, 3)
        formed, full = len(stage.world.history), True
        stage.kill_worker(next(iter(stage.agents)), Exit(-9))
        record = stage.daemon.dispatcher.core.jobs[job]
        await stage.until("a generation that waits", lambda: record.unsaved and record.membership.generation > 1)
        before = {a.host: a.answers for a in stage.agents.values()}
        await stage.until("an answer", lambda: any(a.answers > before[a.host] for a in stage.agents.values()))
        assert len(stage.world.history) == formed and alive(stage)
        assert "its workers get no orders before the dispatcher's disk has room" in (await stage.job(job)).why
        assert record.membership.is_withheld
        full = False
        await stage.until("the next generation", lambda: len(stage.world.history) > formed)
        await stage.at_version(job, (await stage.job(job)).version + 5)

    play(scene, spec(2))


def test_a_fleet_goes_down_though_its_decision_cannot_be_written(play, monkeypatch):
    from spotfleet.dispatcher.lifecycle import shutdown

    write, full = shutdown.write_json, True

    def refuse(path: Path, value: object) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, value)

    monkeypatch.setattr(shutdown, "write_json", refuse)

    async def scene(stage: Stage) -> None:
        nonlocal full
        await stage.up(1)
        await asyncio.to_thread(user(stage).down)
        full = False
        await stage.until("the decision on disk", lambda: (stage.home / "down.json").exists())

        async def down() -> bool:
            return (await stage.call("GET", "/v1/status"))[1]["state"] == "down"

        await stage.until("no host", down)

    play(scene, spec(1))
