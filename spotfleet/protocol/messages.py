"""Messages between processes: complete states, sent on change and repeated at an interval.

    worker --WorkerReport--> agent --AgentReport--> dispatcher        (the state it holds)
    worker <--WorkerOrders-- agent <--AgentOrders-- dispatcher        (the state it should hold)

Worker and agent communicate over a Unix socket, agent and dispatcher over one TLS WebSocket; one JSON object per line
or text frame. An unchanged report is repeated each second, unchanged orders of the dispatcher each 5 s: for a thousand
workers they are 20 MB. A lost, late or repeated message costs at most one period. Order is by `generation`, never by
a clock; no instant crosses machines, only durations.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from spotfleet.codec import from_json, to_text
from spotfleet.model import BootStages, JobSpec, Notice

JOB_KEY = "SPOTFLEET_JOB_KEY"  # among a job's secrets: workers authenticate each other with it; created at submission
STUCK_EXIT = 75  # exit status of a worker blocked by a lost peer: handled as the peer's fault, and its slot restarts
NOT_COLLECTED = "not-collected.json"  # in the archive: {lost, partial_files}; absent if all results are there
PROTOCOL = 5  # raised when an older peer would misread us


class Stage(Enum):
    """Progress of a worker. Only the end of its process can undo it: see `WorkerState.exit`."""

    STARTING = "starting"  # the process exists; the script has not called init()
    INIT = "init"  # blocked in init(): may found the job's first generation
    READY = "ready"  # in elastic.run and fully warm: may enter any generation
    FINISHED = "finished"  # the training function has returned on every rank of its generation


@dataclass(frozen=True)
class Checkpoint:
    """A version of a job's state: a folder as in `checkpoint_files.py`, or one file of it. See docs/checkpoints.md.

    Each of the ranks that write it reports its own piece; rank 0 reports the manifest, which stands for the whole.
    """

    version: int
    digest: str  # sha256 of the file; of the manifest for a whole one
    bytes: int
    generation: int
    path: str = ""  # on the host of the sender; empty: no file there
    part: int = 0  # index of its writer among `parts`
    parts: int = 1  # ranks that write it together; 1 also for a whole one
    url: str = ""  # the folder in an object store, for instance "s3://bucket/prefix/JOB/VERSION-GENERATION"
    grant: str = ""  # that of the assignment under which it was made; empty: from an earlier release, or once sealed
    mark: str = ""  # by the worker that made it: see proofs.py
    serial: int = 0  # number of the seal; grows with each checkpoint of the job
    seal: str = ""  # by the dispatcher that keeps it: see dispatcher/checkpoints/seals.py
    name: str = ""  # that of the file; of the manifest for a whole one; empty: a tar, by an earlier release


@dataclass(frozen=True)
class StepCost:
    """Composition of a worker's recent steps, as measured by the worker. All 0 until it is measured."""

    steps: int = 0  # number made in the generation; the figures come from the last 20
    wait_s: float = 0.0  # time of a step spent waiting in collectives; median
    reductions: int = 0  # collectives begun in a step
    bytes: int = 0  # sent by this rank into the collectives of a step
    backend: str = ""  # "gloo" or "nccl"
    rtt_s: float = 0.0  # round trip to the farthest peer, as the kernel measured it on the group's own connections
    rtt_to: str = ""  # that peer's address
    next_s: float = 0.0  # the same, to the next rank, which receives this rank's parts in a ring
    sent: int = 0  # segments sent on those connections since they opened
    resent: int = 0  # segments that the kernel had to resend


@dataclass(frozen=True)
class WorkerReport:
    """State of one worker, sent to its agent."""

    worker: str  # HOST/SLOT/INCARNATION: a restarted process has a new name
    job: str
    stage: Stage = Stage.STARTING
    generation: int = 0  # generation of the process group it holds, formed and synchronised; 0: none
    failed: int = 0  # newest generation in which a collective broke here; never decreases
    version: int = 0  # optimizer steps applied to the tensors it holds
    store: str = ""  # "address:port" of its bootstrap store; the store of the lowest rank serves a generation
    step_s: float = 0.0  # median of recent steps
    repeated: int = 0  # optimizer steps that this process had applied and lost when it went back to a commit
    resumed: int = 0  # newest generation in which it completed a step
    pause_s: float = 0.0  # from the last step before generation `resumed` to the first step in it
    checkpoint: Checkpoint | None = None  # the newest one it has written
    error: str = ""  # traceback that ends this worker; empty while it runs
    blame_peer: bool = False  # `error` came from a lost peer, not from the user's code
    blame_host: bool = False  # `error` came from this host: its disk is full, or a device lost or missing
    setup_tries: int = 0  # `error` came from `setup` or `file_mounts`: number of failed tries on this host
    setup_sure: bool = False  # another host would get the same error, such as a bucket that does not exist
    wanted: int = 0  # world size that the job's resize policy requests now; 0: no request
    resize: str = ""  # effect of the resize policy at the newest change, in one line for people
    damaged: Checkpoint | None = None  # a checkpoint at a `url` that this worker could not use
    damaged_why: str = ""  # the object of `damaged` that is missing or changed
    fetched: int = 0  # bytes received so far of the checkpoint that it is to restore
    lacks: str = ""  # digest of the checkpoint of which its peers do not have the rest: this host is to fetch all of it
    waits: bool = False  # in a collective, for its peers; False: in the user's code, or long without a sign of life
    cost: StepCost = field(default_factory=StepCost)  # for the steps in generation `resumed`
    unreached: tuple[str, ...] = ()  # "WORKER at ADDRESS": peers that it cannot connect to, in its newest generation
    recomputed: int = 0  # gradients (one per reduction) that it computed again for the step in flight; none was applied
    backend: str = ""  # "gloo" or "nccl", in the newest generation that it has formed
    read_rank: int | None = None  # rank that its script has read before it had a place
    read_size: int = 0  # the same for the world size; 0: it has read none
    outside: int = 0  # optimizer steps outside `elastic.run`, while it has not been entered
    together: bool = False  # those steps used collectives of the group: without a peer they cannot go on
    diverged: str = ""  # ranks of its generation that should be equal are not: none of their states may be trained on
    nccl: str = ""  # version of NCCL that its torch has, "2.28.9"; empty: none, or an older worker


@dataclass(frozen=True)
class RankInfo:
    """Position of a process among the workers of its job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0  # among the workers with this local_rank, one per host
    cross_size: int = 1


@dataclass(frozen=True)
class Assignment:
    """A worker's place in one generation."""

    generation: int
    rank: int  # -1: not a member; hold nothing and stand by
    members: tuple[str, ...]  # worker names by rank
    store: str  # bootstrap store of this generation
    local_rank: int = 0
    local_size: int = 1
    urgent: bool = False  # True: abort the current group. False: change at the next step boundary
    grant: str = ""  # proof, for a later dispatcher, that this generation was ordered; only dispatchers can read it

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def place(self) -> RankInfo:
        """Position of the rank. Worker names are HOST/SLOT/INCARNATION; hosts count in the order of their first
        rank."""
        hosts = [m.partition("/")[0] for m in self.members]
        wide = [h for h, workers in Counter(hosts).items() if workers > self.local_rank]
        own = hosts[self.rank]
        return RankInfo(self.rank, self.world_size, self.local_rank, self.local_size,
                        wide.index(own) if own in wide else 0, len(wide))


@dataclass(frozen=True)
class WorkerOrders:
    """State that a worker should reach, sent by its agent."""

    assignment: Assignment | None = None  # None: no generation yet; wait
    founded: bool = False  # the job has had a generation: init() returns as soon as `provisional` is known
    provisional: RankInfo | None = None  # the place that this worker will take; fixed once it has come to init()
    checkpoint_every_s: float = 60.0  # 0: never by timer
    checkpoint_now: bool = False  # no surviving copy of the state is known: write one at the next step boundary
    restore: Checkpoint | None = None  # set while no live worker of the job holds its state; path is local
    stop: bool = False  # leave at the next step boundary and exit 0
    stands_in: bool = False  # member of no generation: obey `checkpoint_now`, even if another worker led the last one
    checkpoint_url: str = ""  # folder of the job in an object store, written by workers; empty: they use the agent
    checkpoint_keep: int = 2  # number of checkpoints to keep there
    seconds_left: float | None = None  # with `checkpoint_now`: time until the last holder of the state is gone
    address: str = ""  # advertised by this host now, from the agent; empty: unchanged since the worker's start
    backend: str = ""  # the first generation's, and so that of all; empty: none has formed yet
    remark: str = ""  # to rank 0, for the log, once: the reason for the duration of a step
    sharers: tuple[str, ...] = ()  # hosts of the job, each of which may fetch a share of `restore`; empty: all of it


@dataclass(frozen=True)
class Exit:
    """End of a worker's process, from waitpid."""

    code: int = 0  # exit status, or minus the signal number
    done: bool = False  # the script reported that it ran to its end; never inferred from a status


@dataclass(frozen=True)
class WorkerState:
    """An agent's view of one worker: its last report and its process."""

    report: WorkerReport
    slot: int
    pid: int = 0
    exit: Exit | None = None  # set once log and output have arrived, or none of it did for a while: see `Unsent`
    stopped: bool = False  # its process is stopped (SIGSTOP, a debugger): it can neither train nor answer
    quiet_s: float = 0.0  # time since `version` or `waits` last changed, while it holds a generation


@dataclass(frozen=True)
class HeldJob:
    """An agent's state of one job, sent to a dispatcher that asked. Holds secrets: an agent never stores it."""

    job: str
    launch: WorkerLaunch | None = None  # None: not fetched yet
    assignments: tuple[Assignment, ...] = ()  # the newest assignment of each of its workers here
    bundle: bool = False  # this host has the archive of the working directory


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that a host was ordered to restore and could not: the fetched data has another digest."""

    job: str
    version: int
    digest: str  # the digest in the order


@dataclass(frozen=True)
class Unsent:
    """Results that lie on a host and have not reached the dispatcher yet: of a worker whose process has ended, or a
    checkpoint."""

    job: str
    kind: str  # "output", "log" or "checkpoint"
    bytes: int  # still to be sent
    sent: int = 0  # have arrived; while it grows, the dispatcher lets the host stay
    worker: str = ""  # empty for a checkpoint
    stored: bool = False  # a copy is in the checkpoint target


@dataclass(frozen=True)
class GpuReading:
    """State of one GPU of a host, as its driver reports it. None: this GPU does not report it."""

    index: int
    used_percent: int | None = None  # share of the last second in which a kernel ran
    memory_mib: int | None = None
    memory_total_mib: int | None = None
    celsius: int | None = None
    errors: int | None = None  # uncorrected ECC errors since the driver was loaded
    why: str = ""  # the driver's message, if a GPU cannot be read: then no other field is set


@dataclass(frozen=True)
class AgentReport:
    """State of one host and its workers, sent to the dispatcher."""

    host: str  # the host's request_id
    incarnation: str  # one agent process
    address: str  # advertised to peers for control, stores, gloo and NCCL
    slots: int
    workers: tuple[WorkerState, ...] = ()
    notice: Notice | None = None
    why: str = ""  # the reason it waits, such as "importing torch"; one line for `hosts`
    protocol: int = PROTOCOL
    damaged: tuple[DamagedCheckpoint, ...] = ()
    held: tuple[HeldJob, ...] = ()  # one for each job in `AgentOrders.tell`
    clock: float = 0.0  # this host's wall clock, Unix seconds, for a dispatcher that doubts its own; 0: not requested
    unsent: tuple[Unsent, ...] | None = None  # None: an older agent, which does not report it
    boot: BootStages | None = None  # the parts that the host measures; None: an older agent
    gpus: tuple[GpuReading, ...] = ()  # read each 10 s; none where the host has no nvidia-smi
    target: str = ""  # the dispatcher's probe, as this host reads it at the mounted checkpoint target; "": it cannot


@dataclass(frozen=True)
class GangOrder:
    """What the processes of a gang need besides their assignment, once all of them can start."""

    addresses: tuple[str, ...]  # those of its hosts, in the order of their first ranks
    restarts: int = 0  # number of earlier starts of this job
    saved: str = ""  # digest of the checkpoint folder's list of files that each host must have; "": none was saved


@dataclass(frozen=True)
class SlotOrder:
    """One worker that should exist. The dispatcher chooses its name; a new incarnation is a new process."""

    worker: str
    job: str
    slot: int
    local_rank: int
    orders: WorkerOrders
    gang: GangOrder | None = None  # with an assignment of rank 0 or more: the process may start
    mounted: bool = False  # all hosts of the job see the mounted checkpoint target: put its checkpoints' files there


@dataclass(frozen=True)
class AgentOrders:
    """State that a host should reach, sent by the dispatcher."""

    host: str
    workers: tuple[SlotOrder, ...] = ()  # all that should exist; every other process is ended
    refuse: str = ""  # why this agent must stop (protocol, revoked token): it stops its workers and exits
    # Jobs to report in `held`; unlisted workers keep running. The name is part of the protocol.
    tell: tuple[str, ...] = ()
    send: tuple[str, ...] = ()  # digests of bundles that the dispatcher has lost and this host may upload
    clock: bool = False  # report the host's clock; else reports of an idle host repeat each other, which costs less
    to_target: bool = False  # the host ends soon: copy what is unsent to the checkpoint target


@dataclass(frozen=True)
class WorkerLaunch:
    """Data for an agent to start a job's worker, fetched once: GET /v1/jobs/JOB/launch. Holds secrets: never stored."""

    job: str
    spec: JobSpec
    secrets: dict[str, str] = field(repr=False)
    age_s: float = 0.0  # since the job's submission


@dataclass(frozen=True)
class OutputPiece:
    """An operation on the dispatcher's copy of a worker's output folder. It is idempotent.

    `append`: bytes that follow byte `at`. `draft`: the same to a draft, which replaces the whole file
    with the `last` piece. `rename`: `name` becomes `to`. `check`: compare `bytes` bytes from `at` on, with `sha256` if
    it is given; with `last`, nothing may follow them.
    """

    do: str
    name: str  # relative, with / between folders
    at: int = 0
    bytes: int = 0
    last: bool = False
    sha256: str = ""  # for the whole file with the last piece of a draft; for the bytes with a check
    to: str = ""
    whole: int = 0  # with an append: the file's size when it was scanned; a smaller copy is partial. 0: not known


MOST_PIECES = 1000  # in one request; agents send at most half as many


def pack_pieces(pieces: list[OutputPiece], data: bytes) -> bytes:
    """Return the body of POST /v1/jobs/JOB/outputs/WORKER; `data` holds the bytes of all appends and drafts in order.

    The answer is `{held: [N, ...]}`: for each piece, the length of the file or draft by then. For a check
    and a last piece it is -1 if the copy differs and must be sent again; for a rename it is the size, or -1.
    """
    return to_text(tuple(pieces)).encode() + b"\n" + data


def unpack_pieces(body: bytes) -> list[tuple[OutputPiece, bytes]]:
    """Unpack the body that `pack_pieces` made; ValueError names the part that does not fit."""
    head, _, data = body.partition(b"\n")
    listed = json.loads(head)
    if isinstance(listed, list) and len(listed) > MOST_PIECES:
        raise ValueError(f"output: {len(listed)} pieces are more than {MOST_PIECES} in one request")
    pieces: tuple[OutputPiece, ...] = from_json(tuple[OutputPiece, ...], listed)
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
    """Return one line of JSON, without the newline."""
    return to_text(message)


def load(kind: Any, text: str | bytes) -> Any:
    """Parse the output of `dump`; ValueError names the field that does not fit."""
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
    seconds_left: float | None = None  # from its notice
    since_s: float = 0.0  # time in `state`
    why: str = ""
    gpus: tuple[GpuReading, ...] = ()
    group: str = ""  # named group of hosts


@dataclass(frozen=True)
class WorkerStatus:
    worker: str
    host: str
    rank: int  # -1: not in the generation
    stage: str
    version: int
    nccl: str = ""  # as in WorkerReport


@dataclass(frozen=True)
class SlowWorker:
    """A worker that has been slower than the median of its job for 50 steps or more."""

    worker: str
    rank: int
    compute_s: float  # its step without its waits for others
    median_s: float  # the same, of the median
    steps: int  # so many steps long


@dataclass(frozen=True)
class JobStatus:
    job: str
    name: str
    state: str
    why: str  # the reason it waits, or its activity
    generation: int = 0
    world_size: int = 0
    version: int = 0
    step_s: float = 0.0
    repeated: int = 0  # optimizer steps made again; those in flight at a loss are none: see `recomputed`
    min_workers: int = 1
    max_workers: int = 1
    checkpoint: int = 0  # version of the newest kept checkpoint; 0: none
    error: str = ""
    workers: tuple[WorkerStatus, ...] = ()
    age_s: float = 0.0  # since its submission; of an ended job, until its end
    step_why: str = ""  # the reason for `step_s`, once it is known
    output_bytes: int = 0  # collected from its workers' output folders
    output_age_s: float | None = None  # age of the newest of them; None: none was collected
    deadline_in_s: float | None = None  # negative after the deadline; None: no deadline
    work_left_s: float | None = None  # at the fleet's full target; None: unknown
    finish_in_s: float | None = None  # at the current pace; None: unknown
    slow: tuple[SlowWorker, ...] = ()
    recomputed: int = 0  # gradients computed again for the step in flight: part of the pauses
    outside: int = 0  # optimizer steps of a worker outside `elastic.run`; not part of `version`
    priority: int = 0  # as in JobSpec
    hosts: int = 0  # number of hosts that its workers are on
    hint: str = ""  # the next thing to try, if something is wrong with the script
    tail: str = ""  # failures of the script after training, on other ranks than 0: they do not fail the job
    kind: str = ""  # one of model.JOB_KINDS; "": an older dispatcher
    restarts: int = 0  # number of times that all of its processes were started anew
    exit_status: int = 0  # status of the process that failed the job; 0: none did
    folder_age_s: float | None = None  # age of the dispatcher's copy of its checkpoint folder; None: there is none
    group: str = ""  # as in JobSpec


@dataclass(frozen=True)
class EndedJob:
    """A job that has ended, with the size of its files on the dispatcher's disk."""

    job: str
    name: str
    state: str  # "unknown" where its record is damaged
    ended_s: float  # since its end
    bytes: int  # the size of all its files: logs, checkpoints, outputs
    unfetched_bytes: int  # the size of its outputs that no `spotfleet outputs` has copied


@dataclass(frozen=True)
class PolicyStatus:
    """The policy's current decision, and its limits."""

    spot: int  # hosts
    on_demand: int
    why: str
    rule: str = ""  # as in events.PolicyDecided
    for_s: float = 0.0  # age of the decision
    max_micros: int = 0  # the limits on money; 0: none
    max_micros_h: int = 0


@dataclass(frozen=True)
class UnsentStatus:
    """Results that a host still holds."""

    host: str
    job: str
    kind: str  # as in `Unsent`
    bytes: int
    quiet_s: float  # time since the last byte of this host's results arrived
    stays_s: float | None = None  # until the host ends without further progress; None: it is not about to end
    why: str = ""


@dataclass(frozen=True)
class BootMeasure:
    """Measured boots of a fleet's hosts."""

    of: str  # a pool, PROVIDER/TYPE, or "" for all
    seconds: float  # from a launch until its agent had joined: the median
    boots: int  # the newest ones, of which it is the median


@dataclass(frozen=True)
class GroupStatus:
    """Range of a named group of hosts, and how many of them should exist now."""

    group: str
    min: int
    target: int
    max: int
    wanted: int
    why: str = ""  # "" where the range alone decides
    idle_s: float = 300.0  # with a `min` of 0, a host without work for this long is given back
    slots: int = 0  # slots of the smallest host, as seen or offered; 0: not known yet


@dataclass(frozen=True)
class FleetStatus:
    """Body of GET /v1/status. `hosts` are the live ones, including the dispatcher."""

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
    tick_s: float = 0.0  # duration of the last reconcile tick, including the cloud's answers
    ends_in_s: float | None = None  # by max_lifetime
    spent_micros: int | None = None  # since the fleet was made, dispatcher included; None: not counted yet
    policy: PolicyStatus | None = None  # None: no decision yet
    past_jobs: int = 0  # ended jobs besides `jobs`: their files are on the dispatcher's disk
    unsent: tuple[UnsentStatus, ...] = ()
    boots: tuple[BootMeasure, ...] = ()  # nothing where no host has booted yet
    on_demand_spent_micros: int | None = None  # `spent_micros` if all had been on demand; None: not known
    groups: tuple[GroupStatus, ...] = ()  # in the order of the fleet file; none in a fleet without named groups
    wanted: int | None = None  # number of hosts that should exist now; None: from an earlier release
    idle_s: float = 300.0  # as in Nodes
    slots: int = 0  # as in GroupStatus, in a fleet without groups
