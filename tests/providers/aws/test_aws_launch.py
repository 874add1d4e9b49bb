"""Launches of provider aws, by the real boto3, against the fake EC2: what there is afterwards, and what is said."""

from __future__ import annotations

import base64
import json
import time

import pytest

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.model import Market
from spotfleet.providers import Boot
from spotfleet.providers.aws.mapping import errors, template
from spotfleet.providers.aws.section.spec import AwsNetwork
from spotfleet.ssh.keys import make
from tests.support.aws.aws_hosts import (
    USERS,
    WORKER_THINGS,
    A,
    B,
    C,
    asked,
    dispatcher,
    hosts_things,
    line,
    pool,
    prepared,
    raw,
    request,
    requests,
)


@pytest.fixture
def provider(aws, cloud):
    return prepared(aws)


# what a host is


def test_a_host_to_be_replaced_is_an_instant_fleet_of_one_and_its_template_is_gone(provider, cloud):
    provider.launch(request(A, alternatives=(B,)))
    assert hosts_things(cloud) == WORKER_THINGS
    (made,) = raw(cloud)
    assert made["InstanceLifecycle"] == "spot" and asked(cloud, "ec2:RunInstances") == 0
    assert line(provider).provider_id == made["InstanceId"]


def test_every_thing_of_every_way_to_launch_bears_our_tags_and_the_users(provider, cloud):
    provider.launch(request(A))
    provider.launch(request(A, "f-2", interruption_behavior="stop"))
    provider.launch(dispatcher())
    provider.launch_together([request(B, "f-3"), request(B, "f-4")])
    for thing in cloud.everything():
        assert USERS.items() <= thing.tags.items(), thing
        assert thing.tags["spotfleet"] == "f", thing
        if thing.kind in WORKER_THINGS:
            assert thing.tags["spotfleet-host"] in ("f-1", "f-2", "f-d-0", "f- 3 4"), thing


def test_the_template_is_tagged_while_it_is_there(provider, cloud):
    cloud.fault("ec2:CreateFleet", lost="before")
    with pytest.raises(SpotfleetError):
        provider.launch(request(A))
    (left,) = (t for t in cloud.everything() if t.kind == "launch-template")
    assert left.name == "spotfleet-f-1" and USERS.items() <= left.tags.items() and left.tags["spotfleet-host"] == "f-1"


def test_machines_are_closed_encrypted_and_gone_when_they_power_themselves_off(provider, cloud):
    provider.launch(request(A))
    provider.launch(dispatcher())
    groups = {g["GroupName"]: g["GroupId"] for g in cloud.client("ec2", "us-east-1").describe_security_groups(
        Filters=[{"Name": "tag:spotfleet", "Values": ["f"]}])["SecurityGroups"]}
    volumes = cloud.client("ec2", "us-east-1").describe_volumes()["Volumes"]
    assert len(volumes) == 2 and all(v["Encrypted"] and v["VolumeType"] == "gp3" for v in volumes)
    for made in raw(cloud):
        options = made["MetadataOptions"]
        assert (options["HttpTokens"], options["HttpPutResponseHopLimit"], options["InstanceMetadataTags"]) == (
            "required", 1, "enabled")
        assert all(m["Ebs"]["DeleteOnTermination"] for m in made["BlockDeviceMappings"])
    worker, head = (cloud.instances(**{"spotfleet-host": name})[0] for name in ("f-1", "f-d-0"))
    assert set(worker.groups) == {groups["spotfleet-f"]}
    assert set(head.groups) == {groups["spotfleet-f"], groups["spotfleet-f-door"]}
    assert worker.shutdown_behavior == head.shutdown_behavior == "terminate"
    assert head.profile == "spotfleet-f-us-east-1-dispatcher" and not worker.profile
    assert (worker.image, head.image) == (cloud.DEEP_LEARNING, cloud.UBUNTU)
    assert sorted(v["Size"] for v in volumes) == [30, 100]


def test_a_disk_is_never_smaller_than_its_image(aws, cloud):
    prepared(aws, disk_gib=20).launch(request(A))
    assert [v["Size"] for v in cloud.client("ec2", "us-east-1").describe_volumes()["Volumes"]] == [50]


def test_the_users_image_key_pair_profile_and_volume_key_are_used(aws, cloud):
    cloud.client("ec2", "us-east-1").import_key_pair(KeyName="ops", PublicKeyMaterial=make("ops").public.encode())
    cloud.client("iam").create_instance_profile(InstanceProfileName="mine")
    kms = cloud.client("kms", "us-east-1")
    key = kms.create_key()["KeyMetadata"]["Arn"]
    kms.create_grant(KeyId=key, Operations=["CreateGrant"], GranteePrincipal="arn:aws:iam::123456789012:role/"
                     "aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot")
    prepared(aws, image=cloud.UBUNTU, key_pair="ops", host_profile="mine", kms_key=key).launch(request(A))
    (made,) = cloud.instances()
    assert (made.image, made.key_name, made.profile) == (cloud.UBUNTU, "ops", "mine")
    (volume,) = cloud.client("ec2", "us-east-1").describe_volumes()["Volumes"]
    assert volume["KmsKeyId"] == key


def test_private_machines_get_no_public_address(aws, cloud):
    prepared(aws, public_addresses=False).launch(request(A))
    assert [i.public_ip for i in cloud.instances()] == [""]


def test_a_machine_gets_the_user_data_that_it_is_started_from(provider, cloud):
    provider.launch(request(A))
    (made,) = cloud.instances()
    assert made.user_data[:2] == b"\x1f\x8b" and len(made.user_data) < 16_384
    assert provider.boot_files("f-1") == {"boot.json": "f-1"}


def test_too_much_to_tell_a_machine_is_refused_before_anything_is_made(provider, cloud):
    import secrets

    with pytest.raises(UsageError, match=r"user data has \d+ bytes packed, and a cloud takes 16384") as caught:
        provider.launch(request(A, boot=Boot("a.b", {"boot.json": secrets.token_hex(20_000)})))
    assert "shorten the fleet file" in caught.value.hint and hosts_things(cloud) == []


# which pool


def test_no_room_in_one_pool_is_no_trouble_while_another_is_as_good(provider, cloud):
    cloud.set_room("us-east-1a", "g5.xlarge", 0)
    provider.launch(request(A, alternatives=(B, C)))
    assert line(provider).offer.zone in ("us-east-1b", "us-east-1c") and asked(cloud, "ec2:CreateFleet") == 1


def test_no_room_in_any_pool_names_them_all_and_leaves_nothing(provider, cloud):
    for zone in "abc":
        cloud.set_room(f"us-east-1{zone}", "g5.xlarge", 0)
    with pytest.raises(NoCapacity) as caught:
        provider.launch(request(A, alternatives=(B, C)))
    assert caught.value.scope == "pool" and "other pools are tried" in caught.value.hint
    for zone in "abc":
        assert f"us-east-1/us-east-1{zone} g5.xlarge spot: no capacity there now" in str(caught.value)
    assert errors.code(caught.value) == "InsufficientInstanceCapacity"
    assert hosts_things(cloud) == [] and provider.hosts("f") == []


def test_a_refused_fleet_is_deleted(provider, cloud):
    """DescribeFleets does not show an instant one without its id: nobody would find it."""
    cloud.set_room("us-east-1a", "g5.xlarge", 0)
    with pytest.raises(NoCapacity):
        provider.launch(request(A))
    assert [c.code for c in cloud.calls if c.action == "ec2:DeleteFleets"] == [""]
    tagged = cloud.client("ec2", "us-east-1").describe_tags(Filters=[{"Name": "resource-type", "Values": ["fleet"]}])
    states = cloud.client("ec2", "us-east-1").describe_fleets(
        FleetIds=sorted({t["ResourceId"] for t in tagged["Tags"]}))["Fleets"] if tagged["Tags"] else []
    assert all(f["FleetState"].startswith("deleted") for f in states)


def test_a_quota_that_is_used_up_stops_its_types_after_one_attempt(provider, cloud):
    cloud.set_quota("us-east-1", "G", "spot", 0)
    with pytest.raises(NoCapacity, match="the spot quota is used up") as caught:
        provider.launch(request(A, alternatives=(B, C)))
    assert caught.value.scope == "quota" and "All G and VT Spot Instance Requests" in caught.value.hint
    assert asked(cloud, "ec2:CreateFleet") == 1 and hosts_things(cloud) == []


def test_a_quota_that_is_used_up_closes_no_pool_of_another_family_in_the_same_call(provider, cloud):
    cloud.set_quota("us-east-1", "G", "spot", 0)
    cpu = pool(kind="m5.xlarge")
    cloud.set_room("us-east-1a", "m5.xlarge", 0)
    with pytest.raises(NoCapacity, match="no capacity there now") as caught:
        provider.launch(request(A, alternatives=(B, cpu)))
    assert (caught.value.scope, set(caught.value.pools)) == ("quota", {A.pool, B.pool})


def test_a_quota_eaten_by_open_requests_says_so(provider, cloud):
    """A request whose instance was ended by somebody else is open, and counts, until it is cancelled."""
    provider.launch(request(A, "f-8", interruption_behavior="stop"))
    (left,) = cloud.instances()
    cloud.retry_s = 3600.0
    cloud.set_room("us-east-1a", "g5.xlarge", 0)
    cloud.client("ec2", "us-east-1").terminate_instances(InstanceIds=[left.id])
    (waiting,) = requests(cloud)
    assert waiting["State"] == "open"
    cloud.set_quota("us-east-1", "G", "spot", 4)
    with pytest.raises(NoCapacity, match=r"1 open spot request counts against it: "
                                         rf"{waiting['SpotInstanceRequestId']} \(f\)") as caught:
        provider.launch(request(B, "f-9"))
    assert caught.value.scope == "quota" and "`spotfleet leaks --fix`" in caught.value.hint
    assert caught.value.pools == (B.pool,)


def test_a_pool_whose_zone_has_no_subnet_of_ours_is_refused_and_the_others_are_not(aws, cloud):
    subnets = cloud.client("ec2", "us-east-1").describe_subnets()["Subnets"]
    only = next(s for s in subnets if s["AvailabilityZone"] == "us-east-1b")
    provider = prepared(aws, networks=(AwsNetwork("us-east-1", subnets=(only["SubnetId"],)),))
    provider.launch(request(A, alternatives=(B,)))
    assert line(provider).offer.zone == "us-east-1b"
    with pytest.raises(NoCapacity, match=r"us-east-1a: vpc-[0-9a-f]+ has no subnet there") as caught:
        provider.launch(request(A, "f-2"))
    assert caught.value.scope == "pool" and "`aws.networks`" in caught.value.hint


def test_alternatives_with_room_for_another_number_of_workers_are_not_asked_for(provider, cloud):
    """The host is told its slots before EC2 chooses."""
    cloud.set_room("us-east-1a", "g5.xlarge", 0)
    with pytest.raises(NoCapacity):
        provider.launch(request(A, alternatives=(pool("us-east-1b", "g5.12xlarge", slots=4),)))
    assert hosts_things(cloud) == []


def test_a_type_that_is_not_sold_in_its_zone_is_a_matter_of_that_pool(provider, cloud):
    with pytest.raises(NoCapacity) as caught:
        provider.launch(request(pool("us-east-1a", "g6.xlarge")))
    assert caught.value.scope == "pool" and "us-east-1/us-east-1a g6.xlarge spot" in str(caught.value)
    assert hosts_things(cloud) == []


# which market


def test_a_dispatcher_on_demand_is_never_silently_a_spot_host(provider, cloud, monkeypatch):
    right = template.instances

    def wrong(*told):
        return right(*told) | {"InstanceMarketOptions": {"MarketType": "spot"}}

    monkeypatch.setattr(template, "instances", wrong)
    with pytest.raises(SpotfleetError, match="EC2 made 1 of market spot where 1 of market on-demand was asked for"):
        provider.launch(dispatcher())
    assert cloud.instances() == []


def test_a_spot_host_is_never_silently_on_demand(provider, cloud, monkeypatch):
    right = template.fleet

    def wrong(*told):
        asked = right(*told)
        asked["TargetCapacitySpecification"]["DefaultTargetCapacityType"] = "on-demand"
        del asked["SpotOptions"]
        return asked

    def untagged(kind, tags):
        return {"ResourceType": "volume" if kind == "spot-instances-request" else kind,
                "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}

    monkeypatch.setattr(template, "fleet", wrong)
    monkeypatch.setattr(template, "_tagged", untagged)
    with pytest.raises(SpotfleetError, match="EC2 made 1 of market on-demand where 1 of market spot was asked for"):
        provider.launch(request(A))
    assert cloud.instances() == []


def test_an_on_demand_host_is_asked_for_as_such_also_as_a_worker(provider, cloud):
    provider.launch(request(pool(kind="m5.large", market=Market.ON_DEMAND, accelerator="")))
    (made,) = cloud.instances()
    assert made.market == "on-demand" and not made.request_id and line(provider).offer.market is Market.ON_DEMAND


# hosts that EC2 stops


def test_a_host_to_be_stopped_has_a_persistent_request_and_no_price_limit(provider, cloud):
    provider.launch(request(A, alternatives=(B,), interruption_behavior="stop"))
    (made,) = requests(cloud)
    assert (made["Type"], made["InstanceInterruptionBehavior"]) == ("persistent", "stop")
    (call,) = (c for c in cloud.calls if c.action == "ec2:RunInstances")
    assert "MaxPrice" not in call.params["InstanceMarketOptions"]["SpotOptions"]
    assert "ValidUntil" not in made  # as there would be if the template said that it is spot
    assert [i.shutdown_behavior for i in cloud.instances()] == ["stop"]
    assert asked(cloud, "ec2:CreateFleet") == 0


def test_machines_with_cpu_credits_are_alike_and_hosts_use_no_more_than_they_earn(provider, cloud):
    hosts = [pool(kind=kind, accelerator="") for kind in ("t3.medium", "m5.large", "t3a.medium")]
    provider.launch(request(hosts[0], alternatives=tuple(hosts[1:])))
    provider.launch(request(hosts[1], "f-2", alternatives=(hosts[0],)))
    provider.launch(dispatcher())
    first, second = (c.params["LaunchTemplateConfigs"][0]["Overrides"] for c in cloud.calls
                     if c.action == "ec2:CreateFleet")
    assert [{o["InstanceType"] for o in some} for some in (first, second)] == [{"t3.medium", "t3a.medium"},
                                                                                      {"m5.large"}]
    told = [c.params["LaunchTemplateData"].get("CreditSpecification") for c in cloud.calls
            if c.action == "ec2:CreateLaunchTemplate"]
    assert told == [{"CpuCredits": "standard"}, None, {"CpuCredits": "unlimited"}]


def test_a_persistent_request_ends_an_hour_after_the_lifetime_of_its_host(provider, cloud):
    told = Boot("a.b", {"boot.json": json.dumps({"lifetime_s": 7200.0})})
    began = time.time()
    provider.launch(request(A, interruption_behavior="stop", boot=told))
    (made,) = requests(cloud)
    assert began + 10799 <= made["ValidUntil"].timestamp() <= time.time() + 10800


def test_a_persistent_request_that_is_refused_leaves_no_request(provider, cloud):
    cloud.set_room("us-east-1a", "g5.xlarge", 0)
    with pytest.raises(NoCapacity, match=r"us-east-1/us-east-1a g5.xlarge spot: no capacity there now"):
        provider.launch(request(A, interruption_behavior="stop"))
    assert requests(cloud) == [] and hosts_things(cloud) == []


# people


def test_a_denied_launch_says_what_to_do_and_leaves_nothing(provider, cloud):
    cloud.deny("owner", {"ec2:CreateFleet"})
    with pytest.raises(NeedsPerson, match="ec2:CreateFleet") as caught:
        provider.launch(request(A))
    assert "`spotfleet check aws --policy`" in caught.value.hint and hosts_things(cloud) == []


def test_expired_credentials_say_how_to_log_in(provider, cloud):
    cloud.expire("owner")
    with pytest.raises(NeedsPerson, match="expired") as caught:
        provider.launch(request(A))
    assert "aws sso login" in caught.value.hint
    cloud.expire("owner", False)
    assert hosts_things(cloud) == []


@pytest.mark.parametrize("image", ["ami-0123456789abcdef0", "/aws/service/none"], ids=["ami", "parameter"])
def test_an_image_that_is_not_there_needs_a_person(aws, cloud, image):
    with pytest.raises(NeedsPerson) as caught:
        prepared(aws, image=image).launch(request(A))
    assert "aws.image" in caught.value.hint and hosts_things(cloud) == []


def test_user_data_is_base64_in_the_template_alone(provider, cloud):
    provider.launch(request(A))
    (made,) = (c for c in cloud.calls if c.action == "ec2:CreateLaunchTemplate")
    assert base64.b64decode(made.params["LaunchTemplateData"]["UserData"])[:2] == b"\x1f\x8b"
