"""Provider `local`: a small emulated cloud of real processes on this machine, for trials and tests.

`LocalProvider` is the plugin. `LocalCloud` controls the emulation: machines, prices, and every kind of
fault. Both are clients of the daemon of one SPOTFLEET_HOME, which they start if necessary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotfleet.codec import from_json, to_json
from spotfleet.model import BillingRules, CloudHost, CloudState, Need, Offer, PricePoint, Rates
from spotfleet.providers import LaunchRequest
from spotfleet.providers.local.link import LocalCloudLink

if TYPE_CHECKING:
    from spotfleet.providers.local.market.invoice import Invoice
    from spotfleet.providers.local.market.pools import MarketRules


class LocalProvider:
    """Provider contract, served by the daemon of `config["home"]` (default: $SPOTFLEET_HOME, else ~/.spotfleet)."""

    name = "local"

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._link = LocalCloudLink(_home((config or {}).get("home", "")))

    def check(self) -> None:
        """Start the daemon; SpotfleetError with the end of its log if it does not start."""
        self._link.call("ping")

    def billing(self) -> BillingRules:
        return from_json(BillingRules, self._link.call("billing"))

    def rates(self, region: str) -> Rates:
        return from_json(Rates, self._link.call("rates"))

    def cloud_time(self) -> float:
        return from_json(float, self._link.call("time"))

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
class LocalMachine:
    """A host that really exists, whatever a listing shows."""

    request_id: str
    fleet: str
    state: CloudState
    address: str
    port: int
    metadata_url: str
    folder: str  # home folder of the machine
    processes: tuple[int, ...]  # pids, the boot process first
    starts: int  # starts of its boot process by the present daemon


class LocalCloud:
    """Control of one emulated cloud, for tests, the demo and chaos. Errors as in the market: UsageError."""

    def __init__(self, home: str | Path = "") -> None:
        self._link = LocalCloudLink(_home(str(home)))

    def truth(self) -> list[LocalMachine]:
        """List every machine that is not terminated or still has a process."""
        return from_json(list[LocalMachine], self._link.call("truth"))

    def invoice(self, fleet: str = "") -> Invoice:
        """Return the bill so far: per host, and in total."""
        from spotfleet.providers.local.market.invoice import Invoice

        return from_json(Invoice, self._link.call("invoice", fleet=fleet))

    def reset(self, rules: MarketRules) -> None:
        """Set other pools, prices and billing, before the first launch only."""
        self._link.call("reset", rules=to_json(rules))

    def set_capacity(self, pool: str, hosts: int) -> None:
        """Set the pool's capacity; stopped hosts that fit return. Surplus hosts stay until interrupted."""
        self._link.call("set_capacity", pool=pool, hosts=hosts)

    def set_price(self, pool: str, micros_h: int, at: float | None = None) -> None:
        self._link.call("set_price", pool=pool, micros_h=micros_h, at=at)

    def refuse(self, pool: str, scope: str = "pool", for_s: float | None = None) -> None:
        """Refuse launches in `pool` and its `scope`: pool, type, region or account; "person" raises NeedsPerson."""
        self._link.call("refuse", pool=pool, scope=scope, for_s=for_s)

    def allow(self, pool: str) -> None:
        self._link.call("allow", pool=pool)

    def interrupt(self, request_id: str, notice_s: float | None = 120.0) -> None:
        """Interrupt a host as Provider.interrupt does: it ends as its launch specified, terminate or stop."""
        self._link.call("interrupt", request_id=request_id, notice_s=notice_s)

    def kill(self, request_id: str) -> None:
        """Take the host permanently, now, without a notice."""
        self._link.call("interrupt", request_id=request_id, notice_s=None, action="terminate")

    def crash(self, request_id: str) -> None:
        """SIGKILL all processes of the host. The machine itself stays, and runs its boot process again."""
        self._link.call("crash", request_id=request_id)

    def stop(self, request_id: str, notice_s: float | None = None) -> None:
        """Stop the host: its disk, address and port stay. It returns with capacity, or by `start`."""
        self._link.call("interrupt", request_id=request_id, notice_s=notice_s, action="stop")

    def start(self, request_id: str) -> None:
        """Start a stopped host now."""
        self._link.call("return_host", request_id=request_id)

    def withdraw_notice(self, request_id: str) -> None:
        self._link.call("withdraw_notice", request_id=request_id)

    def rebalance(self, request_id: str) -> None:
        """Send a rebalance recommendation, which has no effect by itself."""
        self._link.call("rebalance", request_id=request_id)

    def listing_lag(self, seconds: float) -> None:
        """Make listings show the state of that long ago, at most 2 minutes."""
        self._link.call("set_faults", listing_lag_s=seconds)

    def duplicates(self, more: int) -> None:
        """Repeat each line of a listing `more` times."""
        self._link.call("set_faults", duplicates=more)

    def latency(self, seconds: float) -> None:
        """Delay every call."""
        self._link.call("set_faults", latency_s=seconds)

    def lose_responses(self, method: str, when: str = "after", times: int = 1) -> None:
        """Lose the answers to the next calls of `method`, "after" or "before" they take effect."""
        self._link.call("lose", lost=method, when=when, times=times)

    def shutdown(self) -> None:
        """Kill every host and end the daemon; returns when no process is left. The bill stays in the home directory."""
        if self._link.known():
            self._link.shutdown()


def _home(text: str) -> Path:
    return Path(text or os.environ.get("SPOTFLEET_HOME") or "~/.spotfleet").expanduser().absolute()
