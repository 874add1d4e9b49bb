"""Working directories in pieces: from a laptop to the real dispatcher and on to a host, byte by byte on the wire."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from spotfleet import bundle
from spotfleet.agent.endpoint import DispatcherEndpoint
from spotfleet.agent.files.blobs import Blobs
from spotfleet.agent.transfer import Transfers
from spotfleet.api.lifecycle.upload import Shipped, ship
from spotfleet.bundle import blob, grouping
from spotfleet.dispatcher.checkpoints import backup
from spotfleet.errors import DispatcherUnreachable, UsageError
from spotfleet.model import CheckpointSpec, JobSpec
from spotfleet.storage.folder import fleet_store
from spotfleet.transport import certs
from spotfleet.transport.client import DispatcherClient, Endpoint
from tests.support.dispatcher.fake_fleet import ADMIN, Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = Script(steps=1_000_000)
FILES, FILE_BYTES = 200, 10_000


class Wire:
    """Forwards to the dispatcher and counts; after `cut_at` bytes from the caller it breaks every connection."""

    def __init__(self, port: int) -> None:
        self.to, self.port, self.up, self.down = port, 0, 0, 0
        self.cut_at: int | None = None

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    def taken(self) -> tuple[int, int]:
        """Bytes up and down since the last call."""
        seen, self.up, self.down = (self.up, self.down), 0, 0
        return seen

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, away = await asyncio.open_connection("127.0.0.1", self.to)
        except OSError:
            writer.close()
            return

        async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, count: Callable[[int], None]) -> None:
            with suppress(OSError):
                while data := await source.read(1 << 16):
                    count(len(data))
                    if self.cut_at is not None and self.up >= self.cut_at:
                        break
                    sink.write(data)
                    await sink.drain()
            for each in (writer, away):
                each.close()

        await asyncio.gather(carry(reader, away, self._sent), carry(there, writer, self._got))

    def _sent(self, size: int) -> None:
        self.up += size

    def _got(self, size: int) -> None:
        self.down += size


class Laptop:
    def __init__(self, stage: Stage, wire: Wire, folder: Path, patience_s: float = 10.0) -> None:
        self.client = DispatcherClient(Endpoint(f"https://127.0.0.1:{wire.port}", ADMIN, stage.ca),
                                       patience_s=patience_s)
        self.house, self.work, self.said = folder / "house", folder / "work", []
        rng = random.Random(1)
        for number in range(FILES):
            path = self.work / f"p{number % 5}/{number:04d}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(rng.randbytes(FILE_BYTES))

    async def ship(self) -> Shipped:
        return await asyncio.to_thread(ship, self.client, self.work, {}, self.house, (), self.said.append)

    def edit(self) -> None:
        path = self.work / "p2/0042.py"
        path.write_bytes(path.read_bytes()[:-1] + b"!")


async def fetch(stage: Stage, wire: Wire, host: str, digest: str, into: Path) -> None:
    into.mkdir(parents=True)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=certs.client_context(stage.ca)),
                                     headers={"Authorization": f"Bearer {stage.token(host)}"}) as session:
        where = DispatcherEndpoint(f"https://127.0.0.1:{wire.port}")
        await Blobs(into.parent / "cache", Transfers(session, where)).fill("job", digest, into, lambda _: None)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    for name, size in (("LEAST_BYTES", 20_000), ("USUAL_BYTES", 40_000), ("MOST_BYTES", 120_000)):
        monkeypatch.setattr(grouping, name, size)
    monkeypatch.setattr(blob, "RACY_S", -3600.0)  # times are believed at once


def test_after_a_changed_line_only_its_piece_travels_to_the_dispatcher_and_on_to_a_host(play, tmp_path, monkeypatch):
    read: list[str] = []
    make = bundle.make
    monkeypatch.setattr(bundle, "make", lambda members, *more: read.extend(s.file.name for s in members)
                        or make(members, *more))

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        async with Wire(stage.port) as wire:
            laptop = Laptop(stage, wire, tmp_path)
            whole = FILES * FILE_BYTES
            first = await laptop.ship()
            up, _ = wire.taken()
            assert whole < up < 1.1 * whole and len(read) == FILES
            job = await stage.submit(LONG, (1, 1), bundle=first.sha256)
            host = (await stage.at_version(job, 1)).workers[0].host
            await fetch(stage, wire, host, first.sha256, tmp_path / "host/1")
            assert whole < wire.taken()[1] < 1.1 * whole

            read.clear()
            assert await laptop.ship() == first
            assert wire.taken()[0] < 0.02 * whole and read == []

            laptop.edit()
            second = await laptop.ship()
            assert wire.taken()[0] < 0.1 * whole and 0 < len(read) <= 14
            await stage.call("POST", f"/v1/jobs/{job}/cancel")
            job = await stage.submit(LONG, (1, 1), bundle=second.sha256)
            await stage.at_version(job, 1)
            await fetch(stage, wire, host, second.sha256, tmp_path / "host/2")
            assert wire.taken()[1] < 0.1 * whole
            assert files(tmp_path / "host/2") == files(laptop.work)

    play(scene, spec(1))


def test_an_upload_that_broke_off_goes_on_where_it_was(play, tmp_path):
    async def scene(stage: Stage) -> None:
        async with Wire(stage.port) as wire:
            laptop, whole = Laptop(stage, wire, tmp_path, patience_s=1.0), FILES * FILE_BYTES
            wire.cut_at = whole // 2
            with pytest.raises(DispatcherUnreachable):
                await laptop.ship()
            wire.cut_at, held = None, sum(p.stat().st_size for p in (stage.home / "bundles").iterdir())
            assert held > whole // 4
            wire.taken()
            shipped = await laptop.ship()
            assert wire.taken()[0] < 1.1 * (whole - held) + 20_000
            await stage.submit(LONG, (1, 1), bundle=shipped.sha256)

    play(scene, spec(1))


def test_a_job_whose_pieces_are_not_all_there_is_refused_and_they_are_named(play, tmp_path):
    async def scene(stage: Stage) -> None:
        async with Wire(stage.port) as wire:
            laptop = Laptop(stage, wire, tmp_path)
            shipped = await laptop.ship()
            job = JobSpec("t", run="true", bundle=shipped.sha256)

            async def refused() -> str:
                with pytest.raises(UsageError) as caught:
                    await asyncio.to_thread(laptop.client.submit, job, {}, wait=True)
                return str(caught.value)

            lost = shipped.blobs[3]
            (stage.home / "bundles" / lost).unlink()
            count = len(shipped.blobs) - 1
            assert await refused() == (f"spec.bundle: 1 of {count} pieces of {shipped.sha256} have not been uploaded: "
                                       f"{lost}")
            (stage.home / "bundles" / shipped.sha256).unlink()
            assert await refused() == f"spec.bundle: {shipped.sha256} has not been uploaded"
            assert await asyncio.to_thread(laptop.client.missing_blobs, shipped.blobs) == {lost, shipped.sha256}
            assert await laptop.ship() == shipped
            await asyncio.to_thread(laptop.client.submit, job, {}, wait=True)

    play(scene, spec(1))


def test_a_manifest_of_another_version_or_a_damaged_one_is_refused_at_once(play):
    async def scene(stage: Stage) -> None:
        for data, why in ((b"spotfleet bundle 2\n...", "is of version 2"), (b"spotfleet bundle 1\n...", "damaged")):
            digest = hashlib.sha256(data).hexdigest()
            await stage.call("PUT", f"/v1/bundles/{digest}", data=data)
            body = {"spec": {"name": "t", "run": "x", "bundle": digest}, "wait": True}
            status, said = await stage.call("POST", "/v1/jobs", body, ok=False)
            assert status == 400 and why in said["error"]
        for asked in ({}, {"digests": ["x"]}, {"digests": [["0" * 64]]}, {"digests": "0" * 64}):
            assert (await stage.call("POST", "/v1/bundles/missing", asked, ok=False))[0] == 400

    play(scene, spec(1))


def test_a_blob_that_is_too_large_is_refused(play, monkeypatch):
    monkeypatch.setattr("spotfleet.dispatcher.http.bundles.LIMIT_BLOB_BYTES", 1000)

    async def scene(stage: Stage) -> None:
        data = bytes(1001)
        path = f"/v1/bundles/{hashlib.sha256(data).hexdigest()}"
        status, said = await stage.call("PUT", path, data=data, ok=False)
        assert (status, said["error"]) == (413, "the body exceeds 1000 bytes")

    play(scene, spec(1))


def test_a_host_has_to_do_with_the_pieces_of_its_own_jobs_only(play, tmp_path):
    async def scene(stage: Stage) -> None:
        first, second = await stage.up(2)
        async with Wire(stage.port) as wire:
            shipped = await Laptop(stage, wire, tmp_path).ship()
        job = await stage.submit(LONG, (1, 1), bundle=shipped.sha256)
        mine = (await stage.at_version(job, 1)).workers[0].host
        other = second if mine == first else first
        piece, asked = shipped.blobs[1], {"digests": list(shipped.blobs)}
        data = (stage.home / "bundles" / piece).read_bytes()
        for host, status in ((mine, 200), (other, 403)):
            token = stage.token(host)
            assert (await stage.call("GET", f"/v1/bundles/{piece}", token=token, ok=False))[0] == status
            assert (await stage.call("PUT", f"/v1/bundles/{piece}", data=data, token=token, ok=False))[0] == status
            assert (await stage.call("POST", "/v1/bundles/missing", asked, token=token, ok=False))[0] == status

    play(scene)


def test_manifest_and_pieces_are_asked_of_a_host_until_all_are_back(play, tmp_path, monkeypatch):
    monkeypatch.setattr("spotfleet.dispatcher.agent_orders.RESEND_S", 0.2)

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        async with Wire(stage.port) as wire:
            shipped = await Laptop(stage, wire, tmp_path).ship()
        job = await stage.submit(LONG, bundle=shipped.sha256)
        await stage.at_version(job, 5)
        agent = next(iter(stage.agents.values()))
        agent.bundles.update({d: (stage.home / "bundles" / d).read_bytes() for d in shipped.blobs})
        late = {d: agent.bundles.pop(d) for d in shipped.blobs[1:3]}
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        folder = stage.home / "bundles"
        await stage.until("most of it", lambda: folder.is_dir() and len(list(folder.glob("[!.]*"))) == len(
            shipped.blobs) - len(late))
        answers = agent.answers
        await stage.until("more orders", lambda: agent.answers > answers + 2 and agent.orders)
        assert agent.orders is not None and agent.orders.send == (shipped.sha256,)
        agent.bundles.update(late)
        await stage.until("the rest", lambda: all((folder / d).exists() for d in shipped.blobs))
        await stage.until("no more orders", lambda: not any(a.orders and a.orders.send
                                                            for a in stage.agents.values()))

    play(scene)


def test_pieces_are_copied_to_the_target_fetched_from_there_and_dropped_after_the_job(play, tmp_path, monkeypatch):
    monkeypatch.setattr(backup, "KEEP_S", 0.1)
    target = tmp_path / "target"
    target.mkdir()

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        async with Wire(stage.port) as wire:
            laptop = Laptop(stage, wire, tmp_path)
            shipped = await laptop.ship()
            job = await stage.submit(LONG, (1, 1), bundle=shipped.sha256)
            await stage.at_version(job, 3)
            there = fleet_store(str(target), stage.boot.fleet, stage.boot.ca)
            names = sorted(f"bundles/{digest}" for digest in shipped.blobs)
            await stage.until("the copies", lambda: there.names("bundles") == names)
            await stage.until("the record", lambda: there.names(f"jobs/{job}"))
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        folder = stage.home / "bundles"
        await stage.until("the pieces", lambda: all((folder / d).exists() for d in shipped.blobs))
        await stage.until("the job", lambda: job in stage.daemon.dispatcher.core.jobs)
        await stage.call("POST", f"/v1/jobs/{job}/cancel")
        await stage.until("nothing of it at the target", lambda: there.names("bundles") == [])

    play(scene, replace(spec(1), checkpoint=CheckpointSpec(target=str(target))))
