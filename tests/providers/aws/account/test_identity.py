"""The roles of AWS machines: as little as the policy says, made once, never another's; what is named stays as it is."""

from __future__ import annotations

import json
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spotfleet.errors import NeedsPerson
from spotfleet.model import Role
from spotfleet.providers.aws import AwsProvider
from spotfleet.providers.aws.account import identity
from spotfleet.providers.aws.mapping import names, policies

DISPATCHER, HOST = "spotfleet-f-us-east-1-dispatcher", "spotfleet-f-us-east-1-host"
TARGET = "s3://bucket/under/here"


@pytest.fixture
def to_s3(aws):
    def make(target: str = TARGET, **spec: Any) -> AwsProvider:
        plain = aws(**spec)
        return AwsProvider({**plain._config, "target": target})

    return make


def prepare(provider, fleet: str = "f", **tags: str) -> list[str]:
    said: list[str] = []
    identity.prepare(provider.account, fleet, tags, said.append)
    return said


def document(cloud, role: str) -> dict[str, Any]:
    found = cloud.client("iam").get_role_policy(RoleName=role, PolicyName=role)["PolicyDocument"]
    return found if isinstance(found, dict) else json.loads(urllib.parse.unquote(found))


def made(cloud) -> list[tuple[str, str]]:
    return sorted((t.kind, t.name) for t in cloud.everything())


def test_the_dispatcher_gets_a_role_and_hosts_get_none_where_checkpoints_do_not_go_to_s3(cloud, aws):
    provider = aws()
    prepare(provider)
    assert made(cloud) == [("instance-profile", DISPATCHER), ("role", DISPATCHER)]
    assert identity.profile(provider.account, "f", Role.DISPATCHER) == DISPATCHER
    assert identity.profile(provider.account, "f", Role.WORKER) == ""
    assert "iam:PassRole" not in policies.actions(document(cloud, DISPATCHER))


def test_hosts_that_write_checkpoints_to_s3_reach_that_folder_and_nothing_else(cloud, to_s3):
    provider = to_s3()
    prepare(provider)
    assert identity.profile(provider.account, "f", Role.WORKER) == HOST
    assert document(cloud, HOST)["Statement"] == [
        {"Sid": "List", "Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": ["arn:aws:s3:::bucket"]},
        {"Sid": "Checkpoints", "Effect": "Allow", "Resource": ["arn:aws:s3:::bucket/under/here/*"],
         "Action": ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:PutObject"]}]
    passed = next(s for s in document(cloud, DISPATCHER)["Statement"] if s["Sid"] == "PassRoles")
    assert passed["Resource"] == [f"arn:aws:iam::{cloud.ACCOUNT}:role/spotfleet/{HOST}"]


def encrypted_bucket(cloud, name: str = "bucket") -> str:
    """A bucket whose objects a key of the account's own encrypts; the key's ARN."""
    s3, key = cloud.client("s3"), cloud.client("kms").create_key()["KeyMetadata"]["Arn"]
    s3.create_bucket(Bucket=name)
    s3.put_bucket_encryption(Bucket=name, ServerSideEncryptionConfiguration={"Rules": [
        {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}}]})
    return key


def test_hosts_write_and_read_checkpoints_in_a_bucket_that_a_key_of_the_accounts_own_encrypts(cloud, to_s3):
    key = encrypted_bucket(cloud)
    prepare(to_s3())
    name, made = cloud.rights.session(HOST, "test", cloud.now() + 3600)
    s3 = cloud.client("s3", key=(name, made.secret))
    s3.put_object(Bucket="bucket", Key="under/here/1", Body=b"x")
    assert s3.get_object(Bucket="bucket", Key="under/here/1")["Body"].read() == b"x"
    with pytest.raises(s3.exceptions.ClientError, match="AccessDenied"):
        s3.put_object(Bucket="bucket", Key="elsewhere/1", Body=b"x")
    (uses,) = [s for s in document(cloud, HOST)["Statement"] if s["Sid"] == "UseKey"]
    assert uses == {"Sid": "UseKey", "Effect": "Allow", "Action": ["kms:Decrypt", "kms:GenerateDataKey"],
                    "Resource": [key], "Condition": {"StringLike": {"kms:ViaService": "s3.*"}}}


def test_where_the_buckets_key_may_not_be_looked_at_up_tells_what_hosts_may_lack(cloud, to_s3):
    encrypted_bucket(cloud)
    cloud.deny(cloud.owner, {"s3:GetEncryptionConfiguration"})
    assert [line for line in prepare(to_s3()) if "encryption of bucket bucket" in line] != []


def test_roles_are_for_ec2_alone_and_bear_the_fleets_and_the_users_tags(cloud, to_s3):
    prepare(to_s3(), team="blue")
    iam = cloud.client("iam")
    for name in (DISPATCHER, HOST):
        role = iam.get_role(RoleName=name)["Role"]
        (statement,) = role["AssumeRolePolicyDocument"]["Statement"]
        assert statement["Principal"] == {"Service": "ec2.amazonaws.com"} and role["Path"] == names.IAM_PATH
        profile = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]
        assert [r["RoleName"] for r in profile["Roles"]] == [name] and profile["Path"] == names.IAM_PATH
        for thing in (role, profile):
            assert {t["Key"]: t["Value"] for t in thing["Tags"]} == {
                "spotfleet": "f", "spotfleet-region": "us-east-1", "team": "blue"}


def test_profiles_that_are_named_are_used_and_nothing_is_made(cloud, to_s3):
    iam = cloud.client("iam")
    for name in ("boss", "hand"):
        iam.create_role(RoleName=f"{name}-role", AssumeRolePolicyDocument=json.dumps(policies.trust()))
        iam.create_instance_profile(InstanceProfileName=name)
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=f"{name}-role")
    before = made(cloud)
    provider = to_s3(dispatcher_profile="boss", host_profile="hand")
    assert prepare(provider) == [] and made(cloud) == before
    assert identity.profile(provider.account, "f", Role.DISPATCHER) == "boss"
    assert identity.profile(provider.account, "f", Role.WORKER) == "hand"
    prepare(to_s3(host_profile="hand"))  # the dispatcher's is made, and may give hosts the named one
    passed = next(s for s in document(cloud, DISPATCHER)["Statement"] if s["Sid"] == "PassRoles")
    assert passed["Resource"] == [f"arn:aws:iam::{cloud.ACCOUNT}:role/hand-role"]


def test_a_named_profile_that_is_not_there_is_told_at_once(to_s3):
    with pytest.raises(NeedsPerson, match=r"there is no instance profile nobody, which `aws\.host_profile`"):
        prepare(to_s3(host_profile="nobody"))


def test_preparing_again_makes_nothing_and_brings_the_policy_up_to_date(cloud, to_s3):
    assert len(prepare(to_s3("s3://bucket/old"))) == 4
    before = made(cloud)
    assert prepare(to_s3("s3://bucket/new")) == [] and made(cloud) == before
    assert document(cloud, HOST)["Statement"][1]["Resource"] == ["arn:aws:s3:::bucket/new/*"]


def test_two_laptops_that_prepare_at_once_make_everything_once(cloud, to_s3):
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(prepare, to_s3()) for _ in range(4)]:
            done.result()
    assert made(cloud) == sorted((kind, name) for kind in ("instance-profile", "role") for name in (DISPATCHER, HOST))


@pytest.mark.parametrize("action", ["CreateRole", "PutRolePolicy", "CreateInstanceProfile",
                                    "AddRoleToInstanceProfile"])
@pytest.mark.parametrize("lost", ["before", "after"])
def test_killed_on_the_way_the_next_command_goes_on(cloud, aws, action, lost):
    cloud.fault(f"iam:{action}", lost=lost, times=100)  # also when botocore tries again
    provider = aws()
    with pytest.raises(Exception, match="does not answer"):
        prepare(provider)
    cloud.faults_off()
    prepare(aws())
    assert made(cloud) == [("instance-profile", DISPATCHER), ("role", DISPATCHER)]
    (role,) = cloud.client("iam").get_instance_profile(InstanceProfileName=DISPATCHER)["InstanceProfile"]["Roles"]
    assert role["RoleName"] == DISPATCHER and "ec2:RunInstances" in policies.actions(document(cloud, DISPATCHER))


@pytest.mark.parametrize("kind", ["role", "instance profile"])
def test_a_role_of_that_name_that_is_not_ours_is_neither_used_nor_touched(cloud, aws, kind):
    iam = cloud.client("iam")
    if kind == "role":
        iam.create_role(RoleName=DISPATCHER, AssumeRolePolicyDocument=json.dumps(policies.trust()))
    else:
        iam.create_instance_profile(InstanceProfileName=DISPATCHER)
    with pytest.raises(NeedsPerson, match=f"there is a {kind} {DISPATCHER} that does not have the tag spotfleet=f"):
        prepare(aws())
    if kind == "role":
        assert iam.list_role_policies(RoleName=DISPATCHER)["PolicyNames"] == []


def test_who_may_not_make_roles_is_told_which_policy_he_needs(cloud, aws):
    cloud.deny("owner", {"iam:CreateRole"})
    with pytest.raises(NeedsPerson, match="CreateRole") as told:
        prepare(aws())
    assert "--policy" in told.value.hint
    cloud.deny("owner", set())


def test_long_names_of_fleets_fit_into_iam():
    role = names.role("x" * 60, "dispatcher", "ap-southeast-2")
    assert len(role) <= 64 and role != names.role("x" * 59, "dispatcher", "ap-southeast-2")


BOUNDARY = "arn:aws:iam::123456789012:policy/research-boundary"
ALL_BUT_IAM = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "NotAction": "iam:*", "Resource": "*"}]}


def bounded_user(cloud, monkeypatch) -> None:
    """Someone who may make bounded roles only, as a company allows it; and the boundary, which is there."""
    cloud.client("iam").create_policy(PolicyName="research-boundary", PolicyDocument=json.dumps(ALL_BUT_IAM))
    key, secret = cloud.user("ci")
    cloud.attach("ci", policies.laptop(policies.Scope(boundary=BOUNDARY, target="s3://runs/g5")))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)


def test_all_roles_that_up_makes_have_the_boundary_that_the_fleet_file_names(cloud, aws, monkeypatch):
    bounded_user(cloud, monkeypatch)
    provider = AwsProvider({**aws(permissions_boundary=BOUNDARY)._config, "target": "s3://runs/g5"})
    prepare(provider)
    roles = {r["RoleName"]: r for r in cloud.client("iam").list_roles(PathPrefix="/spotfleet/")["Roles"]}
    assert len(roles) == 2
    for name in roles:
        role = cloud.client("iam").get_role(RoleName=name)["Role"]
        assert role["PermissionsBoundary"]["PermissionsBoundaryArn"] == BOUNDARY
    assert prepare(provider) == []  # again: nothing to do


def test_with_the_printed_policy_no_role_comes_without_the_boundary_nor_gets_rid_of_it(cloud, aws, monkeypatch):
    bounded_user(cloud, monkeypatch)
    with pytest.raises(NeedsPerson, match="iam:CreateRole"):
        prepare(aws())
    provider = aws(permissions_boundary=BOUNDARY)
    prepare(provider)
    name = identity.profile(provider.account, "f", Role.DISPATCHER)
    iam = provider.account.client("iam")
    with pytest.raises(NeedsPerson, match="DeleteRolePermissionsBoundary"):
        iam.delete_role_permissions_boundary(RoleName=name)
    iam.put_role_policy(RoleName=name, PolicyName=name, PolicyDocument=json.dumps(
        {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}))
    assert not cloud.rights.may(f"role/{name}", "iam:CreateUser")  # whatever is written into it
    assert cloud.rights.may(f"role/{name}", "ec2:DescribeInstances")


def test_a_role_of_an_earlier_up_gets_the_boundary_as_well(cloud, aws):
    cloud.client("iam").create_policy(PolicyName="research-boundary", PolicyDocument=json.dumps(ALL_BUT_IAM))
    prepare(aws())
    provider = aws(permissions_boundary=BOUNDARY)
    prepare(provider)
    role = cloud.client("iam").get_role(RoleName=identity.profile(provider.account, "f", Role.DISPATCHER))["Role"]
    assert role["PermissionsBoundary"]["PermissionsBoundaryArn"] == BOUNDARY
