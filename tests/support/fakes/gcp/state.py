"""What the cloud remembers: instances, operations, and all other resources as their wire form.

An instance's life is the kit's; Compute Engine shows it under its own names:

    pending: PROVISIONING, STAGING     stopping, shutting-down: STOPPING     terminated: it is gone
    running: RUNNING                   stopped: TERMINATED
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.support.fakes.gcp import catalog
from tests.support.fakes.gcp.errors import LateError
from tests.support.fakes.kit.machines import Machine
from tests.support.fakes.kit.market import Pool

BASE = "https://www.googleapis.com/compute/v1/"
STATUS = {"running": "RUNNING", "stopping": "STOPPING", "shutting-down": "STOPPING", "stopped": "TERMINATED",
          "terminated": "STOPPING"}
SPOT, ON_DEMAND = "spot", "on-demand"
_numbers = itertools.count(4_000_000_000_000_000_001)


def number() -> str:
    return str(next(_numbers))


def link(path: str) -> str:
    """The self link of "projects/..."."""
    return BASE + path


def relative(text: str) -> str:
    """The path behind the version of a link, "projects/..."; a path stays as it is."""
    return text.partition("/v1/")[2] if "/v1/" in text else text.lstrip("/")


def last(text: str) -> str:
    return text.rpartition("/")[2]


def stamp(at: float) -> str:
    """As Compute Engine writes times: RFC 3339, in Pacific time, which is eight hours behind here."""
    shown = datetime.fromtimestamp(at - 8 * 3600, UTC)
    return shown.strftime("%Y-%m-%dT%H:%M:%S.") + f"{shown.microsecond // 1000:03d}-08:00"


def fingerprint(value: object) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(repr(value).encode()).digest()[:8]).decode()


class Instance(Machine):
    """A VM. `body` is what does not change with its state."""

    def __init__(self, zone: str, body: dict[str, Any], at: float) -> None:
        super().__init__(number(), at)
        self.zone, self.body = zone, body
        self.name: str = body["name"]
        self.kind = catalog.TYPES[last(body["machineType"])]
        self.preempted = False
        self.maintenance: tuple[str, float] | None = None  # event, and when it happens
        self.stopped_at: float | None = None
        self.acpi_at: float | None = None  # when the guest got the signal to power off
        self.deaf = False  # its metadata server does not answer
        self.serial = ""
        self.guest: dict[str, str] = {}  # guest attributes
        self.user = ""

    @property
    def region(self) -> str:
        return catalog.ZONES[self.zone]

    @property
    def scheduling(self) -> dict[str, Any]:
        return self.body["scheduling"]

    @property
    def market(self) -> str:
        return SPOT if self.scheduling["provisioningModel"] == "SPOT" else ON_DEMAND

    @property
    def pool(self) -> Pool:
        return self.zone, self.kind.name, self.market

    @property
    def gpus(self) -> tuple[str, int]:
        """Accelerator and number; ("", 0) without."""
        for found in self.body.get("guestAccelerators", ()):
            return last(found["acceleratorType"]), found["acceleratorCount"]
        return "", 0

    @property
    def labels(self) -> dict[str, str]:
        return self.body.get("labels", {})

    @property
    def metadata(self) -> dict[str, str]:
        return {i["key"]: i.get("value", "") for i in self.body.get("metadata", {}).get("items", ())}

    @property
    def notice_s(self) -> float:
        """What it asked for with `preemptionNoticeDuration`."""
        return float(self.scheduling.get("preemptionNoticeDuration", {}).get("seconds", 0))

    @property
    def deletes(self) -> bool:
        return self.scheduling.get("instanceTerminationAction") == "DELETE"

    def network_ip(self) -> str:
        return self.body["networkInterfaces"][0]["networkIP"]

    def public_ip(self) -> str:
        for config in self.body["networkInterfaces"][0].get("accessConfigs", ()):
            return config.get("natIP", "")
        return ""

    def status(self, at: float, pending_s: float) -> str:
        seen = self.seen(at)
        if seen.name == "pending":
            return "PROVISIONING" if at - seen.at < pending_s / 2 else "STAGING"
        return STATUS[seen.name]


@dataclass
class Operation:
    """`scope` is "zones/Z", "regions/R" or "global"."""

    scope: str
    type: str
    target: str  # "projects/..."
    user: str
    at: float
    target_id: str = ""
    group: str = ""
    message: str = ""
    name: str = ""
    number: str = field(default_factory=number)
    done_at: float | None = None
    error: LateError | None = None
    bulk: dict[str, Any] | None = None  # perLocationStatus
    client_id: str = ""

    def __post_init__(self) -> None:
        parts = (f"{int(self.at * 1000)}", *(secrets.token_hex(n) for n in (7, 4, 4)))
        self.name = self.name or (("bulk-insert-" if self.type == "bulkInsert" else "operation-") + "-".join(parts))

    def finish(self, at: float, error: LateError | None = None) -> None:
        if self.done_at is None:
            self.done_at, self.error = at, error

    def shown(self, project: str, accepted: bool = False) -> dict[str, Any]:
        """`accepted`: as the answer to the request that caused it, which is not done yet."""
        done = self.done_at is not None and not accepted
        path = f"projects/{project}/{self.scope}/operations/{self.name}"
        found: dict[str, Any] = {
            "kind": "compute#operation", "id": self.number, "name": self.name, "operationType": self.type,
            "targetLink": link(self.target), "status": "DONE" if done else "RUNNING", "user": self.user,
            "progress": 100 if done else 0, "insertTime": stamp(self.at), "startTime": stamp(self.at),
            "selfLink": link(path)}
        if self.target_id:
            found["targetId"] = self.target_id
        if self.group:
            found["operationGroupId"] = self.group
        if self.message:
            found["statusMessage"] = self.message
        if self.client_id:
            found["clientOperationId"] = self.client_id
        kind, _, place = self.scope.partition("/")
        if place:
            found[kind.removesuffix("s")] = link(f"projects/{project}/{self.scope}")
        if self.bulk is not None:
            found["instancesBulkInsertOperationMetadata"] = {"perLocationStatus": self.bulk}
        if done and self.done_at is not None:
            found["endTime"] = stamp(self.done_at)
            if self.error:
                words = {400: "BAD REQUEST", 403: "FORBIDDEN", 404: "NOT FOUND", 503: "SERVICE UNAVAILABLE"}
                found |= {"error": {"errors": [self.error.shown()]}, "httpErrorStatusCode": self.error.status,
                          "httpErrorMessage": words.get(self.error.status, "CONFLICT")}
        return found


@dataclass(frozen=True)
class InstanceView:
    """An instance at one moment."""

    name: str
    id: str
    zone: str
    type: str
    market: str
    status: str
    state: str  # the kit's name
    labels: dict[str, str]
    metadata: dict[str, str] = field(repr=False)
    private_ip: str
    public_ip: str
    mac: str
    network: str
    tags: tuple[str, ...]
    image: str
    disk_gb: int
    service_account: str
    scopes: tuple[str, ...]
    accelerator: tuple[str, int]
    run: int
    preempted: bool


@dataclass(frozen=True)
class Thing:
    """A resource that exists."""

    kind: str
    place: str  # zone, region, or "global"
    name: str
    labels: dict[str, str]
