"""What happened to a fleet. The ledger stores these and nothing else; every other figure is derived. Pure.

`at` is Unix seconds, UTC: the cloud's own time where the cloud says when, else the writer's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from spotfleet.codec import from_json, to_json
from spotfleet.model import BillingRules, CloudState, JobState, Nodes, Offer, PolicySpec, Rates, Role, Run


@dataclass(frozen=True)
class FleetCreated:
    at: float
    fleet: str
    provider: str
    nodes: Nodes
    billing: BillingRules


@dataclass(frozen=True)
class NodesChanged:
    at: float
    nodes: Nodes
    why: str


@dataclass(frozen=True)
class LaunchIntended:
    """Written before the provider is called."""

    at: float
    request_id: str
    role: Role
    offer: Offer
    why: str
    alternatives: tuple[Offer, ...] = ()  # the cloud may take one of these as well: HostPlaced says so
    together: tuple[str, ...] = ()  # request_ids, this one among them, that are launched all or none


@dataclass(frozen=True)
class LaunchRefused:
    at: float
    request_id: str
    scope: str  # pool, type, region or account
    why: str
    pools: tuple[str, ...] = ()  # of those that were named; empty: the one that was asked for first


@dataclass(frozen=True)
class HostPlaced:
    """The cloud took another pool than the one asked for first: that one is the host's, from the start."""

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
    missing: bool = False  # absent from the listing: the rest is as last seen, or our conclusion if TERMINATED
    disk_gib: int = 0
    addresses: int = 0
    ended_at: float | None = None  # when the machine ended for good, its disk with it, if the cloud says when


@dataclass(frozen=True)
class HostJoined:
    at: float
    request_id: str
    incarnation: str


@dataclass(frozen=True)
class HostSilent:
    """Its agent is no longer connected; the next HostJoined ends the silence."""

    at: float
    request_id: str


@dataclass(frozen=True)
class HostNoticed:
    at: float
    request_id: str
    seconds_left: float
    action: str
    notice: str = "interruption"  # Notice.kind; not `kind`, which names the event in JSON
    why: str = ""  # as the cloud says it


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
    """Our clock shows `by_s` less than it did: from here on the instants of earlier events count as so much earlier,
    so that nothing waits until the clock has caught up. Below 0 it was set forward, and nothing is over at once."""

    at: float
    by_s: float


@dataclass(frozen=True)
class TokenRevoked:
    """Nothing is taken from this host any more; it is terminated, and the fleet replaces it."""

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
    """What a region charges beside machines, from `at` on: a bill uses what was stamped, never today's catalog."""

    at: float
    provider: str
    region: str
    rates: Rates


@dataclass(frozen=True)
class PolicyDecided:
    """How many hosts of either market should exist from now on; written when that, or the reason, changes."""

    at: float
    spot: int
    on_demand: int
    why: str
    rule: str = ""  # which part of the policy: "base", "auto", "deadline", "budget", ...
    shun: tuple[str, ...] = ()  # spot pools in which nothing is launched, as on demand costs no more


@dataclass(frozen=True)
class PolicyChanged:
    """The fleet file says something else of markets, deadlines or money."""

    at: float
    policy: PolicySpec
    why: str


@dataclass(frozen=True)
class BudgetReached:
    """So much of a limit on money is spent or burnt that somebody should know, or that the fleet ends."""

    at: float
    limit: str  # "max_cost" or "max_hourly_cost"
    percent: int  # 80, 95: of what can be spent until the end has to begin; 100: it begins
    micros: int  # spent, or burnt per hour
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
    work_s: float = 0.0  # at the fleet's full target; 0: not said
    work_steps: int = 0  # 0: not said
    work_host_s: float = 0.0  # `work_s` in host-seconds: the target may be another one later


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
    """A generation has another size than the one before, and the job's resize policy has done its part."""

    at: float
    job: str
    generation: int
    from_size: int
    to_size: int
    policy: str  # the job's; a script may have its own
    detail: str  # what was done, by rank 0


@dataclass(frozen=True)
class JobResumed:
    """The first step in a new generation is done: what the change cost."""

    at: float
    job: str
    generation: int
    version: int
    repeated: int  # steps whose gradients had to be computed again
    pause_s: float  # longest over the members that were training before


@dataclass(frozen=True)
class JobProgress:
    """Written about every 10 s while a job trains, and at its end."""

    at: float
    job: str
    version: int
    step_s: float
    step_bytes: int = 0  # that each worker hands to the reductions of a step; 0: not known


@dataclass(frozen=True)
class StepExplained:
    """Why a step takes as long as it does: once in a generation, and again when it takes another time by half.

    `step_s` is the sum of the next three: what a usual rank computes, what it waits for the slowest one, and what even
    that one waits for the reductions. `dispatcher/explain.py` says where each comes from.
    """

    at: float
    job: str
    generation: int
    step_s: float
    compute_s: float
    lag_s: float
    reduce_s: float
    rtt_s: float  # the longest between two of its hosts
    between: tuple[str, ...]  # those two; empty where none is known
    slowest: str  # the worker for whom the others wait; empty where none does
    why: str


@dataclass(frozen=True)
class SetupFailed:
    """What comes before a job's script, `file_mounts` and `setup`, has failed on a host for the `tries`th time."""

    at: float
    job: str
    host: str
    tries: int
    why: str  # the failing line first, then the end of its output


@dataclass(frozen=True)
class CheckpointKept:
    at: float
    job: str
    version: int
    generation: int
    digest: str
    bytes: int
    url: str = ""  # its folder in an object store; empty: on the dispatcher's disk


@dataclass(frozen=True)
class TakenOver:
    """A new dispatcher's machine goes on with a fleet whose last one is gone with its disk."""

    at: float
    host: str  # the new dispatcher's
    restored: bool  # the ledger was copied back from the checkpoint target; else it begins here
    why: str  # what was found, and what is lost


@dataclass(frozen=True)
class TargetChanged:
    """The checkpoint target could not be written to; or, with an empty `why`, it can again."""

    at: float
    target: str
    why: str


@dataclass(frozen=True)
class CheckpointLost:
    """One that was kept is of no use any more: it has been set aside, and the next older takes its place."""

    at: float
    job: str
    version: int
    generation: int
    digest: str
    why: str


@dataclass(frozen=True)
class CheckpointInTime:
    """Everybody who held a job's state had to go: whether what it had reached was kept before. Once for each time."""

    at: float
    job: str
    version: int  # reached
    kept_version: int  # of the newest checkpoint; below `version`: the steps between are made again
    seconds_left: float  # until the first of them was to go; 0: they are gone
    why: str


@dataclass(frozen=True)
class HistoryLost:
    """The ledger of before was damaged: what it held and what the cloud no longer lists is not known here."""

    at: float
    kept_as: str  # the damaged file's name, beside the ledger
    why: str


@dataclass(frozen=True)
class FleetDown:
    at: float
    why: str


Event = (
    FleetCreated | NodesChanged | LaunchIntended | LaunchRefused | HostPlaced | HostListed | HostJoined | HostSilent
    | HostNoticed | HostDraining | TerminateIntended | ClockSetBack | TokenRevoked | PriceChanged | RatesStamped
    | PolicyDecided | PolicyChanged | BudgetReached | JobSubmitted | JobChanged | GenerationFormed | JobResized
    | JobResumed | JobProgress | StepExplained | SetupFailed | CheckpointKept | CheckpointLost | CheckpointInTime
    | TakenOver | TargetChanged | HistoryLost | FleetDown
)
KINDS: dict[str, type] = {k.__name__: k for k in Event.__args__}


def event_to_json(event: Event) -> dict[str, Any]:
    """{"kind": "HostJoined", "at": ..., ...}"""
    return {"kind": type(event).__name__, **to_json(event)}


def event_from_json(data: dict[str, Any]) -> Event:
    """Raises ValueError for an unknown kind or a field that does not fit."""
    kind = KINDS.get(data.get("kind", ""))
    if kind is None:
        raise ValueError(f"unknown event kind {data.get('kind')!r}")
    return from_json(kind, {f.name: data[f.name] for f in fields(kind) if f.name in data})
