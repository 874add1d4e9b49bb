"""A job with an image on a host whose containers are a fake: where setup and processes run, and what is reported."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.agent.boot import AgentBoot
from spotfleet.agent.containers import host_containers
from spotfleet.agent.containers.container import PACKAGES, ContainerFailed
from spotfleet.agent.containers.host_containers import ContainerHost, Containers
from spotfleet.agent.containers.refusals import Refusal
from spotfleet.agent.files.bundles import PreparedLaunch
from spotfleet.agent.files.setup import SetupContext, Setups
from spotfleet.agent.files.uploads import CheckpointShipper
from spotfleet.agent.processes.child import ChildSpec
from spotfleet.agent.workers import worker as module
from spotfleet.agent.workers.worker import AgentWorker, HostContext
from spotfleet.model import ContainerSpec, JobSpec
from spotfleet.protocol.messages import Exit, SlotOrder, WorkerLaunch, WorkerOrders

NAME = "f-1/0/1"
SPEC = JobSpec("job", run="train", setup="install", kind="command", container=ContainerSpec("image"),
               envs={"PYTHONPATH": "lib"})
SECRETS = {"SKYPILOT_DOCKER_PASSWORD": "hush", "SKYPILOT_DOCKER_USERNAME": "ada", "TOKEN": "t"}


@dataclass
class BoxedHost:
    """A host, its container and its dispatcher. Its setups are the real ones; processes end at once with 0."""

    home: Path
    refused: Refusal | None = None
    name: str = "container-1"
    environ: dict[str, str] = field(default_factory=lambda: {"PATH": "/image/bin", "IMAGE": "1"})
    bash: bool = False
    started: list[ChildSpec] = field(default_factory=list)
    failures: int = 0
    dispatcher: int = 0

    async def append_log(self, _job: str, _worker: str, offset: int, data: bytes) -> int:
        return offset + len(data)

    async def post_output(self, *_: object) -> tuple[int, dict]:
        return 200, {"held": {}}

    def folder(self, job: str) -> Path:
        return self.home / "jobs" / job

    async def prepare(self, job: str, _progress: object) -> SimpleNamespace:
        return SimpleNamespace(launch=WorkerLaunch(job, SPEC, SECRETS), source=self.home)

    async def enter(self, *_: object) -> BoxedHost:
        if self.refused is not None:
            raise ContainerFailed(self.refused)
        return self

    async def require(self, **_: object) -> None:
        """It has all."""

    def count_failure(self, *_: object) -> int:
        self.failures += 1
        return self.failures

    async def spawn(self, spec: ChildSpec) -> SimpleNamespace:
        self.started.append(spec)
        ended = asyncio.get_running_loop().create_future()
        ended.set_result(0)
        return SimpleNamespace(pid=0, ended=ended)

    def kill(self, *_: object) -> None:
        """Nothing runs."""


class NoProcesses:
    """The host's own starter of processes, which must not be used."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} on the host itself")


def run(host: BoxedHost, monkeypatch: pytest.MonkeyPatch) -> AgentWorker:
    for name in ("_DONE_S", "_FAILED_S", "_KILLED_S", "_LAST_REPORT_S"):
        monkeypatch.setattr(module, name, 0.05)
    monkeypatch.setenv("SPOTFLEET_LOCAL_HOST", "mark")
    monkeypatch.setenv("ONLY_OUTSIDE", "1")

    async def main() -> AgentWorker:
        context = HostContext(host.home, host, NoProcesses(), host, Setups(host), CheckpointShipper(host),  # type: ignore[arg-type]
                              lambda: None, lambda: True, lambda: "", lambda: "10.0.0.1", containers=host)

        async def free() -> None:
            """No other worker is in the slot."""

        worker = AgentWorker(context, SlotOrder(NAME, "job", 0, 0, WorkerOrders()), free)
        async with asyncio.timeout(60):
            while worker.exit is None:
                await asyncio.sleep(0.005)
        worker.discard()
        await worker.ended()
        return worker

    return asyncio.run(main())


def test_setup_and_processes_start_in_the_container_with_the_images_variables(tmp_path: Path,
                                                                             monkeypatch: pytest.MonkeyPatch):
    host = BoxedHost(tmp_path)
    assert run(host, monkeypatch).exit == Exit(0)
    setup, train = host.started
    assert (setup.run, train.run) == ("install", "train")  # without traps, which only bash has
    for spec in host.started:
        assert (spec.env["PATH"], spec.env["IMAGE"], spec.env["TOKEN"]) == ("/image/bin", "1", "t")
        assert spec.env["PYTHONPATH"] == f"lib:{PACKAGES}" and spec.env["SPOTFLEET_LOCAL_HOST"] == "mark"
        assert not {"ONLY_OUTSIDE", "SKYPILOT_DOCKER_PASSWORD", "SKYPILOT_DOCKER_USERNAME"} & spec.env.keys()


def test_each_failure_of_a_container_is_counted_and_says_whether_another_host_would_fail(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    host = BoxedHost(tmp_path, Refusal("container: there is no image", sure=True))
    first, second = run(host, monkeypatch), run(host, monkeypatch)
    assert [(w.report.setup_tries, w.report.setup_sure, w.report.error) for w in (first, second)] == [
        (1, True, "container: there is no image"), (2, True, "container: there is no image")]
    assert first.exit == Exit(1) and host.started == []


def test_another_container_needs_its_setup_again(tmp_path: Path):
    host = BoxedHost(tmp_path)
    host.folder("job").mkdir(parents=True)

    async def set_up(*containers: str) -> None:
        setups = Setups(host)  # type: ignore[arg-type]
        for name in containers:
            context = SetupContext("f-1", "job", host.folder("job"), tmp_path, {}, host, {}, name)
            await setups.done(context, SPEC, lambda _: None)

    asyncio.run(set_up("container-1", "container-1", "container-2"))
    assert len(host.started) == 2


def test_workers_that_wait_for_one_try_share_its_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    boot = AgentBoot("f", "f-1", "local", 2, "https://d", "", "")
    host = ContainerHost(boot, tmp_path, NoProcesses(), lambda: tmp_path, lambda: None)  # type: ignore[arg-type]
    containers = Containers(host)
    prepared = PreparedLaunch(WorkerLaunch("job", SPEC, {}), tmp_path)

    async def no_engine(*_: object) -> tuple[int, str, str]:
        await asyncio.sleep(0.01)
        return 127, "", ""

    async def workers(count: int) -> list[int]:
        running = asyncio.create_task(containers.run())
        ended = await asyncio.gather(*(containers.enter(prepared, tmp_path, lambda _: None) for _ in range(count)),
                                     return_exceptions=True)
        running.cancel()
        return [containers.count_failure("job", error) for error in ended if isinstance(error, ContainerFailed)]

    monkeypatch.setattr(host_containers, "call", no_engine)
    assert (asyncio.run(workers(3)), asyncio.run(workers(1))) == ([1, 1, 1], [2])
