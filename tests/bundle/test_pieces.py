"""Cutting a tree into pieces and putting it together again, over random trees and changes."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotfleet import bundle
from spotfleet.bundle import grouping, make
from spotfleet.bundle.blob import RACY_S, compress
from spotfleet.bundle.tree import File
from tests.support.cli.packing import Shelf, picture

NAMES = st.one_of(st.sampled_from([b"a", b"b.py", b"caf\xc3\xa9", b"\xff\xfe", b"a b", b"new\nline", b"'\"\\", b"-"]),
                  st.binary(min_size=1, max_size=5).filter(lambda b: not {0, 47} & {*b} and b not in (b".", b"..")))
CONTENTS = st.one_of(st.binary(max_size=60), st.integers(0, 400).map(lambda n: b"x" * n))
NODES = st.recursive(st.one_of(CONTENTS, CONTENTS.map(lambda c: (c,)), st.just("link")),
                     lambda inner: st.dictionaries(NAMES, inner, max_size=4), max_leaves=25)
TREES = st.dictionaries(NAMES, NODES, max_size=6)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow,
                                                                        HealthCheck.function_scoped_fixture])


@pytest.fixture
def small(monkeypatch) -> None:
    """Pieces of a few hundred bytes, so that small trees have many."""
    for name, size in (("LEAST_BYTES", 60), ("USUAL_BYTES", 200), ("MOST_BYTES", 500), ("LARGE_BYTES", 150),
                       ("RANGE_BYTES", 100), ("ENTRY_BYTES", 8)):
        monkeypatch.setattr(grouping, name, size)


def plant(folder: bytes, tree: dict) -> None:
    """A folder of bytes (files), 1-tuples (executable files), "link" and dicts (folders)."""
    os.mkdir(folder)
    for name, node in tree.items():
        path = os.path.join(folder, name)
        if isinstance(node, dict):
            plant(path, node)
        elif node == "link":
            os.symlink(b"some/where", path)
        else:
            with open(path, "wb") as file:
                file.write(node[0] if isinstance(node, tuple) else node)
            os.chmod(path, 0o755 if isinstance(node, tuple) else 0o644)


@QUICK
@given(tree=TREES)
def test_a_tree_comes_out_as_it_went_in(small, tmp_path_factory, tree):
    top = tmp_path_factory.mktemp("trip")
    plant(os.fsencode(top / "w"), tree)
    shelf = Shelf(top / "shelf")
    out = shelf.unpack(shelf.pack(top / "w"), top / "x")
    assert picture(out) == picture(top / "w")
    shutil.rmtree(top)


def files(rng: random.Random, count: int, folder: str = "", biggest: int = 120) -> dict[str, int]:
    return {f"{folder}{rng.randrange(10**9):09d}.py": rng.randrange(biggest) for _ in range(count)}


def cut(sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """The pieces of files with these names and sizes: which file and from where."""
    found = grouping.group([File(name, "", size, 0, 0, 0, False) for name, size in sorted(sizes.items())])
    return [tuple(f"{s.file.name}@{s.start}" for s in members) for members in found]


def changed(before: dict[str, int], after: dict[str, int]) -> int:
    return len(set(cut(after)) - set(cut(before)))


def test_a_changed_an_inserted_and_a_removed_file_move_the_cuts_near_them_only(small):
    worst: dict[str, int] = {"changed": 0, "inserted": 0, "removed": 0}
    for seed in range(60):
        rng = random.Random(seed)
        tree = files(rng, 400)
        one = rng.choice(sorted(tree))
        trials = {"changed": tree | {one: rng.randrange(150)}, "inserted": tree | files(rng, 1),
                  "removed": {n: s for n, s in tree.items() if n != one}}
        for what, other in trials.items():
            worst[what] = max(worst[what], changed(tree, other))
    assert len(cut(tree)) > 60
    assert max(worst.values()) <= 8, worst


def test_a_renamed_folder_keeps_its_pieces_but_the_outer_ones(small):
    rng = random.Random(1)
    around, inner = files(rng, 200, "m/"), files(rng, 300)
    before = around | {f"a/deep/{n}": s for n, s in inner.items()}
    after = around | {f"z/deep/{n}": s for n, s in inner.items()}
    without_folders = [{tuple(n.rpartition("/")[2] for n in piece) for piece in cut(t)} for t in (before, after)]
    assert len(without_folders[1] - without_folders[0]) <= 8 < len(without_folders[0]) / 8


def test_pieces_are_neither_tiny_nor_huge_also_when_every_file_bears_the_same_name(small):
    for sizes in (files(random.Random(2), 2000), {f"{i:04d}/label.txt": 10 for i in range(2000)},
                  {f"{i:04d}/empty": 0 for i in range(2000)}):
        weights = [sum(sizes[n.rpartition("@")[0]] + grouping.ENTRY_BYTES for n in piece) for piece in cut(sizes)]
        assert max(weights) <= grouping.MOST_BYTES + 150
        assert min(weights[:-1]) >= grouping.LEAST_BYTES


def test_files_of_one_name_move_the_cuts_near_a_change_only_too(small):
    tree = {f"{i:04d}/label.txt": 10 for i in range(2000)}
    assert changed(tree, tree | {"0003a/label.txt": 10}) <= 8


def test_a_large_file_that_is_changed_in_place_sends_the_changed_range_only(small, tmp_path):
    (tmp_path / "w").mkdir()
    data = bytearray(random.Random(3).randbytes(1000))
    shelf = Shelf(tmp_path / "shelf")
    (tmp_path / "w/weights").write_bytes(data)
    before = shelf.pieces(shelf.pack(tmp_path / "w"))
    data[555] ^= 1
    (tmp_path / "w/weights").write_bytes(data)
    after = shelf.pieces(digest := shelf.pack(tmp_path / "w"))
    assert (len(after), len(after - before)) == (10, 1)
    assert (shelf.unpack(digest, tmp_path / "x") / "weights").read_bytes() == data


def test_contents_that_cannot_be_compressed_travel_as_they_are():
    for data, most in ((random.Random(4).randbytes(1 << 20), 1.001), (b"spot" * (1 << 18), 0.02)):
        assert len(compress(data)) < most * len(data)


# ---- what this machine remembers


def group_of(folder: Path) -> bundle.Group:
    groups = bundle.group(bundle.scan(folder).files)
    assert len(groups) == 1
    return groups[0]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "w").mkdir()
    (tmp_path / "w/a.py").write_text("a = 1\n")
    return tmp_path / "w"


def later(folder: Path) -> float:
    """When the files in `folder` are not fresh any more."""
    return max(f.ctime_ns for f in bundle.scan(folder).files) / 1e9 + RACY_S + 0.001


def remembered(memory: bundle.PieceCache, work: Path, now: float) -> bool:
    """Pack `work` as of `now`; is it known the next time, also to another process?"""
    members = group_of(work)
    memory.keep(members, make(members, now=now))
    memory.save()
    return bundle.PieceCache(memory.path).find(group_of(work)) is not None


def test_a_file_that_was_changed_just_before_it_was_read_is_read_again(work, tmp_path):
    memory = bundle.PieceCache(tmp_path / "memory")
    assert not remembered(memory, work, later(work) - 0.01)
    assert remembered(memory, work, later(work))


@pytest.mark.parametrize("change", [
    lambda p: p.write_text("a = 1"), lambda p: os.utime(p, (1, 1)),
    lambda p: (p.rename(p.with_name("b")), p.write_text("a = 2\n"), os.utime(p, ns=(1, 10**18))),
], ids=["size", "time", "another file with the same size and time"])
def test_a_file_that_may_have_changed_is_read_again(work, tmp_path, change):
    os.utime(work / "a.py", ns=(1, 10**18))
    memory = bundle.PieceCache(tmp_path / "memory")
    assert remembered(memory, work, later(work))
    change(work / "a.py")
    (work / "b").unlink(missing_ok=True)
    assert memory.find(group_of(work)) is None


def test_a_file_that_changes_while_it_is_read_travels_as_it_was_read_and_is_read_again(work, tmp_path):
    members = group_of(work)
    (work / "a.py").write_text("a = 2; b = 3\n")  # after the look at it
    made = make(members, now=later(work) + 10)
    assert (made.sizes, made.steady) == ((6,), False)
    shelf = Shelf(tmp_path / "shelf")
    packed = bundle.assemble(bundle.Tree((), (), (members[0].file,), ()), [members], [made])
    shelf.put(made.blob)
    out = shelf.unpack(shelf.put(bundle.dump(packed.manifest)), tmp_path / "x")
    assert (out / "a.py").read_text() == "a = 2;"


def test_with_other_secrets_everything_is_searched_again_and_the_memory_tells_none(work, tmp_path):
    path = tmp_path / "memory"
    first, members = bundle.PieceCache(path, bundle.SecretValues.of(["hunter22"])), group_of(work)
    first.keep(members, make(members, bundle.SecretValues.of(["hunter22"]), now=later(work)))
    first.save()
    assert bundle.PieceCache(path, bundle.SecretValues.of(["hunter22"])).find(members) is not None
    assert bundle.PieceCache(path, bundle.SecretValues.of(["hunter23"])).find(members) is None
    assert bundle.PieceCache(path).find(members) is None
    assert b"hunter" not in path.read_bytes()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1, "salt": "", "pieces": {"a": [1, 2, 3, 4]}}',
                                  '{"format": 9, "salt": "", "pieces": {}}'])
def test_a_memory_that_is_damaged_costs_nothing_but_the_reading(work, tmp_path, text):
    (tmp_path / "memory").write_text(text)
    assert remembered(bundle.PieceCache(tmp_path / "memory"), work, later(work))
