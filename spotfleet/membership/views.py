"""Input and output values of Membership, frozen. Pure.

`WorkerView` is the input; `Change` values and `Orders` are the output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from spotfleet.membership.pace import Pace
from spotfleet.protocol.messages import Assignment, RankInfo, Stage


@dataclass(frozen=True)
class WorkerView:
    """The dispatcher's knowledge of one worker now."""

    worker: str  # HOST/SLOT/INCARNATION
    host: str
    local_rank: int
    stage: Stage
    generation: int = 0  # group held: formed and synchronised; 0 is none
    failed: int = 0  # newest generation in which a collective broke here
    version: int = 0  # below 0: its tensors are half received and useless
    store: str = ""  # address of its bootstrap store; without one it enters no generation
    leaving_s: float | None = None  # seconds left until its host goes or must be free; None: it stays
    leaving_why: str = ""  # "notice" or "drain"
    silent: bool = False  # its agent is not connected now: dead, or only restarting
    report_age_s: float = 0.0  # with `silent`: time since its agent's last report; a cut shows seconds later
    exited: bool = False  # confirmed dead: by waitpid, or the provider lists its host as ended
    stopped: bool = False  # its process is stopped (SIGSTOP): it keeps its state, and may go on later
    quiet_s: float = 0.0  # since `version` or `waits` last changed, while it holds `generation`
    waits: bool = False  # in a collective, for its peers; False: in the user's code
    step_s: float = 0.0  # median of its recent steps
    resumed: int = 0  # newest generation in which it completed a step
    fetches: bool = False  # it is still receiving the checkpoint to restore
    unreached: tuple[str, ...] = ()  # "WORKER at ADDRESS": members of its newest generation that it cannot reach
    backend: str = ""  # gloo or nccl, in the newest generation that it has formed
    read_rank: int = -1  # the rank that its script has read before it had one; -1: none. It may get no other
    read_size: int = 0  # the same for the world size; 0: none

    @property
    def answers(self) -> bool:
        return not (self.silent or self.exited or self.stopped)


@dataclass(frozen=True)
class Tuning:
    """Timeouts and limits of Membership."""

    start_settle_s: float = 10.0  # wait of the first generation for late starters, and of a broken one for its founders
    join_settle_s: float = 0.2  # joins closer together share one generation
    leave_lead_s: float = 10.0  # a noticed worker leaves this long before its end, replaced or not
    short_lead_s: float = 5.0  # the same where the notice was short from the start
    short_notice_s: float = 30.0  # a notice that begins with less is short
    drain_wait_s: float = 20.0  # wait of a drain for a replacement
    failure_grace_s: float = 0.5  # between a broken collective and re-forming: evidence of a death may come
    silent_s: float = 3.0  # a member without reports for this long, its agent disconnected, counts as dead
    restart_silent_s: float = 15.0  # the same for a member without any report since the dispatcher's start
    form_timeout_s: float = 30.0  # doubled with each failure in a row, so that a slow transfer completes eventually
    # unreachable for this long, in two probes (worker/connectivity.py): one of the pair is evicted
    parted_s: float = 6.0
    stopped_grace_s: float = 1.0  # a member that is stopped for this long counts as lost
    stopped_limit_s: float = 600.0  # then it is ended: it occupies a slot, and may hold the only state
    hang_s: float = 30.0  # without a step for this long, while some wait for others: those others are evicted
    hang_steps: float = 20.0  # but never before this number of usual steps would have been made
    hang_first_s: float = 120.0  # the same before the first step of a generation, which may compile
    misfit_s: float = 30.0  # wait of a spare, bound to a place by what its script has read, for others that start
    finish_timeout_s: float = 60.0  # time for stragglers once one worker has finished
    pace: Pace = field(default_factory=Pace)  # for changes that we choose
    max_failures: int = 3  # failures in a row between the same members before one of them is evicted


class Phase(Enum):
    STARTING = "starting"  # no generation yet
    FORMING = "forming"  # a generation is ordered; not every member holds it
    RUNNING = "running"
    HOLDING = "holding"  # state is kept in memory (or a checkpoint) until enough workers are ready
    FINISHED = "finished"


@dataclass(frozen=True)
class Ordered:
    """Decision on a generation. Write it down before its orders go out: a restarted dispatcher adopts it."""

    generation: int
    members: tuple[str, ...]  # by rank; empty: all stand by with their state, at the next step boundary
    cause: str  # "start", "notice", "death", "join", "drain", "failure", "resume"
    why: str
    version: int  # newest known at the decision


@dataclass(frozen=True)
class Formed:
    """A generation that every member holds: events.GenerationFormed."""

    generation: int
    members: tuple[str, ...]
    cause: str
    why: str
    version: int


@dataclass(frozen=True)
class Evicted:
    """Workers that must be ended; the host may start new incarnations in their place."""

    generation: int
    workers: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Finished:
    """Return of the training function on all live ranks. Emitted once."""

    generation: int
    members: tuple[str, ...]
    version: int


Change = Ordered | Formed | Evicted | Finished


@dataclass(frozen=True)
class Orders:
    """The parts of messages.WorkerOrders that Membership decides."""

    assignment: Assignment | None = None
    founded: bool = False
    provisional: RankInfo | None = None
    checkpoint_now: bool = False
    needs_restore: bool = False  # set `restore` to the newest kept checkpoint, if the job has one
    backend: str = ""  # that of the job's first generation
    stands_in: bool = False  # while all stand by: this worker writes the checkpoint, whatever its rank was
