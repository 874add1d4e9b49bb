"""Planner, reconciler and provider together on the AWS fake: what EC2 does to a fleet, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotfleet.dispatcher.http.revocation import rejection
from spotfleet.errors import NeedsPerson
from spotfleet.fleet.domain.events import HostListed, HostPlaced, LaunchIntended, LaunchRefused
from spotfleet.fleet.ledger import Ledger
from spotfleet.fleet.planner.plan import Drain, Launch, Terminate
from spotfleet.fleet.reconcile import NoAnswer
from spotfleet.model import CloudState, HostState, Need
from tests.support.aws.aws_hosts import LONG, asked, hosts_things, prepared, requests
from tests.support.aws.aws_ticks import G5, Fleet

ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")
KIND = "g5.xlarge"
CREATE = "ec2:CreateFleet"
RUN = "ec2:RunInstances"


@pytest.fixture
def fleet(cloud: Any, aws: Callable[..., Any], tmp_path: Path, hurried: None) -> Iterator[Callable[..., Fleet]]:
    ledgers: list[Ledger] = []

    def make(hosts: int, placement: str = "spread", **wanted: Any) -> Fleet:
        provider = prepared(aws, event_queue=True, placement=placement)
        ledgers.append(Ledger(tmp_path / f"ledger-{len(ledgers)}.db"))
        return Fleet(cloud, provider, ledgers[-1], hosts, placement=placement, **wanted)

    yield make
    for ledger in ledgers:
        ledger.close()


def test_hosts_come_up_spread_over_zones_and_the_ledger_knows_which_pool_ec2_took(fleet, cloud):
    three = fleet(3)
    three.run()
    assert len(three.up()) == 3 and three.zones() == list(ZONES)
    assert {h.offer.zone for h in three.ledger.state().hosts} == set(ZONES)
    for host in three.ledger.state().hosts:
        assert three.instance(host.request_id).zone == host.offer.zone
    assert three.run(3) == []


def test_a_warning_from_eventbridge_alone_gets_a_replacement_elsewhere_while_the_host_still_runs(fleet, cloud):
    two = fleet(2)
    two.run()
    victim, *_ = two.up()
    taken = two.instance(victim).zone
    cloud.interrupt(two.instance(victim).id)
    actions = two.tick()
    assert [type(a) for a in actions] == [Drain, Launch]
    assert taken not in {o.zone for o in (actions[1].offer, *actions[1].alternatives)}
    assert two.instance(victim).state == "running" and len(two.zones()) == 3
    two.run()
    assert len(two.up()) == 2 and victim not in two.up() and len(two.zones()) == 3  # it is free if EC2 takes it
    cloud.take(two.instance(victim).id)
    two.run()
    assert len(two.up()) == 2 and len(two.zones()) == 2
    assert cloud.invoice()[two.ledger.state().host(victim).provider_id] == 0


def test_where_one_pool_is_full_the_same_call_gets_a_host_in_another(fleet, cloud):
    cloud.set_room(ZONES[0], KIND, 0)
    cloud.set_room(ZONES[1], KIND, 0)
    one = fleet(1)
    one.run()
    assert one.zones() == [ZONES[2]] and asked(cloud, CREATE) == 1
    assert [h.offer.zone for h in one.ledger.state().hosts] == [ZONES[2]]
    placed = [e for e in one.rows if isinstance(e, HostPlaced)]
    intent = next(e for e in one.rows if isinstance(e, LaunchIntended))
    assert [e.offer.zone for e in placed] == ([ZONES[2]] if intent.offer.zone != ZONES[2] else [])


def test_where_all_pools_are_full_each_cools_down_the_reason_is_told_and_room_that_returns_is_found(fleet, cloud):
    for zone in ZONES:
        cloud.set_room(zone, KIND, 0)
    one = fleet(1)
    one.run(3)
    assert asked(cloud, CREATE) == 1
    assert one.waits.startswith("1 host missing: pool aws/us-east-1a/g5.xlarge/spot refused, asked again at ")
    assert all(f"pool aws/{zone}/{KIND}/spot refused" in one.waits for zone in ZONES)
    assert one.zones() == [] and not {"instance", "launch-template", "fleet"} & set(hosts_things(cloud))
    cloud.set_room(ZONES[1], KIND, 1)
    one.wait(20.0)
    one.run()
    assert one.zones() == [ZONES[1]]


def test_a_quota_that_is_used_up_costs_one_attempt_until_the_cooldown_ends(fleet, cloud):
    cloud.set_quota("us-east-1", "G", "spot", 0)
    four = fleet(4)
    four.run(10)
    assert asked(cloud, CREATE) == 1
    assert "quota aws/us-east-1 All G and VT Spot Instance Requests refused, asked again at " in four.waits
    refused = [e for e in four.rows if isinstance(e, LaunchRefused)]
    assert [e.scope for e in refused] == ["quota"] and "MaxSpotInstanceCountExceeded" in refused[0].why
    cloud.set_quota("us-east-1", "G", "spot", 16)
    four.wait(20.0)
    four.run()
    assert len(four.up()) == 4


def test_a_quota_that_is_used_up_leaves_the_other_families_open(fleet, cloud):
    cloud.set_quota("us-east-1", "Standard", "spot", 4)  # the cheaper family
    three = fleet(3)
    three.wanted = replace(three.wanted, any_of=(G5, Need(instance_type="m5.xlarge")))
    three.run()
    assert sorted(three.instance(h).type for h in three.up()) == ["g5.xlarge", "g5.xlarge", "m5.xlarge"]


def test_with_a_quota_of_just_the_fleet_s_hosts_a_replacement_comes_as_soon_as_the_old_host_is_gone(fleet, cloud):
    cloud.set_quota("us-east-1", "G", "spot", 8)
    two = fleet(2)
    two.run()
    victim, *_ = two.up()
    cloud.interrupt(two.instance(victim).id)
    for _ in range(2):
        two.run(1)
        two.wait(15.0)
    assert [e.scope for e in two.rows if isinstance(e, LaunchRefused)] == ["quota", "quota"]
    cloud.take(two.instance(victim).id)
    two.run()
    assert len(two.up()) == 2 and victim not in two.up()


@pytest.mark.parametrize("lost", [pytest.param("before", marks=LONG), "after"])  # the easy one
def test_a_launch_whose_answer_is_lost_makes_one_host(fleet, cloud, lost):
    one = fleet(1)
    cloud.fault(CREATE, lost=lost)
    assert any(isinstance(a, NoAnswer) for a in one.tick())
    one.run(10)
    assert one.up() == ["f-0"] and len(one.zones()) == 1


def test_throttling_is_no_refusal(fleet, cloud):
    one = fleet(1)
    cloud.fault(CREATE, code="RequestLimitExceeded", times=1)
    assert any(isinstance(a, NoAnswer) for a in one.tick())
    one.run(10)
    assert one.up() == ["f-0"] and not [e for e in one.rows if isinstance(e, LaunchRefused)]


def test_listings_that_lag_make_no_second_host_and_end_none(fleet, cloud):
    cloud.new_lag_s = cloud.lag_s = 1.0
    two = fleet(2)
    two.run(12)
    cloud.new_lag_s = cloud.lag_s = 0.0
    two.run(4)
    assert len(two.up()) == 2 == len(two.zones())
    assert not [a for a in two.run(3) if isinstance(a, Terminate)]


# ---- stop: EC2 alone starts what it has stopped


def test_a_stopped_host_that_ec2_starts_again_after_it_was_replaced_is_one_too_many(fleet, cloud):
    two = fleet(2, interruption_behavior="stop")
    two.run()
    victim, *_ = two.up()
    stopped = two.instance(victim)
    two.let_a_second_pass()
    cloud.take(stopped.id)
    two.run(4)
    assert two.ledger.state().host(victim).state is HostState.STOPPED and len(two.up()) == 2
    two.let_a_second_pass()
    cloud.set_room(stopped.zone, KIND, None)
    two.run(20)
    assert len(two.up()) == 2 == len(two.zones()) == len(requests(cloud))
    assert len([r for h in two.ledger.state().ended.values() for r in h.runs]) >= 1


def test_a_stopped_host_that_stays_away_is_ended_with_its_request_and_nothing_of_it_comes_back(fleet, cloud):
    two = fleet(2, interruption_behavior="stop")
    two.run()
    victim, *_ = two.up()
    stopped = two.instance(victim)
    two.let_a_second_pass()
    cloud.take(stopped.id)
    two.run(4)
    two.wait(600.0)
    two.run(4)
    assert two.ledger.state().host(victim).state is HostState.GONE
    assert victim in rejection(two.ledger.state(), victim)
    cloud.set_room(stopped.zone, KIND, None)
    two.run(4)
    assert len(two.up()) == 2 == len(two.zones()) == len(requests(cloud))


def test_what_ec2_launches_again_because_somebody_ended_an_instance_alone_is_taken_or_ended(fleet, cloud):
    two = fleet(2, interruption_behavior="stop")
    two.run()
    victim, *_ = two.up()
    first = two.instance(victim)
    cloud.client("ec2", "us-east-1").terminate_instances(InstanceIds=[first.id])  # its request is open: EC2 goes on
    two.run(20)
    assert len(two.up()) == 2 == len(two.zones()) == len(requests(cloud))
    two.wanted = replace(two.wanted, hosts=0)
    two.run(20)
    assert two.zones() == [] and requests(cloud) == []


def test_runs_before_a_restart_stay_in_the_ledger_though_ec2_tells_the_newest_only(fleet, cloud):
    for zone in ZONES[1:]:
        cloud.set_room(zone, KIND, 0)
    one = fleet(1, interruption_behavior="stop")
    one.run()
    (only,) = one.up()
    one.let_a_second_pass()
    cloud.take(one.instance(only).id)
    one.run(2)
    assert one.ledger.state().host(only).state is HostState.STOPPED
    one.let_a_second_pass()
    cloud.set_room(ZONES[0], KIND, None)
    one.run(4)
    host = one.ledger.state().host(only)
    assert (host.state, host.cloud) == (HostState.UP, CloudState.RUNNING) and len(host.runs) == 2
    assert host.runs[0].ended_at is not None and host.runs[0].taken and host.runs[1].ended_at is None


# ---- one place, all or nothing


def test_a_fleet_that_comes_whole_comes_in_one_call_in_the_first_zone_that_has_room_for_all(fleet, cloud):
    cloud.set_room(ZONES[0], KIND, 2)
    cloud.set_room(ZONES[1], KIND, 0)
    three = fleet(3, all_or_nothing=True)
    three.run()
    assert three.up() == ["f-6", "f-7", "f-8"] and three.zones() == [ZONES[2]] * 3
    assert asked(cloud, RUN) == 3 and asked(cloud, CREATE) == 0


def test_a_whole_fleet_whose_answer_is_lost_is_there_once(fleet, cloud):
    three = fleet(3, all_or_nothing=True)
    cloud.fault(RUN, lost="after")
    three.run(10)
    assert three.up() == ["f-0", "f-1", "f-2"] and len(three.zones()) == 3


def test_a_fleet_in_one_zone_replaces_a_loss_there_or_waits_and_says_so(fleet, cloud):
    two = fleet(2, placement="zone")
    two.run()
    assert len(set(two.zones())) == 1
    home = two.zones()[0]
    cloud.take(two.instance(two.up()[0]).id, room=0)
    two.run(4)
    assert len(two.up()) == 1
    assert two.waits.startswith(f"1 of 2 hosts missing: they must be in zone {home}, where ")
    cloud.set_room(home, KIND, 5)
    two.wait(60.0)
    two.run()
    assert two.zones() == [home, home]


def test_a_fleet_that_goes_down_leaves_no_instance_and_no_request(fleet, cloud):
    for behavior in ("terminate", "stop"):
        two = fleet(2, interruption_behavior=behavior)
        two.run()
        cloud.take(two.instance(two.up()[0]).id)
        two.run(2)
        two.wanted = replace(two.wanted, hosts=0)
        two.run(14)
        assert two.zones() == [] and requests(cloud) == [], behavior


def test_a_host_that_ended_and_whose_request_is_still_open_is_ended_again_request_and_all(fleet, cloud):
    two = fleet(2, interruption_behavior="stop")
    two.run()
    two.wanted = replace(two.wanted, hosts=1)
    cloud.deny("owner", {"ec2:CancelSpotInstanceRequests"})
    assert [type(a) for a in two.tick()] == [Drain]
    with pytest.raises(NeedsPerson):
        two.tick()
    (gone,) = {h.request_id for h in two.ledger.state().hosts} - set(two.up())
    cloud.retry_s = 3600.0
    cloud.client("ec2", "us-east-1").terminate_instances(InstanceIds=[two.instance(gone).id])
    two.ledger.append(HostListed(two.now, gone, two.instance(gone).id, CloudState.TERMINATED, ()))
    assert two.ledger.state().host(gone).state is HostState.GONE and len(requests(cloud)) == 2
    cloud.deny("owner", set())
    two.run(15)
    assert len(requests(cloud)) == 1 == len(two.zones()) and two.ledger.state().host(gone).state is HostState.GONE
