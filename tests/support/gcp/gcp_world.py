"""The world of provider `gcp`: the fake of Google Cloud behind the real SDK. Its hosts run nothing."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from spotfleet.codec import to_json
from spotfleet.model import Need
from spotfleet.providers.gcp import GcpProvider, describe, session
from spotfleet.providers.gcp.mapping import names
from spotfleet.providers.gcp.session import GcpAccount
from spotfleet.providers.gcp.spec import GcpSpec

FLEETS = ("f", "g")


class Clock:
    def __init__(self) -> None:
        self.at = time.time()

    def __call__(self) -> float:
        return self.at


CLOCK = Clock()


@lru_cache(maxsize=1)
def the_cloud() -> Any:
    """One per process, as new for each test."""
    from tests.support.fakes.gcp import GcpCloud

    return GcpCloud(clock=CLOCK).__enter__()


class Interruptible(GcpProvider):
    """A maintenance event has the notice that the machine was launched with: here the fake takes any."""

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        living = describe.find(self.account, request_id)
        if not living:
            raise describe.unknown(request_id)
        the_cloud().preempt(living[-1].name, notice_s=notice_s, room=None)


class GcpWorld:
    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        CLOCK.at = time.time()
        self._cloud = the_cloud()
        self._cloud.reset()
        for name, value in self._cloud.environ().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(session, "PAUSE_S", 0.0)
        spec = GcpSpec(project=self._cloud.project, regions=("us-central1",), ssh_from=("192.0.2.1/32",))
        self._config = {"section": to_json(spec), "endpoint_url": self._cloud.url, "secret": "the fleet's"}
        for fleet in FLEETS:
            self.provider().prepare(fleet, {}, lambda line: None)

    def provider(self) -> GcpProvider:
        made = Interruptible(self._config)
        made.account = GcpAccount(made.account.settings)  # with nothing remembered
        return made

    def need(self) -> Need:
        return Need(accelerator="L4", accelerator_count=1)

    def machines(self) -> list[str]:
        return sorted(names.host_of(i.name) for i in self._cloud.instances()
                      if i.status in ("PROVISIONING", "STAGING", "RUNNING"))

    def tag(self, request_id: str, key: str) -> str:
        machine = next(i for i in self._cloud.instances() if names.host_of(i.name) == request_id)
        status, _, body = self._cloud.metadata(machine.name, f"/computeMetadata/v1/instance/attributes/{key}", "GET",
                                               {"Metadata-Flavor": "Google"})
        return body.decode() if status == 200 else ""

    def let_pass(self, seconds: float) -> None:
        CLOCK.at += seconds
        self._cloud.tick()

    def full(self, pool: str) -> None:
        _, zone, kind, market = pool.split("/")
        self._cloud.set_room(zone, kind, 0, market)

    def wants_a_person(self, pool: str) -> None:
        self._cloud.deny(self._cloud.owner, {"compute.instances.create"})

    def lose(self, method: str, when: str) -> None:
        self._cloud.fault("compute.instances.insert" if method == "launch" else "compute.instances.delete", lost=when)

    def lag(self, seconds: float, duplicates: int) -> int:
        """A host has one line, however often pages repeat its machine."""
        self._cloud.lag_s = seconds
        return 1

    def move_price(self, pool: str, micros_h: int) -> None:
        _, zone, kind, _ = pool.split("/")
        CLOCK.at += 1.0
        self._cloud.set_price(zone, kind, micros_h / 1_000_000)

    def stops_hosts(self) -> None:
        """It does."""

    def close(self) -> None:
        self._cloud.reset()
