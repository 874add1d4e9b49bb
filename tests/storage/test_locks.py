"""Locks that are files: who gets one, who waits, and what is left of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from spotfleet.storage import locks


def test_one_holder_excludes_all_others_until_it_closes_the_file(tmp_path: Path):
    with (tmp_path / "lock").open("a") as first, (tmp_path / "lock").open("a") as second:
        assert [locks.take(first), locks.take(second), locks.take(second, shared=True)] == [True, False, False]
        first.close()
        assert locks.take(second)


def test_holders_of_a_shared_lock_exclude_only_whoever_wants_it_alone(tmp_path: Path):
    first, second, third = ((tmp_path / "lock").open("a") for _ in range(3))
    with first, second, third:
        assert [locks.take(first, shared=True), locks.take(second, shared=True), locks.take(third)] == [
            True, True, False]


def test_whoever_waits_gets_the_lock_when_its_holder_goes(tmp_path: Path):
    with (tmp_path / "lock").open("a") as first, (tmp_path / "lock").open("a") as second:
        assert locks.take(first)
        got: list[bool] = []
        waiting = threading.Thread(target=lambda: got.append(locks.take(second, wait=True)))
        waiting.start()
        assert got == []
        first.close()
        waiting.join(10)
        assert got == [True]


def test_a_lock_that_leaves_nothing_is_held_by_one_thread_and_is_gone_afterwards(tmp_path: Path):
    path = tmp_path / "lock"
    with locks.locked(path, 0.0):
        with pytest.raises(TimeoutError, match="another command holds"), locks.locked(path, 0.0):
            raise AssertionError("two hold it")
        assert path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_signed_lock_names_its_holder_to_whoever_waits(tmp_path: Path):
    told: list[str] = []
    with locks.signed(tmp_path / "lock", 0.0, lambda holder, _s: told.append(holder)) as first:
        with locks.signed(tmp_path / "lock", 0.05, lambda holder, _s: told.append(holder)) as second:
            assert (first, second, told) == ("", str(os.getpid()), [str(os.getpid())])
    with locks.signed(tmp_path / "lock", 0.0, lambda _holder, _s: None) as again:
        assert again == ""
