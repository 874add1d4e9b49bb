"""Fleets of type instant: many pools in one call, partly served, once per token."""

from __future__ import annotations

import pytest

from tests.support.aws.aws_asks import errors, fleet, got, listed, one, pool, refused, requests, tagged, template

KIND = "g5.xlarge"


@pytest.fixture
def ec2(cloud):
    client = cloud.client("ec2")
    template(client, TagSpecifications=tagged("instance", "volume", "spot-instances-request", spotfleet="f"))
    return client


def test_price_and_room_both_choose_the_pool(cloud, ec2):
    cheap, deep = ("us-east-1b", KIND), ("us-east-1a", KIND)
    assert cloud.price(*cheap) < cloud.price(*deep)
    assert got(fleet(ec2, 2)) == {"us-east-1b/g5.xlarge": 2}
    cloud.set_room(*cheap, 2)  # enough, but not deep
    assert got(fleet(ec2, 2)) == {"us-east-1a/g5.xlarge": 2}
    assert got(fleet(ec2, 2, AllocationStrategy="lowest-price")) == {"us-east-1b/g5.xlarge": 2}
    assert cloud.room(*cheap) == 0


def test_a_fleet_is_partly_served_and_says_what_was_missing(cloud, ec2):
    cloud.set_room("us-east-1a", KIND, 1)
    cloud.set_room("us-east-1b", KIND, 0)
    said = fleet(ec2, 3)
    assert got(said) == {"us-east-1a/g5.xlarge": 1}
    assert errors(said) == [
        ("us-east-1a", "InsufficientInstanceCapacity"),
        ("us-east-1b", "InsufficientInstanceCapacity"),
    ]
    (id,) = said["Instances"][0]["InstanceIds"]
    assert requests(ec2) == [("active", "fulfilled", id)]
    assert one(ec2, id)["InstanceLifecycle"] == "spot" and listed(ec2, tag_spotfleet="f") == [id]


def test_no_capacity_at_all_is_no_error_of_the_call(cloud, ec2):
    for zone in "ab":
        cloud.set_room(f"us-east-1{zone}", KIND, 0)
    said = fleet(ec2)
    assert (said["Instances"], [c for _, c in errors(said)]) == ([], ["InsufficientInstanceCapacity"] * 2)
    assert [t.kind for t in cloud.everything()] == ["launch-template"]


def test_a_quota_or_a_missing_right_is_told_per_pool(cloud, ec2):
    cloud.set_quota("us-east-1", "G", "spot", 0)
    assert errors(fleet(ec2)) == [(f"us-east-1{z}", "MaxSpotInstanceCountExceeded") for z in "ab"]
    cloud.set_quota("us-east-1", "G", "spot", 96)
    cloud.deny(cloud.owner, {"ec2:RunInstances"})
    assert errors(fleet(ec2)) == [(f"us-east-1{z}", "UnauthorizedOperation") for z in "ab"]


def test_the_same_token_is_the_same_fleet(cloud, ec2):
    first = fleet(ec2, token="t", tags=tagged("fleet", spotfleet="f"))
    again = fleet(ec2, token="t", tags=tagged("fleet", spotfleet="f"))
    assert (first["FleetId"], first["Instances"]) == (again["FleetId"], again["Instances"])
    with refused("IdempotentParameterMismatch"):
        fleet(ec2, 2, token="t", tags=tagged("fleet", spotfleet="f"))
    assert len(cloud.instances()) == 1


def test_all_in_one_pool_or_none(cloud, ec2):
    """Room for three in all, but never in one pool."""
    together = {"SingleAvailabilityZone": True, "SingleInstanceType": True, "MinTargetCapacity": 3}
    cloud.set_room("us-east-1a", KIND, 2)
    cloud.set_room("us-east-1b", KIND, 1)
    said = fleet(ec2, 3, **together)
    assert said["Instances"] == [] and len(said["Errors"]) == 2
    assert cloud.instances() == [] and cloud.room("us-east-1a", KIND) == 2
    cloud.set_room("us-east-1a", KIND, 3)
    assert got(fleet(ec2, 3, **together)) == {"us-east-1a/g5.xlarge": 3}
    with refused("InvalidParameterCombination"):
        fleet(ec2, 3, MinTargetCapacity=3)


def test_one_zone_takes_several_types_there(cloud, ec2):
    cloud.set_room("us-east-1a", KIND, 1)
    cloud.set_room("us-east-1b", KIND, 1)
    cloud.set_room("us-east-1b", "g5.2xlarge", 1)
    pools = [pool("a"), pool("b"), pool("b", "g5.2xlarge")]
    assert got(fleet(ec2, 2, pools, SingleAvailabilityZone=True)) == {
        "us-east-1b/g5.xlarge": 1,
        "us-east-1b/g5.2xlarge": 1,
    }


def test_on_demand_by_priority(ec2):
    pools = [pool("a", Priority=2.0), pool("b", Priority=1.0)]
    said = fleet(ec2, 1, pools, market="on-demand", AllocationStrategy="prioritized", name=None)
    assert said["Errors"] and {c for _, c in errors(said)} == {
        "InvalidParameterValue"
    }  # its template tags spot requests
    template(ec2, "plain")
    assert got(fleet(ec2, 1, pools, market="on-demand", AllocationStrategy="prioritized", name="plain")) == {
        "us-east-1b/g5.xlarge": 1
    }


def test_one_pool_twice_is_refused(ec2):
    with refused("InvalidFleetConfig"):
        fleet(ec2, 1, [pool("a"), pool("a")])


def test_an_instant_fleet_is_described_by_its_id_only_and_deleting_it_ends_its_instances(cloud, ec2):
    said = fleet(ec2, 2, tags=tagged("fleet", "instance", owner="me"))
    id = said["FleetId"]
    assert ec2.describe_fleets()["Fleets"] == []
    (told,) = ec2.describe_fleets(FleetIds=[id])["Fleets"]
    assert (told["Type"], told["FulfilledCapacity"], told["Tags"]) == (
        "instant",
        2.0,
        [{"Key": "owner", "Value": "me"}],
    )
    assert {i.tags["owner"] for i in cloud.instances()} == {"me"}
    assert "fleet" in [t.kind for t in cloud.everything()]
    (bad,) = ec2.delete_fleets(FleetIds=[id], TerminateInstances=False)["UnsuccessfulFleetDeletions"]
    assert bad["FleetId"] == id
    assert ec2.delete_fleets(FleetIds=[id], TerminateInstances=True)["SuccessfulFleetDeletions"][0]["FleetId"] == id
    assert [t.kind for t in cloud.everything()] == ["launch-template"]
    with refused("InvalidFleetId.NotFound"):
        ec2.describe_fleets(FleetIds=["fleet-0"])


def test_a_fleet_without_its_template_is_refused(ec2):
    with refused("InvalidLaunchTemplateName.NotFoundException"):
        fleet(ec2, name="nobody")


def test_templates_have_one_name_once_and_their_tags(cloud, ec2):
    with refused("InvalidLaunchTemplateName.AlreadyExistsException"):
        template(ec2)
    with refused("InvalidLaunchTemplateName.MalformedException"):
        template(ec2, "a b c")
    ec2.create_launch_template(
        LaunchTemplateName="mine",
        TagSpecifications=tagged("launch-template", spotfleet="f"),
        LaunchTemplateData={"InstanceType": KIND},
    )
    mine = [{"Name": "tag:spotfleet", "Values": ["f"]}]
    (told,) = ec2.describe_launch_templates(Filters=mine)["LaunchTemplates"]
    assert told["LaunchTemplateName"] == "mine"
    ec2.delete_launch_template(LaunchTemplateName="mine")
    assert ec2.describe_launch_templates(Filters=mine)["LaunchTemplates"] == []
    with refused("InvalidLaunchTemplateName.NotFoundException"):
        ec2.delete_launch_template(LaunchTemplateName="mine")
