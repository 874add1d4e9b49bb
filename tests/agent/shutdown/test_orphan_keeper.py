"""What a host saves before it ends itself, and where; on a clock that tests move."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.agent.boot import AgentBoot
from spotfleet.agent.policy.orphan import Instant, LiveWorker, OrphanPhase, OrphanState
from spotfleet.agent.shutdown import controller
from spotfleet.agent.shutdown.controller import ShutdownController, ShutdownDeps, is_useless, read_life
from spotfleet.agent.workers.supervisor import Workers
from spotfleet.model import Notice
from spotfleet.protocol.messages import Assignment, Checkpoint, Exit, Stage, WorkerReport, WorkerState, load
from spotfleet.storage.folder import fleet_store

LIMIT_S = 30.0
WORKER, PEER = "f-1/0/1", "f-2/0/1"
CA = "the fleet's certificate"


@dataclass
class Host:
    """A fake host for the shutdown controller: its disk, one worker, link to a dispatcher, clock."""

    home: Path
    target: Path
    at: float = 1000.0
    connected: bool = True
    orders_received: int = 0
    live_worker: LiveWorker | None = None
    asked: bool = False  # the worker is asked for a checkpoint
    halted: bool = False
    looks: int = 0
    notice: Notice | None = None
    taken: list[int] = field(default_factory=list)  # versions that a dispatcher has
    to_target: bool = False  # the dispatcher orders so
    unsent: list = field(default_factory=list)  # checkpoints that no dispatcher takes
    workers: list = field(default_factory=list)  # ended workers whose output no dispatcher takes

    def now(self) -> Instant:
        return Instant("boot", self.at)

    # called by the controller

    def live_workers(self) -> list[LiveWorker]:
        self.looks += 1
        return [self.live_worker] if self.live_worker and not self.halted else []

    def save_now(self, wanted: bool) -> None:
        self.asked = wanted

    async def halt(self) -> None:
        self.halted = True

    def offer(self, job: str, checkpoint: Checkpoint, folder: Path) -> None:
        if hashlib.sha256(Path(checkpoint.path).read_bytes()).hexdigest() == checkpoint.digest:
            self.taken.append(checkpoint.version)

    def waiting(self) -> list[tuple[str, Checkpoint]]:
        return self.unsent

    def holding(self) -> list:
        return [w for w in self.workers if not w.stored]

    async def settled(self, job: str) -> None:
        """At once."""

    # what a test does

    def controller(self, **told) -> ShutdownController:
        boot = AgentBoot("f", "f-1", "local", 1, "https://x:1", CA, "token", **{"orphan_after_s": 3600.0, **told})
        return ShutdownController(boot, self.home, ShutdownDeps(self, self, self, lambda: self.notice), self.now)

    def trains(self, version: int, checkpoint: int | None = None, rank: int = 0, **how: object) -> None:
        """The worker is at `version`; it has written `checkpoint`, which it removes again soon. `how`: fields of it."""
        made = None
        if checkpoint is not None:
            path, data = self.home / "ckpt.pt", self.state(checkpoint)
            path.unlink(missing_ok=True)
            path.write_bytes(data)
            made = Checkpoint(checkpoint, hashlib.sha256(data).hexdigest(), len(data), 3, str(path))
            made = replace(made, **how)
        report = WorkerReport(WORKER, "job", Stage.READY, 3, version=version, checkpoint=made)
        members = (WORKER, PEER) if rank == 0 else (PEER, WORKER)
        self.live_worker = LiveWorker(report, Assignment(3, rank, members, "store"))

    def leaves(self, name: str) -> Path:
        folder = self.home / "jobs" / "job" / "workers" / "f-1-0-1" / "output"
        folder.mkdir(parents=True)
        (folder / name).write_text("weights")
        return folder.parent

    @staticmethod
    def state(version: int) -> bytes:
        return f"state {version}".encode() * 100

    def there(self) -> dict[str, bytes]:
        """What the target holds, as far as it stays while we look."""
        kept, found = fleet_store(str(self.target), "f", CA), {}
        for name in kept.names():
            with suppress(FileNotFoundError):
                found[name] = (kept.folder / name).read_bytes()
        return found

    def saved(self, version: int) -> bool:
        """Is this version there, whole, and described as a dispatcher reads it?"""
        there, stem, data = self.there(), f"jobs/job/quarantine/{version}-3", self.state(version)
        return (there.get(f"{stem}.ckpt"), f"{stem}.json" in there and load(Checkpoint, there[f"{stem}.json"])) == (
            data, Checkpoint(version, hashlib.sha256(data).hexdigest(), len(data), 3))

    @property
    def phase(self) -> OrphanPhase:
        return read_life(self.home, self.now()).phase

    async def silence(self, seconds: float) -> None:
        """No dispatcher for so long, or until the host has ended; the agent looks every 25 s."""
        self.connected, end = False, self.at + seconds
        while self.at < end and not self.halted:
            self.at, seen = min(end, self.at + 25.0), self.looks
            await self.until(lambda seen=seen: self.halted or self.looks > seen)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait, with the host's clock standing still."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(controller.PERIOD_S)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Host]:
    """Runs a scene, `async def scene(host, life)`, beside the life of a keeper; returns the host after both."""
    monkeypatch.setattr(controller, "PERIOD_S", 0.001)
    host = Host(tmp_path / "home", tmp_path / "target")
    for folder in (host.home, host.target):
        folder.mkdir()

    def run(scene: Callable[[Host, asyncio.Task[None]], Awaitable[None]], **told) -> Host:
        async def main() -> None:
            life = asyncio.create_task(host.controller(**{"target": str(host.target), **told}).run())
            try:
                await scene(host, life)
            finally:
                life.cancel()
                await asyncio.gather(life, return_exceptions=True)

        asyncio.run(main())
        return host

    return run


async def off(life: asyncio.Task[None]) -> None:
    """The controller reports that the machine is to power off."""
    async with asyncio.timeout(LIMIT_S):
        await asyncio.shield(life)


def test_an_orphan_asks_for_a_checkpoint_and_ends_when_that_is_in_the_target(play):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        host.trains(10, checkpoint=5)
        await host.silence(3500)
        assert not host.asked
        await host.silence(120)
        assert host.asked and not life.done()
        host.trains(12, checkpoint=11)
        await off(life)

    host = play(scene)
    assert host.saved(11) and host.halted and host.phase is OrphanPhase.OFF


def test_checkpoints_made_while_no_dispatcher_is_there_are_in_the_target_as_they_come_and_only_the_newest_stay(play):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        host.trains(10, checkpoint=10)
        await host.silence(25)
        assert not host.there()  # a dispatcher that restarts will fetch it
        for version in range(10, 60, 10):
            host.trains(version, checkpoint=version)
            await host.silence(60)
            await host.until(lambda version=version: host.saved(version))
        newest = [f"jobs/job/quarantine/{version}-3.{end}" for version in (40, 50) for end in ("ckpt", "json")]
        await host.until(lambda: fleet_store(str(host.target), "f", CA).names() == newest)
        assert not host.asked and host.phase is OrphanPhase.IN_CONTACT

    play(scene)


def test_what_no_dispatcher_takes_is_copied_to_the_target_when_the_dispatcher_orders_so(play):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        data = host.state(7)
        (host.home / "waiting.pt").write_bytes(data)
        made = Checkpoint(7, hashlib.sha256(data).hexdigest(), len(data), 3, str(host.home / "waiting.pt"))
        worker = SimpleNamespace(folder=host.leaves("model.pt"), stored=False)
        host.workers, host.unsent = [worker], [("job", made)]
        await host.until(lambda: host.looks > 3)
        assert not host.there()
        host.to_target = True
        await host.until(lambda: worker.stored and host.saved(7))
        assert "jobs/job/left/f-1-0-1.tar.gz" in host.there() and host.phase is OrphanPhase.IN_CONTACT

    play(scene)


def test_a_dispatcher_that_returns_before_the_end_finds_the_worker_training_and_gets_what_was_kept_aside(play):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        host.trains(10, checkpoint=5)
        await host.silence(3620)
        assert host.asked and host.phase is OrphanPhase.SAVING
        host.connected, host.orders_received = True, 1
        await host.until(lambda: host.phase is OrphanPhase.IN_CONTACT and not host.asked and host.taken)
        assert not list((host.home / "legacy").iterdir())
        await host.silence(3500)
        assert not life.done()

    host = play(scene)
    assert host.taken == [5] and not host.halted


def test_a_target_that_is_away_is_waited_for_and_nothing_is_left_in_its_empty_place(play):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        host.target.rmdir()
        host.trains(10, checkpoint=10)
        await host.silence(3640)
        assert host.phase is OrphanPhase.STORING and not host.target.exists()
        host.target.mkdir()
        await off(life)

    assert play(scene).saved(10)


def test_a_target_that_stays_away_keeps_no_host_for_ever_and_what_is_lost_is_named(play, caplog):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        host.target.rmdir()
        host.trains(10, checkpoint=10)
        host.leaves("model.txt")
        await host.silence(3600 + 120 + 620)
        await off(life)

    host = play(scene)
    assert host.phase is OrphanPhase.OFF
    assert "its target cannot be written: checkpoint 10 of job (800 bytes)" in caplog.text
    assert "output of f-1-0-1: model.txt" in caplog.text


def test_without_a_target_what_is_lost_is_named(play, caplog):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        host.trains(10, checkpoint=10)
        await host.silence(3640)
        await off(life)

    play(scene, target="")
    assert "the fleet has no checkpoint.target: checkpoint 10 of job (800 bytes)" in caplog.text


def test_a_worker_that_writes_nothing_in_time_is_ended_with_its_older_checkpoint_in_the_target(play):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        host.trains(10, checkpoint=5)
        await host.silence(3600 + 140)
        await host.until(lambda: host.saved(5))
        await host.silence(20)
        await off(life)

    play(scene)


def test_what_workers_left_is_in_the_target_too(play):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        host.leaves("model.txt")
        await host.silence(3640)
        await off(life)

    assert [name for name in play(scene).there() if "left" in name] == ["jobs/job/left/f-1-0-1.tar.gz"]


def test_a_part_of_a_checkpoint_is_in_the_target_beside_those_of_the_version_before(play):
    """The hosts with the other parts may not have come so far."""
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        for version in (10, 20, 30):
            host.trains(version, checkpoint=version, part=1, parts=3)
            await host.silence(60)
            await host.until(lambda version=version: any(f"/{version}-3.parts" in name for name in host.there()))
        left = {f"jobs/job/quarantine/{version}-3.parts/1-3-{hashlib.sha256(host.state(version)).hexdigest()}":
                host.state(version) for version in (20, 30)}
        await host.until(lambda: {n: data for n, data in host.there().items() if not n.endswith(".json")} == left)
        await host.until(lambda: {f"{name}.json" for name in left} == {n for n in host.there() if n.endswith(".json")})
        host.connected, host.orders_received = True, 1
        await host.until(lambda: host.taken == [20, 30] and not list((host.home / "legacy").iterdir()))

    play(scene)


def test_where_workers_write_to_an_object_store_the_host_waits_for_their_word_and_keeps_no_file(play, caplog):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        host.trains(10, checkpoint=5, path="", url="s3://bucket/f/job/5-3")
        host.leaves("model.txt")
        await host.silence(3640)
        assert host.asked and not life.done()
        host.trains(10, checkpoint=10, path="", url="s3://bucket/f/job/10-3")
        await off(life)

    host = play(scene, target="s3://bucket")
    assert (host.phase, host.there(), (host.home / "legacy").exists()) == (OrphanPhase.OFF, {}, False)
    assert "s3://bucket takes checkpoints alone: output of f-1-0-1: model.txt" in caplog.text
    assert "checkpoint 10" not in caplog.text


@pytest.mark.parametrize("phase", [OrphanPhase.SAVING, OrphanPhase.STORING])
def test_an_agent_killed_while_it_ends_goes_on_in_its_next_life_with_what_it_had_kept(play, phase: OrphanPhase):
    async def first(host: Host, life: asyncio.Task[None]) -> None:
        host.target.rmdir()
        host.trains(10, checkpoint=10 if phase is OrphanPhase.STORING else 9)
        await host.silence(3640)
        assert host.phase is phase

    async def second(host: Host, life: asyncio.Task[None]) -> None:
        host.live_worker = None  # the worker died with the agent, and its files were cleared away
        (host.home / "ckpt.pt").unlink(missing_ok=True)
        host.target.mkdir(exist_ok=True)
        await off(life)

    play(first)
    assert play(second).saved(10 if phase is OrphanPhase.STORING else 9)


def test_an_agent_killed_in_its_silence_gives_the_next_dispatcher_what_it_had_kept(play):
    async def first(host: Host, life: asyncio.Task[None]) -> None:
        host.trains(10, checkpoint=9)
        await host.silence(100)

    async def second(host: Host, life: asyncio.Task[None]) -> None:
        host.live_worker, host.connected, host.orders_received = None, True, 1
        await host.until(lambda: host.taken == [9] and not list((host.home / "legacy").iterdir()))

    play(first)
    play(second)


def test_an_agent_that_crashes_every_few_seconds_does_not_postpone_its_end(play):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        await host.until(lambda: life.done() or (host.home / "life.json").exists())

    host = play(scene, orphan_after_s=30.0)
    for _ in range(12):
        host.at += 3.0
        if host.phase is OrphanPhase.OFF:
            break
        play(scene, orphan_after_s=30.0)

    async def last(host: Host, life: asyncio.Task[None]) -> None:
        await off(life)

    assert host.at <= 1036.0
    assert play(last, orphan_after_s=30.0).phase is OrphanPhase.OFF


def test_a_notice_that_no_dispatcher_hears_of_brings_a_checkpoint_to_the_target_and_ends_nothing(play):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        host.trains(10)
        host.notice = Notice(100.0)
        await host.silence(1)
        assert not host.asked  # a dispatcher may just be restarting
        await host.silence(20)
        assert host.asked
        host.trains(11, checkpoint=11)
        await host.until(lambda: host.saved(11))
        host.notice = Notice(0.0, kind="rebalance")
        await host.until(lambda: not host.asked)
        assert not life.done() and not host.halted

    play(scene)


def test_max_lifetime_ends_a_host_under_its_dispatchers_eyes(play):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        host.trains(10, checkpoint=10)
        host.orders_received = 1
        host.at += 101.0
        await off(life)

    assert play(scene, lifetime_s=100.0).saved(10)


def test_a_host_whose_agent_cannot_start_is_given_up_after_an_hour_of_trying(tmp_path: Path):
    tries = next(n for n in range(10_000) if is_useless(tmp_path, lambda n=n: Instant("boot", 5.0 * n)))
    assert 3600 <= 5 * tries <= 3630


def test_a_life_that_cannot_be_read_begins_anew_and_says_so(play, caplog):
    async def scene(host: Host, life: asyncio.Task[None]) -> None:
        await host.until(lambda: host.phase is OrphanPhase.IN_CONTACT)

    host = play(scene)
    (host.home / "life.json").write_text('{"now": 3}')
    assert read_life(host.home, host.now()) == OrphanState(host.now())
    assert "life begins anew" in caplog.text


def test_a_dispatcher_that_returns_at_the_very_end_hears_of_lost_workers_not_of_scripts_that_failed():
    """Which exit with a status of their own when they are told to end."""

    async def scene() -> None:
        bundles = SimpleNamespace(folder=Path)
        workers = Workers(SimpleNamespace(transfers=None, bundles=bundles, changed=lambda: None))
        gone = asyncio.Event()
        state = WorkerState(WorkerReport(WORKER, "job"), 0, exit=Exit(1))
        workers._actual[WORKER] = SimpleNamespace(state=state, left_slot=gone, end=lambda **_: gone.set(),
                                                  order=SimpleNamespace(job="job"))
        assert workers.states() == (state,)
        await workers.halt()
        assert gone.is_set() and workers.states() == ()

    asyncio.run(scene())
