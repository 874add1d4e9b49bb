"""`spotfleet down` on AWS leaves nothing, proves it and touches nothing else; what was interrupted is gone on with."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from spotfleet.api import machine
from spotfleet.api.account import resources
from spotfleet.api.lifecycle.down import close_if_ended, take_down
from spotfleet.cli.commands import write
from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import CloudState, Role
from spotfleet.providers.aws import session
from tests.providers.aws.account.test_resources import OURS, scatter
from tests.support.aws.aws_hosts import LONG, B, request
from tests.support.aws.aws_laptop import Laptop, laptop

PROOF = ("nothing of fleet f is listed in us-east-1: 0 machines, 0 spot-instances-requests, 0 fleets, "
         "0 launch-templates, 0 volumes, 0 network-interfaces, 0 elastic-ips, 0 security-groups, 0 key-pairs, "
         "0 placement-groups, 0 eventbridge-rules, 0 sqs-queues, 0 instance-profiles, 0 roles")


@pytest.fixture
def user(cloud, tmp_path, monkeypatch, hurried) -> Laptop:
    monkeypatch.setenv("HOME", str(tmp_path))
    session.reset()  # forget another test's cloud
    for module, name, seconds in ((machine, "QUIET_S", 0.1), (machine, "QUIET_TICK_S", 0.05),
                                  (machine, "END_TICK_S", 0.05), (resources, "POLL_S", 0.02),
                                  (resources, "SLOW_POLL_S", 0.05)):
        monkeypatch.setattr(module, name, seconds)
    return laptop(tmp_path / "house", target="s3://bucket/x")


def down(user: Laptop, said: list[str] | None = None, discard: bool = False):
    return take_down(user.folder, (said if said is not None else []).append, discard=discard, why="asked")


def test_down_ends_every_machine_removes_everything_else_and_proves_it(cloud, user):
    scatter(cloud, "spotfleet-f-x", OURS)
    user.furnish(cloud)
    assert len(cloud.everything()) > 30
    said: list[str] = []
    done = down(user, said)
    assert cloud.everything() == []
    assert done.proof == PROOF
    assert {b.kind for b in done.removed} == {
        "launch-template", "volume", "network-interface", "elastic-ip", "security-group", "key-pair", "placement-group",
        "eventbridge-rule", "sqs-queue", "instance-profile", "role"}
    assert len([line for line in said if line.startswith("removed ")]) == len(done.removed)
    assert {line.split()[1] for line in said if line.startswith("ended ")} == {"f-1", "f-2", "f-3"}
    assert user.folder.is_down and down(user).already


def test_down_touches_nothing_that_others_have_made(cloud, user, aws):
    scatter(cloud, "mine", {"team": "vision", "cost-center": "42"})
    other = laptop(user.house.path.parent / "other", name="g")
    other.prepare()
    before = cloud.everything()
    user.furnish(cloud)
    down(user)
    assert cloud.everything() == before


def test_down_of_a_fleet_that_was_only_prepared_leaves_nothing(cloud, user):
    user.prepare()
    assert down(user).proof == PROOF and cloud.everything() == []


ALSO = [("ec2:TerminateInstances", "before"), ("iam:RemoveRoleFromInstanceProfile", "after"),
        ("events:RemoveTargets", "after"), ("sqs:DeleteQueue", "after")]  # tests/sweep tries every call there is


@pytest.mark.parametrize("action, lost", [
    ("ec2:CancelSpotInstanceRequests", "after"), ("ec2:DeleteSecurityGroup", "after"),
    ("iam:DeleteRolePolicy", "after"), *(pytest.param(*call, marks=LONG) for call in ALSO)])
def test_killed_at_any_call_the_next_down_goes_on_from_there(cloud, user, monkeypatch, action, lost):
    if "Instance" in action and action.startswith("ec2"):
        user.furnish(cloud)
        monkeypatch.setattr(machine, "END_S", 0.3)  # only here do machines stay
    else:
        user.prepare()
    cloud.fault(action, lost=lost, times=100)
    monkeypatch.setattr(resources, "CLEAR_S", 0.3)
    with contextlib.suppress(SpotfleetError):  # what was lost may be seen as done
        down(user)
    assert any(c.action == action for c in cloud.calls)
    cloud.faults_off()
    monkeypatch.setattr(machine, "END_S", 60.0)
    monkeypatch.setattr(resources, "CLEAR_S", 60.0)
    done = down(user)
    assert done.already or done.proof == PROOF
    assert cloud.everything() == []


def test_what_somebody_else_uses_is_waited_for_and_then_named(cloud, user, monkeypatch):
    user.prepare()
    (group,) = (b for b in user.provider.list_resources("f") if b.kind == "security-group"
                and next(t.name for t in cloud.everything() if t.id == b.id) == "spotfleet-f")
    ec2 = cloud.client("ec2", "us-east-1")
    (foreign,) = ec2.run_instances(ImageId=cloud.UBUNTU, InstanceType="c5.large", MinCount=1, MaxCount=1,
                                   SecurityGroupIds=[group.id])["Instances"]
    monkeypatch.setattr(resources, "CLEAR_S", 0.2)
    said: list[str] = []
    with pytest.raises(SpotfleetError, match=rf"there are still security-group {group.id} in us-east-1: .*uses it"):
        down(user, said)
    assert any(line.startswith(f"waiting for the cloud to let go of security-group {group.id}") for line in said)
    assert not any(line.startswith(f"removed security-group {group.id}") for line in said)
    assert [t.kind for t in cloud.everything() if "spotfleet" in t.tags] == ["security-group"]  # all else is gone
    assert [i.id for i in cloud.instances()] == [foreign["InstanceId"]] and not user.folder.is_down
    ec2.terminate_instances(InstanceIds=[foreign["InstanceId"]])
    cloud.settle()
    assert down(user).proof == PROOF


def test_a_group_whose_machine_is_still_ending_goes_once_it_has_ended(cloud, user):
    user.furnish(cloud)
    cloud.ending_s = 0.4
    assert down(user).proof == PROOF and cloud.everything() == []


def test_who_may_not_remove_something_is_told_once_all_else_is_gone(cloud, user):
    user.prepare()
    cloud.deny("owner", {"iam:DeleteRole"})
    with pytest.raises(NeedsPerson, match=r"role spotfleet-f-us-east-1-\w+ is left: .*DeleteRole.*; and 1 more"):
        down(user)
    assert {t.kind for t in cloud.everything()} == {"role"} and not user.folder.is_down
    cloud.deny("owner", set())
    assert down(user).proof == PROOF


def until_listed(provider) -> None:
    """Until the listing shows that the dispatcher has ended."""
    deadline = time.monotonic() + 30
    while any(h.role is Role.DISPATCHER and h.state is not CloudState.TERMINATED for h in provider.hosts("f")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_listings_that_lag_do_not_make_down_believe_that_it_is_done(cloud, user):
    user.furnish(cloud)
    cloud.lag_s = 0.3
    until_listed(user.provider)
    assert down(user).proof == PROOF
    assert cloud.everything() == []


def test_a_machine_that_may_not_be_ended_is_named_and_nothing_is_proved_until_it_is_gone(cloud, user, monkeypatch):
    """One that EC2 has launched anew bears no tag, and the policies let us end what bears it."""
    cloud.relaunched_tagged = False
    user.prepare().launch(request(B, "f-1", interruption_behavior="stop"))
    (first,) = cloud.instances()
    cloud.client("ec2", "us-east-1").terminate_instances(InstanceIds=[first.id])
    (new,) = cloud.instances()
    cloud.deny("owner", {"ec2:TerminateInstances"})
    with monkeypatch.context() as hurry:
        hurry.setattr(machine, "END_S", 0.3)
        for said in (f"EC2 has launched {new.id} anew", rf"still lists f-1 \({new.id}\)"):  # it is asked again later
            with pytest.raises(SpotfleetError, match=said):
                down(user)
            assert not user.folder.is_down
    cloud.deny("owner", set())
    cloud.client("ec2", "us-east-1").terminate_instances(InstanceIds=[new.id])  # by hand
    assert down(user).proof == PROOF and cloud.everything() == []


def test_what_a_fleet_that_has_ended_itself_had_goes_with_the_next_command(cloud, user):
    user.prepare()
    user.folder.update(reached=True)
    assert close_if_ended(user.folder) and user.folder.is_down
    assert cloud.everything() == []


def test_a_fleet_that_is_being_made_is_not_taken_for_one_that_has_ended(cloud, user):
    user.prepare()
    before = cloud.everything()
    assert not close_if_ended(user.folder) and cloud.everything() == before


def test_the_command_prints_what_went_and_the_proof(cloud, user, monkeypatch, capsys):
    monkeypatch.setenv("SPOTFLEET_HOME", str(user.house.path))
    user.prepare()
    group = next(t.id for t in cloud.everything() if t.name == "spotfleet-f")
    write.down("f", yes=True, discard=False, as_json=True)
    said = capsys.readouterr()
    assert PROOF in said.err and f"removed security-group {group} in us-east-1" in said.err
    assert "removed role spotfleet-f-us-east-1-dispatcher" in said.err
    told = json.loads(said.out)
    assert told["proof"] == PROOF and {"kind": "security-group", "id": group}.items() <= told["removed"][0].items()
    write.down("f", yes=True, discard=False, as_json=True)
    assert json.loads(capsys.readouterr().out)["already"] is True
