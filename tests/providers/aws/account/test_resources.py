"""What fleets leave on AWS is listed by tag and goes in the right order; what is not ours is not even listed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spotfleet.errors import NeedsPerson, SpotfleetError, UsageError
from spotfleet.providers import Resource
from spotfleet.providers.aws import AwsProvider
from spotfleet.providers.aws.mapping import names, policies

OFFICE = ("198.51.100.0/24",)
HERE = "us-east-1"


def tagged(kind: str, tags: dict[str, str]) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}] if tags else []


def whole(aws, **spec: Any) -> AwsProvider:
    """Of a fleet that has everything that `prepare` makes."""
    plain = aws(ssh_from=OFFICE, placement="cluster", event_queue=True, **spec)
    provider = AwsProvider({**plain._config, "target": "s3://bucket/x"})
    provider.prepare("f", {"team": "blue"}, lambda _line: None)
    return provider


def scatter(cloud, name: str, tags: dict[str, str], region: str = HERE) -> None:
    """One of every kind of thing, named `name` where things have names and bearing `tags` where they bear any."""
    ec2, iam = cloud.client("ec2", region), cloud.client("iam")
    subnet = ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": [f"{region}a"]}])["Subnets"][0]
    pairs = [{"Key": k, "Value": v} for k, v in tags.items()]
    ec2.create_volume(AvailabilityZone=f"{region}a", Size=1, TagSpecifications=tagged("volume", tags))
    ec2.create_network_interface(SubnetId=subnet["SubnetId"], TagSpecifications=tagged("network-interface", tags))
    address = ec2.allocate_address(Domain="vpc")["AllocationId"]
    ec2.create_tags(Resources=[address], Tags=pairs or [{"Key": "x", "Value": "y"}])
    ec2.create_security_group(GroupName=name, Description="d", VpcId=subnet["VpcId"],
                              TagSpecifications=tagged("security-group", tags))
    ec2.create_key_pair(KeyName=name, TagSpecifications=tagged("key-pair", tags))
    ec2.create_placement_group(GroupName=name, Strategy="cluster", TagSpecifications=tagged("placement-group", tags))
    ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData={"ImageId": cloud.UBUNTU,
                               "InstanceType": "c5.large"}, TagSpecifications=tagged("launch-template", tags))
    iam.create_role(RoleName=name, Path=names.IAM_PATH, AssumeRolePolicyDocument=json.dumps(policies.trust()),
                    Tags=pairs)
    iam.create_instance_profile(InstanceProfileName=name, Path=names.IAM_PATH, Tags=pairs)
    cloud.client("sqs", region).create_queue(QueueName=name, tags=tags)
    cloud.client("events", region).put_rule(Name=name, EventPattern='{"source": ["aws.ec2"]}', Tags=pairs)


def clear(provider: AwsProvider, fleet: str) -> None:
    for _ in range(5):
        for b in provider.list_resources(fleet):
            provider.delete_resource(b)
    assert provider.list_resources(fleet) == []


def kinds(found: list[Resource]) -> list[str]:
    return list(dict.fromkeys(b.kind for b in found))


OURS = {"spotfleet": "f", "spotfleet-host": "f-1", "spotfleet-region": HERE}


def test_all_that_prepare_makes_is_listed_and_goes(cloud, aws):
    before = cloud.everything()
    provider = whole(aws)
    made = [t for t in cloud.everything() if t not in before]
    found = provider.list_resources("f")
    assert len(found) == len(made) and {b.fleet for b in found} == {"f"}
    assert kinds(found) == ["security-group", "placement-group", "eventbridge-rule", "sqs-queue", "instance-profile",
                            "role"]
    for b in found:
        provider.delete_resource(b)
    assert provider.list_resources("f") == [] and cloud.everything() == before


def test_one_of_every_kind_with_our_tags_and_names_is_found_and_removed(cloud, aws):
    before = cloud.everything()
    scatter(cloud, "spotfleet-f-x", OURS)
    provider = aws()
    made = set(kinds(provider.list_resources("")))
    assert made == set(provider.resource_kinds()) - {"spot-instances-request", "fleet"}
    clear(provider, "f")
    assert cloud.everything() == before


@pytest.mark.parametrize("name, tags", [
    ("mine", {}),
    ("mine", {"team": "blue"}),
    ("spotfleet-f", {}),  # a name as ours, and nothing more
    ("mine", {"spotfleet": "f"}),  # our tag, and nothing more
    ("spotfleet-f", {"Spotfleet": "f", "spotfleet-host": "f-1", "spotfleet-region": HERE}),
], ids=["untagged", "others-tag", "our-name", "our-tag", "nearly-our-tag"])
def test_what_others_have_made_is_never_listed_so_never_removed(cloud, aws, name, tags):
    scatter(cloud, name, tags)
    before = cloud.everything()
    provider = aws()
    assert provider.list_resources("") == [] == provider.list_resources("f")
    clear(provider, "f")
    assert cloud.everything() == before


def test_what_belongs_to_another_fleet_stays(cloud, aws):
    scatter(cloud, "spotfleet-g", {**OURS, "spotfleet": "g"})
    others = cloud.everything()
    clear(whole(aws), "f")
    assert cloud.everything() == others
    assert {b.fleet for b in aws().list_resources("")} == {"g"}


def test_a_fleet_of_the_same_name_in_another_region_keeps_its_roles(cloud, aws):
    west = whole(aws, regions=("us-west-2",))
    there = cloud.everything()
    clear(whole(aws), "f")
    assert cloud.everything() == there
    assert {b.region for b in west.list_resources("f")} == {"us-west-2", ""}


def test_everywhere_are_all_regions_of_the_account(cloud, aws):
    scatter(cloud, "spotfleet-f-x", {**OURS, "spotfleet-region": "eu-west-1"}, "eu-west-1")
    provider = aws()
    assert provider.list_resources("") == []
    found = provider.list_resources("", everywhere=True)
    assert {b.region for b in found} == {"eu-west-1", ""}
    for b in found:
        provider.delete_resource(b)
    assert provider.list_resources("", everywhere=True) == []


def test_volumes_and_interfaces_that_are_in_use_belong_to_their_machine(cloud, aws):
    ec2 = cloud.client("ec2", HERE)
    ec2.run_instances(ImageId=cloud.UBUNTU, InstanceType="c5.large", MinCount=1, MaxCount=1,
                      TagSpecifications=[*tagged("instance", OURS), *tagged("volume", OURS),
                                         *tagged("network-interface", OURS)])
    assert aws().list_resources("f") == []


def spot(cloud, tags: dict[str, str] = OURS) -> str:
    """A persistent request that launched an instance; the instance's id."""
    answer = cloud.client("ec2", HERE).run_instances(
        ImageId=cloud.UBUNTU, InstanceType="g5.xlarge", MinCount=1, MaxCount=1,
        Placement={"AvailabilityZone": f"{HERE}a"}, InstanceMarketOptions={"MarketType": "spot", "SpotOptions": {
            "SpotInstanceType": "persistent", "InstanceInterruptionBehavior": "stop"}},
        TagSpecifications=[*tagged("instance", tags), *tagged("spot-instances-request", tags)])
    return answer["Instances"][0]["InstanceId"]


def reopened(cloud, tags: dict[str, str] = OURS) -> None:
    """Somebody ends the machine of a request and not the request; there is no room for another."""
    cloud.set_room(f"{HERE}a", "g5.xlarge", 1)
    instance = spot(cloud, tags)
    cloud.set_room(f"{HERE}a", "g5.xlarge", -1)
    cloud.client("ec2", HERE).terminate_instances(InstanceIds=[instance])
    cloud.settle()
    assert cloud.instances() == []


def test_a_request_that_would_launch_another_machine_is_listed_and_cancelled(cloud, aws):
    reopened(cloud)
    provider = aws()
    (found,) = provider.list_resources("f")
    assert (found.kind, found.state, found.region) == ("spot-instances-request", "open", HERE)
    provider.delete_resource(found)
    assert provider.list_resources("f") == []
    cloud.set_room(f"{HERE}a", "g5.xlarge", None)
    cloud.settle()
    assert cloud.instances() == []


def test_the_machine_that_a_request_has_launched_again_bears_no_tag_and_goes_with_it(cloud, aws):
    first = spot(cloud)
    provider = aws()
    assert provider.list_resources("f") == []  # its machine lives
    cloud.client("ec2", HERE).terminate_instances(InstanceIds=[first])
    cloud.settle()
    (second,) = cloud.instances()
    assert second.id != first and "spotfleet" not in second.tags
    (found,) = provider.list_resources("f")
    assert (found.kind, found.state) == ("spot-instances-request", "active")
    provider.delete_resource(found)
    cloud.settle()
    assert cloud.instances() == [] and provider.list_resources("f") == []


def test_a_request_of_somebody_else_stays(cloud, aws):
    reopened(cloud, {"spotfleet": "f"})
    assert aws().list_resources("f") == []


def test_a_group_that_is_in_use_says_so_until_its_machine_is_gone(cloud, aws):
    provider = whole(aws)
    (own,) = (b for b in provider.list_resources("f") if b.kind == "security-group"
              and not any(t.name.endswith("door") for t in cloud.everything() if t.id == b.id))
    ec2 = cloud.client("ec2", HERE)
    cloud.ending_s = 0.0
    (instance,) = ec2.run_instances(ImageId=cloud.UBUNTU, InstanceType="c5.large", MinCount=1, MaxCount=1,
                                    SecurityGroupIds=[own.id])["Instances"]
    with pytest.raises(SpotfleetError, match="still uses it"):
        provider.delete_resource(own)
    ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    cloud.settle()
    provider.delete_resource(own)
    assert own not in provider.list_resources("f")


def test_discarding_twice_is_no_error(cloud, aws):
    scatter(cloud, "spotfleet-f-x", OURS)
    provider = whole(aws)
    found = provider.list_resources("f")
    for b in [*found, *found]:
        provider.delete_resource(b)


def gone(provider: AwsProvider) -> list[Resource]:
    """One of each kind that is not there."""
    ids = {"spot-instances-request": "sir-0123abcd", "fleet": "fleet-12345678-1234-1234-1234-123456789012",
           "launch-template": "lt-0123456789abcdef0", "volume": "vol-0123456789abcdef0",
           "network-interface": "eni-0123456789abcdef0", "elastic-ip": "eipalloc-0123456789abcdef0",
           "security-group": "sg-0123456789abcdef0"}
    return [Resource(kind, ids.get(kind, "spotfleet-gone"), "" if kind in ("role", "instance-profile") else HERE, "f")
            for kind in provider.resource_kinds()]


def test_what_is_gone_already_is_no_error(aws):
    provider = aws()
    for b in gone(provider):
        provider.delete_resource(b)


def test_a_kind_that_nobody_knows_is_our_bug(aws):
    with pytest.raises(UsageError, match="makes no cloud-formation"):
        aws().delete_resource(Resource("cloud-formation", "x", HERE, "f"))


def test_of_all_that_a_fleet_makes_is_known_when_it_was_made(cloud, aws):
    assert all(cloud.now() - 60 < b.since <= cloud.now() + 1 for b in whole(aws).list_resources("f"))


def test_who_may_not_look_is_told_what_to_allow(cloud, aws):
    cloud.deny("owner", {"ec2:DescribeKeyPairs"})
    with pytest.raises(NeedsPerson, match="DescribeKeyPairs"):
        aws().list_resources("f")


LISTING_ROLES = {"iam:ListRoles", "iam:ListInstanceProfiles"}


def test_who_names_the_profiles_needs_no_right_to_list_roles(cloud, aws):
    named = {"dispatcher_profile": "boss", "host_profile": "hand"}
    with_roles = kinds(whole(aws).list_resources("f"))
    cloud.deny("owner", LISTING_ROLES)
    assert kinds(whole(aws, **named).list_resources("f")) == with_roles[:-2]
    for some in ({}, {"dispatcher_profile": "boss"}):  # this lists the hosts' own role, for S3
        with pytest.raises(NeedsPerson, match=r"ListRoles|ListInstanceProfiles"):
            AwsProvider({**aws(**some)._config, "target": "s3://bucket/x"}).list_resources("f")
    assert "role" not in kinds(aws(dispatcher_profile="boss").list_resources("f"))  # whose hosts have none


def test_named_profiles_do_not_hide_what_iam_fails_to_tell(cloud, aws, hurried):
    cloud.fault("iam:ListRoles", code="ServiceFailure", times=50)
    with pytest.raises(SpotfleetError):
        aws(dispatcher_profile="boss", host_profile="hand").list_resources("f")
