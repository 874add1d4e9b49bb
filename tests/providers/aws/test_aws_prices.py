"""Prices: what EC2 and the Pricing API say, as points of pools."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfleet.errors import NeedsPerson
from spotfleet.model import Need, PricePoint
from spotfleet.providers.aws import prices
from spotfleet.providers.aws.prices import by_region, endpoint, histories
from spotfleet.providers.kit.mapping.prices import in_force, micros

SPOT = "aws/us-east-1a/g5.xlarge/spot"
ON_DEMAND = "aws/us-east-1a/t3.small/on-demand"


@pytest.mark.parametrize(("dollars", "expected"), [
    ("0.4021", 402_100), ("1.0060000000", 1_006_000), ("0.0000005", 1), ("0.00000049", 0), ("98.32", 98_320_000),
    ("0", 0), ("4E-1", 400_000),
])
def test_dollars_become_whole_millionths_half_up(dollars, expected):
    assert micros(dollars) == expected


@pytest.mark.parametrize("text", ["", "free", "NaN", "Infinity", "1,50"])
def test_what_is_no_price_is_refused(text):
    with pytest.raises(ValueError, match="is no price"):
        micros(text)


@given(st.decimals(0, 100_000, allow_nan=False, places=10))
def test_rounding_is_half_up_for_every_price(dollars):
    assert micros(str(dollars)) == int((dollars * Decimal(10) ** 6).quantize(Decimal(1), ROUND_HALF_UP))


def item(at: float, dollars: str, zone: str = "us-east-1a", kind: str = "g5.xlarge", what: str = "Linux/UNIX") -> dict:
    return {"AvailabilityZone": zone, "InstanceType": kind, "ProductDescription": what, "SpotPrice": dollars,
            "Timestamp": datetime.fromtimestamp(at, UTC)}


def test_a_history_is_ordered_and_told_by_zone_and_type():
    assert histories([item(30.0, "0.3"), item(10.0, "0.1"), item(20.0, "0.2", "us-east-1b")]) == {
        ("us-east-1a", "g5.xlarge"): [(10.0, 100_000), (30.0, 300_000)],
        ("us-east-1b", "g5.xlarge"): [(20.0, 200_000)],
    }


def test_both_descriptions_of_linux_are_one_price_and_the_plain_one_counts():
    both = [item(10.0, "0.5", what="Linux/UNIX (Amazon VPC)"), item(10.0, "0.4"), item(10.0, "0.4")]
    assert histories(both) == {("us-east-1a", "g5.xlarge"): [(10.0, 400_000)]}
    assert histories(both[:1]) == {("us-east-1a", "g5.xlarge"): [(10.0, 500_000)]}


POINTS = st.lists(st.tuples(st.integers(0, 1000).map(float), st.integers(1, 5)), max_size=12,
                  unique_by=lambda p: p[0]).map(sorted)


def price_at(points: list[tuple[float, int]], at: float) -> int | None:
    return next((price for begin, price in reversed(points) if begin <= at), None)


@given(POINTS, st.integers(0, 1000).map(float))
def test_what_is_kept_of_a_history_gives_the_same_price_at_every_moment_from_since_on(points, since):
    kept = in_force(points, since)
    assert [p for p in kept[1:] if p[0] <= since] == []
    assert all(a[1] != b[1] for a, b in pairwise(kept))
    for at in {since, *(p[0] for p in points if p[0] >= since), 2000.0}:
        assert price_at(kept, at) == price_at(points, at)


def product(region: str, usd: str, unit: str = "Hrs", market: str = "OnDemand") -> str:
    return json.dumps({
        "product": {"attributes": {"regionCode": region, "instanceType": "g5.xlarge", "marketoption": market}},
        "terms": {"OnDemand": {"X.Y": {"priceDimensions": {"X.Y.Z": {"unit": unit, "pricePerUnit": {"USD": usd}}}}},
                  "Reserved": {"X.R": {"priceDimensions": {"X.R.Z": {"unit": "Hrs", "pricePerUnit": {"USD": "0.1"}}}}}},
    })


def test_an_on_demand_price_is_read_out_of_the_texts_of_the_price_list():
    texts = [product("us-east-1", "1.0060000000"), product("eu-west-1", "1.1230000000"), product("us-east-1", "0.00"),
             product("us-west-2", "900", unit="Quantity"), product("us-east-1", "31.4", market="CapacityBlock"), "{}"]
    assert by_region(texts) == {"us-east-1": 1_006_000, "eu-west-1": 1_123_000}


def test_of_several_on_demand_prices_of_a_region_the_highest_counts_in_any_order():
    texts = [product("us-east-1", "1.006"), product("us-east-1", "0.9")]
    assert by_region(texts) == by_region(texts[::-1]) == {"us-east-1": 1_006_000}


@pytest.mark.parametrize(("region", "asked"), [("us-west-2", "us-east-1"), ("eu-west-1", "eu-central-1"),
                                               ("ap-northeast-1", "ap-south-1"), ("sa-east-1", "us-east-1")])
def test_the_pricing_api_is_asked_where_it_is(region, asked):
    assert endpoint(region) == asked


def test_the_price_in_force_comes_first_then_every_change(cloud, aws):
    long_ago = time.time() - 3600.0
    first = aws().prices([SPOT], long_ago)
    assert [(p.pool, p.at <= long_ago) for p in first] == [(SPOT, True)]
    cloud.set_price("us-east-1a", "g5.xlarge", 0.41)
    assert [p.micros_h for p in aws().prices([SPOT], long_ago)] == [first[0].micros_h, 410_000]
    since = time.time() + 1.0  # EC2 tells whole seconds
    assert [(p.micros_h, p.at <= since) for p in aws().prices([SPOT], since)] == [(410_000, True)]


def test_pools_of_several_regions_zones_and_markets_are_answered_at_once(cloud, aws):
    other = "aws/us-west-2b/g5.xlarge/spot"
    cloud.set_price("us-west-2b", "g5.xlarge", 0.33)
    since = time.time()
    found = aws(regions=("us-east-1", "us-west-2")).prices([SPOT, other, ON_DEMAND], since)
    assert {p.pool for p in found} == {SPOT, other, ON_DEMAND}
    assert [p.micros_h for p in found if p.pool == other] == [330_000]
    assert [p for p in found if p.pool == ON_DEMAND] == [PricePoint(ON_DEMAND, since, 20_800)]


def test_ec2_is_not_asked_for_prices_of_its_future(cloud, aws):
    """Our clock may be ahead of EC2's, and a host's run begins by EC2's."""
    provider = aws()
    for since in (time.time(), time.time() + 30.0):
        assert provider.prices([SPOT], since)
    provider.offers(Need(instance_type="g5.xlarge"))
    asked = [c.params["StartTime"] for c in cloud.calls if c.action == "ec2:DescribeSpotPriceHistory"]
    assert len(asked) == 3
    assert all(datetime.fromisoformat(str(at)).timestamp() < time.time() - 60.0 for at in asked)


def test_a_pool_that_nobody_sells_has_no_price(aws):
    assert aws().prices(["aws/us-east-1a/g9.xlarge/spot"], time.time()) == []


def test_prices_are_asked_for_once_a_minute_at_most_however_often_they_are_needed(cloud, aws):
    provider, since = aws(), time.time()
    cloud.forget_calls()
    for _ in range(5):
        provider.prices([SPOT], since)
    assert [c.action for c in cloud.calls] == ["ec2:DescribeSpotPriceHistory"]


def test_without_the_pricing_api_spot_hosts_are_offered_and_their_savings_are_unknown(cloud, aws):
    cloud.deny("owner", {"pricing:GetProducts"})
    provider = aws()
    found = provider.offers(Need(instance_type="g5.xlarge"))
    assert found
    assert {o.on_demand_micros_h for o in found} == {0}
    known = prices.on_demand(provider.account, ["g5.xlarge"], ["us-east-1"])
    assert known.micros_h == {}
    assert "pricing:GetProducts" in known.why


def test_without_the_pricing_api_the_laptop_hears_why_nothing_is_on_offer_on_demand(cloud, aws):
    cloud.deny("owner", {"pricing:GetProducts"})
    with pytest.raises(NeedsPerson, match="denied: pricing:GetProducts"):
        aws().offers(Need(use_spot=False))
    assert aws(side="dispatcher").offers(Need(use_spot=False)) == []


def test_a_pricing_api_that_is_down_is_left_alone_for_some_minutes(cloud, aws, hurried):
    cloud.fault("pricing:GetProducts", code="InternalError", times=1000)
    provider = aws()
    assert provider.offers(Need(instance_type="g5.xlarge"))
    asked = sum(c.service == "pricing" for c in cloud.calls)
    provider.offers(Need(instance_type="g5.2xlarge"))
    assert sum(c.service == "pricing" for c in cloud.calls) == asked
