"""Surroundings of one dispatcher for `bench/scale.py`: an emulated cloud whose hosts run nothing, and their agents.

The cloud is the market of the `local` provider, kept in the benchmark's process and reached over a local port; the
dispatcher loads `RemoteCloud` as a provider plugin. Each agent is a coroutine with its own TLS WebSocket, token and
complete reports; it immediately reports what a real agent and its workers would report:

    STARTING -> INIT -> (founded) READY -> generation g -> a peer died: failed g -> generation g+1 ...
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import aiohttp

from spotfleet import model
from spotfleet.model import CloudState, Notice, Role
from spotfleet.plugins import Machines, Traits
from spotfleet.protocol.messages import AgentReport, Exit, Stage, WorkerReport, WorkerState, dump
from spotfleet.providers import LaunchRequest
from spotfleet.providers.local.inprocess import InProcessProvider
from spotfleet.providers.local.market.pools import LocalPool, MarketRules
from spotfleet.providers.plugin import BasePlugin, Config
from spotfleet.transport.certs import client_context

PERIOD_S = 1.0  # between two reports of an agent, as in spotfleet/agent/link.py
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 2.0  # the same
CONNECT_S = 10.0
STEP_S = 0.25  # length of a step in the training that agents report
LOOK_S = 0.1  # between two listings of the running machines
TYPE = "bench.small"
ORDERED = re.compile(r'"worker":"([^"]+)","job":"([^"]+)","slot":(\d+)')
FOUNDED = re.compile(r'"founded":true')
PLACE = re.compile(r'"assignment":\{"generation":(\d+),"rank":(-?\d+)')


class Cloud(InProcessProvider):
    """Emulated cloud with room for `hosts` and some more, in four zones; safe for several threads."""

    def __init__(self, hosts: int) -> None:
        zones = [LocalPool(f"local-{z}", TYPE, model.Market.SPOT, 970_000 + 10_000 * i, hosts, 1)
                 for i, z in enumerate("abcd")]
        own = LocalPool("local-a", TYPE, model.Market.ON_DEMAND, 3_060_000, 1, 1)
        super().__init__(clock=time.time, rules=MarketRules((*zones, own)))
        self.requests: dict[str, LaunchRequest] = {}
        self._lock = threading.RLock()

    def launch(self, request: LaunchRequest) -> None:
        with self._lock:
            super().launch(request)
            self.requests[request.request_id] = request

    def _call(self, method: str, act: Callable[[float], Any]) -> Any:
        with self._lock:
            return super()._call(method, act)

    def machines(self) -> dict[str, float | None]:
        """Return the running worker hosts, each with the seconds left of its notice."""
        with self._lock:
            now = self.clock()
            self.market.advance(now)
            return {name: host.notice.ends_at - now if host.notice else None
                    for name, host in self.market.hosts.items()
                    if host.order.role is Role.WORKER and host.state is CloudState.RUNNING}


class _Manager(BaseManager):
    """Manager for calls from the dispatcher's process to the cloud in this process."""


_Manager.register("cloud")


class RemoteCloud:
    """Provider plugin that the dispatcher loads."""

    name = "scale"

    def __init__(self, config: dict[str, str]) -> None:
        manager = _Manager(("127.0.0.1", int(config["port"])), config["key"].encode())
        manager.connect()
        self._cloud = manager.cloud()  # type: ignore[attr-defined]

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return getattr(self._cloud, method)


class ScalePlugin(BasePlugin):
    """The plugin `scale`, as local hosts are."""

    name = "scale"
    traits = Traits(Machines.HERE)

    def open(self, config: Config) -> RemoteCloud:
        return RemoteCloud(config)


SCALE = ScalePlugin()


def serve(cloud: Cloud, key: str) -> int:
    """Answer `RemoteCloud` from a thread that ends with this process; returns the port."""

    class Server(BaseManager):
        pass

    Server.register("cloud", lambda: cloud, exposed=[
        "check", "billing", "offers", "prices", "launch", "hosts", "terminate", "tag", "boot_files", "interrupt"])
    server = Server(("127.0.0.1", 0), key.encode()).get_server()
    threading.Thread(target=server.serve_forever, name="cloud", daemon=True).start()
    return server.address[1]


def plugin(folder: Path) -> list[str]:
    """Register `scale` as a provider's name for processes that have these folders in PYTHONPATH."""
    info = folder / "spotfleet_scale-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spotfleet-scale\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[spotfleet.clouds]\nscale = scale_world:SCALE\n")
    return [str(folder), str(Path(__file__).parent)]


@dataclass
class Worker:
    report: WorkerReport
    slot: int
    exit: Exit | None = None

    @property
    def state(self) -> WorkerState:
        return WorkerState(self.report, self.slot, 4711, self.exit)


class Agent:
    """Agent of one host with its worker and its newest orders."""

    def __init__(self, boot: dict[str, Any], session: aiohttp.ClientSession, tls: ssl.SSLContext) -> None:
        self.boot, self._session, self._tls = boot, session, tls
        self.host: str = boot["host"]
        self.worker: Worker | None = None
        self.generation, self.rank = 0, -1  # from the newest orders
        self.places: list[tuple[int, int, float]] = []  # each (generation, rank) so far, and when it was ordered
        self.answered_at = 0.0  # first orders on the present connection; 0: none yet
        self.ready_at = 0.0  # when its present worker became READY
        self.notice_until: float | None = None
        self._changed = asyncio.Event()
        self._born = time.monotonic()
        self.task = asyncio.create_task(self._run())

    def kill_worker(self) -> None:
        """Simulate that its process dies by SIGKILL."""
        assert self.worker is not None
        self.worker.exit, self.ready_at = Exit(-9), 0.0
        self._changed.set()

    def lose_peer(self, generation: int) -> None:
        """Simulate a broken collective, which every member has when one dies."""
        if self.worker is not None and self.worker.exit is None and self.worker.report.generation == generation:
            self.worker.report = replace(self.worker.report, failed=generation)
            self._changed.set()

    def first_above(self, generation: int, least_rank: int = -1) -> tuple[int, float]:
        """Return the first generation above `generation` that orders at least that rank, and when; (0, 0) if none."""
        return next(((g, at) for g, rank, at in self.places if g > generation and rank >= least_rank), (0, 0.0))

    def notice(self, seconds_left: float) -> None:
        if self.notice_until is None:
            self.notice_until = time.monotonic() + seconds_left
            self._changed.set()

    def _report(self) -> str:
        now, worker = time.monotonic(), self.worker
        if worker is not None and worker.report.generation and worker.exit is None:
            worker.report = replace(worker.report, version=int((now - self._born) / STEP_S), step_s=STEP_S,
                                    resumed=worker.report.generation)
        notice = Notice(self.notice_until - now) if self.notice_until is not None else None
        return dump(AgentReport(self.host, "1", "127.0.0.1", self.boot["slots"],
                                (worker.state,) if worker else (), notice))

    def _obey(self, text: str) -> None:
        """Read only the deciding fields; a simulation does not need a thousand members' names."""
        self.answered_at = self.answered_at or time.monotonic()
        ordered = ORDERED.search(text)
        if ordered is None:
            if self.worker is not None:
                self.worker = None
                self._changed.set()
            return
        name, job, slot = ordered.groups()
        if self.worker is None or self.worker.report.worker != name:
            self.worker = Worker(WorkerReport(name, job), int(slot))
            self._changed.set()
            asyncio.get_running_loop().call_later(0.05, self._started, self.worker)
        place, founded = PLACE.search(text), FOUNDED.search(text) is not None
        if place is not None and (int(place[1]), int(place[2])) != (self.generation, self.rank):
            self.generation, self.rank = int(place[1]), int(place[2])
            self.places.append((self.generation, self.rank, time.monotonic()))
        self._follow(self.worker, founded)

    def _started(self, worker: Worker) -> None:
        worker.report = replace(worker.report, stage=Stage.INIT, store=f"127.0.0.1:{20000 + worker.slot}")
        self._follow(worker, False)
        self._changed.set()

    def _follow(self, worker: Worker, founded: bool) -> None:
        before = worker.report
        if before.stage is Stage.INIT and (founded or self.generation):
            worker.report = replace(worker.report, stage=Stage.READY)
        if before.stage is not Stage.STARTING and self.rank >= 0 and self.generation > before.generation:
            worker.report = replace(worker.report, stage=Stage.READY, generation=self.generation)
        if worker.report != before:
            self.ready_at = time.monotonic() if before.stage is not Stage.READY else self.ready_at
            self._changed.set()

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._once()
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass  # the dispatcher restarts; as a real agent, it tries again for ever
            backoff_s = FIRST_BACKOFF_S if self.answered_at else min(2 * backoff_s, LAST_BACKOFF_S)
            self.answered_at = 0.0
            await asyncio.sleep(backoff_s)

    async def _once(self) -> None:
        headers = {"Authorization": f"Bearer {self.boot['token']}"}
        async with asyncio.timeout(CONNECT_S):
            ws = await self._session.ws_connect(self.boot["dispatcher"] + "/v1/agent", ssl=self._tls, headers=headers,
                                                max_msg_size=16 << 20)
        sender = asyncio.create_task(self._send(ws))
        try:
            async for message in ws:
                if message.type is aiohttp.WSMsgType.TEXT:
                    self._obey(message.data)
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            await ws.close()

    async def _send(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            self._changed.clear()
            await ws.send_str(self._report())
            try:
                async with asyncio.timeout(PERIOD_S):
                    await self._changed.wait()
            except TimeoutError:
                pass


class World:
    """Machines of one cloud, each with its agent."""

    def __init__(self, cloud: Cloud, ca: str) -> None:
        self.cloud = cloud
        self.agents: dict[str, Agent] = {}
        self._tls = client_context(ca)
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> World:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._task = asyncio.create_task(self._play())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None and self._session is not None
        tasks = [self._task, *(a.task for a in self.agents.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    def training(self) -> list[Agent]:
        """Return the agents whose workers hold the newest ordered generation."""
        newest = max((a.generation for a in self.agents.values()), default=0)
        return [a for a in self.agents.values() if newest and a.worker is not None and a.worker.exit is None
                and a.worker.report.generation == newest and a.rank >= 0]

    async def _play(self) -> None:
        assert self._session is not None
        while True:
            running = self.cloud.machines()
            for name, left_s in running.items():
                if name not in self.agents:
                    boot = json.loads(self.cloud.requests[name].boot.files["boot.json"])
                    self.agents[name] = Agent(boot, self._session, self._tls)
                elif left_s is not None:
                    self.agents[name].notice(left_s)
            for name in [n for n in self.agents if n not in running]:
                self.agents.pop(name).task.cancel()
            await asyncio.sleep(LOOK_S)
