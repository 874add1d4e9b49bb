"""Tags and names of our resources in an account. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from spotfleet.names import any_life as any_life
from spotfleet.names import is_life as is_life
from spotfleet.names import life as life

FLEET = "spotfleet"  # on every resource of a fleet: its name in the cloud (`FleetRecord.cloud_name`)
HOST = "spotfleet-host"  # on instances, volumes, interfaces, spot requests, templates of one host: its request_id
ROLE = "spotfleet-role"  # "dispatcher" or "worker"
POOL = "spotfleet-pool"  # on instances: the first choice of pool, with its price: see `listing`
SINCE = "spotfleet-since"  # Unix seconds; on resources whose age the cloud does not give: groups, placement groups
TAKEN = "spotfleet-taken"  # on instances that `chaos` ended: they count as taken, and are paid
MEMBER = "spotfleet-member"  # on instances launched together: the place in the HOST tag, or BY_INDEX
BY_INDEX = "index"  # the place is the launch index
REGION = "spotfleet-region"  # on roles and profiles, which have none: fleets of one name may be in several
BLOCK = "block-"  # before a capacity block's id in `Offer.reserved`: its price is no on-demand price
DISPATCHER_PORT = 7443  # where every dispatcher listens
METADATA_URL = "http://169.254.169.254"
PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov", "us-iso-": "aws-iso", "us-isob-": "aws-iso-b",
              "us-isof-": "aws-iso-f", "eu-isoe-": "aws-iso-e", "eusc-": "aws-eusc"}  # as in botocore's partitions.json
IAM_PATH = "/spotfleet/"  # path of all our roles and instance profiles: IAM lists by path, not by tag


def partition(region: str) -> str:
    """Return the partition of a region, as ARNs there begin with it; the usual one for ""."""
    return next((p for begin, p in PARTITIONS.items() if region.startswith(begin)), "aws")


def group(fleet: str) -> str:
    """Return the security group of all machines of the fleet: they reach each other; no other machine does."""
    return f"spotfleet-{fleet}"


def door(fleet: str) -> str:
    """Return the security group ("door") of the dispatcher: SSH from the laptop's address. No other machine has it."""
    return f"spotfleet-{fleet}-door"


def placement_group(fleet: str, zone: str) -> str:
    return f"spotfleet-{fleet}-{zone}"


def role(fleet: str, which: str, region: str) -> str:
    """Return the IAM name of role, inline policy and profile; `which`: "dispatcher" or "host". At most 64 letters."""
    text = f"spotfleet-{fleet}-{region}-{which}"
    if len(text) <= 64:
        return text
    return f"spotfleet-{'?' * 24 if '?' in fleet else hashlib.sha256(text.encode()).hexdigest()[:24]}-{which}"


def queue(fleet: str) -> str:
    """Return the name of SQS queue and EventBridge rule."""
    return f"spotfleet-{fleet}"


def template(request_id: str) -> str:
    """Return the name of one host's launch template, which holds its user data for every attempt to launch it."""
    return f"spotfleet-{request_id}"


def together(request_ids: Sequence[str]) -> str:
    """Return the HOST tag of machines launched by one call: "F-3" for one, "F- 3 4 5" for several."""
    if len(request_ids) == 1:
        return request_ids[0]
    begin = "".join(request_ids[0].rpartition("-")[:2])
    assert all(i.startswith(begin) for i in request_ids), f"{request_ids} are not of one fleet"
    return " ".join([begin, *(i.removeprefix(begin) for i in request_ids)])


def members(host: str) -> list[str]:
    """Return the request_ids in a HOST tag, by place."""
    begin, *ends = host.split(" ")
    return [begin + end for end in ends] or [host]


def token(secret: str, host: str, attempt: int = 0) -> str:
    """Return the client token of a launch: at most 64 ASCII characters.

    `host` is its HOST tag. `secret` is the fleet's: EC2 remembers a token for a day after the end of its launch, and a
    fleet may come up again before.
    """
    return hashlib.sha256(f"spotfleet {secret} {host} {attempt}".encode()).hexdigest()


def since(tags: Mapping[str, str]) -> float:
    """Return the creation time in the tags; 0 if unknown."""
    text = tags.get(SINCE, "")
    return float(text) if text.isdigit() else 0.0
