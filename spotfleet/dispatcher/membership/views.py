"""What Membership sees and says: frozen values. Pure.

`WorkerView` comes in; `Change` values and `Orders` go out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from spotfleet.dispatcher.membership.pace import Pace
from spotfleet.messages import Assignment, Stage


@dataclass(frozen=True)
class WorkerView:
    """All that the dispatcher knows of one worker now."""

    worker: str  # HOST/SLOT/INCARNATION
    host: str
    local_rank: int
    stage: Stage
    generation: int = 0  # group held: formed and synchronised; 0 is none
    failed: int = 0  # newest generation in which a collective broke here
    version: int = 0  # below 0: its tensors are half received, good for nothing
    store: str = ""  # address of its bootstrap store; without one it enters no generation
    leaving_s: float | None = None  # seconds left until its host goes or must be free; None: it stays
    leaving_why: str = ""  # "notice" or "drain"
    silent: bool = False  # its agent is not connected now: dead, or only restarting
    unheard_s: float = 0.0  # and had said nothing for so long, as the kernel needs seconds to see a cut
    exited: bool = False  # confirmed dead: by waitpid, or the provider lists its host as ended
    stopped: bool = False  # its process stands still (SIGSTOP): it keeps what it holds, and may go on later
    quiet_s: float = 0.0  # since `version` or `waits` last changed, while it holds `generation`
    waits: bool = False  # in a collective, for its peers; else in code of its own
    step_s: float = 0.0  # median of its recent steps
    resumed: int = 0  # newest generation in which it completed a step
    fetches: bool = False  # the checkpoint that it is to restore still comes
    unreached: tuple[str, ...] = ()  # "WORKER at ADDRESS": members of its newest generation that it finds no way to

    @property
    def answers(self) -> bool:
        return not (self.silent or self.exited or self.stopped)


@dataclass(frozen=True)
class Tuning:
    """Every wait of Membership, in seconds."""

    start_settle_s: float = 10.0  # the first generation waits so long for late starters, a broken one for its founders
    join_settle_s: float = 0.2  # joins closer together share one generation
    leave_lead_s: float = 10.0  # a noticed worker leaves when so much is left, replaced or not
    short_lead_s: float = 5.0  # the same where the notice was short from the start
    short_notice_s: float = 30.0  # a notice that begins with less is short
    drain_wait_s: float = 20.0  # so long a drain waits for a replacement
    failure_grace_s: float = 0.5  # between a broken collective and re-forming: evidence of a death may come
    silent_s: float = 3.0  # a member whose agent is away and says nothing for so long is taken for dead
    restart_silent_s: float = 15.0  # the same for one that we have not heard yet since we started
    form_timeout_s: float = 30.0  # doubled with each failure in a row, so that a slow transfer ends some day
    parted_s: float = 6.0  # a member finds no way to another for so long, at two looks (train/reach.py): one goes
    stopped_grace_s: float = 1.0  # a member that is stopped for so long is taken for lost
    stopped_limit_s: float = 600.0  # and ended after so long, since it takes a slot and may hold the only state
    hang_s: float = 30.0  # no step for so long, and some wait for others: those are evicted
    hang_steps: float = 20.0  # but never before so many of its usual steps would have been made
    hang_first_s: float = 120.0  # the same before the first step of a generation, which may compile
    finish_timeout_s: float = 60.0  # so long stragglers may take once one worker has finished
    pace: Pace = field(default_factory=Pace)  # of the changes that we choose ourselves
    max_failures: int = 3  # failures in a row between the same members before one of them is evicted


class Phase(Enum):
    STARTING = "starting"  # no generation yet
    FORMING = "forming"  # one is ordered; not every member holds it
    RUNNING = "running"
    HOLDING = "holding"  # state is kept in memory (or a checkpoint) until enough workers are ready
    FINISHED = "finished"


@dataclass(frozen=True)
class Ordered:
    """A generation was decided. Write it down before its orders go out: a restarted dispatcher adopts it."""

    generation: int
    members: tuple[str, ...]  # by rank; empty: all stand by with their state, at the next step boundary
    cause: str  # "start", "notice", "death", "join", "drain", "failure", "resume"
    why: str
    version: int  # newest known when it was decided


@dataclass(frozen=True)
class Formed:
    """Every member holds the generation: events.GenerationFormed."""

    generation: int
    members: tuple[str, ...]
    cause: str
    why: str
    version: int


@dataclass(frozen=True)
class Evicted:
    """These workers must be ended; the host may start new incarnations in their place."""

    generation: int
    workers: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Finished:
    """The training function has returned on all ranks that live. Said once."""

    generation: int
    members: tuple[str, ...]
    version: int


Change = Ordered | Formed | Evicted | Finished


@dataclass(frozen=True)
class Orders:
    """The parts of messages.WorkerOrders that Membership decides."""

    assignment: Assignment | None = None
    founded: bool = False
    provisional_rank: int = 0
    provisional_size: int = 1
    checkpoint_now: bool = False
    needs_restore: bool = False  # set `restore` to the newest kept checkpoint, if the job has one
    stands_in: bool = False  # while all stand by: this one writes it, whatever its rank was
