"""Hosts of provider aws that belong together: launched all or none, in one zone, in a placement group."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json

import pytest

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.providers import Boot
from spotfleet.providers.aws.mapping import names
from spotfleet.providers.aws.section.spec import AwsNetwork
from tests.support.aws.aws_hosts import A, B, asked, dispatcher, hosts_things, pool, prepared, raw, request, requests


@pytest.fixture
def provider(aws, cloud):
    return prepared(aws)


# gangs


def test_a_gang_comes_whole_and_each_is_told_its_own(provider, cloud):
    gang = [request(A, f"f-{n}") for n in (3, 4, 5)]
    provider.launch_together(gang)
    provider.launch_together(gang)
    lines = provider.hosts("f")
    assert [h.request_id for h in lines] == ["f-3", "f-4", "f-5"] and len({h.provider_id for h in lines}) == 3
    assert {h.offer.pool for h in lines} == {A.pool} and asked(cloud, "ec2:RunInstances") == 1
    assert {h.request_id: provider.boot_files(h.request_id) for h in lines} == {
        f"f-{n}": {"boot.json": f"f-{n}"} for n in (3, 4, 5)}
    assert len({h.ssh.host_keys for h in lines}) == 3


@pytest.mark.parametrize("zero", [True, False])
def test_each_machine_of_a_spot_gang_is_tagged_with_its_place_whatever_its_launch_index(provider, cloud, zero):
    cloud.spot_index_zero = zero
    provider.launch_together([request(A, f"f-{n}") for n in (3, 4, 5)])
    placed = {i.id: i.tags[names.MEMBER] for i in cloud.instances()}
    assert sorted(placed.values()) == (["0", "1", "2"] if zero else ["index"] * 3)
    hosts = ["f-3", "f-4", "f-5"]
    assert {h.provider_id: h.request_id for h in provider.hosts("f")} == {
        i.id: hosts[int(placed[i.id]) if zero else i.launch_index] for i in cloud.instances()}


def test_places_that_were_not_tagged_before_a_crash_are_tagged_when_the_launch_is_repeated(provider, cloud, hurried):
    gang = [request(A, f"f-{n}") for n in (3, 4, 5)]
    cloud.fault("ec2:CreateTags", code="InvalidInstanceID.NotFound", times=2)  # EC2 does not know them at first
    provider.launch_together(gang)
    before = {i.id: i.tags[names.MEMBER] for i in cloud.instances()}
    cloud.client("ec2", "us-east-1").delete_tags(Resources=list(before), Tags=[{"Key": names.MEMBER}])
    provider.launch_together(gang)
    assert {i.id: i.tags[names.MEMBER] for i in cloud.instances()} == before


def test_a_dispatcher_that_lists_a_gang_tags_what_a_killed_launch_has_not(aws, cloud):
    provider = prepared(aws)
    provider.launch_together([request(A, f"f-{n}") for n in (3, 4, 5)])
    before = {i.id: i.tags[names.MEMBER] for i in cloud.instances()}
    assert sorted(before.values()) == ["0", "1", "2"]
    one, *others = sorted(before)
    cloud.client("ec2", "us-east-1").delete_tags(Resources=others, Tags=[{"Key": names.MEMBER}])
    listed = {h.provider_id: h.request_id for h in provider.hosts("f")}  # by a laptop, which may not tag
    assert [i.id for i in cloud.instances() if names.MEMBER in i.tags] == [one]
    dispatcher_side = aws(side="dispatcher")
    cloud.fault("ec2:CreateTags", code="RequestLimitExceeded")
    for _ in range(2):  # the first try fails
        assert {h.provider_id: h.request_id for h in dispatcher_side.hosts("f")} == listed
    assert {i.id: i.tags[names.MEMBER] for i in cloud.instances()} == before
    tagged = asked(cloud, "ec2:CreateTags")
    dispatcher_side.hosts("f")
    assert asked(cloud, "ec2:CreateTags") == tagged


def test_machines_that_cannot_know_their_places_end(provider, cloud, hurried):
    cloud.fault("ec2:CreateTags", code="RequestLimitExceeded", times=None)
    with pytest.raises(SpotfleetError, match="AWS slows us down"):
        provider.launch_together([request(A, f"f-{n}") for n in (3, 4)])
    assert cloud.instances() == []


def test_a_gang_for_which_there_is_not_room_leaves_nothing(provider, cloud):
    cloud.set_room("us-east-1a", "g5.xlarge", 2)
    with pytest.raises(NoCapacity, match=r"us-east-1/us-east-1a 3 x g5.xlarge spot: no capacity there now") as caught:
        provider.launch_together([request(A, f"f-{n}") for n in (3, 4, 5)])
    assert caught.value.scope == "pool" and hosts_things(cloud) == []
    assert cloud.room("us-east-1a", "g5.xlarge", "spot") == 2


def test_one_of_a_gang_is_ended_and_the_others_go_on(provider, cloud):
    provider.launch_together([request(A, f"f-{n}") for n in (3, 4, 5)])
    provider.terminate("f-4")
    assert [h.request_id for h in provider.hosts("f") if h.state.value == "running"] == ["f-3", "f-5"]
    for name in ("f-3", "f-5"):
        provider.terminate(name)
    assert hosts_things(cloud) == []


def test_a_gang_of_hosts_that_differ_is_refused(provider, cloud):
    with pytest.raises(UsageError, match="hosts that are launched together must be alike"):
        provider.launch_together([request(A, "f-3"), request(B, "f-4")])
    assert cloud.instances() == []


# placement


def test_a_tightly_coupled_fleet_stands_in_its_placement_group_with_efa(aws, cloud):
    subnets = cloud.client("ec2", "us-east-1").describe_subnets()["Subnets"]
    here = next(s["SubnetId"] for s in subnets if s["AvailabilityZone"] == "us-east-1a")
    provider = prepared(aws, placement="cluster", networks=(AwsNetwork("us-east-1", subnets=(here,)),))
    big = pool(kind="p4d.24xlarge", slots=8, accelerator="A100")
    provider.launch_together([request(big, "f-3"), request(big, "f-4")])
    provider.launch(request(big, "f-5"))
    for made in raw(cloud):
        assert made["Placement"]["GroupName"] == "spotfleet-f-us-east-1a"
        assert sorted((i["InterfaceType"], i["Attachment"]["NetworkCardIndex"])
                      for i in made["NetworkInterfaces"]) == [("efa", 0)] + [("efa-only", n) for n in (1, 2, 3)]
        assert not made.get("PublicIpAddress")
    provider.launch(dispatcher())
    assert not raw(cloud, tag__spotfleet_role="dispatcher")[0]["Placement"].get("GroupName")


def test_efa_is_on_the_network_cards_that_take_it(aws, cloud):
    """The first card of a p6-b300 is for other traffic: EC2 describes 16 of its 17 cards as able."""
    subnets = cloud.client("ec2", "us-west-2").describe_subnets()["Subnets"]
    here = next(s["SubnetId"] for s in subnets if s["AvailabilityZone"] == "us-west-2b")
    provider = prepared(aws, placement="cluster", regions=("us-west-2",),
                        networks=(AwsNetwork("us-west-2", subnets=(here,)),))
    provider.launch(request(pool("us-west-2b", "p6-b300.48xlarge", slots=8, accelerator="B300")))
    (made,) = raw(cloud, "us-west-2")
    assert sorted((i["Attachment"]["NetworkCardIndex"], i["Attachment"]["DeviceIndex"], i["InterfaceType"])
                  for i in made["NetworkInterfaces"]) == [
        (0, 0, "interface"), *((card, 1, "efa-only") for card in range(1, 17))]


def test_many_network_cards_without_a_way_out_need_a_person(aws, cloud):
    provider = prepared(aws, placement="cluster")
    with pytest.raises(NeedsPerson, match=r"p4d.24xlarge spot: it has 4 network cards for EFA") as caught:
        provider.launch(request(pool(kind="p4d.24xlarge", slots=8, accelerator="A100")))
    assert "(NAT) under `aws.networks`" in caught.value.hint and hosts_things(cloud) == []


def test_a_placement_group_and_hosts_to_be_stopped_exclude_each_other(aws, cloud):
    provider = prepared(aws, placement="cluster")
    with pytest.raises(UsageError, match="EC2 stops no spot host that is in a placement group"):
        provider.launch(request(pool(kind="p4d.24xlarge", slots=8), interruption_behavior="stop"))


def test_of_a_gang_that_ec2_stops_each_host_has_a_request_of_its_own(provider, cloud):
    provider.launch_together([request(A, f"f-{n}", interruption_behavior="stop") for n in (3, 4)])
    taken = next(h for h in provider.hosts("f") if h.request_id == "f-4")
    cloud.take(taken.provider_id)
    assert {h.request_id: h.state.value for h in provider.hosts("f")} == {"f-3": "running", "f-4": "stopped"}
    provider.terminate("f-4")
    assert {h.request_id: h.state.value for h in provider.hosts("f")} == {"f-3": "running", "f-4": "terminated"}
    assert [r["State"] for r in requests(cloud)] == ["active"]
    provider.terminate("f-3")
    assert requests(cloud) == [] and hosts_things(cloud) == []


def test_sixty_four_hosts_come_together_and_their_user_data_names_no_secret_of_any(aws, cloud):
    """Each gets its own from the dispatcher: 64 tokens and keys would be longer than EC2's 16 KiB."""
    provider = prepared(aws, secret="s")
    hosts = [f"f-{n}" for n in range(100, 164)]
    tokens = {h: f"{h}.{hashlib.sha256(h.encode()).hexdigest()}" for h in hosts}
    authority = "".join(f"{hashlib.sha256(str(n).encode()).hexdigest()}\n" for n in range(12))
    provider.launch_together([request(A, h, boot=Boot("spotfleet.agent", {"boot.json": json.dumps(
        {"host": h, "token": tokens[h], "ca": authority, "dispatcher": "https://172.31.0.9:7443"})}, tokens[h]))
        for h in hosts])
    lines = provider.hosts("f")
    assert [h.request_id for h in lines] == hosts
    assert len({h.provider_id for h in lines}) == len({h.ssh.host_keys for h in lines}) == 64
    data = base64.b64decode(cloud.client("ec2", "us-east-1").describe_instance_attribute(
        InstanceId=lines[0].provider_id, Attribute="userData")["UserData"]["Value"])
    text = gzip.decompress(data).decode()
    assert len(data) < 16_384 and not any(t in text or t.partition(".")[2] in text for t in tokens.values())
    provider.terminate("f-130")
    assert sum(h.state.value == "running" for h in provider.hosts("f")) == 63
