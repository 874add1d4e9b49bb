"""`spotfleet check`: a section per provider, a line per finding with its fix, exit code 3 when a person must act."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from spotfleet import providers
from spotfleet.api import check
from spotfleet.errors import SpotfleetError
from spotfleet.providers import Finding
from spotfleet.providers.gcp import GcpProvider

AWS_FILE = "name: g5\nprovider: aws\nnodes: 2\nresources: {accelerators: A10G:1}\naws: {regions: [us-east-1]}\n"
TO_S3 = AWS_FILE + "checkpoint: {target: s3://runs/g5}\n"


class FakeAws:
    """A cloud that finds what it is told to find."""

    name = "aws"

    def __init__(self, *found: Finding | Exception) -> None:
        self.found = found
        self.specs: list[str] = []

    def findings(self, spec) -> Iterator[Finding]:
        self.specs.append(spec.name if spec else "")
        for one in self.found:
            if isinstance(one, Exception):
                raise one
            yield one

    prepare = list_resources = delete_resource = allow_ssh_from_here = regions = in_regions = resource_kinds = None


OK = Finding("somebody", about="credentials")
NO_QUOTA = Finding("no vCPUs", "blocker", "ask for them\nor go elsewhere", "vCPU quota")
ODD = Finding("odd", "warning", "look", "network")
NOBODY = Finding("no credentials", "absent", "log in", "credentials")


@pytest.fixture
def on_aws(user, monkeypatch):
    """on_aws(finding...): what provider aws finds from now on."""
    here = providers.load

    def install(*found: Finding | Exception) -> FakeAws:
        cloud = FakeAws(*found)
        monkeypatch.setattr(providers, "load", lambda name, config: cloud if name == "aws" else here(name, config))
        monkeypatch.setattr(check, "ManagedResources", (FakeAws, GcpProvider))
        return cloud

    user.write("g5.yaml", AWS_FILE)
    return install


def test_every_provider_has_a_section_and_what_is_not_set_up_is_no_failure(user, on_aws):
    on_aws(NOBODY)
    said = user.ok("check")
    assert said.out.splitlines()[:3] == [
        "aws:", "  -        credentials     no credentials", "                  do this: log in"]
    assert "local:\n  ok       provider        machines can be launched\n" in said.out and "\nssh:\n" in said.out
    assert "gcp:\n  -        credentials     gcp: no credentials\n" in said.out
    assert said.err == "no problem found\n"


def test_what_is_not_set_up_is_in_the_way_of_whoever_wants_it(user, on_aws):
    on_aws(NOBODY)
    assert "  BLOCKER  credentials     no credentials" in user.types("check aws").out
    assert user.types("check aws").code == user.types("check g5.yaml").code == 3


def test_a_blocker_is_told_with_each_line_of_its_fix_and_code_3(user, on_aws):
    cloud = on_aws(OK, NO_QUOTA, ODD)
    said = user.types("check aws g5.yaml")
    assert (said.code, said.err) == (3, "1 problem to solve before a fleet can be made; 1 warning\n")
    assert said.out.splitlines()[:7] == [
        "aws: for fleet g5",
        "  ok       credentials     somebody",
        "  BLOCKER  vCPU quota      no vCPUs",
        "                  do this: ask for them",
        "                           or go elsewhere",
        "  warning  network         odd",
        "                  do this: look"]
    assert cloud.specs == ["g5"]


def test_a_warning_alone_is_no_failure(user, on_aws):
    on_aws(OK, ODD)
    said = user.ok("check aws")
    assert said.err == "no problem found; 1 warning\n"


def test_json_has_the_same(user, on_aws):
    on_aws(OK, NO_QUOTA)
    said = user.types("check aws -o json")
    (section,) = json.loads(said.out)
    assert said.code == 3 and (section["provider"], section["fleet"]) == ("aws", "")
    assert section["findings"][:2] == [
        {"what": "somebody", "level": "ok", "fix": "", "about": "credentials"},
        {"what": "no vCPUs", "level": "blocker", "fix": "ask for them\nor go elsewhere", "about": "vCPU quota"}]


def test_what_is_found_is_told_at_once_while_the_next_answer_is_awaited(user, on_aws):
    cloud, told = on_aws(), []

    def findings(_spec) -> Iterator[Finding]:
        yield OK
        told.append(user.capture.readouterr().out)  # the next answer is awaited here
        yield ODD

    cloud.findings = findings
    user.types("check aws")
    assert "somebody" in told[0] and "odd" not in told[0]



def test_a_provider_that_fails_on_the_way_is_a_blocker_after_what_it_found(user, on_aws):
    on_aws(OK, SpotfleetError("it broke", hint="try again"))
    said = user.types("check aws")
    assert said.code == 3 and "  BLOCKER  provider        it broke" in said.out and "do this: try again" in said.out


def test_a_cloud_that_can_only_say_yes_or_no_says_why_not(user):
    user.cloud.broken = "your account is blocked"
    said = user.types("check local fleet.yaml")
    assert (said.code, said.out.splitlines()) == (3, [
        "local: for fleet digits", "  BLOCKER  provider        your account is blocked",
        "                  do this: ask your administrator"])


def test_the_only_fleet_is_checked_exactly(up):
    assert up.ok("check local").out.startswith("local: for fleet digits\n")


@pytest.mark.parametrize("line, why", [
    ("check nonsense", "'nonsense' is neither a provider nor a fleet file"),
    ("check local ssh", "'ssh' is neither a provider nor a fleet file"),
    ("check aws fleet.yaml", "fleet.yaml is of provider local, not aws"),
    ("check nothing.yaml", "there is no file nothing.yaml"),
    ("check aws --policy dispatcher", "and none is named"),
    ("check --policy", "say whose policy: aws, gcp"),
    ("check --policy host g5.yaml", "checkpoint bucket, and none is named"),
    ("check --policy fleet.yaml", "fleet.yaml is of provider local, which has no policies"),
])
def test_a_wrong_line_is_answered_with_what_is_wrong(user, line: str, why: str):
    user.write("g5.yaml", AWS_FILE)
    assert why in user.fails(line, code=2).err


def test_policies_are_json_on_stdout_and_nothing_else(user):
    user.write("g5.yaml", TO_S3)
    laptop = json.loads(user.ok("check aws --policy").out)
    dispatcher = json.loads(user.ok("check --policy dispatcher g5.yaml").out)
    host = json.loads(user.ok("check aws --policy host g5.yaml").out)
    assert {d["Version"] for d in (laptop, dispatcher, host)} == {"2012-10-17"}
    told = {role: json.dumps(d) for role, d in (("laptop", laptop), ("dispatcher", dispatcher), ("host", host))}
    assert "iam:CreateRole" in told["laptop"] and "iam:CreateRole" not in told["dispatcher"]
    assert '"aws:ResourceTag/spotfleet": "g5-????"' in told["dispatcher"] and "ec2:" not in told["host"]
    assert "arn:aws:s3:::runs/g5/*" in told["host"]
    assert "spotfleet-g5-????-us-east-1-host" in told["dispatcher"]


TWO_CLOUDS = """\
name: two
provider: [aws, gcp]
resources: {any_of: [{infra: aws/us-east-1, instance_type: g5.xlarge}, {infra: gcp/us-central1, accelerators: L4:1}]}
gcp: {project: my-project-123}
"""


def test_of_a_fleet_on_two_clouds_each_prints_its_own_policy_and_the_next_step_is_one_that_works(user):
    user.write("two.yaml", TWO_CLOUDS)
    dispatcher = json.dumps(json.loads(user.ok("check aws --policy dispatcher two.yaml").out))
    assert "ec2:CreateFleet" in dispatcher and '"two-????"' in dispatcher and "us-east-1" in dispatcher
    assert "compute.instances" in user.ok("check gcp --policy two.yaml").out
    said = user.fails("check --policy dispatcher two.yaml", code=2)
    assert "two.yaml is of aws and gcp: say whose policy" in said.err
    assert "spotfleet check aws --policy dispatcher two.yaml" in said.err
    said = user.fails("check gcp two.yaml", code=2)
    assert "two.yaml is of provider aws+gcp, not gcp" in said.err and "spotfleet check two.yaml" in said.err


def test_with_a_boundary_the_printed_policy_makes_bounded_roles_only(user):
    bound = "arn:aws:iam::123456789012:policy/research-boundary"
    user.write("g5.yaml", TO_S3.replace("aws: {", f"aws: {{permissions_boundary: '{bound}', "))
    statements = json.loads(user.ok("check aws --policy g5.yaml").out)["Statement"]
    for action in ("iam:CreateRole", "iam:PutRolePolicy", "iam:PutRolePermissionsBoundary"):
        (allows,) = [s for s in statements if action in s["Action"]]
        assert allows["Condition"] == {"StringEquals": {"iam:PermissionsBoundary": bound}}
    assert not any("iam:DeleteRolePermissionsBoundary" in s["Action"] for s in statements)


@pytest.mark.parametrize("region, partition", [
    ("us-gov-west-1", "aws-us-gov"), ("cn-north-1", "aws-cn"), ("eu-west-1", "aws"), ("us-iso-east-1", "aws-iso")])
def test_a_policy_is_of_the_partition_where_the_fleet_is(user, region, partition):
    user.write("g5.yaml", TO_S3.replace("us-east-1", region))
    for role in ("laptop", "dispatcher", "host"):
        text = user.ok(f"check aws --policy {role} g5.yaml").out
        assert f'"arn:{partition}:' in text and text.count("arn:") == text.count(f"arn:{partition}:")


def test_a_policy_fits_into_what_iam_takes(user):
    """6144 characters without white space, of a managed policy; 10240 of a role's own."""
    key = "arn:aws-us-gov:kms:us-east-1:123456789012:key/0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
    options = (f"event_queue: true, kms_key: '{key}', image: /my/own/image, "
               "permissions_boundary: 'arn:aws:iam::123456789012:policy/research-boundary', ")
    user.write("g5.yaml", TO_S3.replace("aws: {", f"aws: {{{options}").replace("us-east-1", "us-gov-west-1"))
    for line, most in (("check aws --policy", 6144), ("check --policy g5.yaml", 6144),
                       ("check --policy dispatcher g5.yaml", 10240)):
        assert len("".join(user.ok(line).out.split())) <= most, line
