"""The `local` provider: a small emulated cloud of real processes on this machine, for trying out and for tests.

`LocalProvider` is the plugin. `LocalCloud` holds the strings behind the scene: what there is, what it costs, and
every kind of trouble. Both only talk to the daemon of one SPOTFLEET_HOME, which is started where it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spotfleet.codec import from_json, to_json
from spotfleet.model import BillingRules, CloudHost, CloudState, Need, Offer, PricePoint, Rates
from spotfleet.providers import LaunchRequest
from spotfleet.providers.local.link import Link

if TYPE_CHECKING:
    from spotfleet.providers.local.invoice import Invoice
    from spotfleet.providers.local.pools import MarketRules


class LocalProvider:
    """The Provider contract over the daemon of `config["home"]` (default: $SPOTFLEET_HOME, else ~/.spotfleet)."""

    name = "local"

    def __init__(self, config: dict[str, str] | None = None) -> None:
        self._link = Link(_home((config or {}).get("home", "")))

    def check(self) -> None:
        """Starts the daemon; SpotfleetError with the end of its log if it does not start."""
        self._link.call("ping")

    def billing(self) -> BillingRules:
        return from_json(BillingRules, self._link.call("billing"))

    def rates(self, region: str) -> Rates:
        return from_json(Rates, self._link.call("rates"))

    def offers(self, need: Need) -> list[Offer]:
        return from_json(list[Offer], self._link.call("offers", need=to_json(need)))

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]:
        return from_json(list[PricePoint], self._link.call("prices", pools=list(pools), since=since))

    def launch(self, request: LaunchRequest) -> None:
        self._link.call("launch", request=to_json(request))

    def hosts(self, fleet: str) -> list[CloudHost]:
        if not self._link.known():
            return []
        return from_json(list[CloudHost], self._link.call("hosts", fleet=fleet))

    def terminate(self, request_id: str) -> None:
        self._link.call("terminate", request_id=request_id)

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        self._link.call("tag", request_id=request_id, tags=tags)

    def boot_files(self, request_id: str) -> dict[str, str]:
        return from_json(dict[str, str], self._link.call("boot_files", request_id=request_id))

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        self._link.call("interrupt", request_id=request_id, notice_s=notice_s)


@dataclass(frozen=True)
class Machine:
    """A host that truly exists, whatever a listing says."""

    request_id: str
    fleet: str
    state: CloudState
    address: str
    port: int
    metadata_url: str
    folder: str  # its disk
    processes: tuple[int, ...]  # pids, the boot process first
    starts: int  # how often the present daemon started its boot process


class LocalCloud:
    """Sees and changes one emulated cloud: for tests, the demo and chaos. Errors as in the market: UsageError."""

    def __init__(self, home: str | Path = "") -> None:
        self._link = Link(_home(str(home)))

    def truth(self) -> list[Machine]:
        """Every machine that is not terminated or still has a process."""
        return from_json(list[Machine], self._link.call("truth"))

    def invoice(self, fleet: str = "") -> Invoice:
        """What the cloud bills by now: per host, and in all."""
        from spotfleet.providers.local.invoice import Invoice

        return from_json(Invoice, self._link.call("invoice", fleet=fleet))

    def reset(self, rules: MarketRules) -> None:
        """Other pools, prices and billing, before the first launch only."""
        self._link.call("reset", rules=to_json(rules))

    def set_capacity(self, pool: str, hosts: int) -> None:
        """Room for so many hosts from now on; stopped ones that fit return. Hosts beyond it stay until interrupted."""
        self._link.call("set_capacity", pool=pool, hosts=hosts)

    def set_price(self, pool: str, micros_h: int, at: float | None = None) -> None:
        self._link.call("set_price", pool=pool, micros_h=micros_h, at=at)

    def refuse(self, pool: str, scope: str = "pool", for_s: float | None = None) -> None:
        """Refuse launches in `pool` and all that `scope` (pool, type, region, account) joins to it; "person" raises
        NeedsPerson."""
        self._link.call("refuse", pool=pool, scope=scope, for_s=for_s)

    def allow(self, pool: str) -> None:
        self._link.call("allow", pool=pool)

    def interrupt(self, request_id: str, notice_s: float | None = 120.0) -> None:
        """As Provider.interrupt: ends in the way the launch asked for, terminate or stop."""
        self._link.call("interrupt", request_id=request_id, notice_s=notice_s)

    def kill(self, request_id: str) -> None:
        """The cloud takes the host for good, now, without a notice."""
        self._link.call("interrupt", request_id=request_id, notice_s=None, action="terminate")

    def crash(self, request_id: str) -> None:
        """SIGKILL everything on the host. The machine itself stays, and runs its boot process again."""
        self._link.call("crash", request_id=request_id)

    def stop(self, request_id: str, notice_s: float | None = None) -> None:
        """The cloud stops the host: its disk, address and port stay. It returns with capacity, or with `start`."""
        self._link.call("interrupt", request_id=request_id, notice_s=notice_s, action="stop")

    def start(self, request_id: str) -> None:
        """Bring a stopped host back now."""
        self._link.call("return_host", request_id=request_id)

    def withdraw_notice(self, request_id: str) -> None:
        self._link.call("withdraw_notice", request_id=request_id)

    def rebalance(self, request_id: str) -> None:
        """Recommend to leave, which means nothing by itself."""
        self._link.call("rebalance", request_id=request_id)

    def listing_lag(self, seconds: float) -> None:
        """Listings show how things were so long ago, at most 2 minutes."""
        self._link.call("set_faults", listing_lag_s=seconds)

    def duplicates(self, more: int) -> None:
        """Each line of a listing comes so many times more."""
        self._link.call("set_faults", duplicates=more)

    def latency(self, seconds: float) -> None:
        """Every call takes so much longer."""
        self._link.call("set_faults", latency_s=seconds)

    def lose_responses(self, method: str, when: str = "after", times: int = 1) -> None:
        """The next calls of `method` are not answered, "after" or "before" they take effect."""
        self._link.call("lose", lost=method, when=when, times=times)

    def shutdown(self) -> None:
        """Kill every host and end the daemon; returns when no process is left. The bill stays in the home."""
        if self._link.known():
            self._link.shutdown()


def _home(text: str) -> Path:
    return Path(text or os.environ.get("SPOTFLEET_HOME") or "~/.spotfleet").expanduser().absolute()
