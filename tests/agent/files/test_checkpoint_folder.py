"""Checkpoint folders of jobs that are started anew: what is sent, what another host gets, what is never sent."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from spotfleet import bundle
from spotfleet.agent.files import checkpoint_folder
from spotfleet.agent.files.blobs import Blobs
from spotfleet.agent.files.bundles import checkpoint_files
from spotfleet.agent.files.checkpoint_folder import CheckpointFolder


class Dispatcher:
    """What `Transfers` reaches: it takes a bundle once all of its pieces are here."""

    def __init__(self, tmp: Path) -> None:
        self.folder = tmp / "dispatcher"
        self.folder.mkdir()
        self.kept: list[str] = []
        self.refuses = 0
        self.away = 0  # number of requests that it does not answer

    async def offer_checkpoints(self, job: str, worker: str, generation: int,
                                body: bytes) -> tuple[int, dict[str, Any]]:
        if self.away:
            self.away -= 1
            raise aiohttp.ClientConnectionError("away")
        if self.refuses:
            return self.refuses, {"error": "not rank 0"}
        digest = hashlib.sha256(body).hexdigest()
        (self.folder / digest).write_bytes(body)
        missing = [p.sha256 for p in bundle.pieces_of(self.folder / digest) if not (self.folder / p.sha256).exists()]
        if not missing:
            self.kept.append(digest)
        return 200, {"missing": missing}

    async def put_bundle(self, digest: str, file: Path) -> int:
        (self.folder / digest).write_bytes(file.read_bytes())
        return 200

    async def bundle(self, digest: str, target: Path, on_bytes: Any) -> None:
        target.write_bytes((self.folder / digest).read_bytes())


class Host:
    def __init__(self, tmp: Path, name: str, dispatcher: Dispatcher, pattern: str = "") -> None:
        home, self.dispatcher = tmp / name, dispatcher
        self.log: list[str] = []
        self.files = CheckpointFolder(dispatcher, Blobs(home, dispatcher), "j", home / "out",  # type: ignore[arg-type]
                                      home / "staged", pattern)
        self.out = home / "out"
        self.out.mkdir(parents=True)

    def write(self, name: str, data: str, age_s: float = 60.0) -> None:
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data)
        os.utime(path, (time.time() - age_s,) * 2)

    def send(self, *, killed: bool = True) -> None:
        asyncio.run(self.files.finish("h/0/1", 1, self.log.append, killed=killed))

    def look(self) -> None:
        """Look once while the process runs."""
        asyncio.run(self.files._send("h/0/1", 1, checkpoint_folder.QUIET_S, self.log.append, runs=True))

    def names(self) -> list[str]:
        """The files of the dispatcher's newest copy."""
        return [file.name for file in bundle.load(self.dispatcher.folder / self.dispatcher.kept[-1]).files]

    def fetch(self, start: int, digest: str) -> None:
        asyncio.run(self.files.fetch(start, digest, lambda text: None))

    def content(self) -> dict[str, str]:
        return {str(p.relative_to(self.out)): p.read_text() for p in sorted(self.out.rglob("*")) if p.is_file()}


@pytest.fixture
def dispatcher(tmp_path: Path) -> Dispatcher:
    return Dispatcher(tmp_path)


def test_another_host_gets_the_folder_as_it_is_and_nothing_else(tmp_path, dispatcher):
    first, second = Host(tmp_path, "a", dispatcher), Host(tmp_path, "b", dispatcher)
    first.write("last.pt", "step 5")
    first.write("epoch-1/model.pt", "weights")
    first.send()
    second.write("last.pt", "stale")
    second.write("step-9.pt", "of a round that was lost")
    second.fetch(1, dispatcher.kept[-1])
    assert second.content() == {"last.pt": "step 5", "epoch-1/model.pt": "weights"}
    second.write("later.pt", "x")
    second.fetch(1, dispatcher.kept[-1])  # the host's other workers, at the same start
    assert "later.pt" in second.content()


def test_a_file_that_is_removed_leaves_the_copy_and_an_unchanged_folder_is_not_sent_again(tmp_path, dispatcher):
    first, second = Host(tmp_path, "a", dispatcher), Host(tmp_path, "b", dispatcher)
    first.write("old.pt", "1")
    first.write("new.pt", "2")
    first.send()
    first.send()
    assert len(dispatcher.kept) == 1
    (first.out / "old.pt").unlink()
    first.send()
    second.fetch(1, dispatcher.kept[-1])
    assert second.content() == {"new.pt": "2"}


def test_a_file_that_was_being_written_when_the_process_was_killed_is_kept_as_it_was_before(tmp_path, dispatcher):
    first, second = Host(tmp_path, "a", dispatcher), Host(tmp_path, "b", dispatcher)
    first.write("last.pt", "whole")
    first.send()
    first.write("last.pt", "hal", age_s=0.0)
    first.write("more.pt", "x")
    first.send(killed=True)
    second.fetch(1, dispatcher.kept[-1])
    assert second.content() == {"last.pt": "whole", "more.pt": "x"}
    first.send(killed=False)  # it had ended in order
    second.fetch(2, dispatcher.kept[-1])
    assert second.content()["last.pt"] == "hal"


def test_a_file_that_changes_all_the_time_is_sent_while_nobody_writes_it(tmp_path, dispatcher, monkeypatch):
    host = Host(tmp_path, "a", dispatcher)
    host.write("best.pt", "1")
    host.write("last.pt", "1", age_s=0.0)
    host.look()
    assert dispatcher.kept == []  # nor the file that is complete: they may belong together
    monkeypatch.setattr(checkpoint_folder, "PATIENCE_S", 0.0)
    with (host.out / "last.pt").open("r+"):
        host.write("last.pt", "2", age_s=0.0)
        host.look()
        assert host.names() == ["best.pt"]
    host.look()
    assert host.names() == ["best.pt", "last.pt"]


def test_new_files_that_come_all_the_time_do_not_hold_up_those_that_are_complete(tmp_path, dispatcher, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "PATIENCE_S", 0.05)
    host = Host(tmp_path, "a", dispatcher)
    host.write("epoch-1.pt", "1")
    until = time.monotonic() + 10
    for number in range(2, 10_000):
        host.write(f"epoch-{number}.pt", "x", age_s=0.0)
        (host.out / f"epoch-{number - 1}.pt").unlink() if number > 2 else None
        host.look()
        if dispatcher.kept or time.monotonic() > until:
            break
    assert dispatcher.kept and host.names() == ["epoch-1.pt"]


def test_without_a_checkpoint_the_users_own_files_stay_and_the_folder_exists(tmp_path, dispatcher):
    host = Host(tmp_path, "a", dispatcher)
    host.write("pretrained.pt", "weights")
    host.fetch(0, "")
    assert host.content() == {"pretrained.pt": "weights"}
    host.files.folder = tmp_path / "fresh"
    host.fetch(1, "")
    assert host.files.folder.is_dir()


def test_a_dispatcher_that_is_away_is_asked_again_and_its_refusal_is_logged(tmp_path, dispatcher, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "FIRST_BACKOFF_S", 0.001)
    host = Host(tmp_path, "a", dispatcher)
    host.write("last.pt", "1")
    dispatcher.away = 2
    host.send()
    assert len(dispatcher.kept) == 1
    dispatcher.refuses = 409
    host.write("last.pt", "2")
    host.send()
    assert len(dispatcher.kept) == 1 and host.log == ["checkpoint folder: not kept: not rank 0"]


def test_a_pattern_takes_its_files_and_leaves_the_others_where_they_are(tmp_path, dispatcher):
    first, second = Host(tmp_path, "a", dispatcher, "*.pt"), Host(tmp_path, "b", dispatcher, "*.pt")
    for name in ("last.pt", "train.py", "data/old.pt"):
        first.write(name, "new")
        second.write(name, "old")
    second.write("stale.pt", "old")
    first.send()
    second.fetch(1, dispatcher.kept[-1])
    assert second.content() == {"last.pt": "new", "train.py": "old", "data/old.pt": "old"}
    assert [checkpoint_files(name) for name in ("", "out", "*.pt", "out/ckpt?.pt")] == [
        ("", ""), ("out", ""), ("", "*.pt"), ("out", "ckpt?.pt")]
