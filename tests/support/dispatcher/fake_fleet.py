"""A whole fleet in one event loop: the real daemon over TLS, a cloud in process, agents and workers that behave."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher.daemon import DispatcherDaemon
from spotfleet.dispatcher.http.auth import host_token
from spotfleet.errors import SpotfleetError
from spotfleet.model import CloudState, FleetSpec, JobSpec, Need, Nodes, Notice, ResizeSpec, Role
from spotfleet.protocol.checkpoint_files import parse_manifest
from spotfleet.protocol.messages import (
    AgentOrders,
    AgentReport,
    Checkpoint,
    DamagedCheckpoint,
    Exit,
    HeldJob,
    JobStatus,
    SlotOrder,
    Unsent,
    WorkerLaunch,
    dump,
    load,
)
from spotfleet.providers import DISPATCHER_TAG, Boot, LaunchRequest
from spotfleet.providers.local.inprocess import InProcessProvider
from spotfleet.transport import certs
from spotfleet.transport.boot import DispatcherBoot
from tests.support.dispatcher.fake_workers import Script, World

TICK_S = 0.02
REAL = time.time  # also where a test has replaced it
LIMIT_S = 30.0  # generous: the machine may be busy
ADMIN = "admin-token"
SECRET = "fleet-secret"


class Cloud(InProcessProvider):
    """Starts a fake agent on each machine that it sells, and ends it with the machine."""

    answers = True  # False: nobody answers, though the machines go on

    def __init__(self) -> None:
        super().__init__(clock=REAL)
        self.lock = threading.RLock()
        self.machines: dict[str, LaunchRequest] = {}

    def launch(self, request: LaunchRequest) -> None:
        with self.lock:
            super().launch(request)
            self.machines[request.request_id] = request

    def _call(self, method: str, act: Callable[[float], Any]) -> Any:
        if not self.answers:
            raise SpotfleetError("no answer within 30 s")
        with self.lock:
            return super()._call(method, act)

    def look(self, host: str) -> tuple[bool, Notice | None]:
        """Does the machine run, and what does its metadata server say?"""
        with self.lock:
            self.market.advance(self.clock())
            found = self.market.hosts[host]
        hint = Notice(0.0, kind="rebalance", why="leave this host") if found.rebalance_at else None
        notice = Notice(found.notice.ends_at - self.clock()) if found.notice else hint
        return found.state is CloudState.RUNNING, notice

    def tags(self, host: str) -> dict[str, str]:
        with self.lock:
            return dict(self.market.hosts[host].order.tags)


class FakeAgent:
    """One agent process on one machine."""

    def __init__(self, host: str, boot: dict[str, Any], cloud: Cloud, world: World, number: int) -> None:
        self.host, self.boot, self.cloud, self.world = host, boot, cloud, world
        self.incarnation = f"agent-{number}"
        self.url: str = boot["dispatcher"]
        self.address = "127.0.0.1"
        self.bundles: dict[str, bytes] = {}
        self.launches: dict[str, tuple[WorkerLaunch, float]] = {}  # and when it was fetched
        self.tell: tuple[str, ...] = ()
        self.holds_back = False  # a test delays its answers about jobs
        self.workers: list[str] = []
        self.orders: AgentOrders | None = None
        self.answers = 0
        self.connected = False
        self.clock = REAL  # the machine's
        self.shut = False  # a test cut the machine's network
        self.changed = asyncio.Event()
        self.said: AgentReport | None = None
        self.fetched: dict[str, bool] = {}  # digest of a checkpoint to restore -> it came as it was named
        self.damaged: tuple[DamagedCheckpoint, ...] = ()
        self.unsent: tuple[Unsent, ...] | None = ()  # a test leaves results here
        self.why = ""
        self.probe = ""  # as it reads it at the checkpoint target
        self.fetches: list[asyncio.Task[None]] = []
        self.task = asyncio.create_task(self._run())

    def report(self) -> AgentReport:
        _, notice = self.cloud.look(self.host)
        states = tuple(self.world.workers[n].state() for n in self.workers if n in self.world.workers)
        return AgentReport(self.host, self.incarnation, self.address, self.boot["slots"], states, notice,
                           why=self.why, held=() if self.holds_back else tuple(map(self._held, self.tell)),
                           damaged=self.damaged, unsent=self.unsent, target=self.probe,
                           clock=self.clock() if self.orders is not None and self.orders.clock else 0.0)

    def _held(self, job: str) -> HeldJob:
        orders = [w.order for n in self.workers if (w := self.world.workers.get(n)) and w.order.job == job]
        launch, fetched_at = self.launches.get(job, (None, 0.0))
        if launch is not None:
            launch = replace(launch, age_s=round(launch.age_s + time.monotonic() - fetched_at, 1))
        return HeldJob(job, launch, tuple({o.orders.assignment for o in orders if o.orders.assignment}),
                       launch is not None and launch.spec.bundle in self.bundles)

    def obey(self, orders: AgentOrders) -> None:
        if orders.refuse:
            with self.cloud.lock:
                self.cloud.market.power_off(self.host, self.cloud.clock())
            return
        self.orders, self.answers, self.tell = orders, self.answers + 1, orders.tell
        listed = {o.worker: self._with_checkpoint(o) for o in orders.workers}
        for name, order in listed.items():
            if name in self.workers:
                self.world.workers[name].order = order
            else:
                self.world.start(order)
                self.workers.append(name)
        for name in [n for n in self.workers if n not in listed]:
            if name in self.world.workers and self.world.workers[name].order.job in orders.tell:
                continue
            self.workers.remove(name)
            if self.world.workers[name].exit is None:
                self.world.kill(name)

    def _with_checkpoint(self, order: SlotOrder) -> SlotOrder:
        """What the worker may see of its order now: no place before the checkpoint to restore is here."""
        wanted = order.orders.restore
        self.damaged = tuple(d for d in self.damaged if wanted and d.job == order.job and d.digest == wanted.digest)
        if wanted is None or wanted.url or self.fetched.get(wanted.digest):
            return order
        if wanted.digest not in self.fetched:
            self.fetched[wanted.digest] = False
            self.fetches.append(asyncio.create_task(self._fetch(order.job, wanted)))
        return replace(order, orders=replace(order.orders, restore=None, assignment=None))

    async def _fetch(self, job: str, wanted: Checkpoint) -> None:
        url = f"{self.boot['dispatcher']}/v1/jobs/{job}/checkpoints/{wanted.version}"
        headers = {"Authorization": f"Bearer {self.boot['token']}"}
        async with aiohttp.ClientSession(headers=headers) as session:

            async def sha_of(name: str) -> tuple[str, bytes]:
                async with session.get(f"{url}{name}", ssl=certs.client_context(self.boot["ca"])) as answer:
                    data = await answer.read()
                    return hashlib.sha256(data).hexdigest(), data

            found, data = await sha_of(f"/{wanted.name}" if wanted.name else "")
            whole = found == wanted.digest
            for name, entry in parse_manifest(data).files.items() if whole and wanted.name else ():
                whole = whole and (await sha_of(f"/{name}"))[0] == entry.sha256
        if whole:
            self.fetched[wanted.digest] = True
            if self.orders is not None:
                self.obey(self.orders)
        else:
            self.damaged = (DamagedCheckpoint(job, wanted.version, wanted.digest),)

    def end(self) -> None:
        """The machine is gone, and with it the agent and its workers."""
        self.task.cancel()
        for fetch in self.fetches:
            fetch.cancel()
        for name in self.workers:
            if name in self.world.workers:
                self.world.kill(name)

    async def _run(self) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.boot['token']}"}) as session:
            while True:
                try:
                    await self._once(session)
                except (aiohttp.ClientError, OSError):
                    self.url = self.cloud.tags(self.host).get(DISPATCHER_TAG, self.url)
                self.connected = False
                await asyncio.sleep(0.05)

    async def _once(self, session: aiohttp.ClientSession) -> None:
        if self.shut:
            return
        tls = certs.client_context(self.boot["ca"])
        async with session.ws_connect(self.url + "/v1/agent", ssl=tls) as ws:
            self.connected = True
            sender = asyncio.create_task(self._send(ws))
            try:
                async for message in ws:
                    self.obey(load(AgentOrders, message.data))
                    self.changed.set()
                    await self._carry(session, tls)
            finally:
                sender.cancel()

    async def _carry(self, session: aiohttp.ClientSession, tls: ssl.SSLContext) -> None:
        """Fetch the launches of new jobs, and send the bundles that the dispatcher lacks."""
        assert self.orders is not None
        for job in {o.job for o in self.orders.workers} - self.launches.keys():
            async with session.get(f"{self.url}/v1/jobs/{job}/launch", ssl=tls) as answer:
                if answer.status == 200:
                    self.launches[job] = load(WorkerLaunch, await answer.read()), time.monotonic()
        for digest in self.orders.send:
            for blob in [digest, *self.bundles] if digest in self.bundles else []:  # the manifest before its pieces
                await (await session.put(f"{self.url}/v1/bundles/{blob}", ssl=tls, data=self.bundles[blob])).read()

    async def _send(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        """At once on change, about once a second otherwise."""
        sent_at = 0.0
        while not self.shut:
            report = self.report()
            said = self.said
            moved = (said is None or (report.workers, report.held, report.damaged, report.unsent)
                     != (said.workers, said.held, said.damaged, said.unsent)
                     or (report.notice is None) != (said.notice is None))
            if moved or time.monotonic() - sent_at > 1.0:
                self.said, sent_at = report, time.monotonic()
                await ws.send_str(dump(report))
            await asyncio.sleep(TICK_S / 2)
        await ws.close()


class Stage:
    """The fleet of one test."""

    def __init__(self, home: Path, spec: FleetSpec) -> None:
        made = certs.make("f", time.time())
        self.home, self.ca = home, made.ca
        self.boot = DispatcherBoot("f", "f-d-0", spec, SECRET, ADMIN, made.ca, made.cert, made.key,
                                   archive=str(home.parent / "archive"))
        self.cloud, self.world = Cloud(), World()
        self.agents: dict[str, FakeAgent] = {}
        self.daemon: DispatcherDaemon | None = None
        self.url, self.port, self._agents = "", 0, 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Stage:
        self.home.mkdir(parents=True, exist_ok=True)
        self.http = aiohttp.ClientSession()
        self._launch_own()
        await self.start_dispatcher()
        self._tasks = [asyncio.create_task(self._play())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        agents = [a.task for a in self.agents.values()]
        for task in agents:
            task.cancel()
        await asyncio.gather(*self._tasks, *agents, return_exceptions=True)
        await self.stop_dispatcher()
        await self.http.close()

    async def start_dispatcher(self) -> None:
        self.daemon = DispatcherDaemon(self.boot, self.home, self.cloud)
        self.url = await self.daemon.start("127.0.0.1", self.port)
        self.port = int(self.url.rpartition(":")[2])

    async def lose_dispatcher_machine(self) -> None:
        """Its machine and disk are gone; another takes its place elsewhere."""
        await self.stop_dispatcher()
        with self.cloud.lock:
            self.cloud.market.interrupt(self.boot.host, None, self.cloud.clock(), action="terminate")
        number = int(self.boot.host.rpartition("-")[2]) + 1
        self.boot = replace(self.boot, host=f"f-d-{number}")
        self.home, self.port = self.home.with_name(f"dispatcher-{number}"), 0
        self.home.mkdir()
        self._launch_own()

    def _launch_own(self) -> None:
        offer = self.cloud.offers(Need(use_spot=False))[0]
        InProcessProvider.launch(self.cloud, LaunchRequest(self.boot.host, "f", Role.DISPATCHER, offer, Boot("")))

    async def stop_dispatcher(self) -> None:
        if self.daemon is not None:
            daemon, self.daemon = self.daemon, None
            await daemon.stop()

    async def _play(self) -> None:
        """Let machines, agents and workers live."""
        while True:
            for host, request in list(self.cloud.machines.items()):
                running, _ = self.cloud.look(host)
                if running and host not in self.agents:
                    self.start_agent(host, request)
                elif not running and host in self.agents:
                    self.agents.pop(host).end()
            self.world.tick()
            await asyncio.sleep(TICK_S)

    def start_agent(self, host: str, request: LaunchRequest | None = None) -> FakeAgent:
        boot = json.loads((request or self.cloud.machines[host]).boot.files["boot.json"])
        self._agents += 1
        self.agents[host] = FakeAgent(host, boot, self.cloud, self.world, self._agents)
        return self.agents[host]

    async def call(self, method: str, path: str, body: Any = None, *, token: str = ADMIN, data: bytes | None = None,
                   ok: bool = True) -> tuple[int, Any]:
        """(status, JSON or bytes); asked again, as every caller does, while the dispatcher only settles."""
        while (answer := await self._call(method, path, body, token, data))[0] == 503:
            await asyncio.sleep(TICK_S)
        assert not ok or answer[0] == 200, f"{method} {path}: {answer}"
        return answer

    async def _call(self, method: str, path: str, body: Any, token: str, data: bytes | None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.http.request(method, self.url + path, json=body, data=data, headers=headers,
                                     ssl=certs.client_context(self.ca)) as answer:
            said = await answer.read()
            value = json.loads(said) if answer.content_type == "application/json" and said else said
            return answer.status, value

    def token(self, host: str) -> str:
        return host_token(SECRET, host)

    async def submit(self, script: Script, workers: tuple[int, int] = (2, 2), name: str = "train", *,
                     secrets: dict[str, str] | None = None, wait: bool = True, down: bool = False,
                     bundle: str = "", resize: ResizeSpec | None = None) -> str:
        self.world.scripts[name] = script
        spec = JobSpec(name, argv=("train.py",), bundle=bundle, min_workers=workers[0], max_workers=workers[1],
                       down=down, resize=resize or ResizeSpec())
        body = {"spec": to_json(spec), "secrets": secrets or {}, "wait": wait}
        return (await self.call("POST", "/v1/jobs", body))[1]["job"]

    async def job(self, job: str) -> JobStatus:
        return from_json(JobStatus, (await self.call("GET", f"/v1/jobs/{job}"))[1])

    async def events(self, kind: str = "") -> list[dict[str, Any]]:
        if self.daemon is not None and self.daemon.dispatcher is not None:
            await self.daemon.dispatcher.core.journal.flush()
        found = (await self.call("GET", "/v1/events"))[1]["events"]
        return [e for e in found if kind in ("", e["kind"])]

    async def until(self, what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """Wait for `condition`, which may be async, to be true; its value."""
        end = time.monotonic() + limit_s
        while True:
            value = condition()
            value = await value if asyncio.iscoroutine(value) else value
            if value:
                return value
            assert time.monotonic() < end, f"{what}: not within {limit_s:.0f} s"
            await asyncio.sleep(TICK_S)

    async def up(self, hosts: int) -> list[str]:
        """The hosts, once so many are up."""

        async def names() -> list[str]:
            status = (await self.call("GET", "/v1/status"))[1]
            found = [h["host"] for h in status["hosts"] if h["role"] == "worker" and h["state"] == "up"]
            return found if len(found) == hosts else []

        return await self.until(f"{hosts} hosts up", names)

    async def stands(self, job: str, state: str, limit_s: float = LIMIT_S) -> JobStatus:
        """The job's status once it is in `state`."""

        async def look() -> JobStatus | None:
            status = await self.job(job)
            assert status.state == state or status.state not in ("failed", "cancelled", "succeeded"), status
            return status if status.state == state else None

        return await self.until(f"{job} {state}", look, limit_s)

    async def at_version(self, job: str, version: int) -> JobStatus:
        """The job's status once it trains beyond `version`."""

        async def look() -> JobStatus | None:
            status = await self.job(job)
            return status if status.state == "running" and status.version >= version else None

        return await self.until(f"{job} at version {version}", look)

    def kill_worker(self, host: str, exit: Exit) -> str:
        name = self.agents[host].workers[0]
        self.world.kill(name, exit)
        return name


def spec(target: int = 2, least: int = 1, **more: Any) -> FleetSpec:
    """A fleet of cheap spot hosts."""
    return FleetSpec("f", nodes=Nodes(least, target, target), any_of=(Need(instance_type="cpu.small"),), **more)
