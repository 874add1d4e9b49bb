"""The archive by manifest and ranges, from a real dispatcher to the real client."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from spotfleet import bundle
from spotfleet.api import outputs, transfers
from spotfleet.codec import to_json
from spotfleet.dispatcher.checkpoints import archive_files
from spotfleet.dispatcher.checkpoints.archive import Content
from spotfleet.dispatcher.checkpoints.archive_files import ArchiveFiles
from spotfleet.dispatcher.http.archive import SharedGlance
from spotfleet.errors import SpotfleetError
from spotfleet.model import CheckpointSpec
from spotfleet.protocol.archive import ArchiveHead, parse
from spotfleet.protocol.messages import Checkpoint, OutputPiece, pack_pieces
from spotfleet.storage import json_file, mirror
from spotfleet.storage.folder import FolderStore, checkpoint_name, fleet_store
from spotfleet.storage.mirror import Piece
from spotfleet.transport import certs
from spotfleet.transport.client import DispatcherClient, Endpoint
from tests.support.dispatcher.checkpoint_sets import files_of
from tests.support.dispatcher.fake_fleet import ADMIN, Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = 1_000_000
BIG = bytes(range(256)) * 1000  # many pieces of PIECE bytes
PIECE = 10_000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "PIECE_BYTES", PIECE)


def client(stage: Stage, streams: int = 3) -> DispatcherClient:
    made = DispatcherClient(Endpoint(stage.url, ADMIN, stage.ca), patience_s=20.0)
    made.streams = streams
    return made


async def off_loop(work: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(work)


async def with_results(stage: Stage) -> str:
    """A job with a log, outputs and a checkpoint; its name."""
    await stage.up(1)
    job = await stage.submit(Script(steps=LONG), (1, 1), secrets={"KEY": "hidden-value"})
    worker = (await stage.at_version(job, 3)).workers[0].worker
    token = stage.token(worker.split("/")[0])
    await stage.call("POST", f"/v1/jobs/{job}/logs/{worker}?offset=0", token=token, data=b"hello\n" * 5000)
    pieces = [OutputPiece("append", "plots/loss.txt", 0, 5), OutputPiece("append", "empty", 0, 0),
              OutputPiece("append", "half", 0, 4, whole=9)]
    await stage.call("POST", f"/v1/jobs/{job}/outputs/{worker}", token=token,
                     data=pack_pieces([pieces[0]], b"0.125"))
    await stage.call("POST", f"/v1/jobs/{job}/outputs/{worker}", token=token, data=pack_pieces([pieces[1]], b""))
    await stage.call("POST", f"/v1/jobs/{job}/outputs/{worker}", token=token, data=pack_pieces([pieces[2]], b"half"))
    for version in (5, 6):
        data = BIG + b"%d" % version
        await stage.call("PUT", f"/v1/jobs/{job}/checkpoints/{version}?generation=1&digest={sha(data)}", token=token,
                         data=data)
    return job


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def nothing(_line: str) -> None:
    """Progress is for people."""


def test_the_manifest_brings_what_the_tar_holds_and_no_secret_and_again_only_what_has_changed(play, tmp_path: Path):
    async def scene(stage: Stage) -> None:
        job = await with_results(stage)
        lines: list[str] = []
        head, *listed = await off_loop(lambda: list(filter(None, parse(client(stage).archive_manifest()))))
        found = await off_loop(lambda: transfers.fetch(client(stage), tmp_path / "draft", lines.append, "copying"))
        got, (worker,) = contents(found.files), {p.name for p in (stage.home / "jobs" / job / "outputs").glob("[!.]*")}
        assert {name.replace(f"jobs/{job}/", "") for name in got} == {
            "ledger.db", "not-collected.json", "checkpoints/6-1.ckpt", f"logs/{worker}.log", "logs/rank-0.log",
            f"outputs/{worker}/plots/loss.txt", f"outputs/{worker}/empty", f"outputs/{worker}/half.partial"}
        assert isinstance(head, ArchiveHead) and (head.files, head.bytes) == (len(got), sum(f.bytes for f in listed))
        assert got[f"jobs/{job}/checkpoints/6-1.ckpt"] == BIG + b"6"
        assert got[f"jobs/{job}/logs/rank-0.log"] == b"hello\n" * 5000
        assert got[f"jobs/{job}/outputs/{worker}/half.partial"] == b"half"
        assert not any(b"hidden-value" in data for data in got.values())
        with sqlite3.connect(found.files / "ledger.db") as db:
            assert "JobSubmitted" in [json.loads(row[0])["kind"] for row in db.execute("SELECT body FROM events")]
        assert found.moved == sum(map(len, got.values())) and not (tmp_path / "draft/parts").exists()
        assert lines[-1].startswith(f"copying: {len(got)} files, ") and "B/s)" in lines[-1]
        log = found.files / f"jobs/{job}/logs/rank-0.log"
        log.write_bytes(b"x" + log.read_bytes()[1:])  # damaged: the same size
        again = await off_loop(lambda: transfers.fetch(client(stage), tmp_path / "draft", nothing, ""))
        assert log.read_bytes() == b"hello\n" * 5000
        assert 30_000 <= again.moved <= 30_000 + (again.files / "ledger.db").stat().st_size

    play(scene, spec(1))


def test_a_damaged_checkpoint_is_replaced_by_the_one_before_and_one_in_an_object_store_is_named(play, tmp_path: Path):
    async def scene(stage: Stage) -> None:
        job = await with_results(stage)
        path = stage.home / "jobs" / job / "checkpoints/6-1.ckpt"
        seen = path.stat()
        path.write_bytes(b"z" + path.read_bytes()[1:])
        os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # as a bad disk changes it
        found = await off_loop(lambda: transfers.fetch(client(stage), tmp_path / "a", nothing, ""))
        assert [p.name for p in found.files.rglob("*.ckpt")] == ["5-1.ckpt"]
        made = Checkpoint(9, "0" * 64, 1000, 2, url="s3://bucket/f/9-2")
        path.with_name("9-2.json").write_text(json_file.text_of(to_json(made)))
        found = await off_loop(lambda: transfers.fetch(client(stage), tmp_path / "b", nothing, ""))
        assert [(f.key, f.at) for f in found.elsewhere] == [(f"jobs/{job}/checkpoints/9-2", "s3://bucket/f/9-2")]
        assert not list(found.files.rglob("*.ckpt"))

    play(scene, spec(1))


def test_a_folder_of_files_at_the_target_is_named_and_copied_only_on_demand(play, tmp_path: Path):
    target = tmp_path / "target"
    target.mkdir()

    async def scene(stage: Stage) -> None:
        job, files = await with_results(stage), files_of(7, pieces=(BIG, b"rank 1's"))
        token = stage.token((await stage.job(job)).workers[0].host)
        for name, data in files.items():
            asked = f"generation=1&digest={sha(data)}&name={name}"
            await stage.call("PUT", f"/v1/jobs/{job}/checkpoints/7?{asked}", token=token, data=data)
        store = fleet_store(str(target), stage.boot.fleet, stage.boot.ca)
        key = f"jobs/{job}/checkpoints/7-1"

        async def copied() -> bool:
            return store.find(f"{key}.json") is not None

        await stage.until("a copy at the target", copied)
        found = await off_loop(lambda: transfers.fetch(client(stage), tmp_path / "a", nothing, ""))
        assert [(f.key, f.bytes, f.at) for f in found.elsewhere] == [
            (key, sum(map(len, files.values())), str(store.path(key)))]
        assert not (found.files / key).exists() and found.moved < len(BIG)
        found = await off_loop(lambda: transfers.fetch(client(stage), tmp_path / "b", nothing, "",
                                                       bring_checkpoints=True))
        assert found.elsewhere == () and contents(found.files / key) == files
        store.path(f"{key}/__1_0.distcp").write_bytes(b"rank")  # it is not whole there
        found = await off_loop(lambda: transfers.fetch(client(stage), tmp_path / "c", nothing, ""))
        assert found.elsewhere == () and contents(found.files / key) == files

    play(scene, spec(1, checkpoint=CheckpointSpec(target=str(target))))


def test_a_checkpoint_at_the_target_is_named_and_copied_only_on_demand(play, tmp_path: Path):
    target = tmp_path / "target"
    target.mkdir()

    async def scene(stage: Stage) -> None:
        job = await with_results(stage)
        data = BIG + b"6"
        kept, store = Checkpoint(6, sha(data), len(data), 1), fleet_store(str(target), stage.boot.fleet, stage.boot.ca)
        name = checkpoint_name(job, 6, 1)

        async def copied() -> bool:
            return store.find(name.replace("ckpt", "json")) is not None

        await stage.until("a copy at the target", copied)
        found = await off_loop(lambda: transfers.fetch(client(stage), tmp_path / "a", nothing, ""))
        assert [(f.key, f.at) for f in found.elsewhere] == [(name, str(store.path(name)))]
        assert not list(found.files.rglob("*.ckpt")) and found.moved < len(data)
        found = await off_loop(lambda: transfers.fetch(client(stage), tmp_path / "b", nothing, "",
                                                       bring_checkpoints=True))
        assert found.elsewhere == () and (found.files / name).read_bytes() == data
        store.path(name).write_bytes(data[:-1])  # it is not whole there
        found = await off_loop(lambda: transfers.fetch(client(stage), tmp_path / "c", nothing, ""))
        assert found.elsewhere == () and (found.files / name).read_bytes() == data
        assert kept.digest == sha(data)

    play(scene, spec(1, checkpoint=CheckpointSpec(target=str(target))))


def test_manifests_keep_one_thread_at_a_target_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archive_files, "TARGET_S", 0.05)
    store, checkpoint, looking = FolderStore(tmp_path), Checkpoint(7, "0" * 64, 3, 1), threading.Lock()
    path = store.path(checkpoint_name("a-1", 7, 1))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"abc")
    record = path.with_suffix(".json")
    os.mkfifo(record)  # opening it waits
    before = set(threading.enumerate())
    assert [SharedGlance(store, looking).place_of("a-1", checkpoint) for _ in range(3)] == [""] * 3
    (stuck,) = set(threading.enumerate()) - before
    record.write_text(json.dumps({}))  # it answers: the thread ends
    stuck.join(30)
    record.unlink()
    record.write_text(json_file.text_of(to_json(checkpoint)))
    assert SharedGlance(store, looking).place_of("a-1", checkpoint) == str(path)


def test_only_files_of_the_archive_are_read_only_by_the_admin_and_by_ranges(play):
    async def scene(stage: Stage) -> None:
        job, one = await with_results(stage), client(stage)
        for key in (f"jobs/{job}/secrets.json", f"jobs/{job}/job.json", "boot.json", f"jobs/{job}/checkpoints/6-1.json",
                    f"jobs/{job}/outputs/.x@0@1/a", f"jobs/{job}/logs/..%2F..%2Fsecrets.json", "..%2Fboot.json",
                    f"jobs/..%2Fjobs/{job}/logs/rank-0.log"):
            assert (await stage.call("GET", f"/v1/archive/files/{key}", ok=False))[0] == 404, key
            body = {"ranges": [[key.replace("%2F", "/"), 0, 1]]}
            assert (await stage.call("POST", "/v1/archive/ranges", body, ok=False))[0] == 404, key
        for ranges in ([], "x", [["ledger.db"]], [["ledger.db", 5, 1]], [["ledger.db", -1, 1]], [[1, 0, 1]]):
            assert (await stage.call("POST", "/v1/archive/ranges", {"ranges": ranges}, ok=False))[0] == 400, ranges
        log, whole = f"jobs/{job}/logs/rank-0.log", b"hello\n" * 5000
        checkpoint = f"jobs/{job}/checkpoints/6-1.ckpt"
        assert (await stage.call("POST", "/v1/archive/ranges", {"ranges": [[log, 0, 10**12]]}, ok=False))[0] == 404
        token = stage.token(next(iter(stage.agents)))
        for method, path in (("GET", "/v1/archive/manifest"), ("GET", f"/v1/archive/files/{log}"),
                             ("POST", "/v1/archive/ranges")):
            assert (await stage.call(method, path, token=token, ok=False))[0] == 403
            assert (await stage.call(method, path, token="wrong", ok=False))[0] == 401
        several = [Piece(log, 0, 6), Piece(log, 29_994, 30_000), Piece(checkpoint, 0, 4)]
        some = [Piece(log, 3, 20)]
        for pieces, packed, data in ((some, False, whole[3:20]), (some, True, whole[3:20]),
                                     (several, True, b"hello\nhello\n" + BIG[:4]),
                                     (several[:2], True, b"hello\nhello\n"), ([Piece(log, 5, 5)], True, b"")):
            assert await off_loop(partial(one.archive_pieces, pieces, packed=packed)) == data
        headers = {"Authorization": f"Bearer {ADMIN}", "Accept-Encoding": "deflate"}
        for given, key, status, size, coding in (
                ({"Range": "bytes=0-9"}, checkpoint, 206, 10, None), ({}, log, 200, None, "deflate"),
                ({"Range": "bytes=-7"}, checkpoint, 206, 7, None), ({"Range": "bytes=30000-"}, log, 416, None, None),
                ({}, checkpoint, 200, len(BIG) + 1, None)):
            async with stage.http.get(f"{stage.url}/v1/archive/files/{key}", headers={**headers, **given},
                                      ssl=certs.client_context(stage.ca)) as answer:
                assert (answer.status, answer.headers.get("Content-Encoding")) == (status, coding)
                assert answer.content_length < 1000 if coding else size in (None, len(await answer.read()))

    play(scene, spec(1))


@pytest.mark.parametrize("path", ["files/config.json", "manifest"])
def test_an_answer_that_fails_after_its_head_was_sent_is_cut_off_and_carries_no_message_as_content(
        play, monkeypatch: pytest.MonkeyPatch, path: str):
    def blocks(*_: object) -> Iterator[bytes]:
        yield b"first"
        raise OSError("the disk")

    def send_manifest(_files: ArchiveFiles, send: Callable[[bytes], None], *_: object) -> None:
        send(b"first")
        raise OSError("the disk")

    monkeypatch.setattr(archive_files, "blocks", blocks)
    monkeypatch.setattr(ArchiveFiles, "send_manifest", send_manifest)
    monkeypatch.setattr(ArchiveFiles, "contents", lambda *_: [SimpleNamespace(size=lambda: 10_000)])

    async def scene(stage: Stage) -> None:
        url = urlsplit(stage.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port, ssl=certs.client_context(stage.ca))
        writer.write(f"GET /v1/archive/{path} HTTP/1.1\r\nHost: d\r\nAuthorization: Bearer {ADMIN}\r\n\r\n".encode())
        found = b""
        with suppress(ConnectionError):
            while (data := await asyncio.wait_for(reader.read(1000), 30)) and found.count(b"HTTP/1.1") < 2:
                found += data
        writer.close()
        head, _, body = found.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert body.replace(b"5\r\nfirst\r\n", b"first") == b"first"  # no end marker of a whole answer

    play(scene, spec(1))


def test_no_file_is_looked_for_on_the_loop(play, monkeypatch):
    on_loop: list[bool] = []

    def noted(files: ArchiveFiles, keys: list[str], found=ArchiveFiles.contents) -> list[Content]:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return found(files, keys)

    async def scene(stage: Stage) -> None:
        monkeypatch.setattr(ArchiveFiles, "contents", noted)
        await off_loop(lambda: list(client(stage).archive_manifest()))
        one, two = Piece("ledger.db", 0, 6), Piece("ledger.db", 0, 9)
        for pieces in ([one], [one, two]):
            await off_loop(lambda pieces=pieces: client(stage).archive_pieces(pieces))
        assert on_loop == [False, False]

    play(scene, spec(1))


def test_outputs_are_copied_once_and_count_as_fetched(play, tmp_path: Path):
    async def scene(stage: Stage) -> None:
        job, into = await with_results(stage), tmp_path / "outputs"
        read: list[str] = []

        class Counting(DispatcherClient):
            def archive_pieces(self, pieces, **options):
                read.extend(piece.key.rpartition("/")[2] for piece in pieces)
                return super().archive_pieces(pieces, **options)

            persistent = abort = close = lambda self: self

        one = Counting(Endpoint(stage.url, ADMIN, stage.ca), patience_s=20.0)
        into.mkdir()
        (into / "mine").write_text("stays")
        for expected in (["empty", "half.partial", "loss.txt"], [], ["loss.txt"]):
            read.clear()
            got = await off_loop(lambda: outputs.living(one, job, into, nothing))
            assert (got, sorted(read)) == (outputs.DownloadedOutputs(3, 9), expected)
            assert sorted(p.name for p in into.rglob("*") if p.is_file()) == ["empty", "half.partial", "loss.txt",
                                                                             "mine"]
            next(into.rglob("loss.txt")).write_bytes(b"other" if not expected else b"0.125")
        assert stage.daemon.dispatcher.core.jobs[job].record.fetched_at > time.time() - 600
        with pytest.raises(SpotfleetError, match="no job 'x-1'"):
            await off_loop(lambda: outputs.living(one, "x-1", tmp_path / "none", nothing))
        assert not (tmp_path / "none").exists()

    play(scene, spec(1))


ODD = ("a\nb", "a%2Fb", "%2e%2e", "a/%2E/b", "a?b", "a#b", "a+b", "a;b=c", "a\\b", " b ", "*", "é", "\x01")


def test_files_with_odd_names_come_in_pieces_as_all_others(play, tmp_path: Path):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=LONG), (1, 1))
        worker = (await stage.at_version(job, 3)).workers[0].worker
        wanted = {name: name.encode() * PIECE for name in ODD}
        for name, data in wanted.items():
            await stage.call("POST", f"/v1/jobs/{job}/outputs/{worker}", token=stage.token(worker.split("/")[0]),
                             data=pack_pieces([OutputPiece("append", name, 0, len(data))], data))
        await off_loop(lambda: outputs.living(client(stage), job, tmp_path / "out", nothing))
        assert contents(tmp_path / "out" / worker.replace("/", "@")) == wanted

    play(scene, spec(1))


def test_partial_files_with_names_that_are_too_long_or_taken_come_by_manifest_tar_and_download(play, tmp_path: Path):
    unlucky = {"n" * 250: b"half", "x": b"half", "y": b"half", "x.partial": b"whole", "y.partial/z": b"whole"}

    async def scene(stage: Stage) -> None:
        job = await with_results(stage)
        (folder,) = (stage.home / "jobs" / job / "outputs").glob("[!.]*")
        for name, data in unlucky.items():
            pieces = [OutputPiece("append", name, 0, len(data), whole=9 if data == b"half" else len(data))]
            await stage.call("POST", f"/v1/jobs/{job}/outputs/{folder.name.replace('@', '/')}",
                             token=stage.token(folder.name.split("@")[0]), data=pack_pieces(pieces, data))
        one, under = client(stage), f"jobs/{job}/outputs/{folder.name}"
        found = await off_loop(lambda: transfers.fetch(one, tmp_path / "draft", nothing, "copying"))
        (tmp_path / "b").write_bytes((await stage.call("GET", "/v1/archive"))[1])
        bundle.extract(tmp_path / "b", tmp_path / "tar")
        await off_loop(lambda: outputs.living(one, job, tmp_path / "into", nothing))
        for place in (found.files / under, tmp_path / "tar" / under, tmp_path / "into" / folder.name):
            got = contents(place)
            assert sorted(got.values()) == sorted([*unlucky.values(), b"half", b"", b"0.125"])
            assert {name for name, data in got.items() if data == b"whole"} == {"x.partial", "y.partial/z"}
            assert sum(name.endswith(".partial") for name, data in got.items() if data == b"half") == 4
        rows = json.loads((found.files / "not-collected.json").read_text())["partial_files"]
        assert {row["file"] for row in rows if "at" in row} == {"n" * 250, "x", "y"}
        assert all((found.files / under / row["at"]).read_bytes() == b"half" for row in rows if "at" in row)

    play(scene, spec(1))
