"""Disks, public addresses and traffic: by hand, and over weeks against the emulated cloud's own invoice."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotfleet.fleet.cost.facts import Disk, disks
from spotfleet.fleet.cost.meter import report
from spotfleet.fleet.domain.events import (
    Event,
    FleetCreated,
    GenerationFormed,
    HostListed,
    JobChanged,
    JobProgress,
    JobResumed,
    LaunchIntended,
    RatesStamped,
)
from spotfleet.model import BillingRules, CloudState, JobState, Market, Nodes, Offer, Rates, Role, Run
from tests.support.fleet.fleet_world import World, market_rules

DAY = 86400.0
GIB = 2**30
MONTH = 730 * 3600
SECOND = Rates(MONTH, 3600)  # a GiB costs a micro-dollar a second, and so does an address
EXACT = BillingRules(minimum_s=1)
FREE = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 2, 0, 0)


def created(rules: BillingRules = EXACT) -> FleetCreated:
    return FleetCreated(0.0, "f", "fake", Nodes(), rules)


def rated(at: float, rates: Rates = SECOND, region: str = "r") -> RatesStamped:
    return RatesStamped(at, "fake", region, rates)


def listed(at: float, state: CloudState, *runs: Run, machine: str = "i-1", gib: int = 10, addresses: int = 0,
           ended_at: float | None = None, missing: bool = False) -> HostListed:
    return HostListed(at, "f-0", machine, state, runs, missing=missing, disk_gib=gib, addresses=addresses,
                      ended_at=ended_at)


def host(*listings: HostListed, offer: Offer = FREE, name: str = "f-0") -> list[Event]:
    return [LaunchIntended(0.0, name, Role.WORKER, offer, ""), *(replace(e, request_id=name) for e in listings)]


def running(*runs: Run, **what) -> list[Event]:
    return host(listed(0.0, CloudState.RUNNING, *runs, **what))


def test_a_disk_costs_from_the_first_run_to_the_end_of_the_machine_also_while_it_is_stopped():
    events = [created(), rated(0.0), *host(
        listed(101.0, CloudState.RUNNING, Run(100.0)),
        listed(130.0, CloudState.STOPPED, Run(100.0, 120.0, taken=True)),
        listed(400.0, CloudState.TERMINATED, Run(100.0, 120.0, taken=True), ended_at=350.0))]
    bill = report(events, 1e6)
    assert (bill.disk_micros, bill.machine_micros, bill.micros) == (250 * 10, 0, 2500)
    (line,) = bill.extras
    assert (line.kind, line.name, line.region, line.detail, line.unit) == ("disk", "f-0", "fake/r", "10 GiB",
                                                                          "GiB-hour")
    assert line.quantity == pytest.approx(250 * 10 / 3600)


def test_a_disk_that_is_there_costs_up_to_now():
    events = [created(), rated(0.0), *running(Run(100.0))]
    assert [report(events, now).disk_micros for now in (101.0, 150.5)] == [10, 510]


def test_an_address_costs_while_its_machine_runs():
    stopped = listed(0.0, CloudState.STOPPED, Run(100.0, 120.0), Run(200.0, 210.5), gib=0, addresses=2)
    assert report([created(), rated(0.0), *host(stopped)], 1e6).address_micros == (20 + 11) * 2


def test_short_lives_cost_the_minimum_and_an_interruption_waives_only_the_machine():
    rules = BillingRules(60, free_if_taken_within_s=3600)
    ended = listed(0.0, CloudState.TERMINATED, Run(100.0, 120.0, taken=True), addresses=1, ended_at=120.0)
    bill = report([created(rules), rated(0.0), *host(ended)], 1e6)
    assert (bill.disk_micros, bill.address_micros, bill.machine_micros) == (60 * 10, 60, 0)


def test_rates_count_from_their_stamp_on_and_nothing_counts_before_the_first():
    twice = Rates(2 * MONTH, 7200)
    events = [created(), *running(Run(100.0, 200.0), addresses=1), rated(110.0), rated(150.5, twice)]
    bill = report([*events, listed(200.0, CloudState.TERMINATED, Run(100.0, 200.0), ended_at=200.0)], 1e6)
    assert bill.address_micros == (151 - 110) + 2 * (200 - 151)
    assert bill.disk_micros == 10 * bill.address_micros


def test_rates_of_other_regions_do_not_count():
    assert report([created(), rated(0.0, region="elsewhere"), *running(Run(0.0, 50.0))], 1e6).micros == 0


def test_each_disk_is_rounded_once_half_up():
    third = Rates(disk_micros_gib_month=MONTH // 30)
    one = host(listed(0.0, CloudState.TERMINATED, Run(0.0, 1.0), gib=1, ended_at=15.0))
    other = host(listed(0.0, CloudState.TERMINATED, Run(0.0, 1.0), gib=1, ended_at=14.0), name="f-1")
    assert report([created(), rated(0.0, third), *one, *other], 1e6).disk_micros == 1 + 0
    runs = [Run(at, at + 1.0) for at in (0.0, 10.0, 20.0, 30.0)]
    bill = report([created(), rated(0.0, Rates(address_micros_h=1200)), *running(*runs, gib=0, addresses=1)], 1e6)
    assert bill.address_micros == 1  # four thirds


def test_what_is_beside_machines_is_the_same_on_demand():
    offer = replace(FREE, price_micros_h=3600, on_demand_micros_h=4 * 3600)
    ended = listed(0.0, CloudState.TERMINATED, Run(0.0, 100.0), ended_at=100.0)
    bill = report([created(), rated(0.0), *host(ended, offer=offer)], 1e6)
    assert (bill.micros, bill.on_demand_micros) == (100 + 1000, 400 + 1000)
    assert round(bill.savings_percent, 2) == round(100 * 300 / 1400, 2)


@pytest.mark.parametrize(("listings", "held"), [
    ((listed(1.0, CloudState.PENDING), listed(5.0, CloudState.RUNNING, Run(3.0))), (Disk("i-1", 10, 3.0),)),
    ((listed(5.0, CloudState.RUNNING, Run(3.0)),
      listed(9.0, CloudState.TERMINATED, Run(3.0, 8.0), gib=0)), (Disk("i-1", 10, 3.0, 8.0),)),
    ((listed(5.0, CloudState.RUNNING, Run(3.0)),
      listed(9.0, CloudState.STOPPED, Run(3.0, 8.0), machine="sir-1", gib=0),
      listed(20.0, CloudState.RUNNING, Run(3.0, 8.0), Run(18.0), machine="i-2", gib=30)),
     (Disk("i-1", 10, 3.0, 8.0), Disk("i-2", 30, 18.0))),
    ((listed(5.0, CloudState.RUNNING, Run(3.0)),
      listed(9.0, CloudState.STOPPED, Run(3.0, 8.0), machine="sir-1", gib=0)), (Disk("i-1", 10, 3.0, 8.0),)),
    ((listed(5.0, CloudState.RUNNING, Run(3.0)),
      listed(20.0, CloudState.RUNNING, Run(3.0, 8.0), Run(18.0), machine="i-2")),
     (Disk("i-1", 10, 3.0, 8.0), Disk("i-2", 10, 18.0))),
    ((listed(5.0, CloudState.RUNNING, Run(3.0)),
      listed(20.0, CloudState.PENDING, Run(3.0, 8.0), machine="i-2"),
      listed(25.0, CloudState.TERMINATED, Run(3.0, 8.0), machine="i-2", ended_at=24.0)), (Disk("i-1", 10, 3.0, 8.0),)),
    ((listed(5.0, CloudState.RUNNING, Run(3.0)), listed(7.0, CloudState.STOPPED, Run(3.0, 6.0)),
      listed(9.0, CloudState.RUNNING, Run(3.0, 6.0), Run(8.0)),
      listed(20.0, CloudState.PENDING, Run(3.0, 6.0), Run(8.0, 15.0), machine="i-2"),
      listed(25.0, CloudState.RUNNING, Run(3.0, 6.0), Run(8.0, 15.0), Run(22.0), machine="i-2")),
     (Disk("i-1", 10, 3.0, 15.0), Disk("i-2", 10, 22.0))),
    ((listed(5.0, CloudState.RUNNING, Run(3.0)),
      listed(30.0, CloudState.RUNNING, Run(3.0, 8.0), Run(18.0, 20.0), Run(22.0), machine="i-2")),
     (Disk("i-1", 10, 3.0, 8.0), Disk("i-2", 10, 18.0))),
    ((listed(5.0, CloudState.RUNNING, Run(3.0)),
      listed(9.0, CloudState.RUNNING, Run(3.0), missing=True),
      listed(19.0, CloudState.TERMINATED, Run(3.0, 9.0), missing=True, ended_at=9.0)), (Disk("i-1", 10, 3.0, 9.0),)),
    ((listed(5.0, CloudState.RUNNING, Run(3.0)),
      listed(19.0, CloudState.TERMINATED, Run(3.0, 9.0), missing=True, ended_at=9.0),
      listed(25.0, CloudState.RUNNING, Run(3.0))), (Disk("i-1", 10, 3.0),)),
    ((listed(5.0, CloudState.RUNNING, Run(3.0)),
      listed(19.0, CloudState.TERMINATED, Run(3.0, 9.0), missing=True, gib=0, ended_at=9.0),
      listed(40.0, CloudState.TERMINATED, Run(3.0, 30.0), ended_at=35.0)), (Disk("i-1", 10, 3.0, 35.0),)),
    ((listed(5.0, CloudState.RUNNING, Run(3.0)),
      listed(19.0, CloudState.TERMINATED, Run(3.0, 9.0), missing=True, gib=0, ended_at=9.0),
      listed(40.0, CloudState.RUNNING, Run(3.0, 30.0), Run(33.0), machine="i-2")),
     (Disk("i-1", 10, 3.0, 30.0), Disk("i-2", 10, 33.0))),
    ((listed(5.0, CloudState.TERMINATED, gib=10, ended_at=4.0),), ()),
], ids=["from-its-run-on", "until-the-run-ended", "another-machine-of-a-request", "a-request-that-waits",
        "another-machine-at-once", "another-that-never-ran", "another-after-a-stop",
        "another-that-was-stopped", "out-of-the-listing", "back-in-the-listing",
        "back-as-ended", "back-as-another-machine", "never-ran"])
def test_whose_disk_is_held_when(listings, held):
    assert disks(listings) == held


def offer_in(zone: str, region: str = "r") -> Offer:
    return replace(FREE, zone=zone, region=region)


def ring(*zones: str) -> list[Event]:
    """Hosts f-0, f-1 ... in these zones; "ZONE@REGION" for another region."""
    events: list[Event] = [created(), rated(0.0, Rates(zone_micros_gib=20_000, region_micros_gib=50_000))]
    for i, zone in enumerate(zones):
        name, _, region = zone.partition("@")
        events += host(listed(0.0, CloudState.RUNNING, Run(0.0, 1.0), gib=0), offer=offer_in(name, region or "r"),
                       name=f"f-{i}")
    return events


def formed(at: float, generation: int, *ranks: int, version: int = 0) -> GenerationFormed:
    return GenerationFormed(at, "j", generation, tuple(f"f-{i}/0/a" for i in ranks), "start", "", version)


def test_a_step_crosses_zones_over_each_edge_of_the_ring_whose_ends_differ():
    # a a b b: two edges of four cross, each with 2 x 3/4 of the bytes
    events = [*ring("a", "a", "b", "b"), formed(1.0, 1, 0, 1, 2, 3), JobProgress(9.0, "j", 100, 0.1, GIB)]
    bill = report(events, 1e6)
    assert bill.traffic_micros == 100 * 2 * 3 // 2 * 20_000
    (line,) = bill.extras
    assert (line.kind, line.name, line.detail, line.quantity, line.unit) == ("traffic", "j", "between zones", 300.0,
                                                                            "GiB")
    assert bill.jobs[0].traffic_micros == bill.micros == bill.traffic_micros
    worst = report([*ring("a", "b", "a", "b"), formed(1.0, 1, 0, 1, 2, 3), JobProgress(9.0, "j", 100, 0.1, GIB)], 1e6)
    assert worst.traffic_micros == 2 * bill.traffic_micros


def test_ranks_decide_the_ring_and_one_zone_or_one_worker_cross_nothing():
    pairs = [*ring("a", "b", "a", "b"), formed(1.0, 1, 0, 2, 1, 3), JobProgress(9.0, "j", 100, 0.1, GIB)]
    assert report(pairs, 1e6).traffic_micros == 100 * 3 * 20_000
    same = [*ring("a", "a"), formed(1.0, 1, 0, 1), JobProgress(9.0, "j", 100, 0.1, GIB)]
    alone = [*ring("a", "b"), formed(1.0, 1, 0), JobProgress(9.0, "j", 100, 0.1, GIB)]
    unknown = [*ring("a", "b"), formed(1.0, 1, 0, 1), JobProgress(9.0, "j", 100, 0.1)]
    assert [report(e, 1e6).extras for e in (same, alone, unknown)] == [(), (), ()]


def test_another_region_costs_its_own_rate():
    events = [*ring("a", "a@far"), formed(1.0, 1, 0, 1), JobProgress(9.0, "j", 10, 0.1, GIB)]
    bill = report([*events, rated(0.0, Rates(region_micros_gib=70_000), "far")], 1e6)
    assert {(e.region, e.detail): e.micros for e in bill.extras} == {
        ("fake/r", "between regions"): 10 * 50_000, ("fake/far", "between regions"): 10 * 70_000}


def test_steps_belong_to_the_generation_that_made_them_and_repeated_ones_cross_again():
    events = [*ring("a", "b", "a"), formed(1.0, 1, 0, 1), JobProgress(5.0, "j", 100, 0.1, GIB),
              formed(6.0, 2, 0, 2, version=110), JobProgress(8.0, "j", 200, 0.1, GIB),
              formed(9.0, 3, 0, 1, version=200), JobResumed(10.0, "j", 3, 201, 4, 0.1),
              JobChanged(11.0, "j", JobState.SUCCEEDED, "", 210), JobProgress(12.0, "j", 300, 0.1, GIB)]
    assert report(events, 1e6).traffic_micros == (100 + 10 + 1 + 4 + 9) * 2 * 20_000


RATES = Rates(80_000, 5_003, 20_000, 20_000, "test", "2026-01-01")


@pytest.mark.parametrize(("billing", "behavior"), [
    (BillingRules(60), "stop"), (BillingRules(3600, 3600), "terminate"),
], ids=["by-the-minute-with-stops", "first-hour-free-if-taken"])
def test_weeks_of_disks_and_addresses_cost_what_the_cloud_bills(billing, behavior):
    rules = replace(market_rules(billing, boot_s=41.5), rates=RATES, disk_gib=100, addresses=1)
    world = World(hosts=3, behavior=behavior, rules=rules)
    random = Random(11)
    for i in range(700):
        trouble(world, random)
        world.tick(random.choice([60.0, 300.0, 301.0009765625, 3600.0]))
        if i % 233 == 232:
            check_bill(world)
    assert [e.rates for e in world.ledger.rows if isinstance(e, RatesStamped)] == [RATES]
    check_bill(world)
    world.hosts = 0
    world.cloud.faults.listing_lag_s = 0.0
    world.run(1200, every_s=60)
    assert world.living() == []
    check_bill(world)


def trouble(world: World, random: Random) -> None:
    living = world.living()
    stopped = [name for name, h in world.market.hosts.items() if h.state is CloudState.STOPPED]
    match random.randrange(12):
        case 0 if living:
            world.market.interrupt(random.choice(living), random.choice([None, 120.0]), world.now)
        case 1 if stopped:
            world.cloud.terminate(random.choice(stopped))
        case 2 if stopped:
            world.market.return_host(random.choice(stopped), world.now)
        case 3:
            world.cloud.faults.listing_lag_s = random.choice([0.0, 10.0, 90.0])
        case 4:
            world.hosts = random.randrange(5)
        case 5:
            world.market.set_capacity(random.choice(list(world.market.pools)), random.randrange(3), world.now)


def check_bill(world: World) -> None:
    world.cloud.faults.listing_lag_s = 0.0
    world.tick(1.0)
    bill, invoice = report(world.ledger.rows, world.now), world.market.invoice(world.now)
    ours = {kind: {e.name: e.micros for e in bill.extras if e.kind == kind} for kind in ("disk", "address")}
    assert ours["disk"] == {name: micros for name, micros in invoice.disks.items() if micros}
    assert ours["address"] == {name: micros for name, micros in invoice.addresses.items() if micros}
    assert bill.micros == invoice.micros > 0


def test_rates_are_stamped_since_the_first_run_and_again_when_they_change_a_day_later():
    world = World(hosts=1, rules=replace(market_rules(boot_s=41.5), rates=RATES, disk_gib=10))
    world.run(3600, every_s=60)
    (first,) = [e for e in world.ledger.rows if isinstance(e, RatesStamped)]
    assert (first.provider, first.region, first.rates) == ("local", "local", RATES)
    assert first.at <= min(h.runs[0].started_at for h in world.state.hosts)
    dearer = replace(RATES, disk_micros_gib_month=90_000)
    world.market.rules = replace(world.market.rules, rates=replace(RATES, as_of="2026-02-01"))
    world.run(2 * DAY, every_s=3600)
    world.market.rules = replace(world.market.rules, rates=dearer)
    world.run(2 * DAY, every_s=3600)
    stamps = [e for e in world.ledger.rows if isinstance(e, RatesStamped)]
    assert [e.rates for e in stamps] == [RATES, dearer]


def test_a_host_found_in_a_listing_that_began_before_the_first_stamp_is_billed_from_its_start():
    world = World(hosts=1, rules=replace(market_rules(), rates=RATES, disk_gib=100, addresses=1))
    world.run(3600, every_s=60)
    world.ledger = type(world.ledger)()  # lost
    world.ledger.append(FleetCreated(world.now, "f", "local", Nodes(1, 1, 9), world.cloud.billing()))
    world.run(3600, every_s=60)
    check_bill(world)


def test_a_clock_that_is_ahead_of_the_clouds_leaves_no_second_without_a_rate():
    rules = replace(market_rules(boot_s=41.5), rates=RATES, disk_gib=100, addresses=1)
    world = World(hosts=1, rules=rules, skew_s=300.0)
    world.run(3600, every_s=10)
    true = world.clock()
    assert report(world.ledger.rows, true).micros == world.market.invoice(true).micros
    assert world.market.invoice(true).disks["f-0"] > 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e4, width=32), st.integers(0, 10**6)), max_size=5),
       st.floats(0, 1e4, width=32), st.floats(0, 1e4, width=32))
def test_no_rate_stamped_later_changes_what_was_billed_by_then(stamps, start, length):
    ended = [created(), *host(listed(0.0, CloudState.TERMINATED, Run(start, start + length), addresses=1,
                                     ended_at=start + length))]
    rates = [rated(at, Rates(value * 730, value)) for at, value in stamps]
    bill = report([*ended, *rates], 1e6)
    later = rated(start + length + 1, Rates(10**9, 10**9))
    assert report([*ended, *rates, later], 1e6).extras == bill.extras
    assert bill.disk_micros >= 0 and bill.address_micros >= 0
