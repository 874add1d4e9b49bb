"""The fake of Cloud Storage refuses what the real one refuses, as obstore reports it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fakes.cloud_storage import CloudStorage

obstore: Any = pytest.importorskip("obstore")
exceptions = importlib.import_module("obstore.exceptions")


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudStorage]:
    with CloudStorage(["spot"]) as made:
        for name, value in made.environ().items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def store(cloud: CloudStorage) -> Any:
    return importlib.import_module("obstore.store").from_url("gs://spot")


def test_an_object_is_made_only_where_there_is_none_and_read_only_in_the_generation_that_there_is(cloud, store):
    first = obstore.put(store, "a", b"one", mode="create")
    with pytest.raises(exceptions.AlreadyExistsError, match="412 Precondition Failed"):
        obstore.put(store, "a", b"two", mode="create")
    second = obstore.put(store, "a", b"two", mode=first)
    with pytest.raises(exceptions.PreconditionError, match="412 Precondition Failed"):
        obstore.put(store, "a", b"three", mode=first)
    assert bytes(obstore.get(store, "a", options={"version": second["version"]}).bytes()) == b"two"
    with pytest.raises(FileNotFoundError, match="NoSuchKey"):
        obstore.get(store, "a", options={"version": first["version"]})


def test_a_range_behind_the_end_and_a_second_deletion_are_refused(store):
    obstore.put(store, "a", b"0123456789")
    assert bytes(obstore.get(store, "a", options={"range": {"suffix": 3}}).bytes()) == b"789"
    with pytest.raises(exceptions.GenericError, match="416 Range Not Satisfiable"):
        obstore.get_range(store, "a", start=10, end=12)
    obstore.delete(store, "a")
    with pytest.raises(FileNotFoundError, match="NoSuchKey"):
        obstore.delete(store, "a")


def test_an_upload_of_small_parts_or_one_that_was_aborted_makes_no_object(cloud, store):
    with pytest.raises(exceptions.GenericError, match="EntityTooSmall"):
        obstore.put(store, "a", bytes(3000), chunk_size=1000, use_multipart=True)

    def aborted() -> Iterator[bytes]:
        yield b"a"
        cloud.uploads.clear()

    with pytest.raises(FileNotFoundError, match="NoSuchUpload"):
        obstore.put(store, "a", aborted(), use_multipart=True)
    assert cloud.objects == {}


def test_folders_are_listed_as_common_prefixes_over_pages(cloud, store):
    for name in ("a/1", "a/2", "b&/1", "c", "d", "e"):
        cloud.put("spot", name, b"x")
    found = obstore.list_with_delimiter(store)
    assert (found["common_prefixes"], [m["path"] for m in found["objects"]]) == (["a", "b&"], ["c", "d", "e"])
    assert [m["path"] for batch in obstore.list(store, offset="b&/1") for m in batch] == ["c", "d", "e"]
    further = [url for _, url in cloud.requests if "continuation-token" in url]
    assert len(further) == 3  # two further pages for five rows, one for three


def test_a_token_of_somebody_else_is_refused(cloud, monkeypatch):
    for name, value in cloud.environ("somebody@else").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(exceptions.UnauthenticatedError, match="AuthenticationRequired"):
        obstore.get(importlib.import_module("obstore.store").from_url("gs://spot"), "a")
