"""AWS's own command line as another client of the fake: it reads the machines of a fleet, and ends them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from spotfleet.model import CloudState
from spotfleet.providers.aws.mapping import names
from tests.support.aws.aws_hosts import FLEET, A, dispatcher, line, prepared, request
from tests.support.aws.awscli import AwsCli, python_with_cli

pytestmark = pytest.mark.timeout(900)  # the first test installs the CLI


@pytest.fixture(scope="module")
def installed() -> Path:
    try:
        return python_with_cli()
    except OSError as error:
        pytest.skip(f"the AWS CLI cannot be installed: {error}")


@pytest.fixture
def cli(installed: Path, cloud: Any) -> AwsCli:
    return AwsCli(installed, cloud.environ())


def ids(said: dict[str, Any]) -> list[str]:
    return [i["InstanceId"] for r in said["Reservations"] for i in r["Instances"]]


def test_the_machines_of_a_fleet_are_found_by_tag_state_and_page(cli, cloud, aws):
    provider = prepared(aws)
    for number in range(7):
        provider.launch(request(A, f"f-{number}"))
    provider.launch(dispatcher())
    mine = f"Name=tag:{names.FLEET},Values={FLEET}"
    paged = cli.ok("ec2", "describe-instances", "--filters", mine, "Name=instance-lifecycle,Values=spot",
                   "Name=instance-state-name,Values=pending,running", "--page-size", "5")
    assert len(set(ids(paged))) == len(ids(paged)) == 7
    first = cli.ok("ec2", "describe-instances", "--filters", mine, "--max-items", "3")
    rest = cli.ok("ec2", "describe-instances", "--filters", mine, "--starting-token", first["NextToken"])
    assert len({*ids(first), *ids(rest)}) == len(ids(first)) + len(ids(rest)) == 8
    (one,) = ids(cli.ok("ec2", "describe-instances", "--filters", f"Name=tag:{names.HOST},Values=f-3"))
    spot = cli.ok("ec2", "describe-spot-instance-requests", "--filters", f"Name=instance-id,Values={one}")
    assert [r["State"] for r in spot["SpotInstanceRequests"]] == ["active"]


def test_a_dry_run_is_refused_as_ec2_refuses_it_and_makes_nothing(cli, cloud):
    launch = ("ec2", "run-instances", "--image-id", cloud.UBUNTU, "--instance-type", "m5.large", "--count", "2",
              "--instance-market-options", "MarketType=spot", "--metadata-options", "HttpTokens=required")
    assert cli.refused(*launch, "--dry-run") == "DryRunOperation"
    assert cloud.instances() == []
    cloud.deny("owner", {"ec2:RunInstances"})
    assert cli.refused(*launch, "--dry-run") == "UnauthorizedOperation"
    cloud.deny("owner", set())
    made = cli.ok(*launch)
    assert sorted(i["InstanceId"] for i in made["Instances"]) == sorted(i.id for i in cloud.instances())


def test_a_host_that_the_cli_ended_is_gone_for_the_provider(cli, cloud, aws):
    provider = prepared(aws)
    provider.launch(request(A, "f-1"))
    machine = line(provider).provider_id
    said = cli.ok("ec2", "terminate-instances", "--instance-ids", machine)
    assert [(i["InstanceId"], i["CurrentState"]["Name"]) for i in said["TerminatingInstances"]] == [
        (machine, "shutting-down")]
    cli.ok("ec2", "wait", "instance-terminated", "--instance-ids", machine)
    assert line(provider).state is CloudState.TERMINATED
    assert cli.refused("ec2", "terminate-instances", "--instance-ids", "i-0123456789abcdef0") == (
        "InvalidInstanceID.NotFound")


def test_roles_and_groups_of_a_fleet_read_as_those_of_an_account(cli, cloud, aws):
    prepared(aws)
    groups = cli.ok("ec2", "describe-security-groups", "--filters", f"Name=tag:{names.FLEET},Values={FLEET}")
    assert groups["SecurityGroups"]
    assert all(g["VpcId"].startswith("vpc-") for g in groups["SecurityGroups"])
    roles = [r["RoleName"] for r in cli.ok("iam", "list-roles")["Roles"] if r["RoleName"].startswith("spotfleet")]
    assert roles == ["spotfleet-f-us-east-1-dispatcher"]
    profiles = cli.ok("iam", "list-instance-profiles-for-role", "--role-name", roles[0])["InstanceProfiles"]
    assert [r["RoleName"] for p in profiles for r in p["Roles"]] == [roles[0]]
    assert cli.ok("sts", "get-caller-identity")["Account"] == cloud.ACCOUNT


def test_an_archive_goes_to_a_bucket_in_parts_and_back(cli, cloud, tmp_path):
    sent, back = tmp_path / "archive", tmp_path / "back"
    sent.write_bytes(os.urandom(9 * 2**20))  # parts from 8 MiB on
    cli.ok("s3api", "create-bucket", "--bucket", "archives")
    for command in (("cp", str(sent), "s3://archives/f/archive"), ("cp", "s3://archives/f/archive", str(back))):
        done = cli.run("s3", *command, "--no-progress")
        assert done.returncode == 0, done.stderr
    assert back.read_bytes() == sent.read_bytes()
    (listed,) = cli.ok("s3api", "list-objects-v2", "--bucket", "archives")["Contents"]
    assert (listed["Key"], listed["Size"]) == ("f/archive", sent.stat().st_size)
