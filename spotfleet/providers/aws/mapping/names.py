"""Tags and names of our resources in an account. Pure."""

from __future__ import annotations

import hashlib

from spotfleet.names import any_life as any_life
from spotfleet.names import is_life as is_life
from spotfleet.names import life as life
from spotfleet.providers.kit.mapping.names import BASE as BASE
from spotfleet.providers.kit.mapping.names import BY_INDEX as BY_INDEX
from spotfleet.providers.kit.mapping.names import DISPATCHER_PORT as DISPATCHER_PORT
from spotfleet.providers.kit.mapping.names import FLEET as FLEET
from spotfleet.providers.kit.mapping.names import HOST as HOST
from spotfleet.providers.kit.mapping.names import MANAGER as MANAGER
from spotfleet.providers.kit.mapping.names import MEMBER as MEMBER
from spotfleet.providers.kit.mapping.names import POOL as POOL
from spotfleet.providers.kit.mapping.names import ROLE as ROLE
from spotfleet.providers.kit.mapping.names import SINCE as SINCE
from spotfleet.providers.kit.mapping.names import TAKEN as TAKEN
from spotfleet.providers.kit.mapping.names import members as members
from spotfleet.providers.kit.mapping.names import role_of as role_of
from spotfleet.providers.kit.mapping.names import since as since
from spotfleet.providers.kit.mapping.names import together as together
from spotfleet.providers.kit.mapping.names import token as token

REGION = "spotfleet-region"  # on roles and profiles, which have none: fleets of one name may be in several
BLOCK = "block-"  # before a capacity block's id in `Offer.reserved`: its price is no on-demand price
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


def boundary(base: str) -> str:
    """Return the IAM name of the policy that bounds the roles of a base."""
    return f"spotfleet-{base}-boundary"


def parameter(base: str) -> str:
    """Return the SSM parameter that holds the contract of a base."""
    return f"/spotfleet/{base}/base"


def template(request_id: str) -> str:
    """Return the name of one host's launch template, which holds its user data for every attempt to launch it."""
    return f"spotfleet-{request_id}"
