"""What the planner makes of a policy's choice: two markets, a limit on what an hour costs, words for each pool."""

from __future__ import annotations

from dataclasses import replace
from math import log

from pytest import approx

from spotfleet.catalog.pricing.useful import expected_lifetime_s
from spotfleet.fleet.domain.actions import Drain, Launch, Observed, Terminate, Wait, Wanted
from spotfleet.fleet.domain.events import JobProgress, PriceChanged, RatesStamped
from spotfleet.fleet.domain.host import Host
from spotfleet.fleet.domain.state import FleetState, fold, scope_keys
from spotfleet.fleet.planner.plan import missing_needs, plan
from spotfleet.fleet.policy.lifetimes import BOOT_S, PRIOR_LIFE_S, STALL_S, PoolLifetime, prior_s
from spotfleet.fleet.policy.pools import useful_prices
from spotfleet.model import CloudState, HostState, Market, Need, Offer, Rates, Role, Run

UP = HostState.UP
SPOT = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 1, 1_000_000, 3_000_000, "A10G")
OTHER = replace(SPOT, zone="zone-b", price_micros_h=1_100_000)
FULL = replace(SPOT, market=Market.ON_DEMAND, price_micros_h=3_000_000)
ALL = [SPOT, FULL]
NOTHING = Observed()


def given(*offers: Offer, **more) -> FleetState:
    hosts = tuple(Host(f"f-{n}", Role.WORKER, o, UP, float(n), 0.0, 0.0, provider_id=f"i-{n}",
                       cloud=CloudState.RUNNING) for n, o in enumerate(offers))
    return FleetState(hosts=hosts, launches=len(hosts), **more)


def want(spot: int, on_demand: int, *any_of: Need, **more) -> Wanted:
    return Wanted("f", Role.WORKER, spot, any_of or (Need(),), on_demand=on_demand, **more)


def did(actions: list) -> list[tuple]:
    return [(type(a).__name__, a.offer.market.value if isinstance(a, Launch) else getattr(a, "request_id", ""))
            for a in actions]


# ---- two markets


def test_each_market_is_filled_to_its_own_number_under_numbers_of_one_row():
    assert plan(want(1, 1), FleetState(), ALL, NOTHING, now=0) == [
        Launch("f-0", SPOT, "1 spot host missing; $1.00/h in fake/zone-a/g5/spot"),
        Launch("f-1", FULL, "1 on-demand host missing; $3.00/h in fake/zone-a/g5/on-demand")]


def test_a_lost_host_is_replaced_in_its_own_market():
    assert did(plan(want(2, 1), given(SPOT, SPOT), ALL, NOTHING, 0)) == [("Launch", "on-demand")]
    assert did(plan(want(2, 1), given(SPOT, FULL), ALL, NOTHING, 0)) == [("Launch", "spot")]


def test_spot_hosts_that_are_refused_are_asked_for_again_while_on_demand_hosts_fill_in():
    state = given(FULL, cooldown_until={scope_keys(SPOT)["pool"]: 60.0})
    assert did(plan(want(1, 1), state, ALL, NOTHING, now=59.0)) == [("Wait", "")]
    assert did(plan(want(1, 1), state, ALL, NOTHING, now=60.0)) == [("Launch", "spot")]


def test_each_market_gives_back_what_it_has_too_many_of():
    assert plan(want(2, 0), given(SPOT, SPOT, FULL), ALL, NOTHING, 0) == [Drain("f-2", "1 on-demand host, 0 wanted")]
    assert plan(want(1, 1), given(SPOT, SPOT, FULL), ALL, NOTHING, 0) == [Drain("f-1", "2 spot hosts, 1 wanted")]


def test_both_at_zero_is_down_and_one_of_them_is_not():
    assert did(plan(want(0, 1), given(SPOT, FULL), ALL, NOTHING, 0)) == [("Drain", "f-0")]
    assert plan(want(0, 0), given(SPOT, FULL), ALL, NOTHING, 0) == [
        Drain("f-0", "the fleet goes down"), Drain("f-1", "the fleet goes down")]


def test_a_limit_on_a_spot_price_is_none_on_the_on_demand_hosts_that_fill_in():
    limited = Need(max_micros_h=500_000)
    assert did(plan(want(1, 1, limited), FleetState(), ALL, NOTHING, 0)) == [("Wait", ""), ("Launch", "on-demand")]
    named = Need(use_spot=False, max_micros_h=2_000_000)
    assert did(plan(want(0, 1, limited, named), FleetState(), ALL, NOTHING, 0)) == [("Launch", "on-demand")]
    assert did(plan(want(0, 1, named), FleetState(), ALL, NOTHING, 0)) == [("Wait", "")]


def test_needs_in_both_markets_are_whichever_is_cheapest_unless_told_apart():
    both = Need(), Need(use_spot=False)
    assert plan(want(1, 0, *both), given(FULL), ALL, NOTHING, 0) == []
    assert did(plan(want(1, 0, *both, apart=True), given(FULL), ALL, NOTHING, 0)) == [
        ("Drain", "f-0"), ("Launch", "spot")]


def test_only_what_is_lacking_is_looked_up():
    assert missing_needs(want(1, 1), given(SPOT), NOTHING, 0) == [Need(use_spot=False)]
    assert missing_needs(want(1, 1), given(SPOT, FULL), NOTHING, 0) == []


def test_a_fleet_in_one_zone_has_the_hosts_of_both_markets_there():
    far = replace(FULL, zone="zone-b", price_micros_h=2_000_000)
    actions = plan(want(1, 1, placement="zone"), FleetState(), [SPOT, far, FULL], NOTHING, 0)
    assert [a.offer.zone for a in actions] == ["zone-a", "zone-a"]
    actions = plan(want(1, 1, placement="cluster"), given(SPOT), [SPOT, far, FULL], NOTHING, 0)
    assert [a.offer for a in actions] == [FULL]


# ---- max_hourly_cost


def test_no_more_hosts_are_launched_than_fit_in_the_limit_and_the_rest_says_so():
    actions = plan(want(3, 0, max_micros_h=2_500_000), given(SPOT), [SPOT], NOTHING, 0)
    assert did(actions) == [("Launch", "spot"), ("Wait", "")]
    assert actions[1] == Wait("1 of 3 hosts missing: max_hourly_cost leaves $0.50/h for them, and the cheapest is "
                              "$1.00/h")


def test_on_demand_hosts_have_what_spot_hosts_leave_of_the_limit():
    actions = plan(want(1, 1, max_micros_h=3_500_000), FleetState(), ALL, NOTHING, 0)
    assert did(actions) == [("Launch", "spot"), ("Wait", "")]
    assert did(plan(want(1, 1, max_micros_h=4_000_000), FleetState(), ALL, NOTHING, 0))[1] == ("Launch", "on-demand")


def test_hosts_whose_prices_have_risen_above_the_limit_are_given_back_the_dearest_first():
    state = given(SPOT, OTHER, SPOT, prices={OTHER.pool: PriceChanged(0.0, OTHER.pool, 2_000_000, 3_000_000)})
    assert plan(want(3, 0, max_micros_h=4_000_000), state, [SPOT], NOTHING, 0) == []
    assert plan(want(3, 0, max_micros_h=3_999_999), state, [], NOTHING, 0)[0] == Drain(
        "f-1", "hosts cost $4.00/h, and max_hourly_cost leaves $3.999999/h for them")


def test_what_the_ledger_says_of_a_pool_decides_where_an_offer_is_older():
    dearer = {"prices": {SPOT.pool: PriceChanged(0.0, SPOT.pool, 1_300_000, 3_000_000)}}
    assert plan(want(3, 0, max_micros_h=3_700_000), given(SPOT, SPOT, **dearer), [SPOT], NOTHING, 0) == [
        Wait("1 of 3 hosts missing: max_hourly_cost leaves $1.10/h for them, and the cheapest is $1.30/h")]
    assert did(plan(want(3, 0, max_micros_h=3_900_000), given(SPOT, SPOT, **dearer), [SPOT], NOTHING, 0)) == [
        ("Launch", "spot")]


def test_what_the_ledger_said_of_a_pool_is_forgotten_an_hour_after_its_last_host():
    gone = replace(ran(SPOT, 600.0, taken=0)["f-8"], since=1000.0)
    state = given(prices={SPOT.pool: PriceChanged(0.0, SPOT.pool, 1_300_000, 3_000_000)}, ended={"f-8": gone})
    limit = want(1, 0, max_micros_h=1_200_000)
    assert did(plan(limit, state, [SPOT], NOTHING, now=4599.0)) == [("Wait", "")]
    assert did(plan(limit, state, [SPOT], NOTHING, now=4600.0)) == [("Launch", "spot")]


def test_a_booting_host_counts_for_what_it_was_launched_at_whatever_is_heard_of_its_price():
    state = given(SPOT, SPOT, SPOT, prices={SPOT.pool: PriceChanged(0.0, SPOT.pool, 1_300_000, 3_000_000)})
    booting = replace(state, hosts=(*state.hosts[:2], replace(state.hosts[2], state=HostState.LAUNCHING)))
    limit = want(3, 0, max_micros_h=3_700_000)
    assert plan(limit, booting, [SPOT], NOTHING, 0) == []
    assert did(plan(limit, state, [SPOT], NOTHING, 0))[0] == ("Drain", "f-2")


def test_of_hosts_that_cost_too_much_those_that_only_boot_go_before_those_that_work():
    state = given(SPOT, SPOT, prices={SPOT.pool: PriceChanged(0.0, SPOT.pool, 1_300_000, 3_000_000)})
    state = replace(state, hosts=(replace(state.hosts[0], state=HostState.LAUNCHING), state.hosts[1]))
    assert did(plan(want(2, 0, max_micros_h=2_200_000), state, [SPOT], NOTHING, 0))[0] == ("Terminate", "f-0")


def test_hosts_that_only_boot_are_ended_not_drained():
    state = given(SPOT)
    state = replace(state, hosts=(replace(state.hosts[0], state=HostState.LAUNCHING),))
    assert plan(want(0, 1), state, [], NOTHING, 0)[0] == Terminate("f-0", "1 spot host, 0 wanted")


# ---- which pool


def ran(offer: Offer, seconds: float, taken: int, name: str = "f-8") -> dict[str, Host]:
    runs = tuple(Run(n * seconds, (n + 1) * seconds, taken=n < taken) for n in range(max(1, taken)))
    return {name: Host(name, Role.WORKER, offer, HostState.GONE, 0.0, 0.0, 0.0, provider_id="i", runs=runs)}


def test_a_pool_of_which_nothing_is_known_is_worth_its_price():
    assert useful_prices(FleetState(), ALL, [], 0.0) == {SPOT: 1_000_000.0, FULL: 3_000_000.0}


def test_an_expected_life_begins_at_the_prior_and_moves_to_what_is_seen():
    assert PoolLifetime().expected_s() == PRIOR_LIFE_S
    assert PoolLifetime(1e9, 1000).expected_s() == (1e9 + PRIOR_LIFE_S) / 1001
    assert PoolLifetime(3600.0, 0).expected_s() > PRIOR_LIFE_S


def test_a_pool_whose_hosts_were_taken_soon_is_worth_more_than_its_price_by_the_boots_that_wastes():
    state = FleetState(ended=ran(SPOT, 600.0, taken=9))
    life_s = (9 * 600.0 + PRIOR_LIFE_S) / 10
    lost_s = BOOT_S + STALL_S
    assert useful_prices(state, [SPOT], [], 6000.0)[SPOT] == (
        1_000_000 * (1 + lost_s / life_s) / (1 + lost_s / PRIOR_LIFE_S))


def test_before_lives_were_seen_the_clouds_interruption_band_tells_of_them():
    """A life of 1.64 h, which was measured in the highest band, and log(1 - 25 %) / log(1 - share) of it in others."""
    most_s = 273.1 * 3600 / 167
    assert [expected_lifetime_s(b) for b in (4, 0)] == approx([most_s, most_s * log(1 - 0.25) / log(1 - 0.025)])
    often = replace(SPOT, life_s=expected_lifetime_s(4))
    seldom = replace(OTHER, price_micros_h=1_020_000, life_s=expected_lifetime_s(0))
    assert prior_s(often) == expected_lifetime_s(4) and prior_s(SPOT) == PRIOR_LIFE_S
    lost_s, full = BOOT_S + STALL_S, replace(FULL, life_s=60.0)
    worth = useful_prices(FleetState(), [often, seldom, full], [], 0.0)
    assert worth[often] == approx(1_000_000 * (1 + lost_s / most_s) / (1 + lost_s / PRIOR_LIFE_S))
    assert worth[full] == 3_000_000.0
    assert plan(want(1, 0), FleetState(), [often, seldom], NOTHING, 0)[0].offer == seldom, "2 % dearer, and lasts"
    seen = FleetState(ended=ran(often, 50 * 3600.0, taken=20))
    assert plan(want(1, 0), seen, [often, seldom], NOTHING, now=2e7)[0].offer == often, "what was seen counts more"


def test_the_dearer_pool_is_taken_where_hosts_of_the_cheaper_one_never_last_and_the_reason_says_so():
    state = FleetState(ended=ran(SPOT, 60.0, taken=2000))
    launch = plan(want(1, 0), state, [SPOT, OTHER], NOTHING, now=200_000.0)[0]
    assert launch.offer == OTHER
    assert launch.why == ("1 host missing; $1.10/h in fake/zone-b/g5/spot, the cheapest of 2 pools; about "
                          "$1.10/h of useful work")


def test_each_launch_says_why_its_pool():
    whys = [a.why.partition(", ")[2] for a in plan(want(3, 0), FleetState(), [SPOT, OTHER], NOTHING, 0)]
    cheapest = "the cheapest of 2 pools"
    assert whys == [cheapest, "to spread: fake/zone-a/g5/spot has 1 already", cheapest]
    burnt = FleetState(reclaimed_at={SPOT.pool: 0.0})
    assert plan(want(1, 0), burnt, [SPOT, OTHER], NOTHING, 1)[0].why.endswith(
        "as hosts in fake/zone-a/g5/spot were just interrupted")
    scarce = replace(SPOT, room=1)
    assert [a.why.partition(", ")[2] for a in plan(want(3, 0), FleetState(), [scarce, OTHER], NOTHING, 0)][2] == (
        "as fake/zone-a/g5/spot has no more room")


def test_traffic_between_zones_is_counted_where_its_price_and_the_jobs_bytes_are_known():
    """2 GiB a step and worker, a step a second, two hosts: each edge bears 2 GiB x 3600 an hour, at $0.02 a GiB; the
    first host in another zone makes two edges."""
    rates = RatesStamped(0.0, "fake", "r", Rates(zone_micros_gib=20_000))
    state = fold([rates, JobProgress(1.0, "j", 1, 1.0, step_bytes=2 * 2**30)])
    there = given(SPOT).hosts
    found = useful_prices(state, [SPOT, OTHER], there, 0.0)
    assert found == {SPOT: 1_000_000.0, OTHER: 1_100_000 + 2 * 2 * 3600 * 20_000}
    assert plan(want(2, 0), replace(state, hosts=there, launches=1), [SPOT, OTHER], NOTHING, 0)[0].offer == SPOT
    assert plan(want(2, 0), given(SPOT), [SPOT, OTHER], NOTHING, 0)[0].offer == OTHER  # spread, where it costs nothing
