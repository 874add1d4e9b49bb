"""A base on AWS as a new user makes it, by the module's README alone, and a fleet on it.

Terraform and AWS's provider are real, and so is everything of the fleet; AWS is the fake whose instances run. The tests
build on each other. Cheaper tests cannot show that the resources of both fit together, with the rights that each has.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotfleet.providers.aws import AwsProvider
from spotfleet.providers.aws.mapping import names
from tests.support.aws.aws_stage import USER, WORK, AwsStage, why_not
from tests.support.aws.terraform_base import BaseFacts, UserTerraform, facts_of, on_laptop
from tests.support.aws.terraform_base import why_not as why_no_terraform

WHY = why_no_terraform() or why_not()
pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800), pytest.mark.skipif(bool(WHY), reason=WHY or "-")]
MODULE = Path(__file__).parents[2] / "terraform"
README = MODULE / "aws" / "README.md"
EXAMPLE = "terraform/aws/examples/minimal"
NOTICE_S = 30.0


@dataclass
class Story:
    stage: AwsStage
    terraform: UserTerraform
    base: frozenset[str] = frozenset()  # what Terraform made
    facts: BaseFacts | None = None  # its rights and rules


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    pytest.importorskip("torch")
    with AwsStage.made() as stage:
        laptop = stage.machines.laptop
        shutil.copytree(MODULE, laptop.path(f"{WORK}/terraform"), ignore=shutil.ignore_patterns(".terraform*"))
        yield Story(stage, on_laptop(laptop, WORK, {
            "AWS_ENDPOINT_URL": stage.machines.endpoint, "AWS_ACCESS_KEY_ID": "AKIAOWNEROFTHEFAKE01",
            "AWS_SECRET_ACCESS_KEY": "the-owners-secret-of-the-fake"}))


def fenced(language: str, holding: str) -> str:
    """Return the block of the README that holds these words."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    return next(text for kind, text in blocks if kind == language and holding in text)


def things(stage: AwsStage) -> frozenset[str]:
    return frozenset(map(str, stage.cloud.everything()))


def plan_differs(story: Story) -> str:
    return story.terraform.plan(EXAMPLE, "-var", f"my_address={story.stage.machines.laptop.address}/32")


def test_the_readme_s_commands_make_the_base_and_a_second_plan_changes_nothing(story: Story):
    for line in fenced("", "examples/minimal apply").splitlines():
        if line.startswith("terraform"):
            words = line.replace("203.0.113.7", story.stage.machines.laptop.address).split()
            story.terraform.run(*words[1:], *(["-auto-approve"] if "apply" in words else []))
    assert plan_differs(story) == ""
    story.base, story.facts = things(story.stage), facts_of(story.stage.cloud, "research")
    assert {t.tags.get(names.MANAGER) for t in story.stage.cloud.everything() if t.kind == "security-group"} == {
        "terraform"}


def test_up_on_the_base_makes_machines_alone_and_each_has_the_base_s_tag(story: Story):
    stage = story.stage
    file = yaml.safe_load(fenced("yaml", "name: digits"))
    assert file["name"] == "digits" and "aws" not in file  # all of that is the base's
    stage.fleet = "digits"
    stage.write("fleet.yaml", yaml.safe_dump(file | {
        "nodes": {"min": 2, "target": 2}, "environment": {"python": sys.executable, "inherit": True}, "workdir": "."}))
    printed = stage.cli("check", "--policy", "laptop", "fleet.yaml", "--from-terraform", EXAMPLE).stdout
    stage.cloud.attach(USER, without_making(json.loads(printed)))
    checked = stage.cli("check", "fleet.yaml", "--from-terraform", EXAMPLE, ok=False).stdout
    assert "research in us-east-1, made by the module of this release" in checked
    assert "role spotfleet-research-us-east-1-dispatcher of base research has the rights of a dispatcher" in checked
    assert "BLOCKER" not in checked, checked
    stage.cli("up", "fleet.yaml", "--from-terraform", EXAMPLE, "-y")
    made = [t for t in stage.cloud.everything() if str(t) not in story.base]
    assert {t.kind for t in made} <= {"instance", "volume", "network-interface", "fleet", "spot-instances-request"}
    assert {t.tags.get(names.BASE) for t in made if t.kind in ("instance", "volume")} == {"research"}
    assert {view.tags[names.ROLE] for view in stage.instances()} == {"dispatcher", "worker"}


def without_making(policy: dict[str, Any]) -> dict[str, Any]:
    """The rights of a user who may make neither groups nor roles nor queues."""
    making = re.compile("iam:(Create|Put|Add|Tag|Delete|Remove)|ec2:(CreateSecurityGroup|Authorize)")
    kept = [s | {"Action": [a for a in s["Action"] if not making.match(a)]} for s in policy["Statement"]]
    return policy | {"Statement": [s for s in kept if s["Action"]]}


def test_terraform_s_launch_template_is_a_host_as_the_command_line_launches_it(story: Story):
    sent = {c.params["LaunchTemplateName"]: c.params["LaunchTemplateData"] for c in story.stage.cloud.calls
            if c.action == "ec2:CreateLaunchTemplate" and not c.code}
    by_terraform = sent["spotfleet-research"]
    by_dispatcher = next(data for name, data in sent.items() if re.fullmatch(r"spotfleet-digits-[0-9a-f]{4}-\d+", name))
    assert "InstanceMarketOptions" not in by_terraform
    assert machine(by_terraform) == machine(by_dispatcher)


def machine(data: dict[str, Any]) -> dict[str, Any]:
    """Image and tags left out, which a launch chooses."""
    (disk,), (interface,) = data["BlockDeviceMappings"], data["NetworkInterfaces"]
    profile = data["IamInstanceProfile"]
    return {"metadata": data["MetadataOptions"], "disk": disk["Ebs"], "device": disk["DeviceName"],
            "groups": interface["Groups"], "public": interface["AssociatePublicIpAddress"],
            "ends_with_it": interface["DeleteOnTermination"],
            "profile": (profile.get("Name") or profile["Arn"]).rpartition("/")[2],
            "tagged": {s["ResourceType"] for s in data["TagSpecifications"]} - {"spot-instances-request"}}


def test_a_second_up_names_the_option_that_it_lacks_and_the_base_is_found_by_its_tag(story: Story):
    said = story.stage.cli("up", "fleet.yaml", "-y", ok=False)
    assert said.returncode == 2 and "--discover research" in said.stderr
    said = story.stage.cli("up", "fleet.yaml", "--discover", "research", "-y")
    assert "nothing to change: fleet digits is up with 2 hosts" in said.stderr
    lost = story.stage.cli("up", "fleet.yaml", "--discover", "resaerch", "--dryrun", ok=False)
    assert lost.returncode == 3 and "no base resaerch is in us-east-1" in lost.stderr


def test_it_trains_on_the_base_through_a_notice(story: Story):
    stage = story.stage
    job = stage.train((2, 2))
    victim, survivor = before = stage.instances("worker")
    stage.wait("two that train", lambda: stage.training(before))
    stage.cloud.interrupt(victim.id, notice_s=NOTICE_S, room=0)
    stage.wait("a replacement", lambda: len(stage.instances("worker")) == 3)
    (new,) = [view for view in stage.instances("worker") if view.id not in (victim.id, survivor.id)]
    stage.wait("both that go on", lambda: stage.training([survivor, new]))
    stage.enough()
    stage.wait("the job's end", lambda: stage.job(job).state == "succeeded")
    denied = [line for line in stage.denials() if line.startswith("role/")]
    assert denied == []
    assert any(c.action == "sqs:ReceiveMessage" and not c.code for c in stage.cloud.calls)  # the base's queue is read


def test_down_leaves_the_base_as_terraform_made_it(story: Story):
    story.stage.cli("down", "-y")
    assert things(story.stage) == story.base
    assert facts_of(story.stage.cloud, "research") == story.facts
    assert plan_differs(story) == ""
    assert "spotfleet-research" not in story.stage.cli("leaks", ok=False).stdout


def test_destroy_leaves_nothing(story: Story):
    cloud = story.stage.cloud
    bucket = "spotfleet-research-123456789012-us-east-1"
    empty(cloud, bucket)
    story.terraform.run(f"-chdir={EXAMPLE}", "destroy", "-auto-approve",
                        "-var", f"my_address={story.stage.machines.laptop.address}/32")
    assert cloud.everything() == []
    assert cloud.client("ssm").describe_parameters()["Parameters"] == []
    assert cloud.client("iam").list_policies(Scope="Local")["Policies"] == []


def empty(cloud: Any, bucket: str) -> None:
    """Remove all versions of all objects, as the user does before `destroy`."""
    s3 = cloud.client("s3")
    for page in s3.get_paginator("list_object_versions").paginate(Bucket=bucket):
        for one in [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]:
            s3.delete_object(Bucket=bucket, Key=one["Key"], VersionId=one["VersionId"])


def test_the_command_line_alone_makes_the_same_base(story: Story):
    """Same names, roles, rules: only the tag to which rights are limited is the fleet's own."""
    cloud = story.stage.cloud
    spec = {"regions": ["us-east-1"], "event_queue": True, "ssh_from": [f"{story.stage.machines.laptop.address}/32"]}
    provider = AwsProvider({"section": spec, "endpoint_url": cloud.url, "secret": "x",
                            "target": "s3://spotfleet-research-123456789012-us-east-1/spotfleet"})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cloud.environ().items():
            patch.setenv(name, value)
        provider.prepare("research", {}, lambda _line: None)
    assert story.facts is not None
    assert facts_of(cloud, "research") == story.facts.as_of_a_fleet()
