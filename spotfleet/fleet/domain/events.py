"""Event kinds of the ledger. It stores nothing else; every other figure is derived from them. Pure.

`at` is Unix seconds, UTC: the cloud's own time where the cloud reports one, else the writer's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from spotfleet.codec import from_json, to_json
from spotfleet.model import BillingRules, BootStages, CloudState, JobState, Nodes, Offer, PolicySpec, Rates, Role, Run


@dataclass(frozen=True)
class FleetCreated:
    at: float
    fleet: str
    provider: str
    nodes: Nodes  # range of all groups together
    billing: BillingRules
    groups: dict[str, Nodes] = field(default_factory=dict)  # range of each named group


@dataclass(frozen=True)
class NodesChanged:
    at: float
    nodes: Nodes
    why: str
    group: str = ""  # the one whose range this is


@dataclass(frozen=True)
class LaunchIntended:
    """Written before the provider is called."""

    at: float
    request_id: str
    role: Role
    offer: Offer
    why: str
    alternatives: tuple[Offer, ...] = ()  # the cloud may choose one of these instead; HostPlaced records that
    together: tuple[str, ...] = ()  # request_ids of the gang, this one included: all are launched or none
    group: str = ""


@dataclass(frozen=True)
class LaunchRefused:
    at: float
    request_id: str
    scope: str  # pool, type, region or account
    why: str
    pools: tuple[str, ...] = ()  # the named pools that refused; empty: the pool that was requested first


@dataclass(frozen=True)
class HostPlaced:
    """The cloud placed the host in another pool than the one requested first. It is the host's pool from the start."""

    at: float
    request_id: str
    offer: Offer


@dataclass(frozen=True)
class HostListed:
    """The provider's listing of a host changed; `runs` are complete, as the cloud bills them."""

    at: float
    request_id: str
    provider_id: str
    state: CloudState
    runs: tuple[Run, ...]
    address: str = ""
    port: int = 0
    why: str = ""
    missing: bool = False  # absent from the listing: the rest is as last listed, or our conclusion if TERMINATED
    disk_gib: int = 0
    addresses: int = 0
    ended_at: float | None = None  # when machine and disk ended for good, if the cloud reports it


@dataclass(frozen=True)
class HostJoined:
    at: float
    request_id: str
    incarnation: str
    boot: BootStages | None = None  # at the end of a boot, as far as it was measured; None also from earlier releases


@dataclass(frozen=True)
class HostSilent:
    """Its agent is no longer connected; the next HostJoined ends the silence."""

    at: float
    request_id: str


@dataclass(frozen=True)
class HostFailed:
    """Its machine reports that it cannot become a host, before an agent runs on it."""

    at: float
    request_id: str
    why: str
    broken: bool = False  # the machine itself is, such as a GPU: it is ended at once
    then: str = ""  # what happens now, for people


@dataclass(frozen=True)
class HostNoticed:
    at: float
    request_id: str
    seconds_left: float
    action: str
    notice: str = "interruption"  # Notice.kind; not `kind`, which names the event in JSON
    why: str = ""  # in the cloud's words


@dataclass(frozen=True)
class HostDraining:
    at: float
    request_id: str
    why: str


@dataclass(frozen=True)
class TerminateIntended:
    """Written before the provider is called."""

    at: float
    request_id: str
    why: str


@dataclass(frozen=True)
class ClockSetBack:
    """Our clock was set back by `by_s`, or forward if that is below 0.

    From here on, the instants of earlier events count as `by_s` earlier: no wait is prolonged until the clock has
    caught up, and after a step forward no wait ends at once.
    """

    at: float
    by_s: float


@dataclass(frozen=True)
class TokenRevoked:
    """The dispatcher rejects this host's messages from now on; the fleet terminates and replaces it."""

    at: float
    request_id: str
    why: str


@dataclass(frozen=True)
class PriceChanged:
    at: float  # when the price came into force, by the cloud's clock
    pool: str
    micros_h: int
    on_demand_micros_h: int


@dataclass(frozen=True)
class RatesStamped:
    """Charges of a region besides machines, from `at` on. A bill uses stamped rates, never today's catalog."""

    at: float
    provider: str
    region: str
    rates: Rates


@dataclass(frozen=True)
class PolicyDecided:
    """Number of hosts of each market that should exist from now on; written when it, or its reason, changes."""

    at: float
    spot: int
    on_demand: int
    why: str
    rule: str = ""  # the part of the policy that decided: "base", "auto", "deadline", "budget", ...
    shun: tuple[str, ...] = ()  # spot pools without new launches, because on demand costs no more
    group: str = ""


@dataclass(frozen=True)
class DemandDecided:
    """Number of hosts of a group that the fleet's Ray cluster and jobs need from now on; written when it changes."""

    at: float
    hosts: int
    why: str
    group: str = ""


@dataclass(frozen=True)
class DemandUnmet:
    """All that waits in the fleet's Ray cluster for hosts that there will not be; written when its shapes change."""

    at: float
    shapes: dict[str, str] = field(default_factory=dict, hash=False)  # shape -> why there is no host for it


@dataclass(frozen=True)
class PolicyChanged:
    """The fleet file's settings for markets, deadlines or money changed."""

    at: float
    policy: PolicySpec
    why: str


@dataclass(frozen=True)
class BudgetReached:
    """Spending reached a share of a cost limit: 80 or 95 percent warn, 100 percent ends the fleet."""

    at: float
    limit: str  # "max_cost" or "max_hourly_cost"
    percent: int  # 80, 95: of the money available until the shutdown must begin; 100: the shutdown begins
    micros: int  # spent, or the cost per hour
    limit_micros: int
    why: str


@dataclass(frozen=True)
class JobSubmitted:
    at: float
    job: str
    name: str
    command: str  # for people; never holds secrets
    min_workers: int
    max_workers: int
    deadline_at: float = 0.0  # 0: none
    work_s: float = 0.0  # at the fleet's full target; 0: not given
    work_steps: int = 0  # 0: not given
    work_host_s: float = 0.0  # `work_s` in host-seconds: the target may change later
    job_kind: str = ""  # one of model.JOB_KINDS; "": from an earlier release


@dataclass(frozen=True)
class JobChanged:
    at: float
    job: str
    state: JobState
    why: str
    version: int = 0  # optimizer steps applied by then


@dataclass(frozen=True)
class GenerationFormed:
    at: float
    job: str
    generation: int
    members: tuple[str, ...]  # worker names by rank
    cause: str  # "start", "notice", "death", "join", "drain", "failure", "resume"
    why: str
    version: int = 0


@dataclass(frozen=True)
class JobResized:
    """A generation differs in size from the one before, and the job's resize policy has been applied."""

    at: float
    job: str
    generation: int
    from_size: int
    to_size: int
    policy: str  # the job's; a script may have its own
    detail: str  # the changes that rank 0 made


@dataclass(frozen=True)
class JobResumed:
    """The first step in a new generation is done; the cost of the change."""

    at: float
    job: str
    generation: int
    version: int
    repeated: int  # optimizer steps that had been made, were lost, and are made again
    pause_s: float  # longest over the members that were training before, up to their first step in the generation
    recomputed: int = 0  # gradients computed again for the step in flight, in the pause
    lost: int | None = None  # versions among `repeated` that are made again after the pause; None: all
    first_steps: dict[str, float] = field(default_factory=dict)  # host -> seconds from its launch to its first step

    @property
    def after_pause(self) -> int:
        """Number of steps made again after the pause: their time is not in `pause_s`."""
        return self.repeated if self.lost is None else self.lost


@dataclass(frozen=True)
class ScriptsRan:
    """Workers run a job's script or command outside training: written when they change, and when training begins.

    Their slots are held by the job from `since` on, until the next line of this kind, generation or end of the job.
    """

    at: float
    job: str
    workers: tuple[str, ...]  # empty: none any more
    since: float
    why: str
    known: bool = False  # True: they train in elastic.run from now on


@dataclass(frozen=True)
class TrialHeld:
    """A trial of Ray Tune has other workers on the job's Ray cluster than before.

    From `at` on it holds these parts of hosts, until its next line or the end of the job.
    """

    at: float
    job: str
    trial: str  # Tune's id
    name: str
    workers: int  # 0: none any more
    hosts: dict[str, int] = field(default_factory=dict, hash=False)  # host -> millionths of it


@dataclass(frozen=True)
class JobProgress:
    """Written about every 10 s while a job trains, and at its end."""

    at: float
    job: str
    version: int
    step_s: float
    step_bytes: int = 0  # bytes that each worker passes to the reductions of a step; 0: not known


@dataclass(frozen=True)
class StepExplained:
    """Explanation of the step time: written once in a generation, and again when the time has changed by half.

    `step_s` is the sum of the next three: the time in which a usual rank computes, its wait for the slowest rank, and
    the wait of the slowest rank for the reductions. `fleet/domain/step_cost.py` describes how each is measured.
    """

    at: float
    job: str
    generation: int
    step_s: float
    compute_s: float
    lag_s: float
    reduce_s: float
    rtt_s: float  # the longest round trip between two of its hosts
    between: tuple[str, ...]  # those two hosts; empty if no round trip is known
    slowest: str  # the worker for which the others wait; empty if they wait for none
    why: str


@dataclass(frozen=True)
class SetupFailed:
    """A job's preparation (`file_mounts` or `setup`, before its script) failed on a host for the `tries`th time."""

    at: float
    job: str
    host: str
    tries: int
    why: str  # the failing line first, then the end of its output


@dataclass(frozen=True)
class LogsCut:
    """The oldest output of a job was removed, as its logs take more than `limit_bytes`. Once for each source."""

    at: float
    job: str
    source: str  # the host or "rank-N" whose output it was
    limit_bytes: int


@dataclass(frozen=True)
class CheckpointKept:
    at: float
    job: str
    version: int
    generation: int
    digest: str
    bytes: int
    url: str = ""  # its folder in an object store or at the mounted target; empty: on the dispatcher's disk


@dataclass(frozen=True)
class JobsPruned:
    """A person had the files of ended jobs removed from the dispatcher's disk. Their events, and cost, stay here."""

    at: float
    jobs: tuple[str, ...]
    bytes: int
    unfetched: tuple[str, ...] = ()  # those with outputs that had not been copied


@dataclass(frozen=True)
class TakenOver:
    """A new dispatcher machine continues a fleet whose last dispatcher is gone with its disk."""

    at: float
    host: str  # the new dispatcher's
    restored: bool  # the ledger was copied back from the checkpoint target; otherwise it begins here
    why: str  # lists what was found and what is lost


@dataclass(frozen=True)
class TargetChanged:
    """Writing to the checkpoint target failed; or, with an empty `why`, it works again."""

    at: float
    target: str
    why: str


@dataclass(frozen=True)
class CheckpointLost:
    """A kept checkpoint became unusable and has been set aside, or one that somebody else put forward was refused: the
    next older one counts."""

    at: float
    job: str
    version: int
    generation: int
    digest: str
    why: str


@dataclass(frozen=True)
class RanksDiverged:
    """Ranks that should have held equal training states did not, so none of their states was trained on."""

    at: float
    job: str
    version: int  # reached
    checkpoint: int  # version of the checkpoint that the job goes on from; 0: there is none, and the job fails
    why: str  # names the first tensor or value that differs, and the ranks


@dataclass(frozen=True)
class CheckpointInTime:
    """All holders of a job's state had to leave: records whether its progress was kept before. Once for each time."""

    at: float
    job: str
    version: int  # reached
    kept_version: int  # that of the newest checkpoint; below `version`: the steps between are repeated
    seconds_left: float  # until the first holder had to leave; 0: they are gone
    why: str


@dataclass(frozen=True)
class ResultsLost:
    """Results of a job ended with a host before the dispatcher had them. Written before the fleet ends the host."""

    at: float
    job: str
    host: str
    what: str  # "output", "log" or "checkpoint"
    bytes: int  # as last reported; 0: not known
    why: str
    kept_at: str = ""  # a copy in the checkpoint target; empty: lost for good


@dataclass(frozen=True)
class HistoryLost:
    """The previous ledger was damaged: this one lacks what was in it, unless the cloud still lists it."""

    at: float
    kept_as: str  # the damaged file's name, beside the ledger
    why: str


@dataclass(frozen=True)
class FileDamaged:
    """A file in the dispatcher's home could not be read, or was missing; the dispatcher goes on without it."""

    at: float
    file: str  # relative to the home
    kept_as: str  # the damaged file's new name, beside it; empty if none was there or it was removed
    why: str
    then: str  # what follows, and the next thing to try

    @property
    def text(self) -> str:
        kept = f"; it is kept as {self.kept_as}" if self.kept_as else ""
        return f"{self.why}{kept}: {self.then}"


@dataclass(frozen=True)
class DownDecided:
    """The fleet is to end. The dispatcher also keeps the decision in `down.json`; one of the two may be lost.

    Written again where a decision changes, as by `spotfleet down --discard` of a fleet that goes down.
    """

    at: float
    why: str
    by_ourselves: bool  # by a limit of the fleet file, and not by `spotfleet down`
    limited: bool = False  # max_cost or max_lifetime is reached: hosts get little time to send results
    discard: bool = False  # results that do not arrive are given up


@dataclass(frozen=True)
class FleetDown:
    at: float
    why: str


JobEvent = (  # each has the field `job`
    JobSubmitted | JobChanged | GenerationFormed | JobResized | JobResumed | JobProgress | StepExplained | SetupFailed
    | CheckpointKept | CheckpointLost | CheckpointInTime | ScriptsRan | RanksDiverged | LogsCut | ResultsLost
    | TrialHeld
)
Event = (
    FleetCreated | NodesChanged | LaunchIntended | LaunchRefused | HostPlaced | HostListed | HostJoined | HostSilent
    | HostFailed | HostNoticed | HostDraining | TerminateIntended | ClockSetBack | TokenRevoked | PriceChanged
    | RatesStamped | PolicyDecided | PolicyChanged | BudgetReached | JobEvent | JobsPruned | TakenOver | TargetChanged
    | HistoryLost | FileDamaged | DownDecided | FleetDown | DemandDecided | DemandUnmet
)
KINDS: dict[str, type] = {k.__name__: k for k in Event.__args__}


def event_to_json(event: Event) -> dict[str, Any]:
    """Return {"kind": "HostJoined", "at": ..., ...}."""
    return {"kind": type(event).__name__, **to_json(event)}


def event_from_json(data: dict[str, Any]) -> Event:
    """Return the event. Raises ValueError for an unknown kind or a field that does not fit."""
    kind = KINDS.get(data.get("kind", ""))
    if kind is None:
        raise ValueError(f"unknown event kind {data.get('kind')!r}")
    return from_json(kind, {f.name: data[f.name] for f in fields(kind) if f.name in data})
