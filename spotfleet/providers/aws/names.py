"""What we call things in an account: tags and names, the same for whoever looks. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

FLEET = "spotfleet"  # the tag on everything of a fleet: its name in the cloud (`Record.cloud_name`)
HOST = "spotfleet-host"  # on instances, volumes, interfaces, spot requests, templates of one host: its request_id
ROLE = "spotfleet-role"  # "dispatcher" or "worker"
POOL = "spotfleet-pool"  # on instances: the pool that was asked for first, with its price: see `listing`
SINCE = "spotfleet-since"  # Unix seconds; on things whose age the cloud does not tell: groups, placement groups
TAKEN = "spotfleet-taken"  # on instances that `chaos` ended: they count as taken by the cloud
REGION = "spotfleet-region"  # on roles and profiles, which have none: fleets of one name may be in several
RESERVED = "spotfleet"  # a user's tag may not begin like this, nor with "aws:"
DISPATCHER_PORT = 7443  # where every dispatcher listens
METADATA_URL = "http://169.254.169.254"
IAM_PATH = "/spotfleet/"  # of every role and instance profile of ours: IAM lists by path, not by tag


def group(fleet: str) -> str:
    """Security group of all machines of the fleet: they reach each other, and nobody else reaches them."""
    return f"spotfleet-{fleet}"


def door(fleet: str) -> str:
    """Security group of the dispatcher: SSH from where the laptop is."""
    return f"spotfleet-{fleet}-door"


def placement_group(fleet: str, zone: str) -> str:
    return f"spotfleet-{fleet}-{zone}"


def role(fleet: str, which: str, region: str) -> str:
    """IAM role, its inline policy and its instance profile; `which`: "dispatcher" or "host". At most 64 characters."""
    text = f"spotfleet-{fleet}-{region}-{which}"
    if len(text) <= 64:
        return text
    return f"spotfleet-{'?' * 24 if '?' in fleet else hashlib.sha256(text.encode()).hexdigest()[:24]}-{which}"


def queue(fleet: str) -> str:
    """SQS queue and EventBridge rule."""
    return f"spotfleet-{fleet}"


def template(request_id: str) -> str:
    """Launch template of one host: holds what the machine is told, whoever asks for it and however often."""
    return f"spotfleet-{request_id}"


def life(fleet: str, digits: str) -> str:
    """The name in the cloud of one life of a fleet, by four hexadecimal digits of its own: what EC2 remembers of an
    earlier one, and a fleet of that name in another region, are none of it."""
    return f"{fleet}-{digits}"


def any_life(fleet: str) -> str:
    """For whoever knows `?`: IAM in StringLike and in ARNs, EC2 in filters."""
    return life(fleet, "????")


def is_life(fleet: str, cloud_name: str) -> bool:
    return cloud_name == fleet or re.fullmatch(life(re.escape(fleet), "[0-9a-f]{4}"), cloud_name) is not None


def together(request_ids: Sequence[str]) -> str:
    """The HOST tag of machines that are launched by one call: "F-3" for one, "F- 3 4 5" for several."""
    if len(request_ids) == 1:
        return request_ids[0]
    begin = "".join(request_ids[0].rpartition("-")[:2])
    assert all(i.startswith(begin) for i in request_ids), f"{request_ids} are not of one fleet"
    return " ".join([begin, *(i.removeprefix(begin) for i in request_ids)])


def members(host: str) -> list[str]:
    """The request_ids behind a HOST tag, by launch index."""
    begin, *ends = host.split(" ")
    return [begin + end for end in ends] or [host]


def token(secret: str, host: str, attempt: int = 0) -> str:
    """Client token of a launch: at most 64 ASCII characters. `host`: its HOST tag; `secret`: the fleet's, for EC2
    remembers a token for a day after the end of what was launched by it, and a fleet may come up again before."""
    return hashlib.sha256(f"spotfleet {secret} {host} {attempt}".encode()).hexdigest()


def since(tags: Mapping[str, str]) -> float:
    """When a thing was made, by its tag; 0 if nobody knows."""
    text = tags.get(SINCE, "")
    return float(text) if text.isdigit() else 0.0
