"""Tags of a fleet's machines and resources, tokens of launches, names of hosts that are launched together. Pure.

Each cloud stores the tags in its own way: tags of EC2 and Azure, labels or metadata of Google Cloud. Keys use only the
letters that all of them take: a-z and "-".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from spotfleet.model import Role
from spotfleet.plugins import BASE_TAG

FLEET = "spotfleet"  # on every resource of a fleet: its name in the cloud (`FleetRecord.cloud_name`)
HOST = "spotfleet-host"  # on machines, and on volumes, interfaces, requests of one host: its request_id
ROLE = "spotfleet-role"  # "dispatcher" or "worker"
POOL = "spotfleet-pool"  # on machines: the first choice of pool, with its price: see `listing`
BASE = BASE_TAG
MANAGER = "spotfleet-managed-by"  # on resources of the base itself: MANAGED_BY; those have no tag FLEET
MANAGED_BY = "terraform"
SINCE = "spotfleet-since"  # Unix seconds; on resources whose age the cloud does not give
TAKEN = "spotfleet-taken"  # on machines that `chaos` ended: they count as taken, and are paid
MEMBER = "spotfleet-member"  # on machines launched together: the place in the HOST tag, or BY_INDEX
BY_INDEX = "index"  # the place is the cloud's own number of the machine in its launch
TAG_LENGTH = 256  # maximum of the HOST tag; EC2's
DISPATCHER_PORT = 7443  # where every dispatcher listens


def together(request_ids: Sequence[str]) -> str:
    """Return the HOST tag of machines launched by one call: "F-3" for one, "F- 3 4 5" for several.

    Numbers that follow each other are written as "3..66" where the tag would be too long otherwise.
    """
    if len(request_ids) == 1:
        return request_ids[0]
    begin = "".join(request_ids[0].rpartition("-")[:2])
    assert all(i.startswith(begin) for i in request_ids), f"{request_ids} are not of one fleet"
    ends = [i.removeprefix(begin) for i in request_ids]
    text = " ".join([begin, *ends])
    if len(text) <= TAG_LENGTH or not all(e.isdigit() and str(int(e)) == e for e in ends):
        return text
    runs: list[list[int]] = []
    for number in map(int, ends):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join([begin, *(f"{a}..{b}" if a < b else str(a) for a, b in runs)])


def members(host: str) -> list[str]:
    """Return the request_ids in a HOST tag, by place."""
    begin, *ends = host.split(" ")
    return [begin + one for end in ends for one in _run(end)] or [host]


def _run(end: str) -> list[str]:
    first, between, last = end.partition("..")
    return [str(n) for n in range(int(first), int(last) + 1)] if between else [end]


def token(secret: str, host: str, attempt: int = 0) -> str:
    """Return the client token of a launch: 64 hexadecimal digits.

    `host` is its HOST tag. `secret` is the fleet's: a cloud remembers a token for a day or more, and a fleet of the
    same name may come up again before.
    """
    return hashlib.sha256(f"spotfleet {secret} {host} {attempt}".encode()).hexdigest()


def token_uuid(secret: str, host: str, attempt: int = 0) -> str:
    """Return the token in the form that Google Cloud and Azure require."""
    digits = token(secret, host, attempt)
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-8{digits[17:20]}-{digits[20:32]}"


def since(tags: Mapping[str, str]) -> float:
    """Return the creation time in the tags; 0 if unknown."""
    text = tags.get(SINCE, "")
    return float(text) if text.isdigit() else 0.0


def role_of(tags: Mapping[str, str]) -> Role:
    return Role.DISPATCHER if tags.get(ROLE) == Role.DISPATCHER.value else Role.WORKER
