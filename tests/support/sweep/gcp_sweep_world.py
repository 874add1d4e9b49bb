"""The world of the sweep on Google Cloud: laptop, dispatcher and provider are the product's own down to `requests`, and
each request to Google is an effect before and after which its process may die. The project is the fake's, where the
laptop and the dispatcher may what their roles have and no more.

SSH is left out: a dispatcher answers where its machine's address is, and agents behave.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote, urlsplit

from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from requests.exceptions import ConnectionError as NoConnection

from spotfleet import providers
from spotfleet.api import machine as machines
from spotfleet.api.access import ssh
from spotfleet.codec import to_json
from spotfleet.dispatcher.cloud import machines as dispatcher_machines
from spotfleet.dispatcher.daemon import DispatcherDaemon
from spotfleet.dispatcher.lifecycle import shutdown
from spotfleet.model import FleetSpec, Need, Nodes, Role
from spotfleet.providers.gcp import session
from spotfleet.providers.gcp.mapping import names, roles
from spotfleet.providers.gcp.spec import GcpSpec
from spotfleet.providers.kit import checks, requests, userdata
from spotfleet.transport.boot import read_boot
from tests.support.fakes.gcp import GcpCloud, Lost
from tests.support.fakes.gcp.state import Instance
from tests.support.sweep.aws_sweep_world import FETCH_S, Arrived, Threadless
from tests.support.sweep.sweep_clock import MovedLoop, MovedTime, moved
from tests.support.sweep.sweep_flows import NAME
from tests.support.sweep.sweep_fuse import DISPATCHER, LAPTOP, NOBODY, Fuse, Killed, tapped_writes
from tests.support.sweep.sweep_states import digest
from tests.support.sweep.sweep_world import JOIN_S, MEMORY, STEP_S, Agent, LaptopClient, Process, World

PENDING_S, ENDING_S = 2.0, 4.0  # until an instance runs, and until it is gone
OPERATION_S = 0.5
NO_STATE = ("gate", "clock", "lock", "changed", "passing", "_clients", "_server", "_folder", "_threads", "_wake")
GCP = GcpSpec(regions=("us-central1",), ssh_from=("192.0.2.0/24",))
KIND, DISPATCHERS, GANG = "g2-standard-4", "e2-small", "g2-standard-48"
SPEC = FleetSpec(NAME, provider="gcp", nodes=Nodes(2, 2, 2), any_of=(Need(instance_type=KIND),), section=to_json(GCP),
                 dispatcher=Need(instance_type=DISPATCHERS, use_spot=False), tags={"team": "vision"})


class GcpFuse(Fuse):
    """Its points are requests to Google; what a dead process tries besides has no effect either."""

    def burn(self, what: str, effect: Callable[[], Any]) -> Any:
        if what.startswith("gcp ") or (self.dead and self.actor == self.victim and self.actor != NOBODY):
            return super().burn(what, effect)
        return effect()


class GcpNow:
    """The clock of the one fake: that of the world which lives."""

    world: GcpSweepWorld | None = None

    def __call__(self) -> float:
        return self.world.clock.now if self.world else 1_800_000_000.0


NOW = GcpNow()


@cache
def server() -> GcpCloud:
    cloud = GcpCloud(clock=NOW)
    cloud.__enter__()
    return cloud


@cache
def _client(service: str, principal: str) -> Any:
    """As the provider makes them, once: nothing of theirs is a process's memory."""
    return server().client("".join(word.capitalize() for word in service.split("_")) + "Client", principal)


class GcpSweepWorld(World):
    def __init__(self, lag_s: float = 0.0) -> None:
        super().__init__(lag_s)
        self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.root, self.fuse = Path(self._folder.name), GcpFuse()
        self.house = type(self.house)(self.root / "home")
        NOW.world, self.gcp = self, server()
        self.gcp.reset()
        self.gcp.pending_s, self.gcp.ending_s, self.gcp.operation_s = PENDING_S, ENDING_S, OPERATION_S
        self.gcp.lag_s, self.gcp.new_lag_s, self.gcp.passing = lag_s, 2 * lag_s, self.clock.advance
        self.gcp.allow(self.gcp.owner, roles.LAPTOP)
        self.gcp.allow(self.gcp.default_account, roles.DISPATCHER)
        self.cloud = SimpleNamespace(living=self.names)  # type: ignore[assignment]
        session.reset()

    def __enter__(self) -> GcpSweepWorld:
        self.loop = MovedLoop(self.time, self.clock)
        enter = self._stack.enter_context
        enter(patch.dict(os.environ, self.gcp.environ()))
        enter(moved(self.time))
        enter(patch.object(session, "time", MovedTime(self.clock, self.clock.advance)))  # polls between two requests
        for module in (requests, checks):
            if getattr(module, "ThreadPoolExecutor", None) is ThreadPoolExecutor:
                enter(patch.object(module, "ThreadPoolExecutor", Threadless))
        enter(tapped_writes(self.fuse, self.root))
        enter(patch.object(providers, "names", lambda: ["gcp"]))  # `leaks` asks every cloud that is installed
        enter(patch.object(session.GcpAccount, "_client",
                           lambda account, service: _client(service, self._who(account))))
        enter(patch.object(session.GcpAccount, "_found_credentials", lambda account: self._credentials(account)))
        enter(patch.object(HTTPAdapter, "send", self._tapped_send()))
        for module in (shutdown, dispatcher_machines):
            enter(patch.object(module, "FETCH_S", FETCH_S))
        enter(patch.object(machines, "DispatcherClient", type("WorldClient", (LaptopClient,), {"world": self})))
        enter(patch.object(machines, "DispatcherStartup", lambda *_: Arrived(self)))  # type: ignore[arg-type]
        enter(patch.object(ssh, "refresh", lambda folder, *_: ssh.read_targets(folder)))
        enter(patch.object(ssh, "remove", lambda *_: None))
        self._life = self.loop.create_task(self._play())
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__(*_)
        NOW.world = None

    def _who(self, account: session.GcpAccount) -> str:
        """The laptop is a person, the dispatcher the service account of its machine."""
        return self.gcp.owner if account.settings.laptop else self.gcp.default_account

    def _credentials(self, account: session.GcpAccount) -> tuple[Any, str]:
        from google.oauth2.credentials import Credentials

        return Credentials(self.gcp.rights.token(self._who(account))), self.gcp.project

    def _tapped_send(self) -> Callable[..., Response]:
        """Carries a request without a socket: the fake's gate is called."""
        def send(_adapter: HTTPAdapter, request: PreparedRequest, **_: Any) -> Response:
            return self.fuse.burn(f"gcp {action(self.gcp, request)}", lambda: carry(self.gcp, request))

        return send

    def laptop(self, command: Callable[[], Any]) -> Any:
        session.reset()  # another process
        return super().laptop(command)

    def account(self) -> str:
        """Return the digest of the fake's state; the log of requests is no state."""
        self.gcp.tick()  # as each request does
        ours = {name: value for name, value in vars(self.gcp).items() if name not in NO_STATE}
        return digest(ours, self.gcp.gate.faults, opaque=(self.gcp, self.gcp.gate, self.gcp.clock))

    # ---- the machines

    def running(self) -> list[tuple[str, Instance, bool]]:
        """(host, instance, does it run) of each, by the state of the cloud."""
        return [(names.host_of(i.name), i, i.state == "running") for i in list(self.gcp.instances_by_path.values())
                if names.FLEET in i.labels]

    def names(self) -> list[str]:
        """Hosts that have not ended."""
        return sorted(n for n, i, _ in self.running() if i.state in ("pending", "running", "stopping", "stopped"))

    def living(self, role: Role) -> list[str]:
        return sorted(n for n, i, _ in self.running() if i.labels.get(names.ROLE) == role.value
                      and i.state in ("pending", "running"))

    def instance(self, host: str) -> Instance:
        return next(i for n, i, _ in self.running() if n == host)

    def at(self, url: str) -> Process | None:
        address = urlsplit(url).hostname
        return next((p for name, p in self.processes.items() if p.answers and self._address(name) == address), None)

    def _address(self, host: str) -> str:
        return next((i.network_ip() for n, i, _ in self.running() if n == host), "")

    async def _play(self) -> None:
        while True:
            self.gcp.tick()
            for name, instance, runs in self.running():
                if instance.labels.get(names.ROLE) == Role.DISPATCHER.value:
                    await self._dispatcher_machine(name, runs)
                elif runs and self.clock.now - instance.launched >= PENDING_S + JOIN_S:
                    agent = self.agents.setdefault(instance.id, Agent(_as_host(name, instance)))
                    agent.live(_as_host(name, instance), self._of(instance.labels[names.FLEET]), self.clock.now)
                elif not runs and instance.id in self.agents:
                    self.agents.pop(instance.id).end()
            there = {instance.id for _, instance, _ in self.running()}
            for gone in [id for id in self.agents if id not in there]:
                self.agents.pop(gone).end()
            for name in [n for n in self.processes if n not in self.names()]:
                await self._stop(name)
            await asyncio.sleep(STEP_S)

    def _of(self, fleet: str) -> Process | None:
        fleets = {n: i.labels.get(names.FLEET) for n, i, _ in self.running()}
        return next((p for name, p in self.processes.items() if p.answers and fleets.get(name) == fleet), None)

    async def _start(self, name: str) -> None:
        self.disk(name).mkdir(parents=True, exist_ok=True)
        boot = self.disk(name) / "boot.json"
        if not boot.exists():
            data = base64.b64decode(self.instance(name).metadata[names.USER_DATA])
            boot.write_text(userdata.files(data, name)["boot.json"])
        told = read_boot(self.disk(name))
        session.reset()
        provider = providers.load("gcp", told.provider_config)
        process = self.processes[name] = Process(DispatcherDaemon(told, self.disk(name), provider), self.fuse)
        try:
            await process.daemon.start("127.0.0.1", 0)
            process.work, process.ready = asyncio.create_task(process.daemon.wait()), True
        except Killed:
            await self._stop(name)


def _as_host(name: str, instance: Instance) -> Any:
    """As `Agent` wants it."""
    notice = SimpleNamespace(action=instance.notice[0], ends_at=instance.notice[1]) if instance.notice else None
    return SimpleNamespace(order=SimpleNamespace(request_id=name), notice=notice, runs=range(instance.run),
                           address=instance.network_ip())


def action(cloud: GcpCloud, request: PreparedRequest) -> str:
    """As "compute.instances.insert"."""
    path = unquote(urlsplit(request.url or "").path)
    found = cloud.gate.routes.find(request.method or "", path)
    return found[0].id if found else path


def carry(cloud: GcpCloud, request: PreparedRequest) -> Response:
    at = urlsplit(request.url or "")
    body = request.body or b""
    try:
        status, headers, answered = cloud.gate.serve(
            request.method or "", f"{at.path}?{at.query}", {k: str(v) for k, v in request.headers.items()},
            body.encode() if isinstance(body, str) else bytes(body))
    except Lost:
        raise NoConnection("the connection was closed without an answer") from None
    made = Response()
    made.status_code, made.url, made.request, made.raw = status, request.url or "", request, io.BytesIO(answered)
    made.headers.update(headers)
    made._content = answered
    return made


def spec(**changed: Any) -> FleetSpec:
    return replace(SPEC, **changed)


__all__ = ["DISPATCHER", "LAPTOP", "NOBODY", "GcpSweepWorld", "Killed", "spec"]
