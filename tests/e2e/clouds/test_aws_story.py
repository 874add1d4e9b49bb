"""The whole way on AWS, against a fake whose instances really run: from their user data alone, in an empty environment.

Real are the command line, boto3, cloud-init, sshd, bootstrap, dispatcher, agents and workers; the cloud and its
metadata servers are tests/fakes. Nothing here has ever been run against AWS itself. One fleet serves all tests; they
build on each other, and the last ones take it down and look what is left.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import requires

import pytest

from spotfleet.providers.aws.mapping import names, policies
from tests.support.aws.aws_stage import CLI, WORK, AwsStage, why_not
from tests.support.e2e import cloud_story
from tests.support.network.machines import LIMIT_S, interrupt

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400), pytest.mark.skipif(bool(why_not()), reason=why_not())]
NOTICE_S = 30.0  # EC2 gives 120; so long nobody waits here
FREE = {"sts:GetCallerIdentity"}  # needs no permission
# Allowed, and not called by this fleet. Rights that EC2 and IAM ask for beside the one of the call:
ASKED_BESIDE = {"ec2:CreateTags", "ec2:RunInstances", "iam:PassRole", "iam:TagInstanceProfile", "iam:TagRole"}
# And what other fleets need: of `interruption_behavior: stop`, in a placement group, with an event queue ...
OTHER_FLEETS = {"ec2:CancelSpotInstanceRequests", "ec2:CreatePlacementGroup", "ec2:DeletePlacementGroup",
                "ec2:StopInstances", "events:DeleteRule", "events:ListTagsForResource", "events:RemoveTargets",
                "sqs:DeleteQueue", "sqs:GetQueueUrl", "sqs:ListQueueTags"}
# ... those that something went wrong with, and other commands.
OTHER_TIMES = {"ec2:DeleteFleets", "ec2:DeleteKeyPair", "ec2:DeleteNetworkInterface", "ec2:DeleteVolume",
               "ec2:DescribeInstanceAttribute", "ec2:GetSpotPlacementScores", "ec2:ReleaseAddress",
               "ec2:RevokeSecurityGroupIngress", "iam:SimulatePrincipalPolicy", "kms:ListGrants",
               "servicequotas:ListAWSDefaultServiceQuotas", "servicequotas:ListServiceQuotas"}


@pytest.fixture(scope="module")
def stage() -> Iterator[AwsStage]:
    """The laptop's user may do what `check --policy` says, and nothing else; machines what their roles say."""
    with AwsStage.made() as stage:
        stage.fleet_file(nodes={"min": 2, "target": 2})
        stage.restrict()
        yield stage


def permitted(stage: AwsStage, who: str) -> frozenset[str]:
    return policies.actions(json.loads(stage.cli("check", "--policy", who, "fleet.yaml").stdout))


def test_up_shows_what_it_will_cost_and_machines_come_up_from_their_user_data_alone(stage: AwsStage):
    cloud_story.comes_up(stage, "us-east-1")


def test_a_ready_image_installs_nothing_and_a_host_knows_no_cloud_s_sdk(stage: AwsStage):
    for view in stage.instances("worker"):
        ran = [line for line in (stage.home(view) / "bootstrap.log").read_text().splitlines() if " + " in line]
        print(*ran, sep="\n")
        assert not [line for line in ran if re.search(r"\bpip\b|\buv\b", line)]
        assert not stage.machine(view).path("/var/log/installs.log").exists()
        assert any("spotfleet.agent" in line for line in stage.machine(view).processes())
    needed = " ".join(line for line in requires("spotfleet") or () if "extra" not in line or "'train'" in line)
    assert not re.search(r"boto|google-cloud|azure", needed)


def test_a_noticed_host_is_replaced_from_another_pool_before_it_is_lost_and_no_sample_with_it(stage: AwsStage):
    cloud_story.replaced_at_a_notice(
        stage, lambda view: stage.cloud.interrupt(view.id, notice_s=NOTICE_S, room=0),
        lambda view: stage.cloud.instance(view.id).state == "running", LIMIT_S)


def test_hosts_are_entered_through_the_dispatcher_alone(stage: AwsStage):
    views = {view.tags[names.HOST]: view for view in stage.instances("worker")}
    said = stage.cli("exec", "--all", "--", "hostname").stdout
    assert {line.rpartition(": ")[2] for line in said.splitlines()} == {
        f"ip-{view.private_ip.replace('.', '-')}" for view in views.values()}
    host = next(iter(views))
    assert stage.cli("ssh", host, "--", "whoami").stdout == "ubuntu\n"
    log = "sudo sh -c 'tail -n 1 /root/.spotfleet-host/*/bootstrap.log'"  # as docs/clouds/aws.md says
    assert stage.cli("exec", "--host", "w0", "--", log).stdout.strip()
    plain = [stage.machines.laptop.run("ssh", alias, "hostname").stdout for alias in ("g5", "g5-w1")]  # the user's ssh
    assert [len(name.split("-")) for name in plain] == [5, 5]
    groups = stage.cloud.client("ec2", "us-east-1").describe_security_groups()["SecurityGroups"]
    assert "0.0.0.0/0" not in json.dumps([group["IpPermissions"] for group in groups])
    cloud_story.no_way_past_the_dispatcher(stage)


def test_files_and_ports_go_both_ways_through_the_dispatcher(stage: AwsStage):
    laptop, views = stage.machines.laptop, {view.tags[names.HOST]: view for view in stage.instances("worker")}
    odd, text = "it's odd.txt", "one\ntwo\n"
    stage.write(f"data/{odd}", text)
    stage.cli("rsync-up", "--all", "data/", "given")
    for view in views.values():
        there = stage.machine(view).path(f"/home/ubuntu/given/{odd}")
        assert there.read_text() == text and there.owner() != "root"
    stage.cli("rsync-down", "--all", f"given/{odd}", "back")
    back = {path.parent.name: path.read_text() for path in laptop.path(f"{WORK}/back").glob(f"*/{odd}")}
    assert back == dict.fromkeys(["g5-w0", "g5-w1"], text)
    stage.cli("rsync-up", "data", ".")  # the dispatcher's own machine
    (head,) = stage.instances("dispatcher")
    assert stage.machine(head).path(f"/home/ubuntu/data/{odd}").read_text() == text

    host = next(iter(views))
    server = stage.machine(views[host]).start(sys.executable, "-m", "http.server", "8080", "--bind", "127.0.0.1",
                                              cwd="/home/ubuntu/given")
    forward = laptop.start(CLI, "port-forward", "--host", host, "18080:8080", cwd=WORK, env=stage.env)
    fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:18080/').read().decode())"
    stage.wait("the far port", lambda: "s odd.txt" in laptop.run(sys.executable, "-c", fetch, ok=False).stdout)
    interrupt(forward)
    interrupt(server)


def test_down_removes_all_of_it_and_proves_that(stage: AwsStage):
    cloud_story.goes_down(stage)
    assert re.search(r"nothing of fleet g5-[0-9a-f]{4} is listed in us-east-1: 0 machines, .*0 volumes, .*0 roles",
                     stage.said[-1])


def test_every_sample_was_counted_once_in_each_epoch(stage: AwsStage):
    assert stage.wrongly_counted() == []


def test_the_bill_is_what_the_cloud_s_own_books_say(stage: AwsStage):
    cloud_story.bill_agrees(stage)


def test_each_did_what_its_policy_allows_and_the_policies_allow_little_else(stage: AwsStage):
    assert stage.denials() == []
    (role,) = {call.principal for call in stage.cloud.calls if call.principal.startswith("role/")}
    assert re.fullmatch("role/" + names.role("g5-[0-9a-f]{4}", "dispatcher", "us-east-1"), role)
    for who, principal in (("laptop", "laptop"), ("dispatcher", role)):
        called = stage.cloud.actions(principal) - FREE
        allowed = permitted(stage, who)
        print(f"{who}: {len(called)} actions called; allowed, not called: {sorted(allowed - called)}")
        assert called and called <= allowed, sorted(called - allowed)
        assert allowed - called <= ASKED_BESIDE | OTHER_FLEETS | OTHER_TIMES, sorted(allowed - called)
