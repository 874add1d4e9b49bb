"""The world of the kill sweep on the example provider `lambda`: its plugin as installed, and the fake of its API.

Each request that changes something is an effect, before and after which its process may die. SSH is left out: a
dispatcher answers where its machine's address is, and agents behave.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from spotfleet import plugins, providers
from spotfleet.api import machine as machines
from spotfleet.api.access import ssh
from spotfleet.bootstrap.gang import files_of
from spotfleet.dispatcher.daemon import DispatcherDaemon
from spotfleet.model import CloudState, FleetSpec, Need, Nodes, Role
from spotfleet.transport.boot import read_boot
from tests.support.contract.lambda_world import EXAMPLE
from tests.support.fakes.lambda_cloud import KEY, SSH_KEY, LambdaCloud, LambdaInstance
from tests.support.sweep.cloud_world import Arrived
from tests.support.sweep.sweep_flows import NAME
from tests.support.sweep.sweep_fuse import NOBODY, Killed
from tests.support.sweep.sweep_states import digest
from tests.support.sweep.sweep_world import MEMORY, Process, World

A10 = Need(instance_type="gpu_1x_a10", use_spot=False)
SPEC = FleetSpec(NAME, provider="lambda", nodes=Nodes(2, 2, 2), any_of=(A10,), dispatcher=A10,
                 section={"ssh_key": SSH_KEY, "regions": []})
ENTRY_POINT = "[spotfleet.clouds]\nlambda = spotfleet_lambda:LAMBDA\n"  # as in the example's pyproject.toml
load = providers.load


def _name(instance: LambdaInstance) -> tuple[str, str, str]:
    """Return its host, its fleet and its role; empty for an instance of somebody else."""
    tags = {tag["key"]: tag["value"] for tag in instance.body["tags"]}
    return tags.get("spotfleet-host", ""), tags.get("spotfleet", ""), tags.get("spotfleet-role", "")


class LambdaMarket:
    """The truth about the account, as the world and the checks of the sweep read it."""

    def __init__(self, api: LambdaCloud) -> None:
        self.api = api

    def living(self) -> list[str]:
        """A host twice if it has two instances."""
        return sorted(_name(i)[0] for i in self.api.living())

    @property
    def hosts(self) -> dict[str, Any]:
        """Host -> its instance; the living one, if it has several."""
        ordered = sorted(self.api.instances, key=lambda i: i.ended_at is None)
        return {_name(i)[0]: self._seen(i) for i in ordered}

    def _seen(self, instance: LambdaInstance) -> Any:
        host, fleet, role = _name(instance)
        state = CloudState.RUNNING if instance.ended_at is None else CloudState.TERMINATED
        why = "" if instance.ended_at is None else \
            "terminated by its user" if instance.end == "terminated" else instance.end
        return SimpleNamespace(order=SimpleNamespace(request_id=host, fleet=fleet, role=Role(role)), state=state,
                               address=instance.body["private_ip"], since=instance.began_at, runs=(1,), notice=None,
                               why=why)

    def advance(self, now: float) -> None:
        """The account does so when it is read."""

    def interrupt(self, name: str, notice_s: float | None, now: float) -> None:
        """The cloud has no notices: a machine is gone."""
        for instance in self.api.living():
            if _name(instance)[0] == name:
                instance.ended_at, instance.end = now, "preempted"

    def invoice(self, now: float, fleet: str) -> Any:
        """Each instance's begun seconds, a minute at least, rounded once per host."""
        found: dict[str, int] = {}
        for instance in self.api.instances:
            host, of, _ = _name(instance)
            if of == fleet:
                ended_at = now if instance.ended_at is None else instance.ended_at
                seconds = math.ceil(ended_at - instance.began_at - 1e-6)
                cents = instance.body["instance_type"]["price_cents_per_hour"]
                found[host] = found.get(host, 0) + max(60, seconds) * cents * 10_000
        return SimpleNamespace(hosts={host: (micro_s * 2 + 3600) // 7200 for host, micro_s in found.items()})


@contextmanager
def installed() -> Iterator[None]:
    """Put the example on the path, as a distribution with an entry point."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
        info = Path(folder) / "spotfleet_lambda-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spotfleet-lambda\nVersion: 1\n")
        (info / "entry_points.txt").write_text(ENTRY_POINT)
        sys.path[:0] = [folder, str(EXAMPLE)]
        plugins.load.cache_clear()
        plugins.installed.cache_clear()
        try:
            yield
        finally:
            sys.path.remove(folder)
            sys.path.remove(str(EXAMPLE))
            plugins.load.cache_clear()
            plugins.installed.cache_clear()


class LambdaSweepWorld(World):
    """Use it as a context, as `World`."""

    def __init__(self, lag_s: float = 0.0) -> None:
        super().__init__()
        self.api = LambdaCloud(self.clock, lag_s=lag_s)
        self.market = LambdaMarket(self.api)  # type: ignore[assignment]
        self.cloud = self.market  # type: ignore[assignment]
        self._stack.enter_context(installed())

    def __enter__(self) -> LambdaSweepWorld:
        super().__enter__()
        enter = self._stack.enter_context
        enter(patch.object(providers, "load", load))
        enter(patch.dict(os.environ, {"LAMBDA_API_KEY": KEY}))
        module = sys.modules[type(plugins.load("lambda")).__module__]
        enter(patch.object(module.Client, "_call", lambda client, *request: self._tapped(module, client, *request)))
        enter(patch.object(machines, "DispatcherStartup", lambda *_: Arrived(self)))  # type: ignore[arg-type]
        enter(patch.object(ssh, "refresh", lambda folder, *_: ssh.read_targets(folder)))
        enter(patch.object(ssh, "remove", lambda *_: None))
        return self

    def account(self) -> str:
        return digest(self.api)

    def _tapped(self, module: Any, client: Any, method: str, path: str, body: bytes | None) -> Any:
        """Call the fake without a socket. What a dead process asks besides has no effect either."""
        def answer() -> Any:
            route = path.partition("?")[0]
            status, found = self.api._act(route, json.loads(body or b"{}"), f"Bearer {client._key}")
            if status != 200:
                raise module._refusal(route, status, json.dumps(found).encode())
            return found

        if method == "POST":
            return self.fuse.burn(f"call {path}", answer)
        if self.fuse.dead and self.fuse.actor == self.fuse.victim != NOBODY:
            raise Killed(path)
        return answer()

    async def _start(self, name: str) -> None:
        self.disk(name).mkdir(parents=True, exist_ok=True)
        boot = self.disk(name) / "boot.json"
        if not boot.exists():
            (made,) = (i for i in self.api.living() if _name(i)[0] == name)
            boot.write_text(files_of(made.user_data, name)["boot.json"])
        start = read_boot(self.disk(name))
        assert start.provider_config["api_key"] == KEY, "its dispatcher got no key of the account"
        process = self.processes[name] = Process(
            DispatcherDaemon(start, self.disk(name), providers.load("lambda", start.provider_config)), self.fuse)
        try:
            await process.daemon.start("127.0.0.1", 0)
            process.work, process.ready = asyncio.create_task(process.daemon.wait()), True
        except Killed:
            await self._stop(name)


def spec(**changed: Any) -> FleetSpec:
    return replace(SPEC, **changed)
