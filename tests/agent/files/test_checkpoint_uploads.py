"""Checkpoints on their way from a host: tried again as long as that may help, and never in a circle."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from spotfleet.agent.files import uploads
from spotfleet.agent.files.uploads import CheckpointShipper
from spotfleet.agent.transfer import NOT_THERE
from spotfleet.protocol.messages import Checkpoint, Unsent
from tests.support.dispatcher.checkpoint_sets import files_of, whole, write


class Dispatcher:
    """Answers each upload with the next of `answers`, the last one for ever; an exception means that it broke off."""

    def __init__(self, *answers: int | Exception) -> None:
        self.answers, self.uploads = list(answers), []
        self.open = asyncio.Event()
        self.open.set()

    async def put_checkpoint(self, job: str, made: Checkpoint, file: Path, opened: object = None) -> int:
        data = file.read_bytes()
        await self.open.wait()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        self.uploads.append((made.version, data, answer))
        return answer


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(uploads, "FIRST_BACKOFF_S", 0.001)

    def run(dispatcher: Dispatcher, scene: Callable[[CheckpointShipper], Awaitable[None]]) -> None:
        async def main() -> None:
            shipper = CheckpointShipper(dispatcher)  # type: ignore[arg-type]
            running = asyncio.create_task(shipper.run())
            async with asyncio.timeout(30):
                await scene(shipper)
            running.cancel()
            assert list((tmp_path / "uploads").iterdir()) == []

        asyncio.run(main())

    return run


def made(folder: Path, version: int) -> Checkpoint:
    path = folder / f"ckpt-{version}.pt"
    path.write_bytes(b"state %d" % version)
    return Checkpoint(version, "d", 7, 1, str(path))


def test_what_broke_off_or_found_no_room_is_sent_again_until_it_arrives(play, tmp_path: Path):
    dispatcher = Dispatcher(ConnectionResetError("cut off"), OSError("507"), 200)

    async def scene(shipper: CheckpointShipper) -> None:
        shipper.offer("job", made(tmp_path, 1), tmp_path / "uploads")
        await shipper.settled("job")
        assert dispatcher.uploads == [(1, b"state 1", 200)]

    play(dispatcher, scene)


def test_what_arrives_with_another_digest_is_sent_again_a_few_times_and_then_the_next_one_is(play, tmp_path: Path):
    dispatcher = Dispatcher(400, 400, 400, 200)

    async def scene(shipper: CheckpointShipper) -> None:
        for version in (1, 2):
            shipper.offer("job", made(tmp_path, version), tmp_path / "uploads")
            await shipper.settled("job")
        assert [(version, answer) for version, _, answer in dispatcher.uploads] == [
            (1, 400), (1, 400), (1, 400), (2, 200)]

    play(dispatcher, scene)


def test_the_same_one_offered_again_while_it_is_sent_arrives(play, tmp_path: Path):
    dispatcher = Dispatcher(200)

    async def scene(shipper: CheckpointShipper) -> None:
        checkpoint = made(tmp_path, 1)
        dispatcher.open.clear()
        shipper.offer("job", checkpoint, tmp_path / "uploads")
        await asyncio.sleep(0.01)
        shipper.again("job")  # another dispatcher, which may have nothing
        shipper.offer("job", checkpoint, tmp_path / "uploads")
        dispatcher.open.set()
        await shipper.settled("job")
        assert dispatcher.uploads == [(1, b"state 1", 200)] * 2

    play(dispatcher, scene)


def test_one_that_somebody_removed_stops_nothing_else(play, tmp_path: Path):
    dispatcher = Dispatcher(200)

    async def scene(shipper: CheckpointShipper) -> None:
        shipper.offer("first", made(tmp_path, 1), tmp_path / "uploads")
        next((tmp_path / "uploads").glob("*/*")).unlink()
        shipper.offer("second", made(tmp_path, 2), tmp_path / "uploads")
        await shipper.settled("first")
        await shipper.settled("second")
        assert [version for version, _, _ in dispatcher.uploads] == [2]

    play(dispatcher, scene)


# ---- parts


def part(folder: Path, version: int, index: int, parts: int = 2, generation: int = 1) -> Checkpoint:
    path = folder / f"part-{version}-{index}.pt"
    path.write_bytes(b"part %d of %d" % (index, version))
    return Checkpoint(version, "d", 7, generation, str(path), index, parts)


def offer(shipper: CheckpointShipper, folder: Path, *checkpoints: Checkpoint) -> None:
    for checkpoint in checkpoints:
        shipper.offer("job", checkpoint, folder / "uploads")


def manifest(folder: Path, version: int, files: dict[str, bytes]) -> Checkpoint:
    """What rank 0 of several reports: its own piece lies beside the manifest, those of others on their hosts."""
    path = write(files, folder / f"{version}-1") / "manifest.json"
    return replace(whole(files), path=str(path), parts=2, part=1)


def test_a_manifest_is_sent_with_the_pieces_beside_it_which_its_worker_may_remove_meanwhile(play, tmp_path: Path):
    dispatcher = Dispatcher(ConnectionResetError("cut off"), 200)

    async def scene(shipper: CheckpointShipper) -> None:
        files = files_of(1, pieces=(b"rank 0's", b"rank 1's"))
        made = manifest(tmp_path, 1, {name: data for name, data in files.items() if name != "__1_0.distcp"} | {
            "manifest.json": files["manifest.json"]})
        offer(shipper, tmp_path, made)
        ((_, waiting),) = shipper.waiting()
        assert Path(waiting.path).name == "manifest.json" and waiting.digest == made.digest
        shutil.rmtree(tmp_path / "1-1")
        await shipper.settled("job")
        assert dispatcher.uploads == [(1, files[name], 200) for name in ("__0_0.distcp", "manifest.json", ".metadata")]

    play(dispatcher, scene)


def test_of_a_manifest_that_is_refused_nothing_more_is_sent(play, tmp_path: Path):
    dispatcher = Dispatcher(409)

    async def scene(shipper: CheckpointShipper) -> None:
        offer(shipper, tmp_path, manifest(tmp_path, 1, files_of(1)))
        await shipper.settled("job")
        assert dispatcher.uploads == [(1, b"weights", 409)]

    play(dispatcher, scene)


def test_a_manifest_that_cannot_be_read_is_not_sent(play, tmp_path: Path):
    async def scene(shipper: CheckpointShipper) -> None:
        made = manifest(tmp_path, 1, files_of(1))
        Path(made.path).write_text("{")
        (tmp_path / "uploads").mkdir()
        offer(shipper, tmp_path, made)
        assert shipper.waiting() == []

    play(Dispatcher(200), scene)


def test_parts_of_one_version_wait_beside_each_other_and_are_each_sent_once(play, tmp_path: Path):
    dispatcher = Dispatcher(200)

    async def scene(shipper: CheckpointShipper) -> None:
        both = part(tmp_path, 1, 0), part(tmp_path, 1, 1)
        offer(shipper, tmp_path, *both, *both)
        await shipper.settled("job")
        offer(shipper, tmp_path, *both)
        await shipper.settled("job")
        assert dispatcher.uploads == [(1, b"part 0 of 1", 200), (1, b"part 1 of 1", 200)]

    play(dispatcher, scene)


def test_a_newer_version_overtakes_all_parts_of_the_older_but_for_the_one_that_is_being_sent(play, tmp_path: Path):
    dispatcher = Dispatcher(200)

    async def scene(shipper: CheckpointShipper) -> None:
        dispatcher.open.clear()
        offer(shipper, tmp_path, *(part(tmp_path, 1, index, 3) for index in range(3)))
        await asyncio.sleep(0.01)
        offer(shipper, tmp_path, part(tmp_path, 2, 2, 3), part(tmp_path, 1, 0, 3))
        dispatcher.open.set()
        await shipper.settled("job")
        assert [data for _, data, _ in dispatcher.uploads] == [b"part 0 of 1", b"part 2 of 2"]

    play(dispatcher, scene)


def test_a_whole_one_takes_the_place_of_its_parts_and_no_part_takes_its(play, tmp_path: Path):
    dispatcher = Dispatcher(200)

    async def scene(shipper: CheckpointShipper) -> None:
        offer(shipper, tmp_path, part(tmp_path, 1, 0), part(tmp_path, 1, 1), made(tmp_path, 1), part(tmp_path, 1, 1))
        await shipper.settled("job")
        assert dispatcher.uploads == [(1, b"state 1", 200)]

    play(dispatcher, scene)


def test_what_a_worker_wrote_has_settled_only_when_every_part_here_has(play, tmp_path: Path):
    dispatcher, slow = Dispatcher(ConnectionResetError("cut off"), 200), asyncio.Event()

    async def scene(shipper: CheckpointShipper) -> None:
        put = dispatcher.put_checkpoint

        async def hold_the_second(job: str, made: Checkpoint, file: Path, opened: object) -> int:
            if made.part == 1:
                await slow.wait()
            return await put(job, made, file)

        dispatcher.put_checkpoint = hold_the_second
        offer(shipper, tmp_path, part(tmp_path, 1, 0), part(tmp_path, 1, 1))
        settling = asyncio.create_task(shipper.settled("job"))
        while not dispatcher.uploads:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert not settling.done()
        slow.set()
        await settling
        assert len(dispatcher.uploads) == 2

    play(dispatcher, scene)


def test_what_has_not_arrived_is_listed_with_its_progress(play, tmp_path: Path):
    dispatcher, slow = Dispatcher(200), asyncio.Event()

    async def scene(shipper: CheckpointShipper) -> None:
        async def half(job: str, made: Checkpoint, file: Path, opened: Callable[[BinaryIO], None]) -> int:
            with file.open("rb") as body:
                opened(body)
                body.read(3)
                await slow.wait()
            return 200

        dispatcher.put_checkpoint = half
        shipper.offer("job", made(tmp_path, 1), tmp_path / "uploads")
        while shipper.unsent(lambda *_: False) != (Unsent("job", "checkpoint", 4, 3),):
            await asyncio.sleep(0)
        assert shipper.unsent(lambda job, made: (job, made.version) == ("job", 1))[0].stored
        ((job, waiting),) = shipper.waiting()
        assert (job, Path(waiting.path).read_bytes()) == ("job", b"state 1")
        slow.set()
        await shipper.settled("job")
        assert shipper.unsent(lambda *_: False) == ()

    play(dispatcher, scene)


class LogReceiver:
    """Holds what a log's sender has sent."""

    dispatcher = 0

    def __init__(self) -> None:
        self.held = b""

    async def append_log(self, job: str, worker: str, offset: int, data: bytes) -> int:
        await asyncio.sleep(0)
        self.held += data
        return len(self.held)


def test_a_log_that_another_process_goes_on_writing_is_complete_with_what_it_held_at_the_end(tmp_path: Path):
    path, receiver = tmp_path / "log", LogReceiver()
    path.write_bytes(b"line\n")
    log = uploads.LogShipper(receiver, "job", "f-1/0/1", path)  # type: ignore[arg-type]
    assert (log.left, log.sent) == (5, 0)

    async def main() -> None:
        log.complete()
        running = asyncio.create_task(log.run())
        async with asyncio.timeout(30):
            while not running.done():
                with path.open("ab") as file:  # a process that the script has left
                    file.write(b"more\n")
                await asyncio.sleep(0)
        await running

    asyncio.run(main())
    assert receiver.held.startswith(b"line\n") and (log.left, log.sent) == (0, len(receiver.held))


@pytest.mark.parametrize("there", [200, NOT_THERE, 409])
def test_files_that_cannot_be_written_at_the_target_are_sent_to_the_dispatcher(play, tmp_path: Path, there):
    written: list[str] = []

    class Target(Dispatcher):
        async def put_at_target(self, job: str, made: Checkpoint, file: Path, opened: object) -> int:
            written.append(made.name)
            return there

    files = files_of(5)
    folder = write(files, tmp_path / "work")
    made = replace(whole(files), path=str(folder / "manifest.json"))
    dispatcher = Target(200)

    async def scene(shipper: CheckpointShipper) -> None:
        shipper.offer("j", made, tmp_path / "uploads", mounted=True)
        await shipper.settled("j")
        assert written == list(files)[:1 if there == 409 else None]
        assert len(dispatcher.uploads) == (len(files) if there == NOT_THERE else 0)

    play(dispatcher, scene)
