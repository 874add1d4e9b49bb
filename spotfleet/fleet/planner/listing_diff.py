"""Difference between a provider's listing and the ledger, as new events. Pure.

Listings lag, repeat lines, and may show only the newest run of a host: EC2 reports when a machine was last started,
and no earlier start. A line is news if its host has progressed since it was listed before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from spotfleet.fleet.domain.actions import Observed, group_of
from spotfleet.fleet.domain.events import Event, HostListed, HostPlaced, LaunchIntended
from spotfleet.fleet.domain.state import FleetState, Host
from spotfleet.model import CloudHost, CloudState, HostState, Offer, Run
from spotfleet.words import clock_utc

MISSING_S = 10.0  # a listed host must be absent for this long, in two ticks, before it counts as GONE
NEVER_LISTED_S = 60.0  # a terminated host that was never listed is GONE after this


def merge_lines(lines: Iterable[CloudHost], state: FleetState, observed: Observed, now: float) -> dict[str, CloudHost]:
    """Return the most advanced line of each host, with all its runs."""
    found: dict[str, CloudHost] = {}
    for line in lines:
        known = state.host(line.request_id)
        line = _completed(_corrected(line, observed), known, now)
        other = found.get(line.request_id)
        if other is None or progress(line) >= progress(other):
            found[line.request_id] = line
    return found


def _corrected(line: CloudHost, observed: Observed) -> CloudHost:
    """Correct a line that lists a host as stopped while its agent is connected: the host runs."""
    contradicted = line.state is CloudState.STOPPED and line.request_id in observed.joined
    if not contradicted:
        return line
    runs = (*line.runs[:-1], *(Run(r.started_at) for r in line.runs[-1:]))
    return replace(line, state=CloudState.RUNNING, runs=runs, why="")


def _completed(line: CloudHost, known: Host | None, now: float) -> CloudHost:
    """Return `line` with the earlier runs, which only the ledger has, and with the offer under which it was sold.

    A run without an observed end, because the machine was back before the next listing, counts until the next run
    began: too long by the time in which it was stopped, never too short. If the machine is stopped or gone and its
    last run is not listed, that run counts until now.
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
        return line  # the usual case; copying a thousand lines in each tick would cost
    return replace(line, runs=(*before, *line.runs), offer=offer)


def progress(line: CloudHost | Host) -> tuple:
    """Return a key that only grows over a host's life."""
    cloud = line.state if isinstance(line, CloudHost) else line.cloud
    last = line.runs[-1] if line.runs else Run(-math.inf)
    return (len(line.runs), last.started_at, last.ended_at is not None, cloud is CloudState.TERMINATED)


def new_events(known: Host | None, line: CloudHost, now: float) -> list[Event]:
    """Return the events for a listed line; [] if it shows nothing new, or lags behind the previous listing."""
    if known is not None and known.missing_since is None:
        same = (known.provider_id, known.cloud, known.runs, known.address, known.port, known.offer.pool,
                known.disk_gib, known.addresses) == (
            line.provider_id, line.state, line.runs, line.address or known.address, line.port or known.port,
            line.offer.pool, line.disk_gib, max(known.addresses, line.addresses))
        if same or (known.provider_id and progress(line) < progress(known) and not _is_new_machine(known, line)):
            return []
    listed = HostListed(now, line.request_id, line.provider_id, line.state, line.runs, line.address, line.port,
                        line.why, disk_gib=line.disk_gib, addresses=line.addresses, ended_at=line.ended_at)
    if known is not None:
        moved = known.offer.pool != line.offer.pool
        return [HostPlaced(now, line.request_id, line.offer), listed] if moved else [listed]
    # The ledger was lost. The launch counts from now, so that the agent has its whole time to report.
    return [LaunchIntended(now, line.request_id, line.role, line.offer, "adopted: the provider lists it",
                           group=group_of(line.fleet, line.request_id)), listed]


def _is_new_machine(known: Host, line: CloudHost) -> bool:
    """Return whether the cloud has given an ended host a new machine, or is about to."""
    return (known.state is HostState.GONE and line.state is not CloudState.TERMINATED
            and line.provider_id != known.provider_id)


def absence_events(host: Host, observed: Observed, now: float) -> list[Event]:
    """Return the events for an unlisted host. A lagging listing must not end a host; a lasting absence must."""
    if host.request_id in observed.joined:
        return []
    if not host.provider_id:
        given_up = host.terminate_at is not None and now - max(host.since, host.asked_at) >= NEVER_LISTED_S
        gone = HostListed(now, host.request_id, "", CloudState.TERMINATED, (), why="was never listed by the provider",
                          missing=True)
        return [gone] if given_up else []
    if host.missing_since is None:
        assert host.cloud is not None
        return [HostListed(now, host.request_id, host.provider_id, host.cloud, host.runs, host.address, host.port,
                           "not in the provider's list", missing=True)]
    if now - host.missing_since < MISSING_S:
        return []
    runs = tuple(replace(r, ended_at=host.missing_since) if r.ended_at is None else r for r in host.runs)
    return [HostListed(now, host.request_id, host.provider_id, CloudState.TERMINATED, runs, host.address, host.port,
                       f"not in the provider's list since {clock_utc(host.missing_since)}", missing=True,
                       ended_at=host.missing_since)]


def priced_pools(state: FleetState, listed: dict[str, CloudHost], fresh: set[str],
                 hosts: Iterable[Host], now: float) -> tuple[dict[str, Offer], dict[str, float]]:
    """Return the pools whose prices matter, and since when: those of hosts that live or have news."""
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
    """Return (PROVIDER/REGION, region, since when) for hosts that live or have news, from the first run there.

    A region without rates counts only if one of its hosts has news.
    """
    found: dict[str, tuple[str, float, bool]] = {}
    for line in listed.values():
        known = state.host(line.request_id)
        if line.request_id not in fresh and (known is None or known.state is HostState.GONE):
            continue
        place = f"{line.offer.provider}/{line.offer.region}"
        _, since, has_news = found.get(place, ("", now, False))
        found[place] = (line.offer.region, min([since, *(r.started_at for r in line.runs)]),
                        has_news or line.request_id in fresh)
    return [(place, name, since) for place, (name, since, has_news) in sorted(found.items())
            if has_news or place in state.rates]
