"""Requests on everything but instances: operations, disks, networks, firewall rules, addresses, routers."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any

from tests.support.fakes.gcp import catalog, rules
from tests.support.fakes.gcp.errors import GcpError, invalid, not_found
from tests.support.fakes.gcp.requests import Request, aggregated, all_scopes, handles, listing
from tests.support.fakes.gcp.state import Instance, Operation, fingerprint, last, link, relative, stamp

if TYPE_CHECKING:
    from tests.support.fakes.gcp.cloud import GcpCloud

FIREWALLS_MOST = 100
PROTOCOLS = ("all", "tcp", "udp", "icmp", "esp", "ah", "ipip", "sctp")
ITEMS = {"disks": "Disk", "networks": "Network", "subnetworks": "Subnetwork", "firewalls": "Firewall",
         "addresses": "Address", "routers": "Router", "resourcePolicies": "ResourcePolicy"}
REGIONAL, ZONAL = ("subnetworks", "addresses", "routers", "resourcePolicies"), ("disks",)
DEFAULT_RULES = (  # that a new project's network has
    ("default-allow-internal", "10.128.0.0/9", [{"IPProtocol": "tcp", "ports": ["0-65535"]},
                                                {"IPProtocol": "udp", "ports": ["0-65535"]}, {"IPProtocol": "icmp"}]),
    ("default-allow-ssh", "0.0.0.0/0", [{"IPProtocol": "tcp", "ports": ["22"]}]),
    ("default-allow-icmp", "0.0.0.0/0", [{"IPProtocol": "icmp"}]))  # fmt: skip
PRIORITY = 65534


def furnish(cloud: GcpCloud) -> None:
    """What a new project has: the auto mode network `default` with its rules."""
    add_network(cloud, "default")
    for name, source, allowed in DEFAULT_RULES:
        _add_rule(cloud, cloud.project, {"name": name, "network": "global/networks/default", "sourceRanges": [source],
                                         "allowed": allowed, "priority": PRIORITY})
    cloud.usual = frozenset(cloud.things)


def add_network(cloud: GcpCloud, name: str, auto: bool = True, project: str = "", regions: tuple[str, ...] = (),
                nat: bool = False) -> None:
    """A network with a subnet in each region (`regions`: in these only)."""
    project = project or cloud.project
    path = f"projects/{project}/global/networks/{name}"
    subnets = []
    count = len(cloud.collection("networks"))
    for at, region in enumerate(regions or catalog.REGIONS):
        where = f"projects/{project}/regions/{region}/subnetworks/{name}"
        cidr = f"10.{128 + 4 * at + 16 * count}.0.0/20"
        gateway = str(ipaddress.ip_network(cidr)[1])
        cloud.things[where] = _made(cloud, "subnetwork", where, ipCidrRange=cidr, gatewayAddress=gateway,
                                    network=link(path), region=link(f"projects/{project}/regions/{region}"),
                                    privateIpGoogleAccess=False, purpose="PRIVATE", stackType="IPV4_ONLY",
                                    fingerprint=fingerprint(where))
        subnets.append(link(where))
        if nat:
            router = f"projects/{project}/regions/{region}/routers/{name}-router"
            cloud.things[router] = _made(
                cloud, "router", router, network=link(path), region=link(f"projects/{project}/regions/{region}"),
                nats=[{"name": "nat", "natIpAllocateOption": "AUTO_ONLY",
                       "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"}])
    cloud.things[path] = _made(cloud, "network", path, autoCreateSubnetworks=auto, subnetworks=subnets,
                               routingConfig={"routingMode": "REGIONAL"}, mtu=1460)


def _made(cloud: GcpCloud, kind: str, path: str, **more: Any) -> dict[str, Any]:
    return {"kind": f"compute#{kind}", "id": cloud.number(), "name": last(path), "selfLink": link(path),
            "creationTimestamp": stamp(cloud.now()), **more}


# ---- reads, the same for all kinds


def _path(request: Request) -> str:
    collection = request.method.id.split(".")[1]
    name = next(v for k, v in request.named.items() if k not in ("project", "zone", "region"))
    return f"projects/{request.project}/{request.scope}/{collection}/{name}"


def _thing(request: Request) -> dict[str, Any]:
    path = _path(request)
    found = request.cloud.things.get(path)
    if found is None:
        raise not_found(path)
    return found


@handles(*(f"compute.{c}.get" for c in ITEMS))
def get(request: Request) -> dict[str, Any]:
    return _thing(request)


def _kind(collection: str) -> str:
    return ITEMS[collection][0].lower() + ITEMS[collection][1:]


@handles(*(f"compute.{c}.list" for c in ITEMS))
def list_(request: Request) -> dict[str, Any]:
    collection = request.method.id.split(".")[1]
    prefix = f"projects/{request.project}/{request.scope}/"
    found = [t for path, t in request.cloud.things.items() if path.startswith(prefix)
             and path.split("/")[-2] == collection]
    return listing(request, f"compute#{_kind(collection)}List", found)


@handles(*(f"compute.{c}.aggregatedList" for c in (*REGIONAL, *ZONAL)))
def aggregated_list(request: Request) -> dict[str, Any]:
    collection = request.method.id.split(".")[1]
    found = [("/".join(relative(t["selfLink"]).split("/")[2:4]), t)
             for t in request.cloud.collection(collection, request.project)]
    kind = "zones/" if collection in ZONAL else "regions/"
    return aggregated(request, f"compute#{_kind(collection)}AggregatedList", collection, found,
                      [s for s in all_scopes() if s.startswith(kind)])


# ---- changes


def _new(request: Request, kind: str, **more: Any) -> dict[str, Any]:
    cloud, collection = request.cloud, request.method.id.split(".")[1]
    path = f"projects/{request.project}/{request.scope}/{collection}/{request.body['name']}"
    if path in cloud.things:
        raise GcpError("alreadyExists", f"The resource '{path}' already exists")
    cloud.things[path] = {**request.body, **_made(cloud, kind, path), **more}
    return cloud.done(request.scope, "insert", path, request.principal)


def _remove(request: Request, used_by: list[str]) -> dict[str, Any]:
    cloud, path = request.cloud, _path(request)
    _thing(request)
    if used_by:
        kind = request.method.id.split(".")[1].removesuffix("s")
        raise GcpError("resourceInUseByAnotherResource", f"The {kind} resource '{path}' is already being used by "
                       f"'{used_by[0]}'")
    del cloud.things[path]
    return cloud.done(request.scope, "delete", path, request.principal)


@handles("compute.disks.delete")
def delete_disk(request: Request) -> dict[str, Any]:
    return _remove(request, [relative(u) for u in _thing(request).get("users", ())])


@handles("compute.disks.setLabels")
def label_disk(request: Request) -> dict[str, Any]:
    path = f"projects/{request.project}/{request.scope}/disks/{request.named['resource']}"
    disk = request.cloud.things.get(path)
    if disk is None:
        raise not_found(path)
    if request.body.get("labelFingerprint") != disk["labelFingerprint"]:
        raise GcpError("conditionNotMet", "Labels fingerprint either invalid or resource labels have changed")
    disk["labels"] = rules.labels(request.body.get("labels", {}))
    disk["labelFingerprint"] = fingerprint(disk["labels"])
    return request.cloud.done(request.scope, "setLabels", path, request.principal)


@handles("compute.disks.insert")
def insert_disk(request: Request) -> dict[str, Any]:
    given = request.body
    kind = given.get("type", f"zones/{request.zone}/diskTypes/pd-standard")
    return _new(request, "disk", sizeGb=given.get("sizeGb", "10"), status="READY", type=link(
        f"projects/{request.project}/zones/{request.zone}/diskTypes/{last(kind)}"),
        labels=rules.labels(given.get("labels", {})), labelFingerprint=fingerprint(given.get("labels", {})),
        zone=link(f"projects/{request.project}/zones/{request.zone}"))


@handles("compute.networks.insert")
def insert_network(request: Request) -> dict[str, Any]:
    cloud, name = request.cloud, request.body["name"]
    path = f"projects/{request.project}/global/networks/{name}"
    if path in cloud.things:
        raise GcpError("alreadyExists", f"The resource '{path}' already exists")
    auto = request.body.get("autoCreateSubnetworks", True)
    add_network(cloud, name, auto)
    if not auto:
        for subnet in [p for p, t in cloud.things.items() if t.get("network") == link(path)]:
            del cloud.things[subnet]
        cloud.things[path]["subnetworks"] = []
    return cloud.done("global", "insert", path, request.principal)


@handles("compute.networks.delete")
def delete_network(request: Request) -> dict[str, Any]:
    cloud, path = request.cloud, _path(request)
    auto = _thing(request)["autoCreateSubnetworks"]
    users = [relative(t["selfLink"]) for t in cloud.things.values() if t.get("network") == link(path)
             and not (auto and "/subnetworks/" in t["selfLink"])]
    users += [cloud.path(i) for i in cloud.instances_by_path.values()
              if any(n["network"] == link(path) for n in i.body["networkInterfaces"])]
    answer = _remove(request, users)
    for subnet in [p for p, t in cloud.things.items() if t.get("network") == link(path)]:
        del cloud.things[subnet]
    return answer


@handles("compute.subnetworks.insert")
def insert_subnet(request: Request) -> dict[str, Any]:
    cloud, given = request.cloud, request.body
    network = cloud.path_of(given.get("network", ""), request.project)
    if network not in cloud.things:
        raise not_found(network)
    wanted = ipaddress.ip_network(given.get("ipCidrRange", ""))
    if any(wanted.overlaps(ipaddress.ip_network(s["ipCidrRange"])) for s in cloud.collection("subnetworks")
           if s["network"] == link(network)):
        raise invalid("resource.ipCidrRange", wanted, "Subnetwork overlaps with an existing one.")
    return _new(request, "subnetwork", network=link(network), fingerprint=fingerprint(str(wanted)),
                region=link(f"projects/{request.project}/regions/{request.named['region']}"))


@handles("compute.subnetworks.delete")
def delete_subnet(request: Request) -> dict[str, Any]:
    cloud, path = request.cloud, _path(request)
    return _remove(request, [cloud.path(i) for i in cloud.instances_by_path.values()
                             if any(relative(n["subnetwork"]) == path for n in i.body["networkInterfaces"])])


# ---- firewall rules


@handles("compute.firewalls.insert")
def insert_rule(request: Request) -> dict[str, Any]:
    cloud, given = request.cloud, request.body
    path = f"projects/{request.project}/global/firewalls/{given['name']}"
    request.need("compute.networks.updatePolicy", f"projects/{request.project}")
    if path in cloud.things:
        raise GcpError("alreadyExists", f"The resource '{path}' already exists")
    if len(cloud.collection("firewalls")) >= cloud.quotas.get(("", "FIREWALLS"), FIREWALLS_MOST):
        raise GcpError("quotaExceeded", "Quota 'FIREWALLS' exceeded.  Limit: "
                       f"{cloud.quotas.get(('', 'FIREWALLS'), FIREWALLS_MOST):.1f} globally.")
    _add_rule(cloud, request.project, given)
    return cloud.done("global", "insert", path, request.principal)


def _add_rule(cloud: GcpCloud, project: str, given: dict[str, Any]) -> None:
    checked = _rule(cloud, project, given)
    path = f"projects/{project}/global/firewalls/{given['name']}"
    cloud.things[path] = {**checked, **_made(cloud, "firewall", path)}


def _rule(cloud: GcpCloud, project: str, given: dict[str, Any]) -> dict[str, Any]:
    network = cloud.path_of(given.get("network") or "global/networks/default", project)
    if network not in cloud.things:
        raise not_found(network)
    if bool(given.get("allowed")) == bool(given.get("denied")):
        raise invalid("resource", "", "A firewall rule needs exactly one of allowed and denied.")
    for at, part in enumerate(given.get("allowed") or given.get("denied")):
        protocol = part.get("IPProtocol", "")
        if protocol not in PROTOCOLS and not (protocol.isdigit() and int(protocol) < 256):
            raise invalid(f"resource.allowed[{at}].IPProtocol", protocol, "Invalid protocol.")
        if part.get("ports") and protocol not in ("tcp", "udp", "sctp", "6", "17", "132"):
            raise invalid(f"resource.allowed[{at}].ports", part["ports"], "Ports may only be specified on rules whose "
                          "protocol is one of [TCP, UDP, SCTP].")
        for ports in part.get("ports", ()):
            ends = ports.split("-")
            if len(ends) > 2 or not all(e.isdigit() and int(e) <= 65535 for e in ends):
                raise invalid(f"resource.allowed[{at}].ports[0]", ports, "Invalid port or range of ports.")
    if given.get("direction", "INGRESS") == "INGRESS":
        if given.get("sourceTags") and given.get("sourceServiceAccounts"):
            raise invalid("resource.sourceTags", given["sourceTags"], "It cannot be combined with source service "
                          "accounts.")
    elif given.get("sourceRanges") or given.get("sourceTags"):
        raise invalid("resource.sourceRanges", given.get("sourceRanges", given.get("sourceTags")), "An egress rule has "
                      "no sources.")
    for source in given.get("sourceRanges", ()):
        try:
            ipaddress.ip_network(source)
        except ValueError:
            raise invalid("resource.sourceRanges", source, "Must be a valid CIDR address range.") from None
    for key in ("sourceTags", "targetTags"):
        for tag in given.get(key, ()):
            if not rules.NAME.fullmatch(tag):
                raise invalid(f"resource.{key}", tag, f"Must be a match of regex '{rules.NAME.pattern}'")
    priority = given.get("priority", 1000)
    if not 0 <= priority <= 65535:
        raise invalid("resource.priority", priority, "Must be between 0 and 65535.")
    sources = {} if given.get("sourceRanges") or given.get("sourceTags") or given.get("direction") == "EGRESS" or (
        given.get("sourceServiceAccounts")) else {"sourceRanges": ["0.0.0.0/0"]}
    return {"direction": "INGRESS", "disabled": False, "logConfig": {"enable": False}, **given, **sources,
            "priority": priority, "network": link(network)}


@handles("compute.firewalls.patch", "compute.firewalls.update")
def change_rule(request: Request) -> dict[str, Any]:
    cloud, path = request.cloud, _path(request)
    old = _thing(request)
    request.need("compute.networks.updatePolicy", f"projects/{request.project}")
    given = {k: v for k, v in request.body.items() if k not in ("kind", "id", "selfLink", "creationTimestamp")}
    if given.get("name", old["name"]) != old["name"]:
        raise invalid("resource.name", given["name"], "The name cannot be changed.")
    base = {k: v for k, v in old.items() if k not in ("kind", "id", "selfLink", "creationTimestamp")}
    checked = _rule(cloud, request.project, {**base, **given} if request.method.id.endswith("patch") else given)
    cloud.things[path] = {**checked, **{k: old[k] for k in ("kind", "id", "selfLink", "creationTimestamp", "name")}}
    return cloud.done("global", "patch", path, request.principal)


@handles("compute.firewalls.delete")
def delete_rule(request: Request) -> dict[str, Any]:
    request.need("compute.networks.updatePolicy", f"projects/{request.project}")
    return _remove(request, [])


def admits(cloud: GcpCloud, instance: Instance, address: str, port: int) -> bool:
    """The rule of the lowest priority that fits decides, a denial before a permission; without one nobody gets in."""
    found = [r for r in cloud.collection("firewalls") if _fits(r, instance, address, port)]
    return bool(min(found, key=lambda r: (r["priority"], "denied" not in r), default={}).get("allowed"))


def _fits(rule: dict[str, Any], instance: Instance, address: str, port: int) -> bool:
    tags = instance.body["tags"].get("items", [])
    networks = [n["network"] for n in instance.body["networkInterfaces"]]
    if rule["network"] not in networks or rule["direction"] != "INGRESS" or rule["disabled"]:
        return False
    if rule.get("targetTags") and not {*rule["targetTags"]} & {*tags}:
        return False
    sources = [ipaddress.ip_network(n) for n in rule.get("sourceRanges", ())]
    if not any(ipaddress.ip_address(address) in n for n in sources):
        return False
    return any(part["IPProtocol"] in ("all", "tcp", "6") and (not part.get("ports") or any(
        int(p.split("-")[0]) <= port <= int(p.split("-")[-1]) for p in part["ports"]))
        for part in (*rule.get("allowed", ()), *rule.get("denied", ())))


# ---- addresses


@handles("compute.addresses.insert")
def insert_address(request: Request) -> dict[str, Any]:
    return _new(request, "address", address=request.cloud.addresses.public(), status="RESERVED",
                addressType=request.body.get("addressType", "EXTERNAL"),
                region=link(f"projects/{request.project}/regions/{request.named['region']}"))


@handles("compute.addresses.delete", "compute.routers.delete", "compute.resourcePolicies.delete")
def delete_plain(request: Request) -> dict[str, Any]:
    return _remove(request, _thing(request).get("users", []))


@handles("compute.resourcePolicies.insert")
def insert_policy(request: Request) -> dict[str, Any]:
    return _new(request, "resourcePolicy", status="READY",
                region=link(f"projects/{request.project}/regions/{request.named['region']}"))


# ---- operations


def _operation(request: Request) -> Operation:
    found = next((o for o in request.cloud.operations if request.named["operation"] in (o.name, o.number)
                  and o.scope == request.scope), None)
    if found is None:
        raise not_found(f"projects/{request.project}/{request.scope}/operations/{request.named['operation']}")
    return found


@handles("compute.zoneOperations.get", "compute.regionOperations.get", "compute.globalOperations.get")
def get_operation(request: Request) -> dict[str, Any]:
    return _operation(request).shown(request.project)


@handles("compute.zoneOperations.wait", "compute.regionOperations.wait", "compute.globalOperations.wait")
def wait(request: Request) -> dict[str, Any]:
    """Once it is done, or after `wait_s` as it is then: the service waits two minutes at most, and may wait less."""
    return _operation(request).shown(request.project)


def _waited(request: Request) -> dict[str, Any]:
    found = _operation(request)
    request.cloud.wait_until(lambda: found.done_at is not None, request.cloud.wait_s)
    return found.shown(request.project)


wait.waits = _waited  # type: ignore[attr-defined]


@handles("compute.zoneOperations.list", "compute.regionOperations.list", "compute.globalOperations.list")
def list_operations(request: Request) -> dict[str, Any]:
    return listing(request, "compute#operationList",
                   [o.shown(request.project) for o in request.cloud.operations if o.scope == request.scope])


@handles("compute.globalOperations.aggregatedList")
def all_operations(request: Request) -> dict[str, Any]:
    return aggregated(request, "compute#operationAggregatedList", "operations",
                      [(o.scope, o.shown(request.project)) for o in request.cloud.operations], all_scopes())
