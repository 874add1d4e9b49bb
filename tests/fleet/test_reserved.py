"""Reserved capacity is used first, as far as it has room: it costs whether it is used or not."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.cli.commands import cost_table
from spotfleet.fleet.cost.meter import report
from spotfleet.fleet.domain.actions import Launch, Observed, Terminate, Wanted
from spotfleet.fleet.domain.events import (
    Event,
    FleetCreated,
    HostJoined,
    HostListed,
    LaunchIntended,
    LaunchRefused,
    event_from_json,
    event_to_json,
)
from spotfleet.fleet.domain.state import FleetState, fold
from spotfleet.fleet.planner.plan import plan
from spotfleet.fleet.policy.decide import PolicyInput, decide
from spotfleet.matching import meets
from spotfleet.model import BillingRules, CloudState, Market, Need, Nodes, Offer, PolicySpec, Role, Run

SPOT = Offer("fake", "r", "zone-a", "p5", Market.SPOT, 8, 20_000_000, 98_000_000)
OTHER = replace(SPOT, zone="zone-b", price_micros_h=21_000_000)
FULL = replace(SPOT, market=Market.ON_DEMAND, price_micros_h=98_000_000)
HELD = replace(SPOT, price_micros_h=98_000_000, room=2, reserved="cr-1")
NEED = Need(instance_type="p5", max_micros_h=30_000_000)


def want(hosts: int, **more) -> Wanted:
    return Wanted("f", Role.WORKER, hosts, (NEED,), **more)


def pools(hosts: int, *offers: Offer, state: FleetState = FleetState(), now: float = 0.0, **more) -> list[str]:
    return [a.offer.pool for a in plan(want(hosts, **more), state, offers, Observed(), now) if isinstance(a, Launch)]


def up(*offers: Offer) -> FleetState:
    events: list[Event] = [FleetCreated(0.0, "f", "fake", Nodes(), BillingRules(1, 3600))]
    for n, offer in enumerate(offers):
        events += [LaunchIntended(0.0, f"f-{n}", Role.WORKER, offer, ""), HostJoined(5.0, f"f-{n}", "1"),
                   HostListed(1.0, f"f-{n}", f"i-{n}", CloudState.RUNNING, (Run(0.0),))]
    return fold(events)


def test_a_reservation_is_a_pool_of_its_own_in_the_market_of_the_need():
    assert (HELD.pool, HELD.sold, SPOT.sold) == ("fake/zone-a/p5/cr-1", "reserved", "spot")
    assert meets(NEED, HELD) and not meets(NEED, replace(HELD, reserved=""))  # its price is due in any case


def test_reserved_capacity_is_used_first_within_its_room_and_then_the_market():
    assert pools(1, SPOT, HELD) == [HELD.pool]
    assert pools(4, SPOT, OTHER, HELD) == [HELD.pool, HELD.pool, SPOT.pool, OTHER.pool]
    (first, *_) = plan(want(1), FleetState(), [SPOT, HELD], Observed(), 0.0)
    assert first.why == ("1 host missing; $98.00/h in fake/zone-a/p5/cr-1, reserved capacity, which costs whether it "
                         "is used or not")


def test_a_launch_names_no_reservation_beside_a_pool_and_no_pool_beside_a_reservation():
    found = plan(want(3), FleetState(), [SPOT, OTHER, HELD], Observed(), 0.0)
    assert [[o.pool for o in a.alternatives] for a in found] == [[], [], [OTHER.pool]]


def test_all_hosts_of_a_gang_go_where_all_have_room():
    assert pools(2, SPOT, HELD, all_or_nothing=True) == [HELD.pool] * 2
    assert pools(3, SPOT, HELD, all_or_nothing=True) == [SPOT.pool] * 3


def test_a_reservation_that_refuses_closes_nothing_of_the_market_and_the_market_closes_no_reservation():
    for scope in ("pool", "type", "region", "account"):
        refused = [LaunchIntended(0.0, "f-0", Role.WORKER, HELD, ""), LaunchRefused(0.0, "f-0", scope, "full")]
        assert pools(1, SPOT, HELD, state=fold(refused), now=1.0) == [SPOT.pool]
        refused = [LaunchIntended(0.0, "f-0", Role.WORKER, SPOT, ""), LaunchRefused(0.0, "f-0", scope, "full")]
        assert pools(1, SPOT, HELD, state=fold(refused), now=1.0) == [HELD.pool]


def test_hosts_in_reserved_capacity_are_the_last_to_go():
    ends = [a.request_id for a in plan(want(1), up(HELD, SPOT, SPOT), [], Observed(joined={f"f-{n}": "1" for n in range(
        3)}), 10.0) if not isinstance(a, Launch | Terminate)]
    assert sorted(ends) == ["f-1", "f-2"]


def test_a_reservation_at_the_on_demand_price_is_no_expensive_spot_pool():
    scene = PolicyInput(PolicySpec("auto"), (replace(NEED, max_micros_h=0),), 2, offers=(SPOT, HELD, FULL))
    choice = decide(scene, FleetState(), 0.0)
    assert (choice.spot, choice.on_demand, choice.shun) == (2, 0, ())


def test_its_hosts_cost_their_price_and_are_no_spot_hosts():
    state = up(HELD)
    assert not state.hosts[0].has_run_on_spot
    events = [FleetCreated(0.0, "f", "fake", Nodes(), BillingRules(1)),
              LaunchIntended(0.0, "f-0", Role.WORKER, HELD, ""),
              HostListed(1.0, "f-0", "i-0", CloudState.RUNNING, (Run(0.0),))]
    found = report(events, 3600.0)
    assert (found.lines[0].market, found.micros) == ("reserved", 98_000_000)
    text = cost_table.report(found, [])
    assert "reserved capacity costs whether it is used or not: what fake/zone-a/p5/cr-1 cost without" in text
    assert "reserved capacity" not in cost_table.report(report([events[0]], 3600.0), [])


def test_an_offer_of_an_earlier_release_is_not_reserved():
    data = event_to_json(LaunchIntended(0.0, "f-0", Role.WORKER, HELD, ""))
    assert event_from_json(data).offer == HELD
    del data["offer"]["reserved"]
    assert event_from_json(data).offer == replace(HELD, reserved="")
