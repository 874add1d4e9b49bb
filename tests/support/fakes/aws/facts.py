"""Operations that only tell: types, prices, scores, images, parameters, quotas, regions, who asks."""

from __future__ import annotations

import json
from datetime import UTC
from typing import Any

from tests.support.fakes.aws import catalog
from tests.support.fakes.aws.catalog import TYPES
from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.operations import Context, filtered, operation, page
from tests.support.fakes.aws.state import when

UNTAGGED: dict[str, str] = {}


def _no_tags(thing: Any) -> dict[str, str]:
    return UNTAGGED


@operation("ec2:DescribeRegions")
def describe_regions(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    regions = [(r, "opt-in-not-required") for r in catalog.REGIONS]
    if p.get("AllRegions"):
        regions += [(r, "not-opted-in") for r in catalog.NOT_OPTED_IN]
    if p.get("RegionNames"):
        unknown = set(p["RegionNames"]) - {r for r, _ in regions}
        if unknown:
            raise AwsError("InvalidParameterValue", f"Invalid region names: {sorted(unknown)}")
        regions = [r for r in regions if r[0] in p["RegionNames"]]
    regions = filtered(
        regions, p.get("Filters"), {"opt-in-status": lambda r: r[1], "region-name": lambda r: r[0]}, _no_tags
    )
    return {"Regions": [{"RegionName": r, "Endpoint": f"ec2.{r}.amazonaws.com", "OptInStatus": s} for r, s in regions]}


@operation("ec2:DescribeInstanceTypes")
def describe_instance_types(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    names = [n for n, t in TYPES.items() if ctx.region.name in t.regions]
    unknown = set(p.get("InstanceTypes", [])) - set(names)
    if unknown:
        raise AwsError(
            "InvalidInstanceType", f"The following supplied instance types do not exist: [{', '.join(sorted(unknown))}]"
        )
    found = [TYPES[n].facts for n in names if not p.get("InstanceTypes") or n in p["InstanceTypes"]]

    def at(*path: str) -> Any:
        def value(facts: Any) -> Any:
            for key in path:
                facts = facts.get(key) if isinstance(facts, dict) else None
            return facts

        return value

    known = {
        "instance-type": at("InstanceType"),
        "current-generation": at("CurrentGeneration"),
        "bare-metal": at("BareMetal"),
        "supported-usage-class": at("SupportedUsageClasses"),
        "processor-info.supported-architecture": at("ProcessorInfo", "SupportedArchitectures"),
        "vcpu-info.default-vcpus": at("VCpuInfo", "DefaultVCpus"),
        "memory-info.size-in-mib": at("MemoryInfo", "SizeInMiB"),
        "network-info.efa-supported": at("NetworkInfo", "EfaSupported"),
        "hypervisor": at("Hypervisor"),
        "burstable-performance-supported": at("BurstablePerformanceSupported"),
        "supported-root-device-type": at("SupportedRootDeviceTypes"),
        "supported-virtualization-type": at("SupportedVirtualizationTypes"),
    }
    some, token = page(filtered(found, p.get("Filters"), known, _no_tags), p, 100)
    return {"InstanceTypes": some, "NextToken": token}


@operation("ec2:DescribeInstanceTypeOfferings")
def describe_instance_type_offerings(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    kind, region = p.get("LocationType", "region"), ctx.region.name
    offered = [(n, z) for n in TYPES for z in catalog.zones(region) if catalog.sold(n, z)]
    if kind == "region":
        offered = list(dict.fromkeys((n, region) for n, _ in offered))
    elif kind == "availability-zone-id":
        offered = [(n, catalog.zone_id(z)) for n, z in offered]
    known = {"instance-type": lambda o: o[0], "location": lambda o: o[1]}
    some, token = page(filtered(offered, p.get("Filters"), known, _no_tags), p)
    return {
        "InstanceTypeOfferings": [{"InstanceType": n, "LocationType": kind, "Location": z} for n, z in some],
        "NextToken": token,
    }


@operation("ec2:DescribeSpotPriceHistory")
def describe_spot_price_history(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    """Changes since StartTime and the one before it, newest first."""
    region, begin = ctx.region.name, p.get("StartTime")
    since = begin.replace(tzinfo=begin.tzinfo or UTC).timestamp() if begin else ctx.cloud.market.begin
    ends = p.get("EndTime")
    until = ends.replace(tzinfo=ends.tzinfo or UTC).timestamp() if ends else ctx.now
    filters = {f["Name"]: f["Values"] for f in p.get("Filters", [])}
    kinds = p.get("InstanceTypes") or filters.get("instance-type") or list(TYPES)
    zones = (
        [p["AvailabilityZone"]]
        if p.get("AvailabilityZone")
        else filters.get("availability-zone") or catalog.zones(region)
    )
    products = p.get("ProductDescriptions") or filters.get("product-description") or ["Linux/UNIX"]
    lines = []
    for kind in kinds:
        for zone in [z for z in zones if catalog.sold(kind, z) and catalog.region_of(z) == region]:
            changes = ctx.cloud.market.history(zone, kind)
            first = max((at for at, _ in changes if at <= since), default=changes[0][0])
            for at, usd in changes:
                if first <= at <= until:
                    lines += [(at, kind, zone, usd, d) for d in products if d.startswith("Linux/UNIX")]
    lines.sort(key=lambda line: (-line[0], line[1], line[2]))
    some, token = page(lines, p)
    return {
        "SpotPriceHistory": [
            {
                "Timestamp": when(at),
                "InstanceType": kind,
                "AvailabilityZone": zone,
                "SpotPrice": f"{usd:.6f}",
                "AvailabilityZoneId": catalog.zone_id(zone),
                "ProductDescription": product,
            }
            for at, kind, zone, usd, product in some
        ],
        "NextToken": token or "",
    }


@operation("ec2:GetSpotPlacementScores")
def get_spot_placement_scores(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    """1 to 10 by room; with fewer than three types always low. Only so many different questions a day."""
    kinds = p.get("InstanceTypes", [])
    question = (tuple(sorted(kinds)), p.get("TargetCapacity"), p.get("SingleAvailabilityZone"))
    ctx.cloud.score_questions.add(question)
    if len(ctx.cloud.score_questions) > ctx.cloud.score_limit:
        raise AwsError(
            "MaxConfigLimitExceeded",
            "You have reached the limit of new Spot placement score configurations that you can use in 24 hours.",
        )
    regions, target = p.get("RegionNames") or list(catalog.REGIONS), int(p["TargetCapacity"])
    scores = []
    for region in regions:
        if region not in catalog.REGIONS:
            raise AwsError("InvalidParameterValue", f"Invalid region {region}")
        each = {}
        for zone in catalog.zones(region):
            rooms = [ctx.cloud.market.room((zone, k, "spot")) for k in kinds if catalog.sold(k, zone)]
            if rooms:
                free = sum(target * 3 if r is None else r for r in rooms)
                best = 3 if len(kinds) < 3 else 9
                each[zone] = max(1, min(best, round(best * free / (target * 3 * len(rooms)))))
        if p.get("SingleAvailabilityZone"):
            scores += [
                {"Region": region, "AvailabilityZoneId": catalog.zone_id(z), "Score": s} for z, s in each.items()
            ]
        elif each:
            scores.append({"Region": region, "Score": max(each.values())})
    scores.sort(key=lambda s: -s["Score"])
    some, token = page(scores, p, 10)
    return {"SpotPlacementScores": some, "NextToken": token}


@operation("ec2:DescribeImages")
def describe_images(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    here = {i: m for i, m in ctx.cloud.images.items() if ctx.region.name not in ctx.cloud.image_gone.get(i, ())}
    for id in p.get("ImageIds", []):
        if id not in here:
            raise AwsError("InvalidAMIID.NotFound", f"The image id '[{id}]' does not exist")
    found = [m for i, m in here.items() if not p.get("ImageIds") or i in p["ImageIds"]]
    owners = p.get("Owners", [])
    found = [m for m in found if not owners or m.owner in owners or ("self" in owners and m.owner == catalog.ACCOUNT)]
    known = {
        "image-id": lambda m: m.id,
        "name": lambda m: m.name,
        "architecture": lambda m: m.architecture,
        "state": lambda m: "available",
        "root-device-type": lambda m: "ebs",
        "virtualization-type": lambda m: "hvm",
        "is-public": lambda m: m.owner == "amazon",
        "owner-id": lambda m: m.owner,
    }
    found = filtered(found, p.get("Filters"), known, lambda m: dict(m.tags))
    return {
        "Images": [
            {
                "ImageId": m.id,
                "Name": m.name,
                "State": "available",
                "Architecture": m.architecture,
                "RootDeviceName": m.root,
                "RootDeviceType": "ebs",
                "VirtualizationType": "hvm",
                "Hypervisor": "xen",
                "OwnerId": m.owner,
                "Public": True,
                "CreationDate": m.made,
                "ImageType": "machine",
                "PlatformDetails": "Linux/UNIX",
                "EnaSupport": True,
                "Tags": [{"Key": key, "Value": value} for key, value in m.tags],
                "BlockDeviceMappings": [
                    {
                        "DeviceName": m.root,
                        "Ebs": {
                            "SnapshotId": _snapshot(m),
                            "VolumeSize": m.size_gib,
                            "VolumeType": "gp3",
                            "DeleteOnTermination": True,
                            "Encrypted": False,
                        },
                    }
                ],
            }
            for m in found
        ]
    }


@operation("ec2:DeregisterImage")
def deregister_image(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    image = ctx.cloud.images.get(p["ImageId"])
    if image is None:
        raise AwsError("InvalidAMIID.NotFound", f"The image id '[{p['ImageId']}]' does not exist")
    del ctx.cloud.images[image.id]
    ctx.cloud.snapshots.add(_snapshot(image))
    return {"Return": True}


@operation("ec2:DeleteSnapshot")
def delete_snapshot(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    """Of images: one in use stays."""
    user = next((i for i in ctx.cloud.images.values() if _snapshot(i) == p["SnapshotId"]), None)
    if user is not None:
        raise AwsError("InvalidSnapshot.InUse", f"The snapshot {p['SnapshotId']} is currently in use by {user.id}")
    if p["SnapshotId"] not in ctx.cloud.snapshots:
        raise AwsError("InvalidSnapshot.NotFound", f"The snapshot '{p['SnapshotId']}' does not exist.")
    ctx.cloud.snapshots.remove(p["SnapshotId"])
    return {}


def _snapshot(image: catalog.Image) -> str:
    return "snap-0" + image.id[-16:]


@operation("ssm:GetParameter")
def get_parameter(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    name = p["Name"]
    if name not in ctx.cloud.parameters:
        raise AwsError("ParameterNotFound", f"Parameter {name} not found.")
    return {"Parameter": _parameter(ctx, name)}


def _parameter(ctx: Context, name: str) -> dict[str, Any]:
    return {
        "Name": name,
        "Type": "String",
        "Value": ctx.cloud.parameters[name],
        "Version": 1,
        "DataType": "aws:ec2:image",
        "LastModifiedDate": ctx.now,
        "ARN": f"arn:aws:ssm:{ctx.region.name}::parameter{name}",
    }


@operation("ssm:GetParameters")
def get_parameters(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    names = p["Names"]
    return {
        "Parameters": [_parameter(ctx, n) for n in names if n in ctx.cloud.parameters],
        "InvalidParameters": [n for n in names if n not in ctx.cloud.parameters],
    }


@operation("pricing:GetProducts")
def get_products(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    if p.get("ServiceCode") != "AmazonEC2":
        raise AwsError("NotFoundException", "Service not found")
    wanted = {f["Field"]: f["Value"] for f in p.get("Filters", []) if f["Type"] == "TERM_MATCH"}
    usual = {
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
        "licenseModel": "No License required",
        "locationType": "AWS Region",
        "marketoption": "OnDemand",
    }
    lines = []
    for region in catalog.REGIONS:
        for kind in [t for t in TYPES.values() if region in t.regions]:
            attributes = {**usual, "instanceType": kind.name, "regionCode": region, "vcpu": str(kind.vcpus)}
            if all(attributes.get(k) == v for k, v in wanted.items()):
                sku = f"SKU{region}{kind.name}".upper().replace("-", "").replace(".", "")
                usd = f"{catalog.on_demand_usd(kind.name, region):.10f}"
                lines.append(
                    json.dumps(
                        {
                            "product": {"productFamily": "Compute Instance", "attributes": attributes, "sku": sku},
                            "serviceCode": "AmazonEC2",
                            "terms": {
                                "OnDemand": {
                                    f"{sku}.JRTCKXETXF": {
                                        "sku": sku,
                                        "priceDimensions": {
                                            f"{sku}.JRTCKXETXF.6YS6EN2CT7": {
                                                "unit": "Hrs",
                                                "pricePerUnit": {"USD": usd},
                                                "beginRange": "0",
                                                "endRange": "Inf",
                                            }
                                        },
                                    }
                                }
                            },
                        }
                    )
                )
    some, token = page(lines, p, 100)
    return {"FormatVersion": "aws_v1", "PriceList": some, **({"NextToken": token} if token else {})}


@operation("servicequotas:ListServiceQuotas")
def list_service_quotas(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    if p["ServiceCode"] != "ec2":
        raise AwsError("NoSuchResourceException", "no such service")
    quotas = [_quota(ctx, *which) for which in catalog.QUOTAS if which not in ctx.cloud.market.unapplied]
    some, token = page(quotas, p, 100)
    return {"Quotas": some, **({"NextToken": token} if token else {})}


@operation("servicequotas:ListAWSDefaultServiceQuotas")
def list_aws_default_service_quotas(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    """All of them, with what a new account has: nothing of GPUs."""
    usual = {True: 5.0, False: 0.0}
    quotas = [{**_quota(ctx, *which), "Value": usual[which[0] == "Standard"]} for which in catalog.QUOTAS]
    some, token = page(quotas, p, 100)
    return {"Quotas": some, **({"NextToken": token} if token else {})}


@operation("servicequotas:GetServiceQuota")
def get_service_quota(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    for (family, market), (code, _) in catalog.QUOTAS.items():
        if code == p["QuotaCode"] and p["ServiceCode"] == "ec2":
            return {"Quota": _quota(ctx, family, market)}
    raise AwsError("NoSuchResourceException", "no such quota")


def _quota(ctx: Context, family: str, market: str) -> dict[str, Any]:
    code, name = catalog.QUOTAS[family, market]
    return {
        "ServiceCode": "ec2",
        "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
        "QuotaCode": code,
        "QuotaName": name,
        "Value": float(ctx.cloud.market.quota(ctx.region.name, family, market)),
        "Unit": "None",
        "Adjustable": True,
        "GlobalQuota": False,
        "UsageMetric": {
            "MetricNamespace": "AWS/Usage",
            "MetricName": "ResourceCount",
            "MetricDimensions": {
                "Class": f"{family}/{'Spot' if market == 'spot' else 'OnDemand'}",
                "Resource": "vCPU",
                "Service": "EC2",
                "Type": "Resource",
            },
            "MetricStatisticRecommendation": "Maximum",
        },
    }


@operation("sts:GetCallerIdentity")
def get_caller_identity(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    return {"Account": catalog.ACCOUNT, "Arn": ctx.arn, "UserId": "AIDA" + ctx.principal.upper().replace("/", "")[:16]}
