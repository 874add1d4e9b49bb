"""The nouns of spotfleet: frozen values without behaviour. Layer 0: imports nothing of ours.

Units end a name: `_s` seconds, `_micros_h` millionths of a US dollar per hour. Instants (`at`, `_at`) are
Unix seconds, UTC, as a float. A host is named by its `request_id`, chosen by us before the provider is called.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property


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


SECOND = "~"  # in a request_id: HOST~PROVIDER_ID is another machine of HOST, which nobody asked for


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
    room: int = 0  # for so many more hosts; 0: nobody knows
    life_s: float = 0.0  # expected of a spot host, by how often the cloud says that it takes such; 0: nobody knows

    @cached_property
    def pool(self) -> str:
        return f"{self.provider}/{self.zone}/{self.instance_type}/{self.market.value}"


@dataclass(frozen=True)
class Run:
    """One billed stretch of a host's life, by the cloud's own clock."""

    started_at: float
    ended_at: float | None = None
    taken: bool = False  # ended by the cloud, not by us


@dataclass(frozen=True)
class SshDoor:
    """How a machine is entered over SSH."""

    address: str  # name or address, as the laptop reaches it, or the dispatcher if `jump`
    user: str
    port: int = 22
    host_keys: tuple[str, ...] = ()  # pinned, each "TYPE BASE64"; no other key is accepted
    jump: bool = False  # entered through the dispatcher's machine


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
    ssh: SshDoor | None = None  # None: it has no sshd of ours
    disk_gib: int = 0  # billed from its first run to its end, also while it is stopped
    addresses: int = 0  # public ones, billed while it runs
    ended_at: float | None = None  # of a TERMINATED one, if the cloud says when; its disk ended then


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
class Rates:
    """What a region charges beside machines. A GiB-month is 730 hours; 0 is free, or unknown without a `source`."""

    disk_micros_gib_month: int = 0
    address_micros_h: int = 0  # of a public address in use
    zone_micros_gib: int = 0  # between zones of the region, both ends together
    region_micros_gib: int = 0  # to another region of the provider
    source: str = ""  # where the figures are from
    as_of: str = ""  # YYYY-MM-DD


@dataclass(frozen=True)
class Notice:
    """The cloud's warning that it takes a host."""

    seconds_left: float
    action: str = "terminate"  # or "stop"
    kind: str = "interruption"  # "rebalance", "maintenance": a hint only, never a drain; its seconds_left means nothing
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
class EnvironmentSpec:
    """The Python environment that a host makes for agent and workers: isolated, one for each digest of all this."""

    python: str = "python3"  # interpreter on the machine; 3.11 or newer
    packages: tuple[str, ...] = ()  # requirements, installed before ours: "torch==2.13.0"
    inherit: bool = False  # see what that interpreter has installed; ours then comes without its dependencies
    index_url: str = ""  # of a package index; empty: pip's own
    installer: str = "auto"  # "uv", "pip", or uv where the machine has it


@dataclass(frozen=True)
class SshMachine:
    """A machine that exists already."""

    host: str  # name or address, as laptop and dispatcher know it
    slots: int = 1
    port: int = 0  # 0: SshSpec.port
    user: str = ""  # empty: SshSpec.user
    host_key: str = ""  # "ssh-ed25519 AAAA..."; empty: from known_hosts
    address: str = ""  # to advertise to other hosts; empty: the source address of its route to the dispatcher
    accelerator: str = ""
    price_micros_h: int = 0
    folder: str = ""  # empty: SshSpec.folder


@dataclass(frozen=True)
class SshSpec:
    """Section `ssh` of the fleet file, for provider ssh."""

    dispatcher: SshMachine | None = None  # bears the dispatcher and no workers
    hosts: tuple[SshMachine, ...] = ()
    user: str = ""  # empty: whoever runs the command line
    port: int = 22
    identity_file: str = ""  # on the laptop: opens the machines until the fleet's key does; empty: agent, default keys
    known_hosts: str = ""  # file on the laptop; empty: ~/.ssh/known_hosts
    discovery_script: str = ""  # file on the laptop; laptop and dispatcher run it: `host` or `host:slots` lines
    discovery_timeout_s: float = 10.0
    folder: str = "~/.spotfleet-host"  # on each machine: everything of ours


@dataclass(frozen=True)
class AwsNetwork:
    """Where in one region a fleet's machines stand. What is empty is looked up (the default VPC, its subnets) or made
    (security groups)."""

    region: str
    vpc: str = ""
    subnets: tuple[str, ...] = ()  # one or more per zone; private ones too
    security_groups: tuple[str, ...] = ()  # used instead of ours: they must let the fleet talk to itself, and SSH in


@dataclass(frozen=True)
class AwsSpec:
    """Section `aws` of the fleet file, for provider aws."""

    regions: tuple[str, ...] = ()  # candidates; `up` settles on the cheapest unless `joined`; empty: those of the needs
    joined: bool = False  # the user's promise that the named networks of all regions reach each other: use all
    networks: tuple[AwsNetwork, ...] = ()  # at most one per region
    profile: str = ""  # of the laptop's AWS configuration; never told to a machine
    public_addresses: bool = True  # False: private ones only, the laptop comes by VPN and subnets have a way out
    ssh_from: tuple[str, ...] = ()  # CIDRs that may enter the dispatcher; empty: the laptop's own address
    image: str = ""  # of hosts: "ami-..." or an SSM parameter "/aws/..."; empty: Deep Learning AMI, Ubuntu on CPUs
    dispatcher_image: str = ""  # empty: plain Ubuntu
    user: str = "ubuntu"  # whom the images let in
    disk_gib: int = 100
    dispatcher_disk_gib: int = 30
    kms_key: str = ""  # of the volumes; empty: the account's default key. They are always encrypted
    key_pair: str = ""  # an EC2 key pair to be let in too
    dispatcher_profile: str = ""  # instance profiles that exist; empty: made, and removed by `down`
    host_profile: str = ""  # the same; made only where checkpoints go to S3
    event_queue: bool = False  # EventBridge -> SQS, read by the dispatcher, beside what hosts hear themselves


PLACEMENTS = ("spread", "zone", "cluster")


SPOT_POLICIES = ("spot", "auto", "on-demand")


@dataclass(frozen=True)
class PolicySpec:
    """Which market hosts come from, by when work must be done, and what it all may cost. 0 is none of each."""

    spot_policy: str = "spot"  # one of SPOT_POLICIES; "auto": on-demand hosts fill in while spot ones are not to be had
    on_demand_base: int = 0  # so many hosts of the target are always on demand
    deadline_s: float = 0.0  # of each job, from its submission
    work_s: float = 0.0  # of each job: so long at full target
    work_steps: int = 0  # of each job: optimizer steps; instead of `work_s`
    max_micros: int = 0  # of the whole fleet, dispatcher included, since it was made
    max_micros_h: int = 0  # of the whole fleet at any time


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
    setup_timeout_s: float = 1800.0  # 0: no limit
    run: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    environment: EnvironmentSpec = field(default_factory=EnvironmentSpec)
    ssh: SshSpec | None = None  # for provider ssh
    placement: str = "spread"  # one of PLACEMENTS: over pools; all in one zone; there in a placement group, with EFA
    all_or_nothing: bool = False  # a fleet without hosts launches all at once in one pool, or none
    aws: AwsSpec | None = None  # for provider aws
    policy: PolicySpec = field(default_factory=PolicySpec)


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
    setup_timeout_s: float = 1800.0  # of one try of `setup` on one host; 0: no limit
    file_mounts: dict[str, str] = field(default_factory=dict)  # those from buckets: name in the directory -> URL
    down: bool = False  # take the fleet down when the job has ended
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    resize: ResizeSpec = field(default_factory=ResizeSpec)
    spares: int = 0  # warm workers beyond max_workers that only wait to fill a lost one's place
    deadline_s: float = 0.0  # from its submission; 0: none
    work_s: float = 0.0  # so long at the fleet's full target; 0: not said
    work_steps: int = 0  # optimizer steps in all; 0: not said
    work_host_s: float = 0.0  # `work_s` in host-seconds, at the target of its submission; written by the dispatcher
