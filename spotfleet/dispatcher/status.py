"""Status of the fleet, built from known state. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spotfleet.dispatcher.hosts import HostView
from spotfleet.fleet.domain.state import FleetState
from spotfleet.fleet.planner.groups import GroupHosts
from spotfleet.fleet.policy.lifetimes import boot_times
from spotfleet.fleet.policy.pools import price_now
from spotfleet.model import CloudHost, CloudState, HostState, Nodes
from spotfleet.protocol.messages import BootMeasure, FleetStatus, GpuReading, GroupStatus, HostStatus, JobStatus
from spotfleet.words import counted


@dataclass(frozen=True)
class StatusInput:
    """Inputs of a fleet status."""

    fleet: str
    state: FleetState
    nodes: Nodes
    dispatcher: CloudHost | None
    hosts: Sequence[HostView]
    agents_why: dict[str, str]  # host -> the reason its agent waits
    host_jobs: dict[str, tuple[str, ...]]
    jobs: tuple[JobStatus, ...]
    going_down: str  # the reason; empty while the fleet stays up
    waits: str  # the reason the reconciler waits
    remarks: Sequence[str] = ()  # further remarks for users
    max_lifetime_s: float = 0.0  # 0: no limit
    sizes: dict[str, GroupHosts] = field(default_factory=dict)  # hosts needed now, by group; empty: nodes.target
    ranges: dict[str, Nodes] = field(default_factory=dict)  # by group
    slots: dict[str, int] = field(default_factory=dict)  # slots of the smallest host, by group


def fleet_status(inputs: StatusInput, now: float) -> FleetStatus:
    """Build the status; `now` is Unix time."""
    hosts = tuple(_host(view, inputs, now) for view in inputs.hosts)
    if inputs.dispatcher is not None:
        hosts = (_dispatcher(inputs.dispatcher, now), *hosts)
    billed = [h for h in hosts if h.state != HostState.STOPPED.value and h.why != NOT_BILLED]
    state, why = _state(inputs)
    why = "; ".join([why, *inputs.remarks])
    nodes = inputs.nodes
    age_s = max(0.0, now - inputs.state.created.at) if inputs.state.created else 0.0
    return FleetStatus(inputs.fleet, state, why, nodes.min, nodes.target, nodes.max, hosts, inputs.jobs,
                       sum(h.price_micros_h for h in billed), sum(h.on_demand_micros_h for h in billed),
                       age_s, ends_in_s=max(0.0, inputs.max_lifetime_s - age_s) if inputs.max_lifetime_s else None,
                       boots=tuple(BootMeasure(of, round(time.seconds, 2), time.boots)
                                   for of, time in boot_times(inputs.state.history).items()),
                       groups=tuple(GroupStatus(group, n.min, n.target, n.max, inputs.sizes[group].hosts,
                                                inputs.sizes[group].why, n.idle_s, inputs.slots.get(group, 0))
                                    for group, n in inputs.ranges.items() if group and group in inputs.sizes),
                       wanted=None if inputs.going_down else _wanted(inputs), idle_s=nodes.idle_s,
                       slots=inputs.slots.get("", 0))


NOT_BILLED = "the provider has not listed it yet"


def _state(inputs: StatusInput) -> tuple[str, str]:
    up = sum(v.host.state is HostState.UP for v in inputs.hosts)
    if inputs.going_down:
        if not inputs.hosts:
            return "down", inputs.going_down
        left = f"{counted(len(inputs.hosts), 'host')} left"
        return "going down", "; ".join(w for w in (inputs.going_down, left, inputs.waits) if w)
    target = _wanted(inputs)
    reasons = [f"{group}: {size.why}" if group else size.why for group, size in inputs.sizes.items() if size.why]
    for_now = f" ({'; '.join(reasons)})" if reasons else ""
    if not for_now and target < inputs.nodes.target:
        for_now = f" (target {inputs.nodes.target}: jobs need no more now)"
    ups = f"{up} of {target} hosts are up" if target != 1 else f"{up or 'no'} host is up"
    ups = f"{counted(up, 'host')} up, {target} needed" if up > target else ups
    ups = ups if up or target else "no host is up and none is needed"
    why = "; ".join(w for w in (ups + for_now, inputs.waits) if w)
    return "up" if up >= target else "degraded", why


def _wanted(inputs: StatusInput) -> int:
    """Return the number of hosts that should exist now."""
    return sum(size.hosts for size in inputs.sizes.values()) if inputs.sizes else inputs.nodes.target


def _host(view: HostView, inputs: StatusInput, now: float) -> HostStatus:
    host = view.host
    price, on_demand = price_now(inputs.state, host)
    why = host.why
    if host.state is HostState.LAUNCHING:
        why = inputs.agents_why.get(host.request_id) or (why if host.provider_id else NOT_BILLED)
    elif host.state is HostState.UP:
        why = inputs.agents_why.get(host.request_id, "") if view.connected else "its agent is not connected"
    claims = f"claims {counted(view.claims, 'slot')} where the cloud sold {view.slots}" if view.claims else ""
    why = "; ".join(filter(None, (view.unfit, claims, host.hint, *_broken_gpus(view.gpus), why)))
    noticed = view.leaving and view.leaving.why == "notice" and host.state is not HostState.STOPPED
    left = view.leaving.seconds_left if view.leaving and noticed else None
    return HostStatus(host.request_id, host.role.value, host.state.value, host.offer.pool, view.slots, price, on_demand,
                      host.address, inputs.host_jobs.get(host.request_id, ()), left, max(0.0, now - host.since),
                      why, view.gpus, host.group)


def _broken_gpus(gpus: Sequence[GpuReading]) -> list[str]:
    return [f"GPU {g.index}: {g.why or counted(g.errors or 0, 'uncorrected memory error')}"
            for g in gpus if g.why or g.errors]


def _dispatcher(own: CloudHost, now: float) -> HostStatus:
    state = HostState.UP if own.state is CloudState.RUNNING else HostState.LAUNCHING
    since = own.runs[-1].started_at if own.runs else now
    return HostStatus(own.request_id, own.role.value, state.value, own.offer.pool, 0, own.offer.price_micros_h,
                      own.offer.on_demand_micros_h, own.address, since_s=max(0.0, now - since))
