"""Checkpoints on their way to a host: tried again, told when they are damaged, fetched anew when they were spoilt."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from spotfleet.agent.files import checkpoint_downloads
from spotfleet.agent.files.checkpoint_downloads import HOST_TRIES, SPOILT, TRIES, CheckpointDownloads
from spotfleet.errors import DiskFull, SpotfleetError
from spotfleet.protocol.checkpoint_files import parse_manifest, share_of
from spotfleet.protocol.messages import Assignment, Checkpoint, DamagedCheckpoint, WorkerOrders
from spotfleet.storage import verified
from tests.support.dispatcher.checkpoint_sets import files_of, read, whole

PLACE = Assignment(2, 0, ("h/0/1",), "127.0.0.1:1")
FOLDER = files_of(30, pieces=[b"1" * 30, b"2" * 20, b"3" * 10])
LISTED = parse_manifest(FOLDER["manifest.json"]).files


class Dispatcher:
    """Sends what lies in `files`, and checks as `Transfers` does."""

    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}
        self.sent, self.full, self.breaks_off = 0, False, False
        self.named: list[str] = []  # files of folders that were sent
        self.open = asyncio.Event()
        self.open.set()

    async def checkpoint_share(self, job: str, wanted: Checkpoint, into: Path, came: Callable[[int], None],
                               share) -> list[str]:
        into.mkdir(exist_ok=True)
        names = share(LISTED)
        for name in ["manifest.json", *names]:
            if not (into / name).exists():
                await asyncio.sleep(0.001)
                (into / name).write_bytes(FOLDER[name])
                self.named.append(name)
        return names

    async def checkpoint(self, job: str, wanted: Checkpoint, target: Path, came: Callable[[int], None]) -> None:
        version, digest = wanted.version, wanted.digest
        if wanted.name:
            await self.checkpoint_share(job, wanted, target.with_name(f"{target.name}.part"), came, list)
            target.with_name(f"{target.name}.part").rename(target)
            return
        if version not in self.files:
            raise ConnectionError("not there")
        self.sent += 1
        for _ in self.files[version]:
            came(1)
        await self.open.wait()
        if self.breaks_off:
            raise aiohttp.ClientPayloadError("Response payload is not completed")
        if self.full:
            raise DiskFull("this host's disk is full: 0.1 MB of 8.0 GB free")
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
        self.blamed: list[tuple[str, str]] = []
        self.restores = CheckpointDownloads(self.dispatcher, lambda job: folder / job, self._changed,  # type: ignore[arg-type]
                                 lambda job, why: self.blamed.append((job, why)))

    def _changed(self) -> None:
        self.changes += 1

    def given(self, wanted: WorkerOrders, lacks: str = "") -> WorkerOrders:
        """What a worker is told."""
        return self.restores.resolve("job", wanted, WorkerOrders(founded=True), "h", lacks)

    async def gets(self, wanted: WorkerOrders, lacks: str = "") -> Path:
        """The file that a worker is told to restore, once it is told."""
        async with asyncio.timeout(30):
            while not (told := self.given(wanted, lacks)).assignment:
                assert told.restore is None
                await asyncio.sleep(0.01)
        assert told.restore is not None
        return Path(told.restore.path)

    async def tells(self, damaged: tuple[DamagedCheckpoint, ...]) -> None:
        async with asyncio.timeout(30):
            while self.restores.damaged() != damaged:
                await asyncio.sleep(0.01)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Host], Awaitable[None]]], None]:
    monkeypatch.setattr(checkpoint_downloads, "FIRST_BACKOFF_S", 0.001)

    def run(scene: Callable[[Host], Awaitable[None]]) -> None:
        asyncio.run(scene(Host(tmp_path)))

    return run


def test_workers_of_a_host_are_spared_the_comparison_that_its_agent_has_made(play):
    async def scene(host: Host) -> None:
        host.dispatcher.files[5], host.dispatcher.files[6] = data_of(5), data_of(6)
        older = await host.gets(orders(5))
        assert verified.is_noted(older, kept(5).digest) and not verified.is_noted(older, kept(6).digest)
        newer = await host.gets(orders(6))
        assert sorted(p.name for p in newer.parent.iterdir()) == [newer.name, f"{newer.name}.verified"]

    play(scene)


def test_what_stays_damaged_is_told_after_a_few_tries_and_fetched_no_more(play):
    async def scene(host: Host) -> None:
        host.dispatcher.files[20] = b"state 2O"
        assert host.given(orders(20)).assignment is None
        await host.tells((DamagedCheckpoint("job", 20, kept(20).digest),))
        assert "damaged" in host.restores.why("job") and host.changes == 1
        await asyncio.sleep(0.05)
        assert host.dispatcher.sent == TRIES

    play(scene)


def test_another_one_named_instead_is_fetched_at_once_and_nothing_is_told_any_more(play):
    async def scene(host: Host) -> None:
        host.dispatcher.files |= {20: b"state 2O", 10: data_of(10)}
        host.given(orders(20))
        await host.tells((DamagedCheckpoint("job", 20, kept(20).digest),))
        assert (await host.gets(orders(10))).read_bytes() == data_of(10)
        assert host.restores.damaged() == ()

    play(scene)


def test_a_dispatcher_that_goes_on_naming_it_may_have_got_it_back(play, monkeypatch):
    monkeypatch.setattr(checkpoint_downloads, "AGAIN_S", 0.05)

    async def scene(host: Host) -> None:
        host.dispatcher.files[20] = b"state 2O"
        host.given(orders(20))
        await host.tells((DamagedCheckpoint("job", 20, kept(20).digest),))
        host.dispatcher.files[20] = data_of(20)
        assert (await host.gets(orders(20))).read_bytes() == data_of(20)
        assert host.restores.damaged() == ()

    play(scene)


def test_a_file_that_the_dispatcher_cannot_read_to_its_end_is_reported(play):
    async def scene(host: Host) -> None:
        host.dispatcher.files[20], host.dispatcher.breaks_off = data_of(20), True
        host.given(orders(20))
        await host.tells((DamagedCheckpoint("job", 20, kept(20).digest),))
        assert host.dispatcher.sent == TRIES

    play(scene)


def test_a_host_to_which_a_whole_file_always_comes_damaged_is_blamed(play, monkeypatch):
    monkeypatch.setattr(checkpoint_downloads, "AGAIN_S", 0.01)

    async def scene(host: Host) -> None:
        host.dispatcher.files[20] = b"state 2O"
        host.given(orders(20))
        await until(lambda: host.blamed)
        assert host.dispatcher.sent == HOST_TRIES and host.restores.damaged()
        why = "checkpoint 20 arrived damaged here 6 times, and the dispatcher's file is whole"
        assert host.blamed == [("job", why)]

    play(scene)


def test_a_host_whose_disk_spoils_what_came_whole_is_blamed(play):
    async def scene(host: Host) -> None:
        host.dispatcher.files |= {20: data_of(20), 30: data_of(30)}
        for _ in range(SPOILT - 1):
            (await host.gets(orders(20))).write_bytes(b"state")
        await host.gets(orders(20))
        (await host.gets(orders(30))).unlink()  # another file: counted anew
        (await host.gets(orders(30))).unlink()
        await host.gets(orders(30))
        assert host.blamed == []
        (await host.gets(orders(30))).unlink()
        await host.gets(orders(30))
        (job, why), = host.blamed
        assert job == "job" and why.startswith("checkpoint 30 arrived damaged here: it came whole 3 times")

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


def test_a_host_without_room_says_so_and_is_given_up_after_a_while(play, monkeypatch):
    async def scene(host: Host) -> None:
        host.dispatcher.files[20], host.dispatcher.full = data_of(20), True
        host.given(orders(20))
        full = "this host's disk is full: 0.1 MB of 8.0 GB free"
        await until(lambda: host.restores.why("job") == f"fetching checkpoint 20, for which there is no room: {full}")
        assert host.blamed == []
        monkeypatch.setattr(checkpoint_downloads, "FULL_S", 0.1)
        await until(lambda: host.blamed)
        assert host.blamed[0] == ("job", f"checkpoint 20 finds no room here: {full}")
        assert host.restores.damaged() == ()
        host.restores.forget("job")
        sent = host.dispatcher.sent
        await asyncio.sleep(0.05)
        assert (host.dispatcher.sent, host.restores.why("job")) == (sent, "")

    play(scene)


def test_room_that_comes_soon_is_all_it_needs(play):
    async def scene(host: Host) -> None:
        host.dispatcher.files[20], host.dispatcher.full = data_of(20), True
        host.given(orders(20))
        await until(lambda: "no room" in host.restores.why("job"))
        host.dispatcher.full = False
        assert (await host.gets(orders(20))).read_bytes() == data_of(20)
        assert (host.blamed, host.restores.why("job")) == ([], "")

    play(scene)


def test_how_much_has_come_is_told_while_it_comes_and_a_transfer_that_breaks_off_does_not_count_twice(play):
    async def scene(host: Host) -> None:
        host.dispatcher.open.clear()
        host.dispatcher.files[20], host.dispatcher.full = data_of(20), True
        host.given(orders(20))
        await until(lambda: host.restores.fetched("job") == len(data_of(20)))
        host.dispatcher.open.set()
        await until(lambda: host.dispatcher.sent > 2)
        assert host.restores.fetched("job") == len(data_of(20))
        host.dispatcher.full = False
        await host.gets(orders(20))
        assert host.restores.fetched("job") == 0

    play(scene)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def shared(*hosts: str, members: tuple[str, ...] = ()) -> WorkerOrders:
    """Orders to restore a folder, for a job on these hosts, whose newest generation has these members."""
    place = Assignment(2, 0 if "h/0/1" in members else -1, members or ("gone/0/1",), "127.0.0.1:1")
    return WorkerOrders(place, founded=True, restore=whole(FOLDER), sharers=hosts)


def test_a_host_fetches_its_share_of_what_several_restore_and_more_when_one_of_them_is_lost(play):
    async def scene(host: Host) -> None:
        sent = host.dispatcher.named
        path = await host.gets(shared("g", "h", "i"))
        assert sent == ["manifest.json", *share_of(LISTED, ("g", "h", "i"), "h")] and len(sent) < len(FOLDER)
        assert sorted(p.name for p in path.iterdir()) == sorted(sent)
        (path / "from-a-peer").touch()  # its workers complete it
        members = ("g/0/1", "h/0/1", "i/0/1")
        assert await host.gets(shared("g", "h", "i", "spare", members=members)) == path and len(sent) < len(FOLDER)
        assert await host.gets(shared("g", "h", "i", "spare", members=members[:2])) == path
        assert set(sent) == {"manifest.json", *share_of(LISTED, ("g", "h"), "h"),
                             *share_of(LISTED, ("g", "h", "i"), "h")}
        alone = await host.gets(shared("h", members=members[1:2]))
        assert sorted(sent) == sorted(FOLDER) and not path.exists()  # nothing came twice
        assert verified.is_noted(alone, whole(FOLDER).digest) or (alone / "from-a-peer").exists()

    play(scene)


def test_all_of_it_is_fetched_for_a_worker_whose_peers_lack_some_and_by_order_of_an_older_dispatcher(play):
    async def scene(host: Host) -> None:
        orders = shared("g", "h", members=("g/0/1", "h/0/1"))
        await host.gets(orders)
        assert len(host.dispatcher.named) < len(FOLDER)
        await host.gets(orders, lacks="0" * 64)
        assert len(host.dispatcher.named) < len(FOLDER)
        path = await host.gets(orders, lacks=whole(FOLDER).digest)
        assert sorted(host.dispatcher.named) == sorted(FOLDER)
        assert await host.gets(orders) == path  # another worker of this host, which does not report it

    async def older(host: Host) -> None:
        path = await host.gets(shared(members=("g/0/1", "h/0/1")))
        assert (read(path), host.dispatcher.named) == (FOLDER, [])  # an agent of before has left it here

    play(scene)
    play(older)


def test_a_share_whose_file_was_changed_here_is_fetched_again(play):
    async def scene(host: Host) -> None:
        orders = shared("g", "h", members=("g/0/1", "h/0/1"))
        path = await host.gets(orders)
        changed = share_of(LISTED, ("g", "h"), "h")[0]
        (path / changed).unlink()
        assert host.given(orders).assignment is None
        assert (await host.gets(orders) / changed).read_bytes() == FOLDER[changed]

    play(scene)
