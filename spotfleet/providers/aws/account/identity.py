"""IAM roles of a fleet's machines: made on the laptop at `up`, removed by `down`.

    dispatcher   the permissions of `policies.dispatcher`, limited to the fleet's tag
    host         the checkpoint bucket only; no role if checkpoints do not go to S3

Each is a role with an inline policy and an instance profile, both with one name under `names.IAM_PATH`; the policy
`aws.permissions_boundary` bounds it. EC2 may refuse a new one for some seconds: launches retry. Profiles named by the
user are used instead and never changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import Role
from spotfleet.providers.aws.account import disk_key
from spotfleet.providers.aws.account.network import pairs
from spotfleet.providers.aws.mapping import errors, names, policies
from spotfleet.providers.aws.session import Account, AwsClient

DISPATCHER, HOST = "dispatcher", "host"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Fleet:
    name: str
    tags: Mapping[str, str]  # including the fleet's own
    boundary: str  # ARN; "" for none
    progress: Progress


def profile(account: Account, fleet: str, role: Role) -> str:
    """The name of the instance profile of a machine, "" for none. It is one for all of the fleet's regions."""
    spec = account.settings.spec
    if role is Role.DISPATCHER:
        return spec.dispatcher_profile or _name(account, fleet, DISPATCHER)
    return spec.host_profile or (_name(account, fleet, HOST) if _to_s3(account) else "")


def prepare(account: Account, fleet: str, tags: Mapping[str, str], progress: Progress) -> None:
    """Create the roles that the fleet needs and the user does not name. Idempotent, also for concurrent calls."""
    spec, iam = account.settings.spec, account.client("iam")
    number, arn = account.identity()
    partition, made = arn.split(":")[1], _Fleet(fleet, _tagged(account, fleet, tags), spec.permissions_boundary,
                                             progress)
    host_role = ""
    if spec.host_profile:
        host_role = "" if spec.dispatcher_profile else role_of(iam, spec.host_profile)
    elif _to_s3(account):
        document = policies.host(account.settings.target, partition, _known_key(account, progress), number)
        host_role = _make(iam, made, _name(account, fleet, HOST), document, partition)
    if not spec.dispatcher_profile:
        scope = policies.Scope(fleet, account.regions, number, partition, host_role, spec.kms_key,
                             _own_parameter(spec.image), account.settings.target,
                             spec.event_queue or bool(spec.interruption_queue),
                             named_queue=spec.interruption_queue, reserved=bool(spec.capacity_reservations),
                             default_keys=disk_key.defaults(account))
        _make(iam, made, _name(account, fleet, DISPATCHER), policies.dispatcher(scope), partition)


def target_key(account: Account) -> str:
    """Return the customer's KMS key that encrypts the checkpoint bucket; "" for AWS's own keys.

    Raises SpotfleetError if the bucket's encryption cannot be read.
    """
    bucket = account.settings.target.removeprefix("s3://").partition("/")[0]
    try:
        answer = account.client("s3").get_bucket_encryption(Bucket=bucket)
    except SpotfleetError as error:
        if errors.code(error) in ("ServerSideEncryptionConfigurationNotFoundError", "NoSuchBucket"):
            return ""
        raise
    rules = answer.get("ServerSideEncryptionConfiguration", {}).get("Rules", ())
    key = next((r["ApplyServerSideEncryptionByDefault"].get("KMSMasterKeyID") or "" for r in rules
                if r.get("ApplyServerSideEncryptionByDefault")), "")
    return "" if key.endswith("alias/aws/s3") else key


def _known_key(account: Account, progress: Progress) -> str:
    try:
        return target_key(account)
    except SpotfleetError as error:
        bucket = account.settings.target.removeprefix("s3://").partition("/")[0]
        progress(f"the encryption of bucket {bucket} cannot be read ({error}): if a KMS key encrypts it, hosts need "
                 "kms:GenerateDataKey and kms:Decrypt")
        return ""


def makes_roles(account: Account) -> bool:
    """Return whether `prepare` makes any role."""
    spec = account.settings.spec
    return policies.Scope(target=account.settings.target, dispatcher_profile=spec.dispatcher_profile,
                        host_profile=spec.host_profile).makes_roles


def _make(iam: AwsClient, fleet: _Fleet, name: str, document: Mapping[str, Any], partition: str) -> str:
    """Create role, policy and profile; return the role's ARN."""
    arn = _make_role(iam, fleet, name, partition)
    iam.put_role_policy(RoleName=name, PolicyName=name, PolicyDocument=json.dumps(document))
    found = _make_profile(iam, fleet, name)
    if not any(role["RoleName"] == name for role in found.get("Roles", ())):
        try:
            iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
        except SpotfleetError as error:
            if errors.code(error) not in ("LimitExceeded", "LimitExceededException"):  # it has one: another call won
                raise
    return arn


def _make_role(iam: AwsClient, fleet: _Fleet, name: str, partition: str) -> str:
    try:
        found = iam.get_role(RoleName=name)["Role"]
    except SpotfleetError as error:
        _refuse_other(error, "NoSuchEntity")
        try:
            made = iam.create_role(RoleName=name, Path=names.IAM_PATH, Tags=pairs(fleet.tags),
                                   AssumeRolePolicyDocument=json.dumps(policies.trust(partition)),
                                   Description=f"What machines of the spotfleet fleet {fleet.name} may do",
                                   **({"PermissionsBoundary": fleet.boundary} if fleet.boundary else {}))
            fleet.progress(f"role {name}")
            return made["Role"]["Arn"]
        except SpotfleetError as raced:
            _refuse_other(raced, "EntityAlreadyExists")
            found = iam.get_role(RoleName=name)["Role"]
    _refuse_foreign(found, fleet.name, "role", name)
    bound = (found.get("PermissionsBoundary") or {}).get("PermissionsBoundaryArn", "")
    if fleet.boundary and bound != fleet.boundary:
        iam.put_role_permissions_boundary(RoleName=name, PermissionsBoundary=fleet.boundary)
    return found["Arn"]


def _make_profile(iam: AwsClient, fleet: _Fleet, name: str) -> dict[str, Any]:
    try:
        found = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]
    except SpotfleetError as error:
        _refuse_other(error, "NoSuchEntity")
        try:
            made = iam.create_instance_profile(InstanceProfileName=name, Path=names.IAM_PATH, Tags=pairs(fleet.tags))
            fleet.progress(f"instance profile {name}")
            return made["InstanceProfile"]
        except SpotfleetError as raced:
            _refuse_other(raced, "EntityAlreadyExists")
            found = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]
    _refuse_foreign(found, fleet.name, "instance profile", name)
    return found


def role_of(iam: AwsClient, name: str) -> str:
    """Return the ARN of the role in a named profile, which the dispatcher must be allowed to pass to hosts."""
    try:
        roles = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]
    except SpotfleetError as error:
        _refuse_other(error, "NoSuchEntity")
        raise NeedsPerson(f"there is no instance profile {name}, which `aws.host_profile` names",
                          hint="name one that exists, or leave it out") from None
    return roles[0]["Arn"] if roles else ""


def _refuse_other(error: SpotfleetError, expected: str) -> None:
    if errors.code(error) != expected:
        raise error


def _refuse_foreign(thing: Mapping[str, Any], fleet: str, kind: str, name: str) -> None:
    if not any(t["Key"] == names.FLEET and t["Value"] == fleet for t in thing.get("Tags", ())):
        raise NeedsPerson(f"there is a {kind} {name} that does not have the tag {names.FLEET}={fleet}: it is not ours",
                          hint="give the fleet another name, or remove it if it is of no use")


def _name(account: Account, fleet: str, which: str) -> str:
    return names.role(fleet, which, account.home_region)


def _tagged(account: Account, fleet: str, tags: Mapping[str, str]) -> dict[str, str]:
    return {**tags, names.FLEET: fleet, names.REGION: account.home_region}


def _to_s3(account: Account) -> bool:
    return account.settings.target.startswith("s3://")


def _own_parameter(image: str) -> str:
    return image if image.startswith("/") and not image.startswith("/aws/service/") else ""
