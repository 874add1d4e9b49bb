"""A fleet over time, by hand: money, hosts and interruptions as points."""

from __future__ import annotations

from spotfleet.fleet.cost.series import CostMark, CostPoint, HostCountPoint, Series, combined, series
from spotfleet.fleet.domain.events import (
    BudgetReached,
    Event,
    FleetCreated,
    HostListed,
    HostNoticed,
    JobChanged,
    LaunchIntended,
    PriceChanged,
)
from spotfleet.model import BillingRules, CloudState, JobState, Market, Nodes, Offer, Role, Run

SECOND = 3600
SPOT = Offer("fake", "r", "a", "g5", Market.SPOT, 1, 10 * SECOND, 30 * SECOND)
FULL = Offer("fake", "r", "a", "g5", Market.ON_DEMAND, 1, 30 * SECOND, 30 * SECOND)


def host(name: str, *runs: Run, offer: Offer = SPOT, role: Role = Role.WORKER) -> list[Event]:
    return [LaunchIntended(runs[0].started_at, name, role, offer, ""),
            HostListed(0.0, name, "i", CloudState.RUNNING, runs)]


def price(at: float, per_second: int) -> PriceChanged:
    return PriceChanged(at, SPOT.pool, per_second * SECOND, 30 * SECOND)


STORY: list[Event] = [
    FleetCreated(0.0, "f", "fake", Nodes(), BillingRules(1)),
    *host("f-d-0", Run(0.0), offer=FULL, role=Role.DISPATCHER),
    *host("f-0", Run(100.0, 200.0, taken=True)), *host("f-1", Run(150.0, 300.0), offer=FULL),
    price(50.0, 4), price(120.0, 6), price(500.0, 9), HostNoticed(190.0, "f-0", 10.0, "terminate", why="EC2 says so"),
    JobChanged(110.0, "j", JobState.RUNNING, "2 workers"), BudgetReached(250.0, "max_cost", 80, 8, 10, "80 % of 10")]


def test_money_hosts_and_marks_of_a_fleet():
    found = series(STORY, 400.0, points=3)
    assert found == Series(
        "f", 0.0, 400.0,
        (CostPoint(0.0, 0, 0, 0, 0, 0),
         CostPoint(200.0, 8060, 20 * 4 + 80 * 6, 50 * 30, 200 * 30, (100 + 50 + 200) * 30),
         CostPoint(400.0, 17060, 560, 150 * 30, 400 * 30, (100 + 150 + 400) * 30)),
        (HostCountPoint(0.0, 0, 0), HostCountPoint(100.0, 1, 0), HostCountPoint(150.0, 1, 1),
         HostCountPoint(200.0, 0, 1), HostCountPoint(300.0, 0, 0),
         HostCountPoint(400.0, 0, 0)),
        (CostMark(110.0, "job", "j", "", "running: 2 workers"),
         CostMark(190.0, "notice", "f-0", SPOT.pool, "EC2 says so"),
         CostMark(200.0, "interruption", "f-0", SPOT.pool, "taken by the cloud"),
         CostMark(250.0, "budget", "", "", "80 % of 10")))


def test_a_window_begins_at_nothing_with_the_hosts_of_then():
    found = series(STORY, 400.0, since=180.0, until=260.0, points=2)
    assert found.spend == (CostPoint(180.0, 0, 0, 0, 0, 0),
                           CostPoint(260.0, 4920, 20 * 6, 80 * 30, 80 * 30, (20 + 80 + 80) * 30))
    assert found.hosts == (HostCountPoint(180.0, 1, 1), HostCountPoint(200.0, 0, 1), HostCountPoint(260.0, 0, 1))
    assert [m.kind for m in found.marks] == ["notice", "interruption", "budget"]


def test_an_empty_ledger_is_an_empty_series():
    assert series([], 400.0) == Series("", 400.0, 400.0)
    assert combined([series([], 400.0)]) == Series("", 0.0, 0.0)


def test_many_fleets_add_up_from_the_first_to_the_last():
    later = [FleetCreated(0.0, "g", "fake", Nodes(), BillingRules(1)), *host("g-0", Run(300.0, 800.0))]
    both = combined([series(STORY, 400.0, points=3), series(later, 800.0, points=6)], points=3)
    assert (both.fleet, both.since, both.until) == ("f, g", 0.0, 800.0)
    assert [(p.at, p.micros) for p in both.spend] == [(0.0, 0), (400.0, 17060 + 1000), (800.0, 17060 + 5000)]
    assert both.hosts[-3:] == (HostCountPoint(300.0, 1, 0), HostCountPoint(400.0, 1, 0), HostCountPoint(800.0, 0, 0))
