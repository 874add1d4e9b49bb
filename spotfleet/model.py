"""The nouns of spotfleet: frozen values without behaviour. Layer 0: imports nothing of ours.

Units end a name: `_s` seconds, `_micros_h` millionths of a US dollar per hour. Instants (`at`, `_at`) are
Unix seconds, UTC, as a float. A host is named by its `request_id`, chosen by us before the provider is called.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Market(Enum):
    SPOT = "spot"
    ON_DEMAND = "on-demand"


class Role(Enum):
    DISPATCHER = "dispatcher"
    WORKER = "worker"


class HostState(Enum):
    """A host in our ledger."""

    LAUNCHING = "launching"  # intended; its agent has not joined the dispatcher yet
    UP = "up"  # joined; can hold workers
    DRAINING = "draining"  # will leave: a notice, a surplus or the user's wish; gets no new worker
    STOPPED = "stopped"  # the cloud stopped it and may start it again; costs nothing here
    GONE = "gone"  # the provider lists it as ended


class CloudState(Enum):
    """A host as its provider lists it."""

    PENDING = "pending"
    RUNNING = "running"
    STOPPED = "stopped"
    TERMINATED = "terminated"  # listed for a while after the end, as EC2 does, so that its end time is known


class JobState(Enum):
    QUEUED = "queued"  # waits for hosts
    STARTING = "starting"  # has hosts; the first generation is not formed
    RUNNING = "running"
    RECOVERING = "recovering"  # below min or re-forming; state is held in memory or in a checkpoint
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True)
class Offer:
    """What a provider sells now. Hosts of one pool are refused and reclaimed together."""

    provider: str
    region: str
    zone: str
    instance_type: str
    market: Market
    slots: int  # workers it has room for: its GPUs, or 1 on a CPU host
    price_micros_h: int
    on_demand_micros_h: int  # the same type and region on demand, for savings
    accelerator: str = ""  # "V100", or "" on a CPU host

    @property
    def pool(self) -> str:
        return f"{self.provider}/{self.zone}/{self.instance_type}/{self.market.value}"


@dataclass(frozen=True)
class Run:
    """One billed stretch of a host's life, by the cloud's own clock."""

    started_at: float
    ended_at: float | None = None
    taken: bool = False  # ended by the cloud, not by us


@dataclass(frozen=True)
class CloudHost:
    """One line of a provider's listing: the truth about machines."""

    request_id: str
    provider_id: str
    fleet: str
    role: Role
    offer: Offer  # as sold, with the price at launch
    state: CloudState
    runs: tuple[Run, ...] = ()
    address: str = ""
    port: int = 0  # where a dispatcher listens; clouds with an address per host use a constant
    why: str = ""  # the cloud's reason for the last change of state


@dataclass(frozen=True)
class PricePoint:
    """The price of a pool from `at` on."""

    pool: str
    at: float
    micros_h: int


@dataclass(frozen=True)
class BillingRules:
    """How a provider turns runs into money; stamped into the ledger when the fleet is made.

    Seconds are counted from the start of a run, each begun second in full, at the price in force when it
    begins. A run shorter than `minimum_s` is billed as `minimum_s` at the last price of the run. A run that
    the cloud itself ends within `free_if_taken_within_s` costs nothing. Each host is rounded once, half up.
    """

    minimum_s: int = 60
    free_if_taken_within_s: int = 0


@dataclass(frozen=True)
class Notice:
    """The cloud's warning that it takes a host."""

    seconds_left: float
    action: str = "terminate"  # or "stop"
    kind: str = "interruption"  # "rebalance" is a hint only, never a drain; its seconds_left means nothing
    why: str = ""


@dataclass(frozen=True)
class Need:
    """What one host must be; the alternatives of a fleet form `FleetSpec.any_of`."""

    region: str = ""
    zone: str = ""
    instance_type: str = ""
    accelerator: str = ""
    accelerator_count: int = 0
    use_spot: bool = True
    max_micros_h: int = 0  # 0: no limit


@dataclass(frozen=True)
class Nodes:
    min: int = 1
    target: int = 1
    max: int = 1


@dataclass(frozen=True)
class CheckpointSpec:
    interval_s: float = 60.0
    keep: int = 2
    target: str = ""  # folder outside the dispatcher's disk: a mounted file system or s3:// gs:// az://; empty: none

    @property
    def folder(self) -> str:
        """`target` where it is a folder that dispatcher and hosts see; empty otherwise."""
        return "" if self.url else self.target

    @property
    def url(self) -> str:
        """`target` where it is in an object store: only workers reach it; empty otherwise."""
        return self.target if "://" in self.target else ""

    @property
    def leaves_out(self) -> str:
        """What a user who names such a target should know, in one line; empty otherwise."""
        return (f"checkpoints go to {self.url}; ledger, jobs and what orphaned workers leave are not copied there, "
                "as only workers write to an object store") if self.url else ""


RESIZE_POLICIES = ("none", "keep-global-batch", "scale-lr")


@dataclass(frozen=True)
class ResizeSpec:
    """What a change of the world size does to training, and how fast it may change. Deaths and notices never wait."""

    policy: str = "none"  # one of RESIZE_POLICIES
    warmup_steps: int = 0  # of "scale-lr": so many steps lead to the new learning rate
    growth: tuple[tuple[int, int], ...] = ()  # (from this epoch, so many workers), ascending; empty: all that fit
    max_join: int = 0  # workers that may join in one change; 0: any number
    max_leave: int = 0  # workers that may be released in one change that we chose; 0: any number
    every_s: float = 0.0  # at least so long between two changes that we chose


@dataclass(frozen=True)
class Autostop:
    idle_s: float = 0.0  # 0: never
    down: bool = True


@dataclass(frozen=True)
class FleetSpec:
    """One fleet file, checked. Secrets are no part of it: they travel apart and no ledger stores them."""

    name: str
    provider: str = "local"
    any_of: tuple[Need, ...] = (Need(),)
    nodes: Nodes = field(default_factory=Nodes)
    interruption_behavior: str = "terminate"  # or "stop"
    dispatcher: Need = field(default_factory=lambda: Need(use_spot=False))
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    resize: ResizeSpec = field(default_factory=ResizeSpec)
    autostop: Autostop = field(default_factory=Autostop)
    max_lifetime_s: float = 0.0  # 0: no limit
    orphan_after_s: float = 3600.0  # a host that has heard of no dispatcher for so long ends itself; 0: never
    workdir: str = "."
    envs: dict[str, str] = field(default_factory=dict)
    file_mounts: dict[str, str] = field(default_factory=dict)
    setup: str = ""
    run: str = ""
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class JobSpec:
    """One `train`. `argv[0]` is a Python script relative to the shipped directory; empty means `run`."""

    name: str
    argv: tuple[str, ...] = ()
    run: str = ""  # a shell command, when argv is empty
    setup: str = ""
    bundle: str = ""  # sha256 of the working directory's archive
    min_workers: int = 1
    max_workers: int = 1
    envs: dict[str, str] = field(default_factory=dict)
    down: bool = False  # take the fleet down when the job has ended
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    resize: ResizeSpec = field(default_factory=ResizeSpec)
    spares: int = 0  # warm workers beyond max_workers that only wait to fill a lost one's place
