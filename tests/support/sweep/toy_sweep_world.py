"""The world of the kill sweep on the toy cloud: the plugin of a third party's distribution, and nothing of ours.

`market` shows the toy's account as the world and the checks of the sweep read the emulated cloud's.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from spotfleet import plugins, providers
from spotfleet.model import CloudState, FleetSpec, Need, Nodes, Role
from spotfleet.providers.kit.offers import RegionChoice
from tests.support.sweep.sweep_flows import NAME
from tests.support.sweep.sweep_fuse import TappedProvider
from tests.support.sweep.sweep_states import disks
from tests.support.sweep.sweep_world import MEMORY, World
from tests.support.toy.toy_world import PLUGIN

SPEC = FleetSpec(NAME, provider="toy", nodes=Nodes(2, 2, 2), any_of=(Need(accelerator="TOY"),),
                 dispatcher=Need(instance_type="toy.small", use_spot=False),
                 section={"account": "", "regions": ["north", "south"], "processes": False})


@dataclass
class ToyMarket:
    """The truth about the toy's machines."""

    provider: Any
    clock: Any

    @property
    def hosts(self) -> dict[str, Any]:
        with self.provider.state() as state:
            return {name: self._seen(name, host) for name, host in state["hosts"].items()}

    def _seen(self, name: str, host: dict[str, Any]) -> Any:
        line, ended_at = host["line"], host["ended_at"]
        runs = ended_at is None or ended_at > self.clock()
        notice = SimpleNamespace(ends_at=ended_at, action="terminate") if runs and ended_at is not None else None
        order = SimpleNamespace(request_id=name, fleet=line["fleet"], role=Role(line["role"]))
        return SimpleNamespace(order=order, address=line["address"], since=host["began_at"], runs=(1,), notice=notice,
                               state=CloudState.RUNNING if runs else CloudState.TERMINATED,
                               why="terminated by its user" if host["why"] == "terminated" else host["why"])

    def advance(self, now: float) -> None:
        """The account does so when it is read."""

    def interrupt(self, name: str, notice_s: float | None, _now: float) -> None:
        self.provider.interrupt(name, notice_s)

    def invoice(self, now: float, fleet: str) -> Any:
        """The toy's own bill: each begun second, a second at least, rounded once per host."""
        with self.provider.state() as state:
            found = {}
            for name, host in state["hosts"].items():
                if host["line"]["fleet"] == fleet:
                    ended_at = min(now, host["ended_at"] if host["ended_at"] is not None else now)
                    seconds = max(1, math.ceil(ended_at - host["began_at"] - 1e-6))
                    price = host["line"]["offer"]["price_micros_h"]
                    found[name] = (seconds * price * 2 + 3600) // 7200
        return SimpleNamespace(hosts=found)


class ToyCloud:
    """The provider as the world reads it."""

    def __init__(self, provider: Any, market: ToyMarket) -> None:
        self._provider, self._market = provider, market

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    def living(self) -> list[str]:
        return [name for name, host in self._market.hosts.items() if host.state is CloudState.RUNNING]


class TappedToy(TappedProvider):
    """The toy, which also chooses a new fleet's region."""

    def cheapest_region(self, any_of: Sequence[Need], dispatcher: Need, hosts: int = 1) -> RegionChoice:
        return self._call("cheapest_region", any_of, dispatcher, hosts)

    def all_regions(self) -> tuple[str, ...]:
        return self._call("all_regions")


class ToySweepWorld(World):
    """Use it as a context, as `World`."""

    def __init__(self, lag_s: float = 0.0) -> None:
        super().__init__()
        self._account = tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self._stack.callback(self._account.cleanup)
        sys.path.insert(0, str(PLUGIN))
        self._stack.callback(sys.path.remove, str(PLUGIN))
        for found in (plugins.load, plugins.installed):
            self._stack.callback(found.cache_clear)
            found.cache_clear()
        provider: Any = providers.load("toy", {"section": {**SPEC.section, "account": self._account.name}})
        self._stack.enter_context(patch(f"{type(provider).__module__}.now", self.clock))
        with provider.state() as state:
            state["lag_s"] = lag_s
        self.market = ToyMarket(provider, self.clock)  # type: ignore[assignment]
        self.cloud = ToyCloud(provider, self.market)  # type: ignore[assignment]
        self.provider = TappedToy(self.cloud, self.fuse)  # type: ignore[arg-type]

    def account(self) -> str:
        return disks(Path(self._account.name))


def spec(**changed: Any) -> FleetSpec:
    return replace(SPEC, **changed)
