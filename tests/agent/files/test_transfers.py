"""Downloads of checkpoints that break off: they go on where they stopped, and what arrives is checked whole."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from spotfleet.agent import target_copies
from spotfleet.agent.boot import AgentBoot
from spotfleet.agent.target_copies import TargetCopies
from spotfleet.agent.transfer import RETRYABLE, Transfers
from spotfleet.errors import SpotfleetError
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage.checkpoint_folder import problem_in
from spotfleet.storage.folder import PROBE, arriving_name, fleet_store
from tests.support.dispatcher.checkpoint_sets import files_of, read, whole, write

DATA = bytes(range(256)) * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()


class Server:
    """A dispatcher's route that sends so many bytes and then breaks off."""

    def __init__(self, file: Path) -> None:
        self.file, self.breaks_at, self.ranges = file, 0, list[str]()
        self.has_ranges = True

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.ranges.append(request.headers.get("Range", ""))
        if not self.breaks_at:
            return web.FileResponse(self.file) if self.has_ranges else web.Response(body=self.file.read_bytes())
        start = int((self.ranges[-1] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        response = web.StreamResponse(status=206 if self.ranges[-1] else 200,
                                      headers={"Content-Length": str(len(DATA) - start)})
        await response.prepare(request)
        await response.write(DATA[start:start + self.breaks_at])
        request.transport.abort()  # type: ignore[union-attr]
        return response


Scene = Callable[[Server, Callable[[], Awaitable[list[int]]]], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scene], None]:
    """Run a scene with a server and the download of version 20 from it, which returns the sizes of its pieces."""
    target = tmp_path / "target.pt"

    async def main(scene: Scene) -> None:
        server, app = Server(tmp_path / "kept"), web.Application()
        server.file.write_bytes(DATA)
        app.router.add_get("/v1/jobs/j/checkpoints/20", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            transfers = Transfers(aiohttp.ClientSession(), SimpleNamespace(url=f"http://127.0.0.1:{port}"))  # type: ignore[arg-type]

            async def download() -> list[int]:
                sizes: list[int] = []
                await transfers.checkpoint("j", Checkpoint(20, DIGEST, 0, 1), target, sizes.append)
                return sizes

            await scene(server, download)
            await transfers.close()
        finally:
            await runner.cleanup()

    return lambda scene: asyncio.run(main(scene))


def test_a_download_that_broke_off_goes_on_where_it_stopped(play, tmp_path: Path):
    async def scene(server: Server, download: Callable[[], Awaitable[list[int]]]) -> None:
        server.breaks_at = 100_000
        for _ in range(2):
            with pytest.raises(RETRYABLE):
                await download()
        held = (tmp_path / "target.pt.part").stat().st_size
        assert held == 200_000
        server.breaks_at = 0
        sizes = await download()
        assert (sizes[0], sum(sizes)) == (held, len(DATA)) and server.ranges == ["", "bytes=100000-", "bytes=200000-"]
        assert (tmp_path / "target.pt").read_bytes() == DATA and not (tmp_path / "target.pt.part").exists()

    play(scene)


@pytest.mark.parametrize("held", [DATA + b"more", DATA])
def test_a_beginning_that_is_not_shorter_than_the_file_is_dropped(play, tmp_path: Path, held: bytes):
    async def scene(server: Server, download: Callable[[], Awaitable[list[int]]]) -> None:
        (tmp_path / "target.pt.part").write_bytes(held)
        with pytest.raises(RETRYABLE):
            await download()
        assert sum(await download()) == len(DATA)

    play(scene)


def test_a_beginning_of_another_file_is_found_by_the_digest_and_dropped(play, tmp_path: Path):
    async def scene(server: Server, download: Callable[[], Awaitable[list[int]]]) -> None:
        (tmp_path / "target.pt.part").write_bytes(b"another")
        with pytest.raises(SpotfleetError, match="has digest"):
            await download()
        assert sum(await download()) == len(DATA)

    play(scene)


def test_a_sender_without_ranges_sends_all_of_it_again(play, tmp_path: Path):
    async def scene(server: Server, download: Callable[[], Awaitable[list[int]]]) -> None:
        (tmp_path / "target.pt.part").write_bytes(DATA[:1000])
        server.has_ranges = False
        assert sum(await download()) == len(DATA)

    play(scene)


def test_a_folder_arrives_whole_and_goes_on_with_the_file_that_broke_off(tmp_path: Path):
    files = files_of(20, pieces=(DATA, b"rank 1's"))
    sent, breaks = write(files, tmp_path / "sent"), [True]
    asked: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        asked.append((name, request.headers.get("Range", "")))
        if name != "__0_0.distcp" or not breaks:
            return web.FileResponse(sent / name)
        breaks.clear()
        response = web.StreamResponse(headers={"Content-Length": str(len(DATA))})
        await response.prepare(request)
        await response.write(DATA[:100_000])
        request.transport.abort()  # type: ignore[union-attr]
        return response

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/v1/jobs/j/checkpoints/20/{name}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            transfers = Transfers(aiohttp.ClientSession(), SimpleNamespace(url=url))  # type: ignore[arg-type]
            target, sizes = tmp_path / "20-x", list[int]()
            with pytest.raises(RETRYABLE):
                await transfers.checkpoint("j", whole(files), target, sizes.append)
            assert not target.exists()
            await transfers.checkpoint("j", whole(files), target, sizes.append)
            assert (read(target), problem_in(target, whole(files).digest)) == (files, "")
            assert [rest for name, rest in asked if name == "__0_0.distcp"] == ["", "bytes=100000-"]
            assert [name for name, _ in asked].count("manifest.json") == 1
            for damaged in ("manifest.json", "__1_0.distcp"):
                (sent / damaged).write_bytes(files[damaged][:-1] + b"?")
                with pytest.raises(SpotfleetError, match="has digest"):
                    await transfers.checkpoint("j", whole(files), tmp_path / damaged, sizes.append)
                assert not (tmp_path / damaged).exists()
                (sent / damaged).write_bytes(files[damaged])
            await transfers.close()
        finally:
            await runner.cleanup()

    asyncio.run(main())


def fetched(tmp_path: Path, files: dict[str, bytes], copies: TargetCopies) -> list[str]:
    """Download a folder; return the names for which the dispatcher was asked."""
    sent, asked = tmp_path / "sent", list[str]()
    if not sent.exists():
        write(files, sent)

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.match_info["name"])
        return web.FileResponse(sent / asked[-1])

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/v1/jobs/j/checkpoints/20/{name}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            endpoint = SimpleNamespace(url=f"http://127.0.0.1:{runner.addresses[0][1]}")
            transfers = Transfers(aiohttp.ClientSession(), endpoint, copies)  # type: ignore[arg-type]
            target, sizes = tmp_path / "restore" / "20-x", list[int]()
            target.parent.mkdir(exist_ok=True)
            await transfers.checkpoint("j", whole(files), target, sizes.append)
            assert read(target) == files
            assert sum(sizes) >= sum(map(len, files.values()))
            shutil.rmtree(target)
            await transfers.close()
        finally:
            await runner.cleanup()

    asyncio.run(main())
    return asked


@pytest.fixture
def copies(tmp_path: Path) -> TargetCopies:
    target = str(tmp_path / "target")
    return TargetCopies(AgentBoot("f", "f-1", "local", 1, "https://127.0.0.1:1", "CA", "t", target=target))


def test_a_host_reads_from_the_target_what_is_right_there_and_asks_the_dispatcher_for_the_rest(tmp_path: Path, copies):
    files = files_of(20, pieces=(DATA, b"rank 1's"))
    assert sorted(fetched(tmp_path, files, copies)) == sorted(files)
    there = write(files, fleet_store(f"{tmp_path}/target", "f", "CA").path("jobs/j/checkpoints/20-1"))
    assert fetched(tmp_path, files, copies) == []
    (there / "__0_0.distcp").write_bytes(DATA[:-1] + b"?")
    (there / ".metadata").unlink()
    assert fetched(tmp_path, files, copies) == ["__0_0.distcp", ".metadata"]
    (there / "manifest.json").write_bytes(files_of(20)["manifest.json"])
    assert "manifest.json" in fetched(tmp_path, files, copies)
    assert list((tmp_path / "restore").iterdir()) == []


def test_a_target_that_hangs_is_waited_for_once_and_the_dispatcher_is_asked(tmp_path: Path, copies, monkeypatch):
    files, go_on, reads = files_of(20), threading.Event(), []
    write(files, fleet_store(f"{tmp_path}/target", "f", "CA").path("jobs/j/checkpoints/20-1"))

    def hangs(path: Path) -> Iterator[bytes]:
        reads.append(path.name)
        yield b"{"
        go_on.wait(60)

    monkeypatch.setattr(target_copies, "read_range", hangs)
    monkeypatch.setattr(target_copies, "STALL_S", 0.1)
    try:
        assert (sorted(fetched(tmp_path, files, copies)), reads) == (sorted(files), ["manifest.json"])
    finally:
        go_on.set()
        copies._reading.join(30)


def written(copies: TargetCopies, file: Path, made: Checkpoint) -> tuple[bool, int]:
    """Write one file of a checkpoint to the target; return whether it is there, and the bytes that moved."""
    sizes: list[int] = []
    return asyncio.run(copies.put("j", made, file, sizes.append)), sum(sizes)


def test_a_host_writes_to_the_target_only_where_the_dispatchers_probe_is(tmp_path: Path, copies):
    (tmp_path / "file").write_bytes(DATA)
    made, there = Checkpoint(20, DIGEST, 0, 1, name="__0_0.distcp"), fleet_store(f"{tmp_path}/target", "f", "CA")
    assert written(copies, tmp_path / "file", made) == (False, 0) and not (tmp_path / "target").exists()
    there.put(PROBE, [b"probe"])
    assert written(copies, tmp_path / "file", made) == (True, len(DATA))
    assert there.path(arriving_name("j", made)).read_bytes() == DATA
    assert written(copies, tmp_path / "file", made) == (True, 0)  # sent again after a lost answer
    changed = Checkpoint(21, "0" * 64, 0, 1, name="__0_0.distcp")
    assert written(copies, tmp_path / "file", changed)[0] is False
    assert written(copies, tmp_path / "gone", made)[0] is False


def test_a_target_that_hangs_is_written_to_once_and_the_dispatcher_gets_the_file(tmp_path: Path, copies, monkeypatch):
    (tmp_path / "file").write_bytes(DATA)
    fleet_store(f"{tmp_path}/target", "f", "CA").put(PROBE, [b"probe"])
    made, go_on, tries = Checkpoint(20, DIGEST, 0, 1, name="__0_0.distcp"), threading.Event(), []

    def hangs(path: Path) -> Iterator[bytes]:
        tries.append(path)
        go_on.wait(60)
        yield b""

    monkeypatch.setattr(target_copies, "read_range", hangs)
    monkeypatch.setattr(target_copies, "STALL_S", 0.1)
    try:
        for _ in range(2):
            assert written(copies, tmp_path / "file", made) == (False, 0)
        assert len(tries) == 1
    finally:
        go_on.set()
        copies._writing.join(30)
    assert fleet_store(f"{tmp_path}/target", "f", "CA").names() == [PROBE]


def test_the_probe_is_read_again_and_again_and_none_is_reported_while_the_target_is_away(
        tmp_path: Path, copies, monkeypatch):
    monkeypatch.setattr(target_copies, "PROBE_S", 0.01)
    there = fleet_store(f"{tmp_path}/target", "f", "CA")

    async def main() -> None:
        running = asyncio.create_task(copies.run())
        for probe in ("", "one", "two", ""):
            if probe:
                there.put(PROBE, [probe.encode()])
            else:
                there.delete(PROBE)
            async with asyncio.timeout(30):
                while copies.probe != probe:
                    await asyncio.sleep(0.005)
        running.cancel()

    asyncio.run(main())
