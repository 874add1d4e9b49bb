"""What is on offer, and in which region a fleet is cheapest."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from spotfleet.api.lifecycle.preview import PlanKind, preview
from spotfleet.catalog import load
from spotfleet.catalog.pricing.useful import expected_lifetime_s
from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.model import FleetSpec, Market, Need, Offer
from spotfleet.providers.aws.section.spec import AwsNetwork

BOTH = ("us-east-1", "us-west-2")
ANY_A10G = Need(accelerator="A10G", accelerator_count=1)
DISPATCHER = Need(use_spot=False)
LIFE_S = expected_lifetime_s(load().band("aws", "g5.xlarge", "us-east-1"))


def zones(offers: list[Offer]) -> set[str]:
    return {o.zone for o in offers}


def test_a_need_for_one_accelerator_is_every_type_and_zone_of_it_at_live_prices(cloud, aws):
    cloud.set_price("us-east-1a", "g5.xlarge", 0.41)
    found = aws().offers(ANY_A10G)
    assert {o.instance_type for o in found} == {"g5.xlarge", "g5.2xlarge"}
    assert zones(found) == {"us-east-1a", "us-east-1b", "us-east-1c"}
    assert [o for o in found if o.pool == "aws/us-east-1a/g5.xlarge/spot"] == [
        Offer("aws", "us-east-1", "us-east-1a", "g5.xlarge", Market.SPOT, 1, 410_000, 1_006_000, "A10G", life_s=LIFE_S,
              quota="All G and VT Spot Instance Requests")]
    assert LIFE_S > 0 and {o.life_s for o in aws().offers(replace(ANY_A10G, use_spot=False))} == {0.0}


def test_slots_are_the_accelerators_of_a_machine(aws):
    found = aws().offers(Need(instance_type="g5.12xlarge"))
    assert {(o.slots, o.accelerator) for o in found} == {(4, "A10G")}
    assert {(o.slots, o.accelerator) for o in aws().offers(Need(instance_type="m5.large"))} == {(1, "")}


@pytest.mark.parametrize(("need", "types"), [
    (Need(min_vcpus=4), {"m5.xlarge", "c5.2xlarge"}),
    (Need(min_vcpus=2), {"m5.large", "c5.large", "m6i.large", "m7i.large"}),
    (Need(min_vcpus=2, max_vcpus=2), {"m5.large", "c5.large", "m6i.large", "m7i.large"}),
    (Need(min_vcpus=8, use_spot=False), {"c5.2xlarge"}), (Need(min_memory_gib=16), {"m5.xlarge", "c5.2xlarge"}),
    (Need(accelerator="A10G", min_vcpus=8, max_vcpus=8), {"g5.2xlarge"}), (Need(min_vcpus=1000), set()),
])
def test_a_size_is_met_by_the_smallest_type_of_each_family(aws, need, types):
    assert {o.instance_type for o in aws().offers(need)} == types


def test_a_size_that_no_type_has_is_named_with_those_there_are(aws):
    words = aws().unknown([Need(min_vcpus=1000, min_memory_gib=4, max_memory_gib=4)])
    assert words.startswith("no type fits cpus 1000+ and memory 4 in us-east-1: there are 2 vCPUs with 4 GiB, ")


def test_offers_come_from_every_region_of_the_configuration(aws):
    assert {o.region for o in aws(regions=BOTH).offers(ANY_A10G)} == set(BOTH)


@pytest.mark.parametrize(("need", "where"), [
    (Need(instance_type="g5.xlarge", region="us-west-2"), {"us-west-2a", "us-west-2b", "us-west-2c"}),
    (Need(instance_type="g5.xlarge", zone="us-west-2b"), {"us-west-2b"}),
    (Need(instance_type="g5.xlarge", region="eu-west-1"), set()),
])
def test_a_place_in_the_need_is_obeyed(aws, need, where):
    assert zones(aws(regions=BOTH).offers(need)) == where


@pytest.mark.parametrize("use_spot", [True, False])
def test_a_zone_that_does_not_sell_the_type_is_no_offer(aws, use_spot):
    assert zones(aws().offers(Need(instance_type="g6.xlarge", use_spot=use_spot))) == {"us-east-1b", "us-east-1c"}


def test_a_zone_without_a_subnet_of_the_network_is_no_offer(cloud, aws):
    ec2 = cloud.client("ec2", "us-east-1")
    subnet = ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": ["us-east-1c"]}])["Subnets"][0]
    named = (AwsNetwork("us-east-1", subnets=(subnet["SubnetId"],)),)
    assert zones(aws(networks=named).offers(ANY_A10G)) == {"us-east-1c"}


@pytest.mark.parametrize("need", [Need(instance_type="g99.xlarge"), Need(accelerator="TPU"), Need(region="mars-1"),
                                  Need(accelerator="A10G", accelerator_count=3), Need(zone="us-east-1z"),
                                  Need(instance_type="t4g.small")])
def test_what_nobody_sells_is_no_offer_and_no_error(aws, need):
    assert aws().offers(need) == []


def test_a_limit_leaves_out_what_costs_more(cloud, aws):
    for zone, usd in (("a", 0.41), ("b", 0.42), ("c", 0.43)):
        cloud.set_price(f"us-east-1{zone}", "g5.xlarge", usd)
    found = aws().offers(Need(instance_type="g5.xlarge", max_micros_h=420_000))
    assert zones(found) == {"us-east-1a", "us-east-1b"}


def test_the_dispatcher_gets_a_small_machine_on_demand(aws):
    found = aws().offers(DISPATCHER)
    assert {o.market for o in found} == {Market.ON_DEMAND}
    cheapest = min(found, key=lambda o: o.price_micros_h)
    assert (cheapest.instance_type, cheapest.price_micros_h) == ("t3a.small", 18_800)
    assert all(o.price_micros_h == o.on_demand_micros_h for o in found)


def test_hosts_of_a_tightly_coupled_fleet_are_of_types_that_can_stand_together(aws):
    assert aws(placement="cluster").offers(Need(instance_type="t3.small")) == []
    assert aws(placement="cluster").offers(Need(instance_type="p4d.24xlarge"))
    assert aws(placement="cluster").offers(DISPATCHER)


def test_asking_at_every_tick_costs_no_calls(cloud, aws):
    provider = aws(regions=BOTH)
    first = provider.offers(ANY_A10G)
    cloud.forget_calls()
    assert [provider.offers(ANY_A10G) for _ in range(20)] == [first] * 20
    assert cloud.calls == []


def test_the_first_question_is_few_calls(cloud, aws):
    provider = aws()
    cloud.forget_calls()
    provider.offers(ANY_A10G)
    actions = [c.action for c in cloud.calls if c.service == "ec2"]
    assert sorted(actions) == ["ec2:DescribeInstanceTypeOfferings", "ec2:DescribeInstanceTypes",
                               "ec2:DescribeRouteTables", "ec2:DescribeSpotPriceHistory", "ec2:DescribeSubnets",
                               "ec2:DescribeVpcs"]


def test_threads_that_ask_at_once_get_the_same_and_ask_aws_once(cloud, aws):
    provider = aws()
    cloud.forget_calls()
    answers: list[list[Offer]] = []
    threads = [threading.Thread(target=lambda: answers.append(provider.offers(ANY_A10G))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 6
    assert all(a == answers[0] for a in answers)
    assert sum(c.action == "ec2:DescribeSpotPriceHistory" for c in cloud.calls) == 1


# ---- which region


def test_a_new_fleet_goes_where_its_hosts_and_its_dispatcher_cost_least(cloud, aws):
    for zone in "abc":
        cloud.set_price(f"us-west-2{zone}", "g5.xlarge", 0.20)
        cloud.set_price(f"us-east-1{zone}", "g5.xlarge", 0.30)
    choice = aws(regions=("us-east-1", "us-west-2", "eu-west-1")).cheapest_region([ANY_A10G], DISPATCHER, hosts=4)
    assert choice.region == "us-west-2"
    best = choice.rows[0]
    assert (best.hosts.price_micros_h, best.dispatcher.price_micros_h) == (200_000, 18_800)
    assert best.total_micros_h == 4 * 200_000 + 18_800
    assert [r.total_micros_h for r in choice.rows] == sorted(r.total_micros_h for r in choice.rows)


def test_a_region_that_has_no_hosts_is_out_and_says_why(aws):
    choice = aws(regions=("eu-west-1", "us-west-2")).cheapest_region([Need(instance_type="p4d.24xlarge")], DISPATCHER)
    assert choice.region == "us-west-2"
    assert [(r.region, r.why) for r in choice.rows[1:]] == [("eu-west-1", "nothing on offer for hosts")]


def test_a_region_that_is_not_enabled_is_out_and_says_why(aws):
    choice = aws(regions=("me-south-1", "us-west-2")).cheapest_region([ANY_A10G], DISPATCHER)
    assert choice.region == "us-west-2"
    assert [r.region for r in choice.rows if "not enabled" in r.why] == ["me-south-1"]


def test_a_region_that_does_not_answer_is_out_and_says_why(cloud, aws, hurried):
    cloud.before = fails_in("us-east-1", cloud)
    choice = aws(regions=BOTH).cheapest_region([ANY_A10G], DISPATCHER)
    assert choice.region == "us-west-2"
    assert "AWS" in choice.rows[1].why


def fails_in(region: str, cloud):
    from tests.support.fakes.aws import Lost

    def before(call) -> None:
        if call.service == "ec2" and call.region == region:
            raise Lost

    return before


def test_a_region_without_a_network_is_out(cloud, aws):
    ec2 = cloud.client("ec2", "us-east-1")
    for subnet in ec2.describe_subnets()["Subnets"]:
        ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    choice = aws(regions=BOTH).cheapest_region([ANY_A10G], DISPATCHER)
    assert choice.region == "us-west-2"
    assert "no network" in choice.rows[1].why


def test_where_words_name_nothing_the_nearest_are_told(aws):
    with pytest.raises(UsageError, match=r"'g5\.xlrge' is not known in us-east-1 and us-west-2; did you mean 'g5\.xl"):
        aws(regions=BOTH).cheapest_region([Need(instance_type="g5.xlrge")], DISPATCHER)


def test_where_no_region_has_all_each_says_what_it_lacks(aws):
    with pytest.raises(NoCapacity, match="us-east-1: nothing on offer for hosts") as told:
        aws(regions=BOTH).cheapest_region([Need(instance_type="g5.xlarge", max_micros_h=1)], DISPATCHER)
    assert told.value.hint


def test_where_everything_is_denied_a_person_must_act(cloud, aws):
    cloud.allow("owner", {"sts:*"})
    with pytest.raises(NeedsPerson, match="denied: ec2:Describe"):
        aws(regions=BOTH).cheapest_region([ANY_A10G], DISPATCHER)


def test_a_placement_score_is_a_hint_and_its_denial_changes_nothing(cloud, aws):
    many = [Need(accelerator="A10G")]
    scored = aws().cheapest_region(many, DISPATCHER, hosts=2)
    assert 1 <= scored.rows[0].score <= 10
    cloud.deny("owner", {"ec2:GetSpotPlacementScores"})
    unscored = aws().cheapest_region(many, DISPATCHER, hosts=2)
    assert (unscored.region, unscored.rows[0].score) == (scored.region, 0)


def test_too_few_types_are_not_scored_as_their_score_would_mean_nothing(cloud, aws):
    assert aws().cheapest_region([Need(instance_type="g5.xlarge")], DISPATCHER).rows[0].score == 0
    assert "ec2:GetSpotPlacementScores" not in cloud.actions()


# ---- check


def test_check_passes_where_a_fleet_can_be_launched(aws):
    aws().check()


def test_check_wants_a_network(cloud, aws):
    for region in BOTH:
        ec2 = cloud.client("ec2", region)
        for subnet in ec2.describe_subnets()["Subnets"]:
            ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    with pytest.raises(NeedsPerson, match="no subnet") as told:
        aws(regions=BOTH).check()
    assert "create-default-subnet" in told.value.hint


def test_billing_is_by_the_second_from_a_minute_on_and_a_first_hour_that_ec2_interrupts_is_free(aws):
    rules = aws().billing()
    assert (rules.minimum_s, rules.free_if_taken_within_s) == (60, 3600)


def test_stale_prices_serve_while_ec2_slows_us_down(cloud, aws, hurried, monkeypatch):
    from spotfleet.providers.aws import prices

    monkeypatch.setattr(prices, "SPOT_S", 0.0)
    provider = aws()
    first = provider.offers(ANY_A10G)
    cloud.fault("ec2:DescribeSpotPriceHistory", code="RequestLimitExceeded", times=100)
    assert provider.offers(ANY_A10G) == first
    with pytest.raises(SpotfleetError, match="AWS slows us down"):
        aws().offers(ANY_A10G)


def test_a_region_that_is_in_trouble_is_left_out_while_another_answers(cloud, aws, hurried):
    cloud.before = fails_in("us-east-1", cloud)
    assert {o.region for o in aws(regions=BOTH).offers(ANY_A10G)} == {"us-west-2"}
    with pytest.raises(SpotfleetError, match="AWS does not answer"):
        aws().offers(ANY_A10G)


def test_what_may_not_be_looked_at_is_told_and_not_taken_for_nothing_on_sale(cloud, aws):
    for action in ("ec2:DescribeVpcs", "ec2:DescribeSubnets", "ec2:DescribeInstanceTypes",
                   "ec2:DescribeInstanceTypeOfferings", "ec2:DescribeSpotPriceHistory"):
        cloud.deny("owner", {action})
        with pytest.raises(NeedsPerson, match=f"denied: {action}"):
            aws().offers(ANY_A10G)


def test_expired_credentials_are_told_and_new_ones_are_taken_at_the_next_question(cloud, aws):
    provider = aws()
    cloud.expire("owner")
    with pytest.raises(NeedsPerson, match="expired"):
        provider.offers(ANY_A10G)
    cloud.expire("owner", False)
    assert provider.offers(ANY_A10G)


def test_the_plan_of_up_tells_the_nearest_word_of_all_that_ec2_sells(aws):
    spec = FleetSpec("f", "aws", (Need(instance_type="g5.xlrge"),))
    plan = preview(spec, "f", PlanKind.NEW, None, aws(), 0.0)
    assert plan.unknown == "instance_type 'g5.xlrge' is not known in us-east-1; did you mean 'g5.xlarge'?"
