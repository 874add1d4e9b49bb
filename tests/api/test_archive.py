"""An archive (.tar.gz) is unpacked into its folder, and nowhere else."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zlib
from pathlib import Path

import pytest

from spotfleet.bundle import extract
from spotfleet.storage import names


def archive(path: Path, **contents: str) -> bytes:
    """The bytes of a .tar.gz at `path`."""
    with tarfile.open(path, "w:gz") as tar:
        for name, text in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return path.read_bytes()


@pytest.mark.parametrize("name", ["../evil", "/evil", "d/../../evil"])
def test_an_archive_that_leaves_its_folder_is_refused(tmp_path, name):
    with tarfile.open(tmp_path / "b", "w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(ValueError, match="unsafe archive"):
        extract(tmp_path / "b", tmp_path / "x/y")
    assert not list(tmp_path.rglob("evil"))


def test_an_archive_that_was_spoilt_in_the_middle_is_refused(tmp_path):
    whole = gzip.decompress(archive(tmp_path / "b", a="a" * 100_000, b="b"))
    packer = zlib.compressobj(wbits=31)  # gzip
    half = packer.compress(whole[:50_000]) + packer.flush(zlib.Z_FULL_FLUSH)
    (tmp_path / "c").write_bytes(half + b"\xff" * 1000)
    with pytest.raises(ValueError, match="not an archive"):
        extract(tmp_path / "c", tmp_path / "x")


def entry(name: str, link: str = "", kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = (kind, link, 0o755) if link else (tarfile.DIRTYPE, "", 0o755)
    return member


@pytest.mark.parametrize("last", [entry("l/new"), entry("l"), entry("h", "l", tarfile.LNKTYPE),
                                  entry("h", "l/f", tarfile.LNKTYPE), entry("l", "d")])
def test_nothing_is_unpacked_by_way_of_a_link(tmp_path, last):
    """Links that lead nowhere bad one by one have led out of the folder together: CVE-2025-4517."""
    with tarfile.open(tmp_path / "b", "w:gz") as tar:
        for member in (entry("d"), entry("l", "d"), last):
            tar.addfile(member)
    with pytest.raises(ValueError, match="unsafe archive"):
        extract(tmp_path / "b", tmp_path / "x")


def test_a_link_leads_where_its_text_says_whatever_links_are_on_the_way(tmp_path):
    with tarfile.open(tmp_path / "b", "w:gz") as tar:
        for member in (entry("a"), entry("a/b"), entry("a/b/top", "../.."), entry("out", "a/b/top/../x")):
            tar.addfile(member)
    extract(tmp_path / "b", tmp_path / "x")
    assert os.readlink(tmp_path / "x/out") == "a/b/x" and os.readlink(tmp_path / "x/a/b/top") == "../.."


def test_what_is_no_archive_is_refused(tmp_path):
    whole = archive(tmp_path / "b", a="a" * 50)
    for content in (b"", b"hello", whole[:-20]):
        (tmp_path / "c").write_bytes(content)
        with pytest.raises(ValueError, match="not an archive"):
            extract(tmp_path / "c", tmp_path / "x")


def test_a_file_whose_name_is_refused_is_set_aside_and_all_others_are_unpacked(tmp_path):
    archive(tmp_path / "b", **{"a": "one", "a/b": "two", "n" * 256: "three", "c": "four"})
    refused: list[tuple[str, str, str]] = []
    extract(tmp_path / "b", tmp_path / "x", refused=refused)
    assert refused == [("a/b", names.aside("a/b"), "Not a directory"),
                       ("n" * 256, names.aside("n" * 256), "File name too long")]
    assert {str(p.relative_to(tmp_path / "x")): p.read_text() for p in (tmp_path / "x").rglob("*") if p.is_file()} == {
        "a": "one", names.aside("a/b"): "two", names.aside("n" * 256): "three", "c": "four"}
    with pytest.raises(OSError):
        extract(tmp_path / "b", tmp_path / "y")
