"""What the contract suite needs of a provider's world beyond the contract itself.

A new provider joins with a class like these and a line in conftest.py. Pools are chosen by the world, so that the
suite knows no instance types.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from spotfleet.interruptions.folder import FolderSource
from spotfleet.interruptions.imds import ImdsSource
from spotfleet.model import Need, Offer, Role
from spotfleet.providers import Boot, LaunchRequest, Provider
from spotfleet.providers.local import LocalCloud, LocalProvider
from spotfleet.providers.local.inprocess import InProcessProvider, ManualClock
from spotfleet.providers.ssh import SshProvider
from tests.support.ssh_provider import sshd_machines

LIMIT_S = 30.0


class World(Protocol):
    def provider(self) -> Provider:
        """A new client of the one cloud, as another process would have it."""

    def need(self) -> Need:
        """A need that some offers satisfy: spot offers, if the provider has any."""

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

    def lag(self, seconds: float, duplicates: int) -> int:
        """Make listings late and repeat their lines; says how often each stands in a listing then."""

    def move_price(self, pool: str, micros_h: int) -> None: ...

    def stops_hosts(self) -> None:
        """Skip the test where no host is ever stopped."""

    def close(self) -> None: ...


def needs(world: World, ability: str) -> None:
    """Skip the test where the world's cloud has no such ability: its `lacks` names it."""
    if ability in getattr(world, "lacks", ()):
        pytest.skip(f"does not apply: this cloud has no {ability}")


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
        self.clock = ManualClock()
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

    def lag(self, seconds: float, duplicates: int) -> int:
        self.first.faults.listing_lag_s, self.first.faults.duplicates = seconds, duplicates
        return 1 + duplicates

    def move_price(self, pool: str, micros_h: int) -> None:
        self.first.market.set_price(pool, micros_h, self.clock())

    def stops_hosts(self) -> None:
        """It does."""

    def close(self) -> None:
        """It lives in this process only."""


class SshWorld:
    """Two machines behind real sshds, entered as the dispatcher enters them. Their hosts do nothing."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if missing := sshd_machines.why_not():
            pytest.skip(missing)
        sshd_machines.idle_hosts(monkeypatch)
        monkeypatch.setenv("TMPDIR", str(home))
        self._machines = sshd_machines.Machines(home / "machines", ["head", "w0", "w1"])
        self._machines.admit()
        spec = self._machines.spec()
        workers = tuple(replace(m, price_micros_h=900_000) for m in spec.hosts)
        self._config = self._machines.config(replace(spec, hosts=workers), side="dispatcher")

    def provider(self) -> SshProvider:
        return SshProvider(self._config)

    def need(self) -> Need:
        return Need(use_spot=False)

    def machines(self) -> list[str]:
        return sorted(host for machine in self._machines for host in machine.hosts())

    def tag(self, request_id: str, key: str) -> str:
        return FolderSource(str(self._folder(request_id))).tag(key)

    def let_pass(self, seconds: float) -> None:
        time.sleep(seconds)

    def full(self, pool: str) -> None:
        machine = next(m for m in self._machines if self._machines.zone(m.name) == pool.split("/")[1])
        machine.root.mkdir()
        (machine.root / "claim").write_text("somebody-1\n")

    def wants_a_person(self, pool: str) -> None:
        pytest.skip("does not apply: of one machine that needs a person the fleet goes on without it")

    def lose(self, method: str, when: str) -> None:
        pytest.skip("does not apply: a launch over SSH is several answers: tests/ssh_provider cuts it off after each")

    def lag(self, seconds: float, duplicates: int) -> int:
        pytest.skip("does not apply: the machines themselves are asked: their listings neither lag nor repeat lines")

    def move_price(self, pool: str, micros_h: int) -> None:
        pytest.skip("does not apply: what a machine costs its owner does not change")

    def stops_hosts(self) -> None:
        pytest.skip("does not apply: nobody stops a machine that exists, and nobody would start it again")

    def close(self) -> None:
        self._machines.close()

    def _folder(self, request_id: str) -> Path:
        return next(p for m in self._machines if (p := m.root / request_id).exists())


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

    def lag(self, seconds: float, duplicates: int) -> int:
        self.cloud.listing_lag(seconds)
        self.cloud.duplicates(duplicates)
        return 1 + duplicates

    def move_price(self, pool: str, micros_h: int) -> None:
        self.cloud.set_price(pool, micros_h)

    def stops_hosts(self) -> None:
        """It does."""

    def close(self) -> None:
        self.cloud.shutdown()
