"""What a host fetches of a working directory, what it keeps, and what it sends back."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from spotfleet import bundle
from spotfleet.agent.files import blobs
from spotfleet.agent.files.blobs import Blobs
from spotfleet.bundle import grouping
from spotfleet.errors import DiskFull


class Dispatcher:
    """What `Transfers` reaches: blobs by digest, over links that a test may break."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.served: list[str] = []
        self.at_once = self.most_at_once = 0
        self.before: Callable[[str], object] = lambda digest: None  # may raise

    def hold(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    def pack(self, work: Path) -> str:
        packed = bundle.pack(bundle.scan(work), lambda made: self.hold(made.blob))
        return self.hold(bundle.dump(packed.manifest))

    # ---- as `Transfers`

    async def bundle(self, digest: str, target: Path, came: Callable[[int], None]) -> None:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await asyncio.sleep(0.001)
            self.before(digest)
            if digest not in self.blobs:
                raise aiohttp.ClientPayloadError("404")
            target.write_bytes(self.blobs[digest])
            came(len(self.blobs[digest]))
            self.served.append(digest)
        finally:
            self.at_once -= 1

    async def missing(self, digests: list[str]) -> list[str]:
        return [digest for digest in digests if digest not in self.blobs]

    async def put_bundle(self, digest: str, file: Path) -> int:
        assert self.hold(file.read_bytes()) == digest
        return 200


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    for name, size in (("LEAST_BYTES", 100), ("USUAL_BYTES", 200), ("MOST_BYTES", 400), ("ENTRY_BYTES", 8)):
        monkeypatch.setattr(grouping, name, size)
    monkeypatch.setattr("spotfleet.agent.transfer.FIRST_BACKOFF_S", 0.001)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    rng = random.Random(1)
    (tmp_path / "work/d").mkdir(parents=True)
    for number in range(60):
        (tmp_path / f"work/d/{number:03d}.py").write_bytes(rng.randbytes(60))
    return tmp_path / "work"


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher()


@pytest.fixture
def host(tmp_path: Path, dispatcher: Dispatcher) -> Blobs:
    return Blobs(tmp_path / "host", dispatcher)  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def fill(host: Blobs, digest: str, into: Path, job: str = "job", said: list[str] | None = None) -> dict[str, bytes]:
    into.mkdir()
    asyncio.run(host.fill(job, digest, into, (said if said is not None else []).append))
    return files(into)


def test_after_a_change_of_one_file_a_host_fetches_the_manifest_and_one_piece(work, dispatcher, host, tmp_path):
    assert fill(host, dispatcher.pack(work), tmp_path / "1") == files(work)
    assert len(dispatcher.served) > 10 and dispatcher.most_at_once == blobs.AT_ONCE
    dispatcher.served.clear()
    (work / "d/030.py").write_bytes(b"y" * 60)
    digest = dispatcher.pack(work)
    assert fill(host, digest, tmp_path / "2", "next") == files(work)
    assert dispatcher.served[0] == digest and len(dispatcher.served) == 2


def test_a_transfer_that_breaks_off_goes_on_with_the_missing_pieces(work, dispatcher, host, tmp_path):
    digest = dispatcher.pack(work)

    def cut(_: str) -> None:
        if len(dispatcher.served) == 5:
            raise RuntimeError("the agent is killed")

    dispatcher.before = cut
    with pytest.raises(RuntimeError):
        fill(host, digest, tmp_path / "1")
    first, dispatcher.before = list(dispatcher.served), lambda _: None
    assert fill(Blobs(tmp_path / "host", dispatcher), digest, tmp_path / "2") == files(work)
    assert len(dispatcher.served) == len(set(dispatcher.served)) and dispatcher.served[:5] == first


def test_a_dispatcher_that_is_away_or_lacks_a_piece_is_waited_for(work, dispatcher, host, tmp_path):
    digest = dispatcher.pack(work)
    lost = next(d for d in dispatcher.blobs if d != digest)
    data, tries = dispatcher.blobs.pop(lost), []

    def come_back(asked: str) -> None:
        tries.append(asked)
        if tries.count(lost) == 3:
            dispatcher.blobs[lost] = data

    dispatcher.before = come_back
    assert fill(host, digest, tmp_path / "1") == files(work)
    assert tries.count(lost) == 3


def test_a_job_whose_pieces_are_lost_does_not_keep_another_waiting(work, dispatcher, host, tmp_path):
    lost = dispatcher.pack(work)
    for digest in set(dispatcher.blobs) - {lost}:
        del dispatcher.blobs[digest]
    for file in work.rglob("*.py"):
        file.write_bytes(file.name.encode())
    found = dispatcher.pack(work)

    async def both() -> None:
        for name in ("lost", "found"):
            (tmp_path / name).mkdir()
        waiting = asyncio.create_task(host.fill("lost", lost, tmp_path / "lost", lambda _: None))
        async with asyncio.timeout(30):
            await asyncio.sleep(0.05)
            await host.fill("found", found, tmp_path / "found", lambda _: None)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(both())
    assert files(tmp_path / "found") == files(work)


def test_two_jobs_with_the_same_pieces_fetch_each_once(work, dispatcher, host, tmp_path):
    digest = dispatcher.pack(work)

    async def both() -> None:
        for name in ("1", "2"):
            (tmp_path / name).mkdir()
        await asyncio.gather(*(host.fill(name, digest, tmp_path / name, lambda _: None) for name in ("1", "2")))

    asyncio.run(both())
    assert files(tmp_path / "1") == files(tmp_path / "2") == files(work)
    assert len(dispatcher.served) == len(set(dispatcher.served))


def test_a_blob_that_was_damaged_here_is_fetched_again(work, dispatcher, host, tmp_path):
    digest = dispatcher.pack(work)
    fill(host, digest, tmp_path / "1")
    spoilt = next(d for d in dispatcher.blobs if d != digest)
    host.path(spoilt).write_bytes(b"garbage")
    dispatcher.served.clear()
    assert fill(host, digest, tmp_path / "2", "next") == files(work)
    assert dispatcher.served == [spoilt]


def test_beyond_the_cap_the_oldest_blobs_go_and_never_what_a_job_here_needs(work, dispatcher, host, tmp_path,
                                                                            monkeypatch):
    monkeypatch.setattr(blobs, "CAP_BYTES", 6000)
    old = dispatcher.pack(work)
    fill(host, old, tmp_path / "1", "old")
    host.release("old")
    for path in (tmp_path / "host/blobs").iterdir():
        os.utime(path, (1, 1))
    for file in work.rglob("*.py"):
        file.write_bytes(random.Random(file.name).randbytes(60))
    new = dispatcher.pack(work)
    fill(host, new, tmp_path / "2", "new")
    assert host.is_complete(new) and not host.is_complete(old)
    assert sum(p.stat().st_size for p in (tmp_path / "host/blobs").iterdir()) <= 6000
    monkeypatch.setattr(blobs, "CAP_BYTES", 0)
    fill(host, new, tmp_path / "3", "new")
    assert host.is_complete(new)
    assert set(os.listdir(tmp_path / "host/blobs")) == {new, *(p.sha256 for p in bundle.pieces_of(host.path(new)))}


@pytest.mark.parametrize("where", ["fetching", "unpacking"])
def test_a_full_disk_costs_what_no_job_needs_before_the_host_is_blamed(work, dispatcher, host, tmp_path, monkeypatch,
                                                                       where):
    room = [False]

    def refuse_while_full(*_: object) -> None:
        if not room[0] and len(dispatcher.served) >= 3 and (old.exists() or job == "next"):
            raise DiskFull("this host's disk is full") if where == "fetching" else OSError(errno.ENOSPC, "No space")

    old, job = host.path(dispatcher.hold(b"of an earlier job")), "job"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"of an earlier job")
    if where == "fetching":
        dispatcher.before = refuse_while_full
    else:
        unpack = bundle.unpack
        monkeypatch.setattr(blobs, "unpack", lambda *given: refuse_while_full() or unpack(*given))
    assert fill(host, dispatcher.pack(work), tmp_path / "1") == files(work)
    assert not old.exists()

    (work / "d/030.py").write_bytes(b"y" * 60)
    job, digest = "next", dispatcher.pack(work)
    with pytest.raises((DiskFull, OSError), match=r"full|No space"):
        fill(host, digest, tmp_path / "2")
    room[0] = True
    assert fill(host, digest, tmp_path / "3") == files(work)


def test_how_much_has_come_is_said(work, dispatcher, host, tmp_path, monkeypatch):
    monkeypatch.setattr(blobs, "PROGRESS_S", 0.0)
    (work / "big").write_bytes(random.Random(2).randbytes(5_000_000))
    said: list[str] = []
    fill(host, dispatcher.pack(work), tmp_path / "1", said=said)
    assert said[0] == "fetching the working directory" and said[-1] == "unpacking the working directory"
    assert said[-2] == "fetching the working directory: 5 of 5 MB"


def test_what_a_dispatcher_has_lost_comes_back_from_here(work, dispatcher, host, tmp_path):
    digest = dispatcher.pack(work)
    fill(host, digest, tmp_path / "1")
    before = dict(dispatcher.blobs)
    for lost in (set(before), {digest}, set(before) - {digest}):
        for name in lost:
            del dispatcher.blobs[name]
        asyncio.run(host.send([digest]))
        assert dispatcher.blobs == before
    host.path(next(iter(set(before) - {digest}))).unlink()
    dispatcher.blobs.clear()
    asyncio.run(host.send([digest, "0" * 64]))
    assert len(dispatcher.blobs) == len(before) - 1 and not host.is_complete(digest)
