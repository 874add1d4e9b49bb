"""The emulated cloud's bill in figures worked out by hand: 3,600,000 micro-dollars an hour is 1000 a second."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotfleet import model
from spotfleet.model import BillingRules, PricePoint, Role, Run
from spotfleet.providers.local.market.book import HostOrder
from spotfleet.providers.local.market.invoice import host_micros
from spotfleet.providers.local.market.market import LocalMarket
from spotfleet.providers.local.market.pools import LocalPool, MarketRules

POOL = "local/local-a/gpu/spot"
FLAT = ((0.0, 3_600_000),)
NO_MINIMUM = BillingRules(minimum_s=0)


def bill(runs, prices=FLAT, rules=NO_MINIMUM, now=1000.0) -> int:
    """`runs` as (start, end, taken), prices as (from, micros_h)."""
    points = [PricePoint(POOL, at, micros_h) for at, micros_h in prices]

    def history(since: float, until: float) -> list[PricePoint]:
        before = [p for p in points if p.at <= since]
        return before[-1:] + [p for p in points if since < p.at <= until]

    return host_micros([Run(*run) for run in runs], history, rules, now)


def test_ten_seconds_cost_ten_times_a_second():
    assert bill([(5.0, 15.0, False)]) == 10_000


def test_a_begun_second_counts_in_full():
    assert bill([(0.0, 10.25, False)]) == 11_000


def test_a_run_that_goes_on_is_billed_up_to_now():
    assert bill([(990.0, None, False)], now=1000.0) == 10_000


def test_each_second_has_the_price_in_force_when_it_begins():
    assert bill([(0.0, 15.0, False)], [(0.0, 3_600_000), (10.0, 7_200_000)]) == 10 * 1000 + 5 * 2000
    # From 0.5 on: the tenth second begins at 9.5, before the change; the eleventh at 10.5.
    assert bill([(0.5, 15.5, False)], [(0.0, 3_600_000), (10.0, 7_200_000)]) == 10 * 1000 + 5 * 2000


def test_a_short_run_costs_the_minimum_at_its_last_price():
    rules = BillingRules(minimum_s=60)
    assert bill([(0.0, 3.0, False)], rules=rules) == 60_000
    assert bill([(0.0, 3.0, False)], [(0.0, 3_600_000), (2.0, 7_200_000)], rules) == 120_000
    assert bill([(0.0, 3.0, False)], [(0.0, 3_600_000), (3.0, 7_200_000)], rules) == 60_000
    assert bill([(0.0, 60.0, False)], rules=rules) == 60_000
    assert bill([(0.0, 0.0, False)], rules=rules) == 60_000


def test_every_run_has_its_own_minimum():
    assert bill([(0.0, 3.0, True), (100.0, 103.0, False)], rules=BillingRules(minimum_s=60)) == 120_000


def test_a_run_the_cloud_ends_early_is_free_and_ours_is_not():
    rules = BillingRules(minimum_s=60, free_if_taken_within_s=600)
    assert bill([(0.0, 600.0, True)], rules=rules) == 0
    assert bill([(0.0, 600.5, True)], rules=rules) == 601_000
    assert bill([(0.0, 30.0, False)], rules=rules) == 60_000


def test_a_host_is_rounded_once_half_up():
    half = [(0.0, 1800)]  # half a micro-dollar a second
    assert bill([(0.0, 1.0, False)], half) == 1
    assert bill([(0.0, 1.0, False), (5.0, 6.0, False)], half) == 1
    assert bill([(0.0, 1.0, False), (5.0, 6.0, False), (7.0, 8.0, False)], half) == 2
    assert bill([(0.0, 1.0, False)], [(0.0, 1799)]) == 0


def test_an_invoice_adds_up_its_hosts_over_weeks_of_stops_and_moving_prices():
    pool = LocalPool("local-a", "gpu", model.Market.SPOT, 3_600_000, 5)
    market = LocalMarket(MarketRules((pool,), BillingRules(minimum_s=1), reclaim_s=3600.0), 0.0)
    for name in ("f-1", "f-2"):
        market.launch(HostOrder(name, "f", Role.WORKER, POOL, "stop"), 0.0)
    market.interrupt("f-1", 120, 1000.0)  # runs 0 .. 1120, back at 4720
    market.set_price(POOL, 7_200_000, 10_000.0)
    week = 7 * 86_400.0
    market.terminate("f-1", 2 * week)
    market.terminate("f-2", 3 * week)
    first = 1120 * 1000 + (10_000 - 4720) * 1000 + (2 * 604_800 - 10_000) * 2000
    second = 10_000 * 1000 + (3 * 604_800 - 10_000) * 2000
    invoice = market.invoice(4 * week)
    assert invoice.hosts == {"f-1": first, "f-2": second} and invoice.micros == first + second


INSTANTS = st.integers(0, 200 * 1024).map(lambda n: n / 1024)


@settings(max_examples=200)
@given(st.lists(st.tuples(INSTANTS, INSTANTS, st.booleans()), max_size=3),
       st.dictionaries(INSTANTS, st.integers(0, 10**7), max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_a_bill_is_the_sum_of_its_seconds(spans, changes, minimum_s, free_s):
    runs = [(min(a, b), max(a, b), taken) for a, b, taken in spans]
    prices = sorted(({0.0: 3_600_000} | changes).items())

    def price(at: float) -> int:
        return next(micros_h for since, micros_h in reversed(prices) if since <= at)

    total = Fraction(0)
    for start, end, taken in runs:
        seconds = [start + i for i in range(ceil(end - start))]
        if taken and end - start <= free_s:
            continue
        if len(seconds) < minimum_s:
            seconds = [seconds[-1] if seconds else start] * minimum_s
        total += sum(Fraction(price(at), 3600) for at in seconds)
    assert bill(runs, prices, BillingRules(minimum_s, free_s)) == floor(total + Fraction(1, 2))


@pytest.mark.parametrize("now", [100.0, 100.5, 1e6])
def test_nothing_costs_nothing(now):
    assert bill([], now=now) == 0
