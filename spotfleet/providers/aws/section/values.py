"""Values of section `aws`. Each function returns the checked value or raises ValueError("expected ...")."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d+")
ZONE = re.compile(rf"({REGION.pattern})(-[a-z]+-\d+)?[a-z]")  # including local and wavelength zones
IMAGE = re.compile(r"spotfleet|ami-[0-9a-f]{8,17}|/[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)+")
KEY = re.compile(r"arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:(key|alias)/[\w/-]+|alias/[\w/-]+|(mrk-)?[0-9a-f-]{32,36}")
POLICY = re.compile(r"arn:aws[a-z-]*:iam::(\d{12}|aws):policy/[!-~]{1,576}")
PROFILE = re.compile(r"[\w+=,.@-]{1,128}")
DISK_GIB = (8, 16_384)
TAGS = 40  # EC2 allows 50, some of which are ours
TAG_NAME = re.compile(r"[A-Za-z0-9_+=.:@-]{1,128}")  # what both IAM and the metadata server take; EC2 takes more
TAG_VALUE = re.compile(r"[\w +=.:/@-]{0,256}")
RESERVED = ("aws:", "spotfleet")


def _wrong(expected: str, value: Any, more: str = "") -> ValueError:
    return ValueError(f"expected {expected}, got {value!r}{more}")


def region(value: Any) -> str:
    expected = "a region such as us-east-1"
    if not isinstance(value, str) or not REGION.fullmatch(value):
        zone = ZONE.fullmatch(value) if isinstance(value, str) else None
        raise _wrong(expected, value, f"; that is a zone of {zone[1]}; zones stand under `resources`" if zone else "")
    return value


def region_of(zone: str) -> str:
    """Return the region of a zone; "" if its name holds none."""
    found = ZONE.fullmatch(zone)
    return found[1] if found else ""


def regions(value: Any) -> Any:
    """Check a list of regions, or a single one."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise _wrong("a list of regions such as [us-east-1, us-west-2]", value)
    found = tuple(map(region, value))
    if twice := next((r for r in found if found.count(r) > 1), ""):
        raise ValueError(f"{twice} is here twice")
    return found


def networks(value: Any) -> Any:
    if not isinstance(value, dict):
        raise _wrong("REGION: {vpc: ..., subnets: [...], security_groups: [...]}", value)
    for name in value:
        region(name)
    return value


def _id(kind: str, value: Any, what: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(rf"{kind}-[0-9a-f]{{8,17}}", value):
        raise _wrong(f"{what} such as {kind}-0a1b2c3d4e5f67890", value)
    return value


def _ids(kind: str, value: Any, what: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise _wrong(f"a list of them such as [{kind}-0a1b2c3d4e5f67890]", value)
    return tuple(_id(kind, one, what) for one in value)


def vpc(value: Any) -> Any:
    return _id("vpc", value, "the id of a VPC")


def subnets(value: Any) -> Any:
    return _ids("subnet", value, "the id of a subnet")


def security_groups(value: Any) -> Any:
    return _ids("sg", value, "the id of a security group")


def networks_from(value: Any) -> Any:
    """Check a list of CIDRs, or a single one; an address is a network of its own."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise _wrong("a list of networks such as [203.0.113.0/24]", value)
    return tuple(map(_cidr, value))


def _cidr(value: Any) -> str:
    expected = "an address or a network such as 203.0.113.7 or 203.0.113.0/24"
    try:
        found = ipaddress.ip_network(value if isinstance(value, str) else "")
    except ValueError as error:
        more = str(error) if isinstance(value, str) and "host bits" in str(error) else ""
        raise _wrong(expected, value, f"; {more}" if more else "") from None
    if found.prefixlen == 0:
        raise _wrong(expected, value, "; that is the whole world, to which nothing of a fleet is open: leave it out, "
                                      "and `up` allows SSH from the address that you have then")
    return str(found)


def image(value: Any) -> Any:
    if not isinstance(value, str) or not IMAGE.fullmatch(value):
        raise _wrong("spotfleet, an image such as ami-0a1b2c3d4e5f67890, or an SSM parameter such as "
                     "/aws/service/deeplearning/ami/.../ami-id", value)
    return value


def disk(value: Any) -> Any:
    least, most = DISK_GIB
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(f"whole GiB, {least} to {most}", value)
    return value


def kms_key(value: Any) -> Any:
    if not isinstance(value, str) or not KEY.fullmatch(value):
        raise _wrong("a key of KMS: its id, its ARN or alias/NAME", value)
    return value


def key_pair(value: Any) -> Any:
    if not isinstance(value, str) or not re.fullmatch(r"[\x20-\x7e]{1,255}", value) or value != value.strip():
        raise _wrong("the name of an EC2 key pair", value)
    return value


def instance_profile(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("arn:"):
        raise _wrong("the name of an instance profile", value, f"; write {value.rpartition('/')[2]}")
    if not isinstance(value, str) or not PROFILE.fullmatch(value):
        raise _wrong("the name of an instance profile", value)
    return value


def queue(value: Any) -> Any:
    """Check the name of a queue; "" is none, for a fleet that is not to read its base's."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_-]{0,80}", value):
        raise _wrong("the name of an SQS queue", value)
    return value


def policy(value: Any) -> Any:
    if not isinstance(value, str) or not POLICY.fullmatch(value):
        raise _wrong("the ARN of an IAM policy such as arn:aws:iam::123456789012:policy/boundary", value)
    return value


def reservations(value: Any) -> Any:
    """Check a list of capacity reservations, or a single one."""
    found = _ids("cr", value, "the id of a capacity reservation")
    if twice := next((r for r in found if found.count(r) > 1), ""):
        raise ValueError(f"{twice} is here twice")
    return found


def wrong_tags(tags: dict[str, str]) -> list[tuple[str, str]]:
    """Return (name, problem) for tags that EC2 would reject or that are reserved; "" stands for all tags."""
    found = [("", f"are {len(tags)}; an instance takes {TAGS} beside ours")] if len(tags) > TAGS else []
    for name, value in tags.items():
        if prefix := next((p for p in RESERVED if name.lower().startswith(p)), ""):
            found.append((name, f"begins with '{prefix}', which is not yours to use; choose another name"))
        elif not TAG_NAME.fullmatch(name) or name in (".", "..", "_index"):
            found.append((name, "is no name of a tag that instances can read: 1 to 128 letters, digits and any of "
                                "+ - = . _ : @"))
        elif not TAG_VALUE.fullmatch(value):
            found.append((name, "expected at most 256 letters, digits, blanks and any of + - = . _ : / @"))
    return found
