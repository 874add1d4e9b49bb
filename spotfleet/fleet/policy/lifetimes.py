"""How long a spot host lasts in a pool before the cloud takes it, and how long hosts boot, as seen so far. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from spotfleet.fleet.fold import FleetState
from spotfleet.model import Offer

BOOT_S = 180.0  # of a cloud's machine until it trains, before any was seen
STALL_S = 0.5  # for which all hosts wait when one is lost, before that was seen
PRIOR_LIFE_S = 24 * 3600.0  # a guess, which counts as one host that lasted so long: sightings soon outweigh it


@dataclass(frozen=True)
class Lived:
    """Spot hosts of one pool, together."""

    seconds: float = 0.0
    taken: int = 0

    def expected_s(self, prior_s: float = PRIOR_LIFE_S) -> float:
        """The mean life to come. Lives are taken as exponential, their rate as gamma-distributed with one loss in
        `prior_s` before anything was seen; this is the inverse of its mean then."""
        return (self.seconds + prior_s) / (self.taken + 1)


def prior_s(offer: Offer) -> float:
    """What counts before lives were seen: what the cloud's interruption band tells of them, where it publishes one.

    Of band b it is 1.64 h x log(1 - 25 %) / log(1 - share taken in b): `catalog/useful.py`, which the provider asks.
    """
    return offer.life_s or PRIOR_LIFE_S


def lived(state: FleetState, now: float) -> Mapping[str, Lived]:
    """By pool, of all spot hosts that the ledger has seen run."""
    found = {pool: Lived(seconds, taken) for pool, (seconds, taken) in state.lives.items()}
    for host in state.hosts:
        if host.tells_of_spot:
            past = found.get(host.offer.pool, Lived())
            found[host.offer.pool] = Lived(past.seconds + host.ran_s(now), past.taken + host.times_taken)
    return found


def boot_s(state: FleetState) -> float:
    """From a launch until its agent has joined: the median of the newest."""
    return _median(state.seen.boots) if state.seen.boots else BOOT_S


def stall_s(state: FleetState) -> float:
    """How long all hosts of a job wait at a change of its members: the median of the newest."""
    return _median(state.seen.stalls) if state.seen.stalls else STALL_S


@lru_cache(maxsize=64)
def _median(seconds: tuple[float, ...]) -> float:
    return median(seconds)
