"""Observed life of spot hosts in a pool until the cloud takes them, and observed boot time of hosts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from spotfleet.fleet.domain.history import MarketHistory
from spotfleet.fleet.domain.state import FleetState
from spotfleet.model import Offer

BOOT_S = 180.0  # assumed time until a cloud machine trains, before any was observed
STALL_S = 0.5  # assumed wait of all hosts when one is lost, before any was observed
PRIOR_LIFE_S = 24 * 3600.0  # a guess, which counts as one host that lasted so long: observations soon outweigh it


@dataclass(frozen=True)
class PoolLifetime:
    """Total run time and losses of the spot hosts of one pool."""

    seconds: float = 0.0
    taken: int = 0

    def expected_s(self, prior_s: float = PRIOR_LIFE_S) -> float:
        """Return the expected remaining life.

        Lives are assumed exponential, their rate gamma-distributed with one loss in `prior_s` before any observation;
        this is the inverse of the rate's mean.
        """
        return (self.seconds + prior_s) / (self.taken + 1)


def prior_s(offer: Offer) -> float:
    """Return the expected life before any observation: from the cloud's interruption band, if it publishes one.

    For band b it is 1.64 h x log(1 - 25 %) / log(1 - share taken in b): `catalog/pricing/useful.py`, which the provider
    calls.
    """
    return offer.life_s or PRIOR_LIFE_S


def lived(state: FleetState, now: float) -> Mapping[str, PoolLifetime]:
    """Return pool -> lifetime of all its spot hosts that have run, according to the ledger."""
    found = {pool: PoolLifetime(seconds, taken) for pool, (seconds, taken) in state.lives.items()}
    for host in state.hosts:
        if host.has_run_on_spot:
            past = found.get(host.offer.pool, PoolLifetime())
            found[host.offer.pool] = PoolLifetime(past.seconds + host.ran_s(now), past.taken + host.times_taken)
    return found


@dataclass(frozen=True)
class BootTime:
    """Seconds from a launch until its agent has joined."""

    seconds: float = BOOT_S
    boots: int = 0  # the newest ones measured, whose median this is; 0: assumed


def boot_time(history: MarketHistory, offer: Offer | None = None) -> BootTime:
    """Return the boot time in the pool of `offer`, or else of its machine type, or else of the fleet: the median of the
    newest boots. It is assumed where the fleet has not booted yet."""
    of = (history.boots_of.get(offer.pool) or history.boots_of.get(offer.kind)) if offer is not None else None
    found = of or history.boots
    return BootTime(_median(found), len(found)) if found else BootTime()


def boot_times(history: MarketHistory) -> dict[str, BootTime]:
    """Return all measured boot times: by pool, by machine type, and under "" of the fleet."""
    measured = {**history.boots_of, **({"": history.boots} if history.boots else {})}
    return {of: BootTime(_median(boots), len(boots)) for of, boots in sorted(measured.items())}


def with_boots(times: Mapping[str, BootTime]) -> MarketHistory:
    """Return a history with these boot times alone: as if each of the boots had taken its median."""
    boots = {of: (time.seconds,) * time.boots for of, time in times.items()}
    return MarketHistory(boots=boots.pop("", ()), boots_of=boots)


def boot_s(state: FleetState, offer: Offer | None = None) -> float:
    """Return the seconds of `boot_time`."""
    return boot_time(state.history, offer).seconds


def stall_s(state: FleetState) -> float:
    """Return for how long all hosts of a job wait at a change of its members: the median of the newest."""
    return _median(state.history.stalls) if state.history.stalls else STALL_S


@lru_cache(maxsize=64)
def _median(seconds: tuple[float, ...]) -> float:
    return median(seconds)
