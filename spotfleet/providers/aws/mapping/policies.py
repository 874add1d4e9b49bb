"""IAM policies of the user on the laptop, a fleet's dispatcher and its hosts. Pure.

They allow exactly the actions that are called: a test runs the whole life of a fleet and compares the calls.

The condition keys of each action and resource follow the Service Authorization Reference; none of it
was tried against AWS's own evaluation. In particular untried: `aws:ResourceTag` on CancelSpotInstanceRequests, and
whether CreateFleet requires RunInstances' rights of its caller for a launch template's content (Karpenter's policy has
both).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spotfleet.providers.aws.mapping import names

DISPATCHER_TAG = "spotfleet-dispatcher"  # copy of `providers.DISPATCHER_TAG`, so that pure code need not import it

ANY = "*"
VERSION = "2012-10-17"

# Read-only actions. EC2's Describe actions support neither resources nor tags.
READ_ACTIONS = ("DescribeImages", "DescribeInstanceTypeOfferings", "DescribeInstanceTypes", "DescribeInstances",
                "DescribeRouteTables", "DescribeSecurityGroups", "DescribeSpotInstanceRequests",
                "DescribeSpotPriceHistory", "DescribeSubnets", "DescribeVpcs")
READ_ACTIONS_ON_LAPTOP = ("DescribeAddresses", "DescribeFleets", "DescribeInstanceAttribute", "DescribeKeyPairs",
                          "DescribeLaunchTemplates", "DescribeNetworkInterfaces", "DescribePlacementGroups",
                          "DescribeRegions", "DescribeTags", "DescribeVolumes", "GetEbsDefaultKmsKeyId")
MADE_BY_LAUNCH = ("instance", "volume", "network-interface", "spot-instances-request", "fleet", "launch-template")
USED_BY_LAUNCH = ("subnet", "security-group", "key-pair", "placement-group")


@dataclass(frozen=True)
class Scope:
    """Limits of a policy. An empty field limits nothing."""

    fleet: str = ANY
    regions: tuple[str, ...] = ()
    account: str = ANY
    partition: str = "aws"
    host_role: str = ""  # ARN of the role that a dispatcher's hosts get; empty: they get none
    kms_key: str = ""  # encrypts the volumes
    image: str = ""  # its SSM parameter, if the image is the user's own parameter
    target: str = ""  # for checkpoints
    queue: bool = False  # EventBridge -> SQS
    dispatcher_profile: str = ""  # named profiles; their roles are unknown here
    host_profile: str = ""
    boundary: str = ""  # ARN of the policy that bounds every role that is made
    reserved: bool = False  # hosts are launched into capacity reservations
    base: bool = False  # `fleet` is the name of a base, whose tag every resource of its fleets carries
    on_base: bool = False  # for the laptop's user: bases are found by their tag
    named_queue: str = ""  # an existing queue that is read instead of the fleet's own
    default_keys: tuple[str, ...] = ()  # ARNs of the account's default keys for volumes, where `kms_key` is empty

    @property
    def places(self) -> tuple[str, ...]:
        """Return the regions for ARNs. Each one makes a policy longer, and IAM limits the length."""
        return self.regions if 0 < len(self.regions) <= 2 else (ANY,)

    @property
    def makes_roles(self) -> bool:
        """Return whether any role is made; False if every needed profile is named."""
        return not (self.dispatcher_profile and (self.host_profile or not self.target.startswith("s3://")))

    def ec2(self, *kinds: str) -> list[str]:
        return [f"arn:{self.partition}:ec2:{region}:{self.account}:{kind}/*"
                for kind in kinds for region in self.places]

    @property
    def images(self) -> list[str]:
        """Return ARNs of images and snapshots of any account."""
        return [f"arn:{self.partition}:ec2:{region}::{kind}/*"
                for kind in ("image", "snapshot") for region in self.places]

    def iam(self, *kinds: str) -> list[str]:
        return [f"arn:{self.partition}:iam::{self.account}:{kind}{names.IAM_PATH}{ANY}" for kind in kinds]

    def queues(self) -> list[str]:
        if self.named_queue:
            return [f"arn:{self.partition}:sqs:{region}:{self.account}:{self.named_queue}" for region in self.places]
        return self._events("sqs", "")

    def rules(self) -> list[str]:
        return self._events("events", "rule/")

    def _events(self, service: str, kind: str) -> list[str]:
        end = "" if self.fleet == ANY or service == "sqs" else "-*"  # a fleet has several rules
        return [f"arn:{self.partition}:{service}:{region}:{self.account}:{kind}{names.queue(self.fleet)}{end}"
                for region in self.places]

    @property
    def request_tag(self) -> dict[str, Any]:
        """Return the condition that the request sets the fleet's tag."""
        return self._tag("aws:RequestTag")

    @property
    def resource_tag(self) -> dict[str, Any]:
        """Return the condition that the resource carries the fleet's tag."""
        return self._tag("aws:ResourceTag")

    def _tag(self, key: str) -> dict[str, Any]:
        return {"StringLike" if {*"*?"} & {*self.fleet} else "StringEquals": {
            f"{key}/{names.BASE if self.base else names.FLEET}": self.fleet}}


def laptop(scope: Scope) -> dict[str, Any]:
    """Return the policy of a user who makes, uses and removes fleets."""
    own = scope.resource_tag
    return _document([
        _allow("Look", [*_ec2(*READ_ACTIONS, *READ_ACTIONS_ON_LAPTOP, *_reading(scope), "GetSpotPlacementScores"),
                        "kms:DescribeKey",
                        "kms:ListGrants", "pricing:GetProducts", "servicequotas:ListAWSDefaultServiceQuotas",
                        "servicequotas:ListServiceQuotas"]),
        _allow("LookUpImages", ["ssm:GetParameter"], _parameters(scope)),
        *_launching(scope, "RunInstances"),
        _end(scope),
        _allow("MakeGroupsInVpc", _ec2("CreateSecurityGroup"), scope.ec2("vpc")),
        _allow("MakeGroups", _ec2("CreateSecurityGroup", "CreatePlacementGroup"),
               scope.ec2("security-group", "placement-group"), scope.request_tag),
        _allow("TagGroups", _ec2("CreateTags"), scope.ec2("security-group", "placement-group", "security-group-rule"),
               _both(scope.request_tag, {"StringEquals": {"ec2:CreateAction": [
                   "CreateSecurityGroup", "CreatePlacementGroup", "AuthorizeSecurityGroupIngress",
                   "AuthorizeSecurityGroupEgress"]}})),
        _allow("ChangeGroups", _ec2("AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress",
                                    "RevokeSecurityGroupIngress"), scope.ec2("security-group"), own),
        _allow("MakeGroupsRules", _ec2("AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress",
                                 "RevokeSecurityGroupIngress"), scope.ec2("security-group-rule")),
        _allow("Remove", _ec2("DeleteVolume", "DeleteNetworkInterface", "ReleaseAddress", "DeleteSecurityGroup",
                              "DeleteKeyPair", "DeletePlacementGroup"),
               scope.ec2("volume", "network-interface", "elastic-ip", "security-group", "key-pair", "placement-group"),
               own),
        _allow("LookAtRoles", ["iam:GetRole", "iam:GetInstanceProfile", "iam:SimulatePrincipalPolicy"]),
        *(_making_roles(scope) if scope.makes_roles else []),
        _pass([f"arn:{scope.partition}:iam::{scope.account}:role/*"] if scope.dispatcher_profile or scope.host_profile
              else scope.iam("role")),
        _allow("ListQueues", ["events:ListRules", "sqs:ListQueues"]),
        _allow("RemoveRules", ["events:ListTagsForResource", "events:RemoveTargets", "events:DeleteRule"],
               scope.rules()),
        _allow("RemoveQueues", ["sqs:GetQueueUrl", "sqs:ListQueueTags", "sqs:DeleteQueue"], scope.queues()),
        *([_allow("MakeRules", ["events:PutRule", "events:PutTargets", "events:TagResource"], scope.rules()),
           _allow("MakeQueues", ["sqs:CreateQueue", "sqs:TagQueue"], scope.queues())] if scope.queue else []),
        *([_allow("ListBases", ["ssm:DescribeParameters"]),
           _allow("ReadBases", ["ssm:GetParameter"], [
               f"arn:{scope.partition}:ssm:{region}:{scope.account}:parameter{names.parameter(ANY)}"
               for region in scope.places])] if scope.on_base else []),
        *([_allow("LookForBucket", ["s3:GetBucketVersioning", "s3:GetEncryptionConfiguration",
                                    "s3:GetLifecycleConfiguration", "s3:ListBucket"], [_bucket(scope)])]
          if scope.target.startswith("s3://") else []),
        *_key(scope),
    ])


def dispatcher(scope: Scope) -> dict[str, Any]:
    """Return the policy of a fleet's dispatcher: read, and launch, tag and end hosts of its fleet."""
    region = {"StringEquals": {"aws:RequestedRegion": list(scope.regions)}} if scope.regions else {}
    return _document([
        _allow("Look", _ec2(*READ_ACTIONS, *_reading(scope)), condition=region),
        _allow("LookAtPrices", ["pricing:GetProducts"]),
        _allow("LookUpImages", ["ssm:GetParameter"], _parameters(scope)),
        *_launching(scope, "RunInstances", "CreateFleet"),
        _end(scope),
        _allow("StopHosts", _ec2("StopInstances"), scope.ec2("instance"), scope.resource_tag),
        _allow("TagHosts", _ec2("CreateTags"), scope.ec2("instance"),
               _both(scope.resource_tag, {"ForAllValues:StringEquals": {
                   "aws:TagKeys": [DISPATCHER_TAG, names.TAKEN, names.MEMBER]}})),
        *([_pass([scope.host_role])] if scope.host_role else []),
        # "Hear" is kept: the policies that accounts have name it.
        *([_allow("Hear", ["sqs:GetQueueUrl", "sqs:ReceiveMessage", "sqs:DeleteMessage"], scope.queues())]
          if scope.queue else []),
        *_key(scope),
    ])


def host(target: str, partition: str = "aws", kms_key: str = "", account: str = ANY) -> dict[str, Any]:
    """Return the policy of a host that writes and reads checkpoints under `target`, an s3:// URL, in a bucket that
    `kms_key` encrypts.

    It may list names outside the prefix too. S3 answers "forbidden" for a missing object to a caller that may not list
    the bucket, and a condition on `s3:prefix` has that effect on every request for one object.
    """
    _, _, prefix = target.removeprefix("s3://").partition("/")
    bucket = _bucket(Scope(partition=partition, target=target))
    under = f"{prefix.strip('/')}/*" if prefix.strip("/") else "*"
    resources, condition = _key_of(Scope(account=account, partition=partition, kms_key=kms_key))
    return _document([
        _allow("List", ["s3:ListBucket"], [bucket]),
        _allow("Checkpoints", ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
               [f"{bucket}/{under}"]),
        *([_allow("UseKey", ["kms:Decrypt", "kms:GenerateDataKey"], resources,
                  _both(condition, {"StringLike": {"kms:ViaService": "s3.*"}}))] if kms_key else []),
    ])


def boundary(scope: Scope, *documents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy that bounds roles with these documents: their actions, and no role but ours to pass on."""
    allowed = {a for document in documents for a in actions(document)}
    return _document([_allow("Bound", allowed - {"iam:PassRole"}), _pass(scope.iam("role"))])


def trust(partition: str = "aws") -> dict[str, Any]:
    """Return the trust policy of a machine's role: EC2 may assume it for the machine."""
    service = f"ec2.amazonaws.{'com.cn' if partition == 'aws-cn' else 'com'}"
    return {"Version": VERSION,
            "Statement": [{"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}]}


def actions(document: Mapping[str, Any]) -> frozenset[str]:
    """Return every action that a policy allows."""
    return frozenset(a for s in document["Statement"] for a in s["Action"])


def shortened(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document without names, with EC2's statements merged that have the same condition.

    Each EC2 action works on few kinds of resources, so that a merged statement allows nothing else.
    """
    found: dict[str, dict[str, Any]] = {}
    for number, statement in enumerate(document["Statement"]):
        plain = {k: v for k, v in statement.items() if k != "Sid"}
        alike = plain.get("Condition") and all(a.startswith("ec2:") for a in plain["Action"])
        into = found.setdefault(json.dumps(plain["Condition"]) if alike else str(number), plain)
        if into is not plain:
            into |= {k: sorted({*into[k], *plain[k]}) for k in ("Action", "Resource")}
    return {**document, "Statement": list(found.values())}


# ---- statements


def _reading(scope: Scope) -> tuple[str, ...]:
    """Return the read-only actions that not every fleet needs."""
    return ("DescribeCapacityReservations",) if scope.reserved else ()


def _launching(scope: Scope, *ways: str) -> list[dict[str, Any]]:
    """Return the launch statements. Each way needs rights on every resource that a launch makes or uses."""
    made = MADE_BY_LAUNCH if "CreateFleet" in ways else tuple(k for k in MADE_BY_LAUNCH if k != "fleet")
    creates = {"ec2:CreateAction": [*ways, "CreateLaunchTemplate"]}
    return [
        _allow("Launch", _ec2(*ways, "CreateLaunchTemplate"), scope.ec2(*made), scope.request_tag),
        _allow("LaunchBy", _ec2(*ways), scope.ec2("launch-template"), scope.resource_tag),
        _allow("LaunchWith", _ec2(*ways), [*scope.images, *scope.ec2(
            *USED_BY_LAUNCH, *(["capacity-reservation"] if scope.reserved else []))]),
        _allow("TagAtLaunch", _ec2("CreateTags"), scope.ec2(*made),
               _both(scope.request_tag, {"StringEquals": creates})),
    ]


def _end(scope: Scope) -> dict[str, Any]:
    return _allow("End", _ec2("TerminateInstances", "CancelSpotInstanceRequests", "DeleteLaunchTemplate",
                              "DeleteFleets"),
                  scope.ec2("instance", "spot-instances-request", "launch-template", "fleet"), scope.resource_tag)


def _making_roles(scope: Scope) -> list[dict[str, Any]]:
    """Return the statements for roles. With a boundary, no role is made or given a policy without it, so that a holder
    of these permissions gives no machine more than the boundary allows."""
    grants = ["iam:CreateRole", "iam:PutRolePolicy"]
    bounded = [_allow("BoundedRoles", [*grants, "iam:PutRolePermissionsBoundary"], scope.iam("role"),
                      {"StringEquals": {"iam:PermissionsBoundary": scope.boundary}})] if scope.boundary else []
    return [
        _allow("ListRoles", ["iam:ListRoles", "iam:ListInstanceProfiles"]),
        _allow("Roles", ["iam:DeleteRole", "iam:TagRole", "iam:DeleteRolePolicy", "iam:ListRolePolicies",
                         *([] if bounded else grants)], scope.iam("role")),
        *bounded,
        _allow("Profiles", ["iam:CreateInstanceProfile", "iam:DeleteInstanceProfile", "iam:TagInstanceProfile",
                            "iam:AddRoleToInstanceProfile", "iam:RemoveRoleFromInstanceProfile"],
               scope.iam("instance-profile")),
    ]


def _pass(roles: list[str]) -> dict[str, Any]:
    return _allow("PassRoles", ["iam:PassRole"], roles,
                  {"StringEquals": {"iam:PassedToService": ["ec2.amazonaws.com", "ec2.amazonaws.com.cn"]}})


def _key(scope: Scope) -> list[dict[str, Any]]:
    """Return the statements for a customer's key, which EC2 uses on behalf of the launching caller.

    Spot launches also need a grant to their linked role, which a person makes once.
    """
    if not scope.kms_key and not scope.default_keys:
        return []
    resources, condition = _key_of(scope) if scope.kms_key else (list(scope.default_keys), {})
    return [_allow("UseKey", ["kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKeyWithoutPlaintext",
                              "kms:ReEncryptFrom", "kms:ReEncryptTo"], resources,
                   _both(condition, {"StringLike": {"kms:ViaService": "ec2.*"}})),
            _allow("LendKey", ["kms:CreateGrant"], resources,
                   _both(condition, {"Bool": {"kms:GrantIsForAWSResource": "true"}}))]


def _key_of(scope: Scope) -> tuple[list[str], dict[str, Any]]:
    """Return resources and condition of the key. AWS compares a key's ARN, never an alias's, which is a condition."""
    if not scope.kms_key.startswith("arn:"):
        where, name = f"arn:{scope.partition}:kms:*:{scope.account}", scope.kms_key
    else:
        where, _, name = scope.kms_key.rpartition(":")
    if name.startswith("alias/"):
        return [f"{where}:key/*"], {"ForAnyValue:StringEquals": {"kms:ResourceAliases": [name]}}
    return [f"{where}:key/{name.removeprefix('key/')}"], {}


def _parameters(scope: Scope) -> list[str]:
    """Return the public parameters, and the one named as the image."""
    own = [f"{scope.account}:parameter{scope.image}"] if scope.image.startswith("/") else []
    return [f"arn:{scope.partition}:ssm:{region}:{name}" for name in [":parameter/aws/service/*", *own]
            for region in scope.places]


def _bucket(scope: Scope) -> str:
    return f"arn:{scope.partition}:s3:::{scope.target.removeprefix('s3://').partition('/')[0]}"


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge conditions that must hold together."""
    return {op: {**one.get(op, {}), **other.get(op, {})} for op in {**one, **other}}


def _ec2(*names_: str) -> list[str]:
    return [f"ec2:{name}" for name in names_]


def _allow(sid: str, allowed: Iterable[str], resources: Iterable[str] = (ANY,),
           condition: Mapping[str, Any] | None = None) -> dict[str, Any]:
    statement = {"Sid": sid, "Effect": "Allow", "Action": sorted(allowed), "Resource": list(resources)}
    return {**statement, "Condition": dict(condition)} if condition else statement


def _document(statements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"Version": VERSION, "Statement": statements}
