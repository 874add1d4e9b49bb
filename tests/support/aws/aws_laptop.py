"""A laptop's memory of an AWS fleet, as `up` makes it, whose dispatcher has answered or not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spotfleet.api.home import FleetDir, FleetRecord, Home, Keys
from spotfleet.api.machine import DispatcherMachine
from spotfleet.codec import to_json
from spotfleet.model import FleetSpec, Need, Nodes
from spotfleet.providers.aws import AwsProvider
from spotfleet.providers.aws.plugin import AWS
from spotfleet.providers.aws.section.spec import AwsSpec
from spotfleet.transport import certs
from tests.support.aws.aws_hosts import USERS, B, dispatcher, request

OFFICE = ("198.51.100.0/24",)


@dataclass
class Laptop:
    house: Home
    folder: FleetDir

    @property
    def provider(self) -> AwsProvider:
        return DispatcherMachine(self.folder).provider  # type: ignore[return-value]

    def prepare(self) -> AwsProvider:
        provider = self.provider
        provider.prepare(self.folder.record.cloud_name, USERS, lambda _line: None)
        return provider

    def furnish(self, cloud: Any) -> None:
        """A dispatcher that has ended, and three hosts: one to be replaced, one to be stopped, one that EC2 has
        stopped."""
        provider = self.prepare()
        provider.launch(dispatcher())
        provider.launch(request(B, "f-1"))
        provider.launch(request(B, "f-2", interruption_behavior="stop"))
        provider.launch(request(B, "f-3", interruption_behavior="stop"))
        cloud.settle()
        machines = {i.tags.get("spotfleet-host"): i.id for i in cloud.instances()}
        cloud.take(machines["f-3"])
        cloud.guest_shutdown(machines["f-d-0"])
        cloud.settle()


def laptop(home: Path, *, name: str = "f", reached: bool = False, target: str = "", **aws: Any) -> Laptop:
    spec = FleetSpec(name, "aws", (Need(instance_type="g5.xlarge"),), Nodes(1, 2, 4), tags=USERS,
                     section=to_json(AwsSpec(
                         **{"regions": ("us-east-1",), "ssh_from": OFFICE, "event_queue": True, **aws})))
    spec = replace(spec, checkpoint=replace(spec.checkpoint, target=target))
    house = Home(home)
    folder, made = house.folder(name), certs.make(name, time.time())
    folder.make(FleetRecord(spec, name, time.time() - 3600, AWS.config(spec, os.environ, ""), reached=reached),
                Keys("admin", "secret", made.cert, made.key), made.ca)
    return Laptop(house, folder)


def later(monkeypatch: Any, module: Any, seconds: float = 3600.0) -> None:
    """So much time has passed since whatever the test does, as `module` sees it."""
    from types import SimpleNamespace

    monkeypatch.setattr(module, "time", SimpleNamespace(
        time=lambda: time.time() + seconds, monotonic=time.monotonic, sleep=lambda _s: time.sleep(0.05)))


Told = Callable[[str], None]
