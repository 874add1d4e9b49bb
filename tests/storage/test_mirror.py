"""A mirror reads each byte once, also over several lives, and puts nothing into its place that is not whole."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.errors import DispatcherUnreachable, SpotfleetError
from spotfleet.storage import mirror, names
from spotfleet.storage.folder import FolderStore
from spotfleet.storage.mirror import Mirror, Piece, StoreReader
from spotfleet.storage.store import StoreEntry, UnsafeKey

PIECE = 100
LARGE = bytes(i % 251 for i in range(1234))
CONTENTS = {"ledger.db": b"rows", "jobs/a-1/logs/empty.log": b"", "jobs/a-1/logs/rank-0.log": b"hello\n",
            "jobs/a-1/checkpoints/7-1.ckpt": LARGE}
KEY = "jobs/a-1/checkpoints/7-1.ckpt"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "PIECE_BYTES", PIECE)


class Source:
    """A store with `contents`, and what was read from it."""

    def __init__(self, folder: Path, contents: dict[str, bytes]) -> None:
        self.store, self.read, self.before = FolderStore(folder), list[Piece](), lambda piece: None
        for key, data in contents.items():
            self.store.put(key, [data])

    def entries(self) -> list[StoreEntry]:
        """As a manifest names them."""
        return [StoreEntry(e.key, e.bytes, hashlib.sha256(self.store.path(e.key).read_bytes()).hexdigest())
                for e in self.store.list()]

    def readers(self, count: int = 1) -> list[StoreReader]:
        return [Recorder(self) for _ in range(count)]

    def moved(self, key: str) -> int:
        return sum(piece.end - piece.start for piece in self.read if piece.key == key)


class Recorder(StoreReader):
    def __init__(self, source: Source) -> None:
        super().__init__(source.store)
        self._source = source

    def read(self, pieces: Sequence[Piece]) -> bytes:
        for piece in pieces:
            self._source.before(piece)
            self._source.read.append(piece)
        return super().read(pieces)


class Renaming(StoreReader):
    """Reader of a store that has some keys under other names."""

    def __init__(self, store: FolderStore, names: dict[str, str]) -> None:
        super().__init__(store)
        self._names = names

    def read(self, pieces: Sequence[Piece]) -> bytes:
        return super().read([replace(piece, key=self._names.get(piece.key, piece.key)) for piece in pieces])


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "source", CONTENTS)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "home/fleet/draft"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def part(place: Path, source: Source, key: str = KEY) -> Path:
    """Where the beginning of a large key is kept."""
    (entry,) = (e for e in source.entries() if e.key == key)
    place.joinpath("parts").mkdir(parents=True, exist_ok=True)
    return Mirror(place)._part_of(entry)


@pytest.mark.parametrize("streams", [1, 4])
def test_all_keys_are_copied_in_pieces_each_byte_once(source: Source, place: Path, streams: int):
    made = Mirror(place)
    assert made.copy(source.entries(), source.readers(streams)) == []
    assert contents(made.files) == CONTENTS and not (place / "parts").exists()
    assert source.moved(KEY) == len(LARGE) and max(p.end - p.start for p in source.read) == PIECE
    assert (made.tally.files, made.tally.present, made.moved) == (4, 0, sum(map(len, CONTENTS.values())))
    assert not [p for p in place.rglob("*") if p.stat().st_mode & 0o077]


def test_the_next_life_reads_only_what_is_missing(source: Source, place: Path):
    first = Mirror(place)
    first.copy([e for e in source.entries() if e.key != KEY], source.readers())
    part(place, source).write_bytes(LARGE[:555])
    source.read.clear()
    made = Mirror(place)
    assert made.copy(source.entries(), source.readers(3)) == []
    assert contents(made.files) == CONTENTS
    assert {p.key for p in source.read} == {KEY} and source.moved(KEY) == len(LARGE) - 555
    assert made.tally.present == 555 + 10


def test_a_large_file_that_a_kill_left_complete_is_only_put_in_its_place(source: Source, place: Path):
    part(place, source).write_bytes(LARGE)
    made = Mirror(place)
    assert made.copy(source.entries(), source.readers()) == [] and source.moved(KEY) == 0
    assert contents(made.files) == CONTENTS


def test_a_damaged_beginning_is_noticed_and_read_anew(source: Source, place: Path):
    part(place, source).write_bytes(b"\0" * 555)  # as a power failure leaves a file
    made = Mirror(place)
    assert made.copy(source.entries(), source.readers(2)) == [KEY]
    assert KEY not in contents(made.files)
    assert made.copy(source.entries(), source.readers(2)) == []
    assert contents(made.files) == CONTENTS and source.moved(KEY) == 2 * len(LARGE) - 555


def test_a_damaged_or_changed_file_is_read_anew_and_the_others_are_not(source: Source, place: Path):
    Mirror(place).copy(source.entries(), source.readers())
    (place / "files" / KEY).write_bytes(b"x" + LARGE[1:])  # the size is right
    source.store.put("ledger.db", [b"more rows"])
    source.read.clear()
    made = Mirror(place)
    assert made.copy(source.entries(), source.readers()) == []
    assert contents(made.files) == CONTENTS | {"ledger.db": b"more rows"}
    assert {p.key for p in source.read} == {KEY, "ledger.db"}


@pytest.mark.parametrize("key", [KEY, "ledger.db"])
def test_a_file_that_changes_after_it_was_listed_is_named_and_has_no_beginning_left(source: Source, place: Path,
                                                                                    key: str):
    listed, changed = source.entries(), CONTENTS[key][::-1]
    source.store.put(key, [changed])
    made = Mirror(place)
    assert made.copy(listed, source.readers(2)) == [key] and key not in contents(made.files)
    assert made.copy(source.entries(), source.readers(2)) == []
    assert contents(made.files) == CONTENTS | {key: changed} and not (place / "parts").exists()


def test_what_the_source_has_no_more_is_named_and_the_rest_is_copied(source: Source, place: Path):
    listed = source.entries()
    source.store.delete(KEY)
    made = Mirror(place)
    assert made.copy(listed, source.readers(2)) == [KEY]
    assert contents(made.files) == {key: data for key, data in CONTENTS.items() if key != KEY}


def test_one_small_key_that_is_gone_or_shorter_keeps_no_other_of_its_request(place: Path, tmp_path: Path):
    source = Source(tmp_path / "source", {f"{n}": b"%d" % n for n in range(9)})
    listed = source.entries()
    source.store.delete("4")
    source.store.put("7", [b""])
    made = Mirror(place)
    assert made.copy(listed, source.readers()) == ["4", "7"]
    assert contents(made.files) == {f"{n}": b"%d" % n for n in range(9) if n not in (4, 7)}


def test_small_keys_are_read_before_a_pause_of_the_list(place: Path, tmp_path: Path):
    source = Source(tmp_path / "source", {"a": b"1", "b": b"2"})
    first, second = source.entries()

    def entries() -> Iterator[StoreEntry | None]:
        yield from (first, None)
        source.store.put("a", [b"3"])
        yield second

    made = Mirror(place)
    assert made.copy(entries(), source.readers()) == [] and contents(made.files) == {"a": b"1", "b": b"2"}


def test_a_key_that_a_list_in_between_lacked_is_read_again(place: Path, tmp_path: Path):
    source = Source(tmp_path / "source", {"a": b"1", "b": b"2"})
    made, (first, second) = Mirror(place), source.entries()
    for listed in ([first], [second], [first, second]):
        assert made.copy(listed, source.readers()) == []
        assert set(contents(made.files)) == {entry.key for entry in listed}


def test_a_key_counts_as_refused_only_while_it_is_listed(place: Path, tmp_path: Path):
    source = Source(tmp_path / "source", {"a": b"1", "b": b"2"})
    made, (first, second) = Mirror(place), source.entries()
    below = replace(second, key="a/b")
    made.copy([first, below], [Renaming(source.store, {"a/b": "b"})])
    assert list(made.refused) == ["a/b"]
    made.copy([first], source.readers())
    assert made.refused == {} and contents(made.files) == {"a": b"1"}


def test_files_of_an_earlier_list_are_removed_also_where_one_is_in_the_way(source: Source, place: Path):
    old = Source(place.parent / "old", {"jobs": b"a file", "ledger.db/x": b"a folder", "gone/a": b""})
    Mirror(place).copy(old.entries(), old.readers())
    made = Mirror(place)
    assert made.copy(source.entries(), source.readers()) == [] and contents(made.files) == CONTENTS
    assert sorted(p.name for p in made.files.iterdir()) == ["jobs", "ledger.db"]


def test_files_of_another_folder_are_not_read_again_and_stay_there(source: Source, place: Path, tmp_path: Path):
    for key, data in CONTENTS.items():
        path = tmp_path / "seed" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if key != "ledger.db" else b"less")
    made = Mirror(place, seed=lambda key: tmp_path / "seed" / key)
    assert made.copy(source.entries(), source.readers()) == [] and contents(made.files) == CONTENTS
    assert {p.key for p in source.read} == {"ledger.db"}
    assert contents(tmp_path / "seed") == CONTENTS | {"ledger.db": b"less"}


@pytest.mark.parametrize("limit", ["KEYS_AT_ONCE", "KEY_CHARS", "PIECE_BYTES"])
def test_small_keys_share_requests_of_limited_size(place: Path, tmp_path: Path, monkeypatch, limit: str):
    source = Source(tmp_path / "source", {f"key-{n:02}": b"12345" for n in range(30)})
    monkeypatch.setattr(mirror, "PIECE_BYTES", 1000)
    monkeypatch.setattr(mirror, limit, {"KEYS_AT_ONCE": 7, "KEY_CHARS": 42, "PIECE_BYTES": 35}[limit])
    requests: list[int] = []

    class Counting(Recorder):
        def read(self, pieces: Sequence[Piece]) -> bytes:
            requests.append(len(pieces))
            return super().read(pieces)

    assert Mirror(place).copy(source.entries(), [Counting(source)]) == []
    assert requests == [7, 7, 7, 7, 2]


def test_a_file_system_without_links_gets_a_copy_for_its_owner_only(source: Source, place: Path, tmp_path: Path,
                                                                    monkeypatch):
    (tmp_path / "seed").write_bytes(b"rows")
    (tmp_path / "seed").chmod(0o644)

    def refuse(*_: object) -> None:
        raise OSError(1, "no links here")

    monkeypatch.setattr(mirror.os, "link", refuse)
    made = Mirror(place, seed=lambda key: tmp_path / "seed")
    assert made.copy(source.entries(), source.readers()) == [] and contents(made.files) == CONTENTS
    assert {p.key for p in source.read} == CONTENTS.keys() - {"ledger.db"}
    assert (made.files / "ledger.db").stat().st_mode & 0o777 == 0o600


HOSTILE: dict[str, Callable[[], Iterable[StoreEntry]]] = {
    "above": lambda: [StoreEntry("../evil", 1, "")], "absolute": lambda: [StoreEntry("/tmp/evil", 1, "")],
    "through": lambda: [StoreEntry("a/../../../evil", 1, "")], "here": lambda: [StoreEntry("./evil", 1, "")],
    "empty": lambda: [StoreEntry("", 1, "")], "zero": lambda: [StoreEntry("evil\0", 1, "")],
    "surrogate": lambda: [StoreEntry("evil\ud800", 1, "")], "long": lambda: [StoreEntry("evil" * 100, 1, "")],
    "twice": lambda: [StoreEntry("a", 0, hashlib.sha256().hexdigest())] * 2,
    "size": lambda: [StoreEntry("evil", -1, "")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_list_that_leads_out_of_the_folder_is_refused(source: Source, place: Path, tmp_path: Path, name: str):
    for streams in (1, 3):
        with pytest.raises(UnsafeKey):
            Mirror(place).copy(HOSTILE[name](), source.readers(streams))
    assert not [p for p in tmp_path.rglob("*") if "evil" in p.name]


def test_a_key_below_another_key_is_set_aside(place: Path, tmp_path: Path):
    below = Source(tmp_path / "below", {"a": b"one"}), Source(tmp_path / "above", {"a/b": b"two"})

    class Both(StoreReader):
        def read(self, pieces: Sequence[Piece]) -> bytes:
            return b"".join(b"one" if piece.key == "a" else b"two" for piece in pieces)

    listed = [*below[0].entries(), *below[1].entries()]
    for _ in range(2):  # an interrupted copy goes on
        made = Mirror(place)
        assert made.copy(listed, [Both(below[0].store)]) == [] and made.refused == {"a/b": "File exists"}
        found = {str(p.relative_to(made.files)): p.read_bytes() for p in made.files.rglob("*") if p.is_file()}
        assert found == {"a": b"one", names.aside("a/b"): b"two"}


def test_names_that_the_disk_does_not_distinguish_are_all_copied(place: Path, tmp_path: Path, monkeypatch):
    contents = {"run/Log": b"first", "run/log": b"second", "RUN/other": LARGE, "run/other/x": b"below", "é": b"one",
                "e\N{COMBINING ACUTE ACCENT}": b"two"}
    source = Source(tmp_path / "source", {str(n): data for n, data in enumerate(contents.values())})
    listed = [replace(entry, key=key) for entry, key in zip(source.entries(), contents, strict=True)]
    reader = Renaming(source.store, {key: str(n) for n, key in enumerate(contents)})
    monkeypatch.setattr(mirror, "folds_names", lambda folder: True)
    for _ in range(2):  # an interrupted copy goes on
        made = Mirror(place)
        assert made.copy(listed, [reader]) == [] and made.refused == {
            "run/log": "this disk does not distinguish it from 'run/Log'",
            "run/other/x": "this disk does not distinguish it from 'RUN/other'",
            "e\N{COMBINING ACUTE ACCENT}": "this disk does not distinguish it from 'é'"}
        assert {key: (made.files / made.path_in_files(key)).read_bytes() for key in contents} == contents
        kept = [str(p.relative_to(made.files)) for p in made.files.rglob("*") if p.is_file()]
        assert len({names.folded(name) for name in kept}) == len(contents)
        (made.files / "RUN").rename(tmp_path / "moved")
        (made.files / "run/other").unlink(missing_ok=True)
        (tmp_path / "moved/other").rename(made.files / "run/other")  # as that disk shows a folder that was there first
        made.copy(listed, [reader])
        assert (made.files / "run/other").read_bytes() == LARGE


def test_names_of_any_length_that_a_file_system_takes_are_copied(place: Path, tmp_path: Path):
    contents = {f"d/{'n' * 255}": b"small", "é" * 127: LARGE}
    source = Source(tmp_path / "source", {str(n): data for n, data in enumerate(contents.values())})
    listed = [replace(entry, key=key) for entry, key in zip(source.entries(), contents, strict=True)]

    class Renamed(StoreReader):
        def read(self, pieces: Sequence[Piece]) -> bytes:
            return b"".join(contents[piece.key][piece.start:piece.end] for piece in pieces)

    made = Mirror(place)
    assert made.copy(listed, [Renamed(source.store)]) == [] and made.refused == {}
    assert {str(p.relative_to(made.files)): p.read_bytes() for p in made.files.rglob("*") if p.is_file()} == contents


def test_pieces_that_arrive_early_wait_and_only_a_few_of_them(source: Source, place: Path):
    released, after = threading.Event(), list[int]()

    def hold_the_first(piece: Piece) -> None:
        if piece == Piece(KEY, 0, PIECE):
            while len(after) < 3:
                assert not released.wait(0.01)
            released.wait(0.2)  # time in which more would be read
            released.set()
        elif piece.key == KEY and not released.is_set():
            after.append(piece.start)

    source.before = hold_the_first
    made = Mirror(place)
    assert made.copy([e for e in source.entries() if e.key == KEY], source.readers(2)) == []
    assert after == [PIECE, 2 * PIECE, 3 * PIECE]  # two streams: four pieces, the missing one included
    assert (made.files / KEY).read_bytes() == LARGE


def test_an_error_of_one_stream_ends_all_and_what_is_here_counts(source: Source, place: Path):
    def fail(piece: Piece) -> None:
        if piece.start >= 700:
            raise DispatcherUnreachable("no answer")

    source.before = fail
    for streams in (1, 3):
        with pytest.raises(DispatcherUnreachable):
            Mirror(place).copy(source.entries(), source.readers(streams))
    source.before = lambda piece: None
    source.read.clear()
    made = Mirror(place)
    assert made.copy(source.entries(), source.readers(3)) == [] and contents(made.files) == CONTENTS
    assert source.moved(KEY) <= len(LARGE) - 4 * PIECE  # at most three pieces were on their way


def test_a_disk_without_room_here_is_no_error_of_the_source(source: Source, place: Path, monkeypatch):
    def refuse(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mirror, "_write_all", refuse)
    with pytest.raises(SpotfleetError, match="cannot be written here: No space left"):
        Mirror(place).copy(source.entries(), source.readers(2))


def test_progress_is_reported_while_a_copy_runs(source: Source, place: Path, monkeypatch):
    seen = []
    monkeypatch.setattr(mirror, "REPORT_S", 0.0)
    Mirror(place, lambda tally: seen.append(tally.here)).copy(source.entries(), source.readers())
    assert seen == sorted(seen) and len(set(seen)) > 5 and seen[-1] == sum(map(len, CONTENTS.values()))
