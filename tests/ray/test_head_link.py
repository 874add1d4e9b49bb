"""The dispatcher's link to the supervisor of the Ray head, which here finds no Ray: start, loss, takeover, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

import psutil
import pytest

from spotfleet.dispatcher.ray import head
from spotfleet.dispatcher.ray.head import HeadLink
from spotfleet.protocol.ray_cluster import HEAD_AT, METADATA, TOKEN, RayState, RayWish, folder_of
from spotfleet.ray.cluster import head as supervisor
from spotfleet.ray.cluster import processes
from tests.conftest import RUN_MARK

MODULE = "tests.support.ray.head_without_ray"
ADDRESS = "127.0.0.3:6379"  # nothing listens there


def supervisors() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if MODULE in process.cmdline() and process.environ().get(RUN_MARK) == os.environ[RUN_MARK]:
                found.append(process)
        except psutil.Error:
            continue
    return found


async def reported(link: HeadLink, token: str) -> None:
    end = time.monotonic() + 60
    while link.report is None:
        assert time.monotonic() < end, link.problem
        await link.match(token, ADDRESS, RayWish())
        await asyncio.sleep(0.05)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Callable[[], HeadLink], str],
                                                                                Awaitable[None]]], None]:
    """Runs a scene with a maker of links; what they started has ended afterwards."""
    monkeypatch.setattr(head, "MODULE", MODULE)

    def run(scene: Callable[[Callable[[], HeadLink], str], Awaitable[None]]) -> None:
        async def main() -> None:
            token = token_hex(32)
            try:
                await scene(lambda: HeadLink(tmp_path / "ray.log", lambda: None), token)
            finally:
                last = HeadLink(tmp_path / "ray.log", lambda: None)
                last._token, last._address = token, ADDRESS
                await last.clear()
            assert not supervisors() and not Path(folder_of(token)).exists()

        asyncio.run(main())

    return run


def test_without_ray_the_head_says_what_to_install(play):
    async def scene(made: Callable[[], HeadLink], token: str) -> None:
        link = made()
        await reported(link, token)
        assert link.report is not None and not link.report.state.up
        assert "Ray is not installed on the dispatcher's machine" in link.report.state.problem
        assert "[ray]" in link.report.state.problem
        await link.clear()
        assert not supervisors() and not Path(folder_of(token)).exists() and not link.active
        assert not link.problem, "the next cluster would begin with it"

    play(scene)


def test_the_next_dispatcher_goes_on_with_the_same_head(play):
    async def scene(made: Callable[[], HeadLink], token: str) -> None:
        first, second = made(), made()
        await reported(first, token)
        before = [p.pid for p in supervisors()]
        control = Path(folder_of(token)) / "control"
        assert control.stat().st_mode & 0o077 == 0, "nobody else gives the supervisor orders"
        first.forget()
        await reported(second, token)
        assert [p.pid for p in supervisors()] == before and len(before) == 1
        assert first._process is not None
        await second.clear()
        first._process.wait(30)

    play(scene)


def test_a_supervisor_that_is_killed_is_reported_and_started_anew(play):
    async def scene(made: Callable[[], HeadLink], token: str) -> None:
        link = made()
        await reported(link, token)
        before = supervisors()[0]
        before.kill()
        end = time.monotonic() + 30
        while link.report is not None and time.monotonic() < end:
            await asyncio.sleep(0.02)
        assert link.report is None and link.problem == "the supervisor of the Ray head has ended"
        await reported(link, token)
        assert supervisors()[0].pid != before.pid
        await link.clear()

    play(scene)


def test_an_observer_that_prints_nothing_is_started_anew_and_its_last_state_does_not_count(monkeypatch):
    monkeypatch.setattr(supervisor, "OBSERVER", ("bash", "-c", "exec sleep 601"))
    monkeypatch.setattr(supervisor, "SILENT_S", 0.2)
    monkeypatch.setattr(processes, "answers", lambda address: True)

    def observers() -> set[psutil.Process]:
        found = set()
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
                found |= {process} if process.name() == "sleep" else set()
        return found

    async def main() -> None:
        head_of = supervisor.HeadSupervisor({HEAD_AT: ADDRESS, TOKEN: token_hex(32), "PATH": os.environ["PATH"]})
        head_of._user = None  # another one could not write to the test's folder
        head_of.report = replace(head_of.report, ray="2.60.0", state=RayState(True))
        task, end = asyncio.create_task(head_of._keep_observer()), time.monotonic() + 60
        try:
            first: set[psutil.Process] = set()
            while not first or not observers() - first:
                assert time.monotonic() < end
                first = first or observers()
                await asyncio.sleep(0.02)
            assert not head_of.report.state.up and "silent for 0.2 s" in head_of.report.state.problem
            assert not any(p.is_running() for p in first)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            processes.end_all(head_of.folder)

    asyncio.run(main())


@pytest.mark.parametrize(("clouds", "shared"), [("closed", "no root"), ("", "")])
def test_a_head_that_is_not_separated_is_reported_where_hosts_are_other_machines(monkeypatch, clouds: str, shared: str):
    monkeypatch.setattr(supervisor.account, "find", lambda folder, environ: (None, "no root"))
    monkeypatch.setattr(supervisor, "ray_version", lambda: "2.60.0")
    given = {HEAD_AT: ADDRESS, TOKEN: token_hex(32), "PATH": os.environ["PATH"], METADATA: clouds}
    head_of = supervisor.HeadSupervisor(given)
    head_of.folder.rmdir()
    assert head_of.report.shared == shared
