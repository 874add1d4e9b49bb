"""Terraform on the laptop of an `AwsStage`, and the rights and rules of a base as AWS lists them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spotfleet.providers.aws.mapping import names
from tests.support.aws.terraform import PROVIDER, mirror
from tests.support.aws.terraform import why_not as why_not
from tests.support.network.machines import Machine

COMMAND_S = 900.0
QUIET = {"TF_IN_AUTOMATION": "1", "TF_INPUT": "0", "TF_CLI_ARGS": "-no-color", "AWS_EC2_METADATA_DISABLED": "true"}


@dataclass(frozen=True)
class UserTerraform:
    """Terraform as a user runs it. `execute` runs one command: `on_laptop` or `here`."""

    execute: Callable[..., subprocess.CompletedProcess[str]]

    def run(self, *words: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        done = self.execute(*words)
        assert not ok or done.returncode == 0, f"terraform {' '.join(words)}\n{done.stdout[-4000:]}\n{done.stderr}"
        return done

    def plan(self, folder: str, *variables: str) -> str:
        """Return the plan's text if another apply would change anything; else ""."""
        done = self.run(f"-chdir={folder}", "plan", "-detailed-exitcode", *variables, ok=False)
        assert done.returncode in (0, 2), f"{done.stdout}\n{done.stderr}"
        return done.stdout if done.returncode else ""


def on_laptop(laptop: Machine, work: str, env: dict[str, str]) -> UserTerraform:
    """Return Terraform in the folder `work` of the laptop."""
    laptop.path("/root/.terraformrc").write_text(settings())
    return UserTerraform(lambda *words: laptop.run("terraform", *words, ok=False, cwd=work, env=env | QUIET,
                                                   timeout_s=COMMAND_S))


def here(work: Path, env: dict[str, str]) -> UserTerraform:
    """Return Terraform in the folder `work` of this machine."""
    file = work / "cli.tfrc"
    file.write_text(settings())
    all_of_it = os.environ | env | QUIET | {"TF_CLI_CONFIG_FILE": str(file)}
    return UserTerraform(lambda *words: subprocess.run(["terraform", *words], cwd=work, text=True, capture_output=True,
                                                       check=False, env=all_of_it, timeout=COMMAND_S))


def settings() -> str:
    """Return Terraform's own configuration: AWS's provider comes from a mirror."""
    return (f'disable_checkpoint = true\nprovider_installation {{\n  filesystem_mirror {{\n    path    = "{mirror()}"\n'
            f'    include = ["{PROVIDER}"]\n  }}\n}}\n')


@dataclass(frozen=True)
class BaseFacts:
    """Rights and rules of a base, without ids, in comparable form."""

    groups: dict[str, tuple[str, tuple[str, ...]]]  # name -> description and rules
    roles: dict[str, tuple[str, str, str]]  # name -> path, trust, policy
    profiles: dict[str, tuple[str, ...]]  # name -> roles
    queue: tuple[str, str, str]
    rules: dict[str, tuple[str, str, str]]  # name -> pattern, description, targets

    def as_of_a_fleet(self) -> BaseFacts:
        """Return them with a fleet's tag in place of a base's."""
        return replace(self, roles={name: (path, trust, policy.replace(f"Tag/{names.BASE}", f"Tag/{names.FLEET}"))
                                    for name, (path, trust, policy) in self.roles.items()})


def facts_of(cloud: Any, name: str) -> BaseFacts:
    return BaseFacts(_groups(cloud, name), *_roles(cloud, name), _queue(cloud, name), _rules(cloud, name))


def _groups(cloud: Any, name: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    found = cloud.client("ec2").describe_security_groups()["SecurityGroups"]
    ids = {g["GroupId"]: g["GroupName"] for g in found}
    return {g["GroupName"]: (g["Description"], tuple(sorted(
        [f"in {line}" for p in g["IpPermissions"] for line in _permission(p, ids)]
        + [f"out {line}" for p in g["IpPermissionsEgress"] for line in _permission(p, ids)])))
        for g in found if g["GroupName"] in (names.group(name), names.door(name))}


def _permission(rule: dict[str, Any], ids: dict[str, str]) -> list[str]:
    ports = f"{rule['IpProtocol']} {rule.get('FromPort', '')}-{rule.get('ToPort', '')}"
    peers = [r["CidrIp"] for r in rule.get("IpRanges", ())] + [r["CidrIpv6"] for r in rule.get("Ipv6Ranges", ())] + [
        ids[r["GroupId"]] for r in rule.get("UserIdGroupPairs", ())]
    return [f"{ports} {peer}" for peer in peers]


def _roles(cloud: Any, name: str) -> tuple[dict[str, tuple[str, str, str]], dict[str, tuple[str, ...]]]:
    iam, found = cloud.client("iam"), {}
    for role in iam.list_roles(PathPrefix=names.IAM_PATH)["Roles"]:
        own = role["RoleName"]
        policy = iam.get_role_policy(RoleName=own, PolicyName=own)["PolicyDocument"]
        found[own] = role["Path"], _plain(role["AssumeRolePolicyDocument"]), _plain(policy)
    profiles = iam.list_instance_profiles(PathPrefix=names.IAM_PATH)["InstanceProfiles"]
    return found, {p["InstanceProfileName"]: tuple(r["RoleName"] for r in p["Roles"]) for p in profiles}


def _queue(cloud: Any, name: str) -> tuple[str, str, str]:
    sqs = cloud.client("sqs")
    url = sqs.get_queue_url(QueueName=names.queue(name))["QueueUrl"]
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    return found["MessageRetentionPeriod"], found["VisibilityTimeout"], _plain(json.loads(found["Policy"]))


def _rules(cloud: Any, name: str) -> dict[str, tuple[str, str, str]]:
    events = cloud.client("events")
    return {r["Name"]: (_plain(json.loads(r["EventPattern"])), r["Description"],
                        _plain(events.list_targets_by_rule(Rule=r["Name"])["Targets"]))
            for r in events.list_rules(NamePrefix=names.queue(name))["Rules"]}


def _plain(document: Any) -> str:
    return json.dumps(document, sort_keys=True)
