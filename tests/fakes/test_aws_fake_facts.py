"""What the fake tells: types, prices, scores, quotas, images, regions, metadata."""

from __future__ import annotations

import json

import pytest

from tests.support.aws.aws_asks import ZONE, one, refused, run, tagged
from tests.support.fakes.aws import DEEP_LEARNING, UBUNTU


@pytest.fixture
def ec2(cloud):
    return cloud.client("ec2")


def test_types_prices_and_where_they_are_sold(cloud, ec2):
    (facts,) = ec2.describe_instance_types(InstanceTypes=["p4d.24xlarge"])["InstanceTypes"]
    assert (facts["VCpuInfo"]["DefaultVCpus"], facts["NetworkInfo"]["EfaInfo"]["MaximumEfaInterfaces"]) == (96, 4)
    offered = ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": ["g6.xlarge"]}]
    )
    assert [o["Location"] for o in offered["InstanceTypeOfferings"]] == ["us-east-1b", "us-east-1c"]
    with refused("InvalidInstanceType"):
        cloud.client("ec2", "eu-west-1").describe_instance_types(InstanceTypes=["p5.48xlarge"])
    wanted = {
        "instanceType": "g5.xlarge",
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
    }
    said = cloud.client("pricing").get_products(
        ServiceCode="AmazonEC2", Filters=[{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in wanted.items()]
    )
    found = {}
    for text in said["PriceList"]:
        product = json.loads(text)
        (term,) = product["terms"]["OnDemand"].values()
        (line,) = term["priceDimensions"].values()
        found[product["product"]["attributes"]["regionCode"]] = float(line["pricePerUnit"]["USD"])
    assert found == {"us-east-1": 1.006, "us-west-2": 1.006, "eu-west-1": 1.1267}


def test_spot_prices_keep_their_history(cloud, ec2, pass_s):
    from datetime import UTC, datetime

    begun = cloud.now()
    pass_s(100)
    cloud.set_price(ZONE, "g5.xlarge", 0.9)
    pass_s(100)

    def told(since):
        said = ec2.describe_spot_price_history(
            InstanceTypes=["g5.xlarge"],
            ProductDescriptions=["Linux/UNIX"],
            AvailabilityZone=ZONE,
            StartTime=datetime.fromtimestamp(since, UTC),
        )["SpotPriceHistory"]
        return [float(line["SpotPrice"]) for line in said]

    assert told(begun) == [0.9, 0.3521]  # and the change before StartTime
    assert told(begun + 150) == [0.9]


def test_scores_rise_with_room_need_three_types_and_are_few_a_day(cloud, ec2):
    kinds = ["g5.xlarge", "g5.2xlarge", "g5.12xlarge"]
    for kind in kinds:
        cloud.set_room("us-east-1a", kind, 0)

    def ask(kinds, count=2):
        said = ec2.get_spot_placement_scores(
            InstanceTypes=kinds, TargetCapacity=count, SingleAvailabilityZone=True, RegionNames=["us-east-1"]
        )["SpotPlacementScores"]
        return {s["AvailabilityZoneId"]: s["Score"] for s in said}

    assert ask(kinds) == {"use1-az1": 1, "use1-az2": 9, "use1-az3": 9}
    assert max(ask(kinds[:2]).values()) <= 3
    with refused("MaxConfigLimitExceeded"):
        for count in range(3, 20):
            ask(kinds, count)


def test_quotas_by_name_and_images_by_parameter(cloud, ec2):
    cloud.set_quota("us-west-2", "P", "spot", 192)
    quotas = cloud.client("service-quotas", "us-west-2").list_service_quotas(ServiceCode="ec2")["Quotas"]
    assert {q["QuotaName"]: q["Value"] for q in quotas}["All P4, P3 and P2 Spot Instance Requests"] == 192.0
    ssm = cloud.client("ssm")
    name = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
    assert ssm.get_parameter(Name=name)["Parameter"]["Value"] == DEEP_LEARNING
    with refused("ParameterNotFound"):
        ssm.get_parameter(Name="/aws/service/nothing")
    (image,) = ec2.describe_images(ImageIds=[UBUNTU])["Images"]
    assert (image["RootDeviceName"], image["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"]) == ("/dev/sda1", 8)
    cloud.image_gone[UBUNTU] = {"us-east-1"}
    with refused("InvalidAMIID.NotFound"):
        ec2.describe_images(ImageIds=[UBUNTU])


def test_regions_and_those_that_are_not_opted_in(cloud, ec2):
    assert [r["RegionName"] for r in ec2.describe_regions()["Regions"]] == ["us-east-1", "us-west-2", "eu-west-1"]
    every = {r["RegionName"]: r["OptInStatus"] for r in ec2.describe_regions(AllRegions=True)["Regions"]}
    assert every["me-south-1"] == "not-opted-in"
    with refused("AuthFailure"):
        cloud.client("ec2", "me-south-1").describe_instances()


# ---- metadata


def test_the_metadata_want_a_token_and_mind_the_hops(cloud, ec2):
    tokens = {"HttpTokens": "required", "HttpPutResponseHopLimit": 2, "InstanceMetadataTags": "enabled"}
    (id,) = run(ec2, MetadataOptions=tokens, TagSpecifications=tagged("instance", spotfleet="f"))

    def put(hops=1, ttl="60"):
        return cloud.metadata(id, "/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": ttl}, hops)

    assert cloud.metadata(id, "/latest/meta-data/instance-id")[0] == 401
    assert (put(ttl="x")[0], put(3)) == (400, (0, b""))
    token = put(2)[1].decode()

    def ask(path):
        return cloud.metadata(id, path, headers={"X-aws-ec2-metadata-token": token})

    assert ask("/latest/meta-data/instance-id") == (200, id.encode())
    assert ask("/latest/meta-data/tags/instance/spotfleet") == (200, b"f")
    assert ask("/latest/meta-data/tags/instance/nothing")[0] == 404
    assert ask("/latest/meta-data/local-ipv4")[1].decode() == one(ec2, id)["PrivateIpAddress"]
    assert json.loads(ask("/latest/dynamic/instance-identity/document")[1])["instanceId"] == id
    mac = ask("/latest/meta-data/mac")[1].decode()
    assert ask(f"/latest/meta-data/network/interfaces/macs/{mac}/subnet-ipv4-cidr-block") == (200, b"172.31.0.0/20")
    assert ask("/latest/meta-data/ami-launch-index") == (200, b"0")
    assert ask("/latest/user-data")[0] == 404
    ec2.create_tags(Resources=[id], Tags=[{"Key": "later", "Value": "x"}])
    assert ask("/latest/meta-data/tags/instance/later") == (200, b"x")
    cloud.clock.now += 61
    assert ask("/latest/meta-data/instance-id")[0] == 401
    cloud.metadata_down(id)
    assert put() == (0, b"")
