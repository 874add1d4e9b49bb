"""What the policies of AWS allow: what is called and nothing else, and for a dispatcher its own fleet alone.

The fake judges roles by their own policies, conditions included. That AWS judges in the same way was not tried.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from spotfleet import providers
from spotfleet.errors import NeedsPerson
from spotfleet.model import FleetSpec, Need, Nodes, Role
from spotfleet.providers.aws import AwsProvider
from spotfleet.providers.aws.account import identity
from spotfleet.providers.aws.mapping import names, policies
from spotfleet.providers.aws.mapping.policies import Scope
from tests.providers.aws.account.test_resources import OURS, scatter, tagged
from tests.support.aws.aws_hosts import A, B, dispatcher, request

HERE = "us-east-1"
OFFICE = ("198.51.100.0/24",)
INDIRECT = {  # action -> why it is needed though nobody calls it
    "ec2:CreateTags": "for tags that come with what is created",
    "iam:TagRole": "for tags that come with what is created",
    "iam:TagInstanceProfile": "for tags that come with what is created",
    "events:TagResource": "for tags that come with what is created",
    "sqs:TagQueue": "for tags that come with what is created",
    "iam:PassRole": "asked of who gives a machine its profile",
    "s3:ListBucket": "`check` asks HeadBucket, which is that",
    "sqs:DeleteMessage": "DeleteMessageBatch is that",
    "kms:ListGrants": "asked where a customer's key encrypts the disks: test_disk_key.py",
}
MEANS = {"sqs:DeleteMessageBatch": "sqs:DeleteMessage", "s3:HeadBucket": "s3:ListBucket"}
NO_PERMISSION_NEEDED = {"sts:GetCallerIdentity"}


def statements(document: dict[str, Any], verb: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for statement in document["Statement"]:
        for action in statement["Action"]:
            if verb in action:
                yield action, statement


def reads(action: str) -> bool:
    return action.split(":")[1].startswith(("Describe", "Get", "List", "Simulate", "Receive"))


FLEETS = Scope("f", (HERE,), "123456789012", host_role="arn:aws:iam::123456789012:role/spotfleet/h", queue=True)


# ---- as texts


def test_a_dispatcher_changes_nothing_that_is_not_of_its_fleet():
    for action, statement in statements(policies.dispatcher(FLEETS)):
        if reads(action):
            continue
        conditions = json.dumps(statement.get("Condition", {}))
        used = all(r.split(":")[5].split("/")[0] in ("image", "snapshot", *policies.USED_BY_LAUNCH)
                   for r in statement["Resource"] if ":ec2:" in r) and ":ec2:" in statement["Resource"][0]
        passed = action == "iam:PassRole" and statement["Resource"] == [FLEETS.host_role]
        queue = "arn:aws:sqs:us-east-1:123456789012:spotfleet-f"
        heard = action.startswith("sqs:") and statement["Resource"] == [queue]
        assert used or passed or heard or f'Tag/{names.FLEET}": "f"' in conditions, (action, statement)


def test_a_dispatcher_tags_what_it_creates_and_three_words_on_its_hosts():
    tags = [s for a, s in statements(policies.dispatcher(FLEETS)) if a == "ec2:CreateTags"]
    at_launch, later = tags
    assert at_launch["Condition"]["StringEquals"]["ec2:CreateAction"] == ["RunInstances", "CreateFleet",
                                                                          "CreateLaunchTemplate"]
    assert later["Condition"]["ForAllValues:StringEquals"] == {
        "aws:TagKeys": [providers.DISPATCHER_TAG, names.TAKEN, names.MEMBER]}


def test_nobody_may_make_a_machine_that_does_not_bear_our_tag():
    for document in (policies.laptop(Scope()), policies.dispatcher(FLEETS)):
        for _action, statement in statements(document, "ec2:RunInstances"):
            for resource in statement["Resource"]:
                if ":instance/" in resource:
                    assert f"aws:RequestTag/{names.FLEET}" in json.dumps(statement["Condition"])


def test_a_users_machines_groups_and_roles_that_are_not_ours_are_out_of_reach():
    for action, statement in statements(policies.laptop(Scope())):
        if reads(action) or action.startswith(("sqs:", "events:")):
            continue
        if action.startswith("iam:"):
            assert all(names.IAM_PATH in r for r in statement["Resource"]), action
        elif action.split(":")[1].startswith(("Delete", "Terminate", "Cancel", "Release")):
            assert f"aws:ResourceTag/{names.FLEET}" in json.dumps(statement["Condition"]), action


ALL_KEYS = "arn:aws:kms:*:123456789012:key/*"


@pytest.mark.parametrize("name, resource, alias", [
    ("arn:aws:kms:us-east-1:123456789012:key/k", "arn:aws:kms:us-east-1:123456789012:key/k", ""),
    ("0a1b-2c", "arn:aws:kms:*:123456789012:key/0a1b-2c", ""),
    ("alias/mine", ALL_KEYS, "alias/mine"),
    ("arn:aws:kms:us-east-1:210987654321:alias/mine", "arn:aws:kms:us-east-1:210987654321:key/*", "alias/mine"),
], ids=["arn", "id", "alias", "arn-of-alias"])
def test_of_a_customers_keys_only_the_named_one_is_lent(name, resource, alias):
    scope = Scope("f", (HERE,), "123456789012", kms_key=name)
    for document in (policies.laptop(scope), policies.dispatcher(scope)):
        of_keys = [s for _a, s in statements(document, "kms:") if s["Sid"] != "Look"]
        assert of_keys and all(s["Resource"] == [resource] for s in of_keys)
        for statement in of_keys:
            named = statement["Condition"].get("ForAnyValue:StringEquals", {}).get("kms:ResourceAliases", [])
            assert named == ([alias] if alias else [])


def test_who_names_both_profiles_makes_no_roles_and_may_give_machines_the_named_ones():
    named = {"account": "123456789012", "dispatcher_profile": "boss", "target": "s3://b/x"}
    may = policies.laptop(Scope(**named, host_profile="hand"))
    assert {a for a in policies.actions(may) if a.startswith("iam:")} == {
        "iam:GetRole", "iam:GetInstanceProfile", "iam:SimulatePrincipalPolicy", "iam:PassRole"}
    (passed,) = [s for a, s in statements(may, "iam:PassRole")]
    assert passed["Resource"] == ["arn:aws:iam::123456789012:role/*"]
    assert "ec2.amazonaws.com" in passed["Condition"]["StringEquals"]["iam:PassedToService"]
    assert "iam:CreateRole" in policies.actions(policies.laptop(Scope(**named)))  # the hosts' own is made
    (passed,) = [s for a, s in statements(policies.laptop(Scope(account="123456789012")), "iam:PassRole")]
    assert passed["Resource"] == ["arn:aws:iam::123456789012:role/spotfleet/*"]


@pytest.mark.parametrize("document, limit", [
    (policies.laptop(Scope()), 6144),  # limit of a managed policy; white space does not count
    (policies.dispatcher(FLEETS), 10_240),  # limit of all inline policies of a role
    (policies.dispatcher(Scope("f" * 40, tuple(f"ap-southeast-{n}" for n in range(9)), "123456789012", "aws-us-gov",
                             FLEETS.host_role, "arn:aws:kms:us-east-1:123456789012:key/k", "/own/image", "s3://b/x",
                             True)), 10_240),
], ids=["laptop", "dispatcher", "dispatcher-of-many-regions"])
def test_policies_are_no_longer_than_iam_takes(document, limit):
    assert len(json.dumps(document, separators=(",", ":")).replace(" ", "")) <= limit


def test_a_shortened_policy_allows_each_launch_and_change_as_before_and_no_read_is_conditioned():
    long = policies.laptop(Scope(queue=True, target="s3://b/x", kms_key="alias/k"))
    short = policies.shortened(long)
    assert len(json.dumps(short)) < len(json.dumps(long)) - 500
    allowed = [{(a, r, json.dumps(s.get("Condition"))) for a, s in statements(d) for r in s["Resource"]}
               for d in (long, short)]
    assert allowed[0] <= allowed[1]
    more = {(a, r.rpartition(":")[2].partition("/")[0]) for a, r, _ in allowed[1] - allowed[0]}
    assert all(a.startswith("ec2:") for a, _kind in more)
    assert ("ec2:TerminateInstances", "instance") not in more and ("ec2:CreateTags", "instance") not in more


def test_the_tag_by_which_hosts_find_their_dispatcher_is_the_one_that_may_be_set():
    assert policies.DISPATCHER_TAG == providers.DISPATCHER_TAG


@pytest.mark.parametrize("target, folder", [
    ("s3://b", "arn:aws:s3:::b/*"), ("s3://b/", "arn:aws:s3:::b/*"), ("s3://b/x/y", "arn:aws:s3:::b/x/y/*"),
    ("s3://b/x/", "arn:aws:s3:::b/x/*")])
def test_hosts_reach_the_folder_of_the_checkpoints(target, folder):
    objects = next(s for a, s in statements(policies.host(target)) if a == "s3:PutObject")
    assert objects["Resource"] == [folder]


# ---- against what is called


@pytest.fixture
def acting_as(cloud, monkeypatch) -> Callable[[str], Any]:
    """with acting_as("role"): providers that ask for the first time then have that role's credentials."""

    @contextmanager
    def act(role: str) -> Iterator[None]:
        name, key = cloud.rights.session(role, "test", cloud.now() + 3600)
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", name)
            patch.setenv("AWS_SECRET_ACCESS_KEY", key.secret)
            patch.setenv("AWS_SESSION_TOKEN", key.token)
            yield

    return act


@pytest.fixture
def user(cloud) -> str:
    """A role that may what `check --policy` prints."""
    document = policies.laptop(Scope(account=cloud.ACCOUNT, queue=True, target="s3://bucket/x"))
    iam = cloud.client("iam")
    iam.create_role(RoleName="user", AssumeRolePolicyDocument=json.dumps(policies.trust()))
    iam.put_role_policy(RoleName="user", PolicyName="user", PolicyDocument=json.dumps(document))
    cloud.client("s3").create_bucket(Bucket="bucket")
    return "user"


def fleet(aws, side: str) -> AwsProvider:
    plain = aws(side, "cluster", ssh_from=OFFICE, event_queue=True)
    return AwsProvider({**plain._config, "target": "s3://bucket/x"})


def called(cloud, principal: str) -> set[str]:
    """What it called, dry runs and simulations of `check` apart, in the words of policies."""
    found = {MEANS.get(c.action, c.action) for c in cloud.calls if c.principal == principal and not c.dry_run}
    return found - NO_PERMISSION_NEEDED


def refused(cloud) -> list[Any]:
    return [c for c in cloud.calls if c.code in ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")]


def as_user(provider: AwsProvider, cloud) -> None:
    """All that a laptop asks of AWS, from `check` to `leaks --fix`."""
    spec = FleetSpec("f", "aws", (Need(accelerator="A10G", accelerator_count=1),), Nodes(1, 2, 4))
    list(provider.findings(spec))
    provider.check()
    provider.in_regions([HERE, "us-west-2"]).cheapest_region((Need(), *spec.any_of), spec.dispatcher, 2)
    provider.regions(everywhere=True)
    provider.prices([A.pool, "aws/us-east-1a/t3.small/on-demand"], cloud.now() - 3600)
    provider.prepare("f", {"team": "blue"}, lambda _line: None)
    moved = AwsProvider({**provider._config, "aws": json.dumps({"regions": [HERE], "ssh_from": ["192.0.2.0/24"],
                                                                "event_queue": True})})
    moved.allow_ssh_from_here("f", lambda _line: None)
    provider.launch(dispatcher())
    cloud.settle()
    assert [h.role for h in provider.hosts("f")] == [Role.DISPATCHER]
    assert provider.boot_files("f-d-0")


def as_dispatcher(provider: AwsProvider, cloud) -> None:
    provider.offers(Need(accelerator="A10G", accelerator_count=1))
    provider.prices([A.pool], cloud.now() - 3600)
    provider.launch(request(A, "f-1", alternatives=(B,)))
    provider.launch_together([request(B, "f-3"), request(B, "f-4")])
    cloud.settle()
    assert len(provider.hosts("f")) == 4
    provider.tag("f-1", {providers.DISPATCHER_TAG: "https://10.0.0.9:7443"})
    cloud.interrupt(next(i.id for i in cloud.instances() if i.tags.get(names.HOST) == "f-1"))
    provider.poll_events("f", 1.0)
    provider.interrupt("f-3", None)
    provider.terminate("f-1")


def test_the_whole_story_needs_what_the_policies_allow_and_each_of_it(cloud, aws, acting_as, user):
    laptop, role = fleet(aws, "laptop"), f"role/{identity.profile(aws().account, 'f', Role.DISPATCHER)}"
    cloud.forget_calls()
    with acting_as(user):
        as_user(laptop, cloud)
    with acting_as(role.removeprefix("role/")):
        boss = fleet(aws, "dispatcher")
        as_dispatcher(boss, cloud)
        stopping = aws("dispatcher", ssh_from=OFFICE)  # a fleet whose hosts are stopped is in no placement group
        stopping.launch(request(B, "f-7", interruption_behavior="stop"))
        cloud.settle()
        stopping.interrupt("f-7", None)
        stopping.terminate("f-7")
    dispatchers = policies.actions(policies.dispatcher(Scope("f", queue=True, host_role="x")))
    with acting_as(user):
        for host in laptop.hosts("f"):
            laptop.terminate(host.request_id)
        cloud.settle()
        scatter(cloud, "spotfleet-f-x", OURS)
        leftover(cloud)
        for resource in laptop.list_resources("f"):
            laptop.delete_resource(resource)
        assert laptop.list_resources("f") == []
    assert refused(cloud) == []
    laptops = policies.actions(policies.laptop(Scope(queue=True, target="s3://bucket/x")))
    for who, allowed in (("role/user", laptops), (role, dispatchers)):
        assert (who, called(cloud, who) - allowed) == (who, set())  # nothing else is called
        assert (who, allowed - called(cloud, who) - set(INDIRECT)) == (who, set())  # and nothing more allowed


def leftover(cloud) -> None:
    """A fleet of ours without a machine, as a launch leaves it that was killed when EC2 had refused."""
    ec2 = cloud.client("ec2", HERE)
    cloud.set_room(f"{HERE}c", "g5.xlarge", 0)
    ec2.create_launch_template(LaunchTemplateName="spotfleet-f-9", LaunchTemplateData={
        "ImageId": cloud.UBUNTU, "InstanceType": "g5.xlarge"}, TagSpecifications=tagged("launch-template", OURS))
    subnet = ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": [f"{HERE}c"]}])["Subnets"][0]
    answer = ec2.create_fleet(
        Type="instant", TargetCapacitySpecification={"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
        SpotOptions={"AllocationStrategy": "price-capacity-optimized"}, TagSpecifications=tagged("fleet", OURS),
        LaunchTemplateConfigs=[{
            "LaunchTemplateSpecification": {"LaunchTemplateName": "spotfleet-f-9", "Version": "$Latest"},
            "Overrides": [{"InstanceType": "g5.xlarge", "SubnetId": subnet["SubnetId"]}]}])
    assert not answer["Instances"]


def test_a_dispatcher_touches_no_other_fleets_machine(cloud, aws, acting_as):
    for name in ("f", "g"):
        aws(ssh_from=OFFICE).prepare(name, {}, lambda _line: None)
    provider = aws(ssh_from=OFFICE)
    foreign = request(A, "g-1")
    provider.launch(type(foreign)(foreign.request_id, "g", *[getattr(foreign, n) for n in (
        "role", "offer", "boot", "interruption_behavior", "tags", "alternatives")]))
    cloud.settle()
    (machine,) = cloud.instances()
    with acting_as(identity.profile(provider.account, "f", Role.DISPATCHER)):
        boss = aws("dispatcher", ssh_from=OFFICE)
        for call in (lambda: boss.terminate("g-1"), lambda: boss.interrupt("g-1", None),
                     lambda: boss.tag("g-1", {providers.DISPATCHER_TAG: "x"})):
            with pytest.raises(NeedsPerson, match="denied"):
                call()
    assert [i.id for i in cloud.instances()] == [machine.id]


def test_a_dispatcher_makes_no_machine_for_another_fleet_nor_gives_another_role(cloud, aws, acting_as):
    provider = aws(ssh_from=OFFICE)
    provider.prepare("f", {}, lambda _line: None)
    provider.prepare("g", {}, lambda _line: None)
    with acting_as(identity.profile(provider.account, "f", Role.DISPATCHER)):
        boss = aws("dispatcher", ssh_from=OFFICE)
        with pytest.raises(NeedsPerson):
            boss.launch(dispatcher("f-d-9"))  # its own role would go to another machine
        with pytest.raises(NeedsPerson):
            boss.prepare("f", {}, lambda _line: None)
        for resource in provider.list_resources("g"):
            with pytest.raises(NeedsPerson):
                boss.delete_resource(resource)
    assert cloud.instances() == []
