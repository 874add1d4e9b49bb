"""The promises of `DurableStore`, kept by each of its backends."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfleet.storage import object_store
from spotfleet.storage.folder import FolderStore
from spotfleet.storage.object_store import ObjectStore
from spotfleet.storage.store import DurableStore, UnsafeKey

DATA = b"0123456789"


@pytest.fixture(params=["folder", "memory://root", "memory://root/a/prefix", "file://"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DurableStore]:
    if request.param == "folder":
        yield FolderStore(tmp_path)
        return
    pytest.importorskip("obstore")
    yield ObjectStore(f"file://{tmp_path}" if request.param == "file://" else request.param)
    object_store.reset()


def test_content_is_read_whole_and_by_ranges(store: DurableStore):
    assert store.put("jobs/a/b", [DATA[:4], DATA[4:]]) == hashlib.sha256(DATA).hexdigest()
    assert b"".join(store.get("jobs/a/b")) == DATA
    assert b"".join(store.get("jobs/a/b", start=3, end=7)) == b"3456"
    assert b"".join(store.get("jobs/a/b", start=8)) == b"89"
    for start, end in ((8, 12), (0, 100), (10, 12), (50, 60), (10, None), (50, None), (7, 7)):
        assert b"".join(store.get("jobs/a/b", start=start, end=end)) == DATA[start:end]  # what is there of it
    store.put("jobs/a/b", [b"other"], size=5)
    assert b"".join(store.get("jobs/a/b")) == b"other"


def test_keys_are_listed_in_order_below_a_folder(store: DurableStore):
    for key in ("b", "a/2", "a/1", "ab"):
        store.put(key, [DATA])
    assert [(e.key, e.bytes) for e in store.list()] == [(key, 10) for key in ("a/1", "a/2", "ab", "b")]
    assert [e.key for e in store.list("a")] == ["a/1", "a/2"] and all(e.mtime > 0 for e in store.list())
    assert [(e.key, e.bytes) for e in store.list("a/1")] == [("a/1", 10)]  # the key itself
    assert list(store.list("none")) == []


def test_a_deleted_key_is_gone_and_may_be_deleted_again(store: DurableStore):
    store.put("a", [DATA])
    for _ in range(2):
        store.delete("a")
        assert list(store.list()) == []
    for end in (None, 3):
        with pytest.raises(FileNotFoundError):
            list(store.get("a", end=end))


def test_content_that_breaks_off_or_has_another_size_is_not_stored(store: DurableStore):
    store.put("a", [b"old"])

    def broken() -> Iterator[bytes]:
        yield DATA
        raise OSError("the disk of the sender")

    for put in (lambda: store.put("a", broken()), lambda: store.put("a", [DATA], size=11)):
        with pytest.raises(OSError):
            put()
    assert b"".join(store.get("a")) == b"old" and [e.key for e in store.list()] == ["a"]


def test_no_key_leads_out_of_a_store(store: DurableStore):
    for key in ("", "/a", "../a", "a/../../b", "a//b", "./a"):
        for act in (lambda key=key: store.put(key, [DATA]), lambda key=key: list(store.get(key)),
                    lambda key=key: store.delete(key)):
            with pytest.raises(UnsafeKey):
                act()
