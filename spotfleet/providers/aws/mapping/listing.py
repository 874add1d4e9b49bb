"""Conversion of EC2's instances and spot requests to a listing: one line per host. Pure.

    pending --> PENDING   running, stopping, shutting-down --> RUNNING   stopped --> STOPPED   terminated --> TERMINATED

    a persistent request without an instance    PENDING, or STOPPED if it had one: EC2 will launch it (again)
    two living instances of one host, and a relaunch by EC2: see kit/mapping/listing.py

A run starts at LaunchTime, which EC2 moves when it starts a stopped instance: earlier runs are known only to a caller
that stored them. A run ends at the time in StateTransitionReason, or in the spot request's status. If neither
holds a time, the run is left out, and the caller that stored its begin closes it.
"""

from __future__ import annotations

import calendar
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spotfleet.model import SECOND, CloudHost, CloudState, Market, Offer, Run
from spotfleet.providers.aws.mapping import errors, names
from spotfleet.providers.kit.mapping.listing import (
    ListingContext,
    MachineFacts,
    machine_line,
    offer_of,
    one_host,
    pools_text,
)

SECOND_S = 1e-3  # EC2 reports whole seconds: a run that began and ended in the same one is longer than nothing
TAG_LENGTH = 256
FOR_SPOT = "for-spot"  # in a reserved host's POOL tag: it meets a need of spot hosts
STATES = {"pending": CloudState.PENDING, "stopped": CloudState.STOPPED, "terminated": CloudState.TERMINATED}
GONE = ("shutting-down", "terminated")
GOING = ("stopping", "shutting-down")  # no longer billed, but existing
WAITING = ("open", "active", "disabled")  # states of a spot request that may still launch something
ORPHANED = "request-canceled-and-instance-running"  # status of one whose instance continues: EC2 shows it for hours
NEVER_RAN = ("Server.InsufficientInstanceCapacity", "Server.InternalError", "Client.VolumeLimitExceeded",
             "Client.InvalidSnapshot.NotFound", "Client.InternalError", "Server.ScheduledStop.NeverStarted")
RECLAIMED = "Server.Spot"  # codes of interruptions, which are free in the first hour
BY_ITSELF = "Client.InstanceInitiatedShutdown"  # EC2's code when the machine switched itself off
KEY_TROUBLE = "Client.InternalError"  # EC2's code when access to the volume's key is denied

Instance = Mapping[str, Any]  # an item of DescribeInstances
Request = Mapping[str, Any]  # an item of DescribeSpotInstanceRequests


def pools_tag(pools: Sequence[Offer]) -> str:
    text, first = pools_text(pools, TAG_LENGTH), pools[0]
    if first.reserved and first.market is Market.SPOT and len(text) + len(FOR_SPOT) < TAG_LENGTH:
        text += f" {FOR_SPOT}"
    return text


def tags(thing: Mapping[str, Any]) -> dict[str, str]:
    return {t["Key"]: t.get("Value", "") for t in thing.get("Tags") or ()}


def places(instances: Iterable[Instance], hosts: int) -> dict[str, int]:
    """Map the instances of one launch of so many hosts to their places in its HOST tag.

    The MEMBER tag decides. Without it the launch index does where each instance has another one: EC2 documents that,
    though not for spot. Where they have not, the order of the ids decides; more instances than hosts are no order.
    """
    machines = sorted(instances, key=lambda i: i["InstanceId"])
    numbered = _numbered(machines) or len(machines) > hosts
    found = {}
    for rank, instance in enumerate(machines):
        tag = tags(instance).get(names.MEMBER, "")
        by_index = numbered or tag == names.BY_INDEX
        found[instance["InstanceId"]] = int(tag) if tag.isdigit() else _index(instance) if by_index else rank
    return found


def member_tags(instances: Iterable[Instance]) -> dict[str, list[str]]:
    """Map each value of the MEMBER tag to the instances of one launch that are to get it: one call for each value."""
    machines = list(instances)
    placed = places(machines, len(machines))
    if _numbered(machines):
        return {names.BY_INDEX: list(placed)}
    return {str(place): [instance] for instance, place in placed.items()}


def missing_member_tags(instances: Iterable[Instance]) -> dict[str, list[str]]:
    """Map values of the MEMBER tag to the living instances that lack it.

    Left out are launches of which the listing does not have all instances yet: the order of the ids would be another.
    """
    launches: dict[str, list[Instance]] = defaultdict(list)
    for instance in instances:
        launches[tags(instance).get(names.HOST, "")].append(instance)
    found: dict[str, list[str]] = defaultdict(list)
    for host, of in launches.items():
        lacking = {i["InstanceId"] for i in of if names.MEMBER not in tags(i) and i["State"]["Name"] not in GONE}
        if lacking and 1 < len(names.members(host)) == len(of):
            for value, ids in member_tags(of).items():
                found[value] += [i for i in ids if i in lacking]
    return {value: ids for value, ids in found.items() if ids}


def request_ids(instances: Iterable[Instance], requests: Iterable[Request]) -> dict[str, str]:
    """Map instances to their hosts' request_ids; instances of no host of ours are left out.

    A relaunch may carry no tags: it is the host of the first instance of its spot request.
    """
    asked = {r["SpotInstanceRequestId"]: tags(r) for r in requests}
    launches: dict[str, list[Instance]] = defaultdict(list)
    for instance in sorted(instances, key=_launched):
        own = asked.get(instance.get("SpotInstanceRequestId") or "", {}) | tags(instance)
        if names.FLEET in own and names.HOST in own:
            launches[own[names.HOST]].append(instance)
    found = {}
    for host, of in launches.items():
        among = names.members(host)
        first: dict[str, Instance] = {}
        for instance in of:
            first.setdefault(_launch_of(instance), instance)
        placed = places(first.values(), len(among))
        for instance in of:
            place = placed[first[_launch_of(instance)]["InstanceId"]]
            if place < len(among):
                found[instance["InstanceId"]] = among[place]
    return found


def _launch_of(instance: Instance) -> str:
    return instance.get("SpotInstanceRequestId") or instance["InstanceId"]


def _launched(instance: Instance) -> tuple[float, str]:
    return _at(instance.get("LaunchTime")), instance["InstanceId"]


def _numbered(instances: Sequence[Instance]) -> bool:
    return len({_index(i) for i in instances}) == len(instances)


def _index(instance: Instance) -> int:
    return int(instance.get("AmiLaunchIndex") or 0)


def lines(instances: Iterable[Instance], requests: Iterable[Request], sight: ListingContext) -> list[CloudHost]:
    """Return one line per host, sorted by name."""
    instances, asked = list(instances), {r["SpotInstanceRequestId"]: r for r in requests}
    hosts = request_ids(instances, asked.values())
    held: dict[str, list[CloudHost]] = {}
    had: dict[str, str] = {}  # spot request -> host of its last instance
    ids: set[str] = set()
    for instance in sorted(instances, key=_launched):
        if instance["InstanceId"] in ids:
            continue  # pages of a listing may overlap
        ids.add(instance["InstanceId"])
        sir = instance.get("SpotInstanceRequestId") or ""
        request = asked.get(sir, {})
        own = tags(request) | tags(instance)  # EC2 gives a relaunched instance no tags
        if host := hosts.get(instance["InstanceId"], ""):
            held.setdefault(host, []).append(_line(host, instance, request, own, sight))
            had[sir] = host
    found = {line.request_id: line for host, of in held.items() for line in one_host(host, of)}
    for sir, request in sorted(asked.items()):
        if line := _waiting(request, had.get(sir, ""), found, sight):
            found[line.request_id] = line
    return sorted(found.values(), key=lambda line: line.request_id)


def unseen(instances: Iterable[Instance], requests: Iterable[Request]) -> list[str]:
    """Return ids of instances of our requests that the listing by tag lacks."""
    seen = {i["InstanceId"] for i in instances}
    return sorted({r["InstanceId"] for r in requests if r.get("InstanceId") and may_run(r)} - seen)


def may_run(request: Request) -> bool:
    """Return whether the request has an instance, or may get one."""
    return request.get("State") in WAITING or (request.get("Status") or {}).get("Code") == ORPHANED


def spot(instance: Instance) -> bool:
    return instance.get("InstanceLifecycle") == "spot"


def reserved(instance: Instance) -> str:
    """Return `Offer.reserved` of an instance that targets a reservation. One that merely matches an open reservation is
    an on-demand instance."""
    target = (instance.get("CapacityReservationSpecification") or {}).get("CapacityReservationTarget") or {}
    block = names.BLOCK if instance.get("InstanceLifecycle") == "capacity-block" else ""
    return f"{block}{target['CapacityReservationId']}" if target.get("CapacityReservationId") else ""


def _line(host: str, instance: Instance, request: Request, own: Mapping[str, str], sight: ListingContext) -> CloudHost:
    state = STATES.get(instance.get("State", {}).get("Name", ""), CloudState.RUNNING)
    return machine_line(host, MachineFacts(
        instance["InstanceId"], own, _offer(instance, own, sight), state, _runs(instance, request, state),
        instance.get("PrivateIpAddress") or "", instance.get("PublicIpAddress") or "", _why(instance, request),
        (_ended_at(instance, request) or None) if state is CloudState.TERMINATED else None), sight)


def _offer(instance: Instance, own: Mapping[str, str], sight: ListingContext) -> Offer:
    """Return the host's offer, with the price at launch if the tag holds it."""
    zone, kind = instance.get("Placement", {}).get("AvailabilityZone", ""), instance.get("InstanceType", "")
    held = reserved(instance)
    for_spot = held and FOR_SPOT in own.get(names.POOL, "").split(" ")
    market = Market.SPOT if spot(instance) or for_spot else Market.ON_DEMAND
    bare = Offer("aws", sight.region, zone, kind, market, 1, 0, 0,
                 quota="" if held else errors.quota(f"{kind} {market.value}"), reserved=held)
    return offer_of(bare, own, sight.priced)


def _runs(instance: Instance, request: Request, state: CloudState) -> tuple[Run, ...]:
    begun, code = _at(instance.get("LaunchTime")), _code(instance)
    if state is CloudState.PENDING or (state is CloudState.TERMINATED and code in NEVER_RAN):
        return ()  # not billed
    if state is CloudState.RUNNING:
        return (Run(begun),)
    if not (ended := _ended_at(instance, request)):
        return ()
    exercise = names.TAKEN in tags(instance)
    taken = exercise or code.startswith("Server.")
    reclaimed = code.startswith(RECLAIMED) and not exercise
    return (Run(begun, max(ended, begun + SECOND_S), taken, paid=taken and not reclaimed),)


def _ended_at(instance: Instance, request: Request) -> float:
    """Return the end of the run; 0 if it is unknown."""
    found = re.search(r"\((\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)", instance.get("StateTransitionReason") or "")
    if found:
        return float(calendar.timegm(tuple(map(int, found.groups()))))
    status = request.get("Status") or {}
    ended = str(status.get("Code", "")).startswith(("instance-terminated", "instance-stopped"))
    return _at(status.get("UpdateTime")) if ended else 0.0


def _why(instance: Instance, request: Request) -> str:
    """Return the cloud's reason, "" for a host that simply runs."""
    state = instance.get("State", {}).get("Name", "")
    status = request.get("Status") or {}
    status_text = f"{status.get('Message', '')} ({status.get('Code', '')})" if status.get("Code") else ""
    taken = status_text and str(status["Code"]).startswith(("instance-terminated-", "instance-stopped-", "marked-for-"))
    if state in ("pending", "running"):
        return f"EC2 takes it: {status_text}" if taken else ""
    reason = instance.get("StateReason") or {}
    reason_text = str(reason.get("Message") or instance.get("StateTransitionReason") or "")
    by_us = str(reason.get("Code", "")).startswith("Client.")
    words = status_text if taken and not by_us else reason_text
    if reason.get("Code") == KEY_TROUBLE:
        words += ": EC2 may not use the key of its volumes, or the image is not whole; see aws.kms_key"
    if reason.get("Code") == BY_ITSELF:
        words += (": it switched itself off. If it never joined, `aws ec2 get-console-output --instance-id "
                  f"{instance['InstanceId']}` shows why, such as a broken GPU")
    return f"{state}: {words}" if state in GOING else words


def _code(instance: Instance) -> str:
    return str((instance.get("StateReason") or {}).get("Code", ""))


def _waiting(request: Request, host: str, found: Mapping[str, CloudHost], sight: ListingContext) -> CloudHost | None:
    """Return the host of a persistent request that may launch an instance while none of its own lives; None otherwise.

    `host` is the request's last host; "" for none.
    """
    own = tags(request)
    if request.get("Type") != "persistent" or request.get("State") not in WAITING or names.FLEET not in own:
        return None
    sir, status = request["SpotInstanceRequestId"], request.get("Status") or {}
    why = f"its spot request {sir} is {request['State']}, EC2 may launch it: {status.get('Message', '')}"
    among = names.members(own.get(names.HOST, ""))
    host = host or (among[0] if len(among) == 1 else f"{among[0]}{SECOND}{sir}")
    line = found.get(host)
    if line is not None:  # the request's id shows that this is no old line of the ended machine
        ended = line.state is CloudState.TERMINATED
        return replace(line, state=CloudState.STOPPED, provider_id=sir, why=why, disk_gib=0, addresses=0,
                       ended_at=None) if ended else None
    wanted = request.get("LaunchSpecification") or {}
    zone = request.get("LaunchedAvailabilityZone") or wanted.get("Placement", {}).get("AvailabilityZone", "")
    never = {"InstanceType": wanted.get("InstanceType", ""), "InstanceLifecycle": "spot",
             "Placement": {"AvailabilityZone": zone}}
    return CloudHost(host, sir, own[names.FLEET], names.role_of(own), _offer(never, own, sight), CloudState.PENDING,
                     why=why)


def _at(instant: Any) -> float:
    """Return Unix seconds; 0 for none."""
    return float(instant.timestamp()) if instant is not None else 0.0
