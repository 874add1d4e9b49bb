"""Launches of the fake: what they honour, and the refusals with their codes and HTTP status."""

from __future__ import annotations

import base64

import pytest
from botocore.exceptions import ConnectionClosedError

from tests.support.aws.aws_asks import (
    ONE_TIME,
    PERSISTENT,
    ZONE,
    listed,
    one,
    refused,
    request_of,
    run,
    state,
    tagged,
    template,
)
from tests.support.fakes.aws import DEEP_LEARNING, UBUNTU

ALL = ("instance", "volume", "network-interface")


@pytest.fixture
def ec2(cloud):
    return cloud.client("ec2")


def test_the_same_token_is_the_same_launch_and_with_other_parameters_none(cloud, ec2):
    first = run(ec2, ClientToken="t")
    assert run(ec2, ClientToken="t") == first
    with refused("IdempotentParameterMismatch"):
        run(ec2, ClientToken="t", InstanceType="m5.large")
    assert run(ec2, ClientToken="u") != first
    assert len(cloud.instances()) == 2


def test_a_token_is_remembered_for_a_day_after_the_end_of_what_it_made(ec2, pass_s):
    (id,) = run(ec2, ClientToken="t")
    ec2.terminate_instances(InstanceIds=[id])
    for hours in (0, 2, 21):
        pass_s(hours * 3600)
        with refused("IdempotentInstanceTerminated"):
            run(ec2, ClientToken="t")
    pass_s(2 * 3600)
    assert run(ec2, ClientToken="t") != [id]


def test_a_token_of_a_refused_launch_may_be_used_again(cloud, ec2):
    cloud.set_room(ZONE, "g5.xlarge", 0, "on-demand")
    with refused("InsufficientInstanceCapacity", 500):
        run(ec2, ClientToken="t")
    cloud.set_room(ZONE, "g5.xlarge", None, "on-demand")
    assert run(ec2, ClientToken="t")


def test_as_many_as_there_is_room_for_but_never_fewer_than_asked(cloud, ec2):
    cloud.set_room(ZONE, "g5.xlarge", 3)
    with refused("InsufficientInstanceCapacity", 500):
        run(ec2, ONE_TIME, count=4)
    assert cloud.everything() == [] and cloud.room(ZONE, "g5.xlarge") == 3
    ids = run(ec2, ONE_TIME, count=8, least=2)
    assert [one(ec2, i)["AmiLaunchIndex"] for i in ids] == [0, 0, 0]  # each has a spot request of its own
    assert [one(ec2, i)["AmiLaunchIndex"] for i in run(ec2, count=3)] == [0, 1, 2]
    assert cloud.room(ZONE, "g5.xlarge") == 0
    ec2.terminate_instances(InstanceIds=ids[:1])
    assert cloud.room(ZONE, "g5.xlarge") == 1


def test_a_launch_template_is_honoured_in_every_field(cloud, ec2):
    iam = cloud.client("iam")
    iam.create_role(RoleName="r", AssumeRolePolicyDocument="{}")
    iam.create_instance_profile(InstanceProfileName="p")
    iam.add_role_to_instance_profile(InstanceProfileName="p", RoleName="r")
    ec2.create_key_pair(KeyName="k")
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    group = ec2.create_security_group(GroupName="g", Description="d", VpcId=vpc)["GroupId"]
    ec2.create_placement_group(GroupName="pg", Strategy="cluster")
    id = template(
        ec2,
        ImageId=DEEP_LEARNING,
        InstanceType="g5.xlarge",
        KeyName="k",
        UserData=base64.b64encode(b"#!/bin/sh").decode(),
        SecurityGroupIds=[group],
        IamInstanceProfile={"Name": "p"},
        InstanceInitiatedShutdownBehavior="terminate",
        Placement={"GroupName": "pg", "AvailabilityZone": "us-east-1b"},
        EbsOptimized=True,
        Monitoring={"Enabled": True},
        MetadataOptions={"HttpTokens": "required", "HttpPutResponseHopLimit": 2, "InstanceMetadataTags": "enabled"},
        BlockDeviceMappings=[
            {
                "DeviceName": "/dev/sda1",
                "Ebs": {
                    "VolumeSize": 77,
                    "Encrypted": True,
                    "VolumeType": "gp3",
                    "KmsKeyId": "arn:aws:kms:us-east-1:1:key/k",
                },
            }
        ],
        InstanceMarketOptions=ONE_TIME,
        TagSpecifications=tagged(*ALL, "spot-instances-request", spotfleet="f"),
    )
    (made,) = ec2.run_instances(LaunchTemplate={"LaunchTemplateId": id}, MinCount=1, MaxCount=1)["Instances"]
    said = one(ec2, made["InstanceId"])
    assert (said["ImageId"], said["InstanceType"], said["KeyName"]) == (DEEP_LEARNING, "g5.xlarge", "k")
    assert [g["GroupId"] for g in said["SecurityGroups"]] == [group]
    assert said["IamInstanceProfile"]["Arn"].endswith("instance-profile/p")
    assert said["Placement"]["GroupName"] == "pg" and said["Placement"]["AvailabilityZone"] == "us-east-1b"
    assert said["EbsOptimized"] and said["Monitoring"]["State"] == "enabled"
    options = said["MetadataOptions"]
    assert (options["HttpTokens"], options["HttpPutResponseHopLimit"]) == ("required", 2)
    assert options["InstanceMetadataTags"] == "enabled"
    (volume,) = ec2.describe_volumes(Filters=[{"Name": "tag:spotfleet", "Values": ["f"]}])["Volumes"]
    assert (volume["Size"], volume["Encrypted"], volume["VolumeType"]) == (77, True, "gp3")
    assert volume["KmsKeyId"] == "arn:aws:kms:us-east-1:1:key/k"
    (eni,) = ec2.describe_network_interfaces(Filters=[{"Name": "tag:spotfleet", "Values": ["f"]}])["NetworkInterfaces"]
    assert [g["GroupId"] for g in eni["Groups"]] == [group]
    (sir,) = ec2.describe_spot_instance_requests(Filters=[{"Name": "tag:spotfleet", "Values": ["f"]}])[
        "SpotInstanceRequests"
    ]
    assert sir["InstanceId"] == made["InstanceId"]
    view = cloud.instance(made["InstanceId"])
    assert (view.user_data, view.shutdown_behavior, view.root_gib) == (b"#!/bin/sh", "terminate", 77)
    assert listed(ec2, tag_spotfleet="f") == [made["InstanceId"]]
    told = ec2.describe_instance_attribute(InstanceId=made["InstanceId"], Attribute="userData")["UserData"]["Value"]
    assert base64.b64decode(told) == b"#!/bin/sh"


def test_parameters_go_before_the_template_and_an_image_may_be_a_parameter(ec2):
    template(
        ec2,
        ImageId="resolve:ssm:/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",
        InstanceType="m5.large",
        TagSpecifications=tagged("instance", a="1", b="1"),
    )
    (made,) = ec2.run_instances(
        LaunchTemplate={"LaunchTemplateName": "spotfleet-x", "Version": "1"},
        InstanceType="m5.xlarge",
        MinCount=1,
        MaxCount=1,
        TagSpecifications=tagged("instance", b="2"),
    )["Instances"]
    assert (made["ImageId"], made["InstanceType"]) == (UBUNTU, "m5.xlarge")
    own = {t["Key"]: t["Value"] for t in made["Tags"] if not t["Key"].startswith("aws:")}
    assert own == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    "code,more",
    [
        ("InvalidAMIID.NotFound", {"ImageId": "ami-0123456789abcdef0"}),
        ("InvalidAMIID.Malformed", {"ImageId": "ubuntu"}),
        ("InvalidParameterValue", {"InstanceType": "z9.huge"}),
        ("Unsupported", {"InstanceType": "g6.xlarge"}),
        ("InvalidParameterValue", {"InstanceType": "t4g.small"}),  # another architecture than the image's
        ("InvalidSubnetID.NotFound", {"SubnetId": "subnet-0123"}),
        ("InvalidGroup.NotFound", {"SecurityGroupIds": ["sg-0123"]}),
        ("InvalidKeyPair.NotFound", {"KeyName": "nobody"}),
        ("InvalidParameterValue", {"IamInstanceProfile": {"Name": "nobody"}}),
        ("InvalidPlacementGroup.Unknown", {"Placement": {"GroupName": "nobody"}}),
        ("InvalidLaunchTemplateName.NotFoundException", {"LaunchTemplate": {"LaunchTemplateName": "nobody"}}),
        ("InvalidParameterValue", {"TagSpecifications": tagged("spot-instances-request", a="b")}),
        ("InvalidParameterValue", {"TagSpecifications": tagged("instance", **{"aws:a": "b"})}),
        ("InvalidParameterValue", {"UserData": "x" * 16385}),
        ("InvalidBlockDeviceMapping", {"BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 4}}]}),
        ("InvalidParameterCombination", {"NetworkInterfaces": [{"DeviceIndex": 0}], "SecurityGroupIds": ["sg-0"]}),
        (
            "InvalidParameterCombination",
            {"NetworkInterfaces": [{"DeviceIndex": 0, "AssociatePublicIpAddress": True}, {"DeviceIndex": 1}]},
        ),
        ("InvalidParameterCombination", {"NetworkInterfaces": [{"DeviceIndex": 0, "InterfaceType": "efa"}]}),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(v),
)
def test_what_does_not_fit_is_refused_by_name(cloud, ec2, code, more):
    with refused(code, 400):
        run(ec2, **more)
    assert [t.kind for t in cloud.everything()] == []


def test_a_type_that_clusters_and_one_that_does_not(ec2):
    ec2.create_placement_group(GroupName="pg", Strategy="cluster")
    with refused("InvalidPlacementGroup.Duplicate"):
        ec2.create_placement_group(GroupName="pg", Strategy="cluster")
    with refused("InvalidParameterCombination"):
        run(ec2, InstanceType="t3.small", Placement={"GroupName": "pg"})
    ids = run(ec2, Placement={"GroupName": "pg", "AvailabilityZone": ZONE}, count=2)
    with refused("InvalidPlacementGroup.InUse"):
        ec2.delete_placement_group(GroupName="pg")
    ec2.terminate_instances(InstanceIds=ids)
    ec2.delete_placement_group(GroupName="pg")
    assert ec2.describe_placement_groups()["PlacementGroups"] == []


def test_efa_interfaces_of_a_type_with_several_cards(ec2):
    cards = [
        {"DeviceIndex": 0 if n == 0 else 1, "NetworkCardIndex": n, "InterfaceType": "efa" if n == 0 else "efa-only"}
        for n in range(4)
    ]
    (id,) = run(ec2, InstanceType="p4d.24xlarge", NetworkInterfaces=cards)
    enis = one(ec2, id)["NetworkInterfaces"]
    assert sorted((e["Attachment"]["NetworkCardIndex"], e["InterfaceType"]) for e in enis) == [
        (0, "efa"),
        (1, "efa-only"),
        (2, "efa-only"),
        (3, "efa-only"),
    ]
    ec2.terminate_instances(InstanceIds=[id])
    assert ec2.describe_network_interfaces()["NetworkInterfaces"] == []


def test_a_subnet_runs_out_of_addresses(ec2):
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/24")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.0.0/28", AvailabilityZone=ZONE)["Subnet"]["SubnetId"]
    ids = run(ec2, SubnetId=subnet, count=11, Placement=None)
    assert len({one(ec2, i)["PrivateIpAddress"] for i in ids}) == 11
    with refused("InsufficientFreeAddressesInSubnet"):
        run(ec2, SubnetId=subnet, Placement=None)
    ec2.terminate_instances(InstanceIds=ids[:1])
    assert run(ec2, SubnetId=subnet, Placement=None)
    assert "PublicIpAddress" not in one(ec2, ids[1])


def test_quotas_are_of_region_family_and_market(cloud, ec2):
    cloud.set_quota("us-east-1", "G", "on-demand", 4)
    cloud.set_quota("us-east-1", "G", "spot", 0)
    with refused("VcpuLimitExceeded", 400):
        run(ec2, count=2)
    with refused("MaxSpotInstanceCountExceeded", 400):
        run(ec2, ONE_TIME)
    assert run(ec2) and run(ec2, ONE_TIME, InstanceType="m5.large")
    assert run(cloud.client("ec2", "us-west-2"), ONE_TIME, Placement=None)


def test_a_price_limit_below_the_price(cloud, ec2):
    cloud.set_price(ZONE, "g5.xlarge", 0.5)
    with refused("SpotMaxPriceTooLow"):
        run(ec2, {"MarketType": "spot", "SpotOptions": {"MaxPrice": "0.4"}})
    assert run(ec2, {"MarketType": "spot", "SpotOptions": {"MaxPrice": "0.6"}})


def test_volumes_and_interfaces_that_are_not_deleted_with_the_instance_stay(cloud, ec2):
    kept = {"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 5, "DeleteOnTermination": False}}
    (id,) = run(ec2, BlockDeviceMappings=[kept], NetworkInterfaces=[{"DeviceIndex": 0, "DeleteOnTermination": False}])
    address = ec2.allocate_address(Domain="vpc")["AllocationId"]
    ec2.associate_address(AllocationId=address, InstanceId=id)
    ec2.terminate_instances(InstanceIds=[id])
    assert sorted((t.kind, t.name) for t in cloud.everything() if t.kind != "elastic-ip") == [
        ("network-interface", "available"),
        ("volume", "available"),
    ]
    (said,) = ec2.describe_addresses()["Addresses"]
    assert "InstanceId" not in said or not said["InstanceId"]
    ec2.release_address(AllocationId=address)
    for volume in ec2.describe_volumes(Filters=[{"Name": "status", "Values": ["available"]}])["Volumes"]:
        ec2.delete_volume(VolumeId=volume["VolumeId"])
    for eni in ec2.describe_network_interfaces()["NetworkInterfaces"]:
        ec2.delete_network_interface(NetworkInterfaceId=eni["NetworkInterfaceId"])
    assert cloud.everything() == []


def test_a_new_instance_is_unknown_for_a_while_and_listings_lag(cloud, ec2, pass_s):
    cloud.new_lag_s, cloud.lag_s = 5.0, 2.0
    (id,) = run(ec2, PERSISTENT)
    assert listed(ec2) == []
    assert ec2.describe_spot_instance_requests()["SpotInstanceRequests"] == []
    with refused("InvalidInstanceID.NotFound"):
        state(ec2, id)
    with refused("InvalidInstanceID.NotFound"):
        ec2.terminate_instances(InstanceIds=[id])
    pass_s(5)
    assert state(ec2, id) == "running"
    address = one(ec2, id)["PrivateIpAddress"]
    ec2.terminate_instances(InstanceIds=[id])
    assert (state(ec2, id), one(ec2, id)["PrivateIpAddress"]) == ("running", address)
    pass_s(2)
    assert state(ec2, id) == "terminated" and "PrivateIpAddress" not in one(ec2, id)


def test_states_take_their_time(cloud, ec2, pass_s):
    cloud.pending_s, cloud.ending_s = 10.0, 20.0
    (id,) = run(ec2)
    assert state(ec2, id) == "pending"
    pass_s(10)
    assert state(ec2, id) == "running"
    said = ec2.terminate_instances(InstanceIds=[id])["TerminatingInstances"][0]
    assert (said["PreviousState"]["Name"], said["CurrentState"]["Name"]) == ("running", "shutting-down")
    assert state(ec2, id) == "shutting-down" and cloud.everything()
    pass_s(20)
    assert state(ec2, id) == "terminated"
    assert one(ec2, id)["StateTransitionReason"].startswith("User initiated (2026-09-21")
    assert one(ec2, id)["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    assert cloud.everything() == []


def test_filters_find_what_they_say_and_unknown_ones_are_refused(cloud, ec2):
    (spot,) = run(ec2, ONE_TIME, TagSpecifications=tagged("instance", spotfleet="a", role="worker"))
    (plain,) = run(ec2, TagSpecifications=tagged("instance", spotfleet="b"))
    assert listed(ec2, instance_lifecycle="spot") == [spot]
    assert listed(ec2, spot_instance_request_id=request_of(ec2, spot)) == [spot]
    assert listed(ec2, tag_spotfleet="a,b") == [spot, plain]
    assert listed(ec2, tag_spotfleet="*", instance_state_name="running") == [spot, plain]
    with refused("InvalidParameterValue"):
        listed(ec2, instance_colour="red")
    pages = ec2.get_paginator("describe_instances").paginate(PaginationConfig={"PageSize": 5})
    run(ec2, count=12)
    assert sum(len(r["Instances"]) for p in pages for r in p["Reservations"]) == 14


def test_an_answer_can_be_lost_before_or_after_the_effect(cloud, ec2):
    cloud.fault("ec2:RunInstances", lost="before")
    with pytest.raises(ConnectionClosedError):
        run(ec2, ClientToken="t")
    assert cloud.instances() == []
    cloud.fault("ec2:RunInstances", lost="after")
    with pytest.raises(ConnectionClosedError):
        run(ec2, ClientToken="t")
    (made,) = cloud.instances()
    assert run(ec2, ClientToken="t") == [made.id]
    assert [c.code for c in cloud.calls] == ["lost", "lost", ""]


def test_throttling_lasts_for_so_many_calls(cloud, ec2):
    cloud.fault("ec2:Describe*", code="RequestLimitExceeded", times=2)
    for _ in range(2):
        with refused("RequestLimitExceeded", 503):
            ec2.describe_instances()
    assert ec2.describe_instances()["Reservations"] == []


def test_botocore_retries_a_capacity_error_unless_it_is_told_not_to(cloud, ec2):
    cloud.set_room(ZONE, "g5.xlarge", 0, "on-demand")
    with refused("InsufficientInstanceCapacity", 500):
        run(ec2)
    assert len(cloud.calls) == 1
    cloud.forget_calls()
    with refused("InsufficientInstanceCapacity", 500):
        run(cloud.client("ec2", retries={"mode": "standard", "total_max_attempts": 2}))
    assert len(cloud.calls) == 2


@pytest.mark.parametrize(
    "code,status",
    [
        ("UnfulfillableCapacity", 500),
        ("InternalError", 500),
        ("Unavailable", 503),
        ("ServiceUnavailable", 503),
        ("ReservationCapacityExceeded", 400),
        ("InstanceLimitExceeded", 400),
        ("PendingVerification", 400),
        ("OptInRequired", 401),
    ],
)
def test_any_code_can_be_asked_for_and_bears_its_status(cloud, ec2, code, status):
    cloud.fault("ec2:RunInstances", code=code)
    with refused(code, status):
        run(ec2)
    assert run(ec2)


def test_instances_that_show_their_tags_have_no_tags_with_other_letters(cloud):
    ec2 = cloud.client("ec2", "us-east-1")
    with refused("InvalidParameterValue"):
        run(ec2, MetadataOptions={"InstanceMetadataTags": "enabled"}, TagSpecifications=tagged("instance", größe="1"))
    run(ec2, TagSpecifications=tagged("instance", größe="1"))
