"""What processes tell each other: complete states, sent on change, and again after a while. Layer 0.

    worker --WorkerReport--> agent --AgentReport--> dispatcher        (what I hold)
    worker <--WorkerOrders-- agent <--AgentOrders-- dispatcher        (what you should hold)

Worker and agent speak over a Unix socket, agent and dispatcher over one TLS WebSocket; one JSON object a line
or a text frame. What is unchanged is said again each second, the dispatcher's orders each 5 s: to a thousand workers
they are 20 MB. A lost, late or repeated message costs at most one period. Order is by `generation`, never by
a clock; no instant crosses machines, only durations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from spotfleet.codec import from_json, to_text
from spotfleet.model import JobSpec, Notice

JOB_KEY = "SPOTFLEET_JOB_KEY"  # among a job's secrets: what its workers know each other by; made at its submission
STUCK_EXIT = 75  # of a worker that cannot get free of a lost peer: as if the peer were to blame, its slot starts anew
PROTOCOL = 3  # changes when an older peer would misread us


class Stage(Enum):
    """How far a worker has come. Only its process's end can take it back: see `WorkerState.exit`."""

    STARTING = "starting"  # the process exists; the script has not called init()
    INIT = "init"  # blocked in init(): may be a founder of the job's first generation
    READY = "ready"  # entered elastic.run and fully warm: may enter any generation
    FINISHED = "finished"  # the training function has returned on every rank of its generation


@dataclass(frozen=True)
class Checkpoint:
    """A version of a job's state: a tar of a torch.distributed.checkpoint folder, or that folder in an object store.

    While its ranks write it, each has one part: the parts joined in their order are the tar. See docs/checkpoints.md.
    """

    version: int
    digest: str  # sha256 of the file, of the part, or of the manifest at `url`
    bytes: int
    generation: int
    path: str = ""  # on the host of whoever sends this message; empty where there is none
    part: int = 0  # which of `parts` this file is
    parts: int = 1  # 1: whole
    url: str = ""  # the folder in an object store, for instance "s3://bucket/prefix/JOB/VERSION-GENERATION"


@dataclass(frozen=True)
class StepCost:
    """What a worker's recent steps consist of, as far as it has measured that by itself. All 0 until it has."""

    steps: int = 0  # made in the generation; the figures come from the last 20
    wait_s: float = 0.0  # of a step, spent in collectives until they were done; median
    reductions: int = 0  # collectives begun in a step
    bytes: int = 0  # that this rank puts into them in a step
    backend: str = ""  # "gloo" or "nccl"
    rtt_s: float = 0.0  # to the farthest peer and back, as the kernel measured it on the group's own connections
    rtt_to: str = ""  # that peer's address
    next_s: float = 0.0  # the same, to the next rank: a ring of ranks passes its parts on that way
    sent: int = 0  # segments, on those connections since they exist
    resent: int = 0  # of them those that the kernel had to send once more


@dataclass(frozen=True)
class WorkerReport:
    worker: str  # HOST/SLOT/INCARNATION: a restarted process bears a new name
    job: str
    stage: Stage = Stage.STARTING
    generation: int = 0  # whose process group it holds, formed and synchronised; 0 is none
    failed: int = 0  # newest generation in which a collective broke here; never decreases
    version: int = 0  # optimizer steps applied to the tensors it holds
    store: str = ""  # "address:port" of its bootstrap store; the lowest rank's serves a generation
    step_s: float = 0.0  # median of recent steps
    repeated: int = 0  # optimizer steps whose gradients this process had to compute again
    resumed: int = 0  # newest generation in which it completed a step
    pause_s: float = 0.0  # from the last step before generation `resumed` to the first step in it
    checkpoint: Checkpoint | None = None  # the newest it has written
    error: str = ""  # traceback that ends this worker; empty while it runs
    blame_peer: bool = False  # `error` came from a lost peer, not from the user's code
    blame_host: bool = False  # `error` came from this host, whose disk is full
    setup_tries: int = 0  # `error` came from `setup` or `file_mounts`, which failed here for so many times
    setup_sure: bool = False  # that error is what another host would hear, too: a bucket that does not exist
    wanted: int = 0  # world size that the job's resize policy asks for now; 0: no wish
    resize: str = ""  # what the resize policy did at the newest change, in one line for people
    damaged: Checkpoint | None = None  # one at a `url` that could not be used here
    fetched: int = 0  # bytes that have come so far of the checkpoint that it is to restore
    waits: bool = False  # in a collective, for its peers; else in the user's code, or unheard for long
    cost: StepCost = field(default_factory=StepCost)  # of the steps in generation `resumed`
    unreached: tuple[str, ...] = ()  # "WORKER at ADDRESS": peers to whom it has found no way, in its newest generation


@dataclass(frozen=True)
class Assignment:
    """A worker's place in one generation."""

    generation: int
    rank: int  # -1: not a member; hold nothing and stand by
    members: tuple[str, ...]  # worker names by rank
    store: str  # bootstrap store of this generation
    local_rank: int = 0
    local_size: int = 1
    urgent: bool = False  # True: abort the group held now. False: change at the next step boundary

    @property
    def world_size(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class WorkerOrders:
    assignment: Assignment | None = None  # None: no generation yet; wait
    founded: bool = False  # the job has had a generation: init() returns at once with the two below
    provisional_rank: int = 0
    provisional_size: int = 1
    checkpoint_every_s: float = 60.0  # 0: never by itself
    checkpoint_now: bool = False  # no survivor is in sight: write one at the next step boundary
    restore: Checkpoint | None = None  # set while no live worker of the job holds its state; path is local
    stop: bool = False  # leave at the next step boundary and exit 0
    stands_in: bool = False  # outside of any generation: `checkpoint_now` is for you, though another led the last one
    checkpoint_url: str = ""  # folder of the job in an object store that workers write to; empty: through the agent
    checkpoint_keep: int = 2  # how many to keep there
    seconds_left: float | None = None  # with `checkpoint_now`: until the last holder of the state is gone
    address: str = ""  # which this host advertises by now, from the agent; empty: as at the worker's start
    remark: str = ""  # for the log, once: why a step takes as long as it does; to rank 0


@dataclass(frozen=True)
class Exit:
    """How a worker's process ended, from waitpid."""

    code: int = 0  # exit status, or minus the signal
    done: bool = False  # the script itself ran to its end: the explicit word, never inferred from a status


@dataclass(frozen=True)
class WorkerState:
    """An agent's view of one worker: its last report and its process."""

    report: WorkerReport
    slot: int
    pid: int = 0
    exit: Exit | None = None  # set only after its log and output have reached the dispatcher
    stopped: bool = False  # its process is stopped (SIGSTOP, a debugger): it can neither train nor answer
    quiet_s: float = 0.0  # since its version, or whether it waits, last changed, while it holds a generation


@dataclass(frozen=True)
class HeldJob:
    """What an agent holds of one job, for a dispatcher that has asked. Holds secrets: never stored by an agent."""

    job: str
    launch: Launch | None = None  # None: it was still to be fetched
    assignments: tuple[Assignment, ...] = ()  # the newest that each of its workers here was given
    bundle: bool = False  # the archive of the working directory lies here


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that a host was told to restore and could not fetch: what arrives has another digest."""

    job: str
    version: int
    digest: str  # the one that was named


@dataclass(frozen=True)
class AgentReport:
    host: str  # the host's request_id
    incarnation: str  # one agent process
    address: str  # advertised to peers: control, stores, gloo, NCCL
    slots: int
    workers: tuple[WorkerState, ...] = ()
    notice: Notice | None = None
    why: str = ""  # what it waits for, e.g. "importing torch"; one line for `hosts`
    protocol: int = PROTOCOL
    damaged: tuple[Damaged, ...] = ()
    held: tuple[HeldJob, ...] = ()  # of the jobs in `AgentOrders.tell`


@dataclass(frozen=True)
class SlotOrder:
    """One worker that should exist. The dispatcher chooses its name; a new incarnation is a new process."""

    worker: str
    job: str
    slot: int
    local_rank: int
    orders: WorkerOrders


@dataclass(frozen=True)
class AgentOrders:
    host: str
    workers: tuple[SlotOrder, ...] = ()  # all that should exist; any other process is ended
    refuse: str = ""  # why this agent must not go on (protocol, revoked token): it stops its workers and exits
    tell: tuple[str, ...] = ()  # jobs the dispatcher is to learn of by `held`: their workers, unlisted, are left alone
    send: tuple[str, ...] = ()  # digests of bundles that the dispatcher has lost and this host may upload


@dataclass(frozen=True)
class Launch:
    """What an agent fetches once to start a worker of a job: GET /v1/jobs/JOB/launch. Holds secrets: never stored."""

    job: str
    spec: JobSpec
    secrets: dict[str, str] = field(repr=False)
    age_s: float = 0.0  # since the job's submission


@dataclass(frozen=True)
class OutputPiece:
    """Something to be done to the dispatcher's copy of a worker's output folder. Repeated, it changes nothing more.

    `append`: bytes that follow byte `at`. `draft`: the same to a draft, which takes the file's place, whole, with the
    `last` piece. `rename`: `name` is called `to` now. `check`: are the `bytes` bytes from `at` on there, of `sha256` if
    it is given, and with `last` nothing after them?
    """

    do: str
    name: str  # relative, with / between folders
    at: int = 0
    bytes: int = 0
    last: bool = False
    sha256: str = ""  # of the whole file, with the last piece of a draft; of the bytes, with a check
    to: str = ""


def pack_pieces(pieces: list[OutputPiece], data: bytes) -> bytes:
    """Body of POST /v1/jobs/JOB/outputs/WORKER; `data` holds the bytes of all appends and drafts in their order.

    The answer is `{held: [N, ...]}`, for each piece: up to which byte the file or draft is there by then; for a check
    and a last piece -1 if the copy is not that file, and it has to be sent anew; for a rename its size, or -1.
    """
    return to_text(tuple(pieces)).encode() + b"\n" + data


def unpack_pieces(body: bytes) -> list[tuple[OutputPiece, bytes]]:
    """What `pack_pieces` packed; ValueError names what does not fit."""
    head, _, data = body.partition(b"\n")
    pieces: tuple[OutputPiece, ...] = from_json(tuple[OutputPiece, ...], json.loads(head))
    found, at = [], 0
    for piece in pieces:
        if piece.do not in ("append", "draft", "rename", "check") or piece.at < 0 or piece.bytes < 0:
            raise ValueError(f"output: {piece} is nothing to be done")
        size = piece.bytes if piece.do in ("append", "draft") else 0
        found.append((piece, data[at:at + size]))
        at += size
    if at != len(data):
        raise ValueError(f"output: pieces of {at} bytes, with {len(data)} bytes of data")
    return found


def dump(message: Any) -> str:
    """One line of JSON, without the newline."""
    return to_text(message)


def load(kind: Any, text: str | bytes) -> Any:
    """Read what `dump` wrote; ValueError names the field that does not fit."""
    return from_json(kind, json.loads(text))


@dataclass(frozen=True)
class HostStatus:
    host: str
    role: str
    state: str
    pool: str
    slots: int
    price_micros_h: int
    on_demand_micros_h: int
    address: str = ""
    jobs: tuple[str, ...] = ()
    seconds_left: float | None = None  # of its notice
    since_s: float = 0.0  # how long it has been in `state`
    why: str = ""


@dataclass(frozen=True)
class WorkerStatus:
    worker: str
    host: str
    rank: int  # -1: not in the generation
    stage: str
    version: int


@dataclass(frozen=True)
class JobStatus:
    job: str
    name: str
    state: str
    why: str  # what it waits for, or what it does
    generation: int = 0
    world_size: int = 0
    version: int = 0
    step_s: float = 0.0
    repeated: int = 0
    min_workers: int = 1
    max_workers: int = 1
    checkpoint: int = 0  # version of the newest kept checkpoint; 0: none
    error: str = ""
    workers: tuple[WorkerStatus, ...] = ()
    age_s: float = 0.0
    step_why: str = ""  # why a step takes `step_s`, once that is known
    output_bytes: int = 0  # collected of its workers' output folders
    output_age_s: float | None = None  # since the newest of them came; None: none has
    deadline_in_s: float | None = None  # negative once it is over; None: it has none
    work_left_s: float | None = None  # at the fleet's full target; None: not known
    finish_in_s: float | None = None  # at the pace of now; None: not known


@dataclass(frozen=True)
class PolicyStatus:
    """What the policy wants now, and what limits it."""

    spot: int  # hosts
    on_demand: int
    why: str
    rule: str = ""  # as in events.PolicyDecided
    for_s: float = 0.0  # since it was decided
    max_micros: int = 0  # the limits on money; 0: none
    max_micros_h: int = 0


@dataclass(frozen=True)
class FleetStatus:
    """GET /v1/status. `hosts` are the live ones; the dispatcher itself is among them."""

    fleet: str
    state: str  # "up", "degraded" (fewer hosts up than target), "going down", "down" (no worker host is left)
    why: str
    min: int
    target: int
    max: int
    hosts: tuple[HostStatus, ...] = ()
    jobs: tuple[JobStatus, ...] = ()
    burn_micros_h: int = 0
    on_demand_burn_micros_h: int = 0
    age_s: float = 0.0
    tick_s: float = 0.0  # how long the last look at the machines took, the cloud's answers included
    ends_in_s: float | None = None  # by max_lifetime
    spent_micros: int | None = None  # since it was made, the dispatcher included; None: not counted yet
    policy: PolicyStatus | None = None  # None: nothing is decided yet
