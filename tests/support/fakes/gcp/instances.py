"""Requests on instances."""

from __future__ import annotations

import copy
import uuid
from typing import Any

from tests.support.fakes.gcp import catalog, rules
from tests.support.fakes.gcp.errors import GcpError, LateError, invalid, not_found
from tests.support.fakes.gcp.requests import Request, aggregated, handles, listing
from tests.support.fakes.gcp.state import Instance, Operation, fingerprint, link

SERIAL_CHUNK = 1 << 20
MIN_COUNT = "VM_MIN_COUNT_NOT_REACHED"
BULK_MOST = 1000


def find(request: Request, permission: str = "compute.instances.get") -> Instance:
    path = f"projects/{request.project}/zones/{request.zone}/instances/{request.named['instance']}"
    request.need(permission, path)
    found = request.cloud.instances_by_path.get(path)
    if found is None:
        raise not_found(path)
    return found


def shown(request: Request, instance: Instance, at: float | None = None) -> dict[str, Any]:
    """Its wire form, with the state of `at`."""
    cloud = request.cloud
    body = copy.deepcopy(instance.body)
    body["status"] = instance.status(request.now if at is None else at, cloud.pending_s)
    body["fingerprint"] = fingerprint(body)
    return body


# ---- birth


def _rights(request: Request, given: dict[str, Any], path: str) -> None:
    request.need("compute.instances.create", path)
    if any("source" not in d for d in given.get("disks", ())):
        request.need("compute.disks.create", path)
    for key, permission in (("metadata", "setMetadata"), ("labels", "setLabels"), ("tags", "setTags"),
                            ("serviceAccounts", "setServiceAccount")):
        if given.get(key):
            request.need(f"compute.instances.{permission}", path)


@handles("compute.instances.insert")
def insert(request: Request) -> dict[str, Any]:
    cloud, given = request.cloud, request.body
    path = f"projects/{request.project}/zones/{request.zone}/instances/{given['name']}"
    _rights(request, given, path)
    if path in cloud.instances_by_path:
        raise GcpError("alreadyExists", f"The resource '{path}' already exists")
    return _born(request, request.zone, given).shown(cloud.project, accepted=True)


def _born(request: Request, zone: str, given: dict[str, Any], group: str = "") -> Operation:
    cloud = request.cloud
    instance = Instance(zone, rules.filled(request, zone, given), request.now)
    instance.user = request.principal
    _at_once(request, instance)
    operation = cloud.operate(f"zones/{zone}", "insert", instance, request.principal, group)
    cloud.life.insert(instance, operation)
    return operation


def _at_once(request: Request, instance: Instance) -> None:
    """Refuse for a quota before the operation, where a test wants that."""
    if request.cloud.quota_at_once and (error := request.cloud.life.why_not(instance)) and error.status == 403:
        raise GcpError("quotaExceeded", error.message)


@handles("compute.regionInstances.bulkInsert", "compute.instances.bulkInsert")
def bulk_insert(request: Request) -> dict[str, Any]:
    """`count` instances in the zones of the policy: between `minCount` and `count`, or none."""
    cloud, given = request.cloud, request.body
    count, least = int(given.get("count", 0)), int(given.get("minCount", given.get("count", 0)))
    names = list(given.get("perInstanceProperties", {}))
    if not 1 <= count <= BULK_MOST or not 1 <= least <= count:
        raise invalid("resource.count", count, f"Must be between 1 and {BULK_MOST}, and minCount at most count.")
    if names and len(names) != count:
        raise invalid("resource.perInstanceProperties", len(names), "There must be as many entries as instances.")
    if not names and not given.get("namePattern"):
        raise invalid("resource.namePattern", "", "Either namePattern or perInstanceProperties is required.")
    names = names or _by_pattern(given["namePattern"], count)
    properties = given.get("instanceProperties")
    if not properties:
        raise invalid("resource.instanceProperties", "", "The field is required.")
    path = f"projects/{request.project}/{request.scope}/instances/{names[0]}"
    _rights(request, properties, path)
    zones = _zones(request, given.get("locationPolicy", {}))
    for zone in zones:
        for name in names:
            taken = f"projects/{request.project}/zones/{zone}/instances/{name}"
            if taken in cloud.instances_by_path:
                raise GcpError("alreadyExists", f"The resource '{taken}' already exists")
    group = str(uuid.uuid4())
    own = given.get("perInstanceProperties", {})
    wanted = [_one(properties, names[at], own.get(names[at], {})) for at in range(count)]
    for choice in _choices(given):  # so that a wrong request is refused now, in whatever zone
        checked = [z for z in zones if catalog.in_zone(catalog.TYPES[choice], z)] if choice in catalog.TYPES else zones
        for one in wanted:
            rules.filled(request, (checked or zones)[0], _in_zone(one, (checked or zones)[0], choice))
    shape = given.get("locationPolicy", {}).get("targetShape", "ANY_SINGLE_ZONE")
    operation = Operation(request.scope, "bulkInsert", f"projects/{request.project}/{request.scope}",
                          request.principal, request.now, group=group)
    cloud.operations.append(operation)
    _create(request, operation, wanted, least, zones, _choices(given), shape)
    return operation.shown(cloud.project, accepted=True)


def _create(request: Request, operation: Operation, wanted: list[dict[str, Any]], least: int, zones: list[str],
            choices: list[str], shape: str) -> None:
    cloud = request.cloud
    zone_of, choice = _placed(request, wanted, zones, choices, shape)
    made = {zone: zone_of.count(zone) for zone in zones if zone in zone_of}
    enough = len(zone_of) >= least
    target = zones[0]
    status = {f"zones/{z}": {"status": "DONE", "targetVmCount": n, "createdVmCount": n} for z, n in made.items()}
    if len(zone_of) < len(wanted):
        missed = status.setdefault(f"zones/{target}", {"status": "DONE", "targetVmCount": 0, "createdVmCount": 0})
        missed["targetVmCount"] += len(wanted) - len(zone_of)
        missed["failedToCreateVmCount"] = len(wanted) - len(zone_of)
    operation.bulk = status if enough else {
        zone: {**counts, "createdVmCount": 0, "deletedVmCount": counts["createdVmCount"]}
        for zone, counts in status.items()}
    pieces = []
    for at, given in enumerate(wanted):
        if enough and at < len(zone_of):
            pieces.append(_born(request, zone_of[at], _in_zone(given, zone_of[at], choice), operation.group))
    failed = None if len(zone_of) == len(wanted) else _failed(request, wanted[-1], target, choices[0], len(wanted))
    if failed is not None and not enough:  # the cause is in the operations of the instances alone
        failed = LateError(MIN_COUNT, f"Requested minimum count of {least} VMs could not be created.", 503)
    for given in wanted[len(zone_of):] if enough else wanted:
        path = f"projects/{request.project}/zones/{target}/instances/{given['name']}"
        piece = Operation(f"zones/{target}", "insert", path, request.principal, request.now, group=operation.group)
        cloud.operations.append(piece)
        cause = _failed(request, given, target, choices[0], len(wanted))
        cloud.later(request.now + cloud.pending_s, lambda piece=piece, cause=cause: piece.finish(cloud.now(), cause))
    ends = request.now + max(cloud.pending_s, cloud.operation_s)
    cloud.later(ends, lambda: operation.finish(cloud.now(), failed))


def _failed(request: Request, given: dict[str, Any], zone: str, kind: str, count: int) -> LateError:
    probe = Instance(zone, rules.filled(request, zone, _in_zone(given, zone, kind)), request.now)
    probe.user = request.principal
    life = request.cloud.life
    return life.denied(probe) or life.over_quota(probe, count) or life.stockout(probe)


def _placed(request: Request, wanted: list[dict[str, Any]], zones: list[str], choices: list[str],
            shape: str) -> tuple[list[str], str]:
    """The zone of each instance that there is room for, and the type: of the first choice with the most room."""
    best: tuple[list[str], str] = ([], choices[0])
    for choice in choices:
        rooms = {zone: _room(request, wanted, zone, choice) for zone in zones}
        if shape == "ANY_SINGLE_ZONE":
            zone = max(zones, key=lambda z: rooms[z])
            found = [zone] * rooms[zone]
        elif shape == "BALANCED":
            found = []
            while len(found) < len(wanted) and (open_ := [z for z in zones if rooms[z] > found.count(z)]):
                found.append(min(open_, key=found.count))
        else:
            found = [zone for zone in zones for _ in range(rooms[zone])]
        if len(found[:len(wanted)]) > len(best[0]):
            best = found[:len(wanted)], choice
    return best


def _room(request: Request, wanted: list[dict[str, Any]], zone: str, kind: str) -> int:
    """How many of them the zone holds now."""
    cloud = request.cloud
    known = catalog.TYPES.get(kind)
    if known is None or not catalog.in_zone(known, zone):
        return 0
    probe = Instance(zone, rules.filled(request, zone, _in_zone(wanted[0], zone, kind)), request.now)
    probe.user = request.principal
    room = 0 if cloud.life.denied(probe) else cloud.market.room(probe.pool)
    return min(len(wanted), len(wanted) if room is None else room, cloud.quota_holds(probe))


def _choices(given: dict[str, Any]) -> list[str]:
    """Machine types in the order of their ranks."""
    flexible = given.get("instanceFlexibilityPolicy", {}).get("instanceSelections", {})
    if not flexible:
        return [given["instanceProperties"].get("machineType", "")]
    ranked = sorted(flexible.values(), key=lambda s: int(s.get("rank", 1000)))
    return [kind for selection in ranked for kind in selection.get("machineTypes", ())]


def _zones(request: Request, policy: dict[str, Any]) -> list[str]:
    if "region" not in request.named:
        return [request.zone]
    region = request.named["region"]
    zones = list(catalog.REGIONS[region])
    for at, wish in policy.get("locations", {}).items():
        if not at.startswith("zones/") or at.removeprefix("zones/") not in zones:
            raise invalid("resource.locationPolicy.locations", at, f"It is no zone of region '{region}'.")
        if wish.get("preference") not in ("ALLOW", "DENY"):
            raise invalid("resource.locationPolicy.locations", at, "Its preference must be ALLOW or DENY.")
    listed = [z["zone"].rpartition("/")[2] for z in policy.get("zones", ())]
    denied = {at.removeprefix("zones/") for at, w in policy.get("locations", {}).items() if w["preference"] == "DENY"}
    allowed = {at.removeprefix("zones/") for at, w in policy.get("locations", {}).items() if w["preference"] == "ALLOW"}
    found = [z for z in listed or zones if z not in denied and (not allowed or z in allowed)]
    if not found:
        raise invalid("resource.locationPolicy", "", "No zone is allowed.")
    return found


def _by_pattern(pattern: str, count: int) -> list[str]:
    digits = pattern.count("#")
    if not digits or "#" * digits not in pattern:
        raise invalid("resource.namePattern", pattern, "It needs one sequence of '#'.")
    return [pattern.replace("#" * digits, f"{n:0{digits}d}") for n in range(1, count + 1)]


def _one(properties: dict[str, Any], name: str, own: dict[str, Any]) -> dict[str, Any]:
    return {**copy.deepcopy(properties), "name": own.get("name", name)}


def _in_zone(given: dict[str, Any], zone: str, kind: str) -> dict[str, Any]:
    """Properties name types without a zone; an instance in full."""
    if "/" in kind:
        raise invalid("resource.instanceProperties.machineType", kind, "It must be the name of a machine type alone.")
    found = copy.deepcopy(given)
    found["machineType"] = f"zones/{zone}/machineTypes/{kind}"
    for card in found.get("guestAccelerators", ()):
        if "/" in card.get("acceleratorType", ""):
            raise invalid("resource.instanceProperties.guestAccelerators", card["acceleratorType"],
                          "It must be the name of an accelerator type alone.")
        card["acceleratorType"] = f"zones/{zone}/acceleratorTypes/{card['acceleratorType']}"
    for disk in found.get("disks", ()):
        init = disk.get("initializeParams", {})
        if "/" in init.get("diskType", ""):
            raise invalid("resource.instanceProperties.disks", init["diskType"], "It must be the name of a disk type "
                          "alone.")
        if "diskType" in init:
            init["diskType"] = f"zones/{zone}/diskTypes/{init['diskType']}"
    return found


# ---- reads


@handles("compute.instances.get")
def get(request: Request) -> dict[str, Any]:
    return shown(request, find(request))


def _listed(request: Request) -> list[tuple[Instance, dict[str, Any]]]:
    """As listings show them: as of some time ago, and new ones late."""
    cloud, now = request.cloud, request.now
    at = now - cloud.lag_s
    living = [i for i in cloud.instances_by_path.values() if now - i.born >= cloud.new_lag_s]
    gone = [i for i in cloud.gone if i.ended_at is not None and now - i.ended_at < cloud.lag_s
            and now - i.born >= cloud.new_lag_s]
    return [(i, shown(request, i, at)) for i in (*living, *gone)]


@handles("compute.instances.list")
def list_(request: Request) -> dict[str, Any]:
    request.need("compute.instances.list", f"projects/{request.project}")
    return listing(request, "compute#instanceList", [b for i, b in _listed(request) if i.zone == request.zone])


@handles("compute.instances.aggregatedList")
def aggregated_list(request: Request) -> dict[str, Any]:
    request.need("compute.instances.list", f"projects/{request.project}")
    return aggregated(request, "compute#instanceAggregatedList", "instances",
                      [(f"zones/{i.zone}", b) for i, b in _listed(request)], [f"zones/{z}" for z in catalog.ZONES])


@handles("compute.instances.getSerialPortOutput")
def serial(request: Request) -> dict[str, Any]:
    instance = find(request, "compute.instances.getSerialPortOutput")
    text, start = instance.serial, int(request.query.get("start", 0))
    begin = max(start, len(text) - SERIAL_CHUNK)
    return {"kind": "compute#serialPortOutput", "contents": text[begin:], "start": str(begin), "next": str(len(text)),
            "selfLink": link(f"{request.cloud.path(instance)}/serialPort")}


@handles("compute.instances.getGuestAttributes")
def guest_attributes(request: Request) -> dict[str, Any]:
    instance = find(request, "compute.instances.getGuestAttributes")
    if instance.metadata.get("enable-guest-attributes", "").upper() != "TRUE":
        raise GcpError("conditionNotMet", "Guest attributes endpoint access is disabled.")
    wanted = request.query.get("queryPath", "")
    items = [{"namespace": k.partition("/")[0], "key": k.partition("/")[2], "value": v}
             for k, v in instance.guest.items() if k.startswith(wanted)]
    if not items:
        raise not_found(f"{request.cloud.path(instance)}/guestAttributes/{wanted}")
    return {"kind": "compute#guestAttributes", "queryPath": wanted, "queryValue": {"items": items}}


# ---- changes


@handles("compute.instances.delete")
def delete(request: Request) -> dict[str, Any]:
    cloud, instance = request.cloud, find(request, "compute.instances.delete")
    if instance.body["deletionProtection"]:
        raise GcpError("resourceInUseByAnotherResource", f"Invalid resource usage: 'Resource cannot be deleted if it's "
                       f"protected against deletion. {cloud.path(instance)}'.")
    operation = cloud.operate(f"zones/{instance.zone}", "delete", instance, request.principal)
    cloud.life.end(instance, operation, True, request.principal)
    return operation.shown(cloud.project, accepted=True)


@handles("compute.instances.stop")
def stop(request: Request) -> dict[str, Any]:
    cloud, instance = request.cloud, find(request, "compute.instances.stop")
    if any(d["type"] == "SCRATCH" for d in instance.body["disks"]) and "discardLocalSsd" not in request.query and (
            instance.state == "running"):
        raise GcpError("badRequest", "VM has a Local SSD attached but an undefined value for `discard-local-ssd`. If "
                       "using gcloud, please add `--discard-local-ssd=false` or `--discard-local-ssd=true` to your "
                       "command.")
    operation = cloud.operate(f"zones/{instance.zone}", "stop", instance, request.principal)
    cloud.life.end(instance, operation, False, request.principal)
    return operation.shown(cloud.project, accepted=True)


@handles("compute.instances.start")
def start(request: Request) -> dict[str, Any]:
    cloud, instance = request.cloud, find(request, "compute.instances.start")
    if instance.state in ("stopping", "shutting-down"):
        raise GcpError("resourceNotReady", f"The resource '{cloud.path(instance)}' is not ready")
    operation = cloud.operate(f"zones/{instance.zone}", "start", instance, request.principal)
    cloud.life.start(instance, operation)
    return operation.shown(cloud.project, accepted=True)


@handles("compute.instances.reset")
def reset(request: Request) -> dict[str, Any]:
    cloud, instance = request.cloud, find(request, "compute.instances.reset")
    return cloud.done(f"zones/{instance.zone}", "reset", instance, request.principal)


def _matching(given: str | None, current: str, field: str) -> None:
    if not given or given != current:
        raise GcpError("conditionNotMet", f"{field} fingerprint either invalid or resource labels have changed. "
                       "Supplied fingerprint does not match current one.")


@handles("compute.instances.setLabels")
def set_labels(request: Request) -> dict[str, Any]:
    cloud, instance = request.cloud, find(request, "compute.instances.setLabels")
    _matching(request.body.get("labelFingerprint"), instance.body["labelFingerprint"], "Labels")
    instance.body["labels"] = rules.labels(request.body.get("labels", {}))
    instance.body["labelFingerprint"] = fingerprint(instance.body["labels"])
    return cloud.done(f"zones/{instance.zone}", "setLabels", instance, request.principal)


@handles("compute.instances.setMetadata")
def set_metadata(request: Request) -> dict[str, Any]:
    cloud, instance = request.cloud, find(request, "compute.instances.setMetadata")
    _matching(request.body.get("fingerprint"), instance.body["metadata"]["fingerprint"], "Supplied")
    instance.body["metadata"] = rules.metadata(request.body)
    cloud.noise_of(instance)
    return cloud.done(f"zones/{instance.zone}", "setMetadata", instance, request.principal)


@handles("compute.instances.setTags")
def set_tags(request: Request) -> dict[str, Any]:
    cloud, instance = request.cloud, find(request, "compute.instances.setTags")
    _matching(request.body.get("fingerprint"), instance.body["tags"]["fingerprint"], "Supplied")
    items = request.body.get("items", [])
    instance.body["tags"] = {"items": items, "fingerprint": fingerprint(items)}
    return cloud.done(f"zones/{instance.zone}", "setTags", instance, request.principal)


@handles("compute.instances.simulateMaintenanceEvent")
def simulate(request: Request) -> dict[str, Any]:
    """Of a Spot VM, its preemption, as "Simulate a maintenance event" has it; with the notice that it asked for."""
    cloud, instance = request.cloud, find(request, "compute.instances.simulateMaintenanceEvent")
    if instance.state != "running":
        raise GcpError("resourceNotReady", f"The resource '{cloud.path(instance)}' is not ready")
    answer = cloud.done(f"zones/{instance.zone}", "compute.instances.simulateMaintenanceEvent", instance,
                        request.principal)
    if instance.market == "spot":
        cloud.life.preempt(instance, instance.notice_s or None, cloud.market.room(instance.pool))
    else:
        cloud.life.maintain(instance, 60.0)
    return answer
