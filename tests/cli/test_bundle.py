"""What of a working directory travels, and that the same content has the same digest."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zlib
from pathlib import Path

import pytest

from spotfleet.bundle import Bundle, build, digest, extract
from spotfleet.errors import UsageError


def make(root: Path, *files: str, **contents: str) -> Path:
    """A folder with `files` (each holding its own name) and NAME=text files."""
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    for name, text in contents.items():
        (root / name).write_text(text)
    return root


def bundled(workdir: Path, **options) -> set[str]:
    """The names of the files, not folders, in the bundle of `workdir`."""
    bundle = build(workdir, workdir.parent / "b.tar.gz", **options)
    with tarfile.open(bundle.path) as tar:
        return {m.name for m in tar.getmembers() if not m.isdir()}


def test_the_same_content_has_the_same_digest_whenever_and_wherever_it_was_written(tmp_path, monkeypatch):
    one, two = make(tmp_path / "one", "a.py", "d/b.py"), make(tmp_path / "two", "d/b.py", "a.py")
    os.utime(two / "a.py", (1, 1))
    (two / "a.py").chmod(0o600)
    first = build(one, tmp_path / "1")
    monkeypatch.setattr("time.time", lambda: 1e9)  # gzip would write it into its head
    second = build(two, tmp_path / "2")
    assert first.sha256 == second.sha256 == digest(tmp_path / "1")
    assert first.files == 2


@pytest.mark.parametrize("change", [
    lambda root: (root / "a.py").write_text("other"),
    lambda root: (root / "a.py").rename(root / "c.py"),
    lambda root: (root / "a.py").chmod(0o755),
])
def test_a_change_of_content_name_or_executable_bit_changes_the_digest(tmp_path, change):
    root = make(tmp_path / "w", "a.py")
    before = build(root, tmp_path / "1").sha256
    change(root)
    assert build(root, tmp_path / "2").sha256 != before


def test_history_caches_environments_and_our_own_house_stay_at_home(tmp_path):
    root = make(tmp_path / "w", "a.py", ".git/HEAD", "p/__pycache__/a.pyc", ".venv/x", "env/pyvenv.cfg", "env/bin/x",
                "house/local/cloud.json")
    assert bundled(root, houses=[root / "house"]) == {"a.py"}


@pytest.mark.parametrize(("ignore", "left"), [
    ("*.log", {"a.py", "d/a.py", "d/e/a.py", "data/x"}),
    ("data/", {"a.py", "a.log", "d/a.py", "d/b.log", "d/e/a.py"}),
    ("/a.py", {"a.log", "d/a.py", "d/b.log", "d/e/a.py", "data/x"}),
    ("a.py", {"a.log", "d/b.log", "data/x"}),
    ("a.py/", {"a.py", "a.log", "d/a.py", "d/b.log", "d/e/a.py", "data/x"}),
    ("d/*.log", {"a.py", "a.log", "d/a.py", "d/e/a.py", "data/x"}),
    ("d/**", {"a.py", "a.log", "data/x"}),
    ("**/e/a.py", {"a.py", "a.log", "d/a.py", "d/b.log", "data/x"}),
    ("*.log\n!b.log", {"a.py", "d/a.py", "d/b.log", "d/e/a.py", "data/x"}),
    ("d/\n!d/a.py", {"a.py", "a.log", "data/x"}),
    ("# a.py\n\n?.log", {"a.py", "d/a.py", "d/e/a.py", "data/x"}),
    ("[!b].log", {"a.py", "d/a.py", "d/b.log", "d/e/a.py", "data/x"}),
    ("d/*/a.py", {"a.py", "a.log", "d/a.py", "d/b.log", "data/x"}),
])
def test_ignore_rules_are_those_of_git(tmp_path, ignore, left):
    root = make(tmp_path / "w", "a.py", "a.log", "d/a.py", "d/b.log", "d/e/a.py", "data/x")
    (root / ".gitignore").write_text(ignore)
    assert bundled(root) == left | {".gitignore"}


def test_spotfleetignore_wins_over_gitignore_and_deeper_folders_over_higher_ones(tmp_path):
    root = make(tmp_path / "w", "a.bin", "d/a.bin", "d/b.txt")
    make(root, **{".gitignore": "*.bin", ".spotfleetignore": "!a.bin"})
    make(root / "d", **{".gitignore": "a.bin\n/b.txt"})
    assert bundled(root) == {"a.bin", ".gitignore", ".spotfleetignore", "d/.gitignore"}


def test_a_pattern_that_is_none_is_named_with_its_line(tmp_path):
    root = make(tmp_path / "w", "a.py")
    (root / ".gitignore").write_text("a\n[z-a]")
    with pytest.raises(UsageError, match=r"\.gitignore:2: '\[z-a\]' is no pattern"):
        build(root, tmp_path / "b")


def test_files_that_hold_a_secret_are_left_out_and_named(tmp_path):
    root = make(tmp_path / "w", "a.py", env="TOKEN=hunter22", near="hunter2")
    (root / "big").write_bytes(b"x" * (1 << 20) + b"\0" * -3 + b"hunter22")
    (root / "across").write_bytes(b"x" * ((1 << 20) - 4) + b"hunter22")
    bundle = build(root, tmp_path / "b", secrets=["hunter22", "x"])
    with tarfile.open(bundle.path) as tar:
        assert {m.name for m in tar} == {"a.py", "near"}
    assert bundle.left_out == tuple(f"{n}: holds the value of a secret" for n in ("across", "big", "env"))


def test_links_inside_travel_and_links_out_are_left_out_and_named(tmp_path):
    root = make(tmp_path / "w", "d/a.py")
    (root / "d/in").symlink_to("../d/a.py")
    (root / "out").symlink_to("../secret")
    (root / "abs").symlink_to("/etc/passwd")
    bundle = build(root, tmp_path / "b")
    extract(bundle.path, tmp_path / "x")
    assert sorted(p.name for p in (tmp_path / "x").rglob("*")) == ["a.py", "d", "in"]
    assert (tmp_path / "x/d/in").read_text() == "d/a.py"
    assert [line.split(":")[0] for line in bundle.left_out] == ["abs", "out"]


def test_file_mounts_appear_under_their_names(tmp_path):
    root, other = make(tmp_path / "w", "a.py"), make(tmp_path / "o", "x/1", "2")
    assert bundled(root, mounts={"data/raw": other, "one": other / "2"}) == {
        "a.py", "data/raw/x/1", "data/raw/2", "one"}


def test_a_missing_working_directory_or_mount_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"workdir: .* is not a folder"):
        build(tmp_path / "none", tmp_path / "b")
    with pytest.raises(UsageError, match=r"file_mounts\.data: .* does not exist"):
        build(make(tmp_path / "w", "a"), tmp_path / "b", mounts={"data": tmp_path / "none"})


def test_what_was_packed_comes_out_the_same(tmp_path):
    root = make(tmp_path / "w", "a.py", "d/b.py")
    (root / "d/run").write_text("#!/bin/sh\n")
    (root / "d/run").chmod(0o700)
    (root / "empty").mkdir()
    bundle: Bundle = build(root, tmp_path / "b")
    extract(bundle.path, tmp_path / "x")
    assert {str(p.relative_to(tmp_path / "x")) for p in (tmp_path / "x").rglob("*")} == {
        "a.py", "d", "d/b.py", "d/run", "empty"}
    assert os.access(tmp_path / "x/d/run", os.X_OK) and not os.access(tmp_path / "x/a.py", os.X_OK)


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
    whole = gzip.decompress(build(make(tmp_path / "w", "b", a="a" * 100_000), tmp_path / "b").path.read_bytes())
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
    whole = build(make(tmp_path / "w", "a" * 50), tmp_path / "b").path.read_bytes()
    for content in (b"", b"hello", whole[:-20]):
        (tmp_path / "c").write_bytes(content)
        with pytest.raises(ValueError, match="not an archive"):
            extract(tmp_path / "c", tmp_path / "x")
