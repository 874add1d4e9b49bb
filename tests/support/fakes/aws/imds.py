"""What an instance hears at 169.254.169.254."""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING, Any

from tests.support.fakes.aws import catalog
from tests.support.fakes.aws.birth import user_data
from tests.support.fakes.aws.instances import metadata_options
from tests.support.fakes.aws.state import Machine, iso

if TYPE_CHECKING:
    from tests.support.fakes.aws.cloud import AwsCloud

Answer = tuple[int, bytes]
NOTHING: Answer = (404, b"<title>404 - Not Found</title>")
TOKEN, TTL = "x-aws-ec2-metadata-token", "x-aws-ec2-metadata-token-ttl-seconds"


def answer(cloud: AwsCloud, machine: Machine, path: str, method: str, headers: dict[str, str], hops: int) -> Answer:
    """Status and body; status 0: nothing comes back. `hops`: 1 from the machine itself, 2 from a container on it."""
    options = metadata_options(machine)
    if machine.deaf or options["HttpEndpoint"] == "disabled":
        return (0, b"") if machine.deaf else (403, b"")
    given = {k.lower(): v for k, v in headers.items()}
    path = path.partition("?")[0].strip("/")
    if path == "latest/api/token":
        return _token(cloud, machine, method, given, hops > options["HttpPutResponseHopLimit"])
    if method not in ("GET", "HEAD"):
        return 405, b""
    token = given.get(TOKEN)
    if token is None and options["HttpTokens"] == "required":
        return 401, b""
    if token is not None and machine.tokens.get(token, 0.0) < cloud.now():
        return 401, b""
    version, _, rest = path.partition("/")
    if version != "latest" and not re.fullmatch(r"20\d\d-\d\d-\d\d", version):
        return NOTHING
    if rest == "user-data":
        data = user_data(machine.order)
        return (200, data) if data else NOTHING
    if rest == "dynamic" or rest.startswith("dynamic/"):
        document = json.dumps(_document(cloud, machine), indent=1)
        return _walk({"instance-identity": {"document": document}}, rest.removeprefix("dynamic").strip("/"))
    if rest == "meta-data" or rest.startswith("meta-data/"):
        return _walk(tree(cloud, machine, options), rest.removeprefix("meta-data").strip("/"))
    return (200, b"dynamic\nmeta-data\nuser-data") if not rest else NOTHING


def _token(cloud: AwsCloud, machine: Machine, method: str, given: dict[str, str], too_far: bool) -> Answer:
    if method != "PUT":
        return 405, b""
    if "x-forwarded-for" in given:
        return 403, b""
    if too_far:
        return 0, b""
    try:
        ttl = int(given.get(TTL, ""))
    except ValueError:
        return 400, b""
    if not 1 <= ttl <= 21600:
        return 400, b""
    token = secrets.token_urlsafe(40)
    machine.tokens[token] = cloud.now() + ttl
    return 200, token.encode()


def _walk(node: Any, path: str) -> Answer:
    for part in path.split("/") if path else []:
        if not isinstance(node, dict) or part not in node:
            return NOTHING
        node = node[part]
    if isinstance(node, dict):
        return 200, "\n".join(k + "/" if isinstance(v, dict) else k for k, v in node.items()).encode()
    return 200, str(node).encode()


def _document(cloud: AwsCloud, machine: Machine) -> dict[str, Any]:
    region = catalog.region_of(machine.order.zone)
    return {
        "accountId": catalog.ACCOUNT,
        "architecture": catalog.TYPES[machine.order.type].architecture,
        "availabilityZone": machine.order.zone,
        "imageId": machine.order.image,
        "instanceId": machine.id,
        "instanceType": machine.order.type,
        "pendingTime": iso(machine.launched),
        "privateIp": machine.nics[0].private_ip_address if machine.nics else "",
        "region": region,
        "version": "2017-09-30",
    }


def tree(cloud: AwsCloud, machine: Machine, options: dict[str, Any]) -> dict[str, Any]:
    """Below latest/meta-data: folders are dicts."""
    order, region = machine.order, catalog.region_of(machine.order.zone)
    main = machine.nics.get(0)
    address = main.private_ip_address if main else ""
    name = f"ip-{address.replace('.', '-')}." + (
        "ec2.internal" if region == "us-east-1" else f"{region}.compute.internal"
    )
    found: dict[str, Any] = {
        "ami-id": order.image,
        "ami-launch-index": machine.launch_index,
        "hostname": name,
        "local-hostname": name,
        "instance-action": "none",
        "instance-id": machine.id,
        "instance-type": order.type,
        "local-ipv4": address,
        "instance-life-cycle": "spot" if order.market == "spot" else "on-demand",
        "reservation-id": machine.reservation_id,
        "placement": {
            "availability-zone": order.zone,
            "availability-zone-id": catalog.zone_id(order.zone),
            "region": region,
            **({"group-name": order.placement_group} if order.placement_group else {}),
        },
        "services": {"domain": "amazonaws.com", "partition": "aws"},
        "events": {"maintenance": {"scheduled": json.dumps(_maintenance(machine)), "history": "[]"}},
        "security-groups": "\n".join(g.name for g in order.groups),
    }
    if main is not None:
        found["mac"] = main.mac_address
        found["network"] = {"interfaces": {"macs": {e.mac_address: _interface(e) for e in machine.nics.values()}}}
    if machine.public_ip():
        found["public-ipv4"] = machine.public_ip()
    if options["InstanceMetadataTags"] == "enabled":
        found["tags"] = {"instance": dict(machine.tags)}
    if order.key_name:
        key = machine.ec2_backend.key_pairs.get(order.key_name)
        found["public-keys"] = {"0": {"openssh-key": key.public_key if key else ""}}
    if machine.notice:
        action, at = machine.notice
        found["spot"] = {
            "instance-action": json.dumps({"action": action, "time": iso(at)}),
            "termination-time": iso(at),
        }
    if machine.rebalance_at is not None:
        found["events"]["recommendations"] = {"rebalance": json.dumps({"noticeTime": iso(machine.rebalance_at)})}
    if order.profile:
        found["iam"] = _iam(cloud, machine)
    return found


def _interface(eni: Any) -> dict[str, Any]:
    return {
        "device-number": eni.device_index,
        "network-card": eni.card,
        "interface-id": eni.id,
        "local-ipv4s": eni.private_ip_address,
        "mac": eni.mac_address,
        "owner-id": catalog.ACCOUNT,
        "subnet-id": eni.subnet.id,
        "subnet-ipv4-cidr-block": eni.subnet.cidr_block,
        "vpc-id": eni.subnet.vpc_id,
        "security-group-ids": "\n".join(g.id for g in eni._group_set),
        "vpc-ipv4-cidr-block": eni.ec2_backend.get_vpc(eni.subnet.vpc_id).cidr_block,
        **({"public-ipv4s": eni.public_ip} if eni.public_ip else {}),
    }


def _maintenance(machine: Machine) -> list[dict[str, str]]:
    from email.utils import formatdate

    def words(at: float) -> str:  # 21 Jan 2019 09:00:43 GMT
        return formatdate(at, usegmt=True).partition(", ")[2]

    return [
        {
            "NotBefore": words(e["at"]),
            "NotAfter": words(e["at"] + 7200),
            "Code": e["Code"],
            "Description": e["Description"],
            "EventId": e["EventId"],
            "State": e["State"],
        }
        for e in machine.events
        if e["State"] == "active"
    ]


def _iam(cloud: AwsCloud, machine: Machine) -> dict[str, Any]:
    profile = machine.order.profile
    info = {
        "Code": "Success",
        "LastUpdated": iso(machine.launched),
        "InstanceProfileArn": profile.arn,
        "InstanceProfileId": profile.id,
    }
    if not profile.roles:
        return {"info": json.dumps(info)}
    role = profile.roles[0].name
    now, period = cloud.now(), cloud.credentials_s
    begin = machine.launched + (now - machine.launched) // period * period
    ends = begin + 1.2 * period  # there are new ones before these end
    key, made = cloud.rights.session(role, machine.id, ends)
    told = {
        "Code": "Success",
        "LastUpdated": iso(begin),
        "Type": "AWS-HMAC",
        "AccessKeyId": key,
        "SecretAccessKey": made.secret,
        "Token": made.token,
        "Expiration": iso(ends),
    }
    return {"info": json.dumps(info), "security-credentials": {role: json.dumps(told)}}
