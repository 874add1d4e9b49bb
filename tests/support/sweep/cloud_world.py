"""The world of a sweep on a cloud with an SDK: laptop, dispatcher and provider are the product's own down to the SDK's
requests, and each of these is an effect before and after which its process may die. The account is the fake's.

SSH is left out: a dispatcher answers where its machine's address is, and agents behave.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from spotfleet import providers
from spotfleet.api import machine as machines
from spotfleet.api.access import ssh
from spotfleet.dispatcher.cloud import machines as dispatcher_machines
from spotfleet.dispatcher.daemon import DispatcherDaemon
from spotfleet.dispatcher.lifecycle import shutdown
from spotfleet.model import CloudHost, CloudState, Role
from spotfleet.providers.kit import checks, requests, userdata
from spotfleet.providers.kit.mapping.names import FLEET, ROLE
from spotfleet.transport.boot import DispatcherBoot, read_boot
from tests.support.sweep.sweep_clock import Inline, MovedLoop, moved
from tests.support.sweep.sweep_fuse import NOBODY, Fuse, Killed, tapped_writes
from tests.support.sweep.sweep_states import digest
from tests.support.sweep.sweep_world import JOIN_S, MEMORY, Agent, LaptopClient, Process, World

FETCH_S = 30.0
EXISTS = ("pending", "running", "stopping", "stopped")


class CloudFuse(Fuse):
    """Its points are requests to the cloud; what a dead process tries besides has no effect either."""

    def __init__(self, cloud: str) -> None:
        super().__init__()
        self._cloud = f"{cloud} "

    def burn(self, what: str, effect: Callable[[], Any]) -> Any:
        if what.startswith(self._cloud) or (self.dead and self.actor == self.victim and self.actor != NOBODY):
            return super().burn(what, effect)
        return effect()


class Threadless(Inline):
    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


class CloudNow:
    """The clock of a fake that serves all worlds: that of the world which lives."""

    world: World | None = None

    def __call__(self) -> float:
        return self.world.clock.now if self.world else 1_800_000_000.0


@dataclass
class Arrived:
    """Stands for `api.arrival.Arrival`: the code came, for there is no SSH here."""

    world: World
    why: str = ""

    def advance(self, listed: list[CloudHost], ours: str) -> bool:
        return any(h.request_id == ours and h.state is CloudState.RUNNING for h in listed)


class CloudWorld(World, ABC):
    """A subclass has the members before `__init__`, and the methods that follow "what each cloud has"."""

    plugin: str
    session: ModuleType  # the provider's; its `reset` forgets what a process remembers
    modules: tuple[ModuleType, ...] = (requests, checks)  # their threads run inline
    no_state: tuple[str, ...]  # attributes of the fake that are no state of the account
    started_s = 0.0  # from the request of a machine until it runs

    def __init__(self, lag_s: float, fake: Any, now: CloudNow) -> None:
        super().__init__(lag_s)
        self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.root, self.fuse = Path(self._folder.name), CloudFuse(self.plugin)
        self.house = type(self.house)(self.root / "home")
        self.fake, self._now, now.world = fake, now, self
        fake.reset()
        fake.lag_s, fake.new_lag_s = lag_s, 2 * lag_s
        self.cloud = SimpleNamespace(living=self.names)  # type: ignore[assignment]
        self.session.reset()

    def __enter__(self) -> Any:
        self.loop = MovedLoop(self.time, self.clock)
        enter = self._stack.enter_context
        enter(patch.dict(os.environ, self.fake.environ()))
        enter(moved(self.time))
        for module in self.modules:
            if getattr(module, "ThreadPoolExecutor", None) is ThreadPoolExecutor:
                enter(patch.object(module, "ThreadPoolExecutor", Threadless))
        enter(tapped_writes(self.fuse, self.root))
        enter(patch.object(providers, "names", lambda: [self.plugin]))  # `leaks` asks every cloud that is installed
        for patched in self.patches():
            enter(patched)
        for module in (shutdown, dispatcher_machines):
            enter(patch.object(module, "FETCH_S", FETCH_S))
        enter(patch.object(machines, "DispatcherClient", type("WorldClient", (LaptopClient,), {"world": self})))
        enter(patch.object(machines, "DispatcherStartup", lambda *_: Arrived(self)))
        enter(patch.object(ssh, "refresh", lambda folder, *_: ssh.read_targets(folder)))
        enter(patch.object(ssh, "remove", lambda *_: None))
        self._life = self.loop.create_task(self._play())
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__(*_)
        self._now.world = None

    def laptop(self, command: Callable[[], Any]) -> Any:
        self.session.reset()  # another process
        return super().laptop(command)

    def account(self) -> str:
        """Return the digest of the fake's state; the log of requests is no state."""
        self.fake.tick()  # as each request does
        ours = {name: value for name, value in vars(self.fake).items() if name not in self.no_state}
        return digest(ours, self.fake.gate.faults, *self.further_state(),
                      opaque=(self.fake, self.fake.gate, self.fake.clock))

    # ---- what each cloud has

    @abstractmethod
    def patches(self) -> Iterable[Any]:
        """Contexts in which the SDK's requests reach the fake without a socket, through `fuse`."""

    def further_state(self) -> tuple[Any, ...]:
        return ()

    @abstractmethod
    def running(self) -> list[tuple[str, Any, bool]]:
        """(host, instance, does it run) of each machine of a fleet, by the state of the cloud."""

    @abstractmethod
    def labels(self, instance: Any) -> dict[str, str]:
        """Labels or tags of a machine."""

    @abstractmethod
    def address(self, instance: Any) -> str:
        """Where its host is reached; "" if nowhere yet."""

    @abstractmethod
    def user_data(self, instance: Any) -> bytes:
        """As its first boot reads them."""

    def became(self, host: str, instance: Any) -> str:
        """The host that a running machine has become; "" while it waits to be told."""
        return host

    def boots(self, instance: Any, told: DispatcherBoot) -> None:
        """A dispatcher's process begins on its machine."""

    # ---- the machines

    def names(self) -> list[str]:
        """Hosts that have not ended."""
        return sorted(n for n, i, _ in self.running() if i.state in EXISTS)

    def living(self, role: Role) -> list[str]:
        return sorted(n for n, i, _ in self.running() if self.labels(i).get(ROLE) == role.value
                      and i.state in ("pending", "running"))

    def instance(self, host: str) -> Any:
        return next(i for n, i, _ in self.running() if n == host and i.state in EXISTS)

    def at(self, url: str) -> Process | None:
        wanted = urlsplit(url).hostname
        places = {n: address for n, i, _ in reversed(self.running()) if (address := self.address(i))}
        return next((p for name, p in self.processes.items() if p.answers and places.get(name) == wanted), None)

    async def _play(self) -> None:
        while True:
            self.fake.tick()
            for name, instance, runs in self.running():
                if self.labels(instance).get(ROLE) == Role.DISPATCHER.value:
                    await self._dispatcher_machine(name, runs)
                elif runs and self.clock.now - instance.launched >= self.started_s + JOIN_S and (
                        host := self.became(name, instance)):
                    seen = self._as_host(host, instance)
                    agent = self.agents.setdefault(instance.id, Agent(seen))
                    agent.live(seen, self._of(self.labels(instance)[FLEET]), self.clock.now)
                elif not runs and instance.id in self.agents:
                    self.agents.pop(instance.id).end()
            there = {instance.id for _, instance, _ in self.running()}
            for gone in [id for id in self.agents if id not in there]:
                self.agents.pop(gone).end()
            for name in [n for n in self.processes if n not in {n for n, _, _ in self.running()}]:
                await self._stop(name)
            await self._pause()

    def _of(self, fleet: str) -> Process | None:
        fleets = {n: self.labels(i).get(FLEET) for n, i, _ in self.running()}
        return next((p for name, p in self.processes.items() if p.answers and fleets.get(name) == fleet), None)

    def _as_host(self, name: str, instance: Any) -> Any:
        """As `Agent` wants it."""
        notice = SimpleNamespace(action=instance.notice[0], ends_at=instance.notice[1]) if instance.notice else None
        return SimpleNamespace(order=SimpleNamespace(request_id=name), notice=notice, runs=range(instance.run),
                               address=self.address(instance))

    async def _start(self, name: str) -> None:
        self.disk(name).mkdir(parents=True, exist_ok=True)
        instance, boot = self.instance(name), self.disk(name) / "boot.json"
        if not boot.exists():
            boot.write_text(userdata.files(self.user_data(instance), name)["boot.json"])
        told = read_boot(self.disk(name))
        self.boots(instance, told)
        self.session.reset()
        provider = providers.load(self.plugin, told.provider_config)
        process = self.processes[name] = Process(DispatcherDaemon(told, self.disk(name), provider), self.fuse)
        try:
            await process.daemon.start("127.0.0.1", 0)
            process.work, process.ready = asyncio.create_task(process.daemon.wait()), True
        except Killed:
            await self._stop(name)
