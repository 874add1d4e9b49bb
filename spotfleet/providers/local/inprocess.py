"""Provider over a Market in this process, with its own clock: weeks pass in milliseconds. For tests.

    clock = Clock()
    cloud = InProcessProvider(clock=clock)
    cloud.launch(request); clock.advance(3600); cloud.market.invoice(clock.now)

Several providers over one market act as several processes that call one cloud. `cloud.market` is the true state and
takes the script: capacity, prices, refusals, stops. `cloud.faults` scripts faults of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.model import BillingRules, CloudHost, Need, Offer, PricePoint, Rates
from spotfleet.providers import LaunchRequest
from spotfleet.providers.local.faults import Faults
from spotfleet.providers.local.market.book import HostOrder
from spotfleet.providers.local.market.market import LIVE, LocalMarket
from spotfleet.providers.local.market.pools import MarketRules, default_rules

T = TypeVar("T")
# shared by a market's providers
_BOOTS: WeakKeyDictionary[LocalMarket, dict[str, dict[str, str]]] = WeakKeyDictionary()


@dataclass
class ManualClock:
    """Clock in Unix seconds, advanced by the caller."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        self.now += seconds
        return self.now


class InProcessProvider:
    """Provider over a market, as in the module's docstring. Hosts are market entries: no process runs."""

    name = "local"

    def __init__(self, market: LocalMarket | None = None, clock: Callable[[], float] | None = None,
                 rules: MarketRules | None = None) -> None:
        self.clock = clock or ManualClock()
        self.market = market or LocalMarket(rules or default_rules(), self.clock())
        self.faults = Faults()
        self._boots = _BOOTS.setdefault(self.market, {})

    def check(self) -> None:
        """Return at once: there is no account."""

    def billing(self) -> BillingRules:
        return self.market.rules.billing

    def rates(self, region: str) -> Rates:
        return self._call("rates", lambda _now: self.market.rates())

    def cloud_time(self) -> float:
        return self._call("cloud_time", lambda now: now)

    def offers(self, need: Need) -> list[Offer]:
        return self._call("offers", lambda now: self.market.offers(need, now))

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]:
        return self._call("prices", lambda now: self.market.prices(pools, since, now))

    def launch(self, request: LaunchRequest) -> None:
        order = HostOrder(request.request_id, request.fleet, request.role, request.offer.pool,
                      request.interruption_behavior, dict(request.tags))

        def act(now: float) -> None:
            self.market.launch(order, now)
            self._boots.setdefault(request.request_id, dict(request.boot.files))
            number = list(self.market.hosts).index(request.request_id)
            if not self.market.hosts[request.request_id].address:
                self.market.place(request.request_id, f"10.0.{number // 250}.{number % 250 + 1}", 7000)

        self._call("launch", act)

    def hosts(self, fleet: str) -> list[CloudHost]:
        def read(now: float) -> list[CloudHost]:
            lines = self.market.listing(fleet, now, self.faults.listing_lag_s)
            return lines * (1 + self.faults.duplicates)

        return self._call("hosts", read)

    def terminate(self, request_id: str) -> None:
        self._call("terminate", lambda now: self.market.terminate(request_id, now))

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        self._call("tag", lambda now: self.market.tag(request_id, tags, now))

    def boot_files(self, request_id: str) -> dict[str, str]:
        if request_id not in self._boots:
            raise UsageError(f"request_id: no host '{request_id}'", hint="`spotfleet status` lists the live hosts")
        return self._boots[request_id]

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        self._call("interrupt", lambda now: self.market.interrupt(request_id, notice_s, now))

    def living(self) -> list[str]:
        """List the request_ids of the machines that exist now, whatever listings show."""
        self.market.advance(self.clock())
        return [request_id for request_id, host in self.market.hosts.items() if host.state in LIVE]

    def _call(self, method: str, act: Callable[[float], T]) -> T:
        fate = self.faults.fate(method)
        if fate == "before":
            raise SpotfleetError(f"local cloud: {method} was not answered", hint="try again")
        result = act(self.clock())
        if fate == "after":
            raise SpotfleetError(f"local cloud: {method} was not answered", hint="try again")
        return result
