"""What a request is about, for policies: the resources it touches, their tags, the tags that it sets.

By the Service Authorization Reference, for the actions that spotfleet calls; any other is about "*". A launch is judged
twice: at the door by its action alone, and by `launching` once launch template and parameters are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tests.support.fakes.aws import keys
from tests.support.fakes.aws.catalog import ACCOUNT
from tests.support.fakes.aws.tagging import KINDS

if TYPE_CHECKING:
    from tests.support.fakes.aws.cloud import AwsCloud
    from tests.support.fakes.aws.gate import Call
    from tests.support.fakes.aws.state import Order

Question = tuple[str, dict[str, Any]]  # an action, and what `Rights.may` knows about it

TOUCHED = {  # parameter -> kind, where the id does not say it
    "InstanceIds": "instance", "SpotInstanceRequestIds": "spot-instances-request", "FleetIds": "fleet",
    "LaunchTemplateId": "launch-template", "VolumeId": "volume", "NetworkInterfaceId": "network-interface",
    "AllocationId": "elastic-ip", "GroupId": "security-group", "Resources": "", "InstanceId": "instance",
}  # fmt: skip
CHANGES = {
    "ec2:" + a for a in (
        "TerminateInstances", "StopInstances", "StartInstances", "CancelSpotInstanceRequests", "DeleteLaunchTemplate",
        "DeleteFleets", "CreateTags", "DeleteVolume", "DeleteNetworkInterface", "ReleaseAddress",
        "DeleteSecurityGroup", "AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress",
        "RevokeSecurityGroupIngress", "DeleteKeyPair", "DeletePlacementGroup")
}  # fmt: skip
MADE = {
    "ec2:CreateSecurityGroup": "security-group", "ec2:CreatePlacementGroup": "placement-group",
    "ec2:CreateLaunchTemplate": "launch-template",
    "ec2:AuthorizeSecurityGroupIngress": "security-group-rule",
    "ec2:AuthorizeSecurityGroupEgress": "security-group-rule",
}  # fmt: skip
LAUNCHES = ("ec2:RunInstances", "ec2:CreateFleet")
OTHER_NAMES = {"s3:HeadBucket": "s3:ListBucket", "sqs:DeleteMessageBatch": "sqs:DeleteMessage"}
KEY_USES = {"s3:PutObject": "kms:GenerateDataKey", "s3:GetObject": "kms:Decrypt"}  # where a key encrypts the bucket
TAGS_TOO = {"iam:CreateRole": "iam:TagRole", "iam:CreateInstanceProfile": "iam:TagInstanceProfile",
            "sqs:CreateQueue": "sqs:TagQueue", "events:PutRule": "events:TagResource"}  # fmt: skip


def questions(cloud: AwsCloud, call: Call) -> list[Question]:
    """What must be allowed for this request to be carried out."""
    action, where = OTHER_NAMES.get(call.action, call.action), {"aws:RequestedRegion": call.region}
    if action in LAUNCHES:
        return [(action, {"coarse": True})]
    if call.service == "ec2":
        return [(a, {**about, **where}) for a, about in _of_ec2(cloud, call, action)]
    resources = _elsewhere(cloud, call)
    asked: list[Question] = [(action, {"resource": resources, **where, **_bounded(call)})]
    if (use := KEY_USES.get(action)) and (key := keys.of_bucket(resources[0])):
        about = {"kms:ViaService": "s3.us-east-1.amazonaws.com"}
        asked.append((use, {"resource": [key.arn], **about, **keys.aliases(key)}))
    if action in TAGS_TOO and (call.params.get("Tags") or call.params.get("tags")):
        asked.append((TAGS_TOO[action], {"resource": resources, **where}))
    if action == "iam:AddRoleToInstanceProfile":
        asked.append(("iam:PassRole", {"resource": _iam(cloud, call.params, "RoleName", "role"),
                                       "iam:PassedToService": "ec2.amazonaws.com"}))  # fmt: skip
    return asked


def launching(
    cloud: AwsCloud, region: str, made: Order, in_fleet: Mapping[str, dict[str, str]] | None
) -> list[Question]:
    """What a launch must be allowed: that of a fleet, whose call has these tags by kind, by both ways. CreateFleet
    knows the tags of its own call, and no spot requests."""
    tagged = {kind: _request_tags(tags) for kind, tags in made.tags.items()}
    kinds = ["instance", "volume", "network-interface"] + (["spot-instances-request"] if made.market == "spot" else [])
    of = {_ec2(region, kind): tagged.get(kind, {}) for kind in kinds}
    for kind, facts in _looks(made).items():
        of[_ec2(region, kind)] = {**of[_ec2(region, kind)], **facts}
    used = [(_ec2(region, "subnet", made.subnet.id), made.subnet.id),
            *((_ec2(region, "security-group", g.id), g.id) for g in made.groups),
            (f"arn:aws:ec2:{region}::image/{made.image}", made.image)]  # fmt: skip
    used += [(_ec2(region, "key-pair", made.key_name), made.key_name)] if made.key_name else []
    used += [(_ec2(region, "placement-group", made.placement_group), "")] if made.placement_group else []
    used += [(_ec2(region, "capacity-reservation", made.reservation), "")] if made.targeted else []
    used += [(_ec2(region, "launch-template", made.template[0]), made.template[0])] if made.template else []
    of |= {arn: _resource_tags(cloud.backend(region).tags.get(id, {})) for arn, id in used}
    where = {"aws:RequestedRegion": region}
    found: list[Question] = [("ec2:RunInstances", {"resource": list(of), "of": of, **where})]
    if in_fleet is not None:
        of = {arn: of.get(arn, {}) for arn in of if ":spot-instances-request/" not in arn}
        of |= {_ec2(region, kind): _request_tags(in_fleet.get(kind, {})) for kind in kinds[:3]}
        found.append(("ec2:CreateFleet", {"resource": list(of), "of": of, **where}))
    way = "RunInstances" if in_fleet is None else "CreateFleet"
    for kind, tags in tagged.items():
        if kind in kinds:
            arn = _ec2(region, kind)
            found.append(("ec2:CreateTags", {"resource": [arn], "of": {arn: {**tags, "ec2:CreateAction": way}}}))
    if made.profile and made.profile.roles:
        found.append(("iam:PassRole", {"resource": [made.profile.roles[0].arn],
                                       "iam:PassedToService": "ec2.amazonaws.com"}))  # fmt: skip
    return found


def _looks(made: Order) -> dict[str, dict[str, str]]:
    """What a company's rules ask of a launch."""
    return {
        "instance": {
            "ec2:InstanceType": made.type,
            "ec2:InstanceMarketType": made.market,
            "ec2:MetadataHttpTokens": made.metadata.get("HttpTokens", "optional"),
        },
        "volume": {"ec2:Encrypted": str(all(v.get("Encrypted") for v in made.volumes)).lower()},
    }


def _of_ec2(cloud: AwsCloud, call: Call, action: str) -> Iterable[Question]:
    if action not in CHANGES and action not in MADE:
        yield action, {}
        return
    of: dict[str, dict[str, Any]] = {}
    if action in CHANGES:
        of |= {_ec2(call.region, kind, id): _resource_tags(tags) for kind, id, tags in _touched(cloud, call)}
    given = {s.get("ResourceType", ""): s.get("Tags", []) for s in call.params.get("TagSpecifications", [])}
    if action in MADE:
        kind = MADE[action]
        new = _request_tags({t["Key"]: t.get("Value", "") for t in given.get(kind, [])})
        of[_ec2(call.region, kind)] = new
        if action == "ec2:CreateSecurityGroup":
            of[_ec2(call.region, "vpc", call.params.get("VpcId", ""))] = {}
        if given.get(kind):
            tagged = {**new, "ec2:CreateAction": action.partition(":")[2]}
            yield "ec2:CreateTags", {"resource": [_ec2(call.region, kind)], "of": {_ec2(call.region, kind): tagged}}
    if action == "ec2:CreateTags":
        new = _request_tags({t["Key"]: t.get("Value", "") for t in call.params.get("Tags", [])})
        of = {arn: {**known, **new} for arn, known in of.items()}
    yield action, {"resource": list(of), "of": of} if of else {"coarse": True}


def _touched(cloud: AwsCloud, call: Call) -> Iterable[tuple[str, str, dict[str, str]]]:
    backend, state, p = cloud.backend(call.region), cloud.regions[call.region], call.params
    if call.action == "ec2:DeletePlacementGroup":
        group = next((g for g in state.placement_groups.values() if g.name == p.get("GroupName")), None)
        yield "placement-group", p.get("GroupName", ""), backend.tags.get(group.id, {}) if group else {}
        return
    if call.action == "ec2:DeleteKeyPair":
        key = next((k for k in backend.key_pairs.values() if k.key_name == p.get("KeyName")), None)
        yield "key-pair", p.get("KeyName", ""), backend.tags.get(key.id, {}) if key else {}
        return
    if p.get("LaunchTemplateName"):
        made = next((t for t in backend.launch_templates.values() if t.name == p["LaunchTemplateName"]), None)
        if made is not None:
            yield "launch-template", made.id, backend.tags.get(made.id, {})
    for parameter, kind in TOUCHED.items():
        ids = p.get(parameter, [])
        for id in ids if isinstance(ids, list) else [ids]:
            if id in backend.tags or not kind or _there(state, backend, kind, id):
                yield kind or KINDS.get(id.partition("-")[0], "x"), id, dict(backend.tags.get(id, {}))


def _there(state: Any, backend: Any, kind: str, id: str) -> bool:
    """What is not there is not judged: EC2 says that it is not there."""
    match kind:
        case "instance":
            return id in state.machines
        case "spot-instances-request":
            return id in state.requests
        case "fleet":
            return id in state.fleets
        case "volume":
            return id in backend.volumes
        case "network-interface":
            return id in backend.enis
        case "security-group":
            return any(id in groups for groups in backend.groups.values())
    return False


def _elsewhere(cloud: AwsCloud, call: Call) -> list[str]:
    p = call.params
    match call.service:
        case "iam":
            if p.get("InstanceProfileName"):
                return _iam(cloud, p, "InstanceProfileName", "instance-profile")
            return _iam(cloud, p, "RoleName", "role") if p.get("RoleName") else ["*"]
        case "sqs":
            name = p.get("QueueName") or str(p.get("QueueUrl", "")).rpartition("/")[2]
            return [f"arn:aws:sqs:{call.region}:{ACCOUNT}:{name}"] if name else ["*"]
        case "events":
            name = p.get("Rule") or p.get("Name") or str(p.get("ResourceARN", "")).rpartition("/")[2]
            return [f"arn:aws:events:{call.region}:{ACCOUNT}:rule/{name}"] if name else ["*"]
        case "ssm":
            whose = "" if str(p.get("Name", "")).startswith("/aws/service/") else ACCOUNT
            return [f"arn:aws:ssm:{call.region}:{whose}:parameter{p.get('Name', '')}"]
        case "s3":
            where = unquote(str(p.get("path", ""))).strip("/")  # BUCKET, or BUCKET/KEY
            return [f"arn:aws:s3:::{where}"] if where else ["*"]
    return ["*"]


def _bounded(call: Call) -> dict[str, str]:
    """The boundary of a new role, or of the role whose policy changes."""
    from moto.iam.models import iam_backends

    if call.service != "iam" or not call.params.get("RoleName"):
        return {}
    roles = iam_backends[ACCOUNT]["aws"].roles.values()
    there = next((r for r in roles if r.name == call.params["RoleName"]), None)
    arn = call.params.get("PermissionsBoundary") or (there.permissions_boundary_arn if there else None)
    return {"iam:PermissionsBoundary": arn} if arn else {}


def _iam(cloud: AwsCloud, p: Mapping[str, Any], key: str, kind: str) -> list[str]:
    from moto.iam.models import iam_backends

    backend, name = iam_backends[ACCOUNT]["aws"], p.get(key, "")
    there = backend.roles if kind == "role" else backend.instance_profiles
    found = next((t for t in there.values() if t.name == name), None)
    return [found.arn if found else f"arn:aws:iam::{ACCOUNT}:{kind}{p.get('Path', '/')}{name}"]


def _ec2(region: str, kind: str, id: str = "*") -> str:
    return f"arn:aws:ec2:{region}:{ACCOUNT}:{kind}/{'new' if id == '*' else id}"


def _request_tags(tags: Mapping[str, str]) -> dict[str, Any]:
    return {**{f"aws:RequestTag/{k}": v for k, v in tags.items()}, **({"aws:TagKeys": list(tags)} if tags else {})}


def _resource_tags(tags: Mapping[str, str]) -> dict[str, Any]:
    return {f"aws:ResourceTag/{k}": v for k, v in tags.items()}
