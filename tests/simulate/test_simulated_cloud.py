"""The cloud that is made of records."""

from __future__ import annotations

import pytest

from spotfleet.errors import NoCapacity
from spotfleet.model import BillingRules, CloudState, Market, Need, Offer, PricePoint, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.simulate.world.cloud import SimulatedCloud, SpotPool, on_demand_like

SPOT = Offer("aws", "r", "ra", "big", Market.SPOT, 1, 0, 3_000_000)
FULL = on_demand_like(SPOT)


def cloud(*capacity: tuple[float, int], prices=((0.0, 1_000_000),), notice_s: float = 120.0) -> SimulatedCloud:
    return SimulatedCloud([SpotPool(SPOT, capacity, prices)], [FULL], 0.0, notice_s, BillingRules(1))


def launch(where: SimulatedCloud, name: str, offer: Offer = SPOT) -> None:
    where.launch(LaunchRequest(name, "f", Role.WORKER, offer, Boot("x")))


def listed(where: SimulatedCloud) -> dict[str, tuple[CloudState, bool]]:
    return {h.request_id: (h.state, h.runs[-1].taken) for h in where.hosts("f")}


RUNS, TAKEN, ENDED = (CloudState.RUNNING, False), (CloudState.TERMINATED, True), (CloudState.TERMINATED, False)


def test_there_is_room_for_as_many_as_the_record_says():
    it = cloud((0.0, 2))
    launch(it, "f-0"), launch(it, "f-1")
    with pytest.raises(NoCapacity):
        launch(it, "f-2")
    assert listed(it) == {"f-0": RUNS, "f-1": RUNS}


def test_the_room_of_all_pools_and_their_prices_are_those_of_the_moment():
    it = cloud((0.0, 3), (1000.0, 2), (2000.0, 4), prices=((0.0, 1_000_000), (500.0, 2_000_000)))
    seen = [(it.room(), it.sold())]
    launch(it, "f-0")
    seen.append((it.room(), it.sold()))
    it.interrupt("f-0", 3000.0)
    seen.append((it.room(), it.sold()))
    for at in (900.0, 1900.0, 2000.0):
        it.advance(at)
        seen.append((it.room(), it.sold()))
    it.terminate("f-0")
    seen.append((it.room(), it.sold()))
    assert seen == [(3, (1_000_000,)), (2, (1_000_000,)), (3, (1_000_000,)), (2, (2_000_000,)), (2, (2_000_000,)),
                    (4, (2_000_000,)), (4, (2_000_000,))]


def test_a_launch_that_is_asked_for_again_makes_no_second_host():
    it = cloud((0.0, 1))
    launch(it, "f-0"), launch(it, "f-0")
    assert listed(it) == {"f-0": RUNS}


def test_on_demand_there_is_always_room():
    it = cloud((0.0, 0))
    for n in range(50):
        launch(it, f"f-{n}", FULL)
    assert len(it.live()) == 50


def test_what_the_record_has_no_room_for_is_warned_and_then_taken_at_that_instant():
    it = cloud((0.0, 3), (1000.0, 1))
    for n in range(3):
        launch(it, f"f-{n}")
    assert it.next_due() == 880.0
    it.advance(879.0)
    assert it.notices() == {}
    it.advance(880.0)
    warned = it.notices()
    assert list(warned.values()) == [1000.0, 1000.0]
    it.advance(1005.0)
    assert {n for n, s in listed(it).items() if s == TAKEN} == set(warned)
    assert it.machines[next(iter(warned))].ended_at == 1000.0
    it.advance(2000.0)
    assert set(listed(it)) == {"f-0", "f-1", "f-2"} - set(warned)


def test_no_host_is_taken_in_by_a_pool_that_would_lose_it_within_a_notice():
    it = cloud((0.0, 1), (1000.0, 0), (1010.0, 1))
    it.advance(881.0)
    assert it.free(SPOT.pool) == 0
    it.advance(1010.0)
    assert it.free(SPOT.pool) == 1


def test_without_notice_hosts_are_taken_at_once():
    it = cloud((0.0, 1), (1000.0, 0), notice_s=0.0)
    launch(it, "f-0")
    assert it.next_due() == 1000.0
    it.advance(1000.0)
    assert listed(it) == {"f-0": TAKEN}


def test_a_host_that_left_in_time_is_not_taken():
    it = cloud((0.0, 1), (1000.0, 0))
    launch(it, "f-0")
    it.advance(900.0)
    it.terminate("f-0")
    it.terminate("f-0"), it.terminate("nobody")
    it.advance(920.0)
    assert listed(it) == {"f-0": ENDED}


def test_offers_are_those_of_the_need_at_the_price_of_now():
    it = cloud((0.0, 1), prices=((0.0, 1_000_000), (500.0, 1_200_000)))
    assert [o.price_micros_h for o in it.offers(Need())] == [1_000_000]
    it.advance(500.0)
    assert [o.price_micros_h for o in it.offers(Need())] == [1_200_000]
    assert it.offers(Need(use_spot=False)) == [FULL]
    assert it.offers(Need(max_micros_h=1_100_000)) == []


def test_prices_are_the_one_in_force_and_every_later_one():
    it = cloud((0.0, 1), prices=((-50.0, 900_000), (0.0, 1_000_000), (500.0, 1_200_000), (900.0, 1_500_000)))
    it.advance(600.0)
    assert it.prices([SPOT.pool], 100.0) == [PricePoint(SPOT.pool, 0.0, 1_000_000),
                                             PricePoint(SPOT.pool, 500.0, 1_200_000)]


def test_the_bill_follows_the_price_within_a_run():
    it = cloud((0.0, 1), prices=((0.0, 3_600_000), (100.0, 7_200_000)))
    launch(it, "f-0")
    it.advance(150.0)
    assert it.invoice().micros == 100 * 1000 + 50 * 2000
