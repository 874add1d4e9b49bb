"""The world of provider `aws`: the fake EC2 behind the real boto3. Its hosts run nothing.

EC2 tells whole seconds, so this world is TIMES as fast as the suite thinks; its clock moves when the suite lets time
pass.
"""

from __future__ import annotations

import json
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from spotfleet.codec import to_json
from spotfleet.model import Need
from spotfleet.providers.aws import AwsProvider, describe, session
from spotfleet.providers.aws.mapping import names
from spotfleet.providers.aws.section.spec import AwsSpec
from spotfleet.providers.aws.session import Account

TIMES = 20.0
FLEETS = ("f", "g")
LAUNCH = "ec2:CreateFleet"


class Clock:
    def __init__(self) -> None:
        self.at = time.time()

    def __call__(self) -> float:
        return self.at


CLOCK = Clock()


@lru_cache(maxsize=1)
def the_cloud() -> Any:
    """One per process, as new for each test."""
    from tests.support.fakes.aws import AwsCloud

    return AwsCloud(clock=CLOCK).__enter__()


MADE = Account._made


@lru_cache(maxsize=64)
def a_client(service: str, region: str, patient: bool, url: str) -> Any:
    """To make one takes longer than most of what it is asked."""
    return MADE(Account(session.Settings(endpoint_url=url)), service, region, patient)


class Interruptible(AwsProvider):
    """EC2 lets nobody ask for a notice but through its Fault Injection Service: here the fake sends it."""

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        if notice_s is None:
            return super().interrupt(request_id, notice_s)
        living = [i for found in describe.find(self.account, request_id) for i in found.living]
        the_cloud().interrupt(living[-1]["InstanceId"], notice_s=notice_s * TIMES)


class AwsWorld:
    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        CLOCK.at = time.time()
        self._cloud = the_cloud()
        self._cloud.reset()
        for name, value in self._cloud.environ().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(Account, "_made", lambda account, *what: a_client(*what, account.settings.endpoint_url))
        spec = AwsSpec(regions=("us-east-1",), ssh_from=("192.0.2.1/32",))
        self._config = {"aws": json.dumps(to_json(spec)), "endpoint_url": self._cloud.url, "secret": "the fleet's"}
        for fleet in FLEETS:
            self.provider().prepare(fleet, {}, lambda line: None)

    def provider(self) -> AwsProvider:
        made = Interruptible(self._config)
        made.account = Account(made.account.settings)  # with nothing remembered
        return made

    def need(self) -> Need:
        return Need(accelerator="A10G")

    def machines(self) -> list[str]:
        return sorted(i.tags[names.HOST] for i in self._cloud.instances() if i.state in ("pending", "running"))

    def tag(self, request_id: str, key: str) -> str:
        machine = next(i for i in self._cloud.instances() if i.tags[names.HOST] == request_id)
        status, token = self._cloud.metadata(machine.id, "/latest/api/token", "PUT",
                                             {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        assert status == 200
        status, body = self._cloud.metadata(machine.id, f"/latest/meta-data/tags/instance/{key}", "GET",
                                            {"X-aws-ec2-metadata-token": token.decode()})
        return body.decode() if status == 200 else ""

    def let_pass(self, seconds: float) -> None:
        CLOCK.at += seconds * TIMES
        self._cloud.tick()

    def full(self, pool: str) -> None:
        _, zone, kind, market = pool.split("/")
        self._cloud.set_room(zone, kind, 0, market)

    def wants_a_person(self, pool: str) -> None:
        self._cloud.deny("owner", {LAUNCH})

    def lose(self, method: str, when: str) -> None:
        """A lost answer to a launch is not asked for again on the way; other calls are, so all of those are lost."""
        action, times = (LAUNCH, 1) if method == "launch" else ("ec2:TerminateInstances", session.ATTEMPTS)
        self._cloud.fault(action, lost=when, times=times)

    def lag(self, seconds: float, duplicates: int) -> int:
        """EC2 may repeat instances in its pages; a host has one line anyhow."""
        self._cloud.lag_s = seconds * TIMES
        return 1

    def move_price(self, pool: str, micros_h: int) -> None:
        _, zone, kind, _ = pool.split("/")
        CLOCK.at += 1.0  # else it would be the price of the second in which the host was launched
        self._cloud.set_price(zone, kind, micros_h / 1_000_000)

    def stops_hosts(self) -> None:
        """It does."""

    def close(self) -> None:
        findings = self._cloud.findings
        self._cloud.reset()
        assert not findings, findings[:10]
