"""What a listing says that the ledger does not know yet. Pure.

Listings lag, repeat lines, and may show of a host's runs only the newest: EC2 tells when a machine was started last,
and nothing of before. A line is news when it is further in its host's life than what was listed before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from spotfleet.fleet.actions import Observed, clock
from spotfleet.fleet.events import Event, HostListed, HostPlaced, LaunchIntended
from spotfleet.fleet.fold import FleetState, Host
from spotfleet.model import CloudHost, CloudState, HostState, Offer, Run

MISSING_S = 10.0  # a listed host must be absent for this long, in two ticks, before it counts as GONE
NEVER_LISTED_S = 60.0  # a terminated host that was never listed is GONE after this


def read(lines: Iterable[CloudHost], state: FleetState, observed: Observed, now: float) -> dict[str, CloudHost]:
    """The furthest line of each host, with all its runs."""
    found: dict[str, CloudHost] = {}
    for line in lines:
        known = state.host(line.request_id)
        line = _whole(_doubted(line, observed), known, now)
        other = found.get(line.request_id)
        if other is None or progress(line) >= progress(other):
            found[line.request_id] = line
    return found


def _doubted(line: CloudHost, observed: Observed) -> CloudHost:
    """One signal does not stop a host: while its agent is connected, it runs."""
    contradicted = line.state is CloudState.STOPPED and line.request_id in observed.joined
    if not contradicted:
        return line
    runs = (*line.runs[:-1], *(Run(r.started_at) for r in line.runs[-1:]))
    return replace(line, state=CloudState.RUNNING, runs=runs, why="")


def _whole(line: CloudHost, known: Host | None, now: float) -> CloudHost:
    """`line` with the runs before its first, which only the ledger remembers, and with the offer that it was sold as.

    A run whose end nobody saw, as the machine was back before the next look, counts until the next one began: too
    long by the time in which it was stopped, never too short. One whose machine rests or is gone, and of which nothing
    is said, counts until now.
    """
    if known is None:
        return line
    began = line.runs[0].started_at if line.runs else math.inf
    before = [r for r in known.runs if r.started_at < began]
    if before and before[-1].ended_at is None:
        if line.runs:
            before[-1] = replace(before[-1], ended_at=began)
        elif line.state in (CloudState.STOPPED, CloudState.TERMINATED):
            before[-1] = replace(before[-1], ended_at=max(before[-1].started_at, now))
    pool = line.offer.pool
    offer = next((o for o in (known.offer, *reversed(known.alternatives)) if o.pool == pool), line.offer)
    if not before and offer == line.offer:
        return line  # as most are; copies of a thousand lines in each tick would cost
    return replace(line, runs=(*before, *line.runs), offer=offer)


def progress(line: CloudHost | Host) -> tuple:
    """Grows over a host's life, whatever happens to it."""
    cloud = line.state if isinstance(line, CloudHost) else line.cloud
    last = line.runs[-1] if line.runs else Run(-math.inf)
    return (len(line.runs), last.started_at, last.ended_at is not None, cloud is CloudState.TERMINATED)


def news(known: Host | None, line: CloudHost, now: float) -> list[Event]:
    """[] if the listing shows nothing new, or if it lags behind what was listed before."""
    if known is not None and known.missing_since is None:
        same = (known.provider_id, known.cloud, known.runs, known.address, known.port, known.offer.pool,
                known.disk_gib, known.addresses) == (
            line.provider_id, line.state, line.runs, line.address or known.address, line.port or known.port,
            line.offer.pool, line.disk_gib, max(known.addresses, line.addresses))
        if same or (known.provider_id and progress(line) < progress(known) and not _another(known, line)):
            return []
    listed = HostListed(now, line.request_id, line.provider_id, line.state, line.runs, line.address, line.port,
                        line.why, disk_gib=line.disk_gib, addresses=line.addresses, ended_at=line.ended_at)
    if known is not None:
        moved = known.offer.pool != line.offer.pool
        return [HostPlaced(now, line.request_id, line.offer), listed] if moved else [listed]
    # The ledger was lost. As of now, for an agent has its whole time to report to whoever took over.
    return [LaunchIntended(now, line.request_id, line.role, line.offer, "adopted: the cloud lists it"), listed]


def _another(known: Host, line: CloudHost) -> bool:
    """Has the cloud given an ended host a new machine, or is about to?"""
    return (known.state is HostState.GONE and line.state is not CloudState.TERMINATED
            and line.provider_id != known.provider_id)


def absent(host: Host, observed: Observed, now: float) -> list[Event]:
    """A listing that lags must not end a host; one that stays silent must."""
    if host.request_id in observed.joined:
        return []
    if not host.provider_id:
        given_up = host.terminate_at is not None and now - max(host.since, host.asked_at) >= NEVER_LISTED_S
        gone = HostListed(now, host.request_id, "", CloudState.TERMINATED, (), why="was never listed by the cloud",
                          missing=True)
        return [gone] if given_up else []
    if host.missing_since is None:
        assert host.cloud is not None
        return [HostListed(now, host.request_id, host.provider_id, host.cloud, host.runs, host.address, host.port,
                           "not in the cloud's listing", missing=True)]
    if now - host.missing_since < MISSING_S:
        return []
    runs = tuple(replace(r, ended_at=host.missing_since) if r.ended_at is None else r for r in host.runs)
    return [HostListed(now, host.request_id, host.provider_id, CloudState.TERMINATED, runs, host.address, host.port,
                       f"not in the cloud's listing since {clock(host.missing_since)}", missing=True,
                       ended_at=host.missing_since)]


def priced_pools(state: FleetState, listed: dict[str, CloudHost], fresh: set[str],
                 hosts: Iterable[Host], now: float) -> tuple[dict[str, Offer], dict[str, float]]:
    """The pools whose prices matter, and since when: those of hosts that live or have news."""
    pools = {h.offer.pool: h.offer for h in hosts if h.provider_id}
    starts: dict[str, float] = {}
    for line in listed.values():
        known, pool = state.host(line.request_id), line.offer.pool
        if line.request_id in fresh or (known is not None and known.state is not HostState.GONE):
            pools.setdefault(pool, line.offer)
            starts[pool] = min([starts.get(pool, now), *(r.started_at for r in line.runs)])
    return pools, starts


def metered_regions(state: FleetState, listed: dict[str, CloudHost], fresh: set[str],
                    now: float) -> list[tuple[str, str, float]]:
    """(PROVIDER/REGION, region, since when) of hosts that live or have news; of regions without rates those with news,
    since the first run there."""
    found: dict[str, tuple[str, float, bool]] = {}
    for line in listed.values():
        known = state.host(line.request_id)
        if line.request_id not in fresh and (known is None or known.state is HostState.GONE):
            continue
        place = f"{line.offer.provider}/{line.offer.region}"
        _, since, news = found.get(place, ("", now, False))
        found[place] = (line.offer.region, min([since, *(r.started_at for r in line.runs)]),
                        news or line.request_id in fresh)
    return [(place, name, since) for place, (name, since, news) in sorted(found.items())
            if news or place in state.rates]
