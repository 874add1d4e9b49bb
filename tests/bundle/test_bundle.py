"""What of a working directory travels, and that the same content has the same digest."""

from __future__ import annotations

import errno
import os
import subprocess
import zlib
from pathlib import Path

import pytest

from spotfleet.bundle import SecretValues, pack, scan
from spotfleet.bundle.tree import PATH_BYTES
from spotfleet.errors import UsageError
from tests.support.cli.packing import Shelf, picture


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
    """The names of the files and links in the bundle of `workdir`."""
    tree = scan(workdir, **options)
    return {file.name for file in tree.files} | {name for name, _ in tree.links}


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "shelf")


def test_the_same_content_has_the_same_digest_whenever_and_wherever_it_was_written(tmp_path, shelf, monkeypatch):
    one, two = make(tmp_path / "one", "a.py", "d/b.py"), make(tmp_path / "two", "d/b.py", "a.py")
    os.utime(two / "a.py", (1, 1))
    (two / "a.py").chmod(0o600)
    first = shelf.pack(one)
    monkeypatch.setattr("time.time", lambda: 1e9)
    assert first == shelf.pack(two)


@pytest.mark.parametrize("change", [
    lambda root: (root / "a.py").write_text("other"),
    lambda root: (root / "a.py").rename(root / "c.py"),
    lambda root: (root / "a.py").chmod(0o755),
    lambda root: (root / "l").symlink_to("a.py"),
    lambda root: (root / "empty").mkdir(),
])
def test_a_change_of_content_name_executable_bit_link_or_folder_changes_the_digest(tmp_path, shelf, change):
    root = make(tmp_path / "w", "a.py")
    before = shelf.pack(root)
    change(root)
    assert shelf.pack(root) != before


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


@pytest.mark.parametrize("large", [False, True], ids=["packed with others", "in ranges of its own"])
def test_files_that_hold_a_secret_are_left_out_and_named(tmp_path, shelf, monkeypatch, large):
    if large:
        monkeypatch.setattr("spotfleet.bundle.grouping.LARGE_BYTES", 4)
        monkeypatch.setattr("spotfleet.bundle.grouping.RANGE_BYTES", 11)  # the secret lies across two ranges
    root = make(tmp_path / "w", "a.py", env="TOKEN=hunter22", near="hunter2")
    (root / "far").write_bytes(b"x" * (1 << (8 if large else 20)) + b"hunter22")
    (root / "across").write_bytes(b"x" * ((1 << (8 if large else 20)) - 4) + b"hunter22")
    digest, packed = shelf.packed(root, needles=SecretValues.of(["hunter22", "x"]))
    assert picture(shelf.unpack(digest, tmp_path / "x")) == {b"a.py": (False, b"a.py"), b"near": (False, b"hunter2")}
    assert packed.left_out == tuple(f"{n}: holds the value of a secret" for n in ("across", "env", "far"))
    assert not any(b"hunter22" in blob for blob in blobs(shelf))


def blobs(shelf: Shelf) -> list[bytes]:
    """What all pieces hold, one after the other in any order."""
    found = []
    for path in shelf.folder.iterdir():
        data = path.read_bytes()
        found.append(b"" if data.startswith(b"spotfleet") else zlib.decompress(data))
    return found


def test_links_inside_travel_and_links_out_are_left_out_and_named(tmp_path, shelf):
    root = make(tmp_path / "w", "d/a.py")
    (root / "d/in").symlink_to("../d/a.py")
    (root / "out").symlink_to("../secret")
    (root / "abs").symlink_to("/etc/passwd")
    digest, packed = shelf.packed(root)
    out = shelf.unpack(digest, tmp_path / "x")
    assert sorted(p.name for p in out.rglob("*")) == ["a.py", "d", "in"]
    assert (out / "d/in").read_text() == "d/a.py"
    assert [line.split(":")[0] for line in packed.left_out] == ["abs", "out"]


def test_what_cannot_be_read_or_is_no_file_is_left_out_and_named(tmp_path, shelf, monkeypatch):
    root = make(tmp_path / "w", "a.py", "gone.py", "d/b.py")
    os.mkfifo(root / "pipe")
    tree = scan(root)
    (root / "gone.py").unlink()
    packed = pack(tree, lambda made: shelf.put(made.blob))
    assert packed.left_out == ("gone.py: cannot be read (No such file or directory)", "pipe: neither file nor folder")
    assert [file.name for file in packed.manifest.files] == ["a.py", "d/b.py"]

    def refuse(path: str) -> list:
        if path.endswith("/d"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return list(listing(path))

    listing = os.scandir
    monkeypatch.setattr(os, "scandir", refuse)
    assert "d: cannot be read (Permission denied)" in scan(root).left_out


def test_file_mounts_appear_under_their_names(tmp_path):
    root, other = make(tmp_path / "w", "a.py"), make(tmp_path / "o", "x/1", "2")
    assert bundled(root, mounts={"data/raw": other, "one": other / "2"}) == {
        "a.py", "data/raw/x/1", "data/raw/2", "one"}


def test_a_mount_takes_the_place_of_what_the_directory_has_there(tmp_path, shelf):
    root, other = make(tmp_path / "w", "data/old", "one/x", "two"), make(tmp_path / "o", "new")
    (root / "link").symlink_to("data")
    digest = shelf.pack(root, mounts={"data": other, "one": other / "new", "two/deep": other / "new", "link": other})
    assert picture(shelf.unpack(digest, tmp_path / "x")) == {
        b"data": None, b"data/old": (False, b"data/old"), b"data/new": (False, b"new"), b"one": (False, b"new"),
        b"two": None, b"two/deep": (False, b"new"), b"link": None, b"link/new": (False, b"new")}


def test_a_missing_working_directory_or_mount_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"workdir: .* is not a folder"):
        scan(tmp_path / "none")
    with pytest.raises(UsageError, match=r"file_mounts\.data: .* does not exist"):
        scan(make(tmp_path / "w", "a"), mounts={"data": tmp_path / "none"})


def test_a_tree_that_is_very_deep_is_shipped_as_far_as_a_host_can_have_it(tmp_path, shelf):
    (tmp_path / "w").mkdir()
    here = os.open(tmp_path / "w", os.O_RDONLY)
    for _ in range(1600):  # deeper than Python calls functions
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    digest, packed = shelf.packed(tmp_path / "w")
    assert [line.rpartition(":")[2] for line in packed.left_out] == [f" its path has more than {PATH_BYTES} bytes"]
    assert max(packed.manifest.folders, key=len).count("d") == (PATH_BYTES + 1) // 2
    shelf.unpack(digest, tmp_path / "x")
    subprocess.run(["rm", "-rf", tmp_path / "w", tmp_path / "x"], check=True)  # too deep for pytest
