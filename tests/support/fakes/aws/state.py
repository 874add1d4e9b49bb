"""What is in a region beside what moto keeps: instances, spot requests, fleets, placement groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.support.fakes.aws.catalog import ACCOUNT, TYPES
from tests.support.fakes.kit import machines as kit
from tests.support.fakes.kit.machines import Seen as Seen

CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}
LIVING = ("pending", "running", "stopping", "stopped", "shutting-down")


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def when(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC).replace(tzinfo=None, microsecond=0)


@dataclass(frozen=True)
class Standing:
    """A spot request's state from some time on."""

    at: float
    state: str
    code: str
    message: str = ""
    instance_id: str = ""


class MotoState:
    def __init__(self, name: str) -> None:
        self.name, self.code = name, CODES[name]


class Machine(kit.Machine):
    """An instance. Has what moto's interfaces, volumes and addresses ask of theirs."""

    source_dest_check = True

    def __init__(self, id: str, backend: Any, order: Order, at: float) -> None:
        super().__init__(id, at)
        self.ec2_backend, self.order = backend, order
        self.owner_id = ACCOUNT
        self.nics: dict[int, Any] = {}
        self.block_device_mapping: dict[str, Any] = {}
        self.had: tuple[dict[int, Any], dict[str, Any]] = {}, {}  # interfaces and devices, at its end
        self.request: SpotRequest | None = None
        self.fleet_id, self.reservation_id, self.launch_index = "", "", 0
        self.rebalance_at: float | None = None
        self.events: list[dict[str, Any]] = []
        self.deaf = False  # its metadata does not answer
        self.tokens: dict[str, float] = {}  # tokens of the metadata, with their ends
        self.password = ""  # makes credentials of its role
        self.data_lost = False

    # ---- what moto asks

    @property
    def _state(self) -> MotoState:
        return MotoState(self.state)

    @property
    def security_groups(self) -> list[Any]:
        return self.order.groups

    def applies(self, filters: object) -> bool:
        return True

    def get_tags(self) -> list[dict[str, str]]:
        return [{"key": k, "value": v} for k, v in self.tags.items()]

    # ---- what the fake asks

    @property
    def tags(self) -> dict[str, str]:
        return dict(self.ec2_backend.tags.get(self.id, {}))

    @property
    def market(self) -> str:
        return self.order.market

    @property
    def pool(self) -> tuple[str, str, str]:
        return self.order.zone, self.order.type, self.order.reservation or self.order.market

    @property
    def vcpus(self) -> int:
        return TYPES[self.order.type].vcpus

    def public_ip(self) -> str:
        return (self.nics[0].public_ip or "") if 0 in self.nics else ""


@dataclass
class Order:
    """What an instance is to be: launch template and parameters together, checked."""

    type: str
    image: str
    zone: str
    subnet: Any
    groups: list[Any]
    market: str
    user_data: str = ""  # base64
    key_name: str = ""
    profile: Any = None
    interfaces: list[dict[str, Any]] = field(default_factory=list)
    volumes: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    shutdown: str = "stop"
    placement_group: str = ""
    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    spot: dict[str, Any] = field(default_factory=dict)
    template: tuple[str, str] | None = None  # its id and version
    ebs_optimized: bool = False
    monitoring: bool = False
    protected: bool = False  # DisableApiTermination
    client_token: str = ""
    principal: str = ""
    reservation: str = ""  # id of the capacity reservation in which it runs
    targeted: bool = False  # it names that
    block: bool = False  # which is a capacity block

    @property
    def persistent(self) -> bool:
        return self.spot.get("SpotInstanceType") == "persistent"

    @property
    def behavior(self) -> str:
        return self.spot.get("InstanceInterruptionBehavior", "terminate")


@dataclass
class SpotRequest:
    id: str
    order: Order
    born: float
    price: float  # at most
    valid_until: float | None = None
    history: list[Standing] = field(default_factory=list)
    looks_at: float = 0.0  # when EC2 looks for room again
    fleet_id: str = ""

    @property
    def now(self) -> Standing:
        return self.history[-1]

    @property
    def state(self) -> str:
        return self.now.state

    @property
    def instance_id(self) -> str:
        return self.now.instance_id

    @property
    def persistent(self) -> bool:
        return self.order.persistent

    @property
    def live(self) -> bool:
        return self.state in ("open", "active", "disabled")

    def seen(self, at: float) -> Standing:
        return next((s for s in reversed(self.history) if s.at <= at), self.history[0])

    def become(self, at: float, state: str, code: str, message: str = "", instance_id: str | None = None) -> None:
        kept = self.instance_id if instance_id is None and self.history else instance_id or ""
        self.history.append(Standing(at, state, code, message or code.replace("-", " "), kept))


@dataclass
class Fleet:
    id: str
    born: float
    parameters: dict[str, Any]
    instances: list[dict[str, Any]]  # as CreateFleet answers
    errors: list[dict[str, Any]]
    ids: list[str] = field(default_factory=list)
    state: str = "active"


@dataclass
class PlacementGroup:
    id: str
    name: str
    strategy: str
    born: float


@dataclass
class RegionState:
    name: str
    machines: dict[str, Machine] = field(default_factory=dict)
    requests: dict[str, SpotRequest] = field(default_factory=dict)
    fleets: dict[str, Fleet] = field(default_factory=dict)
    placement_groups: dict[str, PlacementGroup] = field(default_factory=dict)
    tokens: dict[tuple[str, str], tuple[str, Any]] = field(
        default_factory=dict
    )  # (action, token) -> fingerprint, what came of it
    next_ip: dict[str, int] = field(default_factory=dict)  # subnet -> number of the address tried next
    default_key: str = ""  # ARN of the customer's key that encrypts disks by default; "": AWS's own
    usual: set[str] = field(default_factory=set)  # ids of what every account has
    ended: dict[str, float] = field(default_factory=dict)  # when instances ended that are listed no more
