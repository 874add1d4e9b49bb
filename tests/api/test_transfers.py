"""Files of a dispatcher on their way here: what is refused, repeated, resumed and shown."""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotfleet.api import outputs, transfers
from spotfleet.api.lifecycle import down
from spotfleet.codec import to_json
from spotfleet.errors import DispatcherUnreachable, SpotfleetError
from spotfleet.protocol.archive import ArchiveFile, ArchiveHead, RefusedFile, line
from spotfleet.protocol.messages import NOT_COLLECTED
from spotfleet.storage import mirror, names
from spotfleet.storage.mirror import Piece
from spotfleet.storage.object_store import ObjectStore
from spotfleet.transport.archive import ArchiveReader, LinkRate

DATA = {"ledger.db": b"rows", "jobs/a-1/logs/rank-0.log": b"hello\n" * 100, "jobs/a-1/checkpoints/7-1.ckpt": b"t" * 999}
CKPT = "jobs/a-1/checkpoints/7-1.ckpt"


class FakeClient:
    """A dispatcher with `files`, whose manifest a test may change."""

    def __init__(self, streams: int = 1) -> None:
        self.streams, self.data, self.asked, self.packed = streams, dict(DATA), list[bool](), list[bool]()
        self.listed = [ArchiveFile(key, len(data), hashlib.sha256(data).hexdigest()) for key, data in DATA.items()]
        self.cut = 0  # lines that the manifest lacks at its end

    def archive_manifest(self, *, outputs: str = "", check: bool = False, bring: bool = False) -> Iterator[bytes]:
        self.asked.append(check)
        lines = [line(ArchiveHead(len(self.listed), sum(f.bytes for f in self.listed), 5.0)), b"\n",
                 *map(line, self.listed), b'{"later": 1}\n', line(None)]
        return iter(lines[:len(lines) - self.cut])

    def archive_pieces(self, pieces: Sequence[Piece], *, outputs: str = "", packed: bool = False) -> bytes:
        self.packed.append(packed)
        return b"".join(self.data[p.key][p.start:p.end] for p in pieces)

    def persistent(self) -> FakeClient:
        return self

    def close(self) -> None:
        """It has no connection."""

    def abort(self) -> None:
        """It ends at once."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "PIECE_BYTES", 100)


def fetch(client: FakeClient, place: Path, **options: Any) -> transfers.Fetched:
    found = transfers.fetch(client, place, lambda _line: None, "copying", **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("streams", [1, 3])
def test_all_files_of_a_manifest_arrive(tmp_path: Path, streams: int):
    found = fetch(FakeClient(streams), tmp_path)
    assert contents(found.files) == DATA
    assert (found.moved, found.at, found.elsewhere) == (sum(map(len, DATA.values())), 5.0, ())


@pytest.mark.parametrize("key", ["../evil", "/tmp/evil", "jobs/../../../evil", "jobs/a-1//evil", "evil\0"])
@pytest.mark.parametrize("at", ["", "/target/evil", "s3://bucket/evil"])
def test_a_manifest_that_leads_out_of_the_folder_is_refused(tmp_path: Path, key: str, at: str):
    client = FakeClient(2)
    client.listed.append(ArchiveFile(key, 1, "0" * 64, at))
    with pytest.raises(SpotfleetError, match="the dispatcher sends an unsafe list of files") as caught:
        fetch(client, tmp_path / "a/b/draft")
    assert "nothing was written outside" in caught.value.hint
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]


def test_only_checkpoints_may_be_elsewhere(tmp_path: Path):
    client = FakeClient()
    client.listed = [replace(client.listed[0], at="/target/ledger.db")]
    with pytest.raises(SpotfleetError, match="is no checkpoint"):
        fetch(client, tmp_path)


def test_a_checkpoint_at_a_target_is_copied_only_on_demand_and_never_from_an_object_store(tmp_path: Path):
    client = FakeClient()
    client.listed[2] = replace(client.listed[2], at="/target/7-1.ckpt")
    found = fetch(client, tmp_path / "a")
    assert (found.elsewhere, CKPT in contents(found.files)) == ((client.listed[2],), False)
    assert contents(fetch(client, tmp_path / "b", bring_checkpoints=True).files) == DATA
    client.listed[2] = replace(client.listed[2], at="s3://bucket/7-1")
    assert fetch(client, tmp_path / "c", bring_checkpoints=True).elsewhere == (client.listed[2],)


@pytest.mark.parametrize("streams", [1, 3])
def test_a_manifest_that_breaks_off_is_asked_for_again_and_what_has_arrived_counts(tmp_path: Path, streams: int):
    client = FakeClient(streams)
    client.cut = 2
    with pytest.raises(DispatcherUnreachable, match="breaks off"):
        fetch(client, tmp_path)
    client.cut = 0
    assert fetch(client, tmp_path).moved <= len(DATA["ledger.db"]) + len(DATA["jobs/a-1/logs/rank-0.log"])


@pytest.mark.parametrize("streams", [1, 3])
def test_a_small_file_is_read_before_the_dispatcher_has_read_a_large_one(tmp_path: Path, streams: int):
    client, is_read = FakeClient(streams), threading.Event()
    small, large = client.listed[0], client.listed[2]

    def pieces(pieces: Sequence[Piece], read=client.archive_pieces, **options: Any) -> bytes:
        data = read(pieces, **options)
        is_read.set()
        return data

    def manifest(**_: Any) -> Iterator[bytes]:
        yield from (line(ArchiveHead(2, small.bytes + large.bytes, 5.0)), line(small), b"\n")
        is_read.wait(20 if streams > 1 else 0)
        client.data[small.key] = b"newer"
        yield from (line(large), line(None))

    client.archive_pieces, client.archive_manifest = pieces, manifest  # type: ignore[method-assign]
    assert contents(fetch(client, tmp_path).files) == {key: DATA[key] for key in (small.key, large.key)}


@pytest.mark.parametrize("text", [
    b"<html>\n", b"[" * 200_000 + b"\n", b'{"head": {"files": 1, "bytes": 1, "at": NaN}}\n',
    b'{"head": {"files": 1, "bytes": ' + b"9" * 400 + b', "at": 1}}\n'], ids=["html", "deep", "nan", "huge"])
def test_lines_that_are_none_end_the_manifest(tmp_path: Path, text: bytes):
    client = FakeClient()
    client.archive_manifest = lambda **_: iter([text, line(None)])  # type: ignore[method-assign]
    with pytest.raises(DispatcherUnreachable, match="cannot be read"):
        fetch(client, tmp_path)


def test_a_file_that_is_wrong_each_time_is_named_and_the_dispatcher_checks_from_the_second_time_on(tmp_path: Path):
    client = FakeClient(2)
    client.data[CKPT] = b"x" * 999
    with pytest.raises(SpotfleetError, match=f"1 file did not arrive whole in 4 tries: {CKPT}"):
        fetch(client, tmp_path)
    assert client.asked == [False, True, True, True]
    client.data[CKPT] = DATA[CKPT]
    assert fetch(client, tmp_path).moved == 999


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "draft").write_text("a file")
    with pytest.raises(SpotfleetError, match=f"the files cannot be written to {tmp_path / 'draft'}: "):
        fetch(FakeClient(), tmp_path / "draft")


class Trickle(FakeClient):
    """A dispatcher behind a link on which almost nothing arrives, until its streams are aborted."""

    def __init__(self, lines: bool = False) -> None:
        super().__init__(3)
        self._ended, self._lines = threading.Event(), lines

    def archive_manifest(self, *, outputs: str = "", check: bool = False, bring: bool = False) -> Iterator[bytes]:
        for text in super().archive_manifest(outputs=outputs, check=check, bring=bring):
            if self._lines:
                self._ended.wait(5.0)
            yield text

    def archive_pieces(self, pieces: Sequence[Piece], *, outputs: str = "", packed: bool = False) -> bytes:
        self._ended.wait(60.0)
        raise DispatcherUnreachable("aborted")

    def abort(self) -> None:
        self._ended.set()


@pytest.mark.parametrize("lines", [False, True])
def test_a_transfer_that_trickles_is_given_up_where_patience_is_limited(tmp_path: Path, monkeypatch, lines: bool):
    monkeypatch.setattr(transfers, "LINE_S", 0.01)
    monkeypatch.setattr(mirror, "REPORT_S", 0.01)
    client = Trickle(lines)
    with pytest.raises(SpotfleetError, match=r"copying is given up: less than 1\.0 MB arrived whole in 0\.05 s"):
        fetch(client, tmp_path, patience_s=0.05)
    client.abort()


def test_a_transfer_that_waits_for_the_dispatcher_to_read_a_large_file_is_not_given_up(monkeypatch):
    clock = iter((100.0, 109.0, 109.0, 118.0, 118.0, 127.0, 127.0, 136.0, 145.0, 155.0))
    monkeypatch.setattr(transfers, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    screen, tally = transfers._Screen(lambda _line: None, "copying", 10.0), mirror.Tally(total=5 << 20)
    for _ in range(3):
        screen.wait()
        screen.show(tally)
    for tally.moved in (1 << 20, 2 << 20):
        screen.show(tally)
    with pytest.raises(SpotfleetError, match="given up"):
        screen.show(tally)


@pytest.mark.parametrize(("discard", "patience_s"), [(True, down.WORKERS_GONE_S), (False, math.inf)])
def test_only_discard_limits_the_patience_with_a_slow_link(monkeypatch, tmp_path: Path, discard: bool,
                                                           patience_s: float):
    asked: list[float] = []
    monkeypatch.setattr(down, "_fetch", lambda *given: asked.append(given[-1]))
    monkeypatch.setattr(down, "_wait_for_workers", lambda *_: None)
    machine = SimpleNamespace(folder=SimpleNamespace(name="f"), locate=lambda: "https://x", client=lambda *_, **__:
                              SimpleNamespace(down=lambda **_: None))
    down._fetch_results(machine, lambda _line: None, discard, False)  # type: ignore[arg-type]
    assert asked == [patience_s]


def test_bytes_rate_and_time_left_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    monkeypatch.setattr(transfers, "LINE_S", 0.0)
    monkeypatch.setattr(mirror, "REPORT_S", 0.0)
    transfers.fetch(FakeClient(), tmp_path, lines.append, "copying")  # type: ignore[arg-type]
    assert lines[0] == "copying: 0 bytes of 1.6 kB"  # the dispatcher reads a large file
    assert any(re.fullmatch(r"copying: [\d.]+ (bytes|kB) of 1\.6 kB, [\d.]+ [kM]B/s, [\d.e-]+ s left", text)
               for text in lines), lines
    assert re.fullmatch(r"copying: 3 files, 1\.6 kB copied in [\d.e-]+ s \([1-9][\d.]* [kM]B/s\)", lines[-1])
    transfers.fetch(FakeClient(), tmp_path, lines.append, "copying")  # type: ignore[arg-type]
    assert lines[-1].endswith(", 1.6 kB were here")


def test_text_is_deflated_only_over_a_link_that_is_known_to_be_slow():
    client, rate = FakeClient(), LinkRate(4)
    reader, log, tensors = ArchiveReader(client, rate), Piece("jobs/a-1/logs/rank-0.log", 0, 5), Piece(CKPT, 0, 5)
    rate.note(1_000_000_000, 4.0)  # four streams of a second each
    reader.read([log])
    rate.note(100, 1000.0)  # a round trip
    reader.read([log])
    rate.note(200_000_000, 400.0)
    for pieces in ([log], [tensors], [log, tensors], [Piece("ledger.db", 0, 1), log]):
        reader.read(pieces)
    assert client.packed == [False, False, True, False, False, True]


def in_a_bucket(url: str, files: dict[str, bytes]) -> ArchiveFile:
    """A checkpoint as workers write it there."""
    pytest.importorskip("obstore")
    store = ObjectStore(url)
    named = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    manifest = json.dumps({"version": 7, "generation": 1, "files": named}).encode()
    for name, data in {**files, "manifest.json": manifest}.items():
        store.put(name, [data])
    return ArchiveFile("jobs/a-1/checkpoints/7-1", 1, hashlib.sha256(manifest).hexdigest(), url)


def test_a_checkpoint_comes_from_its_object_store_and_is_compared_with_its_manifest(tmp_path: Path):
    files = {"__0_0.distcp": bytes(range(250)) * 3, ".metadata": b"where"}
    checkpoint = in_a_bucket("memory://bucket/f/a-1/7-1", files)
    lines: list[str] = []
    found = transfers.bring(checkpoint, tmp_path / "a", lines.append, tmp_path / "none")
    got = contents(found)
    assert got.pop("manifest.json") and got == files
    assert lines[-1].startswith("copying memory://bucket/f/a-1/7-1: 3 files, ")
    assert contents(transfers.bring(checkpoint, tmp_path / "again", lines.append, found)) == contents(found)
    assert ": 3 files, 0 bytes copied in " in lines[-1]
    for url, more, why in (("memory://bucket/b", {".metadata": b"Where"}, "is not whole: .metadata"),
                           ("memory://bucket/c", {"manifest.json": b"{}"}, "another manifest")):
        wrong = in_a_bucket(url, files)
        for name, data in more.items():
            ObjectStore(url).put(name, [data])
        with pytest.raises(SpotfleetError, match=why) as caught:
            transfers.bring(wrong, tmp_path / url[-1], lines.append, tmp_path / "none")
        assert "without --bring-checkpoints leaves it" in caught.value.hint
    hostile = in_a_bucket("memory://bucket/d", {})
    manifest = json.dumps({"files": {"../evil": {"bytes": 1, "sha256": ""}}}).encode()
    ObjectStore(hostile.at).put("manifest.json", [manifest])
    with pytest.raises(SpotfleetError, match="cannot be used"):
        transfers.bring(replace(hostile, sha256=hashlib.sha256(manifest).hexdigest()), tmp_path / "d", lines.append,
                        tmp_path / "none")
    with pytest.raises(SpotfleetError, match="cannot be read from this machine"):
        transfers.bring(replace(hostile, at="memory://bucket/none"), tmp_path / "e", lines.append, tmp_path)
    assert not list(tmp_path.rglob("evil"))


def test_outputs_from_an_archive_include_files_that_were_set_aside_and_no_file_beside_it(tmp_path: Path):
    archive, under, lines = tmp_path / "archive", "jobs/a-1/outputs/h@0@1/", list[str]()
    long, other = RefusedFile(f"{under}long", names.aside(f"{under}long"), "File name too long"), "jobs/b-1/outputs/x"
    for name, text in ((f"{under}short", "short"), (long.at, "long"), (names.aside(other), "other"),
                       ("../secret", "secret")):
        (archive / name).parent.mkdir(parents=True, exist_ok=True)
        (archive / name).write_text(text)
    refused = (long, RefusedFile(f"{under}gone", "", "Input/output error"),
               RefusedFile(f"{under}evil", "../secret", ""),
               RefusedFile(other, names.aside(other), "File exists"))
    (archive / NOT_COLLECTED).write_text(json.dumps({"refused": to_json(refused)}))
    found = outputs.archived(SimpleNamespace(archive=archive), "a-1", tmp_path / "into",  # type: ignore[arg-type]
                             lines.append)
    assert contents(tmp_path / "into") == {"h@0@1/short": b"short", long.at: b"long"} and found.files == 2
    assert lines == [f"h@0@1/long is {long.at} here: File name too long", "h@0@1/gone is not here: Input/output error"]


def test_two_commands_do_not_copy_outputs_of_a_job_to_the_same_folder(tmp_path: Path):
    into, client, fetched = tmp_path / "into", FakeClient(), list[float]()
    client.listed, client.outputs_fetched = [], lambda job, at: fetched.append(at)  # type: ignore[attr-defined]

    def copy() -> None:
        outputs.living(client, "a-1", into, lambda _line: None)  # type: ignore[arg-type]

    def manifest(listed=client.archive_manifest, **options: Any) -> Iterator[bytes]:
        with pytest.raises(SpotfleetError, match="another command is copying outputs of a-1 to "):
            copy()  # while the first one does
        return listed(**options)

    client.archive_manifest = manifest  # type: ignore[method-assign]
    copy()
    assert fetched == [5.0] and not into.exists()
