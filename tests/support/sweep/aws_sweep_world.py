"""The world of the sweep on AWS: the laptop, the dispatcher and its provider are the product's own down to botocore,
and each request to AWS is an effect before and after which its process may die. The account is the fake's, where the
dispatcher may what the policy of its role says and no more.

SSH is left out: a dispatcher answers where its machine's address is, and agents behave.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, unquote, urlsplit

from botocore.awsrequest import AWSResponse, HeadersDict
from botocore.exceptions import ConnectionClosedError
from botocore.httpsession import URLLib3Session

from spotfleet import providers
from spotfleet.api import machine as machines
from spotfleet.api.access import ssh
from spotfleet.bootstrap.gang_place import TAG_S, ZERO_S
from spotfleet.dispatcher.cloud import machines as dispatcher_machines
from spotfleet.dispatcher.cloud.events import CloudEventListener
from spotfleet.dispatcher.daemon import DispatcherDaemon
from spotfleet.dispatcher.lifecycle import shutdown
from spotfleet.errors import SpotfleetError
from spotfleet.model import CloudHost, CloudState, Role
from spotfleet.providers.aws import describe, images, launch, offers, prices, session, terminate, types
from spotfleet.providers.aws.account import check, identity, network, queue, resources, ssh_ingress
from spotfleet.providers.aws.mapping import listing, names, policies, template
from spotfleet.providers.kit import checks, requests, userdata
from spotfleet.transport.boot import read_boot
from tests.support.fakes.aws import AwsCloud
from tests.support.fakes.aws.rights import OWNER_KEY, Key
from tests.support.fakes.aws.state import Machine as Instance
from tests.support.sweep.sweep_clock import Inline, MovedLoop, moved
from tests.support.sweep.sweep_fuse import DISPATCHER, LAPTOP, NOBODY, Fuse, Killed, tapped_writes
from tests.support.sweep.sweep_world import JOIN_S, MEMORY, STEP_S, Agent, LaptopClient, Process, World

MODULES = (resources, types, check, ssh_ingress, terminate, identity, images, launch, listing, describe, network,
           offers, policies,
           prices, queue, session, template, requests, checks)
FETCH_S = 30.0
PENDING_S, ENDING_S = 1.0, 4.0  # times of instances: what uses a group uses it a while longer
PROFILE_S = 2.0
HEAR_S = 2.0
ROLE_KEY = ("ASIA000ADISPATCHER00", "the-secret-of-a-dispatcher")
STOPPED_AGAIN_S = 5.0  # how often EC2 looks for room for a stopped host


class AwsFuse(Fuse):
    """Its points are requests to AWS; what a dead process tries besides has no effect either."""

    def burn(self, what: str, effect: Callable[[], Any]) -> Any:
        if what.startswith("aws ") or (self.dead and self.actor == self.victim and self.actor != NOBODY):
            return super().burn(what, effect)
        return effect()


class Threadless(Inline):
    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


class Now:
    """The clock of the one fake: that of the world which lives."""

    world: AwsWorld | None = None

    def __call__(self) -> float:
        return self.world.clock.now if self.world else 1_800_000_000.0


NOW = Now()


@cache
def server() -> AwsCloud:
    cloud = AwsCloud(clock=NOW)
    cloud.__enter__()
    return cloud


@cache
def _client(cloud: AwsCloud, key: tuple[str, str], service: str, region: str, patient: bool) -> Any:
    """As the provider makes them, once: nothing of theirs is a process's memory."""
    attempts = 4 if patient else 1
    return cloud.client(service, region, key, retries={"mode": "standard", "total_max_attempts": attempts})


@dataclass
class Arrived:
    """Stands for `api.arrival.Arrival`: the code came, for there is no SSH here."""

    world: AwsWorld
    why: str = ""

    def advance(self, listed: list[CloudHost], ours: str) -> bool:
        return any(h.request_id == ours and h.state is CloudState.RUNNING for h in listed)


class AwsWorld(World):
    def __init__(self, lag_s: float = 0.0) -> None:
        super().__init__(lag_s)
        self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.root, self.fuse = Path(self._folder.name), AwsFuse()
        self.house = type(self.house)(self.root / "home")
        self.became: dict[str, str] = {}  # instance of a worker -> its host
        NOW.world, self.aws = self, server()
        self.aws.reset()
        self.aws.pending_s, self.aws.ending_s, self.aws.profile_lag_s = PENDING_S, ENDING_S, PROFILE_S
        self.aws.lag_s, self.aws.new_lag_s, self.aws.retry_s = lag_s, 2 * lag_s, STOPPED_AGAIN_S
        self.cloud = SimpleNamespace(living=self.names)  # type: ignore[assignment]
        session.reset()

    def __enter__(self) -> AwsWorld:
        self.loop = MovedLoop(self.time, self.clock)
        enter = self._stack.enter_context
        enter(patch.dict(os.environ, self.aws.environ()))
        enter(moved(self.time))
        for module in MODULES:
            if getattr(module, "ThreadPoolExecutor", None) is ThreadPoolExecutor:
                enter(patch.object(module, "ThreadPoolExecutor", Threadless))
        enter(tapped_writes(self.fuse, self.root))
        enter(patch.object(providers, "names", lambda: ["aws"]))  # `leaks` asks every cloud that is installed
        enter(patch.object(session.Account, "_made", lambda account, *which: _client(
            self.aws, OWNER_KEY if account.settings.laptop else ROLE_KEY, *which)))
        enter(patch.object(URLLib3Session, "send", self._tapped_send()))
        for module in (shutdown, dispatcher_machines):
            enter(patch.object(module, "FETCH_S", FETCH_S))
        enter(patch.object(machines, "DispatcherClient", type("WorldClient", (LaptopClient,), {"world": self})))
        enter(patch.object(CloudEventListener, "run", _listen))
        enter(patch.object(machines, "DispatcherStartup", lambda *_: Arrived(self)))
        enter(patch.object(ssh, "refresh", lambda folder, *_: ssh.read_targets(folder)))
        enter(patch.object(ssh, "remove", lambda *_: None))
        self._life = self.loop.create_task(self._play())
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__(*_)
        NOW.world = None

    def _tapped_send(self) -> Callable[..., Any]:
        """What carries a request, without a socket: the fake's door is called."""
        gate, fuse = self.aws.gate, self.fuse

        def send(_http: URLLib3Session, request: Any) -> AWSResponse:
            return fuse.burn(f"aws {_action(request)}", lambda: carry(gate, request))

        return send

    def laptop(self, command: Callable[[], Any]) -> Any:
        session.reset()  # another process
        return super().laptop(command)

    # ---- the machines

    def running(self) -> list[tuple[str, Instance, bool]]:
        """(name, instance, does it run) of each host, by the state of the cloud."""
        found = []
        for region in self.aws.regions.values():
            for instance in region.machines.values():
                tags = instance.tags
                if names.HOST in tags:
                    place = tags.get(names.MEMBER, names.BY_INDEX)
                    host = names.members(tags[names.HOST])[int(place) if place.isdigit() else instance.launch_index]
                    found.append((host, instance, instance.state == "running"))
        return found

    def _became(self, instance: Instance) -> str:
        """The host that the machine has become, for good, as `bootstrap/gang_place.py` decides; "" while it waits."""
        if instance.id not in self.became:
            members, tag = names.members(instance.tags[names.HOST]), instance.tags.get(names.MEMBER, "")
            index, waited_s = instance.launch_index, self.clock.now - instance.launched
            if tag.isdigit():
                self.became[instance.id] = members[int(tag)]
            elif len(members) == 1 or tag or waited_s > (TAG_S if index else ZERO_S):
                self.became[instance.id] = members[index]
        return self.became.get(instance.id, "")

    def names(self) -> list[str]:
        """Hosts that have not ended."""
        return sorted(n for n, i, _ in self.running() if i.state in ("pending", "running", "stopping", "stopped"))

    def living(self, role: Role) -> list[str]:
        return sorted(n for n, i, _ in self.running() if i.tags.get(names.ROLE) == role.value
                      and i.state in ("pending", "running"))

    def instance(self, host: str) -> Instance:
        return next(i for n, i, _ in self.running() if n == host and i.living)

    def at(self, url: str) -> Process | None:
        address = urlsplit(url).hostname
        return next((p for name, p in self.processes.items() if p.answers and self._address(name) == address), None)

    def _address(self, host: str) -> str:
        return next((i.nics[0].private_ip_address for n, i, _ in self.running() if n == host and i.nics), "")

    async def _play(self) -> None:
        while True:
            self.aws.tick()
            for name, instance, runs in self.running():
                if instance.tags.get(names.ROLE) == Role.DISPATCHER.value:
                    await self._dispatcher_machine(name, runs)
                elif runs and self.clock.now - instance.launched >= JOIN_S and (host := self._became(instance)):
                    agent = self.agents.setdefault(instance.id, Agent(_as_host(host, instance)))
                    fleet = instance.tags[names.FLEET]
                    agent.live(_as_host(host, instance), self._of(fleet), self.clock.now)
                elif not runs and instance.id in self.agents:
                    self.agents.pop(instance.id).end()
            await asyncio.sleep(STEP_S)

    def _of(self, fleet: str) -> Process | None:
        fleets = {n: i.tags.get(names.FLEET) for n, i, _ in self.running()}
        return next((p for name, p in self.processes.items() if p.answers and fleets.get(name) == fleet), None)

    async def _start(self, name: str) -> None:
        self.disk(name).mkdir(parents=True, exist_ok=True)
        instance, boot = self.instance(name), self.disk(name) / "boot.json"
        if not boot.exists():
            data = self.aws.instance(instance.id).user_data
            boot.write_text(userdata.files(data, name)["boot.json"])
        role = instance.order.profile.roles[0].name
        self.aws.rights.keys[ROLE_KEY[0]] = Key(f"role/{role}", ROLE_KEY[1])  # it may what its role's policy says
        told = read_boot(self.disk(name))
        session.reset()
        provider = providers.load("aws", told.provider_config)
        process = self.processes[name] = Process(DispatcherDaemon(told, self.disk(name), provider), self.fuse)
        try:
            await process.daemon.start("127.0.0.1", 0)
            process.work, process.ready = asyncio.create_task(process.daemon.wait()), True
        except Killed:
            await self._stop(name)


async def _listen(listener: CloudEventListener) -> None:
    """`CloudEventListener.run` without its thread."""
    while True:
        try:
            listener.receive(listener._provider.poll_events(listener._fleet, 0.0), NOW.world.time.monotonic())
        except SpotfleetError as error:
            listener.problem = str(error)
        await asyncio.sleep(HEAR_S)


def _as_host(name: str, instance: Instance) -> Any:
    """As `Agent` wants it."""
    notice = SimpleNamespace(action=instance.notice[0], ends_at=instance.notice[1]) if instance.notice else None
    address = instance.nics[0].private_ip_address if instance.nics else ""
    return SimpleNamespace(order=SimpleNamespace(request_id=name), notice=notice, runs=range(instance.run),
                           address=address)


def carry(gate: Callable[..., Any], request: Any) -> AWSResponse:
    """The answer of a WSGI application to botocore's request."""
    at, body, held = urlsplit(request.url), request.body or b"", []
    body = body.encode() if isinstance(body, str) else body.read() if hasattr(body, "read") else body
    environ = {"REQUEST_METHOD": request.method, "PATH_INFO": unquote(at.path) or "/", "QUERY_STRING": at.query,
               "SERVER_NAME": at.hostname, "SERVER_PORT": str(at.port), "SERVER_PROTOCOL": "HTTP/1.1",
               "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(body), "wsgi.errors": sys.stderr,
               "CONTENT_LENGTH": str(len(body)), "HTTP_HOST": at.netloc, "wsgi.version": (1, 0),
               "wsgi.multithread": False, "wsgi.multiprocess": False, "wsgi.run_once": False}
    for name, value in request.headers.items():
        key = name.upper().replace("-", "_")
        if key != "CONTENT_LENGTH":
            said = value.decode() if isinstance(value, bytes) else str(value)
            environ[key if key == "CONTENT_TYPE" else f"HTTP_{key}"] = said
    answered = b"".join(gate(environ, lambda status, headers, *_: held.append((status, headers))))
    if not held:
        raise ConnectionClosedError(endpoint_url=request.url)
    status, headers = held[0]
    return AWSResponse(request.url, int(status.split()[0]), HeadersDict(headers), Raw(answered))


class Raw(io.BytesIO):
    def stream(self, *_: object, **__: object) -> Iterator[bytes]:
        yield self.read()


def _action(request: Any) -> str:
    """As "ec2:RunInstances"."""
    authorization = request.headers.get("Authorization", b"")
    text = authorization.decode() if isinstance(authorization, bytes) else authorization
    service = text.partition("Credential=")[2].split("/")[3]
    target = request.headers.get("X-Amz-Target", b"")
    if target:
        return f"{service}:{(target.decode() if isinstance(target, bytes) else target).rpartition('.')[2]}"
    body = request.body.decode() if isinstance(request.body, bytes) else request.body or ""
    return f"{service}:{parse_qs(body).get('Action', [request.method])[0]}"


__all__ = ["DISPATCHER", "LAPTOP", "NOBODY", "AwsWorld", "Killed"]
