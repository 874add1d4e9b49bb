"""Detailed report of one simulated window, from its ledger."""

from __future__ import annotations

import math

from spotfleet.fleet.cost.series import series
from spotfleet.fleet.domain.events import (
    Event,
    GenerationFormed,
    HostDraining,
    HostJoined,
    HostListed,
    HostNoticed,
    JobChanged,
    LaunchIntended,
    LaunchRefused,
    PolicyDecided,
    TerminateIntended,
)
from spotfleet.model import CloudState
from spotfleet.simulate.formats.text import steps
from spotfleet.simulate.values.result import Action, SimulatedDecision, Story, Window
from spotfleet.simulate.world.world import SimulatedWorld

POINTS = 100  # points of the curve of money


def story_of(strategy: str, done: SimulatedWorld, window: Window) -> Story:
    begun, rows = done.began_at, done.ledger.rows
    decisions = tuple(SimulatedDecision(e.at - begun, e.spot, e.on_demand, e.why, e.rule)
                      for e in rows if isinstance(e, PolicyDecided))
    markets = {e.request_id: e.offer.market.value for e in rows if isinstance(e, LaunchIntended)}
    actions = tuple(a for e in rows if (a := _action(e, begun, markets)) is not None)
    spent = tuple((s.at - begun, s.micros) for s in series(rows, done.now, points=POINTS).spend)
    return Story(strategy, window, decisions, actions, _hosts(done), _offered(done), spent, _work(done))


def _action(event: Event, begun: float, markets: dict[str, str]) -> Action | None:
    def action(what: str, host: str, why: str) -> Action:
        return Action(event.at - begun, what, host, why, markets.get(host, ""))

    match event:
        case LaunchIntended():
            return action("launch", event.request_id, event.why)
        case LaunchRefused():
            return action("refused", event.request_id, event.why)
        case HostJoined():
            return action("joined", event.request_id, "")
        case HostNoticed():
            return action("notice", event.request_id, f"interruption notice: it ends in {event.seconds_left:.0f} s")
        case HostDraining():
            return action("drain", event.request_id, event.why)
        case TerminateIntended():
            return action("end", event.request_id, event.why)
        case HostListed(state=CloudState.TERMINATED) if any(r.taken for r in event.runs):
            return action("lost", event.request_id, event.why)
        case JobChanged() if event.state.ended:
            return action("finished", "", "the work is done")
    return None


def _hosts(done: SimulatedWorld) -> tuple[tuple[float, int, int, int], ...]:
    spot: list[tuple[float, str, int]] = []
    for machine in done.cloud.machines.values():
        market = machine.offer.market.value
        spot.append((machine.started_at, market, 1))
        if machine.ended_at is not None:
            spot.append((machine.ended_at, market, -1))
    spot += [(e.at, "work", len(e.members)) for e in done.ledger.rows if isinstance(e, GenerationFormed)]
    held, found = {"spot": 0, "on-demand": 0, "work": 0}, []
    for at, what, n in sorted(spot, key=lambda s: s[0]):
        held[what] = n if what == "work" else held[what] + n
        found.append((at - done.began_at, (held["spot"], held["on-demand"], held["work"])))
    last = (done.now - done.began_at, found[-1][1] if found else (0, 0, 0))
    return tuple((at, *counts) for at, counts in (*steps(found), last))


def _offered(done: SimulatedWorld) -> tuple[tuple[float, int], ...]:
    begun, end, target = done.began_at, done.now, done.setting.hosts
    times = sorted({begun, *(at for p in done.cloud.pools for at, _ in p.capacity if begun < at < end)})
    rooms = [(at - begun, min(target, sum(p.room(at) for p in done.cloud.pools))) for at in times]
    return (*steps(rooms), (end - begun, rooms[-1][1]))


def _work(done: SimulatedWorld) -> tuple[tuple[float, float], ...]:
    """Return the curve of work, from the instants at which the group changed: it is linear between them."""
    whole = done.work.useful_s if math.isinf(done.work.left_s) else done.work.useful_s + done.work.left_s
    formed = [e for e in done.ledger.rows if isinstance(e, GenerationFormed)]
    points = [(e.at - done.began_at, min(1.0, e.version * done.setting.hosts / whole) if whole else 0.0)
              for e in formed]
    done_share = done.work.useful_s / whole if whole else 0.0
    return ((0.0, 0.0), *points, (done.now - done.began_at, done_share))

