"""Accounts whose disks are encrypted with a key of their own: named in the fleet file, or the account's default."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spotfleet.errors import NeedsPerson
from spotfleet.model import FleetSpec, Need, Nodes, Role
from spotfleet.providers.aws.account import disk_key, identity
from spotfleet.providers.aws.mapping import policies
from tests.support.aws.aws_hosts import A, asked, dispatcher, prepared, request

HERE = "us-east-1"
OFFICE = ("198.51.100.0/24",)
G5 = FleetSpec("g5", provider="aws", any_of=(Need(instance_type="g5.xlarge"),), nodes=Nodes(2, 4, 4))
SPOT = "arn:aws:iam::123456789012:role/aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot"


def a_key(cloud: Any, *, granted: bool = True, default: bool = False) -> str:
    """A key of the account's own, which EC2 may use for spot hosts if `granted`."""
    kms = cloud.client("kms", HERE)
    key = kms.create_key()["KeyMetadata"]["Arn"]
    if granted:
        kms.create_grant(KeyId=key, GranteePrincipal=SPOT, Operations=["Decrypt", "CreateGrant"])
    if default:
        cloud.set_default_key(HERE, key)
    return key


def found(provider: Any, about: str = "disk key") -> list[tuple[str, str]]:
    return [(f.level, f.what) for f in provider.findings(G5) if f.about == about]


def as_dispatcher(cloud: Any, monkeypatch: pytest.MonkeyPatch, provider: Any) -> None:
    role = identity.profile(provider.account, "f", Role.DISPATCHER)
    name, key = cloud.rights.session(role, "test", cloud.now() + 3600)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key.secret)
    monkeypatch.setenv("AWS_SESSION_TOKEN", key.token)


def test_a_dispatcher_may_use_the_accounts_own_default_key(cloud, aws, monkeypatch):
    a_key(cloud, default=True)
    provider = prepared(aws)
    as_dispatcher(cloud, monkeypatch, provider)
    aws("dispatcher").launch(request(A))
    cloud.settle()
    assert [i.state for i in cloud.instances()] == ["running"]


def test_a_dispatcher_may_use_no_other_key(cloud, aws, monkeypatch):
    provider = prepared(aws)
    a_key(cloud, default=True)  # set after `up`
    as_dispatcher(cloud, monkeypatch, provider)
    aws("dispatcher").launch(request(A))
    cloud.settle()
    assert cloud.instances() == []


def test_check_tells_whose_key_encrypts_and_whether_spot_hosts_may_use_it(cloud, aws):
    assert found(aws(ssh_from=OFFICE)) == [("ok", f"{HERE}: AWS's own key encrypts the disks")]
    key = a_key(cloud, default=True, granted=False)
    ((level, what),) = found(aws(ssh_from=OFFICE))
    assert level == "warning" and f"{key} encrypts the disks, as the account's default, and AWSServiceRole" in what
    (fix,) = [f.fix for f in aws(ssh_from=OFFICE).findings(G5) if f.about == "disk key"]
    assert f"aws kms create-grant --region {HERE} --key-id {key} --grantee-principal {SPOT} " in fix
    named = a_key(cloud)
    assert found(aws(ssh_from=OFFICE, kms_key=named)) == [
        ("ok", f"{HERE}: {named} encrypts the disks, and AWSServiceRoleForEC2Spot has a grant for it")]


@pytest.mark.parametrize("state, word", [("Disabled", "Disabled"), ("gone", "is not there")])
def test_a_key_that_encrypts_nothing_is_in_the_way(cloud, aws, state: str, word: str):
    key = a_key(cloud)
    if state == "Disabled":
        cloud.client("kms", HERE).disable_key(KeyId=key.rpartition("/")[2])
    ((level, what),) = found(aws(ssh_from=OFFICE, kms_key=key if state == "Disabled" else "alias/none"))
    assert level == "blocker" and word in what


def test_a_laptop_whose_policy_does_not_name_the_default_key_hears_how_to_name_it(cloud, aws, monkeypatch):
    key = a_key(cloud, default=True)
    name, secret = cloud.user("ci")
    cloud.attach("ci", policies.laptop(policies.Scope()))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    (blocker,) = [f for f in aws(ssh_from=OFFICE).findings(G5) if f.level == "blocker"]
    assert blocker.what.startswith("denied: kms:CreateGrant, kms:Decrypt, ") and f"kms_key: {key}" in blocker.fix
    cloud.attach("ci", policies.laptop(policies.Scope(kms_key=key)))
    assert [f.what for f in aws(ssh_from=OFFICE, kms_key=key).findings(G5) if f.level != "ok"] == []


def test_after_three_machines_that_ended_for_the_key_a_person_is_asked_and_none_is_launched(cloud, aws, monkeypatch):
    monkeypatch.setattr(disk_key, "ENDED_S", 0.0)
    key = a_key(cloud, granted=False)
    provider = prepared(aws, kms_key=key)
    for number in range(3):
        provider.launch(request(A, f"f-{number}"))
    launched = asked(cloud, "ec2:CreateFleet")
    with pytest.raises(NeedsPerson, match="EC2 ended the last 3 machines") as told:
        provider.launch(request(A, "f-3"))
    assert key in str(told.value) and "check aws FILE" in told.value.hint
    assert asked(cloud, "ec2:CreateFleet") == launched
    cloud.client("kms", HERE).create_grant(KeyId=key, GranteePrincipal=SPOT, Operations=["Decrypt", "CreateGrant"])
    monkeypatch.setattr(disk_key, "RECENT_S", -1.0)  # ten minutes later
    provider.launch(request(A, "f-3"))
    monkeypatch.setattr(disk_key, "RECENT_S", 600.0)
    provider.launch(dispatcher())  # the newest runs
    assert len(cloud.instances()) == 2


def test_policies_name_the_default_key_where_the_fleet_file_names_none():
    key = "arn:aws:kms:us-east-1:123456789012:key/k"
    of_default = policies.dispatcher(policies.Scope("f", default_keys=(key,)))
    of_named = policies.dispatcher(policies.Scope("f", kms_key=key))
    assert json.dumps(of_default) == json.dumps(of_named)
