"""botocore's models see in requests and answers what this fake alone would let pass."""

from __future__ import annotations

import pytest

from tests.support.fakes import service_models as models

TRUST = "{}"


@pytest.mark.parametrize("service, name, params, problem", [
    ("ec2", "DescribeLaunchTemplates", {"MaxResults": 999}, "MaxResults: 999 .* 1 to 200"),
    ("ec2", "DescribeLaunchTemplates", {"LaunchTemplateNames": ["x"]}, "1 characters where 3 to 128"),
    ("ec2", "CreateFleet", {"Type": "instant", "LaunchTemplateConfigs": []}, "TargetCapacitySpecification: missing"),
    ("ec2", "RunInstances", {"MinCount": 1, "MaxCount": 1, "InstanceInitiatedShutdownBehavior": "end"}, "is none of"),
    ("ec2", "DescribeInstances", {"Filters": [{"Name": "state", "Values": ["x"]}]}, "filter 'state' is not documented"),
    ("ec2", "DescribeInstances", {"Filters": [{"Name": "instance-id", "Values": ["i"] * 201}]}, "more than 200"),
    ("iam", "CreateRole", {"RoleName": "a b", "AssumeRolePolicyDocument": TRUST}, "does not match"),
    ("iam", "CreateRole", {"RoleName": "é", "AssumeRolePolicyDocument": TRUST}, "does not match"),
    ("iam", "TagRole", {"RoleName": "r", "Tags": [{"Key": "a,b", "Value": ""}]}, "Key: 'a,b' does not match"),
    ("events", "PutTargets", {"Rule": "r", "Targets": [{"Id": "1", "Arn": "a"}] * 101}, "101 items"),
    ("sqs", "CreateQueue", {"QueueName": "q", "Tags": {}}, "Tags: unknown"),
    ("ec2", "MakeInstances", {}, "has no operation"),
])  # fmt: skip
def test_a_request_that_the_service_would_refuse_is_found(service, name, params, problem):
    found = models.refused(service, name, params)
    with pytest.raises(AssertionError, match=problem):
        assert not found, found


@pytest.mark.parametrize("service, name, params", [
    ("ec2", "DescribeInstances", {"Filters": [{"Name": "tag:team", "Values": ["*"]}, {"Name": "tag-key"}]}),
    ("iam", "TagRole", {"RoleName": "a+b", "Tags": [{"Key": "Größe: 2", "Value": ""}]}),
])  # fmt: skip
def test_a_request_that_the_service_takes_is_not(service, name, params):
    assert models.refused(service, name, params) == []


def test_what_the_cloud_lets_pass_is_kept(cloud):
    cloud.client("ec2").describe_launch_templates(MaxResults=999)
    assert cloud.findings == ["DescribeLaunchTemplates.MaxResults: 999 where 1 to 200 are allowed"]
    cloud.findings.clear()


def test_what_the_cloud_refuses_by_itself_is_no_finding(cloud):
    with pytest.raises(Exception, match="InvalidLaunchTemplateName"):
        cloud.client("ec2").create_launch_template(LaunchTemplateName="a!", LaunchTemplateData={"ImageId": "i"})
    assert cloud.findings == []


def test_members_and_elements_of_an_answer_that_no_client_reads_are_found():
    assert models.unknown_members("ec2", "DescribeVpcs", {"Vpc": []}) == ["answer to DescribeVpcs.Vpc: unknown"]
    xml = "<R xmlns='x'><requestId>r</requestId><vpcSet><item><vpcId>v</vpcId>{}</item></vpcSet></R>"
    assert models.unknown("ec2", "DescribeVpcs", xml.format("").encode()) == []
    assert models.unknown("ec2", "DescribeVpcs", xml.format("<id>v</id>").encode()) == [
        "DescribeVpcs.vpcSet[]: <id>"]
    assert models.unknown("ec2", "DescribeVpcs", xml.format("<state>gone</state>").encode()) == [
        "DescribeVpcs.vpcSet[].state: 'gone' is none of pending, available, deleting"]
