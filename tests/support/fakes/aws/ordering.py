"""From a launch template and the parameters of a launch to an `Order`, or the refusal that EC2 would give."""

from __future__ import annotations

import base64
import binascii
import re
from datetime import UTC, datetime
from typing import Any

from tests.support.fakes.aws import about, catalog
from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.market import targeted
from tests.support.fakes.aws.operations import Context, tags_by_type
from tests.support.fakes.aws.state import Order

USER_DATA_LIMIT = 16384
TAGGED_AT_LAUNCH = ("instance", "volume", "network-interface", "spot-instances-request", "elastic-gpu")
NO_SPOT_REQUEST = (
    "You cannot specify tags for Spot instances requests if there are no Spot instances requests being created."
)


def template(ctx: Context, spec: dict[str, Any]) -> tuple[Any, Any]:
    """A launch template of moto's, and the version asked for."""
    templates = ctx.backend.launch_templates
    if "LaunchTemplateId" in spec and "LaunchTemplateName" in spec:
        raise AwsError(
            "InvalidParameterCombination", "Only one of LaunchTemplateId and LaunchTemplateName may be given"
        )
    if "LaunchTemplateId" in spec:
        found = templates.get(spec["LaunchTemplateId"])
        if found is None:
            raise AwsError(
                "InvalidLaunchTemplateId.NotFound",
                f"The specified launch template, with template ID {spec['LaunchTemplateId']}, does not exist.",
            )
    else:
        name = spec.get("LaunchTemplateName", "")
        found = templates.get(ctx.backend.launch_template_name_to_ids.get(name, ""))
        if found is None:
            raise AwsError(
                "InvalidLaunchTemplateName.NotFoundException",
                f"The specified launch template, with template name {name}, does not exist.",
            )
    version = str(spec.get("Version", "$Default"))
    if version.isdigit() and not 1 <= int(version) <= len(found.versions):
        raise AwsError("InvalidLaunchTemplateId.VersionNotFound", f"Could not find launch template version {version}.")
    return found, found.get_version(version)


def merged(ctx: Context, given: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """The parameters with those of the launch template below them; its id and version."""
    spec = given.get("LaunchTemplate")
    if not spec:
        return dict(given), None
    found, version = template(ctx, spec)
    both = {k: v for k, v in version.data.items() if v not in (None, "", [], {})}
    if "InstanceRequirements" in both:
        raise AwsError("UnsupportedOperation", "this fake knows no InstanceRequirements")
    for key, value in given.items():
        if key == "BlockDeviceMappings":
            devices = {d["DeviceName"]: d for d in both.get(key, [])}
            for device in value:
                devices[device["DeviceName"]] = {**devices.get(device["DeviceName"], {}), **device}
            both[key] = list(devices.values())
        elif key == "TagSpecifications":
            both[key] = [*both.get(key, []), *value]
        elif key not in ("LaunchTemplate",):
            both[key] = value
    if "InstanceMarketOptions" not in given and ctx.cloud.template_ends_s:
        both |= _market_of_template(ctx, both)
    # moto keeps the tags of the template itself among those of what it launches
    both["TagSpecifications"] = [
        s for s in both.get("TagSpecifications", []) if s.get("ResourceType") != "launch-template"
    ]
    return both, (found.id, str(version.number))


def _market_of_template(ctx: Context, both: dict[str, Any]) -> dict[str, Any]:
    """A persistent request by a template ends by itself, unless it says when."""
    market = both.get("InstanceMarketOptions") or {}
    spot = market.get("SpotOptions") or {}
    if spot.get("SpotInstanceType") != "persistent" or spot.get("ValidUntil"):
        return {}
    until = datetime.fromtimestamp(ctx.now + ctx.cloud.template_ends_s, UTC)
    return {"InstanceMarketOptions": {**market, "SpotOptions": {**spot, "ValidUntil": until}}}


def order(
    ctx: Context, p: dict[str, Any], used: tuple[str, str] | None, in_fleet: dict[str, dict[str, str]] | None = None
) -> Order:
    """`p` after merging; `in_fleet`: tags of the call that makes a fleet, by kind. Raises what EC2 would."""
    image = _image(ctx, p)
    kind = _type(p, image)
    if p.get("CreditSpecification") and not kind.facts.get("BurstablePerformanceSupported"):
        raise AwsError(
            "InvalidParameterCombination", f"CreditSpecification is not supported for the instance type {kind.name}"
        )
    spot = _spot(ctx, p)
    market = "spot" if spot is not None else "on-demand"
    interfaces = _interfaces(ctx, p, kind)
    subnet = _subnet(ctx, p, interfaces, kind, market)
    zone = subnet.availability_zone
    if not catalog.sold(kind.name, zone):
        raise AwsError(
            "Unsupported",
            f"Your requested instance type ({kind.name}) is not supported in your requested "
            f"Availability Zone ({zone}). Please retry your request by not specifying an Availability Zone.",
        )
    groups = _groups(ctx, p, interfaces, subnet)
    tags = tags_by_type(p.get("TagSpecifications", []), TAGGED_AT_LAUNCH)
    _readable(p, tags)
    if market == "on-demand" and "spot-instances-request" in tags:
        raise AwsError("InvalidParameterValue", NO_SPOT_REQUEST)
    made = Order(
        type=kind.name,
        image=image.id,
        zone=zone,
        subnet=subnet,
        groups=groups,
        market=market,
        user_data=_user_data(p),
        key_name=_key(ctx, p),
        profile=_profile(ctx, p),
        interfaces=interfaces,
        volumes=_volumes(p, image),
        metadata=dict(p.get("MetadataOptions", {})),
        shutdown=p.get("InstanceInitiatedShutdownBehavior") or "stop",
        placement_group=_placement_group(ctx, p, kind),
        tags=tags,
        spot=spot or {},
        template=used,
        ebs_optimized=bool(p.get("EbsOptimized")),
        monitoring=bool((p.get("Monitoring") or {}).get("Enabled")),
        protected=bool(p.get("DisableApiTermination")),
        client_token=p.get("ClientToken", ""),
        principal=ctx.principal,
        **targeted(ctx, p, kind.name, zone, market),
    )
    if made.shutdown not in ("stop", "terminate"):
        raise AwsError("InvalidParameterValue", f"'{made.shutdown}' is no InstanceInitiatedShutdownBehavior")
    if made.placement_group and made.behavior in ("stop", "hibernate"):
        raise AwsError(
            "InvalidParameterCombination",
            f"A Spot Instance with the interruption behavior '{made.behavior}' cannot be launched in a placement group",
        )
    _may_be_created(ctx, made, in_fleet)
    return made


def _readable(p: dict[str, Any], tags: dict[str, dict[str, str]]) -> None:
    """The metadata server shows tags by paths, so their names have few letters."""
    if (p.get("MetadataOptions") or {}).get("InstanceMetadataTags") != "enabled":
        return
    for key in tags.get("instance", {}):
        if not re.fullmatch(r"[0-9a-zA-Z\-_+=,.@:]{1,255}", key) or key in (".", "..", "_index"):
            raise AwsError(
                "InvalidParameterValue",
                f"'{key}' is not a valid tag key. Tag keys must match pattern ([0-9a-zA-Z\\-_+=,.@:]{{1,255}}), and "
                "must not be a reserved name ('.', '..', '_index')",
            )


def _image(ctx: Context, p: dict[str, Any]) -> catalog.Image:
    name = p.get("ImageId")
    if not name:
        raise AwsError("MissingParameter", "The request must contain the parameter ImageId")
    if name.startswith("resolve:ssm:"):
        parameter = name.removeprefix("resolve:ssm:")
        if parameter not in ctx.cloud.parameters:
            raise AwsError("InvalidParameterValue", f"Unable to resolve the parameter {parameter}")
        name = ctx.cloud.parameters[parameter]
    if not re.fullmatch(r"ami-([0-9a-f]{8}|[0-9a-f]{17})", name):
        raise AwsError("InvalidAMIID.Malformed", f'Invalid id: "{name}" (expecting "ami-...")')
    if name not in ctx.cloud.images or ctx.region.name in ctx.cloud.image_gone.get(name, ()):
        raise AwsError("InvalidAMIID.NotFound", f"The image id '[{name}]' does not exist")
    return ctx.cloud.images[name]


def _type(p: dict[str, Any], image: catalog.Image) -> catalog.Type:
    name = p.get("InstanceType") or "m5.large"
    if name not in catalog.TYPES:
        raise AwsError("InvalidParameterValue", f"Invalid value '{name}' for InstanceType.")
    kind = catalog.TYPES[name]
    if kind.architecture != image.architecture:
        raise AwsError(
            "InvalidParameterValue",
            f"The architecture '{kind.architecture}' of the specified instance type "
            f"does not match the architecture '{image.architecture}' of the specified AMI. Specify an instance "
            "type and an AMI that have matching architectures, and try again.",
        )
    return kind


def _spot(ctx: Context, p: dict[str, Any]) -> dict[str, Any] | None:
    market = p.get("InstanceMarketOptions") or {}
    if not market or market.get("MarketType") not in (None, "spot"):
        return None
    spot = dict(market.get("SpotOptions") or {})
    behavior = spot.get("InstanceInterruptionBehavior", "terminate")
    if spot.get("SpotInstanceType", "one-time") == "persistent":
        if behavior not in ("stop", "hibernate"):
            raise AwsError(
                "InvalidParameterCombination",
                "For RunInstances, persistent Spot Instance requests are only "
                "supported when the instance interruption behavior is either hibernate or stop.",
            )
    elif behavior != "terminate":
        raise AwsError(
            "InvalidParameterCombination",
            f"The interruption behavior '{behavior}' is only supported for persistent Spot requests",
        )
    if "ValidUntil" in spot and spot.get("SpotInstanceType", "one-time") != "persistent":
        raise AwsError("InvalidParameterCombination", "ValidUntil is only supported for persistent requests")
    return spot


def _interfaces(ctx: Context, p: dict[str, Any], kind: catalog.Type) -> list[dict[str, Any]]:
    interfaces = [dict(n) for n in p.get("NetworkInterfaces", [])]
    if not interfaces:
        return []
    if p.get("SubnetId"):
        raise AwsError(
            "InvalidParameterCombination",
            "Network interfaces and an instance-level subnet ID may not be specified on the same request",
        )
    if p.get("SecurityGroupIds") or p.get("SecurityGroups"):
        raise AwsError(
            "InvalidParameterCombination",
            "Network interfaces and an instance-level security groups may not be specified on the same request",
        )
    if len(interfaces) > 1 and any(n.get("AssociatePublicIpAddress") for n in interfaces):
        raise AwsError(
            "InvalidParameterCombination",
            "The associatePublicIPAddress parameter cannot be specified when launching with multiple network "
            "interfaces.",
        )
    network = kind.facts["NetworkInfo"]
    efas = [n for n in interfaces if n.get("InterfaceType") in ("efa", "efa-only")]
    if efas and not network.get("EfaSupported"):
        raise AwsError("InvalidParameterCombination", f"EFA interfaces are not supported on {kind.name}")
    if len(efas) > (network.get("EfaInfo") or {}).get("MaximumEfaInterfaces", 0):
        raise AwsError("AttachmentLimitExceeded", f"{kind.name} has no room for {len(efas)} EFA interfaces")
    cards = {c["NetworkCardIndex"]: c for c in network["NetworkCards"]}
    for card in {int(n.get("NetworkCardIndex", 0)) for n in interfaces} & set(cards):
        on = [n for n in interfaces if int(n.get("NetworkCardIndex", 0)) == card]
        if {n.get("InterfaceType", "interface") for n in on} - set(cards[card]["InterfaceTypes"]):
            raise AwsError("InvalidParameterCombination", f"EFA interfaces are not supported on network card {card} of "
                                                          f"{kind.name}")  # fmt: skip
        if len(on) > cards[card]["MaximumNetworkInterfaces"] or sum("InterfaceType" in n for n in on) > 1:
            raise AwsError("AttachmentLimitExceeded", f"Too many network interfaces on network card {card}")
    if any(n.get("InterfaceType") == "efa-only" and int(n.get("DeviceIndex", -1)) == 0 for n in interfaces):
        raise AwsError("InvalidParameterCombination", "The primary network interface cannot be EFA-only")
    if any(int(n.get("NetworkCardIndex", 0)) >= network["MaximumNetworkCards"] for n in interfaces):
        raise AwsError("InvalidParameterValue", f"The network card index exceeds those of {kind.name}")
    if not any(int(n.get("DeviceIndex", -1)) == 0 and int(n.get("NetworkCardIndex", 0)) == 0 for n in interfaces):
        raise AwsError("InvalidParameterValue", "The primary network interface (device index 0) is missing")
    places = [(int(n.get("NetworkCardIndex", 0)), int(n.get("DeviceIndex", -1))) for n in interfaces]
    if len(set(places)) < len(places):
        raise AwsError("InvalidParameterValue", "Each network interface requires a unique device index.")
    return interfaces


def _subnet(ctx: Context, p: dict[str, Any], interfaces: list[dict[str, Any]], kind: catalog.Type, market: str) -> Any:
    named = p.get("SubnetId") or next((n["SubnetId"] for n in interfaces if n.get("SubnetId")), "")
    zone = (p.get("Placement") or {}).get("AvailabilityZone", "")
    if zone and zone not in catalog.zones(ctx.region.name):
        raise AwsError("InvalidParameterValue", f"Invalid availability zone: [{zone}]")
    subnets = [s for by_zone in ctx.backend.subnets.values() for s in by_zone.values()]
    if named:
        found = next((s for s in subnets if s.id == named), None)
        if found is None:
            raise AwsError("InvalidSubnetID.NotFound", f"The subnet ID '{named}' does not exist")
        if zone and found.availability_zone != zone:
            raise AwsError("InvalidParameterValue", f"The subnet {named} is not in the zone {zone}")
        return found
    usual = sorted((s for s in subnets if s.default_for_az), key=lambda s: s.availability_zone)
    if not usual:
        raise AwsError(
            "VPCIdNotSpecified",
            "No default VPC for this user. GroupName is only supported for EC2-Classic and default VPC",
        )
    wanted = [s for s in usual if not zone or s.availability_zone == zone]
    if not wanted:
        raise AwsError("MissingInput", f"No default subnet for availability zone: '{zone}'.")
    selling = [s for s in wanted if catalog.sold(kind.name, s.availability_zone)] or wanted
    room = ctx.cloud.market.room
    return next((s for s in selling if room((s.availability_zone, kind.name, market)) != 0), selling[0])


def _groups(ctx: Context, p: dict[str, Any], interfaces: list[dict[str, Any]], subnet: Any) -> list[Any]:
    names = p.get("SecurityGroups", [])
    ids = list(dict.fromkeys(g for n in interfaces for g in n.get("Groups", []))) or p.get("SecurityGroupIds", [])
    found = []
    for id in ids:
        group = ctx.backend.get_security_group_from_id(id)
        if group is None:
            raise AwsError("InvalidGroup.NotFound", f"The security group '{id}' does not exist")
        found.append(group)
    for name in names:
        group = ctx.backend.get_security_group_from_name(name, subnet.vpc_id)
        if group is None:
            raise AwsError("InvalidGroup.NotFound", f"The security group '{name}' does not exist in default VPC")
        found.append(group)
    if any(g.vpc_id != subnet.vpc_id for g in found):
        raise AwsError(
            "InvalidParameter", f"Security group {found[0].id} and subnet {subnet.id} belong to different networks."
        )
    return found or [ctx.backend.get_default_security_group(subnet.vpc_id)]


def _user_data(p: dict[str, Any]) -> str:
    text = p.get("UserData") or ""
    try:
        raw = base64.b64decode(str(text), validate=False)
    except (binascii.Error, ValueError):
        raise AwsError("InvalidUserData.Malformed", "Invalid BASE64 encoding of user data") from None
    if len(raw) > USER_DATA_LIMIT:
        raise AwsError("InvalidParameterValue", f"User data is limited to {USER_DATA_LIMIT} bytes")
    return str(text)


def _key(ctx: Context, p: dict[str, Any]) -> str:
    name = p.get("KeyName") or ""
    if name and name not in ctx.backend.key_pairs:
        raise AwsError("InvalidKeyPair.NotFound", f"The key pair '{name}' does not exist")
    return name


def _profile(ctx: Context, p: dict[str, Any]) -> Any:
    spec = p.get("IamInstanceProfile") or {}
    if not spec:
        return None
    from moto.iam.models import iam_backends

    profiles = iam_backends[catalog.ACCOUNT]["aws"].instance_profiles.values()
    found = next((q for q in profiles if q.name == spec.get("Name") or q.arn == spec.get("Arn")), None)
    which, value = ("name", spec["Name"]) if "Name" in spec else ("arn", spec.get("Arn", ""))
    if found is None or ctx.now < ctx.cloud.profile_ready.get(found.name, 0.0):
        raise AwsError(
            "InvalidParameterValue",
            f"Value ({value}) for parameter iamInstanceProfile.{which} is invalid. "
            f"Invalid IAM Instance Profile {which if which == 'name' else 'ARN'}",
        )
    return found


def _volumes(p: dict[str, Any], image: catalog.Image) -> list[dict[str, Any]]:
    """Each with DeviceName, VolumeSize, VolumeType, Encrypted, KmsKeyId, DeleteOnTermination; the root first."""
    root = {"DeviceName": image.root, "VolumeSize": image.size_gib, "VolumeType": "gp3", "DeleteOnTermination": True}
    devices = {image.root: root}
    for given in p.get("BlockDeviceMappings", []):
        name = given.get("DeviceName", "")
        if given.get("NoDevice") is not None:
            devices.pop(name, None)
            continue
        ebs = {k: v for k, v in (given.get("Ebs") or {}).items() if v is not None}
        if not ebs and "VirtualName" in given:
            continue  # ephemeral
        if name not in devices and not ebs.get("VolumeSize") and not ebs.get("SnapshotId"):
            raise AwsError("MissingParameter", "The request must contain the parameter size or snapshotId")
        if name == image.root and int(ebs.get("VolumeSize", image.size_gib)) < image.size_gib:
            raise AwsError(
                "InvalidBlockDeviceMapping",
                f"Volume of size {ebs['VolumeSize']}GB is smaller than snapshot, expect size>= {image.size_gib}GB",
            )
        if ebs.get("KmsKeyId") and not ebs.get("Encrypted"):
            raise AwsError("InvalidParameterDependency", "KmsKeyId requires the parameter Encrypted to be set.")
        devices[name] = {
            "DeviceName": name,
            "VolumeType": "gp2",
            "DeleteOnTermination": True,
            **devices.get(name, {}),
            **ebs,
        }
    return list(devices.values())


def _placement_group(ctx: Context, p: dict[str, Any], kind: catalog.Type) -> str:
    placement = p.get("Placement") or {}
    name = placement.get("GroupName", "")
    if placement.get("GroupId"):
        group = ctx.region.placement_groups.get(placement["GroupId"])
        name = group.name if group else placement["GroupId"]
    if not name:
        return ""
    group = next((g for g in ctx.region.placement_groups.values() if g.name == name), None)
    if group is None:
        raise AwsError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    if group.strategy not in kind.facts["PlacementGroupInfo"]["SupportedStrategies"]:
        raise AwsError(
            "InvalidParameterCombination",
            f"{group.strategy.capitalize()} placement groups are not supported by "
            f"the '{kind.name}' instance type. Specify a supported instance type or change the placement group "
            "strategy, and try again.",
        )
    return name


def _may_be_created(ctx: Context, made: Order, in_fleet: dict[str, dict[str, str]] | None) -> None:
    """The rights beside ec2:RunInstances that a launch takes."""
    for action, known in about.launching(ctx.cloud, ctx.region.name, made, in_fleet):
        if not ctx.cloud.rights.may(ctx.principal, action, known):
            raise AwsError("UnauthorizedOperation", ctx.cloud.rights.refusal(ctx.principal, action, known))
    if made.market == "spot":
        ctx.cloud.need_spot_role(ctx)
