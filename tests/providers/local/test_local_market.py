"""The emulated cloud's rules, on a clock that moves when told. Hosts are entries; no process runs."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from spotfleet import model
from spotfleet.errors import NeedsPerson, NoCapacity, UsageError
from spotfleet.model import BillingRules, CloudState, Need, PricePoint, Role, Run
from spotfleet.providers.local.market.book import HostOrder
from spotfleet.providers.local.market.market import LocalMarket
from spotfleet.providers.local.market.pools import LocalPool, MarketRules, default_rules

T0 = 1_800_000_000.0
SPOT = "local/local-a/gpu/spot"
OTHER = "local/local-b/gpu/spot"
FULL_PRICE = "local/local-a/gpu/on-demand"


def a_market(**rules) -> LocalMarket:
    """Two hosts of room per pool; $3.60 an hour on spot, so that a second is 1000 micro-dollars."""
    pools = (
        LocalPool("local-a", "gpu", model.Market.SPOT, 3_600_000, 2, accelerator="EMU"),
        LocalPool("local-b", "gpu", model.Market.SPOT, 3_600_000, 2, accelerator="EMU"),
        LocalPool("local-a", "gpu", model.Market.ON_DEMAND, 7_200_000, 2, accelerator="EMU"),
        LocalPool("local-a", "two", model.Market.SPOT, 1_800_000, 2, slots=2, accelerator="EMU"),
    )
    return LocalMarket(MarketRules(pools, **({"billing": BillingRules(minimum_s=1)} | rules)), T0)


def launch(market: LocalMarket, name: str = "f-1", at: float = 0.0, pool: str = SPOT,
           behavior: str = "terminate") -> None:
    market.launch(HostOrder(name, "f", Role.WORKER, pool, behavior), T0 + at)


def line(market: LocalMarket, at: float, name: str = "f-1"):
    return next(h for h in market.listing("f", T0 + at) if h.request_id == name)


def runs(market: LocalMarket, at: float, name: str = "f-1") -> list[tuple[float, float | None, bool]]:
    """(started, ended, taken), in seconds after T0."""
    return [(r.started_at - T0, None if r.ended_at is None else r.ended_at - T0, r.taken)
            for r in line(market, at, name).runs]


# what is sold


def test_an_offer_has_the_price_of_its_pool_now_and_the_full_price_beside_it():
    offer = a_market().offers(Need(instance_type="gpu", zone="local-a"), T0)[0]
    assert (offer.pool, offer.price_micros_h, offer.on_demand_micros_h) == (SPOT, 3_600_000, 7_200_000)


@pytest.mark.parametrize(("need", "pools"), [
    (Need(accelerator="emu", accelerator_count=1), [SPOT, OTHER]),
    (Need(accelerator="EMU", accelerator_count=2), ["local/local-a/two/spot"]),
    (Need(zone="local-b"), [OTHER]),
    (Need(use_spot=False), [FULL_PRICE]),
    (Need(max_micros_h=2_000_000), ["local/local-a/two/spot"]),
    (Need(region="elsewhere"), []),
    (Need(accelerator="V100"), []),
])
def test_a_need_is_satisfied_by_exactly_what_it_names(need, pools):
    assert [o.pool for o in a_market().offers(need, T0)] == pools


def test_prices_by_default_differ_by_zone_move_within_a_minute_and_are_the_same_for_everybody():
    first, second = LocalMarket(default_rules(), T0), LocalMarket(default_rules(), T0)
    spot = [o.pool for o in first.offers(Need(accelerator="EMU", accelerator_count=1), T0)]
    points = first.prices(spot, T0, T0 + 60)
    assert points == second.prices(spot, T0, T0 + 60)
    for pool in spot:
        moves = [p.micros_h for p in points if p.pool == pool]
        assert len(moves) >= 3 and all(850_000 < m < 1_200_000 for m in moves)
    assert len({p.micros_h for p in points if p.at == T0}) == 3


def test_spot_costs_about_a_third_by_default():
    for offer in LocalMarket(default_rules(), T0).offers(Need(), T0):
        assert 0.25 < offer.price_micros_h / offer.on_demand_micros_h < 0.45


def test_a_price_history_begins_with_the_price_in_force_and_lists_every_change():
    market = a_market()
    market.set_price(SPOT, 1_000_000, T0 + 10)
    market.set_price(SPOT, 2_000_000, T0 + 10, at=T0 + 20)
    told = market.prices([SPOT, OTHER], T0 + 12, T0 + 30)
    assert told == [PricePoint(OTHER, T0, 3_600_000), PricePoint(SPOT, T0 + 10, 1_000_000),
                    PricePoint(SPOT, T0 + 20, 2_000_000)]
    assert market.prices([SPOT], 0.0, T0 + 15)[0] == PricePoint(SPOT, T0, 3_600_000)


def test_a_price_history_does_not_depend_on_when_it_is_asked_for():
    pool = "local/local-b/gpu.small/spot"
    whole = LocalMarket(default_rules(), T0).prices([pool], T0, T0 + 600)
    market, pieces = LocalMarket(default_rules(), T0), []
    for i in range(60):
        pieces += market.prices([pool], T0 + 10 * i, T0 + 10 * i + 10)
    told = sorted(set(pieces), key=lambda p: p.at)
    changes = told[:1] + [b for a, b in pairwise(told) if b.micros_h != a.micros_h]
    assert changes == whole and len(whole) > 20


def test_a_price_cannot_be_set_in_the_past():
    with pytest.raises(UsageError, match="past"):
        a_market().set_price(SPOT, 1, T0 + 10, at=T0 + 5)


def test_two_prices_of_one_instant_follow_each_other_so_that_nothing_told_changes():
    market = a_market()
    launch(market)
    market.set_price(SPOT, 1_000_000, T0 + 5)
    told = market.prices([SPOT], T0, T0 + 5)
    market.set_price(SPOT, 2_000_000, T0 + 5)
    assert market.prices([SPOT], T0, T0 + 5) == told
    assert market.prices([SPOT], T0, T0 + 6) == [*told, PricePoint(SPOT, T0 + 5 + 1 / 1024, 2_000_000)]


# launches


def test_a_launched_host_runs_after_its_boot_and_is_billed_from_then():
    market = a_market(boot_s=30.0)
    launch(market)
    assert (line(market, 29).state, runs(market, 29)) == (CloudState.PENDING, [])
    assert (line(market, 31).state, runs(market, 31)) == (CloudState.RUNNING, [(30.0, None, False)])


def test_the_same_request_makes_one_host_also_after_its_end():
    market = a_market()
    launch(market)
    launch(market, at=1)
    market.terminate("f-1", T0 + 2)
    launch(market, at=3)
    assert [h.state for h in market.listing("f", T0 + 3)] == [CloudState.TERMINATED]


def test_a_request_id_cannot_be_used_again_for_another_host():
    market = a_market()
    launch(market)
    with pytest.raises(UsageError, match="request_id"):
        launch(market, pool=OTHER)


def test_a_full_pool_refuses_and_has_room_again_when_a_host_ends():
    market = a_market()
    launch(market, "f-1")
    launch(market, "f-2")
    with pytest.raises(NoCapacity) as caught:
        launch(market, "f-3")
    assert caught.value.scope == "pool" and len(market.listing("f", T0)) == 2
    market.terminate("f-1", T0 + 1)
    launch(market, "f-3", at=1)


@pytest.mark.parametrize(("scope", "refused"), [
    ("pool", [SPOT]),
    ("type", [SPOT, OTHER]),
    ("region", [SPOT, OTHER, FULL_PRICE]),
    ("account", [SPOT, OTHER, FULL_PRICE]),
])
def test_a_refusal_covers_its_scope_until_it_is_over(scope, refused):
    market = a_market()
    market.refuse(SPOT, scope, T0, for_s=60)
    for pool in (SPOT, OTHER, FULL_PRICE):
        if pool in refused:
            with pytest.raises(NoCapacity) as caught:
                launch(market, pool, 59, pool)
            assert caught.value.scope == scope
        else:
            launch(market, pool, 59, pool)
    for pool in refused:
        launch(market, pool, 61, pool)


def test_a_refusal_can_ask_for_a_person_and_be_lifted():
    market = a_market()
    market.refuse(SPOT, "person", T0)
    with pytest.raises(NeedsPerson):
        launch(market, at=1e6)
    market.allow(SPOT, T0 + 1e6)
    launch(market, at=1e6)


def test_an_unknown_pool_or_scope_is_named():
    with pytest.raises(UsageError, match="nowhere"):
        launch(a_market(), pool="nowhere")
    with pytest.raises(UsageError, match="galaxy"):
        a_market().refuse(SPOT, "galaxy", T0)


# interruptions


def test_a_notice_ends_the_run_at_its_deadline_however_late_anybody_looks():
    market = a_market()
    launch(market)
    market.interrupt("f-1", 120, T0 + 10)
    assert line(market, 129).state is CloudState.RUNNING
    assert runs(market, 5000) == [(0.0, 130.0, True)]
    assert line(market, 5000).why == "taken by the cloud after a notice"


def test_without_notice_a_host_is_gone_at_once():
    market = a_market()
    launch(market)
    market.interrupt("f-1", None, T0 + 10)
    assert runs(market, 10) == [(0.0, 10.0, True)]
    assert line(market, 10).state is CloudState.TERMINATED


def test_a_withdrawn_notice_takes_nothing():
    market = a_market()
    launch(market)
    market.interrupt("f-1", 120, T0)
    market.withdraw_notice("f-1", T0 + 60)
    assert runs(market, 500) == [(0.0, None, False)]


def test_our_own_terminate_during_a_notice_is_ours():
    market = a_market()
    launch(market)
    market.interrupt("f-1", 120, T0)
    market.terminate("f-1", T0 + 60)
    assert runs(market, 500) == [(0.0, 60.0, False)]


def test_what_the_cloud_takes_it_keeps_from_the_pool_for_a_while():
    market = a_market(reclaim_s=30.0)
    launch(market, "f-1")
    launch(market, "f-2")
    market.interrupt("f-1", None, T0)
    with pytest.raises(NoCapacity):
        launch(market, "f-3", at=29)
    launch(market, "f-3", at=31)


def test_a_stopped_host_is_not_billed_and_returns_when_its_room_does():
    market = a_market(reclaim_s=30.0)
    launch(market, behavior="stop")
    market.interrupt("f-1", 10, T0)
    assert line(market, 20).state is CloudState.STOPPED
    assert runs(market, 100) == [(0.0, 10.0, True), (40.0, None, False)]
    assert line(market, 100).state is CloudState.RUNNING


def test_a_stopped_host_waits_while_its_pool_is_full():
    market = a_market(reclaim_s=30.0)
    for name in ("f-1", "f-2"):
        launch(market, name, behavior="stop")
    market.set_capacity(SPOT, 1, T0)
    market.interrupt("f-1", None, T0)
    assert line(market, 1000).state is CloudState.STOPPED
    market.terminate("f-2", T0 + 1000)
    assert runs(market, 1001) == [(0.0, 0.0, True), (1000.0, None, False)]


def test_more_capacity_brings_stopped_hosts_back_the_longest_waiting_first():
    market = a_market()
    launch(market, "f-1", behavior="stop")
    launch(market, "f-2", behavior="stop")
    market.set_capacity(SPOT, 0, T0)
    market.interrupt("f-2", None, T0 + 1)
    market.interrupt("f-1", None, T0 + 2)
    market.set_capacity(SPOT, 1, T0 + 100)
    assert (line(market, 100, "f-2").state, line(market, 100, "f-1").state) == (CloudState.RUNNING, CloudState.STOPPED)


def test_a_stopped_host_can_be_told_to_return_and_a_running_one_cannot():
    market = a_market()
    launch(market, behavior="stop")
    with pytest.raises(UsageError, match="f-1"):
        market.return_host("f-1", T0)
    market.interrupt("f-1", None, T0 + 1)
    market.return_host("f-1", T0 + 2)
    assert runs(market, 3) == [(0.0, 1.0, True), (2.0, None, False)]


def test_a_stopped_host_that_we_terminate_never_returns():
    market = a_market()
    launch(market, behavior="stop")
    market.interrupt("f-1", None, T0)
    market.terminate("f-1", T0 + 1)
    assert line(market, 1e5).state is CloudState.TERMINATED and runs(market, 1e5) == [(0.0, 0.0, True)]


def test_a_host_taken_while_it_boots_never_ran():
    market = a_market(boot_s=60.0)
    launch(market)
    market.interrupt("f-1", 10, T0)
    assert (line(market, 1000).state, runs(market, 1000)) == (CloudState.TERMINATED, [])


def test_an_interruption_of_nothing_says_so():
    with pytest.raises(UsageError, match="f-9"):
        a_market().interrupt("f-9", None, T0)


def test_power_off_ends_the_run_as_our_own_doing():
    market = a_market()
    launch(market)
    market.power_off("f-1", T0 + 5)
    assert runs(market, 9) == [(0.0, 5.0, False)]


def test_a_host_that_we_end_is_listed_while_it_shuts_down_but_billed_no_more_and_one_taken_is_gone_at_once():
    market = a_market(shutdown_s=3.0)
    launch(market), launch(market, "f-2")
    market.terminate("f-1", T0 + 5)
    market.interrupt("f-2", None, T0 + 5)
    assert [line(market, 7, name).state for name in ("f-1", "f-2")] == [CloudState.RUNNING, CloudState.TERMINATED]
    assert [(r.ended_at, r.taken) for r in line(market, 7).runs] == [(None, False)]
    assert line(market, 8).state is CloudState.TERMINATED and runs(market, 8) == [(0.0, 5.0, False)]


def test_terminating_what_is_unknown_or_ended_is_no_error():
    market = a_market()
    launch(market)
    market.terminate("f-1", T0 + 5)
    before = line(market, 5)
    market.terminate("f-1", T0 + 50)
    market.terminate("f-9", T0 + 50)
    assert line(market, 50) == before


# listings


def test_a_lagging_listing_shows_the_past():
    market = a_market()
    launch(market, at=10)
    assert market.listing("f", T0 + 12, lag_s=5) == []
    market.terminate("f-1", T0 + 20)
    assert [h.state for h in market.listing("f", T0 + 22, lag_s=5)] == [CloudState.RUNNING]
    assert [h.state for h in market.listing("f", T0 + 25, lag_s=5)] == [CloudState.TERMINATED]


def test_ended_hosts_are_listed_for_a_week_and_billed_for_ever():
    market = a_market()
    launch(market)
    market.terminate("f-1", T0 + 10)
    assert len(market.listing("f", T0 + 6 * 86400)) == 1
    assert market.listing("f", T0 + 8 * 86400) == []
    assert market.invoice(T0 + 8 * 86400).hosts == {"f-1": 10_000}


def test_a_fleet_sees_its_own_hosts_only():
    market = a_market()
    launch(market)
    assert market.listing("g", T0) == []


# its memory


def test_a_market_read_back_from_its_file_goes_on_as_if_nothing_had_been():
    market = a_market()
    launch(market, "f-1", behavior="stop")
    launch(market, "f-2", pool=OTHER)
    market.set_price(SPOT, 5_000_000, T0 + 5)
    market.refuse(OTHER, "pool", T0 + 5, for_s=100)
    market.set_capacity(SPOT, 1, T0 + 5)
    market.interrupt("f-1", 3, T0 + 6)
    again = LocalMarket.from_json(json.loads(json.dumps(market.to_json())))
    assert again.book() == market.book()
    for each in (market, again):
        each.advance(T0 + 500)
    assert again.book() == market.book()
    assert again.invoice(T0 + 600) == market.invoice(T0 + 600)


def test_a_clock_that_is_set_back_counts_as_standing():
    market = a_market()
    launch(market, at=100)
    market.terminate("f-1", T0 + 50)
    assert line(market, 0).runs == (Run(T0 + 100, T0 + 100, False),)
