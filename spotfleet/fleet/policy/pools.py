"""What an hour of use costs in a pool: its price, what interruptions waste there, and traffic between zones. Pure.

    price x (1 + (boot + stall of all hosts) / expected life) + bytes that more edges between zones carry

An expected life follows from the fleet's own hosts, and before them from the interruption band of the offer, see
`lifetimes.py`. A pool of which nothing is known costs its price, and the others are told apart from it, so that prices
alone decide where nothing else is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from spotfleet.fleet.fold import FleetState, Host
from spotfleet.fleet.policy.lifetimes import Lived, boot_s, lived, prior_s, stall_s
from spotfleet.model import HostState, Market, Offer

GIB = 2**30
REMEMBERED_S = 3600.0  # what the ledger says of a pool holds so long after our last host there ended


def price_now(state: FleetState, host: Host) -> tuple[int, int]:
    """What the host costs now, and what it would cost on demand; micro-dollars an hour."""
    known = state.prices.get(host.offer.pool)
    return (known.micros_h, known.on_demand_micros_h) if known else (
        host.offer.price_micros_h, host.offer.on_demand_micros_h)


def accepted(state: FleetState, host: Host) -> int:
    """What the host counts for against a limit, micro-dollars an hour: while it boots, the price at which it was asked
    for, so that news of its price does not end what was just begun."""
    return host.offer.price_micros_h if host.state is HostState.LAUNCHING else price_now(state, host)[0]


def asked(state: FleetState, offers: Iterable[Offer], now: float) -> dict[Offer, int]:
    """What a new host of each offer is to count for against a limit, micro-dollars an hour: its price, or what the
    ledger says of its pool where that is more, for offers may be minutes old. The ledger hears of a pool while there
    are hosts in it; what it says of others is as old as their last host."""
    heard = {h.offer.pool for h in state.hosts}
    heard |= {h.offer.pool for h in state.ended.values() if now - h.since < REMEMBERED_S}
    known = {pool: state.prices[pool].micros_h for pool in heard if pool in state.prices}
    return {o: max(o.price_micros_h, known.get(o.pool, 0)) for o in offers}


def worths(state: FleetState, offers: Iterable[Offer], beside: Sequence[Host], now: float) -> dict[Offer, float]:
    """Micro-dollars per useful hour of one more host in each pool, beside those that stay."""
    lives, lost_s = lived(state, now), boot_s(state) + stall_s(state) * (len(beside) + 1)
    unknown = 1 + lost_s / Lived().expected_s()
    return {o: (o.price_micros_h * _waste(lives, o, lost_s) / unknown if _is_known(lives, o)
                else float(o.price_micros_h)) + _traffic(state, o, beside) for o in offers}


def _is_known(lives: Mapping[str, Lived], offer: Offer) -> bool:
    return offer.market is Market.SPOT and (offer.pool in lives or offer.life_s > 0)


def of_use(state: FleetState, offers: Iterable[Offer], hosts: int, now: float) -> dict[str, float]:
    """Pool -> micro-dollars per useful hour of a host there, one of `hosts`, beside one that is never taken."""
    lives, lost_s = lived(state, now), boot_s(state) + stall_s(state) * hosts
    return {o.pool: o.price_micros_h * _waste(lives, o, lost_s) for o in offers}


def _waste(lives: Mapping[str, Lived], offer: Offer, lost_s: float) -> float:
    if offer.market is not Market.SPOT:
        return 1.0
    return 1 + lost_s / max(1.0, lives.get(offer.pool, Lived()).expected_s(prior_s(offer)))


def _traffic(state: FleetState, offer: Offer, beside: Sequence[Host]) -> float:
    """Micro-dollars an hour of what a ring carries between zones on account of this host: as often as it enters
    another zone, each edge bears 2 (n - 1) / n times what a worker hands to the reductions of a step."""
    zones = {h.offer.zone for h in beside if h.offer.region == offer.region}
    rates = state.seen.rates.get(f"{offer.provider}/{offer.region}")
    if not zones or offer.zone in zones or rates is None or not rates.zone_micros_gib:
        return 0.0
    edges = 2 if len(zones) == 1 else 1
    n = len(beside) + 1
    bytes_h = sum(w.step_bytes * 3600 / w.step_s for w in state.seen.works.values() if w.step_s > 0 and not w.ended)
    return edges * 2 * (n - 1) / n * bytes_h / GIB * rates.zone_micros_gib
