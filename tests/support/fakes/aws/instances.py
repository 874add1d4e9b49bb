"""EC2 operations on instances and spot requests."""

from __future__ import annotations

from typing import Any

from tests.support.fakes.aws import catalog
from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.market import opened
from tests.support.fakes.aws.operations import Context, filtered, once, operation, page, remember, tags
from tests.support.fakes.aws.ordering import merged, order
from tests.support.fakes.aws.state import CODES, Machine, when

TOKEN_S = 24 * 3600.0  # so long after their end EC2 remembers what instances were asked for by


@operation("ec2:RunInstances")
def run_instances(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    before = once(ctx, "RunInstances", p)
    if before:
        machines = [ctx.region.machines[i] for i in before if i in ctx.region.machines]
        if any(m.living for m in machines):
            return reservation(ctx, machines, fresh=True)
        ended = [ctx.region.ended.get(i, ctx.now) for i in before] + [m.ended_at or ctx.now for m in machines]
        if ctx.now - max(ended) < TOKEN_S:
            raise AwsError(
                "IdempotentInstanceTerminated",
                f"The client token was used for {', '.join(before)}, which has been terminated.",
            )
    least, most = int(p.get("MinCount", 1)), int(p.get("MaxCount", p.get("MinCount", 1)))
    if not 1 <= least <= most:
        raise AwsError("InvalidParameterValue", f"MinCount {least} and MaxCount {most} do not fit")
    both, used = merged(ctx, p)
    if most > 1 and any(n.get("PrivateIpAddress") for n in both.get("NetworkInterfaces", [])):
        raise AwsError("InvalidParameterCombination", "An address can be given to one instance only")
    wanted = opened(ctx, order(ctx, both, used), most)
    try:
        machines = ctx.cloud.life.launch(wanted, least, most)
    except AwsError:
        remember(ctx, "RunInstances", p, [])  # EC2 knows the words of a token also when it refused them
        raise
    remember(ctx, "RunInstances", p, [m.id for m in machines])
    return reservation(ctx, machines, fresh=True)


def reservation(ctx: Context, machines: list[Machine], fresh: bool = False) -> dict[str, Any]:
    return {
        "ReservationId": machines[0].reservation_id,
        "OwnerId": catalog.ACCOUNT,
        "Groups": [],
        "Instances": [told(ctx, m, fresh) for m in machines],
    }


def told(ctx: Context, machine: Machine, fresh: bool = False) -> dict[str, Any]:
    """As DescribeInstances says it; `fresh` in the answer to a launch."""
    order_, seen = machine.order, machine.seen(ctx.now - ctx.cloud.lag_s)
    name = "pending" if fresh and machine.state in ("pending", "running") and machine.run == 1 else seen.name
    said = {
        **_always(ctx, machine),
        "State": {"Code": CODES[name], "Name": name},
        "StateTransitionReason": seen.transition,
    }
    if order_.key_name:
        said["KeyName"] = order_.key_name
    if order_.block:
        said["InstanceLifecycle"] = "capacity-block"
    if order_.reservation:
        said["CapacityReservationId"] = order_.reservation
    target = {"CapacityReservationId": order_.reservation}
    said["CapacityReservationSpecification"] = (
        {"CapacityReservationTarget": target} if order_.targeted else {"CapacityReservationPreference": "open"}
    )
    if order_.market == "spot":
        said["InstanceLifecycle"] = "spot"
        said["SpotInstanceRequestId"] = machine.request.id if machine.request else ""
    if seen.code:
        said["StateReason"] = {"Code": seen.code, "Message": seen.message}
    if name != "terminated":
        said |= _while_it_lives(ctx, machine, name, fresh)
    return said


def _always(ctx: Context, machine: Machine) -> dict[str, Any]:
    order_ = machine.order
    return {
        "InstanceId": machine.id,
        "ImageId": order_.image,
        "InstanceType": order_.type,
        "AmiLaunchIndex": machine.launch_index,
        "LaunchTime": when(machine.launched),
        "Architecture": catalog.TYPES[order_.type].architecture,
        "Hypervisor": "xen",
        "VirtualizationType": "hvm",
        "RootDeviceType": "ebs",
        "RootDeviceName": ctx.cloud.images[order_.image].root,
        "EnaSupport": True,
        "ClientToken": order_.client_token,
        "EbsOptimized": order_.ebs_optimized,
        "Tags": tags(ctx.backend, machine.id),
        "Monitoring": {"State": "enabled" if order_.monitoring else "disabled"},
        "Placement": {
            "AvailabilityZone": order_.zone,
            "AvailabilityZoneId": catalog.zone_id(order_.zone),
            "GroupName": order_.placement_group,
            "Tenancy": "default",
        },
        "MetadataOptions": {"State": "applied", **metadata_options(machine)},
        "SourceDestCheck": True,
        "PublicDnsName": "",
        "PrivateDnsName": "",
        "NetworkInterfaces": [],
        "SecurityGroups": [],
        "BlockDeviceMappings": [],
        "PlatformDetails": "Linux/UNIX",
        "UsageOperation": "RunInstances",
        "CurrentInstanceBootMode": "uefi",
    }


def _while_it_lives(ctx: Context, machine: Machine, name: str, fresh: bool) -> dict[str, Any]:
    nics = machine.nics or machine.had[0]  # a listing that is late knows them yet
    main, profile = nics.get(0), machine.order.profile
    devices = [_device(path, d) for path, d in (machine.block_device_mapping or machine.had[1]).items()]
    said: dict[str, Any] = {"BlockDeviceMappings": devices}
    if profile:
        said["IamInstanceProfile"] = {"Arn": profile.arn, "Id": profile.id}
    if main is None:
        return said
    public = "" if name == "stopped" else machine.public_ip() or machine.seen(ctx.now - ctx.cloud.lag_s).public_ip
    said |= {
        "SubnetId": main.subnet.id,
        "VpcId": main.subnet.vpc_id,
        "PrivateIpAddress": main.private_ip_address,
        "PrivateDnsName": _dns(main.private_ip_address, ctx.region.name),
        "SecurityGroups": [{"GroupId": g.id, "GroupName": g.name} for g in main._group_set],
        "NetworkInterfaces": [_interface(e) for e in nics.values()],
    }
    if public and not (fresh and name == "pending"):
        said |= {"PublicIpAddress": public, "PublicDnsName": f"ec2-{public.replace('.', '-')}.compute.amazonaws.com"}
    return said


def metadata_options(machine: Machine) -> dict[str, Any]:
    given = machine.order.metadata
    return {
        "HttpTokens": given.get("HttpTokens", "optional"),
        "HttpEndpoint": given.get("HttpEndpoint", "enabled"),
        "HttpPutResponseHopLimit": int(given.get("HttpPutResponseHopLimit", 1)),
        "HttpProtocolIpv6": given.get("HttpProtocolIpv6", "disabled"),
        "InstanceMetadataTags": given.get("InstanceMetadataTags", "disabled"),
    }


def _dns(address: str, region: str) -> str:
    suffix = "ec2.internal" if region == "us-east-1" else f"{region}.compute.internal"
    return f"ip-{address.replace('.', '-')}.{suffix}"


def _device(path: str, device: Any) -> dict[str, Any]:
    return {
        "DeviceName": path,
        "Ebs": {
            "VolumeId": device.volume_id,
            "Status": "attached",
            "AttachTime": device.attach_time,
            "DeleteOnTermination": device.delete_on_termination,
        },
    }


def _interface(eni: Any) -> dict[str, Any]:
    said = {
        "NetworkInterfaceId": eni.id,
        "SubnetId": eni.subnet.id,
        "VpcId": eni.subnet.vpc_id,
        "Status": "in-use",
        "MacAddress": eni.mac_address,
        "PrivateIpAddress": eni.private_ip_address,
        "Description": eni.description,
        "InterfaceType": eni.interface_type,
        "OwnerId": catalog.ACCOUNT,
        "SourceDestCheck": True,
        "Groups": [{"GroupId": g.id, "GroupName": g.name} for g in eni._group_set],
        "PrivateIpAddresses": [{"Primary": True, "PrivateIpAddress": eni.private_ip_address}],
        "Attachment": {
            "AttachmentId": eni.attachment_id,
            "DeviceIndex": eni.device_index,
            "Status": "attached",
            "DeleteOnTermination": bool(eni.delete_on_termination),
            "NetworkCardIndex": eni.card,
        },
    }
    if eni.public_ip:
        said["Association"] = {"PublicIp": eni.public_ip, "IpOwnerId": "amazon"}
    return said


# ---- finding and listing


def listed(ctx: Context) -> list[Machine]:
    return [m for m in ctx.region.machines.values() if ctx.now - m.born >= ctx.cloud.new_lag_s]


def by_ids(ctx: Context, ids: list[str]) -> list[Machine]:
    for id in ids:
        if not id.startswith("i-"):
            raise AwsError("InvalidInstanceID.Malformed", f'Invalid id: "{id}"')
    known = {m.id: m for m in listed(ctx)}
    missing = [i for i in ids if i not in known]
    if missing:
        noun = f"ID '{missing[0]}' does" if len(missing) == 1 else f"IDs '{', '.join(missing)}' do"
        raise AwsError("InvalidInstanceID.NotFound", f"The instance {noun} not exist")
    return [known[i] for i in dict.fromkeys(ids)]


def _state(ctx: Context, machine: Machine) -> str:
    return machine.seen(ctx.now - ctx.cloud.lag_s).name


def _filters(ctx: Context) -> dict[str, Any]:
    def ebs(m: Machine) -> list[Any]:
        return list(m.block_device_mapping.values())

    return {
        "instance-id": lambda m: m.id,
        "instance-state-name": lambda m: _state(ctx, m),
        "instance-state-code": lambda m: CODES[_state(ctx, m)],
        "instance-type": lambda m: m.order.type,
        "instance-lifecycle": lambda m: "spot" if m.market == "spot" else None,
        "image-id": lambda m: m.order.image,
        "spot-instance-request-id": lambda m: m.request.id if m.request else None,
        "availability-zone": lambda m: m.order.zone,
        "placement-availability-zone": lambda m: m.order.zone,
        "placement-group-name": lambda m: m.order.placement_group or None,
        "client-token": lambda m: m.order.client_token,
        "subnet-id": lambda m: m.order.subnet.id,
        "vpc-id": lambda m: m.order.subnet.vpc_id,
        "instance.group-id": lambda m: [g.id for g in m.order.groups],
        "key-name": lambda m: m.order.key_name or None,
        "instance.group-name": lambda m: [g.name for g in m.order.groups],
        "launch-index": lambda m: m.launch_index,
        "private-ip-address": lambda m: m.nics[0].private_ip_address if 0 in m.nics else None,
        "ip-address": lambda m: m.public_ip() or None,
        "reservation-id": lambda m: m.reservation_id,
        "iam-instance-profile.arn": lambda m: m.order.profile.arn if m.order.profile else None,
        "iam-instance-profile.name": lambda m: m.order.profile.name if m.order.profile else None,
        "block-device-mapping.volume-id": lambda m: [d.volume_id for d in ebs(m)],
        "network-interface.network-interface-id": lambda m: [e.id for e in m.nics.values()],
        "network-interface.group-id": lambda m: [g.id for e in m.nics.values() for g in e._group_set],
        "state-reason-code": lambda m: m.seen(ctx.now - ctx.cloud.lag_s).code or None,
    }


@operation("ec2:DescribeInstances")
def describe_instances(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    if p.get("InstanceIds") and p.get("MaxResults"):
        raise AwsError(
            "InvalidParameterCombination", "The parameter instancesSet cannot be used with the parameter maxResults"
        )
    found = by_ids(ctx, p["InstanceIds"]) if p.get("InstanceIds") else listed(ctx)
    found = filtered(found, p.get("Filters"), _filters(ctx), lambda m: m.tags)
    some, token = page(found, p)
    groups: dict[str, list[Machine]] = {}
    for machine in some:
        groups.setdefault(machine.reservation_id, []).append(machine)
    return {"Reservations": [reservation(ctx, g) for g in groups.values()], "NextToken": token}


@operation("ec2:DescribeInstanceStatus")
def describe_instance_status(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    found = by_ids(ctx, p["InstanceIds"]) if p.get("InstanceIds") else listed(ctx)
    known = {**_filters(ctx), "event.code": lambda m: [e["Code"] for e in m.events]}
    found = filtered(found, p.get("Filters"), known, lambda m: m.tags)
    if not p.get("IncludeAllInstances"):
        found = [m for m in found if _state(ctx, m) == "running"]
    some, token = page(found, p)
    return {
        "InstanceStatuses": [
            {
                "InstanceId": m.id,
                "AvailabilityZone": m.order.zone,
                "Events": [
                    {
                        "Code": e["Code"],
                        "Description": e["Description"],
                        "NotBefore": when(e["at"]),
                        "InstanceEventId": e["EventId"],
                    }
                    for e in m.events
                ],
                "InstanceState": {"Code": CODES[_state(ctx, m)], "Name": _state(ctx, m)},
                "InstanceStatus": {"Status": "ok" if m.state == "running" else "not-applicable"},
                "SystemStatus": {"Status": "ok" if m.state == "running" else "not-applicable"},
            }
            for m in some
        ],
        "NextToken": token,
    }


@operation("ec2:DescribeInstanceAttribute")
def describe_instance_attribute(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    (machine,) = by_ids(ctx, [p["InstanceId"]])
    order_, attribute = machine.order, p["Attribute"]
    values = {
        "userData": ("UserData", order_.user_data or None),
        "instanceType": ("InstanceType", order_.type),
        "instanceInitiatedShutdownBehavior": ("InstanceInitiatedShutdownBehavior", order_.shutdown),
        "disableApiTermination": ("DisableApiTermination", order_.protected),
        "disableApiStop": ("DisableApiStop", False),
        "rootDeviceName": ("RootDeviceName", ctx.cloud.images[order_.image].root),
        "ebsOptimized": ("EbsOptimized", order_.ebs_optimized),
    }
    if attribute == "groupSet":
        return {"InstanceId": machine.id, "Groups": [{"GroupId": g.id} for g in order_.groups]}
    if attribute == "blockDeviceMapping":
        return {
            "InstanceId": machine.id,
            "BlockDeviceMappings": [_device(path, d) for path, d in machine.block_device_mapping.items()],
        }
    if attribute not in values:
        raise AwsError("InvalidParameterValue", f"Value ({attribute}) for parameter attribute is invalid.")
    name, value = values[attribute]
    return {"InstanceId": machine.id, name: {"Value": value} if value is not None else {}}


@operation("ec2:ModifyInstanceAttribute")
def modify_instance_attribute(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    (machine,) = by_ids(ctx, [p["InstanceId"]])
    if "InstanceInitiatedShutdownBehavior" in p:
        machine.order.shutdown = p["InstanceInitiatedShutdownBehavior"]["Value"]
    if "DisableApiTermination" in p:
        machine.order.protected = bool(p["DisableApiTermination"]["Value"])
    if "UserData" in p:
        if machine.state != "stopped":
            raise AwsError("IncorrectInstanceState", f"The instance '{machine.id}' is not in the 'stopped' state.")
        machine.order.user_data = str(p["UserData"]["Value"])
    for change in p.get("BlockDeviceMappings", []):
        device = machine.block_device_mapping[change["DeviceName"]]
        device.delete_on_termination = bool(change["Ebs"]["DeleteOnTermination"])
    if p.get("Groups"):
        groups = [ctx.backend.get_security_group_from_id(g) for g in p["Groups"]]
        if None in groups:
            raise AwsError("InvalidGroup.NotFound", "a group does not exist")
        machine.order.groups = machine.nics[0]._group_set = groups
    return {}


@operation("ec2:ModifyInstanceMetadataOptions")
def modify_instance_metadata_options(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    (machine,) = by_ids(ctx, [p["InstanceId"]])
    names = ("HttpTokens", "HttpPutResponseHopLimit", "HttpEndpoint", "HttpProtocolIpv6", "InstanceMetadataTags")
    machine.order.metadata.update({k: p[k] for k in names if k in p})
    return {"InstanceId": machine.id, "InstanceMetadataOptions": {"State": "pending", **metadata_options(machine)}}
