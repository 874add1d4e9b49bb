"""Preparation of a simulation from a fleet file, trace files and options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from spotfleet import catalog
from spotfleet.errors import UsageError
from spotfleet.fleet.policy.lifetimes import BootTime
from spotfleet.model import BillingRules, FleetSpec, Need
from spotfleet.simulate import constants
from spotfleet.simulate.read import read
from spotfleet.simulate.run import EVERY_S, PricedTrace, SimulationPlan
from spotfleet.simulate.tariff import PriceOverrides, tariff
from spotfleet.simulate.world.world import Setting
from spotfleet.words import counted

LONGEST_S = 10 * 366 * 86400.0


@dataclass(frozen=True)
class SimulationRequest:
    """Options of the command line; 0 and "" leave a value to the fleet file, the records or the default."""

    traces: tuple[str, ...] = ()
    polarity: str = ""
    work_s: float = 0.0
    deadline_s: float = 0.0
    every_s: float = 0.0
    windows: int = 0
    hosts: int = 0
    boot_s: float | None = None  # None: `measured`, or else the default
    measured: BootTime | None = None  # the fleet's own boots
    notice_s: float = constants.NOTICE_S
    each: bool = False
    overrides: PriceOverrides = field(default_factory=PriceOverrides)
    billing: BillingRules = field(default_factory=BillingRules)  # the provider's


@dataclass(frozen=True)
class PreparedSimulation:
    fleet: str
    plan: SimulationPlan
    records: tuple[PricedTrace, ...]
    notes: tuple[str, ...]


def prepare(spec: FleetSpec, request: SimulationRequest, warn: Callable[[str], None]) -> PreparedSimulation:
    """Prepare a simulation. Raises UsageError if that is impossible; `warn` gets messages about suspicious input."""
    _check(request)
    policy, notes = spec.policy, []
    if spec.groups:
        spec = replace(spec, any_of=spec.main_group.any_of, nodes=spec.main_group.nodes)
        notes.append(f"of the fleet's groups only {spec.main_group.name} is simulated")
    work_s, deadline_s = request.work_s or policy.work_s, request.deadline_s or policy.deadline_s
    if not work_s and policy.work_steps:
        raise UsageError(f"work: {policy.work_steps} steps: how long a step takes, no record tells",
                         hint="say how long the work takes at full target, such as --work 48h")
    records = _records(spec, request, warn)
    hosts = request.hosts or spec.nodes.target
    boot, boot_from = _boot(request)
    setting = Setting(spec.name, _needs(spec), hosts, boot.seconds, spec.placement, spec.all_or_nothing, policy)
    if policy.max_micros:
        notes.append("max_cost is not simulated: a window shows what the work costs without a limit")
    if any(not r.trace.capacity for r in records):
        notes.append("a record of prices alone says nothing about what could be had: always enough is assumed")
    for record in records:
        kind, shown = record.tariff.instance_type, record.trace.instance_type
        if shown and kind and shown != kind:
            notes.append(f"the availability of {shown} stands in for that of {kind}")
    if not request.each and len(records) > 1 and not all(r.trace.began_at for r in records):
        notes.append("not every record says when it began: all are laid side by side from their beginnings")
    notes.append("the dispatcher's own machine, disks, addresses and traffic are not counted")
    plan = SimulationPlan(setting, work_s or math.inf, deadline_s or math.inf, 0.0, request.every_s or EVERY_S,
                          request.windows, request.notice_s, request.each, request.billing, boot.boots, boot_from)
    return PreparedSimulation(spec.name, plan, records, tuple(dict.fromkeys(notes)))


def _boot(request: SimulationRequest) -> tuple[BootTime, str]:
    """Return the time of a boot, and its source."""
    if request.boot_s is not None:
        return BootTime(request.boot_s), "as asked for"
    if request.measured is not None and request.measured.boots:
        return request.measured, f"the median of {counted(request.measured.boots, 'boot')} of this fleet"
    return BootTime(constants.BOOT_S), "assumed: no boot of this fleet has been measured; --boot sets it"


def _check(request: SimulationRequest) -> None:
    if not request.traces:
        raise UsageError("there is no trace to simulate", hint="give one or more with --trace FILE")
    if request.every_s and request.windows:
        raise UsageError("--every and --windows exclude each other", hint="give one of them")
    limits = {"--work": request.work_s, "--deadline": request.deadline_s, "--every": request.every_s,
              "--boot": request.boot_s or 0.0, "--notice": request.notice_s}
    for name, seconds in limits.items():
        if not 0 <= seconds <= LONGEST_S:
            raise UsageError(f"{name}: {seconds:g} s", hint="durations lie between 0 and ten years")
    if request.every_s and request.every_s < 60:
        raise UsageError(f"--every: {request.every_s:g} s", hint="windows begin at least a minute apart")
    for name, count, most in (("--windows", request.windows, 1_000_000), ("--hosts", request.hosts, 10_000)):
        if not 0 <= count <= most:
            raise UsageError(f"{name}: {count}", hint=f"a number from 1 to {most}")


def _records(spec: FleetSpec, request: SimulationRequest, warn: Callable[[str], None]) -> tuple[PricedTrace, ...]:
    prices = catalog.load()
    found: list[PricedTrace] = []
    for path in request.traces:
        for trace in read(Path(path), request.polarity, warn):
            found.append(PricedTrace(trace, tariff(trace, spec, prices, request.overrides), path))
    return tuple(found)


def _needs(spec: FleetSpec) -> tuple[Need, ...]:
    """Return the parts of the fleet's needs that hold in the records' pools: the market and the limit on the price."""
    return tuple(dict.fromkeys(Need(use_spot=n.use_spot, max_micros_h=n.max_micros_h) for n in spec.any_of))

