"""Capacity reservations and capacity blocks on AWS: offered within their room, targeted, listed, billed, checked."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from spotfleet.errors import NoCapacity
from spotfleet.model import FleetSpec, Market, Need
from spotfleet.providers.aws.mapping import policies
from spotfleet.providers.aws.reserved import findings
from tests.support.aws.aws_hosts import A, dispatcher, line, prepared, raw, request

CR, BLOCK = "cr-0a1b2c3d4e5f60718", "cr-0000000000000b10c"
G5 = Need(instance_type="g5.xlarge")
GROUP = "arn:aws:ec2:us-east-1:123456789012:placement-group/x"


@pytest.fixture
def provider(aws, cloud):
    cloud.reserve(CR, "us-east-1b", "g5.xlarge", 2)
    return prepared(aws, capacity_reservations=(CR,))


def held(provider, need: Need = G5):
    return [o for o in provider.offers(need) if o.reserved]


def test_a_named_reservation_is_offered_with_its_room_at_the_on_demand_price(provider):
    (offer,) = held(provider)
    assert (offer.pool, offer.room, offer.market) == (f"aws/us-east-1b/g5.xlarge/{CR}", 2, Market.SPOT)
    assert offer.price_micros_h == offer.on_demand_micros_h == 1_006_000
    assert held(provider, replace(G5, use_spot=False)) == [replace(offer, market=Market.ON_DEMAND)]
    assert held(provider, Need(accelerator="A10G", accelerator_count=1)) == [offer]


def test_only_a_need_that_names_such_machines_takes_it(provider):
    assert held(provider, Need(instance_type="g5.2xlarge")) == held(provider, replace(G5, zone="us-east-1a")) == []
    assert held(provider, Need(use_spot=False)) == []  # a dispatcher's


def test_a_reservation_that_is_not_named_or_not_usable_is_not_offered(aws, cloud):
    cloud.reserve(CR, "us-east-1b", "g5.xlarge", 2)
    assert held(prepared(aws)) == []
    for more in ({"state": "expired"}, {"platform": "Windows"}, {"placement_group": GROUP},
                 {"block": True, "ends_at": time.time() + 2000.0}):
        cloud.reserve(CR, "us-east-1b", "g5.xlarge", 2, **more)
        assert held(aws(capacity_reservations=(CR,))) == [], more


def test_a_host_runs_in_the_reservation_and_nowhere_else(provider, cloud):
    (offer,) = held(provider)
    provider.launch(request(offer))
    (made,) = raw(cloud)
    assert (made["CapacityReservationId"], made.get("InstanceLifecycle")) == (CR, None)
    found = line(provider)
    assert (found.offer.pool, found.offer.market, found.offer.price_micros_h) == (offer.pool, Market.SPOT, 1_006_000)
    provider.launch(request(offer, "f-2"))
    with pytest.raises(NoCapacity) as refused:
        provider.launch(request(offer, "f-3"))
    assert refused.value.scope == "pool" and len(raw(cloud)) == 2
    assert provider.prices([offer.pool], 0.0)[0].micros_h == 1_006_000


def test_a_reservation_that_is_full_is_not_offered(aws, cloud, provider):
    (offer,) = held(provider)
    for name in ("f-1", "f-2"):
        provider.launch(request(offer, name))
    assert held(aws(capacity_reservations=(CR,))) == []


def test_hosts_of_a_gang_share_a_reservation(provider, cloud):
    (offer,) = held(provider)
    provider.launch_together([request(offer, "f-1"), request(offer, "f-2")])
    assert [i["CapacityReservationId"] for i in raw(cloud)] == [CR, CR]


def test_a_host_of_an_on_demand_need_is_listed_as_one(provider):
    (offer,) = held(provider, replace(G5, use_spot=False))
    provider.launch(request(offer))
    assert line(provider).offer.market is Market.ON_DEMAND


def test_a_host_that_merely_fills_an_open_reservation_is_an_on_demand_host(provider, cloud):
    cloud.reserve("cr-00000000000000a11", "us-east-1a", "t3.small", 1, open=True)
    provider.launch(dispatcher())
    (made,) = raw(cloud)
    assert made["CapacityReservationId"] == "cr-00000000000000a11"
    assert line(provider, "f-d-0").offer.pool == "aws/us-east-1a/t3.small/on-demand"


def test_a_capacity_block_is_launched_as_one_and_was_paid_in_advance(aws, cloud):
    cloud.reserve(BLOCK, "us-east-1a", "p5.48xlarge", 1, block=True, ends_at=time.time() + 86_400.0)
    provider = prepared(aws, capacity_reservations=(BLOCK,))
    (offer,) = held(provider, Need(instance_type="p5.48xlarge"))
    assert (offer.pool, offer.price_micros_h, offer.room) == (f"aws/us-east-1a/p5.48xlarge/block-{BLOCK}", 0, 1)
    provider.launch(request(offer))
    (made,) = raw(cloud)
    assert (made["InstanceLifecycle"], made["CapacityReservationId"]) == ("capacity-block", BLOCK)
    assert line(provider).offer.pool == offer.pool
    assert [p.micros_h for p in provider.prices([offer.pool], 0.0)] == [0]


def test_a_region_with_a_reservation_is_chosen_before_a_cheaper_one(aws, cloud):
    cloud.reserve(CR, "us-west-2a", "g5.xlarge", 2)
    regions = ("us-east-1", "us-west-2")
    small = Need(use_spot=False, instance_type="t3.small")
    assert aws(regions=regions).cheapest_region([G5], small).region == "us-east-1"
    assert aws(regions=regions, capacity_reservations=(CR,)).cheapest_region([G5], small).region == "us-west-2"


def test_where_reservations_may_not_be_listed_hosts_are_of_the_market(provider, cloud, aws):
    cloud.deny("owner", {"ec2:DescribeCapacityReservations"})
    offers = aws(capacity_reservations=(CR,)).offers(G5)
    assert offers and not [o for o in offers if o.reserved]


def test_a_check_says_what_each_costs_and_what_is_wrong(aws, cloud):
    unused, block, other = "cr-00000000000000a12", BLOCK, "cr-00000000000000a13"
    cloud.reserve(CR, "us-east-1b", "g5.xlarge", 2)
    cloud.reserve(unused, "us-east-1b", "g5.2xlarge", 1)
    cloud.reserve(block, "us-east-1a", "p5.48xlarge", 1, block=True, ends_at=4_000_000_000.0)
    cloud.reserve(other, "us-east-1b", "g5.xlarge", 1, state="expired")
    account = aws(capacity_reservations=(CR, unused, block, other, "cr-00000000000000bad")).account
    found = list(findings(account, (G5, Need(instance_type="p5.48xlarge"))))
    assert [(f.level, f.what) for f in found] == [
        ("ok", f"{CR}: 2 of 2 g5.xlarge in us-east-1b are free, and used first; each costs $1.0060/h whether it is "
               "used or not: the 2 unused cost $2.0120/h, which `cost` does not count"),
        ("warning", f"{unused}: 1 of 1 g5.2xlarge in us-east-1b are free; no entry of `resources` takes it"),
        ("ok", f"{block}: 1 of 1 p5.48xlarge in us-east-1a are free, and used first; it was paid in advance, which "
               "`cost` does not count; EC2 ends its hosts from 2 Oct 2096, 06:36 UTC on"),
        ("warning", f"{other}: 1 of 1 g5.xlarge in us-east-1b are free; no host is launched there: it is expired"),
        ("blocker", "cr-00000000000000bad is in none of us-east-1, or is not yours")]


def test_the_printed_policy_is_enough_where_a_reservation_is_named_and_asks_for_no_more_elsewhere(aws, cloud):
    cloud.reserve(CR, "us-east-1b", "g5.xlarge", 2)
    plain, more = (str(policies.laptop(policies.Scope(reserved=named))) for named in (False, True))
    assert "apacity" not in plain and "DescribeCapacityReservations" in more and "capacity-reservation/*" in more
    provider = prepared(aws, capacity_reservations=(CR,))
    (offer,) = held(provider)
    cloud.attach("owner", policies.laptop(policies.Scope(reserved=True)))
    provider.launch(request(offer))
    assert line(provider).offer.pool == offer.pool


def test_a_plain_launch_targets_none(provider, cloud):
    provider.launch(request(A))
    assert "CapacityReservationId" not in raw(cloud)[0]
    assert FleetSpec("f", "aws").section == {}
