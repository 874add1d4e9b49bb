"""From a fleet file, trace files and wishes to what is simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spotfleet import catalog
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec, Need
from spotfleet.simulate import measured
from spotfleet.simulate.read import read
from spotfleet.simulate.run import EVERY_S, Plan, Record
from spotfleet.simulate.tariff import Said, tariff
from spotfleet.simulate.world import Setting

LONGEST_S = 10 * 366 * 86400.0


@dataclass(frozen=True)
class Wish:
    """What the command line says; 0 and "" leave it to the fleet file, the records or the default."""

    traces: tuple[str, ...] = ()
    polarity: str = ""
    work_s: float = 0.0
    deadline_s: float = 0.0
    every_s: float = 0.0
    windows: int = 0
    hosts: int = 0
    boot_s: float = measured.BOOT_S
    notice_s: float = measured.NOTICE_S
    each: bool = False
    said: Said = field(default_factory=Said)


@dataclass(frozen=True)
class Asked:
    fleet: str
    plan: Plan
    records: tuple[Record, ...]
    notes: tuple[str, ...]


def prepare(spec: FleetSpec, wish: Wish, warn: Callable[[str], None]) -> Asked:
    """Raises UsageError for what cannot be simulated; `warn` is told what is read nevertheless."""
    _check(wish)
    policy, notes = spec.policy, []
    work_s, deadline_s = wish.work_s or policy.work_s, wish.deadline_s or policy.deadline_s
    if not work_s and policy.work_steps:
        raise UsageError(f"work: {policy.work_steps} steps: how long a step takes, no record tells",
                         hint="say how long the work takes at full target, such as --work 48h")
    records = _records(spec, wish, warn)
    hosts = wish.hosts or spec.nodes.target
    setting = Setting(spec.name, _needs(spec), hosts, wish.boot_s, spec.placement, spec.all_or_nothing, policy)
    if policy.max_micros:
        notes.append("max_cost is not simulated: a window shows what the work costs without a limit")
    if any(not r.trace.capacity for r in records):
        notes.append("a record of prices alone says nothing about what could be had: always enough is assumed")
    for record in records:
        kind, shown = record.tariff.instance_type, record.trace.instance_type
        if shown and kind and shown != kind:
            notes.append(f"the availability of {shown} stands in for that of {kind}")
    if not wish.each and len(records) > 1 and not all(r.trace.began_at for r in records):
        notes.append("not every record says when it began: all are laid side by side from their beginnings")
    notes.append("the dispatcher's own machine, disks, addresses and traffic are not counted")
    plan = Plan(setting, work_s or math.inf, deadline_s or math.inf, 0.0, wish.every_s or EVERY_S, wish.windows,
                wish.notice_s, wish.each)
    return Asked(spec.name, plan, records, tuple(dict.fromkeys(notes)))


def _check(wish: Wish) -> None:
    if not wish.traces:
        raise UsageError("there is no trace to simulate", hint="give one or more with --trace FILE")
    if wish.every_s and wish.windows:
        raise UsageError("--every and --windows exclude each other", hint="give one of them")
    limits = {"--work": wish.work_s, "--deadline": wish.deadline_s, "--every": wish.every_s, "--boot": wish.boot_s,
              "--notice": wish.notice_s}
    for name, seconds in limits.items():
        if not 0 <= seconds <= LONGEST_S:
            raise UsageError(f"{name}: {seconds:g} s", hint="durations lie between 0 and ten years")
    if wish.every_s and wish.every_s < 60:
        raise UsageError(f"--every: {wish.every_s:g} s", hint="windows begin at least a minute apart")
    for name, count, most in (("--windows", wish.windows, 1_000_000), ("--hosts", wish.hosts, 10_000)):
        if not 0 <= count <= most:
            raise UsageError(f"{name}: {count}", hint=f"a number from 1 to {most}")


def _records(spec: FleetSpec, wish: Wish, warn: Callable[[str], None]) -> tuple[Record, ...]:
    prices = catalog.load()
    found: list[Record] = []
    for path in wish.traces:
        for trace in read(Path(path), wish.polarity, warn):
            found.append(Record(trace, tariff(trace, spec, prices, wish.said), path))
    return tuple(found)


def _needs(spec: FleetSpec) -> tuple[Need, ...]:
    """What of the fleet's needs holds in the records' pools: the market and the limit on the price."""
    return tuple(dict.fromkeys(Need(use_spot=n.use_spot, max_micros_h=n.max_micros_h) for n in spec.any_of))

