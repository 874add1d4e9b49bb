"""What Compute Engine refuses in a new instance beyond the schema of the request, and what it fills in."""

from __future__ import annotations

import re
from typing import Any

from tests.support.fakes.gcp import catalog
from tests.support.fakes.gcp.catalog import Image, Type
from tests.support.fakes.gcp.errors import GcpError, invalid, not_found
from tests.support.fakes.gcp.requests import Request
from tests.support.fakes.gcp.state import fingerprint, last, link, relative

NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035
LABEL_KEY = re.compile(r"[^\W\dA-Z_][\w-]{0,62}")
LABEL_VALUE = re.compile(r"[\w-]{0,63}")
VALUE_BYTES, METADATA_BYTES = 262_144, 524_288
LABELS, TAGS = 64, 64
NOTICE_S = ("0", "120")
MAX_RUN_S = (30, 120 * 86_400)
HYPERDISK = ("a3", "a4")  # families that can boot from Hyperdisk Balanced


def labels(found: dict[str, str], path: str = "resource.labels") -> dict[str, str]:
    if len(found) > LABELS:
        raise invalid(path, len(found), f"At most {LABELS} labels are allowed.")
    for key, value in found.items():
        if key != key.lower() or not LABEL_KEY.fullmatch(key):
            raise invalid(path, key, "Label keys must start with a lowercase letter and contain only lowercase "
                          "letters, digits, dashes and underscores, 63 characters at most.")
        if value != value.lower() or not LABEL_VALUE.fullmatch(value):
            raise invalid(path, value, "Label values may contain only lowercase letters, digits, dashes and "
                          "underscores, 63 characters at most.")
    return found


def metadata(found: dict[str, Any], path: str = "resource.metadata") -> dict[str, Any]:
    keys = [item["key"] for item in found.get("items", ())]
    for item in found.get("items", ()):
        if len(item.get("value", "").encode()) > VALUE_BYTES:
            raise invalid(f"{path}.items", item["key"], f"Metadata value is too large: at most {VALUE_BYTES} bytes.")
    if len(keys) != len(set(keys)):
        raise invalid(path, max(keys, key=keys.count), "Duplicate metadata keys are not allowed.")
    total = sum(len(i["key"].encode()) + len(i.get("value", "").encode()) for i in found.get("items", ()))
    if total > METADATA_BYTES:
        raise invalid(path, total, f"The total size of all metadata is limited to {METADATA_BYTES} bytes.")
    items = [{"key": i["key"], "value": i.get("value", "")} for i in found.get("items", ())]
    return {"kind": "compute#metadata", "fingerprint": fingerprint(items), **({"items": items} if items else {})}


def filled(request: Request, zone: str, given: dict[str, Any], path: str = "resource") -> dict[str, Any]:
    """The instance as the cloud keeps it. Its interfaces have no addresses, its disks no sources yet.

    GcpError for whatever Compute Engine refuses at once.
    """
    project = request.project
    if not NAME.fullmatch(given["name"]):
        raise invalid(f"{path}.name", given["name"], f"Must be a match of regex '{NAME.pattern}'")
    kind = _type(zone, given.get("machineType", ""), path)
    accelerators = _accelerators(project, zone, kind, given, path)
    scheduling = _scheduling(given.get("scheduling", {}), bool(accelerators), f"{path}.scheduling")
    tags = given.get("tags", {}).get("items", [])
    if len(tags) > TAGS or any(not NAME.fullmatch(t) for t in tags):
        raise invalid(f"{path}.tags", tags, f"At most {TAGS} tags, each a match of regex '{NAME.pattern}'")
    body = {
        "kind": "compute#instance", "name": given["name"],
        "zone": link(f"projects/{project}/zones/{zone}"),
        "machineType": link(f"projects/{project}/zones/{zone}/machineTypes/{kind.name}"),
        "cpuPlatform": "Intel Cascade Lake", "scheduling": scheduling,
        "metadata": metadata(given.get("metadata", {}), f"{path}.metadata"),
        "tags": {"fingerprint": fingerprint(tags), **({"items": tags} if tags else {})},
        "networkInterfaces": _interfaces(request, zone, given.get("networkInterfaces", []), path),
        "disks": _disks(request, zone, kind, given, path),
        "deletionProtection": given.get("deletionProtection", False),
        "canIpForward": given.get("canIpForward", False), "startRestricted": False,
        "selfLink": link(f"projects/{project}/zones/{zone}/instances/{given['name']}")}
    labelled = labels(given.get("labels", {}), f"{path}.labels")
    body["labelFingerprint"] = fingerprint(labelled)
    for key in ("description", "shieldedInstanceConfig", "reservationAffinity", "advancedMachineFeatures",
                "minCpuPlatform", "networkPerformanceConfig", "keyRevocationActionType", "resourcePolicies"):
        if key in given:
            body[key] = given[key]
    more = {"labels": labelled, "guestAccelerators": accelerators,
            "serviceAccounts": _accounts(request, given.get("serviceAccounts", []), path)}
    return body | {k: v for k, v in more.items() if v}


def _type(zone: str, text: str, path: str) -> Type:
    field = f"{path}.machineType"
    found = re.fullmatch(r"(?:.*/)?zones/([^/]+)/machineTypes/([^/]+)", text)
    if not found:
        raise invalid(field, text, "The URL is malformed. Must be a valid machine type URL.")
    if found[1] != zone:
        raise invalid(field, text, f"Machine type must be in zone '{zone}' of the instance.")
    kind = catalog.TYPES.get(found[2])
    if kind is None or not catalog.in_zone(kind, zone):
        raise invalid(field, text, f"Machine type with name '{found[2]}' does not exist in zone '{zone}'.")
    return kind


def _accelerators(project: str, zone: str, kind: Type, given: dict[str, Any], path: str) -> list[dict[str, Any]]:
    wanted = given.get("guestAccelerators", [])
    field = f"{path}.guestAccelerators"
    if len(wanted) > 1:
        raise invalid(field, len(wanted), "Only one type of accelerator per instance is allowed.")
    found = []
    for item in wanted:
        text = item.get("acceleratorType", "")
        place = re.fullmatch(r"(?:.*/)?zones/([^/]+)/acceleratorTypes/([^/]+)", text)
        if not place or place[1] != zone:
            raise invalid(f"{field}[0].acceleratorType", text, "The URL is malformed, or of another zone.")
        name, count = place[2], item.get("acceleratorCount", 0)
        known = catalog.ACCELERATORS.get(name)
        if known is None or zone not in known.zones:
            raise not_found(f"projects/{project}/zones/{zone}/acceleratorTypes/{name}")
        if kind.optimized:
            if (name, count) != (kind.accelerator, kind.gpus):
                raise invalid(field, text, f"Machine type {kind.name} has {kind.gpus} of {kind.accelerator}; others "
                              "cannot be attached.")
        elif not kind.attaches_gpus or not known.counts:
            raise invalid(field, name, f"[{kind.name}, {name}] features are not compatible for creating instance.")
        elif count not in known.counts:
            raise invalid(f"{field}[0].acceleratorCount", count, "The number of GPU cards attached to an instance must "
                          f"be one of {list(known.counts)} for {name}.")
        elif kind.cpus > catalog.N1_MOST_CPUS[name][count]:
            raise invalid(field, count, f"With {count} of {name} at most {catalog.N1_MOST_CPUS[name][count]} vCPUs are "
                          "allowed.")
        found.append((name, count))
    if kind.optimized:
        found = [(kind.accelerator, kind.gpus)]
    return [{"acceleratorType": link(f"projects/{project}/zones/{zone}/acceleratorTypes/{name}"),
             "acceleratorCount": count} for name, count in found]


def _scheduling(given: dict[str, Any], has_gpus: bool, path: str) -> dict[str, Any]:
    model = given.get("provisioningModel", "SPOT" if given.get("preemptible") and "provisioningModel" not in given
                      and "instanceTerminationAction" in given else "STANDARD")
    spot = model == "SPOT"
    preemptible = spot or given.get("preemptible", False)
    if spot and given.get("preemptible") is False:
        raise invalid(f"{path}.preemptible", "false", "Scheduling must have preemptible be true when provisioningModel "
                      "is SPOT.")
    maintenance = given.get("onHostMaintenance", "TERMINATE" if preemptible else "MIGRATE")
    restart = given.get("automaticRestart", not preemptible)
    if preemptible and maintenance != "TERMINATE":
        raise invalid(f"{path}.preemptible", "true", "Scheduling must have preemptible be false when OnHostMaintenance "
                      "isn't TERMINATE.")
    if preemptible and restart:
        raise invalid(f"{path}.preemptible", "true", "Scheduling must have preemptible be false when AutomaticRestart "
                      "is true.")
    if has_gpus and maintenance != "TERMINATE":
        raise invalid(f"{path}.onHostMaintenance", maintenance, "Instances with guest accelerators do not support live "
                      "migration.")
    limited = "maxRunDuration" in given or "terminationTime" in given
    if "instanceTerminationAction" in given and not spot and not limited:
        raise invalid(f"{path}.instanceTerminationAction", given["instanceTerminationAction"], "You can only specify "
                      "the termination action for Spot VMs and VMs with a limited run time.")
    if model == "FLEX_START" and not limited:
        raise invalid(f"{path}.maxRunDuration", "", "FLEX_START needs a limited run time.")
    if "maxRunDuration" in given:
        seconds = int(given["maxRunDuration"].get("seconds", 0))
        if not MAX_RUN_S[0] <= seconds <= MAX_RUN_S[1]:
            raise invalid(f"{path}.maxRunDuration", seconds, "Must be between 30 seconds and 120 days.")
    if "preemptionNoticeDuration" in given:
        notice = given["preemptionNoticeDuration"].get("seconds", "0")
        if not spot:
            raise invalid(f"{path}.preemptionNoticeDuration", notice, "It can only be specified for Spot VMs.")
        if notice not in NOTICE_S or given["preemptionNoticeDuration"].get("nanos"):
            raise invalid(f"{path}.preemptionNoticeDuration", notice, "Must be 0 or 120 seconds.")
    kept = {k: v for k, v in given.items() if k not in ("onHostMaintenance", "automaticRestart", "preemptible")}
    found = {**kept, "onHostMaintenance": maintenance, "automaticRestart": restart, "preemptible": preemptible,
             "provisioningModel": model}
    return found | ({"instanceTerminationAction": given.get("instanceTerminationAction", "STOP")} if spot else {})


def _interfaces(request: Request, zone: str, given: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    if not given:
        raise invalid(f"{path}.networkInterfaces", "", "At least one network interface is required.")
    return [_interface(request, zone, at, nic, f"{path}.networkInterfaces[{at}]") for at, nic in enumerate(given)]


def _interface(request: Request, zone: str, at: int, given: dict[str, Any], path: str) -> dict[str, Any]:
    cloud, region = request.cloud, catalog.ZONES[zone]
    if given.get("subnetwork"):
        where = cloud.path_of(given["subnetwork"], request.project)
        subnet = cloud.things.get(where)
        if subnet is None or f"/regions/{region}/" not in where:
            raise not_found(where) if subnet is None else invalid(
                f"{path}.subnetwork", where, f"The referenced subnetwork resource is not in region '{region}'.")
        if given.get("network") and cloud.path_of(given["network"], request.project) != relative(subnet["network"]):
            raise invalid(f"{path}.subnetwork", where, "Subnetwork is not of the network that is given.")
    else:
        where = cloud.path_of(given.get("network") or "global/networks/default", request.project)
        network = cloud.things.get(where)
        if network is None:
            raise not_found(where)
        subnet = next((s for s in cloud.collection("subnetworks") if relative(s["network"]) == where
                       and last(s["region"]) == region), None)
        if subnet is None or not network.get("autoCreateSubnetworks"):
            raise invalid(path, where, "Subnetwork should be specified for custom subnetmode network")
    request.need("compute.subnetworks.use", relative(subnet["selfLink"]))
    configs = given.get("accessConfigs", [])
    if len(configs) > 1:
        raise invalid(f"{path}.accessConfigs", len(configs), "At most one access config is allowed.")
    if configs:
        request.need("compute.subnetworks.useExternalIp", relative(subnet["selfLink"]))
        if cloud.no_external_ips:
            raise GcpError("conditionNotMet", "Constraint constraints/compute.vmExternalIpAccess violated for project "
                           f"{request.project}. Add instance to the constraint to use external IP with it.")
    return {"kind": "compute#networkInterface", "name": f"nic{at}", "network": subnet["network"],
            "subnetwork": subnet["selfLink"], "stackType": given.get("stackType", "IPV4_ONLY"),
            "fingerprint": fingerprint((at, where)), **({"nicType": given["nicType"]} if "nicType" in given else {}),
            **({"networkIP": given["networkIP"]} if "networkIP" in given else {}),
            **({"accessConfigs": [{
                "kind": "compute#accessConfig", "type": "ONE_TO_ONE_NAT", "name": c.get("name", "external-nat"),
                "networkTier": c.get("networkTier", "PREMIUM"), **({"natIP": c["natIP"]} if c.get("natIP") else {})}
                for c in configs]} if configs else {})}


def _disks(request: Request, zone: str, kind: Type, given: dict[str, Any], path: str) -> list[dict[str, Any]]:
    wanted = given.get("disks", [])
    if not wanted:
        raise invalid(f"{path}.disks", "", "No disks are specified.")
    if [bool(d.get("boot")) for d in wanted] != [True] + [False] * (len(wanted) - 1):
        raise invalid(f"{path}.disks[0].boot", wanted[0].get("boot", False), "Boot disk must be the first disk "
                      "attached to the instance.")
    found = [_disk(request, zone, kind, given["name"], at, d, f"{path}.disks[{at}]") for at, d in enumerate(wanted)]
    ssds = sum(d["type"] == "SCRATCH" for d in found)
    if not kind.bundled_ssds and ssds not in (kind.ssds or (0,)):
        raise invalid(f"{path}.disks", ssds, f"Number of local SSDs for an instance of type {kind.name} should be one "
                      f"of {list(kind.ssds or (0,))}, while {ssds} is specified.")
    if kind.bundled_ssds and ssds not in (0, kind.bundled_ssds):
        raise invalid(f"{path}.disks", ssds, f"{kind.name} always has {kind.bundled_ssds} local SSDs.")
    for at in range(len(found), len(found) + (kind.bundled_ssds if not ssds else 0)):
        found.append({"kind": "compute#attachedDisk", "type": "SCRATCH", "mode": "READ_WRITE", "interface": "NVME",
                      "deviceName": f"local-ssd-{at - 1}", "index": at, "boot": False, "autoDelete": True,
                      "diskSizeGb": str(catalog.LOCAL_SSD_GB)})
    return found


def _disk(request: Request, zone: str, kind: Type, name: str, at: int, given: dict[str, Any],
          path: str) -> dict[str, Any]:
    cloud, init = request.cloud, given.get("initializeParams", {})
    scratch = given.get("type") == "SCRATCH"
    text = init.get("diskType", f"zones/{zone}/diskTypes/pd-standard")
    place = re.fullmatch(r"(?:.*/)?zones/([^/]+)/diskTypes/([^/]+)", text)
    if not place or place[1] != zone:
        raise invalid(f"{path}.initializeParams.diskType", text, "The URL is malformed. Must be a disk type URL of the "
                      "zone.")
    disk_type = place[2]
    if disk_type not in catalog.DISK_USD_GB_MONTH:
        raise not_found(f"projects/{request.project}/zones/{zone}/diskTypes/{disk_type}")
    shown = {"kind": "compute#attachedDisk", "index": at, "mode": given.get("mode", "READ_WRITE"),
             "boot": bool(given.get("boot")), "autoDelete": given.get("autoDelete", False),
             "deviceName": given.get("deviceName") or ("persistent-disk-" if not scratch else "local-ssd-") + str(at),
             "interface": given.get("interface", "NVME" if scratch else "SCSI"), "type": "SCRATCH" if scratch
             else "PERSISTENT"}
    if scratch != (disk_type == "local-ssd"):
        raise invalid(f"{path}.type", given.get("type", "PERSISTENT"), "Local SSDs must be of type SCRATCH, and "
                      "persistent disks of type PERSISTENT.")
    if scratch:
        if shown["boot"] or init.get("sourceImage"):
            raise invalid(f"{path}.boot", "true", "A local SSD cannot be a boot disk.")
        return shown | {"diskSizeGb": str(catalog.LOCAL_SSD_GB)}
    if "source" in given:
        source = cloud.path_of(given["source"], request.project)
        if source not in cloud.things:
            raise not_found(source)
        if cloud.things[source].get("users"):
            raise GcpError("resourceInUseByAnotherResource", f"The disk resource '{source}' is already being used by "
                           f"'{cloud.things[source]['users'][0]}'")
        return shown | {"source": link(source), "diskSizeGb": cloud.things[source]["sizeGb"]}
    hyper = disk_type.startswith("hyperdisk")
    if (hyper and kind.family not in HYPERDISK) or (not hyper and kind.family in catalog.HYPERDISK_ONLY):
        raise invalid(f"{path}.initializeParams.diskType", text, f"[{disk_type}] features are not compatible for "
                      f"creating instance of type {kind.name}.")
    labels(init.get("labels", {}), f"{path}.initializeParams.labels")
    image = _image(request, init.get("sourceImage", ""), shown["boot"], path)
    size = int(init.get("diskSizeGb") or given.get("diskSizeGb") or (image.size_gb if image else 10))
    if image and size < image.size_gb:
        raise invalid(f"{path}.initializeParams.diskSizeGb", size, "Requested disk size cannot be smaller than the "
                      f"image size ({image.size_gb} GB)")
    disk_name = init.get("diskName") or (name if not at else f"{name}-{at}")
    where = f"projects/{request.project}/zones/{zone}/disks/{disk_name}"
    if where in cloud.things:
        raise GcpError("alreadyExists", f"The resource '{where}' already exists")
    return shown | {"diskSizeGb": str(size), "source": link(where), "_new": {
        "kind": "compute#disk", "name": disk_name, "sizeGb": str(size), "selfLink": link(where), "status": "READY",
        "type": link(f"projects/{request.project}/zones/{zone}/diskTypes/{disk_type}"),
        "zone": link(f"projects/{request.project}/zones/{zone}"),
        "labelFingerprint": fingerprint(init.get("labels", {})),
        **({"labels": init["labels"]} if init.get("labels") else {}),
        **({"sourceImage": link(f"projects/{image.project}/global/images/{image.name}")} if image else {})}}


def _image(request: Request, text: str, boot: bool, path: str) -> Image | None:
    if not text:
        if boot:
            raise invalid(f"{path}.initializeParams.sourceImage", "", "A boot disk needs an image or a source.")
        return None
    where = request.cloud.path_of(text, request.project)
    found = request.cloud.image(where)
    if found is None:
        raise not_found(where)
    return found


def _accounts(request: Request, given: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    if len(given) > 1:
        raise invalid(f"{path}.serviceAccounts", len(given), "At most one service account is allowed.")
    found = []
    for account in given:
        if not account.get("scopes"):
            raise invalid(f"{path}.serviceAccounts[0].scopes", "", "At least one scope is required.")
        email = account.get("email", "default")
        email = request.cloud.default_account if email == "default" else email
        found.append({"email": email, "scopes": account["scopes"]})
    return found
