"""A laptop, a cloud and what runs on its machines in one thread, with the real flows of CLI and dispatcher.

The laptop's commands and the dispatcher's daemon are the product's own. Between them there is no network: a request
is a call of the dispatcher that lives on the machine with that address. Agents behave, workers are left out.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from http.client import HTTPMessage as Message
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

from spotfleet import providers
from spotfleet.api import machine as machines
from spotfleet.api.home import Home
from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher.checkpoints.archive_files import ArchiveFiles, blocks
from spotfleet.dispatcher.cloud import machines as dispatcher_machines
from spotfleet.dispatcher.daemon import DispatcherDaemon
from spotfleet.dispatcher.dispatcher import Dispatcher
from spotfleet.dispatcher.hosts import AgentConnection
from spotfleet.dispatcher.http.agents import refuse
from spotfleet.dispatcher.http.fleet import EVENTS_AT_ONCE
from spotfleet.dispatcher.lifecycle import shutdown
from spotfleet.errors import DispatcherUnreachable, NoSuchFleet
from spotfleet.fleet.domain.events import event_to_json
from spotfleet.model import CloudHost, CloudState, Nodes, Notice, Role
from spotfleet.protocol.messages import AgentReport
from spotfleet.providers import LaunchRequest
from spotfleet.providers.local.inprocess import InProcessProvider, ManualClock
from spotfleet.providers.local.market.book import LocalHost
from spotfleet.providers.local.market.pools import MarketRules, default_rules
from spotfleet.storage.mirror import Piece
from spotfleet.transport.boot import read_boot
from spotfleet.transport.client import DispatcherClient, _Reply
from tests.support.sweep.sweep_clock import MovedLoop, MovedTime, moved
from tests.support.sweep.sweep_fuse import DISPATCHER, LAPTOP, NOBODY, Fuse, Killed, TappedProvider, tapped_writes
from tests.support.sweep.sweep_states import digest, disks

STEP_S = 0.2  # how often machines look around
RESTART_S = 0.5  # from a process's death until its machine starts it again
JOIN_S = 1.0  # from the start of a worker's machine until its agent calls
REPORT_S = 1.0
BOOT_S = 1.0
MEMORY = "/dev/shm"  # for the disks, where there is one: thousands of lives are lived there
FETCH_S = 30.0  # so long a dispatcher that was asked to go down waits for its archive to be fetched
LIMIT_S = 300.0  # for anything to happen, by the moved clock


class Cloud(InProcessProvider):
    """A new machine is listed later than what changes about the others."""

    new_lag_s = 0.0

    def __init__(self, clock: ManualClock, rules: MarketRules) -> None:
        super().__init__(clock=clock, rules=rules)
        self._launched_at: dict[str, float] = {}

    def launch(self, request: LaunchRequest) -> None:
        super().launch(request)
        self._launched_at.setdefault(request.request_id, self.clock())

    def hosts(self, fleet: str) -> list[CloudHost]:
        return [h for h in super().hosts(fleet) if self.clock() - self._launched_at[h.request_id] >= self.new_lag_s]


class Process:
    """A dispatcher's process on its machine."""

    def __init__(self, daemon: DispatcherDaemon, fuse: Fuse) -> None:
        self.daemon, self.ready, self._fuse = daemon, False, fuse
        self.work: asyncio.Task[None] | None = None
        self._files: ArchiveFiles | None = None

    @property
    def answers(self) -> bool:
        return self.ready and not (self._fuse.dead and self._fuse.victim == DISPATCHER)

    @property
    def dispatcher(self) -> Dispatcher:
        assert self.daemon.dispatcher is not None
        return self.daemon.dispatcher

    @property
    def files(self) -> ArchiveFiles:
        core = self.dispatcher.core
        self._files = self._files or ArchiveFiles(core.home, core.journal.ledger)
        return self._files


class Agent:
    """Reports to whichever dispatcher its fleet has."""

    def __init__(self, host: LocalHost) -> None:
        self.host, self.name = host, host.order.request_id
        self.process: Process | None = None
        self.seat: AgentConnection | None = None
        self.said_at, self.noticed = -REPORT_S, False

    def live(self, host: LocalHost, process: Process | None, now: float) -> None:
        if process is not self.process:
            self.process, self.seat = process, None
        if process is None:
            return
        notice = Notice(host.notice.ends_at - now, host.notice.action) if host.notice else None
        report = AgentReport(self.name, f"{self.name}/{len(host.runs)}", host.address, 1, notice=notice)
        if self.seat is None:
            if refuse(report, process.dispatcher.core):
                return
            self.seat = process.dispatcher.core.connect(report, lambda: None)
        elif now - self.said_at < REPORT_S and self.noticed == (notice is not None):
            return
        self.said_at, self.noticed = now, notice is not None
        process.dispatcher.receive(self.seat, report)

    def end(self) -> None:
        if self.process is not None and self.process.ready and self.seat is not None:
            self.process.dispatcher.core.disconnect(self.seat)


class World:
    """Use it as a context. Below `root` are the laptop's home and the machines' disks."""

    def __init__(self, lag_s: float = 0.0) -> None:
        """Listings are late by `lag_s`, and by twice as much for new machines."""
        self._folder = tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.root, self.fuse, self.clock = Path(self._folder.name), Fuse(), ManualClock()
        given = default_rules()
        self.cloud = Cloud(self.clock, MarketRules(given.pools, given.billing, boot_s=BOOT_S))
        self.cloud.faults.listing_lag_s, self.cloud.new_lag_s = lag_s, 2 * lag_s
        self.market = self.cloud.market
        self.provider = TappedProvider(self.cloud, self.fuse)
        self.house = Home(self.root / "home")
        self.processes: dict[str, Process] = {}
        self.agents: dict[str, Agent] = {}
        self.down_until: dict[str, float] = {}  # machines that do not start their process before
        self._changes = 0  # counted whenever memory besides the victim's may have changed
        self.time = MovedTime(self.clock, self.sleep)
        self._stack = ExitStack()

    def __enter__(self) -> World:
        self.loop = MovedLoop(self.time, self.clock)
        enter = self._stack.enter_context
        enter(moved(self.time))
        enter(tapped_writes(self.fuse, self.root))
        enter(patch.object(providers, "load", lambda _name, _config: self.provider))
        for module in (shutdown, dispatcher_machines):
            enter(patch.object(module, "FETCH_S", FETCH_S))
        enter(patch.object(machines, "DispatcherClient", type("WorldClient", (LaptopClient,), {"world": self})))
        self._life = self.loop.create_task(self._play())
        return self

    def __exit__(self, *_: object) -> None:
        self._life.cancel()
        self.turn(self._end())
        self._stack.close()
        self.loop.close()
        self._folder.cleanup()

    async def _end(self) -> None:
        self.fuse.light(NOBODY)
        await asyncio.gather(self._life, return_exceptions=True)
        for host in list(self.processes):
            await self._stop(host)

    # ---- the laptop

    def laptop(self, command: Callable[[], Any]) -> Any:
        """Run a command; None when it was killed."""
        self.fuse.actor = LAPTOP
        try:
            return command()
        except Killed:
            assert self.fuse.victim == LAPTOP, "a dispatcher's death reached the laptop"
            self.fuse.revive()
            return None
        except NoSuchFleet:
            assert self.root.is_dir(), f"another process has removed {self.root}: this says nothing of the product"
            raise
        finally:
            self.fuse.actor = NOBODY

    def sleep(self, seconds: float) -> None:
        self.turn(asyncio.sleep(seconds))

    def until(self, what: str, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        end = self.clock.now + limit_s
        while not condition():
            assert self.clock.now < end, f"{what}: not within {limit_s:.0f} s; living: {self.cloud.living()}"
            self.sleep(STEP_S)

    def turn(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Let everybody else live until `work` is done."""
        actor, self.fuse.actor = self.fuse.actor, DISPATCHER
        self._changes += 1
        try:
            return self.loop.run_until_complete(work)
        finally:
            self.fuse.actor = actor
            self._changes += 1
            if self._life.done() and not self._life.cancelled():
                self._life.result()

    def at(self, url: str) -> Process | None:
        """The dispatcher that listens there."""
        address = urlsplit(url).hostname
        return next((p for name, p in self.processes.items()
                     if p.answers and self.market.hosts[name].address == address), None)

    # ---- its state

    def state(self) -> str:
        """Return the digest of all that outlives the victim's process: account, disks, time, the others' memory."""
        task = asyncio.current_task(self.loop) if self.loop.is_running() else None
        return digest(self.clock.now, self._changes, task and task.get_name(), disks(self.root), self.account())

    def account(self) -> str:
        """Return the digest of what the cloud remembers."""
        self.market.advance(self.clock.now)  # as whoever reads it next would
        return digest(self.market, self.cloud._boots, self.cloud.faults)

    # ---- the machines

    def living(self, role: Role) -> list[str]:
        return [name for name in self.cloud.living() if self.market.hosts[name].order.role is role]

    def disk(self, host: str) -> Path:
        return self.root / "disks" / host

    async def _play(self) -> None:
        while True:
            self.market.advance(self.clock.now)
            for name, host in list(self.market.hosts.items()):
                runs = host.state is CloudState.RUNNING
                if host.order.role is Role.DISPATCHER:
                    await self._dispatcher_machine(name, runs)
                elif runs and self.clock.now - host.since >= JOIN_S:
                    self.agents.setdefault(name, Agent(host)).live(host, self._of(host.order.fleet), self.clock.now)
                elif not runs and name in self.agents:
                    self.agents.pop(name).end()
            await self._pause()

    async def _pause(self) -> None:
        """Let the others live until the machines look around again."""
        self._changes += 1
        await asyncio.sleep(STEP_S)

    def _of(self, fleet: str) -> Process | None:
        return next((p for name, p in self.processes.items()
                     if p.answers and self.market.hosts[name].order.fleet == fleet), None)

    async def _dispatcher_machine(self, name: str, runs: bool) -> None:
        process = self.processes.get(name)
        if process is not None and (not runs or process.work is None or process.work.done()):
            if runs and not process._fuse.dead and process.work is not None:
                process.work.result()  # it failed by itself
            await self._stop(name)
        elif runs and name not in self.processes and self.clock.now >= self.down_until.get(name, 0.0):
            await self._start(name)

    async def _start(self, name: str) -> None:
        self.disk(name).mkdir(parents=True, exist_ok=True)
        boot = self.disk(name) / "boot.json"
        if not boot.exists():
            boot.write_text(self.cloud.boot_files(name)["boot.json"])
        process = self.processes[name] = Process(
            DispatcherDaemon(read_boot(self.disk(name)), self.disk(name), self.provider), self.fuse)
        try:
            await process.daemon.start("127.0.0.1", 0)
            process.work, process.ready = asyncio.create_task(process.daemon.wait()), True
        except Killed:
            await self._stop(name)

    async def _stop(self, name: str) -> None:
        """The process is dead: nothing that it still does counts."""
        process = self.processes.pop(name)
        process.ready = False
        if process.work is not None:
            process.work.cancel()
            await asyncio.gather(process.work, return_exceptions=True)
        revive, self.fuse.dead = self.fuse.dead, True
        self.down_until[name] = self.clock.now + RESTART_S
        victim, self.fuse.victim = self.fuse.victim, DISPATCHER
        try:
            await process.daemon.stop()
        except Killed:
            process.dispatcher.core.journal.ledger.close()
        finally:
            self.fuse.victim, self.fuse.dead = victim, False
            if revive:
                self.fuse.revive()


class LaptopClient(DispatcherClient):
    """The CLI's client without a network: its requests are calls of the dispatcher that lives at that address."""

    world: World
    streams = 1  # everything happens in one thread

    def persistent(self) -> LaptopClient:  # type: ignore[override]
        return self

    def abort(self) -> None:
        """A call has ended when it returns."""

    def close(self) -> None:
        """There is no connection."""

    def archive_manifest(self, *, outputs: str = "", check: bool = False, bring: bool = False) -> Iterator[bytes]:
        return iter(self._patiently("GET /v1/archive/manifest", b""))

    def archive_pieces(self, pieces: Sequence[Piece], **_: object) -> bytes:
        ranges = [[piece.key, piece.start, piece.end] for piece in pieces]
        return self._patiently("POST /v1/archive/ranges", json.dumps({"ranges": ranges}).encode())

    def _once(self, method: str, path: str, body: str | bytes | Path | None, headers: dict[str, str],
              timeout_s: float, most: int = 0) -> _Reply:
        assert body is None or isinstance(body, str)
        return _Reply(200, Message(), json.dumps(self._ask(f"{method} {path}", (body or "{}").encode())).encode())

    def _patiently(self, route: str, body: bytes) -> Any:
        end = self.world.clock.now + self.patience_s
        while True:
            try:
                return self._ask(route, body)
            except ConnectionError as error:
                if self.world.clock.now >= end:
                    raise DispatcherUnreachable(f"no answer at {self.endpoint.url}") from error
                self.world.sleep(0.3)

    def _ask(self, route: str, body: bytes) -> Any:
        world, process = self.world, self.world.at(self.endpoint.url)
        if process is None:
            raise ConnectionRefusedError
        try:
            return world.fuse.burn(f"ask {route}", lambda: world.turn(_answer(process, route, body)))
        except Killed:
            if world.fuse.victim == LAPTOP:
                raise
            raise ConnectionResetError from None


async def _answer(process: Process, route: str, body: bytes) -> Any:
    """What the HTTP API answers."""
    dispatcher = process.dispatcher
    match route.partition("?")[0]:
        case "GET /healthz":
            return {}
        case "GET /v1/events":
            after = int(parse_qs(route.partition("?")[2])["after"][0])
            page = await dispatcher.core.journal.page(after, EVENTS_AT_ONCE)
            return {"events": [{"seq": seq, **event_to_json(event)} for seq, event in page]}
        case "GET /v1/status":
            return to_json(dispatcher.fleet_desk.status())
        case "PUT /v1/nodes":
            await dispatcher.fleet_desk.set_nodes(from_json(Nodes, json.loads(body)))
            return {}
        case "POST /v1/down":
            dispatcher.fleet_desk.go_down(discard=json.loads(body)["discard"])
            return {}
        case "GET /v1/archive/manifest":
            sent: list[bytes] = []
            with dispatcher.shutdown.reading():
                process.files.send_manifest(sent.append, {}, None, 0.0)
            return sent
        case "POST /v1/archive/ranges":
            with dispatcher.shutdown.reading():
                pieces = [Piece(*ranged) for ranged in json.loads(body)["ranges"]]
                return b"".join(blocks(process.files.contents([piece.key for piece in pieces]), pieces))
    raise AssertionError(f"no answer for {route}")
