"""A host believes no manifest and no piece: nothing is written outside, and nothing is written that was not named."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotfleet import bundle
from spotfleet.bundle import manifest
from tests.support.cli.packing import Shelf


def piece(data: bytes) -> tuple[bytes, list]:
    blob = zlib.compress(data)
    return blob, [hashlib.sha256(blob).hexdigest(), len(blob), len(data)]


def text(*entries: list, pieces: list | None = None, size: int | None = None, count: int | None = None) -> bytes:
    rows = pieces or []
    head = {"bytes": sum(r[2] for r in rows) if size is None else size,
            "entries": len(entries) if count is None else count, "pieces": rows}
    return manifest.MAGIC + zlib.compress("".join(json.dumps(line) + "\n" for line in (head, *entries)).encode())


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "deep/shelf")


BLOB, ROW = piece(b"evil")


@pytest.mark.parametrize("entries", [
    [["f", "../evil", 4]],
    [["f", "/evil", 4]],
    [["f", "", 4]],
    [["f", ".", 4]],
    [["d", "d"], ["f", "d/../evil", 4]],
    [["d", "d"], ["f", "d//evil", 4]],
    [["d", ".."], ["f", "../evil", 4]],
    [["f", "no/folder", 4]],
    [["l", "l", "."], ["f", "l/evil", 4]],
    [["d", "l"], ["l", "l", "."], ["f", "l/evil", 4]],
    [["f", "evil", 4], ["f", "evil", 0]],
    [["d", "d"], ["l", "d/l", "../.."], ["f", "evil", 4]],
    [["l", "l", "/etc/passwd"], ["f", "evil", 4]],
    [["l", "l", ""], ["f", "evil", 4]],
    [["f", "evil\0", 4]],
    [["f", "e" * 256, 4]],
    [["f", "\ud800", 4]],
    [["f", "evil", 5]],
    [["f", "evil", -1], ["f", "evil2", 5]],
    [["f", "evil", True], ["f", "evil2", 3]],
    [["f", "evil", 4.0]],
    [["p", "evil", 4]],
    [["f", ["evil"], 4]],
    [{"f": "evil"}],
], ids=str)
def test_a_manifest_that_no_packer_of_ours_writes_is_refused_before_anything_is_written(tmp_path, shelf, entries):
    shelf.put(BLOB)
    digest = shelf.put(text(*entries, pieces=[ROW]))
    with pytest.raises(ValueError, match="manifest"):
        shelf.unpack(digest, tmp_path / "deep/x")
    assert {p.name for p in (tmp_path / "deep").rglob("*")} == {"shelf", digest, ROW[0]}


@pytest.mark.parametrize(("made", "why"), [
    (text(pieces=[["../../boot.json", 3, 4]]), "what is no piece"),
    (text(pieces=[[ROW[0], 3, -4]], size=-4), "what is no piece"),
    (text(pieces=[[ROW[0], 3, 1 << 40]]), "what is no piece"),
    (text(pieces=[[ROW[0], 0, 4]]), "what is no piece"),
    (text(count=manifest.LIMIT_ENTRIES + 1), "at most 2000000 are taken"),
    (text(count=2), "0 of 2 entries"),
    (text(["d", "a"], ["d", "b"], count=1), "more than the 1 entries"),
    (text(size=5), "tells of 5 bytes"),
    (manifest.MAGIC, "breaks off"),
    (manifest.MAGIC + b"junk", "damaged"),
    (manifest.MAGIC + zlib.compress(b"[" * 100_000 + b"\n"), "damaged"),
    (text(["f", "a", 0])[:-9], "breaks off|damaged"),
    (b"spotfleet bundle 2\nnews", "version 2; this release reads version 1"),
    (b"", "not an archive"),
])
def test_a_head_that_no_packer_of_ours_writes_is_refused(tmp_path, shelf, made, why):
    digest = shelf.put(made)
    with pytest.raises(ValueError, match=why):
        shelf.unpack(digest, tmp_path / "x")


def test_a_manifest_that_unpacks_without_end_is_refused(tmp_path, shelf, monkeypatch):
    monkeypatch.setattr(manifest, "LIMIT_MANIFEST_BYTES", 1 << 22)
    bomb = zlib.compress(b" " * (1 << 24))
    with pytest.raises(ValueError, match="longer than"):
        shelf.unpack(shelf.put(manifest.MAGIC + bomb), tmp_path / "x")


def test_a_piece_that_unpacks_to_more_or_less_than_was_said_is_refused(tmp_path, shelf):
    for said in (3, 5):
        shelf.put(BLOB)
        digest = shelf.put(text(["f", "evil", said], pieces=[[*ROW[:2], said]]))
        with pytest.raises(ValueError, match="is not as long as the manifest says"):
            shelf.unpack(digest, tmp_path / f"x{said}")


def test_a_piece_that_is_another_is_named_so_that_it_is_fetched_again(tmp_path, shelf):
    digest = shelf.put(text(["f", "a", 4], pieces=[ROW]))
    for spoil in (lambda: None, lambda: shelf.path(ROW[0]).write_bytes(BLOB[:-1])):
        spoil()
        with pytest.raises(bundle.DamagedPiece) as caught:
            shelf.unpack(digest, tmp_path / f"x{shelf.path(ROW[0]).exists()}")
        assert caught.value.sha256 == ROW[0]


def test_a_link_leads_where_its_text_says_whatever_links_are_on_the_way(tmp_path, shelf):
    """Links that lead nowhere bad one by one have led out of the folder together: CVE-2025-4517."""
    digest = shelf.put(text(["d", "a"], ["d", "a/b"], ["l", "a/b/top", "../.."], ["l", "out", "a/b/top/../x"],
                            ["l", "a/here", "."]))
    out = shelf.unpack(digest, tmp_path / "x")
    assert [str((out / n).readlink()) for n in ("out", "a/b/top", "a/here")] == ["a/b/x", "../..", "."]


LINES = st.lists(st.one_of(
    st.tuples(st.sampled_from(["d", "f", "x", "l"]), st.sampled_from(["a", "b", "a/b", "a/a", "..", "a/../b", "/a"]),
              st.one_of(st.integers(0, 4), st.sampled_from(["a", "..", "../..", "a/..", "../a"]))),
    st.tuples(st.just("d"), st.sampled_from(["a", "b", "a/b"]))), max_size=6)


@settings(max_examples=150, deadline=None)
@given(LINES)
def test_whatever_a_manifest_says_what_comes_out_lies_inside(tmp_path_factory, lines):
    top = tmp_path_factory.mktemp("any")
    shelf = Shelf(top / "shelf")
    shelf.put(BLOB)
    digest = shelf.put(text(*map(list, lines), pieces=[ROW]))
    before = {p for p in top.rglob("*")}
    try:
        shelf.unpack(digest, top / "x")
    except ValueError:
        assert set(top.rglob("*")) == before
        return
    for path in (top / "x").rglob("*"):
        if path.is_symlink():
            assert path.resolve().is_relative_to((top / "x").resolve())
    assert {p for p in top.rglob("*") if not p.is_relative_to(top / "x")} == before
