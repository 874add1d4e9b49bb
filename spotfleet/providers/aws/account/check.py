"""Checks before a first fleet: everything that a new account may lack. Changes nothing.

    credentials, clock --> permissions, roles, buckets, notices      (of the account)
                       `-> pools, quotas, network, image, SSH, EFA   (of each region the fleet may go to)

All checks run at once: see kit/checks.py.
"""

from __future__ import annotations

import email.utils
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import CloudState, FleetSpec, Need, Nodes, Offer, Role
from spotfleet.providers import Finding
from spotfleet.providers.aws import describe, images, offers, reserved
from spotfleet.providers.aws import types as catalog
from spotfleet.providers.aws.account import bucket, disk_key, identity, network, permissions, queue, quotas, ssh_ingress
from spotfleet.providers.aws.mapping import errors, names, policies
from spotfleet.providers.aws.session import INSTALL, Account
from spotfleet.providers.kit import checks

SKEW_S, SKEW_SHOWN_S = 240.0, 30.0  # AWS refuses signatures that are 300 s off
SKEWED = ("RequestExpired", "RequestTimeTooSkewed", "SignatureDoesNotMatch", "InvalidSignatureException")
REACH_S = 3.0  # to connect to TCP 22
FEW_ADDRESSES = 8
SPOT_ROLE = disk_key.SPOT_ROLE
MAKE_SPOT_ROLE = "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"


@dataclass(frozen=True)
class CheckRequest:
    """Requirements of a fleet in one region; without offers, of any fleet."""

    region: str
    hosts: tuple[Offer, ...] = ()
    dispatcher: tuple[Offer, ...] = ()
    nodes: Nodes | None = None
    needs: tuple[Need, ...] = ()
    fleet: str = ""
    trouble: SpotfleetError | None = None  # the reason for missing offers


def findings(account: Account, spec: FleetSpec | None) -> Iterator[Finding]:
    """Yield the results of all checks for a fleet like `spec`, or for any fleet."""
    opening = list(_opening(account))
    yield from opening
    if any(f.level in ("blocker", "absent") for f in opening):
        return
    yield from checks.findings(
        {"permissions": lambda: permissions.findings(account, spec), "spot role": lambda: _spot_role(account),
         "named things": lambda: _named(account), "checkpoints": lambda: bucket.findings(account),
         "base": lambda: _base(account, spec), "notices": lambda: _notices(account),
         "reserved": lambda: reserved.findings(account, spec.any_of if spec else ())},
        account.regions, lambda region: _want(account, spec, region),
        {about: lambda want, ask=ask: ask(account, want) for about, ask in REGIONAL.items()},  # type: ignore[misc]
        lambda error: errors.code(error) in ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException"))


# ---- account checks


def _opening(account: Account) -> Iterator[Finding]:
    if find_spec("boto3") is None:
        yield Finding("boto3 is not installed", "absent", INSTALL, "SDK")
        return
    try:
        answer = account.client("sts").get_caller_identity()
    except SpotfleetError as error:
        if (skew := _skew(_response(error))) is not None and errors.code(error) in SKEWED and abs(skew) > SKEW_S:
            yield _clock(skew)
            return
        missing = type(error.__cause__).__name__ == "NoCredentialsError"
        yield Finding(str(error), "absent" if missing else "blocker", error.hint, "credentials")
        return
    profile = account.settings.spec.profile
    yield Finding(f"{answer['Arn']} of account {answer['Account']}" + (f", by profile {profile}" if profile else ""),
                  about="credentials")
    if (skew := _skew(answer)) is not None:
        yield _clock(skew)


def _response(error: BaseException) -> Mapping[str, Any]:
    found = getattr(error.__cause__, "response", None)
    return found if isinstance(found, dict) else {}


def _skew(answer: Mapping[str, Any]) -> float | None:
    """Return by how many seconds this machine's clock is behind AWS's."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() - time.time()
    except (TypeError, ValueError):
        return None


def _clock(skew: float) -> Finding:
    if abs(skew) <= SKEW_SHOWN_S:
        return Finding(f"within {max(1.0, abs(skew)):.0f} s of AWS's", about="clock")
    off = f"{abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'}"
    return Finding(f"this machine's clock is {off} AWS's, which refuses what is 300 s off",
                   "blocker" if abs(skew) > SKEW_S else "warning", "timedatectl set-ntp true", "clock")


def _spot_role(account: Account) -> Iterator[Finding]:
    """Check the spot role: without it an account's first spot request fails, unless the caller may create the role."""
    try:
        account.client("iam").get_role(RoleName=SPOT_ROLE)
    except SpotfleetError as error:
        if errors.code(error) != "NoSuchEntity":
            raise
        yield Finding(f"{SPOT_ROLE} is not there: the account has never had a spot machine", "blocker", MAKE_SPOT_ROLE)
    else:
        yield Finding(f"{SPOT_ROLE} is there")


def _named(account: Account) -> Iterator[Finding]:
    """Check the resources that the fleet file names instead of leaving them to `up`."""
    spec = account.settings.spec
    for key, name in (("dispatcher_profile", spec.dispatcher_profile), ("host_profile", spec.host_profile)):
        if name:
            yield _there(f"aws.{key}", name, lambda name=name: account.client("iam").get_instance_profile(
                InstanceProfileName=name))
    for region in account.regions:
        ec2 = account.client("ec2", region)
        if spec.interruption_queue:
            yield _there("aws.interruption_queue", f"{spec.interruption_queue} in {region}",
                         lambda region=region: account.client("sqs", region).get_queue_url(
                             QueueName=spec.interruption_queue))
        if spec.key_pair:
            yield _there("aws.key_pair", f"{spec.key_pair} in {region}",
                         lambda ec2=ec2: ec2.describe_key_pairs(KeyNames=[spec.key_pair]))
        for named in (n for n in spec.networks if n.region == region and n.security_groups):
            groups = [*named.security_groups, *named.dispatcher_groups]
            yield _there("aws.networks", f"{', '.join(groups)} in {region}",
                         lambda ec2=ec2, groups=groups: ec2.describe_security_groups(GroupIds=groups))


def _base(account: Account, spec: FleetSpec | None) -> Iterator[Finding]:
    """Check the rights of the dispatcher's role on a base: those of an older module may lack some."""
    base, named = spec.tags.get(names.BASE, "") if spec is not None else "", account.settings.spec
    if not base or not named.dispatcher_profile:
        return
    iam, (number, arn) = account.client("iam"), account.identity()
    role, host_role = (identity.role_of(iam, profile) if profile else ""
                       for profile in (named.dispatcher_profile, named.host_profile))
    document = policies.dispatcher(policies.Scope(
        base, account.regions, number, arn.split(":")[1], host_role, named.kms_key,
        target=account.settings.target, queue=bool(named.interruption_queue), base=True))
    found = permissions.simulate(account, document, policies.actions(document), role)
    name = role.rpartition("/")[2]
    if found.denied:
        yield Finding(f"role {name} of base {base} lacks {', '.join(sorted(found.denied))}", "blocker",
                      "`terraform init -upgrade` and `terraform apply` with the module of this release")
    elif found.why:
        yield Finding(f"whether role {name} of base {base} has all rights is not known: {found.why}", "warning",
                      "allow iam:SimulatePrincipalPolicy")
    else:
        yield Finding(f"role {name} of base {base} has the rights of a dispatcher")


def _there(key: str, name: str, ask: Callable[[], object]) -> Finding:
    try:
        ask()
    except SpotfleetError as error:
        if not errors.code(error).endswith(("NotFound", "NoSuchEntity", "Malformed", *queue.GONE)):
            raise
        return Finding(f"{key} names {name}, which is not there", "blocker", f"correct `{key}`, or leave it out")
    return Finding(f"{key}: {name} is there")


def _notices(account: Account) -> Iterator[Finding]:
    queue = "; besides, EventBridge informs the dispatcher by SQS" if account.settings.spec.event_queue else ""
    yield Finding(f"each host polls its own metadata server, which warns 120 s before EC2 takes it{queue}")


# ---- region checks


def _want(account: Account, spec: FleetSpec | None, region: str) -> CheckRequest:
    if spec is None:
        return CheckRequest(region)
    want = CheckRequest(region, nodes=spec.nodes, needs=(*spec.any_of, spec.dispatcher), fleet=spec.name)
    try:
        hosts = {o.pool: o for need in spec.any_of for o in _of(region, account, need)}
        return replace(want, hosts=tuple(hosts.values()), dispatcher=tuple(_of(region, account, spec.dispatcher)))
    except SpotfleetError as error:
        return replace(want, trouble=error)


def _of(region: str, account: Account, need: Need) -> list[Offer]:
    return [o for o in offers.offers(account, need) if o.region == region]


def _enabled(account: Account, want: CheckRequest) -> Iterator[Finding]:
    if want.region not in account.all_regions():
        yield Finding(f"{want.region} is not enabled for this account", "blocker",
                      f"aws account enable-region --region-name {want.region}   (takes some minutes)")


def _pools(account: Account, want: CheckRequest) -> Iterator[Finding]:
    if want.trouble is not None:
        raise want.trouble
    if want.nodes is None:
        return
    for what, found in (("hosts", want.hosts), ("the dispatcher", want.dispatcher)):
        if not found:
            words = catalog.unknown(account, want.needs)
            yield Finding(words or f"{want.region}: nothing is sold now that fits {what}", "blocker",
                          "other types, zones or regions under `resources`; a higher `max_hourly_cost`")
            continue
        best = min(found, key=lambda o: o.price_micros_h)
        pools = "1 pool" if len(found) == 1 else f"{len(found)} pools"
        yield Finding(f"{want.region}: {pools} for {what}, the cheapest {best.instance_type} in {best.zone}, "
                      f"{best.sold}, ${best.price_micros_h / 1e6:.4f}/h")


def _network(account: Account, want: CheckRequest) -> Iterator[Finding]:
    here = network.site(account, want.region)
    zones = sorted({s.zone for s in here.subnets})
    yield Finding(f"{want.region}: {here.vpc} has subnets in {', '.join(zones)}")
    missing: dict[str, list[str]] = {}
    kinds = sorted({o.instance_type for o in want.hosts})
    for kind, sold in sorted(catalog.zones(account, want.region, kinds).items()):
        for zone in sold - set(zones):
            missing.setdefault(zone, []).append(kind)
    for zone, types in sorted(missing.items()):
        yield Finding(f"{zone} sells {', '.join(types)}, but {here.vpc} has no subnet there", "warning",
                      f"aws ec2 create-default-subnet --region {want.region} --availability-zone {zone}; or name one "
                      "under `aws.networks`")
    for subnet in here.subnets:
        if words := _no_way_out(subnet, public=account.settings.spec.public_addresses):
            yield Finding(f"{subnet.id} in {subnet.zone} {words}", "warning",
                          "add the route, or name another subnet under `aws.networks`")
        if subnet.free < max(FEW_ADDRESSES, want.nodes.max + 1 if want.nodes else 0):
            yield Finding(f"{subnet.id} in {subnet.zone} has {subnet.free} free addresses", "warning",
                          "name a larger subnet under `aws.networks`")


def _no_way_out(subnet: network.Subnet, *, public: bool) -> str:
    """Explain why machines of the subnet reach nothing outside, or are not reached; "" if nothing is wrong."""
    if public and subnet.way != network.PUBLIC:
        return "has no route to an internet gateway: nothing reaches a machine there by its public address"
    if not public and subnet.way == network.PUBLIC:
        return ("has a default route that leads to an internet gateway, which serves public addresses only: with "
                "`public_addresses: false` a machine there reaches nothing outside")
    if not public and not subnet.way:
        return "has no default route: a machine there reaches AWS and a package index only by endpoints in the VPC"
    return ""


def _image(account: Account, want: CheckRequest) -> Iterator[Finding]:
    spec = account.settings.spec
    if want.nodes is None:
        wanted = {spec.image or images.DEEP_LEARNING: "hosts with GPUs", spec.image or images.UBUNTU: "hosts"}
    else:
        wanted = {images.wanted(account, Role.WORKER, offer): f"hosts such as {offer.instance_type}"
                  for offer in want.hosts}
    wanted.setdefault(spec.dispatcher_image or images.UBUNTU, "the dispatcher")
    for name, what in wanted.items():
        found = images.image(account, want.region, name)
        yield Finding(f"{want.region}: {found.id} for {what}" + (f", by {name}" if name != found.id else ""))


def _door(account: Account, want: CheckRequest) -> Iterator[Finding]:
    """Check whether the laptop reaches port 22, by a connection to an existing dispatcher."""
    spec = account.settings.spec
    if network.site(account, want.region).groups:
        yield Finding(f"{want.region}: the groups under `aws.networks` decide who reaches port 22 of the dispatcher")
    elif not spec.ssh_from:
        try:
            yield Finding(f"you come from {ssh_ingress.own_address(public=spec.public_addresses)}; only that is let in")
        except NeedsPerson as error:  # blocks a fleet; without a fleet file it only warns
            yield Finding(str(error), "warning" if want.nodes is None else "blocker", error.hint)
    doors = [h.ssh for h in describe.hosts(account, "") if (not want.fleet or names.is_life(want.fleet, h.fleet))
             and h.role is Role.DISPATCHER and h.ssh is not None
             and h.state is CloudState.RUNNING and h.offer.region == want.region]
    if not doors:
        yield Finding(f"not tried: whether SSH gets out of this network; no dispatcher of yours is up in {want.region}")
    for way in doors[:1]:
        try:
            socket.create_connection((way.address, way.port), REACH_S).close()
            yield Finding(f"{way.address} port {way.port}, a dispatcher of yours, answers")
        except OSError as error:
            yield Finding(f"{way.address} port {way.port}, a dispatcher of yours, does not answer: {error}",
                          "warning", "`spotfleet up FILE` lets in the address that you have now; if that is not it, a "
                          "firewall here lets no SSH out")


def _efa(account: Account, want: CheckRequest) -> Iterator[Finding]:
    if account.settings.placement != "cluster" or not want.hosts:
        return
    kinds = catalog.facts(account, want.region, {o.instance_type for o in want.hosts})
    if able := sorted(name for name, facts in kinds.items() if facts.efa_cards):
        yield Finding(f"{want.region}: {', '.join(able)} with EFA")
    if unable := sorted(name for name, facts in kinds.items() if not facts.efa_cards):
        yield Finding(f"`placement: cluster`, but {', '.join(unable)} has no EFA: workers there speak over TCP",
                      "warning", "name a type with EFA (g6.8xlarge and larger, p4d, p5 ...), if traffic matters")


REGIONAL: dict[str, Callable[[Account, CheckRequest], Iterable[Finding]]] = {
    "region": _enabled, "pools": _pools,
    "vCPU quota": lambda account, want: quotas.findings(
        account, want.region, tuple(o for o in want.hosts if not o.reserved), want.dispatcher, want.nodes, want.fleet),
    "network": _network, "image": _image, "disk key": lambda account, want: disk_key.findings(account, want.region),
    "SSH": _door, "EFA": _efa,
}  # fmt: skip
