"""What `status` shows, from what is known. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotfleet.dispatcher.hosts import HostView
from spotfleet.fleet.fold import FleetState
from spotfleet.fleet.policy.pools import price_now
from spotfleet.messages import FleetStatus, HostStatus, JobStatus, WorkerStatus
from spotfleet.model import CloudHost, CloudState, HostState, Nodes

if TYPE_CHECKING:
    from spotfleet.dispatcher.jobs import Job


@dataclass(frozen=True)
class Scene:
    """Everything a status is made of."""

    fleet: str
    state: FleetState
    nodes: Nodes
    dispatcher: CloudHost | None
    hosts: Sequence[HostView]
    agents_why: dict[str, str]  # host -> what its agent waits for
    host_jobs: dict[str, tuple[str, ...]]
    jobs: tuple[JobStatus, ...]
    going_down: str  # why; empty while the fleet stays
    waits: str  # what the reconciler waits for
    remarks: Sequence[str] = ()  # what else a user should know
    max_lifetime_s: float = 0.0  # 0: no limit
    target: int | None = None  # hosts that there should be now; None: nodes.target


def fleet_status(scene: Scene, now: float) -> FleetStatus:
    """`now` is Unix time."""
    hosts = tuple(_host(view, scene, now) for view in scene.hosts)
    if scene.dispatcher is not None:
        hosts = (_dispatcher(scene.dispatcher, now), *hosts)
    billed = [h for h in hosts if h.state != HostState.STOPPED.value and h.why != NOT_BILLED]
    state, why = _state(scene)
    why = "; ".join([why, *scene.remarks])
    nodes = scene.nodes
    age_s = max(0.0, now - scene.state.created.at) if scene.state.created else 0.0
    return FleetStatus(scene.fleet, state, why, nodes.min, nodes.target, nodes.max, hosts, scene.jobs,
                       sum(h.price_micros_h for h in billed), sum(h.on_demand_micros_h for h in billed),
                       age_s, ends_in_s=max(0.0, scene.max_lifetime_s - age_s) if scene.max_lifetime_s else None)


NOT_BILLED = "the cloud has not listed it yet"


def _state(scene: Scene) -> tuple[str, str]:
    up = sum(v.host.state is HostState.UP for v in scene.hosts)
    if scene.going_down:
        if not scene.hosts:
            return "down", scene.going_down
        return "going down", "; ".join(w for w in (scene.going_down, f"{len(scene.hosts)} hosts are left", scene.waits)
                                       if w)
    target = scene.nodes.target if scene.target is None else scene.target
    for_now = f"of {scene.nodes.target}, as jobs ask for no more" if target < scene.nodes.target else ""
    why = "; ".join(w for w in (" ".join(filter(None, [f"{up} of {target} hosts are up", for_now])), scene.waits) if w)
    return "up" if up >= target else "degraded", why


def _host(view: HostView, scene: Scene, now: float) -> HostStatus:
    host = view.host
    price, on_demand = price_now(scene.state, host)
    why = host.why
    if host.state is HostState.LAUNCHING:
        why = scene.agents_why.get(host.request_id) or (why if host.provider_id else NOT_BILLED)
    elif host.state is HostState.UP:
        why = scene.agents_why.get(host.request_id, "") if view.connected else "its agent is not connected"
    claims = f"claims {view.claims} slots where the cloud sold {view.slots}" if view.claims else ""
    why = "; ".join(filter(None, (view.unfit, claims, host.hint, why)))
    noticed = view.leaving and view.leaving.why == "notice" and host.state is not HostState.STOPPED
    left = view.leaving.seconds_left if view.leaving and noticed else None
    return HostStatus(host.request_id, host.role.value, host.state.value, host.offer.pool, view.slots, price, on_demand,
                      host.address, scene.host_jobs.get(host.request_id, ()), left, max(0.0, now - host.since),
                      why)


def _dispatcher(own: CloudHost, now: float) -> HostStatus:
    state = HostState.UP if own.state is CloudState.RUNNING else HostState.LAUNCHING
    since = own.runs[-1].started_at if own.runs else now
    return HostStatus(own.request_id, own.role.value, state.value, own.offer.pool, 0, own.offer.price_micros_h,
                      own.offer.on_demand_micros_h, own.address, since_s=max(0.0, now - since))


def job_status(job: Job, now: float) -> JobStatus:
    """`now` is Unix time."""
    record, group, newest = job.record, job.membership, job.checkpoints.newest
    ranks = {name: rank for rank, name in enumerate(group.members)}
    workers = tuple(WorkerStatus(w.name, w.host, ranks.get(w.name, -1), w.report.stage.value, w.report.version)
                    for w in job.crew.live())
    waits = job.checkpoints.offer().wait if group.needs_restore else ""
    why = "; ".join(filter(None, (record.why, waits, job.sizing.why, job.saving.why, job.checkpoints.problem,
                                  job.checkpoints.slow, job.checkpoints.remark)))
    ended, spec = job.state.ended, job.spec
    return JobStatus(
        job.id, spec.name, job.state.value, why, group.generation, 0 if ended else len(ranks), record.version,
        job.progress.step_s, job.progress.repeated, spec.min_workers, spec.max_workers,
        newest.version if newest else 0, record.error, () if ended else workers,
        max(0.0, now - record.submitted_at), "" if ended else job.progress.step_why,
        job.outputs.bytes, job.outputs.age_s(now))
