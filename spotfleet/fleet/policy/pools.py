"""Cost of a useful hour in a pool: its price, the waste by interruptions, and traffic between zones. Pure.

    price x (1 + (boot + stall of all hosts) / expected life) + bytes that more edges between zones carry

The boot is the median of those in the pool, else of the machine type, else of the fleet. The expected life follows from
the fleet's own hosts, and before them from the interruption band of the offer, see `lifetimes.py`. A pool without any
data costs its price, and the other pools are scaled relative to it, so that prices alone decide where there is no data.
Reserved capacity costs nothing here: its price is due in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from spotfleet.fleet.domain.state import FleetState, Host
from spotfleet.fleet.policy.lifetimes import PoolLifetime, boot_s, lived, prior_s, stall_s
from spotfleet.model import HostState, Market, Offer

GIB = 2**30
REMEMBERED_S = 3600.0  # a pool's price in the ledger stays valid for so long after our last host there ended


def price_now(state: FleetState, host: Host) -> tuple[int, int]:
    """Return the host's present price, and its price on demand; micro-dollars an hour."""
    known = state.prices.get(host.offer.pool)
    return (known.micros_h, known.on_demand_micros_h) if known else (
        host.offer.price_micros_h, host.offer.on_demand_micros_h)


def host_charge(state: FleetState, host: Host) -> int:
    """Return the amount that the host counts against a limit, micro-dollars an hour.

    While it boots, this is the price at its request, so that a price change does not end a launch that has just begun.
    """
    return host.offer.price_micros_h if host.state is HostState.LAUNCHING else price_now(state, host)[0]


def offer_charges(state: FleetState, offers: Iterable[Offer], now: float) -> dict[Offer, int]:
    """Return the amount that a new host of each offer counts against a limit, micro-dollars an hour.

    This is its price, or the ledger's price of its pool if that is higher, because offers may be minutes old. The
    ledger gets a pool's price while there are hosts in it; its other prices are as old as the pool's last host.
    """
    current = {h.offer.pool for h in state.hosts}
    current |= {h.offer.pool for h in state.ended.values() if now - h.since < REMEMBERED_S}
    known = {pool: state.prices[pool].micros_h for pool in current if pool in state.prices}
    return {o: max(o.price_micros_h, known.get(o.pool, 0)) for o in offers}


def useful_prices(state: FleetState, offers: Iterable[Offer], beside: Sequence[Host], now: float) -> dict[Offer, float]:
    """Return micro-dollars per useful hour of one more host in each pool, beside those that stay."""
    lives, stalls_s = lived(state, now), stall_s(state) * (len(beside) + 1)
    unknown = 1 + (boot_s(state) + stalls_s) / PoolLifetime().expected_s()
    return {o: 0.0 if o.reserved else (
        o.price_micros_h * _waste(lives, o, boot_s(state, o) + stalls_s) / unknown if _is_known(lives, o)
        else float(o.price_micros_h)) + _traffic(state, o, beside) for o in offers}


def _is_known(lives: Mapping[str, PoolLifetime], offer: Offer) -> bool:
    return offer.market is Market.SPOT and (offer.pool in lives or offer.life_s > 0)


def useful_price_by_pool(state: FleetState, offers: Iterable[Offer], hosts: int, now: float) -> dict[str, float]:
    """Return pool -> micro-dollars per useful hour of a host there, one of `hosts`, compared to one never taken."""
    lives, stalls_s = lived(state, now), stall_s(state) * hosts
    return {o.pool: o.price_micros_h * _waste(lives, o, boot_s(state, o) + stalls_s) for o in offers}


def _waste(lives: Mapping[str, PoolLifetime], offer: Offer, lost_s: float) -> float:
    if offer.market is not Market.SPOT:
        return 1.0
    return 1 + lost_s / max(1.0, lives.get(offer.pool, PoolLifetime()).expected_s(prior_s(offer)))


def _traffic(state: FleetState, offer: Offer, beside: Sequence[Host]) -> float:
    """Return micro-dollars an hour for the traffic between zones that this host adds to the ring.

    Each edge into another zone carries 2 (n - 1) / n times the bytes that a worker passes to the reductions of a step.
    """
    zones = {h.offer.zone for h in beside if h.offer.region == offer.region}
    rates = state.history.rates.get(f"{offer.provider}/{offer.region}")
    if not zones or offer.zone in zones or rates is None or not rates.zone_micros_gib:
        return 0.0
    edges = 2 if len(zones) == 1 else 1
    n = len(beside) + 1
    jobs = state.history.progress.values()
    bytes_h = sum(job.step_bytes * 3600 / job.step_s for job in jobs if job.step_s > 0)
    return edges * 2 * (n - 1) / n * bytes_h / GIB * rates.zone_micros_gib
