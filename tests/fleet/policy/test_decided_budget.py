"""When a fleet with a limit on its cost warns and ends, and which limits nothing on sale can keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given as given_any
from hypothesis import strategies as st

from spotfleet.fleet.policy.budget import ENDING_S, Budget, describe, level, too_small
from spotfleet.model import Market, Nodes, Offer

SPOT = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 1, 1_000_000, 3_000_000, "A10G")
FULL = replace(SPOT, market=Market.ON_DEMAND, price_micros_h=3_000_000)


@pytest.mark.parametrize(("spent", "expected"), [(0, 0), (79_199_999, 0), (79_200_000, 80), (94_049_999, 80),
                                                 (94_050_000, 95), (99_000_000, 100), (200_000_000, 100)])
def test_a_fleet_warns_at_80_and_95_percent_of_what_it_spends_before_it_ends_while_that_still_fits_in(spent, expected):
    assert level(Budget(100_000_000, spent, burn=12_000_000)) == expected  # ending takes 5 minutes: 1 dollar


def test_what_the_dispatcher_costs_while_it_keeps_the_results_is_part_of_the_end():
    budget = Budget(10_000_000, 6_000_000, burn=1_200_000, kept_burn=100_000, kept_s=24 * 3600.0)
    assert budget.ending == 100_000 + 2_400_000
    assert [level(replace(budget, spent=s)) for s in (5_999_999, 6_000_000, 7_124_999, 7_125_000)] == [0, 80, 80, 95]
    assert level(replace(budget, spent=7_500_000)) == 100


@given_any(st.integers(1000, 10**9), st.integers(0, 10**9), st.integers(0, 10**7), st.floats(0.0, 90_000.0))
def test_no_fleet_ends_that_has_not_warned_while_there_was_money(limit, burn, kept_burn, kept_s):
    budget = Budget(limit, 0, burn, kept_burn, kept_s)
    before = limit - budget.ending - 1
    if before >= 100:
        assert level(replace(budget, spent=before)) == 95 and level(replace(budget, spent=before * 9 // 10)) == 80


def test_it_says_how_long_the_money_lasts():
    assert describe(Budget(100_000_000, 81_000_000, burn=12_000_000)) == (
        "$81.00 of $100.00 are spent at $12.0000/h, which lasts 90 min more")
    assert describe(Budget(100_000_000, 99_000_000, burn=12_000_000)) == (
        "$99.00 of $100.00 are spent, and a clean shutdown takes up to $1.00")


@given_any(st.integers(1, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_fleet_that_ends_when_told_to_stays_below_its_limit(limit, spent, burn):
    """It is told to at every tick, so the end begins at the first moment that leaves no more than the ending takes."""
    budget = Budget(limit, spent, burn)
    if level(budget) < 100:
        assert budget.spent + burn * ENDING_S / 3600 < limit


def test_a_limit_below_the_cheapest_offer_is_too_small_and_the_offer_is_named():
    assert too_small(2_000_000, Nodes(2, 3, 3), [FULL, SPOT], 50_000) == (
        "$2.0000/h is less than 2 x the cheapest offer, $1.0000/h in fake/zone-a/g5/spot, and a dispatcher for "
        "$0.0500/h cost: $2.0500/h")
    assert too_small(2_050_000, Nodes(2, 3, 3), [FULL, SPOT], 50_000) == ""
    assert too_small(0, Nodes(2, 3, 3), [FULL, SPOT], 50_000) == ""
    assert too_small(1, Nodes(2, 3, 3), [], 0) == ""  # that nothing is on sale is said elsewhere
