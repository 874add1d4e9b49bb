"""A compromised host with its own token: its requests take a bounded share of the dispatcher, and end with it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from spotfleet.dispatcher.disk.outputs import Outputs, RequestStopped
from spotfleet.dispatcher.http import host_work
from spotfleet.dispatcher.jobs import job as jobs
from spotfleet.protocol.messages import MOST_PIECES, OutputPiece, Unsent, pack_pieces, unpack_pieces
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = 1_000_000
LIMIT_S = 15.0  # for what should end at once
BODY = pack_pieces([OutputPiece("append", "a", 0, 1)], b"x")


class Endless:
    """Work for one host's output that ends only when it is stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.begun, self.stopped, self.at_once, self.most = "", 0, 0, 0, 0
        real = Outputs.apply

        def apply(outputs: Outputs, worker: str, pieces: Any, stopped: Callable[[], bool] = lambda: False) -> list[int]:
            if not worker.startswith(f"{self.host}/"):
                return real(outputs, worker, pieces, stopped)
            self.begun, self.at_once = self.begun + 1, self.at_once + 1
            self.most, until = max(self.most, self.at_once), time.monotonic() + LIMIT_S
            while not stopped() and time.monotonic() < until:
                threading.Event().wait(0.005)
            self.stopped, self.at_once = self.stopped + stopped(), self.at_once - 1
            raise RequestStopped("stopped")

        monkeypatch.setattr(Outputs, "apply", apply)


async def attacked(stage: Stage, endless: Endless, requests: int) -> tuple[str, str, str, list[asyncio.Task[Any]]]:
    """A job on two hosts, one of which has sent so many requests: the job, its worker there, the other worker, and the
    requests."""
    await stage.up(2)
    job = await stage.submit(Script(steps=LONG), (2, 2))
    workers = sorted(w.worker for w in (await stage.at_version(job, 3)).workers)
    host = endless.host = workers[0].split("/")[0]
    names = [workers[0], *(f"{host}/0/old-{n}" for n in range(1, requests))]  # each has a lock of its own
    stage.agents[host].unsent = tuple(Unsent(job, "output", 10, 0, name) for name in names)
    core = stage.daemon.dispatcher.core
    await stage.until("they are known", lambda: len(core.connections[host].report.unsent) == requests)
    sent = [asyncio.create_task(post(stage, job, name)) for name in names]
    await stage.until("one has begun", lambda: endless.begun > 0)
    return job, workers[0], workers[1], sent


async def post(stage: Stage, job: str, worker: str, data: bytes = BODY) -> int:
    """The status of one request, also if the dispatcher asks for another."""
    token = stage.token(worker.split("/")[0])
    return (await stage._call("POST", f"/v1/jobs/{job}/outputs/{worker}", None, token, data))[0]


def test_work_for_one_host_keeps_nobody_else_waiting_and_ends_when_it_is_revoked(play, monkeypatch):
    endless = Endless(monkeypatch)

    async def scene(stage: Stage) -> None:
        job, _, other, sent = await attacked(stage, endless, 12)
        async with asyncio.timeout(LIMIT_S - 5):
            assert await post(stage, job, other) == 200
            assert await stage.submit(Script(steps=1), (1, 1)) == "train-2"
            await stage.call("GET", "/v1/archive")
        assert endless.most == 1 and endless.stopped == 0
        await stage.call("POST", f"/v1/hosts/{endless.host}/revoke", {})
        assert set(await asyncio.gather(*sent)) <= {401, 500}
        assert endless.begun == endless.stopped == 1

    play(scene, spec(2))


def test_work_ends_when_its_caller_hangs_up(play, monkeypatch):
    endless = Endless(monkeypatch)

    async def scene(stage: Stage) -> None:
        _, _, _, (sent,) = await attacked(stage, endless, 1)
        sent.cancel()
        await stage.until("it has ended", lambda: endless.at_once == 0)
        assert endless.stopped == 1

    play(scene, spec(2))


def test_work_ends_when_the_dispatcher_ends(play, monkeypatch):
    endless = Endless(monkeypatch)

    async def scene(stage: Stage) -> None:
        _, _, _, sent = await attacked(stage, endless, 3)
        began = time.monotonic()
        await stage.stop_dispatcher()
        await asyncio.gather(*sent, return_exceptions=True)
        await stage.until("it has ended", lambda: endless.at_once == 0)
        assert endless.begun == endless.stopped == 1 and time.monotonic() - began < LIMIT_S - 5

    play(scene, spec(2))


def test_a_host_has_a_bounded_number_of_requests_here(play, monkeypatch):
    endless = Endless(monkeypatch)
    monkeypatch.setattr(host_work, "MOST_WAITING", 3)

    async def scene(stage: Stage) -> None:
        job, worker, _, sent = await attacked(stage, endless, 3)
        assert await post(stage, job, worker) == 503
        for task in sent:
            task.cancel()

    play(scene, spec(2))


def test_output_is_taken_of_workers_that_existed_and_of_a_few_that_only_their_agent_knows(play, monkeypatch):
    monkeypatch.setattr(jobs, "MOST_REPORTED", 2)

    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        job = await stage.submit(Script(steps=LONG), (1, 1))
        worker = (await stage.at_version(job, 3)).workers[0].worker
        assert await post(stage, job, worker) == 200
        assert await post(stage, job, f"{host}/0/invented") == 403
        names = [f"{host}/0/old-{n}" for n in range(3)]  # they ended under a dispatcher on another machine
        stage.agents[host].unsent = tuple(Unsent(job, "output", 10, 0, name) for name in names)
        core = stage.daemon.dispatcher.core
        await stage.until("it is reported", lambda: len(core.connections[host].report.unsent) == 3)
        assert [await post(stage, job, name) for name in (*names, names[0])] == [200, 200, 403, 200]
        stage.agents[host].shut = True
        await stage.until("it is away", lambda: not core.is_connected(host))
        assert await post(stage, job, names[2]) == 503 and await post(stage, job, worker) == 200

    play(scene, spec(1))


def test_a_request_has_a_bounded_number_of_pieces():
    piece = OutputPiece("check", "a", bytes=1)
    assert len(unpack_pieces(pack_pieces([piece] * MOST_PIECES, b""))) == MOST_PIECES
    with pytest.raises(ValueError, match=f"{MOST_PIECES + 1} pieces are more"):
        unpack_pieces(pack_pieces([piece] * (MOST_PIECES + 1), b""))


def test_bytes_that_arrive_give_a_host_time_and_repeated_ones_do_not(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        job = await stage.submit(Script(steps=LONG), (1, 1))
        worker = (await stage.at_version(job, 3)).workers[0].worker
        stage.agents[host].unsent = (Unsent(job, "output", 10, 0, worker),)
        tracker = stage.daemon.dispatcher.core.unsent
        await stage.until("it is reported", lambda: tracker.holds(host))

        def moved_at() -> float:
            return tracker._hosts[host].moved_at

        paths = {f"/v1/jobs/{job}/outputs/{worker}": BODY, f"/v1/jobs/{job}/logs/{worker}?offset=0": b"hello",
                 f"/v1/jobs/{job}/checkpoints/{10**9}?generation=1&digest={'0' * 64}": b"state"}
        for path, data in paths.items():
            for repeated in (False, True) if "checkpoints" not in path else (False,):
                before = moved_at()
                await stage.call("PUT" if "checkpoints" in path else "POST", path, token=stage.token(host), data=data,
                                 ok=False)
                assert (moved_at() == before) is repeated, path

    play(scene, spec(1))
