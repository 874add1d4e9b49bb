"""What a worker writes into its output folder is at the dispatcher within a moment, whole or as its beginning."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from spotfleet.agent.files import outputs
from spotfleet.agent.files.outputs import OutputShipper
from spotfleet.dispatcher.disk.partials import PartialMarkers
from tests.support.agent.output_stage import Stage, contents, is_link


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PERIOD_S": 0.01, "HURRY_S": 0.01, "POLL_S": 0.01, "SCAN_SHARE": 0, "SEND_SHARE": 0}.items():
        monkeypatch.setattr(outputs, name, value)


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Callable[[Stage], Awaitable[None]]], Stage]:
    """Run a scene beside the shipper; then the worker ends, and all of its folder has to be there."""

    def run(scene: Callable[[Stage], Awaitable[None]]) -> Stage:
        async def main() -> Stage:
            stage = Stage(tmp_path)
            running = asyncio.create_task(stage.shipper.run())
            try:
                playing = asyncio.create_task(scene(stage))
                await asyncio.wait([playing, running], return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    playing.cancel()
                    running.result()
                await playing
                stage.shipper.complete()
                async with asyncio.timeout(60):
                    await running
            finally:
                running.cancel()
            return stage

        stage = asyncio.run(main())
        copies = stage.wire.files()
        plain = {n: d for n, d in contents(stage.folder).items() if n.isprintable() and not is_link(stage.folder / n)}
        assert {name: copies.get(name) for name in plain} == plain
        return stage

    return run


def test_files_are_there_while_the_worker_still_writes_and_a_log_grows_by_its_tail_alone(play):
    async def scene(stage: Stage) -> None:
        stage.write("plots/loss.txt", "0.5")
        log = stage.write("train.log", b"x" * 600_000, age_s=0)
        await stage.until(lambda: stage.wire.files() == {"plots/loss.txt": b"0.5", "train.log": b"x" * 600_000})
        before = stage.wire.bytes
        with log.open("ab") as file:
            for n in range(20):
                file.write(b"line\n")
                file.flush()
                await stage.until(lambda n=n: len(stage.wire.files()["train.log"]) == 600_000 + 5 * (n + 1))
        assert stage.wire.bytes - before < 10_000

    play(scene)


def test_a_file_that_is_rewritten_is_replaced_whole_and_not_while_it_is_being_written(play, monkeypatch):
    monkeypatch.setattr(outputs, "QUIET_S", 5.0)  # longer than this process ever stands still between two writes

    async def scene(stage: Stage) -> None:
        path = stage.write("metrics.json", "{old}")
        await stage.has(metrics__json=b"{old}")
        with path.open("w") as file:  # as open("w") and write() do: it is empty, then half there
            for _ in range(30):
                await asyncio.sleep(0.005)
                file.write("half ")
                file.flush()
                assert stage.wire.files() == {"metrics.json": b"{old}"}
            file.write("whole")
        stage.age(path)
        await stage.has(metrics__json=b"half " * 30 + b"whole")
        stage.write("metrics.json", b"half " * 30 + b"again")  # no longer than before
        await stage.has(metrics__json=b"half " * 30 + b"again")

    play(scene)


def test_a_large_file_is_replaced_only_when_all_of_the_new_one_is_there(play):
    async def scene(stage: Stage) -> None:
        old, new = random.Random(1).randbytes(3 << 20), random.Random(2).randbytes(4 << 20)
        stage.write("model.pt", old)
        await stage.has(model__pt=old)
        seen = set()

        def look() -> None:
            while not done.is_set():
                seen.add(hashlib.sha256(stage.wire.files()["model.pt"]).hexdigest())
                time.sleep(0.005)

        done = threading.Event()
        looking = threading.Thread(target=look)
        looking.start()
        stage.write("model.pt", new)
        await stage.has(model__pt=new)
        done.set()
        looking.join()
        assert seen <= {hashlib.sha256(d).hexdigest() for d in (old, new)}

    play(scene)


def test_a_new_version_that_is_renamed_into_place_is_sent_once_and_never_half_there(play):
    async def scene(stage: Stage) -> None:
        stage.write("model.pt", b"a" * 400_000)
        await stage.has(model__pt=b"a" * 400_000)
        draft = stage.write("model.pt.tmp", b"b" * 500_000)
        await stage.until(lambda: stage.wire.files().get("model.pt.tmp") == b"b" * 500_000)
        before = stage.wire.bytes
        draft.rename(stage.folder / "model.pt")
        await stage.has(model__pt=b"b" * 500_000)
        assert stage.wire.bytes - before < 10_000

    play(scene)


def test_a_file_that_takes_the_inode_of_a_removed_one_is_no_rename_of_it(play, monkeypatch):
    async def scene(stage: Stage) -> None:
        first = stage.write("first", "one")
        await stage.has(first=b"one")
        first.unlink()
        stage.write("second", "another")
        await stage.has(first=b"one", second=b"another")

    seen = OutputShipper._scan

    def same_inode(self):
        return {name: (7, *rest) for name, (_, *rest) in seen(self).items()}

    monkeypatch.setattr(OutputShipper, "_scan", same_inode)
    play(scene)


def test_what_is_removed_stays_and_what_becomes_another_kind_of_thing_is_kept_beside(play):
    async def scene(stage: Stage) -> None:
        path = stage.write("best", "7")
        stage.write("old.txt", "x")
        await stage.has(best=b"7", old__txt=b"x")
        path.unlink()
        (stage.folder / "old.txt").unlink()
        stage.write("best/epoch", "8")
        await stage.until(lambda: "best/epoch" in stage.wire.files())
        assert stage.wire.files() == {"best.1": b"7", "best/epoch": b"8", "old.txt": b"x"}

    play(scene)


def test_links_pipes_and_names_that_are_no_text_are_left_out_and_named(play, tmp_path):
    async def scene(stage: Stage) -> None:
        (tmp_path / "secret").write_text("of the host")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "f").write_text("x")
        (stage.folder / "link").symlink_to(tmp_path / "secret")
        (stage.folder / "to_folder").symlink_to(tmp_path / "folder")
        os.mkfifo(stage.folder / "pipe")
        Path(os.fsdecode(bytes(stage.folder) + b"/\xff\xfe")).write_text("odd")
        stage.write("..hidden", "fine")
        await stage.until(lambda: stage.wire.files() == {"..hidden": b"fine"})

    (said,) = play(scene).said
    assert said == "output: not collected: link (no plain file), pipe (no plain file), to_folder (no plain file), " \
                   "\\udcff\\udcfe (its name is no text)"
    assert contents(tmp_path / "copies") == {"f-1@0@1/..hidden": b"fine"}


def test_what_changes_unseen_is_found_by_the_comparison_at_the_end(play):
    async def scene(stage: Stage) -> None:
        data = bytearray(random.Random(3).randbytes(100_000))
        path = stage.write("table.bin", bytes(data))
        stamp = path.stat().st_mtime_ns
        await stage.has(table__bin=bytes(data))
        data[50_000:50_004] = b"EDIT"
        with path.open("r+b") as file:
            file.write(data)
        os.utime(path, ns=(stamp, stamp))
        await asyncio.sleep(0.05)
        assert stage.wire.files()["table.bin"] != bytes(data)

    play(scene)


def test_a_growing_file_whose_middle_changed_too_is_whole_at_the_end(play):
    async def scene(stage: Stage) -> None:
        path = stage.write("db", b"a" * 50_000)
        await stage.has(db=b"a" * 50_000)
        path.write_bytes(b"a" * 20_000 + b"CHANGED" + b"a" * 30_000)
        await stage.until(lambda: len(stage.wire.files()["db"]) == 50_007)

    play(scene)


def test_lost_answers_neither_repeat_nor_lose_anything(play):
    async def scene(stage: Stage) -> None:
        stage.wire.lose_answers = 3
        log = stage.write("train.log", "one\n", age_s=0)
        await stage.has(train__log=b"one\n")
        stage.wire.lose_answers = 2
        with log.open("a") as file:
            file.write("two\n")
        await stage.has(train__log=b"one\ntwo\n")
        stage.wire.lose_answers = 1
        stage.write("train.log", "anew\n")
        await stage.has(train__log=b"anew\n")

    play(scene)


def test_a_lost_answer_has_a_large_file_that_grows_sent_no_second_time(play):
    before, more, sent = os.urandom(5 << 20), os.urandom(outputs.BATCH_BYTES), []

    async def scene(stage: Stage) -> None:
        path = stage.write("big", before, age_s=0)
        await stage.has(big=before)
        sent.append(stage.wire.bytes)
        stage.wire.lose_answers = 1
        with path.open("ab") as file:
            file.write(more)
        await stage.has(big=before + more)

    assert play(scene).wire.bytes - sent[0] < 3 * len(more)


def test_a_dispatcher_that_has_lost_its_disk_gets_all_of_it_again(play):
    async def scene(stage: Stage) -> None:
        stage.write("a/old", "nobody writes this again")
        stage.write("train.log", "one\n", age_s=0)
        await stage.until(lambda: len(stage.wire.files()) == 2)
        stage.wire.forget_all()
        await stage.until(lambda: stage.wire.files() == {"a/old": b"nobody writes this again", "train.log": b"one\n"})

    play(scene)


def test_a_copy_that_has_lost_bytes_is_made_whole_while_the_worker_still_writes(play):
    async def scene(stage: Stage) -> None:
        log = stage.write("train.log", "one\ntwo\n", age_s=0)
        await stage.has(train__log=b"one\ntwo\n")
        os.truncate(stage.wire.folder / "f-1@0@1" / "train.log", 2)
        with log.open("a") as file:
            file.write("three\n")
        await stage.has(train__log=b"one\ntwo\nthree\n")

    play(scene)


def test_what_has_become_a_link_or_a_pipe_since_it_was_seen_is_not_opened(tmp_path: Path):
    (tmp_path / "secret").write_text("of the host")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            outputs._open_plain(str(tmp_path / name), os.O_RDONLY)


def test_a_full_dispatcher_makes_it_wait_and_says_why(play):
    async def scene(stage: Stage) -> None:
        stage.wire.full = True
        stage.write("model.txt", "weights")
        await stage.until(lambda: stage.shipper.why == "its output waits: the dispatcher's disk is full")
        stage.wire.full = False
        await stage.has(model__txt=b"weights")
        assert stage.shipper.why == ""

    play(scene)


def test_it_knows_how_much_has_not_arrived(play):
    async def scene(stage: Stage) -> None:
        stage.write("first", bytes(1000))
        await stage.has(first=bytes(1000))
        await stage.until(lambda: stage.shipper.left == 0)
        sent, stage.wire.full = stage.shipper.sent, True
        stage.write("second", bytes(3_000_000))
        with (stage.folder / "first").open("ab") as file:
            file.write(bytes(500))
        await stage.until(lambda: stage.shipper.left == 3_000_500)
        assert stage.shipper.sent == sent
        stage.wire.full = False
        await stage.until(lambda: stage.shipper.left == 0 and stage.shipper.sent > sent + 3_000_000)

    play(scene)


def test_a_file_is_partial_at_the_dispatcher_until_its_last_piece(play):
    async def scene(stage: Stage) -> None:
        copies, post, goes_on = stage.wire.folder / "f-1@0@1", stage.wire.post_output, []

        async def one_batch(job: str, worker: str, body: bytes) -> tuple[int, dict]:
            answer = await post(job, worker, body)
            stage.wire.full = goes_on == []
            return answer

        stage.wire.post_output = one_batch
        draft = stage.folder.with_name("draft")
        draft.write_bytes(bytes(3_000_000))
        stage.age(draft)
        draft.rename(stage.folder / "big")  # no scan sees a shorter one
        await stage.until(lambda: stage.wire.full and 0 < stage.shipper.left < 3_000_000)
        assert [*PartialMarkers(copies).files()] == ["big"]
        goes_on.append(True)
        stage.wire.full = False
        await stage.has(big=bytes(3_000_000))
        await stage.until(lambda: not [*PartialMarkers(copies).files()])

    play(scene)


def test_what_is_beyond_the_limits_is_told_to_the_user_and_nothing_is_tried_again(tmp_path):
    async def main() -> Stage:
        stage = Stage(tmp_path)
        stage.wire.refuse = "output: a worker's files may take 10000 bytes; what is beyond is not collected"
        stage.write("large", bytes(20_000))
        async with asyncio.timeout(20):
            await stage.shipper.run()
        return stage

    stage = asyncio.run(main())
    assert stage.said == ["output: a worker's files may take 10000 bytes; what is beyond is not collected"]


def test_at_a_notice_it_looks_at_once(play, monkeypatch):
    monkeypatch.setattr(outputs, "PERIOD_S", 1000.0)

    async def scene(stage: Stage) -> None:
        await asyncio.sleep(0.1)
        stage.write("late.txt", "just before the end")
        stage.hurry = True
        await stage.has(late__txt=b"just before the end")

    play(scene)


def test_many_small_files_go_in_few_batches(play):
    async def scene(stage: Stage) -> None:
        for n in range(2000):
            (stage.folder / f"{n}.txt").write_text(str(n))
        await stage.until(lambda: sum(map(len, stage.wire.bodies)) >= 2000)
        assert len(stage.wire.bodies) <= 8

    play(scene)


def test_a_file_of_many_pieces_is_compared_in_parts_and_what_differs_in_one_is_sent_anew(play, monkeypatch):
    monkeypatch.setattr(outputs, "CHECK_BYTES", 1000)

    async def scene(stage: Stage) -> None:
        stage.write("one", b"a" * 3000)
        stage.write("two", b"b" * 3500)
        stage.write("none", b"")
        await stage.has(one=b"a" * 3000, two=b"b" * 3500, none=b"")
        copies = stage.wire.folder / "f-1@0@1"
        (copies / "one").write_bytes(b"a" * 1500 + b"X" + b"a" * 1499)  # a disk that forgets
        (copies / "two").write_bytes(b"b" * 3500 + b"more")
        (copies / "none").unlink()

    stage = play(scene)
    checks = [(p.name, p.at, p.bytes, p.last) for body in stage.wire.bodies for p, _ in body if p.do == "check"]
    assert sorted(checks[:8]) == [
        ("none", 0, 0, True), ("one", 0, 1000, False), ("one", 1000, 1000, False), ("one", 2000, 1000, True),
        ("two", 0, 1000, False), ("two", 1000, 1000, False), ("two", 2000, 1000, False), ("two", 3000, 500, True)]


def test_random_histories_of_a_folder_end_in_an_equal_copy(play):
    """Appends, rewrites, truncations, renames, removals and new folders, while answers get lost."""
    async def scene(stage: Stage) -> None:
        draw = random.Random(os.environ.get("SPOTFLEET_SEED", "5"))
        for _ in range(300):
            name = draw.choice(["a", "b", "log", "d/x", "d/y"])
            path = stage.folder / name
            path.parent.mkdir(exist_ok=True)
            match draw.choice(["append", "append", "rewrite", "cut", "rename", "remove", "lose", "wait"]):
                case "append":
                    with path.open("ab") as file:
                        file.write(draw.randbytes(draw.randrange(20_000)))
                case "rewrite":
                    path.write_bytes(draw.randbytes(draw.randrange(20_000)))
                case "cut" if path.exists():
                    os.truncate(path, path.stat().st_size // 2)
                case "rename" if path.exists():
                    other = stage.folder / draw.choice(["a", "b", "log", "d/x"])
                    other.parent.mkdir(exist_ok=True)
                    path.rename(other)
                case "remove":
                    path.unlink(missing_ok=True)
                case "lose":
                    stage.wire.lose_answers = 1
                case _:
                    await asyncio.sleep(0.01)

    play(scene)
