"""Domain values of spotfleet: frozen dataclasses and enums without behaviour. Imports no spotfleet module.

Units end a name: `_s` seconds, `_micros_h` millionths of a US dollar per hour. Instants (`at`, `_at`) are
Unix seconds, UTC, as a float. A host is named by its `request_id`, which we choose before the provider is called.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any


class Market(Enum):
    SPOT = "spot"
    ON_DEMAND = "on-demand"


class Role(Enum):
    DISPATCHER = "dispatcher"
    WORKER = "worker"


class HostState(Enum):
    """State of a host in our ledger."""

    LAUNCHING = "launching"  # launch intended; its agent has not joined the dispatcher yet
    UP = "up"  # joined; can hold workers
    DRAINING = "draining"  # will leave (notice, surplus or user request); gets no new worker
    STOPPED = "stopped"  # the cloud stopped it and may start it again; costs nothing here
    GONE = "gone"  # the provider lists it as ended


class CloudState(Enum):
    """State of a host in its provider's listing."""

    PENDING = "pending"
    RUNNING = "running"
    STOPPED = "stopped"
    TERMINATED = "terminated"  # still listed for a while, as EC2 does, so that its end time is known


class JobState(Enum):
    QUEUED = "queued"  # waits for hosts
    STARTING = "starting"  # has hosts; the first generation is not formed yet
    RUNNING = "running"
    RECOVERING = "recovering"  # below min or re-forming; state is held in memory or in a checkpoint
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


SECOND = "~"  # in a request_id: HOST~PROVIDER_ID is a second machine of HOST, which no request of ours made


@dataclass(frozen=True)
class Offer:
    """One pool for sale: machine type, zone and market at the current price.

    Hosts of one pool are refused and reclaimed together."""

    provider: str
    region: str
    zone: str
    instance_type: str
    market: Market
    slots: int  # workers that one host can run: its GPUs, or 1 on a CPU host
    price_micros_h: int
    on_demand_micros_h: int  # the same type and region on demand, to compute savings
    accelerator: str = ""  # "V100", or "" on a CPU host
    room: int = 0  # number of further hosts that fit; 0: unknown
    life_s: float = 0.0  # expected life of a spot host, from the cloud's published interruption rate; 0: unknown
    quota: str = ""  # name of the region's quota that counts it; "" if the provider names none
    # The provider's id of reserved capacity, which costs whether it is used or not, so that it is used first. `market`
    # is that of the need which it meets.
    reserved: str = ""

    @cached_property
    def pool(self) -> str:
        return f"{self.provider}/{self.zone}/{self.instance_type}/{self.reserved or self.market.value}"

    @property
    def sold(self) -> str:
        """How it is sold, for people and for cooldowns: its market, or "reserved"."""
        return "reserved" if self.reserved else self.market.value

    @property
    def kind(self) -> str:
        """The machine type, wherever and however it is sold."""
        return f"{self.provider}/{self.instance_type}"


@dataclass(frozen=True)
class Run:
    """One billed stretch of a host's life, by the cloud's clock."""

    started_at: float
    ended_at: float | None = None
    taken: bool = False  # ended by the cloud, or by an exercise of ours that counts like it
    paid: bool = False  # no rule for taken runs applies: an exercise of ours, or a failure of the machine


@dataclass(frozen=True)
class SshAccess:
    """SSH access to a machine: address, user, port and host keys."""

    address: str  # name or address as the laptop reaches it; as the dispatcher reaches it if `jump`
    user: str
    port: int = 22
    host_keys: tuple[str, ...] = ()  # pinned, each "TYPE BASE64"; every other key is rejected
    jump: bool = False  # reached through the dispatcher's machine


@dataclass(frozen=True)
class CloudHost:
    """One line of a provider's listing, which is the truth about machines."""

    request_id: str
    provider_id: str
    fleet: str
    role: Role
    offer: Offer  # as launched, with the price at launch
    state: CloudState
    runs: tuple[Run, ...] = ()
    address: str = ""
    port: int = 0  # where a dispatcher listens; a constant in clouds with one address per host
    why: str = ""  # the cloud's reason for the last change of state
    ssh: SshAccess | None = None  # None: spotfleet manages no sshd there
    disk_gib: int = 0  # billed from the first run to the end, also while the host is stopped
    addresses: int = 0  # number of public addresses, billed while the host runs
    ended_at: float | None = None  # for a TERMINATED host, if the cloud gives it; the disk ended then


@dataclass(frozen=True)
class PricePoint:
    """The price of a pool from `at` onwards."""

    pool: str
    at: float
    micros_h: int


@dataclass(frozen=True)
class BillingRules:
    """A provider's rules for billing runs; stored in the ledger when the fleet is made.

    Seconds are counted from the start of a run. Each begun second is billed in full, at the price in force when it
    begins. A run shorter than `minimum_s` is billed as `minimum_s` at the last price of the run. A run that
    the cloud itself reclaims within `free_if_taken_within_s` costs nothing. Each host is rounded once, half up.
    """

    minimum_s: int = 60
    free_if_taken_within_s: int = 0
    # In a fleet on several clouds: provider -> its values of the two.
    of_clouds: dict[str, tuple[int, int]] = field(default_factory=dict, hash=False)

    def of(self, provider: str) -> BillingRules:
        """Return the rules for hosts of one provider."""
        return BillingRules(*self.of_clouds.get(provider, (self.minimum_s, self.free_if_taken_within_s)))


@dataclass(frozen=True)
class Rates:
    """Charges of a region besides machines. A GiB-month is 730 hours; 0 means free, or unknown without a `source`."""

    disk_micros_gib_month: int = 0
    address_micros_h: int = 0  # for a public address in use
    zone_micros_gib: int = 0  # between zones of the region, sum of both ends
    region_micros_gib: int = 0  # to another region of the provider
    source: str = ""  # origin of the figures
    as_of: str = ""  # YYYY-MM-DD


@dataclass(frozen=True)
class BootStages:
    """Parts of one boot of a host, in seconds; None: not measured. The host's own clock measures its own parts, so that
    no two clocks are compared."""

    whole_s: float | None = None  # from the launch request until its agent connected, by the dispatcher's clock
    machine_s: float | None = None  # from that request until the cloud had the machine running, by the cloud's clock
    system_s: float | None = None  # from the start of its kernel until its set-up began
    setup_s: float | None = None  # from then until its packages were ready
    agent_s: float | None = None  # from then, or else from the start of the agent's process, until it connected


@dataclass(frozen=True)
class Notice:
    """The cloud's warning that it will take a host."""

    seconds_left: float
    action: str = "terminate"  # or "stop"
    kind: str = "interruption"  # "rebalance", "maintenance": a hint only, never a drain; its seconds_left means nothing
    why: str = ""


@dataclass(frozen=True)
class Need:
    """Requirements for one host; the alternatives of a fleet form `FleetSpec.any_of`."""

    region: str = ""
    zone: str = ""
    instance_type: str = ""
    accelerator: str = ""
    accelerator_count: int = 0
    use_spot: bool = True
    max_micros_h: int = 0  # 0: no limit
    provider: str = ""  # in a fleet on several clouds: one of them; "": any
    min_vcpus: float = 0.0  # sizes: 0 is no limit
    max_vcpus: float = 0.0
    min_memory_gib: float = 0.0
    max_memory_gib: float = 0.0
    turn: int = 0  # alternatives with higher numbers are used only while none of lower ones is available

    @property
    def sized(self) -> bool:
        """Whether it asks for a size of the machine."""
        return any((self.min_vcpus, self.max_vcpus, self.min_memory_gib, self.max_memory_gib))


@dataclass(frozen=True)
class Nodes:
    """Range of a group's hosts. With `min` 0 they follow demand: a job that needs hosts makes them come."""

    min: int = 1
    target: int = 1
    max: int = 1
    idle_s: float = 300.0  # a host that follows demand and has had no work for this long is given back


GROUP_NAME = "[a-z][a-z0-9]{0,11}"  # pattern: it stands in the names of hosts, between two "-"
DISPATCHERS = "d"  # stands there in the name of a dispatcher's machine, so that no group has this name


@dataclass(frozen=True)
class GroupSpec:
    """Named group of a fleet's hosts, with a range and machines of its own."""

    name: str = ""  # "": the one group of a fleet that names none
    nodes: Nodes = field(default_factory=Nodes)
    any_of: tuple[Need, ...] = (Need(),)

    @property
    def kind(self) -> frozenset[tuple[str, str, int]]:
        """The machines that it may have, as far as they matter to a job: groups of one kind can share jobs."""
        return frozenset((n.instance_type, n.accelerator, n.accelerator_count) for n in self.any_of)


def all_nodes(ranges: Iterable[Nodes]) -> Nodes:
    """Return the range of all groups together."""
    found = tuple(ranges)
    return Nodes(sum(n.min for n in found), sum(n.target for n in found), sum(n.max for n in found),
                 max((n.idle_s for n in found), default=Nodes.idle_s))


@dataclass(frozen=True)
class CheckpointSpec:
    interval_s: float = 60.0
    keep: int = 2
    target: str = ""  # folder outside the dispatcher's disk: a mounted file system or s3:// gs:// az://; empty: none

    @property
    def folder(self) -> str:
        """`target` if it is a folder that dispatcher and hosts share; empty otherwise."""
        return "" if self.url else self.target

    @property
    def url(self) -> str:
        """`target` if it is in an object store, which only workers reach; empty otherwise."""
        return self.target if "://" in self.target else ""

    @property
    def leaves_out(self) -> str:
        """One line for a user about files that are not copied to an object store; empty for any other target."""
        return (f"checkpoints go to {self.url}; records, jobs and what orphaned workers leave are not copied there, "
                "as only workers write to an object store") if self.url else ""


RESIZE_POLICIES = ("none", "keep-global-batch", "scale-lr")


@dataclass(frozen=True)
class ResizeSpec:
    """Effect of a world-size change on training, and limits on its pace. Deaths and notices never wait."""

    policy: str = "none"  # one of RESIZE_POLICIES
    warmup_steps: int = 0  # for "scale-lr": number of steps that lead to the new learning rate
    growth: tuple[tuple[int, int], ...] = ()  # (from this epoch, number of workers), ascending; empty: all that fit
    max_join: int = 0  # workers that may join in one change; 0: any number
    max_leave: int = 0  # workers that may be released in one change that we chose; 0: any number
    every_s: float = 0.0  # minimum time between two changes that we chose


@dataclass(frozen=True)
class Autostop:
    idle_s: float = 0.0  # 0: never
    down: bool = True


@dataclass(frozen=True)
class EnvironmentSpec:
    """The isolated Python environment that a host builds for agent and workers.

    One environment exists per digest of all these fields.
    """

    python: str = "python3"  # interpreter on the machine; 3.11 or newer
    packages: tuple[str, ...] = ()  # requirements, installed before spotfleet: "torch==2.13.0"
    inherit: bool = False  # use the packages of that interpreter; spotfleet is then installed without its dependencies
    index_url: str = ""  # a package index; empty: pip's default
    installer: str = "auto"  # "uv", "pip" or "auto": uv where the machine has it


NOTIFY_ON = ("preempted", "failed", "succeeded", "budget")


@dataclass(frozen=True)
class NotifySpec:
    """Notifications of events. The webhook's URL is a secret, and so is not in here."""

    events: tuple[str, ...] = NOTIFY_ON
    command: str = ""  # for /bin/sh on the dispatcher's machine; empty: none
    webhook: str = ""  # digest of the URL, so that a changed one is seen; empty: none


SPOT_POLICIES = ("spot", "auto", "on-demand")


@dataclass(frozen=True)
class PolicySpec:
    """Choice of market, by deadline, and limits on cost. 0 means none of each."""

    spot_policy: str = "spot"  # one of SPOT_POLICIES; "auto": on-demand hosts fill in while spot hosts are unavailable
    on_demand_base: int = 0  # number of hosts of the target that are always on demand
    deadline_s: float = 0.0  # per job, from its submission
    work_s: float = 0.0  # per job: its duration at full target
    work_steps: int = 0  # per job: optimizer steps; instead of `work_s`
    max_micros: int = 0  # whole fleet since its creation, dispatcher included
    max_micros_h: int = 0  # whole fleet at any time
    replace_slow: bool = False  # hosts of slow workers are drained and replaced


ENGINES = ("auto", "docker", "podman", "runc")


@dataclass(frozen=True)
class ContainerSpec:
    """Container in which a job's processes run on each host."""

    image: str = ""  # image of a registry, or a folder of the host with a root file system; empty: no container
    engine: str = "auto"  # one of ENGINES
    mounts: tuple[str, ...] = ()  # further folders of the host: FOLDER[:TARGET][:ro]


def is_ray(requirement: str) -> bool:
    """Return whether a requirement is one for Ray: "ray==2.60.0", "ray[default]"."""
    return requirement.lower().startswith("ray") and not requirement[3:4].replace("_", "-").isalnum() \
        and requirement[3:4] not in ("-", "_", ".")


@dataclass(frozen=True)
class RaySpec:
    """Ray on the fleet's machines."""

    version: str = "2.60.*"  # as in a requirement, "ray==VERSION"
    object_store: float = 0.1  # share of a host's memory for Ray's objects
    port: int = 0  # where the head listens; 0: Ray's usual one


@dataclass(frozen=True)
class FleetSpec:
    """Contents of one checked fleet file. Secrets are excluded: they travel apart and no ledger stores them."""

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
    orphan_after_s: float = 3600.0  # a host without contact to a dispatcher for this long ends itself; 0: never
    workdir: str = "."
    envs: dict[str, str] = field(default_factory=dict)
    file_mounts: dict[str, str] = field(default_factory=dict)  # target -> source; see `bundle/targets.py`
    mounted: dict[str, str] = field(default_factory=dict)  # target -> bucket that is mounted, for writing too
    setup: str = ""
    setup_timeout_s: float = 1800.0  # 0: no limit
    run: str = ""
    container: ContainerSpec = field(default_factory=ContainerSpec)
    tags: dict[str, str] = field(default_factory=dict)
    environment: EnvironmentSpec = field(default_factory=EnvironmentSpec)
    placement: str = "spread"  # one of PLACEMENTS: over pools; all in one zone; there in a placement group, with EFA
    all_or_nothing: bool = False  # a fleet without hosts launches all of them at once in one pool, or none
    section: dict[str, Any] = field(default_factory=dict)  # the provider's own: plain JSON that only its plugin reads
    policy: PolicySpec = field(default_factory=PolicySpec)
    notify: NotifySpec = field(default_factory=NotifySpec)
    ray: RaySpec | None = None  # None: its machines get no Ray
    # Named groups of hosts; empty: all hosts are one group without a name. With groups, `nodes` is the sum of their
    # ranges and `any_of` has the needs of all.
    groups: tuple[GroupSpec, ...] = ()

    @property
    def parts(self) -> tuple[GroupSpec, ...]:
        """The groups, of which a fleet that names none has one."""
        return self.groups or (GroupSpec("", self.nodes, self.any_of),)

    @property
    def main_group(self) -> GroupSpec:
        """The first group that names accelerators, as these cost most and are sold in few regions; else the first."""
        return next((g for g in self.parts if any(n.accelerator for n in g.any_of)), self.parts[0])

    @property
    def shares_jobs(self) -> bool:
        """Whether a job that names no group may use the hosts of any."""
        return len({group.kind for group in self.parts}) == 1

    @classmethod
    def from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON of a spec in today's form: earlier releases had `section` under the provider's name, that of
        machines over SSH beside an empty one."""
        name = data.get("provider", "")
        if data.get("section") or name in cls.__dataclass_fields__ or not isinstance(data.get(name), dict):
            return data
        return {**data, "section": data[name]}


# elastic: `elastic.run` keeps the training state through changes. restart: a distributed program, started anew at each
# change. command: any other. ray: the fleet's Ray cluster, a raylet on each of its hosts.
RAY_KIND = "ray"
JOB_KINDS = ("elastic", "restart", "command", RAY_KIND)


@dataclass(frozen=True)
class JobSpec:
    """One job, as `train` submits it. `argv[0]` is a Python script in the shipped directory; empty means `run`."""

    name: str
    argv: tuple[str, ...] = ()
    run: str = ""  # a shell command, used when argv is empty
    setup: str = ""
    bundle: str = ""  # sha256 of the working directory's archive
    min_workers: int = 1
    max_workers: int = 1
    envs: dict[str, str] = field(default_factory=dict)
    setup_timeout_s: float = 1800.0  # for one try of `setup` on one host; 0: no limit
    file_mounts: dict[str, str] = field(default_factory=dict)  # only mounts from buckets: name in the directory -> URL
    down: bool = False  # take the fleet down when the job has ended
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    resize: ResizeSpec = field(default_factory=ResizeSpec)
    spares: int = 0  # warm workers beyond max_workers that wait to replace a lost one
    priority: int = 0  # the highest of all waiting jobs gets hosts first
    deadline_s: float = 0.0  # from its submission; 0: none
    work_s: float = 0.0  # duration at the fleet's full target; 0: unspecified
    work_steps: int = 0  # optimizer steps in all; 0: unspecified
    work_host_s: float = 0.0  # `work_s` in host-seconds, at the target of its submission; written by the dispatcher
    kind: str = ""  # one of JOB_KINDS; "": from an earlier release, see `kind_of`
    gang: bool = False  # its processes start together with torchrun's variables; at a change all are started anew
    per_host: bool = False  # one process for each host, which has all of its slots
    grace_s: float = 30.0  # for a gang: from SIGTERM to SIGKILL
    max_restarts: int = 0  # restarts after failures of its own; a lost host does not count
    retry: bool = True  # False: the loss of a host fails the job
    # Folder in the working directory that follows the job, perhaps with a pattern for its files: "out", "*.pt". "": the
    # folder that it is given.
    checkpoint_dir: str = ""
    resume_args: str = ""  # added to the command once a checkpoint exists
    container: ContainerSpec = field(default_factory=ContainerSpec)
    group: str = ""  # named group of hosts that it uses; "": any

    @property
    def kind_of(self) -> str:
        return self.kind or ("elastic" if self.argv else "command")

    @property
    def restarts(self) -> bool:
        """Whether all of its processes are ended and started anew together at each change."""
        return self.gang or self.kind == "restart"
