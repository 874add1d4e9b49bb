"""An ended worker's results are sent for as long as its host stays, and listed until they have arrived."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from spotfleet.agent.files import outputs
from spotfleet.agent.files.uploads import CheckpointShipper
from spotfleet.agent.processes.child import WorkerResult
from spotfleet.agent.workers import worker as module
from spotfleet.agent.workers.worker import AgentWorker, HostContext
from spotfleet.dispatcher.disk.outputs import Outputs
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import Exit, SlotOrder, Unsent, WorkerLaunch, WorkerOrders, dump, unpack_pieces

NAME = "f-1/0/1"
MODEL = bytes(300_000)


@dataclass
class Host:
    """A host without processes, and its dispatcher, whose disk may be full."""

    home: Path
    full: bool = True
    logs: bytes = b""
    dispatcher: int = 0
    killed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.copies = Outputs(self.home / "copies")

    # transfers

    async def append_log(self, job: str, worker: str, offset: int, data: bytes) -> int:
        self._refuse_if_full()
        self.logs = self.logs[:offset] + data
        return len(self.logs)

    async def post_output(self, job: str, worker: str, body: bytes) -> tuple[int, dict]:
        self._refuse_if_full()
        return 200, {"held": self.copies.apply(worker, unpack_pieces(body))}

    def _refuse_if_full(self) -> None:
        if self.full:
            asked = aiohttp.RequestInfo(URL("https://dispatcher"), "POST", CIMultiDictProxy(CIMultiDict()))
            raise aiohttp.ClientResponseError(asked, (), status=507, message="no room")

    # bundles, setups, zygote

    def folder(self, job: str) -> Path:
        return self.home / "jobs" / job

    async def prepare(self, job: str, progress: Callable[[str], None]) -> SimpleNamespace:
        return SimpleNamespace(launch=WorkerLaunch(job, JobSpec(job, run="true"), {}), source=self.home)

    async def done(self, *_: object) -> None:
        """At once."""

    async def spawn(self, _spec: object) -> SimpleNamespace:
        self.process = SimpleNamespace(pid=os.getpid(), ended=asyncio.get_running_loop().create_future())
        return self.process

    def kill(self, _worker: str, signum: int) -> None:
        self.killed.append(signum)

    def worker(self) -> AgentWorker:
        host = HostContext(self.home, self, self, self, self, CheckpointShipper(self),  # type: ignore[arg-type]
                           lambda: None, lambda: True, lambda: "", lambda: "10.0.0.1")

        async def free() -> None:
            """No other worker is in the slot."""

        return AgentWorker(host, SlotOrder(NAME, "job", 0, 0, WorkerOrders()), free)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Host], Awaitable[None]]], Host]:
    for name in ("_DONE_S", "_FAILED_S", "_KILLED_S", "_LAST_REPORT_S"):
        monkeypatch.setattr(module, name, 0.1)
    monkeypatch.setattr(outputs, "PERIOD_S", 0.01)

    def run(scene: Callable[[Host], Awaitable[None]]) -> Host:
        host = Host(tmp_path)

        async def main() -> None:
            async with asyncio.timeout(60):
                await scene(host)

        asyncio.run(main())
        return host

    return run


async def until(what: Callable[[], object]) -> None:
    while not what():
        await asyncio.sleep(0.005)


async def ended(host: Host, worker: AgentWorker, code: int, result: WorkerResult | None) -> None:
    """The process has left a file and a line of its log."""
    await until(lambda: worker.process is not None)
    (worker.place.output / "model.pt").write_bytes(MODEL)
    worker.place.log.write_text("trained\n")
    if result is not None:
        worker.place.exit_file.write_text(dump(result))
    host.process.ended.set_result(code)


@pytest.mark.parametrize(("code", "result"), [
    (0, WorkerResult(done=True)), (1, WorkerResult(error="ValueError")), (-9, None)], ids=["done", "failed", "killed"])
def test_results_that_a_full_dispatcher_does_not_take_are_held_listed_and_sent_when_it_has_room(play, code, result):
    async def scene(host: Host) -> None:
        worker = host.worker()
        assert worker.unsent() == []
        await ended(host, worker, code, result)
        await until(lambda: worker.exit is not None)  # the job need not wait for ever
        assert worker.exit == Exit(code, bool(result and result.done))
        await until(lambda: worker.unsent() and worker.unsent()[0].bytes)
        assert worker.unsent() == [Unsent("job", "output", len(MODEL), 0, NAME), Unsent("job", "log", 8, 0, NAME)]
        await asyncio.sleep(0.5)  # longer than all its limits
        assert not worker.over and len(worker.unsent()) == 2
        worker.stored = True
        assert all(left.stored for left in worker.unsent())
        host.full = False
        await worker.ended()
        assert worker.over and worker.unsent() == []

    host = play(scene)
    assert (host.copies.folder / "f-1@0@1" / "model.pt").read_bytes() == MODEL and host.logs == b"trained\n"


def test_the_lines_about_files_that_are_not_collected_reach_the_log(play):
    async def scene(host: Host) -> None:
        host.full, worker = False, host.worker()
        await until(lambda: worker.process is not None)
        (worker.place.output / "link").symlink_to("/etc/passwd")
        await ended(host, worker, 0, WorkerResult(done=True))
        await worker.ended()

    assert play(scene).logs == b"trained\nspotfleet: output: not collected: link (no plain file)\n"


def test_an_agent_that_ends_drops_what_it_holds_without_waiting(play):
    async def scene(host: Host) -> None:
        worker = host.worker()
        await ended(host, worker, 0, WorkerResult(done=True))
        await until(lambda: worker.exit is not None)
        worker.discard()
        await worker.ended()
        assert not (host.home / "jobs/job/workers/f-1-0-1").exists()

    play(scene)
