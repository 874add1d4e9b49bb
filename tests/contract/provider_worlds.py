"""What the contract suite needs of a provider's world beyond the contract itself.

A new provider joins with a class like these and a line in conftest.py. Pools are chosen by the world, so that the
suite knows no instance types.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from spotfleet.interruptions.imds import ImdsSource
from spotfleet.model import Need, Offer, Role
from spotfleet.providers import Boot, LaunchRequest, Provider
from spotfleet.providers.local import LocalCloud, LocalProvider
from spotfleet.providers.local.inprocess import Clock, InProcessProvider

LIMIT_S = 30.0


class World(Protocol):
    def provider(self) -> Provider:
        """A new client of the one cloud, as another process would have it."""

    def need(self) -> Need:
        """What some spot offers satisfy."""

    def machines(self) -> list[str]:
        """request_ids of the machines that exist, by the cloud's own knowledge; once per machine."""

    def tag(self, request_id: str, key: str) -> str:
        """The tag as the host itself sees it."""

    def let_pass(self, seconds: float) -> None: ...

    def full(self, pool: str) -> None:
        """Leave no room in `pool`."""

    def wants_a_person(self, pool: str) -> None: ...

    def lose(self, method: str, when: str) -> None:
        """Lose the next answer to `method`, "before" or "after" it took effect: the caller sees an exception."""

    def lag(self, seconds: float, duplicates: int) -> None:
        """Make listings late and repeat their lines."""

    def move_price(self, pool: str, micros_h: int) -> None: ...

    def close(self) -> None: ...


def request(offer: Offer, request_id: str = "f-1", fleet: str = "f", **more: object) -> LaunchRequest:
    return LaunchRequest(request_id, fleet, Role.WORKER, offer, Boot("idle_host"), **more)


def until(world: World, true: Callable[[], bool]) -> None:
    """Let time pass until it is so."""
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline, f"not so after {LIMIT_S} s"
        world.let_pass(0.05)


class InProcessWorld:
    def __init__(self) -> None:
        self.clock = Clock()
        self.first = InProcessProvider(clock=self.clock)

    def provider(self) -> InProcessProvider:
        another = InProcessProvider(self.first.market, self.clock)
        another.faults = self.first.faults
        return another

    def need(self) -> Need:
        return Need(accelerator="EMU")

    def machines(self) -> list[str]:
        return self.first.living()

    def tag(self, request_id: str, key: str) -> str:
        return self.first.market.hosts[request_id].order.tags.get(key, "")

    def let_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def full(self, pool: str) -> None:
        self.first.market.set_capacity(pool, 0, self.clock())

    def wants_a_person(self, pool: str) -> None:
        self.first.market.refuse(pool, "person", self.clock())

    def lose(self, method: str, when: str) -> None:
        self.first.faults.lose(method, when)

    def lag(self, seconds: float, duplicates: int) -> None:
        self.first.faults.listing_lag_s, self.first.faults.duplicates = seconds, duplicates

    def move_price(self, pool: str, micros_h: int) -> None:
        self.first.market.set_price(pool, micros_h, self.clock())

    def close(self) -> None:
        """It lives in this process only."""


class LocalWorld:
    """The daemon and its processes. Its hosts do nothing."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.cloud = home, LocalCloud(home)
        boots = str(Path(__file__).parent / "boots")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in (boots, os.environ.get("PYTHONPATH", "")) if p))
        monkeypatch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))

    def provider(self) -> LocalProvider:
        return LocalProvider({"home": str(self.home)})

    def need(self) -> Need:
        return Need(accelerator="EMU")

    def machines(self) -> list[str]:
        return [m.request_id for m in self.cloud.truth() if m.processes]

    def tag(self, request_id: str, key: str) -> str:
        url = next(m.metadata_url for m in self.cloud.truth() if m.request_id == request_id)
        return ImdsSource(url).tag(key)

    def let_pass(self, seconds: float) -> None:
        time.sleep(seconds)

    def full(self, pool: str) -> None:
        self.cloud.set_capacity(pool, 0)

    def wants_a_person(self, pool: str) -> None:
        self.cloud.refuse(pool, "person")

    def lose(self, method: str, when: str) -> None:
        self.cloud.lose_responses(method, when)

    def lag(self, seconds: float, duplicates: int) -> None:
        self.cloud.listing_lag(seconds)
        self.cloud.duplicates(duplicates)

    def move_price(self, pool: str, micros_h: int) -> None:
        self.cloud.set_price(pool, micros_h)

    def close(self) -> None:
        self.cloud.shutdown()
