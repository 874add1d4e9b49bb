"""Checkpoints on their way to a host: tried again, told when they are damaged, fetched anew when they were spoilt."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from spotfleet.agent import restores
from spotfleet.agent.restores import TRIES, Restores
from spotfleet.errors import SpotfleetError
from spotfleet.messages import Assignment, Checkpoint, Damaged, WorkerOrders

PLACE = Assignment(2, 0, ("h/0/1",), "127.0.0.1:1")


class Dispatcher:
    """Sends what lies in `files`, and checks as `Transfers` does."""

    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}
        self.sent = 0

    async def checkpoint(self, job: str, version: int, digest: str, target: Path) -> None:
        if version not in self.files:
            raise ConnectionError("not there")
        self.sent += 1
        if hashlib.sha256(self.files[version]).hexdigest() != digest:
            raise SpotfleetError("has another digest")
        target.write_bytes(self.files[version])


def kept(version: int) -> Checkpoint:
    return Checkpoint(version, hashlib.sha256(data_of(version)).hexdigest(), 0, 1)


def data_of(version: int) -> bytes:
    return b"state %d" % version


def orders(version: int) -> WorkerOrders:
    return WorkerOrders(PLACE, founded=True, restore=kept(version))


class Host:
    def __init__(self, folder: Path) -> None:
        self.dispatcher, self.changes = Dispatcher(), 0
        self.restores = Restores(self.dispatcher, lambda job: folder / job, self._changed)  # type: ignore[arg-type]

    def _changed(self) -> None:
        self.changes += 1

    def given(self, wanted: WorkerOrders) -> WorkerOrders:
        """What a worker is told."""
        return self.restores.resolve("job", wanted, WorkerOrders(founded=True))

    async def gets(self, wanted: WorkerOrders) -> Path:
        """The file that a worker is told to restore, once it is told."""
        async with asyncio.timeout(30):
            while not (told := self.given(wanted)).assignment:
                assert told.restore is None
                await asyncio.sleep(0.01)
        assert told.restore is not None
        return Path(told.restore.path)

    async def tells(self, damaged: tuple[Damaged, ...]) -> None:
        async with asyncio.timeout(30):
            while self.restores.damaged() != damaged:
                await asyncio.sleep(0.01)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Host], Awaitable[None]]], None]:
    monkeypatch.setattr(restores, "FIRST_BACKOFF_S", 0.001)

    def run(scene: Callable[[Host], Awaitable[None]]) -> None:
        asyncio.run(scene(Host(tmp_path)))

    return run


def test_what_stays_damaged_is_told_after_a_few_tries_and_fetched_no_more(play):
    async def scene(host: Host) -> None:
        host.dispatcher.files[20] = b"state 2O"
        assert host.given(orders(20)).assignment is None
        await host.tells((Damaged("job", 20, kept(20).digest),))
        assert "damaged" in host.restores.why("job") and host.changes == 1
        await asyncio.sleep(0.05)
        assert host.dispatcher.sent == TRIES

    play(scene)


def test_another_one_named_instead_is_fetched_at_once_and_nothing_is_told_any_more(play):
    async def scene(host: Host) -> None:
        host.dispatcher.files |= {20: b"state 2O", 10: data_of(10)}
        host.given(orders(20))
        await host.tells((Damaged("job", 20, kept(20).digest),))
        assert (await host.gets(orders(10))).read_bytes() == data_of(10)
        assert host.restores.damaged() == ()

    play(scene)


def test_a_dispatcher_that_goes_on_naming_it_may_have_got_it_back(play, monkeypatch):
    monkeypatch.setattr(restores, "AGAIN_S", 0.05)

    async def scene(host: Host) -> None:
        host.dispatcher.files[20] = b"state 2O"
        host.given(orders(20))
        await host.tells((Damaged("job", 20, kept(20).digest),))
        host.dispatcher.files[20] = data_of(20)
        assert (await host.gets(orders(20))).read_bytes() == data_of(20)
        assert host.restores.damaged() == ()

    play(scene)


def test_a_dispatcher_out_of_reach_is_no_damage(play):
    async def scene(host: Host) -> None:
        host.given(orders(20))
        await asyncio.sleep(0.05)
        assert host.restores.damaged() == ()
        host.dispatcher.files[20] = data_of(20)
        assert (await host.gets(orders(20))).read_bytes() == data_of(20)

    play(scene)


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"state")])
def test_a_file_that_was_spoilt_here_is_fetched_again_for_the_next_worker(play, spoil):
    async def scene(host: Host) -> None:
        host.dispatcher.files[20] = data_of(20)
        spoil(await host.gets(orders(20)))
        assert (await host.gets(orders(20))).read_bytes() == data_of(20)
        assert host.dispatcher.sent == 2

    play(scene)
