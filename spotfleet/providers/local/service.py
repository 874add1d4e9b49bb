"""The emulated cloud as one object: market, machines, faults, and a table of calls by name.

A call takes and returns plain JSON values; `CALLS` is the whole interface. Its changes are in
`state.json` before it is answered, so that the next daemon continues after a killed one.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Any

from spotfleet.codec import from_json, to_json
from spotfleet.errors import UsageError
from spotfleet.model import CloudHost, CloudState, Need
from spotfleet.providers import LaunchRequest
from spotfleet.providers.local.faults import Faults
from spotfleet.providers.local.hosts import LocalMachines, Placement
from spotfleet.providers.local.market.book import Book, HostOrder
from spotfleet.providers.local.market.market import LIVE, LocalMarket, shutting_down
from spotfleet.providers.local.market.pools import MarketRules, default_rules
from spotfleet.storage import atomic

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class LocalCloudService:
    """The emulated cloud of one home; `call` and `tick` are thread-safe."""

    def __init__(self, home: Path, now: Callable[[], float] = time.time) -> None:
        """Restore the state in `home`/state.json, or open a new market. `home` is SPOTFLEET_HOME/local."""
        self.home, self.now = home, now
        self.lock = RLock()
        self.faults = Faults()
        self.closing = False  # set by the `shutdown` call
        self.launches = 0  # launches by this daemon
        self._saved: Any = None
        state = self._load()
        self.market = LocalMarket.from_json(state["market"]) if state else LocalMarket(
            default_rules(), now(), salt=secrets.token_hex(4))
        self.machines = LocalMachines(home, lambda request_id: self.market.hosts.get(request_id),
                                 from_json(dict[str, Placement], state["machines"]) if state else {})
        self.machines.adopt(self.market.hosts.values())

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """Run a call. Raises SpotfleetError; UsageError for an unknown method or an argument that does not fit."""
        if method not in CALLS:
            raise UsageError(f"method: unknown method '{method}'", hint=f"use one of: {', '.join(sorted(CALLS))}")
        with self.lock:
            try:
                result = CALLS[method](self, **args)
            except (TypeError, ValueError) as error:
                raise UsageError(f"{method}: {error}", hint="do client and daemon have the same version?") from error
            finally:
                self.save()
            return to_json(result)

    def tick(self) -> None:
        """Advance the time and adjust the processes to the market's state."""
        with self.lock:
            self.market.advance(self.now())
            for request_id in self.machines.match(list(self.market.hosts.values())):
                self.market.power_off(request_id, self.now())
            self.save()

    def living(self) -> bool:
        """Return whether any host exists, stopped ones included, or any process of one."""
        return self.machines.busy() or any(h.state is not CloudState.TERMINATED for h in self.market.hosts.values())

    def terminate_all(self) -> None:
        with self.lock:
            for request_id in list(self.market.hosts):
                self.market.terminate(request_id, self.now())
            self.save()

    def save(self) -> None:
        state = (replace(self.market.book(), now=0.0), dict(self.machines.placements))
        if state != self._saved:
            write(self.home / "state.json", {"market": self.market.to_json(), "machines": to_json(state[1])})
            self._saved = state

    def _load(self) -> dict[str, Any] | None:
        path = self.home / "state.json"
        if not path.exists():
            return None
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            from_json(Book, state["market"]), from_json(dict[str, Placement], state["machines"])
            return state
        except (ValueError, KeyError, TypeError) as error:
            backup = path.with_name("state.json.unreadable")
            atomic.rename(path, backup, sync=False)
            print(f"{path}: {error}; kept as {backup.name}, opening a new market", file=sys.stderr, flush=True)
            return None

    # calls

    def launch(self, request: dict[str, Any]) -> None:
        order = from_json(LaunchRequest, request)
        for field, name in (("request_id", order.request_id), *((f"boot.files[{f!r}]", f) for f in order.boot.files)):
            if not NAME.fullmatch(name):
                raise UsageError(f"{field}: {name!r} is not a plain name", hint="use letters, digits, '.', '_' and '-'")
        known = order.request_id in self.market.hosts
        self.market.launch(HostOrder(order.request_id, order.fleet, order.role, order.offer.pool,
                                 order.interruption_behavior, order.tags), self.now())
        if not known:
            self.launches += 1
            place = self.machines.prepare(order.request_id, order.boot.module, order.boot.files)
            self.market.place(order.request_id, place.address, place.port)

    def hosts(self, fleet: str) -> list[CloudHost]:
        lines = self.market.listing(fleet, self.now(), self.faults.listing_lag_s)
        return [self._while_shutting_down(line) for line in lines] * (1 + self.faults.duplicates)

    def _while_shutting_down(self, line: CloudHost) -> CloudHost:
        """Return the line as running until the host's last process is gone."""
        if line.state in LIVE or not line.runs or not self.machines.ending(line.request_id):
            return line
        return shutting_down(line)

    def boot_files(self, request_id: str) -> dict[str, str]:
        return self.machines.boot_files(request_id)

    def truth(self) -> list[dict[str, Any]]:
        return [
            {"request_id": r, "fleet": h.order.fleet, "state": h.state, "address": h.address, "port": h.port,
             "metadata_url": self.machines.metadata_url(r), "processes": self.machines.processes(r),
             "folder": str(self.machines.folder(r)), "starts": self.machines.starts[r]}
            for r, h in self.market.hosts.items() if h.state in LIVE or self.machines.processes(r)
        ]

    def reset(self, rules: dict[str, Any]) -> None:
        if self.market.hosts:
            raise UsageError("rules: this cloud has had hosts; its history cannot be rewritten", hint="use a new home")
        self.market = LocalMarket(from_json(MarketRules, rules), self.now(), self.market.salt)

    def invoice(self, fleet: str) -> dict[str, Any]:
        bill = self.market.invoice(self.now(), fleet)
        return {"at": bill.at, "hosts": bill.hosts, "disks": bill.disks, "addresses": bill.addresses}

    def crash(self, request_id: str) -> None:
        self.machines.crash(request_id)

    def set_faults(self, listing_lag_s: float | None = None, duplicates: int | None = None,
                   latency_s: float | None = None) -> None:
        """Change the given faults only."""
        changes = {"listing_lag_s": listing_lag_s, "duplicates": duplicates, "latency_s": latency_s}
        self.faults = replace(self.faults, **{k: v for k, v in changes.items() if v is not None})

    def shutdown(self) -> None:
        self.closing = True


def write(path: Path, value: Any) -> None:
    """Replace a private file as a whole."""
    atomic.write(path, json.dumps(value), draft=path.with_name(f"{path.name}.{os.getpid()}.new"), sync=False)


def _market(method: str) -> Callable[..., Any]:
    """Return a call of the market's method, with the present time."""
    return lambda cloud, **args: getattr(cloud.market, method)(now=cloud.now(), **args)


CALLS: dict[str, Callable[..., Any]] = {
    "ping": lambda cloud: os.getpid(),
    "time": lambda cloud: cloud.now(),
    "billing": lambda cloud: cloud.market.rules.billing,
    "rates": lambda cloud: cloud.market.rates(),
    "offers": lambda cloud, need: cloud.market.offers(from_json(Need, need), cloud.now()),
    **{name: _market(name) for name in (
        "prices", "terminate", "tag", "interrupt", "withdraw_notice", "rebalance", "return_host", "set_price",
        "set_capacity", "refuse", "allow")},
    **{name: getattr(LocalCloudService, name) for name in (
        "launch", "hosts", "boot_files", "truth", "reset", "invoice", "crash", "shutdown", "set_faults")},
    "lose": lambda cloud, lost, when, times: cloud.faults.lose(lost, when, times),
}
