"""What EC2 is told, word for word: providers/aws/mapping/template.py."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from spotfleet.errors import UsageError
from spotfleet.model import Market, Offer, Role
from spotfleet.providers.aws.mapping import names, template
from spotfleet.providers.aws.mapping.template import Facts, LaunchOrder

HERE = Offer("aws", "us-east-1", "us-east-1a", "g5.xlarge", Market.SPOT, 1, 412_300, 1_006_000, "A10G")
THERE = replace(HERE, zone="us-east-1b", instance_type="g5.2xlarge", price_micros_h=500_000)
REGULAR = replace(HERE, market=Market.ON_DEMAND, instance_type="t3.small", accelerator="")
ORDER = LaunchOrder("f-3", "f", Role.WORKER, (HERE, THERE), tags={"team": "vision"})
DISPATCHER = LaunchOrder("f-d-0", "f", Role.DISPATCHER, (REGULAR,))
FACTS = Facts("ami-1", "/dev/sda1", 100, {"us-east-1a": ("subnet-a", "subnet-a2"), "us-east-1b": ("subnet-b",)},
              ("sg-1",), profile="spotfleet-f-host")
TAGS = template.order_tags(ORDER, "1 A10G us-east-1a/g5.xlarge=412300/1006000")


def tags_of(specifications: list[dict]) -> dict[str, dict[str, str]]:
    return {s["ResourceType"]: {t["Key"]: t["Value"] for t in s["Tags"]} for s in specifications}


def data(order: LaunchOrder = ORDER, facts: Facts = FACTS) -> dict:
    return template.template(order, facts, template.order_tags(order, "1 -"), b"#cloud-config\n")["LaunchTemplateData"]


def test_every_tag_is_ours_or_the_users():
    assert TAGS == {"Name": "f-3", "team": "vision", "spotfleet": "f", "spotfleet-host": "f-3",
                    "spotfleet-role": "worker", "spotfleet-pool": "1 A10G us-east-1a/g5.xlarge=412300/1006000"}


def test_a_name_of_the_users_own_stays_and_none_of_ours_can_be_taken():
    order = replace(ORDER, tags={"Name": "mine", "spotfleet": "another"})
    assert template.order_tags(order, "")["Name"] == "mine" and template.order_tags(order, "")["spotfleet"] == "f"


def test_all_that_a_spot_launch_creates_is_tagged_from_its_creation():
    made = template.template(ORDER, FACTS, TAGS, b"")
    assert tags_of(made["TagSpecifications"]) == {"launch-template": TAGS}
    assert tags_of(made["LaunchTemplateData"]["TagSpecifications"]) == dict.fromkeys(
        ["instance", "volume", "network-interface", "spot-instances-request"], TAGS)
    assert tags_of(template.fleet(ORDER, FACTS, TAGS, "token")["TagSpecifications"]) == dict.fromkeys(
        ["fleet", "instance", "volume", "network-interface"], TAGS)  # its rights ask for those of the call


def test_an_on_demand_launch_tags_no_spot_request_as_ec2_would_refuse_it():
    """Source: Karpenter's outage, "You cannot specify tags for Spot instances requests if there are no Spot ..."."""
    assert set(tags_of(data(DISPATCHER)["TagSpecifications"])) == {"instance", "volume", "network-interface"}


def test_the_metadata_server_wants_tokens_answers_the_host_alone_and_shows_tags():
    assert data()["MetadataOptions"] == {"HttpEndpoint": "enabled", "HttpTokens": "required",
                                         "HttpPutResponseHopLimit": 1, "InstanceMetadataTags": "enabled"}


def test_volumes_are_encrypted_and_go_with_their_host():
    assert data()["BlockDeviceMappings"] == [{"DeviceName": "/dev/sda1", "Ebs": {
        "VolumeSize": 100, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}}]
    ebs = data(facts=replace(FACTS, kms_key="alias/ours"))["BlockDeviceMappings"][0]["Ebs"]
    assert ebs["KmsKeyId"] == "alias/ours" and ebs["Encrypted"]


def test_a_host_that_powers_itself_off_is_gone_but_one_of_a_persistent_request_is_stopped():
    assert data()["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data(DISPATCHER)["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data(replace(ORDER, behavior="stop"))["InstanceInitiatedShutdownBehavior"] == "stop"
    assert data(replace(DISPATCHER, behavior="stop"))["InstanceInitiatedShutdownBehavior"] == "terminate"


def test_user_data_is_base64_of_what_was_given():
    made = template.template(ORDER, FACTS, TAGS, b"\x1f\x8bpacked")
    assert base64.b64decode(made["LaunchTemplateData"]["UserData"]) == b"\x1f\x8bpacked"


@pytest.mark.parametrize(("profile", "told"), [("mine", {"Name": "mine"}), ("arn:aws:iam::1:instance-profile/mine",
                         {"Arn": "arn:aws:iam::1:instance-profile/mine"})], ids=["name", "arn"])
def test_a_profile_is_named_as_what_it_is(profile, told):
    assert data(facts=replace(FACTS, profile=profile))["IamInstanceProfile"] == told


def test_what_is_not_wanted_is_not_said():
    said = data(facts=replace(FACTS, profile=""))
    assert not {"IamInstanceProfile", "KeyName", "Placement", "InstanceMarketOptions", "InstanceType"} & set(said)
    assert data(facts=replace(FACTS, key_pair="ops"))["KeyName"] == "ops"


def test_a_fleet_chooses_among_all_pools_that_are_as_good_by_price_and_capacity():
    assert template.fleet(ORDER, FACTS, TAGS, "token") | {"TagSpecifications": ...} == {
        "Type": "instant",
        "ClientToken": "token",
        "LaunchTemplateConfigs": [{
            "LaunchTemplateSpecification": {"LaunchTemplateName": "spotfleet-f-3", "Version": "$Latest"},
            "Overrides": [{"InstanceType": "g5.xlarge", "SubnetId": "subnet-a"},
                          {"InstanceType": "g5.2xlarge", "SubnetId": "subnet-b"}]}],
        "TargetCapacitySpecification": {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
        "SpotOptions": {"AllocationStrategy": "price-capacity-optimized"},
        "TagSpecifications": ...,
    }


def test_a_host_to_be_stopped_is_a_persistent_request_without_a_price_limit():
    order = replace(ORDER, behavior="stop", pools=(HERE,))
    assert not order.by_fleet
    assert "InstanceMarketOptions" not in data(order)  # there, its request would end after 7 days
    assert template.instances(order, FACTS, "subnet-a", "token") == {
        "ClientToken": "token",
        "LaunchTemplate": {"LaunchTemplateName": "spotfleet-f-3", "Version": "$Latest"},
        "InstanceType": "g5.xlarge", "MinCount": 1, "MaxCount": 1,
        "NetworkInterfaces": [{"DeviceIndex": 0, "Groups": ["sg-1"], "DeleteOnTermination": True,
                               "AssociatePublicIpAddress": True, "SubnetId": "subnet-a"}],
        "InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": {
            "SpotInstanceType": "persistent", "InstanceInterruptionBehavior": "stop"}}}


def test_a_persistent_request_ends_some_time_after_its_host_should_have():
    """Nobody may be left to cancel it."""
    order = replace(ORDER, behavior="stop", until=1_700_000_000.5)
    assert data(order)["InstanceMarketOptions"]["SpotOptions"]["ValidUntil"] == 1_700_000_000
    assert "InstanceMarketOptions" not in template.instances(order, FACTS, "subnet-a", "token")


@pytest.mark.parametrize("types, credits", [
    (("t3.small",), {"CpuCredits": "standard"}), (("t3a.large", "t2.large"), {"CpuCredits": "standard"}),
    (("t3.large", "m5.large"), None), (("m5.large",), None), (("trn1.2xlarge",), None)], ids=str)
def test_a_type_that_would_charge_for_its_cpu_is_told_not_to_and_others_are_not(types, credits):
    """Whose CPU may be used without limit costs more than the price of which we speak."""
    order = replace(ORDER, pools=tuple(replace(HERE, instance_type=kind) for kind in types))
    assert data(order).get("CreditSpecification") == credits


def test_an_on_demand_machine_is_asked_for_without_a_word_of_spot():
    asked = template.instances(DISPATCHER, FACTS, "subnet-a", "token")
    assert "InstanceMarketOptions" not in {**asked, **data(DISPATCHER)} and asked["InstanceType"] == "t3.small"


def test_a_gang_is_asked_for_all_at_once_or_not_at_all():
    gang = replace(ORDER, host="f- 3 4 5", count=3, pools=(HERE,))
    asked = template.instances(gang, FACTS, "subnet-a", "token")
    assert not gang.by_fleet and (asked["MinCount"], asked["MaxCount"]) == (3, 3)
    assert asked["InstanceMarketOptions"]["SpotOptions"] == {
        "SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    assert template.name("f- 3 4 5") == "spotfleet-f-3.and.2"


def test_the_names_of_a_gang_come_back_by_launch_index():
    ids = ["my-fleet-x1-9", "my-fleet-x1-10", "my-fleet-x1-11"]
    assert names.together(ids) == "my-fleet-x1- 9 10 11" and names.members(names.together(ids)) == ids
    assert names.together(ids[:1]) == ids[0] and names.members(ids[0]) == ids[:1]


def test_more_hosts_at_once_than_their_names_fit_into_a_tag_are_refused_with_the_fix():
    ids = [f"a-rather-long-name-of-a-fleet-{n}" for n in range(1000, 1200, 2)]
    with pytest.raises(UsageError, match="100 hosts at once: their names have 530 characters together") as caught:
        template.order_tags(replace(ORDER, host=names.together(ids), count=100), "")
    assert "all_or_nothing: false" in caught.value.hint


def test_private_machines_have_no_public_address():
    asked = template.instances(DISPATCHER, replace(FACTS, public_address=False), "subnet-a", "token")
    assert asked["NetworkInterfaces"][0]["AssociatePublicIpAddress"] is False


def test_efa_has_an_interface_per_card_and_then_no_public_address_which_ec2_would_refuse():
    facts = replace(FACTS, efa_cards=(0, 1, 2, 3), placement_group="spotfleet-f-us-east-1a")
    order = replace(ORDER, pools=(replace(HERE, instance_type="p4d.24xlarge"),), count=2, host="f- 3 4")
    interfaces = template.instances(order, facts, "subnet-a", "token")["NetworkInterfaces"]
    assert [(i["DeviceIndex"], i["NetworkCardIndex"], i["InterfaceType"]) for i in interfaces] == [
        (0, 0, "efa"), (1, 1, "efa-only"), (1, 2, "efa-only"), (1, 3, "efa-only")]
    assert all(i["Groups"] == ["sg-1"] and i["SubnetId"] == "subnet-a" and i["DeleteOnTermination"]
               and "AssociatePublicIpAddress" not in i for i in interfaces)
    assert data(order, facts)["Placement"] == {"GroupName": "spotfleet-f-us-east-1a"}


def test_one_efa_card_keeps_its_public_address():
    facts = replace(FACTS, efa_cards=(0,))
    (only,) = template.instances(replace(ORDER, behavior="stop"), facts, "subnet-a", "token")["NetworkInterfaces"]
    assert only["InterfaceType"] == "efa" and only["AssociatePublicIpAddress"] is True


def test_botocore_takes_every_request():
    """Its own model checks names and types; a fake may be more lenient."""
    from botocore.session import get_session
    from botocore.validate import ParamValidator

    model = get_session().get_service_model("ec2")
    facts = replace(FACTS, kms_key="k", key_pair="p", placement_group="g", efa_cards=(0, 1))
    for operation, told in {
        "CreateLaunchTemplate": template.template(replace(ORDER, behavior="stop", until=9.0), facts, TAGS, b"x"),
        "CreateFleet": template.fleet(ORDER, FACTS, TAGS, "token"),
        "RunInstances": template.instances(replace(ORDER, behavior="stop"), facts, "subnet-a", "token"),
    }.items():
        report = ParamValidator().validate(told, model.operation_model(operation).input_shape)
        assert not report.has_errors(), report.generate_report()
