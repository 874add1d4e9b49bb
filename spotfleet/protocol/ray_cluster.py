"""State of a fleet's Ray cluster, as a helper process reports it to the dispatcher: one JSON line per observation.

The dispatcher never imports Ray. The helper asks Ray's GCS (`get_cluster_resource_state`) and leaves out what the
fleet does not need. Resources are Ray's: "CPU", "GPU" and custom ones, as numbers of units; "memory" in bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RayNode:
    node_id: str  # Ray's, in hex
    host: str = ""  # name of the fleet's host; "" for the head
    total: dict[str, float] = field(default_factory=dict)
    free: dict[str, float] = field(default_factory=dict)
    draining: bool = False
    idle_s: float = 0.0  # 0 while it runs something


@dataclass(frozen=True)
class RayRequest:
    """Tasks, actors or bundles of one shape."""

    resources: dict[str, float]
    count: int = 1


@dataclass(frozen=True)
class RayGang:
    """A placement group that waits: all of its bundles at once, or none."""

    bundles: tuple[RayRequest, ...]
    spread: bool = False  # STRICT_SPREAD: no two bundles on one node
    pack: bool = False  # STRICT_PACK: all bundles on one node


@dataclass(frozen=True)
class RayTrial:
    """A trial of Ray Tune over `spotfleet.ray.tune.elastic`."""

    trial: str  # Tune's id
    name: str
    workers: int
    hosts: dict[str, int] = field(default_factory=dict, hash=False)  # host -> millionths of it that its workers take


@dataclass(frozen=True)
class RayState:
    up: bool  # the head answers
    nodes: tuple[RayNode, ...] = ()  # alive ones
    pending: tuple[RayRequest, ...] = ()  # tasks and actors for which no node has room
    gangs: tuple[RayGang, ...] = ()
    constraints: tuple[RayRequest, ...] = ()  # room that a program asked to keep (`request_cluster_resources`)
    problem: str = ""  # why it is not up
    trials: tuple[RayTrial, ...] = ()


# ---- from the trials of Ray Tune to the helper, as one value in the key-value store of Ray's GCS

TRIALS_NAMESPACE, TRIALS_KEY = b"spotfleet", b"trials"


@dataclass(frozen=True)
class PlacedTrial:
    """A trial, with the nodes on which its workers have their places."""

    trial: str
    name: str
    nodes: dict[str, int] = field(default_factory=dict)  # id of a node -> workers there
    cpus: float = 0.0  # CPUs of each worker
    gpus: float = 0.0


@dataclass(frozen=True)
class PlacedTrials:
    """All trials at one moment, written each second while there are any. One that is not repeated counts no more."""

    beat: int
    trials: tuple[PlacedTrial, ...] = ()


# ---- between the dispatcher and the process that supervises the head, one JSON object per line each way


@dataclass(frozen=True)
class RayDrain:
    """A host that leaves."""

    host: str
    left_s: float  # until it goes
    why: str = ""
    idle_only: bool = False  # nobody takes it at a given time: its node ends if it is idle, and else gets nothing new


@dataclass(frozen=True)
class RayWish:
    """Everything that the dispatcher wants of the head, sent on change and repeated."""

    drains: tuple[RayDrain, ...] = ()
    releases: tuple[str, ...] = ()  # hosts whose nodes end if nothing runs there, and else stay as they are
    drivers: tuple[str, ...] = ()  # folders of drivers that should have been started; every other one is ended
    stop: bool = False  # end the cluster's head, and all that it has left on this machine


@dataclass(frozen=True)
class RayReport:
    """State of the head's processes."""

    state: RayState
    starts: int = 0  # number of times that the head was started
    ended: str = ""  # how the head ended the last time; "" if it never did
    ray: str = ""  # version
    python: str = ""  # "3.11"
    dashboard: int = 0  # its port on loopback; 0: Ray's part for it is not installed
    shared: str = ""  # why a program in Ray could read the dispatcher's files or credentials; "": it cannot


# Variables of a raylet and of a driver. The token is among the job's secrets.
TOKEN = "RAY_AUTH_TOKEN"
AUTH = {"RAY_AUTH_MODE": "token"}
HEAD_AT = "SPOTFLEET_RAY_HEAD"  # ADDRESS:PORT
HOST = "SPOTFLEET_RAY_HOST"
CPUS, GPUS = "SPOTFLEET_RAY_CPUS", "SPOTFLEET_RAY_GPUS"  # its resources; without CPUS all CPUs of the machine
STORE = "SPOTFLEET_RAY_STORE"  # share of the machine's memory that its objects may use
VERSIONS = "SPOTFLEET_RAY_VERSIONS"  # "RAY PYTHON" of the head
METADATA = "SPOTFLEET_RAY_METADATA"  # "closed": the head's machine may be a cloud's, whose metadata server is closed
LABEL = "spotfleet-host"  # label of a node: the host's name
GCS_PORT = 6379


def folder_of(token: str) -> str:
    """Return the folder of the cluster with this token, on each of its machines: short, as the path of a Unix socket
    has 107 bytes at most, and with a name that only holders of the token know."""
    return f"/tmp/sfr-{hashlib.sha256(f'folder {token}'.encode()).hexdigest()[:12]}"


def mismatch(wanted: str, ray: str, python: str, host: str) -> str:
    """Return why a host with these versions cannot join a head with `wanted`, "RAY PYTHON"; "" if it can."""
    if not ray:
        return (f"host {host} has no Ray: write `ray: {{}}` in the fleet file and make the hosts anew, or install "
                f"ray=={wanted.partition(' ')[0]} there")
    head_ray, _, head_python = wanted.partition(" ")
    for name, own, heads in (("Ray", ray, head_ray), ("Python", python, head_python)):
        if heads and own != heads:
            return f"host {host} has {name} {own}, and the head {name} {heads}: install the same on both"
    return ""


# Folder beside those of a cluster's drivers that has the output of all of them, and the limit of its size.
DRIVER_LOGS, DRIVER_LOG_BYTES = "logs", 1 << 30
OUTPUT = "SPOTFLEET_OUTPUT"  # variable of a driver: its folder among the outputs of its job
LOST = 137  # as a shell reports SIGKILL: status of a driver that ended with the supervisor that had started it


@dataclass(frozen=True)
class RayDriver:
    """A script that `spotfleet ray submit` has started on the head's machine."""

    driver: str
    command: str
    state: str = "running"  # "running", "succeeded", "failed" or "stopped"
    exit_status: int | None = None
    age_s: float = 0.0


@dataclass(frozen=True)
class RayStatus:
    """Body of GET /v1/ray."""

    job: str = ""  # that holds the hosts; "": none runs
    why: str = ""  # what it does, or waits for
    address: str = ""  # where the head listens
    report: RayReport | None = None  # None: the head has not reported yet
    problem: str = ""
    drivers: tuple[RayDriver, ...] = ()
    hosts: tuple[str, ...] = ()  # that the job holds


@dataclass(frozen=True)
class DriverStart:
    """Command of a driver, with its variables. Holds secrets."""

    command: str
    envs: dict[str, str] = field(default_factory=dict, repr=False)
