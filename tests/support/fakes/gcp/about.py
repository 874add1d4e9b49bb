"""Requests on what Google has: zones, regions with quotas, machine types, accelerators, images, advice, prices."""

from __future__ import annotations

from typing import Any

from tests.support.fakes.gcp import catalog, quotas
from tests.support.fakes.gcp.errors import invalid, not_found
from tests.support.fakes.gcp.requests import Request, aggregated, handles, listing
from tests.support.fakes.gcp.state import last, link

SCARCE = 4  # free places under which capacity is not certain


def _named(request: Request, kind: str, path: str, **more: Any) -> dict[str, Any]:
    return {"kind": f"compute#{kind}", "id": str(1000 + sum(map(ord, path))), "name": last(path),
            "selfLink": link(path), **more}


# ---- places


def _zone(request: Request, zone: str) -> dict[str, Any]:
    region = link(f"projects/{request.project}/regions/{catalog.ZONES[zone]}")
    return _named(request, "zone", f"projects/{request.project}/zones/{zone}", status="UP", description=zone,
                  region=region, availableCpuPlatforms=["Intel Broadwell", "Intel Cascade Lake", "Intel Ice Lake"])


@handles("compute.zones.get")
def zone_get(request: Request) -> dict[str, Any]:
    return _zone(request, request.zone)


@handles("compute.zones.list")
def zones(request: Request) -> dict[str, Any]:
    return listing(request, "compute#zoneList", [_zone(request, z) for z in catalog.ZONES])


def _region(request: Request, region: str) -> dict[str, Any]:
    used = request.cloud.quota_usage(region)
    return _named(request, "region", f"projects/{request.project}/regions/{region}", status="UP", description=region,
                  zones=[link(f"projects/{request.project}/zones/{z}") for z in catalog.REGIONS[region]],
                  quotas=[{"metric": m, "limit": request.cloud.limit(region, m), "usage": used.get(m, 0.0)}
                          for m in quotas.listed()])


@handles("compute.regions.get")
def region_get(request: Request) -> dict[str, Any]:
    return _region(request, request.named["region"])


@handles("compute.regions.list")
def regions(request: Request) -> dict[str, Any]:
    return listing(request, "compute#regionList", [_region(request, r) for r in catalog.REGIONS])


@handles("compute.projects.get")
def project(request: Request) -> dict[str, Any]:
    cloud, used = request.cloud, request.cloud.quota_usage("")
    items = [{"key": k, "value": v} for k, v in cloud.common_metadata.items()]
    metadata = {"kind": "compute#metadata", "fingerprint": "AAAA", **({"items": items} if items else {})}
    return _named(request, "project", f"projects/{request.project}", id=catalog.NUMBER,
                  commonInstanceMetadata=metadata, defaultServiceAccount=cloud.default_account,
                  defaultNetworkTier="PREMIUM", xpnProjectStatus="UNSPECIFIED_XPN_PROJECT_STATUS",
                  quotas=[{"metric": m, "limit": cloud.limit("", m), "usage": used.get(m, 0.0)}
                          for m in (*quotas.PROJECT_WIDE, "FIREWALLS", "NETWORKS", "IMAGES")])


# ---- types


def _machine_type(request: Request, zone: str, kind: catalog.Type) -> dict[str, Any]:
    found = _named(request, "machineType", f"projects/{request.project}/zones/{zone}/machineTypes/{kind.name}",
                   zone=zone, guestCpus=kind.cpus, memoryMb=kind.memory_mb, isSharedCpu=kind.shared,
                   architecture="X86_64", maximumPersistentDisks=128, maximumPersistentDisksSizeGb="263168",
                   description=f"{kind.cpus} vCPUs, {kind.memory_mb // 1024} GB RAM",
                   creationTimestamp="1969-12-31T16:00:00.000-08:00")
    if kind.accelerator:
        found["accelerators"] = [{"guestAcceleratorType": kind.accelerator, "guestAcceleratorCount": kind.gpus}]
    if kind.bundled_ssds:
        found["bundledLocalSsds"] = {"partitionCount": kind.bundled_ssds, "defaultInterface": "NVME"}
    return found


def _types_of(request: Request, zone: str) -> list[dict[str, Any]]:
    return [_machine_type(request, zone, t) for t in catalog.TYPES.values() if catalog.in_zone(t, zone)]


@handles("compute.machineTypes.get")
def type_get(request: Request) -> dict[str, Any]:
    kind = catalog.TYPES.get(request.named["machineType"])
    if kind is None or not catalog.in_zone(kind, request.zone):
        raise not_found(f"projects/{request.project}/zones/{request.zone}/machineTypes/{request.named['machineType']}")
    return _machine_type(request, request.zone, kind)


@handles("compute.machineTypes.list")
def types(request: Request) -> dict[str, Any]:
    return listing(request, "compute#machineTypeList", _types_of(request, request.zone))


def _all_zones() -> list[str]:
    return [f"zones/{z}" for z in catalog.ZONES]


@handles("compute.machineTypes.aggregatedList")
def all_types(request: Request) -> dict[str, Any]:
    return aggregated(request, "compute#machineTypeAggregatedList", "machineTypes",
                      [(f"zones/{z}", t) for z in catalog.ZONES for t in _types_of(request, z)], _all_zones())


def _cards_of(request: Request, zone: str) -> list[dict[str, Any]]:
    return [_named(request, "acceleratorType", f"projects/{request.project}/zones/{zone}/acceleratorTypes/{a.name}",
                   zone=link(f"projects/{request.project}/zones/{zone}"), description=a.text,
                   maximumCardsPerInstance=max(a.counts or (8,)))
            for a in catalog.ACCELERATORS.values() if zone in a.zones]


@handles("compute.acceleratorTypes.list")
def cards(request: Request) -> dict[str, Any]:
    return listing(request, "compute#acceleratorTypeList", _cards_of(request, request.zone))


@handles("compute.acceleratorTypes.get")
def card_get(request: Request) -> dict[str, Any]:
    name = request.named["acceleratorType"]
    for found in _cards_of(request, request.zone):
        if found["name"] == name:
            return found
    raise not_found(f"projects/{request.project}/zones/{request.zone}/acceleratorTypes/{name}")


@handles("compute.acceleratorTypes.aggregatedList")
def all_cards(request: Request) -> dict[str, Any]:
    return aggregated(request, "compute#acceleratorTypeAggregatedList", "acceleratorTypes",
                      [(f"zones/{z}", c) for z in catalog.ZONES for c in _cards_of(request, z)], _all_zones())


# ---- images


def _image(request: Request, path: str) -> dict[str, Any]:
    found = request.cloud.image(path)
    if found is None:
        raise not_found(path)
    where = f"projects/{found.project}/global/images/{found.name}"
    return _named(request, "image", where, family=found.family, status="READY", diskSizeGb=str(found.size_gb),
                  architecture=found.architecture, sourceType="RAW", creationTimestamp=found.made,
                  archiveSizeBytes=str(found.size_gb << 28), labelFingerprint="42WmSpB8rSM=", labels=dict(found.labels),
                  guestOsFeatures=[{"type": "UEFI_COMPATIBLE"}, {"type": "GVNIC"}])


@handles("compute.images.getFromFamily")
def from_family(request: Request) -> dict[str, Any]:
    return _image(request, f"projects/{request.project}/global/images/family/{request.named['family']}")


@handles("compute.images.get")
def image_get(request: Request) -> dict[str, Any]:
    return _image(request, f"projects/{request.project}/global/images/{request.named['image']}")


@handles("compute.images.list")
def images(request: Request) -> dict[str, Any]:
    return listing(request, "compute#imageList",
                   [_image(request, f"projects/{i.project}/global/images/{i.name}") for i in request.cloud.images
                    if i.project == request.project])


@handles("compute.images.delete")
def image_delete(request: Request) -> dict[str, Any]:
    path = f"projects/{request.project}/global/images/{request.named['image']}"
    found = request.cloud.image(path)
    if found is None:
        raise not_found(path)
    request.cloud.images.remove(found)
    return request.cloud.done("global", "delete", path, request.principal)


# ---- advice


@handles("compute.advice.capacity")
def capacity(request: Request) -> dict[str, Any]:
    """Obtainability by the room that there is: 0.9, 0.4 where it is scarce, 0.1 where there is too little."""
    given, region = request.body, request.named["region"]
    size = given.get("size", 1)
    kinds = [k for s in given.get("instanceFlexibilityPolicy", {}).get("instanceSelections", {}).values()
             for k in s.get("machineTypes", ())]
    if not kinds or not 1 <= size <= 1000:
        raise invalid("resource.instanceFlexibilityPolicy", kinds, "Machine types and a size of 1 to 1000 are needed.")
    model = given.get("instanceProperties", {}).get("scheduling", {}).get("provisioningModel", "")
    if model != "SPOT":
        raise invalid("resource.instanceProperties.scheduling.provisioningModel", model, "Must be SPOT.")
    wanted = [last(z.get("zone", "")) for z in given.get("distributionPolicy", {}).get("zones", ())]
    zones = [z for z in catalog.REGIONS[region] if not wanted or z in wanted]
    found = [(_room(request, z, k), z, k) for z in zones for k in kinds
             if k in catalog.TYPES and catalog.in_zone(catalog.TYPES[k], z)]
    if not found:
        raise invalid("resource.instanceFlexibilityPolicy", kinds, f"No such machine type in region '{region}'.")
    room, zone, kind = max(found)
    score = 0.9 if room >= size + SCARCE else 0.4 if room >= size else 0.1
    shard = {"zone": link(f"projects/{request.project}/zones/{zone}"), "machineType": kind, "instanceCount": size,
             "provisioningModel": "SPOT"}
    return {"recommendations": [{"scores": {"obtainability": score, "estimatedUptime": "3600s"}, "shards": [shard]}]}


def _room(request: Request, zone: str, kind: str) -> int:
    room = request.cloud.market.room((zone, kind, "spot"))
    return 10**6 if room is None else room


@handles("compute.advice.capacityHistory")
def history(request: Request) -> dict[str, Any]:
    """Spot prices of a machine type since they are known, and its preemption rate by the day."""
    cloud, given, region = request.cloud, request.body, request.named["region"]
    kind = given.get("instanceProperties", {}).get("machineType", "")
    place = last(given.get("locationPolicy", {}).get("location", "") or region)
    zones = [place] if place in catalog.ZONES else list(catalog.REGIONS[region])
    known = catalog.TYPES.get(kind)
    sold = [z for z in zones if known and catalog.in_zone(known, z)]
    if not sold:
        raise invalid("resource.instanceProperties.machineType", kind, f"It does not exist in '{place}'.")
    line = cloud.market.history(sold[0], kind)
    ends = [at for at, _ in line[1:]] + [request.now]
    prices = [{"interval": {"startTime": _utc(at), "endTime": _utc(until)}, "listPrice": _money(usd)}
              for (at, usd), until in zip(line, ends, strict=True)]
    answer: dict[str, Any] = {"machineType": kind, "location": link(
        f"projects/{request.project}/{'zones' if place in catalog.ZONES else 'regions'}/{place}")}
    wanted = given.get("types", [])
    if "PRICE" in wanted:
        answer["priceHistory"] = prices
    if "PREEMPTION" in wanted:
        day = {"startTime": _utc(request.now - 86400), "endTime": _utc(request.now)}
        answer["preemptionHistory"] = [{"interval": day, "preemptionRate": cloud.preemption_rate}]
    return answer


def _utc(at: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _money(usd: float) -> dict[str, Any]:
    units = int(usd)
    return {"currencyCode": "USD", "units": str(units), "nanos": round((usd - units) * 10**9)}


# ---- the price list


def skus() -> list[dict[str, Any]]:
    """Cores, memory and GPUs are sold apart, by region."""
    found = []
    for region in catalog.REGIONS:
        more = 1.1 if region.startswith("europe") else 1.0
        for spot in (False, True):
            before = "Spot Preemptible " if spot else ""
            for family, parts in catalog.PARTS.items():
                core, gib = parts[spot]
                for part, usd in (("Core", core), ("Ram", gib)):
                    text = f"{before}{family.upper()} {'Predefined ' if family == 'n1' else ''}Instance {part}"
                    found.append(_sku(f"{text} running in {region}", "CPU" if part == "Core" else "RAM", region,
                                      usd * more, spot))
            for card in catalog.ACCELERATORS.values():
                attached = " attached to Spot Preemptible VMs" if spot else ""
                found.append(_sku(f"{card.sku} GPU{attached} running in {region}", "GPU", region,
                                  (card.spot_usd if spot else card.usd) * more, spot))
    return found


def _sku(text: str, group: str, region: str, usd: float, spot: bool) -> dict[str, Any]:
    id = f"{abs(hash(text)) % 16**12:012X}"
    return {"name": f"services/6F81-5844-456A/skus/{id}", "skuId": id, "description": text,
            "category": {"serviceDisplayName": "Compute Engine", "resourceFamily": "Compute", "resourceGroup": group,
                         "usageType": "Preemptible" if spot else "OnDemand"},
            "serviceRegions": [region], "serviceProviderName": "Google",
            "pricingInfo": [{"summary": "", "currencyConversionRate": 1.0, "effectiveTime": "2026-01-01T00:00:00Z",
                             "pricingExpression": {"usageUnit": "h", "tieredRates": [
                                 {"startUsageAmount": 0.0, "unitPrice": _money(usd)}]}}]}


@handles("cloudbilling.services.skus.list")
def sku_list(request: Request) -> dict[str, Any]:
    if request.named["parent"] != "services/6F81-5844-456A":
        return {"skus": []}
    size, begin = int(request.query.get("pageSize", 5000) or 5000), int(request.query.get("pageToken") or 0)
    found = skus()
    end = begin + size
    return {"skus": found[begin:end], "nextPageToken": str(end) if end < len(found) else ""}


