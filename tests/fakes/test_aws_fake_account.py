"""Around the instances: rights, roles, groups, events, and the hooks of the fake."""

from __future__ import annotations

import json
import threading
import time

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.aws.aws_asks import ONE_TIME, PERSISTENT, ZONE, refused, run, state, tagged

TRUST = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}],
    }
)

NOTHING = {"Effect": "Deny", "Action": "*", "Resource": "*"}


@pytest.fixture
def ec2(cloud):
    return cloud.client("ec2")


def profile(cloud, name="p", *statements, role="r"):
    iam = cloud.client("iam")
    iam.create_role(RoleName=role, AssumeRolePolicyDocument=TRUST, Tags=[{"Key": "spotfleet", "Value": "f"}])
    iam.put_role_policy(
        RoleName=role,
        PolicyName="inline",
        PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": list(statements or [NOTHING])}),
    )
    iam.create_instance_profile(InstanceProfileName=name, Tags=[{"Key": "spotfleet", "Value": "f"}])
    iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=role)


# ---- rights


def test_dry_runs_tell_what_is_allowed(cloud, ec2):
    with refused("DryRunOperation", 412):
        run(ec2, DryRun=True)
    cloud.deny(cloud.owner, {"ec2:RunInstances"})
    with refused("UnauthorizedOperation", 403):
        run(ec2, DryRun=True)
    assert cloud.everything() == [] and [c.dry_run for c in cloud.calls] == [True, True]


def test_only_what_is_allowed_goes_and_everything_asked_is_known(cloud, ec2):
    cloud.allow(cloud.owner, {"ec2:Describe*", "ec2:RunInstances"})
    ec2.describe_instances()
    with refused("UnauthorizedOperation"):
        run(ec2, TagSpecifications=tagged("instance", a="b"))  # tags at creation need ec2:CreateTags
    with refused("UnauthorizedOperation"):
        ec2.create_key_pair(KeyName="k")
    with refused("AccessDenied", 403):
        cloud.client("iam").list_roles()
    with refused("AccessDeniedException"):
        cloud.client("ssm").get_parameter(Name="/aws/service/x")
    assert cloud.actions() == {
        "ec2:DescribeInstances",
        "ec2:RunInstances",
        "ec2:CreateKeyPair",
        "iam:ListRoles",
        "ssm:GetParameter",
    }
    asked = next(c for c in cloud.calls if c.action == "ec2:RunInstances")
    assert (asked.region, asked.principal, asked.code) == ("us-east-1", "owner", "UnauthorizedOperation")
    assert asked.params["InstanceType"] == "g5.xlarge"


def test_strangers_and_expired_credentials_are_refused(cloud, ec2):
    with refused("AuthFailure", 401):
        cloud.client("ec2", key=("AKIANOBODY", "x")).describe_instances()
    with refused("InvalidClientTokenId", 403):
        cloud.client("sts", key=("AKIANOBODY", "x")).get_caller_identity()
    cloud.expire(cloud.owner)
    with refused("RequestExpired", 400):
        ec2.describe_instances()
    with refused("ExpiredToken", 403):
        cloud.client("sts").get_caller_identity()
    cloud.expire(cloud.owner, False)
    assert cloud.client("sts").get_caller_identity()["Arn"] == "arn:aws:iam::123456789012:user/owner"


def test_a_clock_that_is_wrong_is_told(cloud, ec2):
    cloud.skew_s = 400.0
    with refused("RequestExpired"):
        ec2.describe_instances()
    cloud.skew_s = 60.0
    assert ec2.describe_instances()["ResponseMetadata"]["HTTPHeaders"]["date"].count("GMT") == 1


def test_a_launch_with_a_profile_needs_the_right_to_pass_its_role(cloud, ec2):
    profile(cloud)
    cloud.allow(cloud.owner, {"ec2:*"})
    with refused("UnauthorizedOperation"):
        run(ec2, IamInstanceProfile={"Name": "p"})
    cloud.allow(cloud.owner, {"ec2:*", "iam:PassRole"})
    assert run(ec2, IamInstanceProfile={"Name": "p"})


def test_the_first_spot_instance_of_an_account_needs_its_role(cloud, ec2):
    cloud.spot_role = False
    cloud.allow(cloud.owner, {"ec2:*", "iam:GetRole"})
    with refused("AuthFailure.ServiceLinkedRoleCreationNotPermitted"):
        run(ec2, ONE_TIME)
    with refused("NoSuchEntity", 404):
        cloud.client("iam").get_role(RoleName="AWSServiceRoleForEC2Spot")
    cloud.allow(cloud.owner, None)
    assert run(ec2, ONE_TIME)
    assert cloud.client("iam").get_role(RoleName="AWSServiceRoleForEC2Spot")


def test_a_machine_may_what_the_policy_of_its_role_says(cloud, ec2):
    profile(cloud, "p", {"Effect": "Allow", "Action": "ec2:Describe*", "Resource": "*"})
    (id,) = run(ec2, IamInstanceProfile={"Name": "p"})
    _, text = cloud.metadata(id, "/latest/meta-data/iam/security-credentials/r")
    told = json.loads(text)
    session = boto3.session.Session(told["AccessKeyId"], told["SecretAccessKey"], told["Token"], "us-east-1")
    theirs = session.client("ec2", endpoint_url=cloud.url, config=Config(retries={"total_max_attempts": 1}))
    assert theirs.describe_instances()["Reservations"]
    with refused("UnauthorizedOperation"):
        theirs.terminate_instances(InstanceIds=[id])
    assert cloud.actions("role/r") == {"ec2:DescribeInstances", "ec2:TerminateInstances"}
    cloud.clock.now += 2 * 3600
    with refused("RequestExpired"):
        theirs.describe_instances()


# ---- roles and profiles


def test_a_new_profile_cannot_be_used_for_a_while(cloud, ec2, pass_s):
    cloud.profile_lag_s = 8.0
    profile(cloud)
    with refused("InvalidParameterValue"):
        run(ec2, IamInstanceProfile={"Name": "p"})
    pass_s(8)
    assert run(ec2, IamInstanceProfile={"Name": "p"})


def test_roles_and_profiles_go_in_the_right_order_only(cloud):
    profile(cloud)
    iam = cloud.client("iam")
    assert [(t.kind, t.name, t.tags) for t in cloud.everything()] == [
        ("role", "r", {"spotfleet": "f"}),
        ("instance-profile", "p", {"spotfleet": "f"}),
    ]
    for act in (lambda: iam.delete_instance_profile(InstanceProfileName="p"), lambda: iam.delete_role(RoleName="r")):
        with refused("DeleteConflict"):
            act()
    iam.remove_role_from_instance_profile(InstanceProfileName="p", RoleName="r")
    with refused("DeleteConflict"):
        iam.delete_role(RoleName="r")  # has a policy yet
    iam.delete_role_policy(RoleName="r", PolicyName="inline")
    iam.delete_role(RoleName="r")
    iam.delete_instance_profile(InstanceProfileName="p")
    assert cloud.everything() == []


# ---- groups


def test_a_group_in_use_or_named_by_another_stays(cloud, ec2):
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    first, second = (ec2.create_security_group(GroupName=n, Description="d", VpcId=vpc)["GroupId"] for n in ("a", "b"))
    ec2.authorize_security_group_ingress(
        GroupId=second, IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": first}]}]
    )
    (id,) = run(ec2, SecurityGroupIds=[first])
    with refused("DependencyViolation"):
        ec2.delete_security_group(GroupId=first)
    ec2.terminate_instances(InstanceIds=[id])
    with refused("DependencyViolation"):
        ec2.delete_security_group(GroupId=first)
    ec2.delete_security_group(GroupId=second)
    ec2.delete_security_group(GroupId=first)
    with refused("InvalidGroup.NotFound"):
        ec2.delete_security_group(GroupId=first)
    assert cloud.everything() == []


def test_a_group_that_names_itself_may_go(cloud, ec2):
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    group = ec2.create_security_group(GroupName="a", Description="d", VpcId=vpc)["GroupId"]
    own = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=own)
    with refused("InvalidPermission.Duplicate"):
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=own)
    ec2.delete_security_group(GroupId=group)
    assert cloud.everything() == []


# ---- events


def test_ec2_tells_the_queue_behind_a_rule(cloud, ec2):
    sqs, events = cloud.client("sqs"), cloud.client("events")
    url = sqs.create_queue(QueueName="q")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    pattern = {"source": ["aws.ec2"], "detail-type": ["EC2 Spot Instance Interruption Warning"]}
    events.put_rule(Name="rule", EventPattern=json.dumps(pattern))
    events.put_targets(Rule="rule", Targets=[{"Id": "1", "Arn": arn}])
    (id,) = run(ec2, PERSISTENT)
    cloud.interrupt(id)
    assert "Messages" not in sqs.receive_message(QueueUrl=url)  # the queue does not let EventBridge in
    policy = {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"Service": "events.amazonaws.com"},
                "Action": "sqs:SendMessage",
                "Resource": arn,
            }
        ],
    }
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"Policy": json.dumps(policy)})
    (id,) = run(ec2, ONE_TIME, InstanceType="m5.large")
    cloud.interrupt(id)
    (message,) = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
    event = json.loads(message["Body"])
    assert event["detail"] == {"instance-id": id, "instance-action": "terminate"}
    assert event["detail-type"] == "EC2 Spot Instance Interruption Warning"
    assert {"queue", "rule"} <= {t.kind for t in cloud.everything()}


# ---- its hooks


def test_a_runner_is_told_in_order(cloud, ec2):
    told = []

    class Runner:
        def run(self, view):
            told.append(("run", view.id, view.run))

        def stop(self, view):
            told.append(("stop", view.id, view.run))

        def terminate(self, view):
            raise RuntimeError("no")

    cloud.runner = Runner()
    cloud.set_room(ZONE, "g5.xlarge", 1)
    (id,) = run(ec2, PERSISTENT)
    cloud.take(id)
    cloud.set_room(ZONE, "g5.xlarge", 1)
    ec2.terminate_instances(InstanceIds=[id])
    cloud.settle()
    assert told[:3] == [("run", id, 1), ("stop", id, 1), ("run", id, 2)]
    assert "RuntimeError" in cloud.runner_errors[0]
    assert state(ec2, id) == "terminated"


def test_a_reset_leaves_nothing(cloud, ec2):
    run(ec2, PERSISTENT)
    cloud.client("iam").create_role(RoleName="r", AssumeRolePolicyDocument=TRUST)
    cloud.deny(cloud.owner, {"*"})
    cloud.reset()
    assert (cloud.everything(), cloud.calls) == ([], [])
    assert ec2.describe_instances()["Reservations"] == []


def test_a_mistake_of_the_fake_is_not_taken_for_the_clouds(cloud, ec2):
    def broken(call):
        raise ZeroDivisionError

    cloud.before = broken
    with pytest.raises(ClientError, match="bug of the fake"):
        ec2.describe_instances()
    assert "ZeroDivisionError" in cloud.bugs.pop()


def test_a_long_poll_of_a_queue_keeps_no_other_call_waiting(cloud, ec2):
    sqs, got = cloud.client("sqs"), []
    url = sqs.create_queue(QueueName="q")["QueueUrl"]
    poll = threading.Thread(target=lambda: got.append(sqs.receive_message(QueueUrl=url, WaitTimeSeconds=20)))
    poll.start()
    while "sqs:ReceiveMessage" not in cloud.actions():
        time.sleep(0.01)
    ec2.describe_vpcs()
    assert got == []  # it waits still
    sqs.send_message(QueueUrl=url, MessageBody="m")
    poll.join()
    assert [m["Body"] for m in got[0]["Messages"]] == ["m"]
