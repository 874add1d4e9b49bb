"""Cost of a fleet, computed from the ledger's events alone. Pure.

Prices and rates are those in force at the time, so a bill never changes afterwards. Each host is rounded once; the
lines of its runs are differences of rounded running sums and add up to it. Jobs share a host by the slots that they
hold in it. Time that no job holds is idle, and so are the fractions of a micro-dollar that a split leaves over.

A report of a window [since, until) is the difference of two readings of the same bill, so adjacent windows add up. It
counts the seconds that fell due in the window, and the events written in it: steps, pauses and repeats belong to the
window in which a job reported them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from spotfleet.fleet.cost import extras as cost_extras
from spotfleet.fleet.cost import trials
from spotfleet.fleet.cost.billing import PARTS, Bill, PriceBook, round_half_up, seconds_until
from spotfleet.fleet.cost.boots import BootLine
from spotfleet.fleet.cost.extras import Crossings, ExtraLine, Metered, RateBook, half_up
from spotfleet.fleet.cost.facts import CostHost, CostJob, SlotUse, first_within, hosts, jobs, slots_of
from spotfleet.fleet.cost.trials import TrialLine
from spotfleet.fleet.domain.events import (
    Event,
    FleetCreated,
    GenerationFormed,
    HistoryLost,
    PriceChanged,
    RatesStamped,
    TakenOver,
)
from spotfleet.model import BillingRules, Role

BEGINNING, END = -math.inf, math.inf
_Holder = tuple[str, bool]  # job, and whether it trains


@dataclass(frozen=True)
class HostLine:
    """Cost of one billed run of one host."""

    host: str
    role: str
    pool: str
    market: str
    started_at: float
    ended_at: float | None  # None: still running
    taken: bool  # ended by the cloud
    seconds: int  # billed seconds: a minimum counts in full
    micros: int
    on_demand_micros: int  # the same seconds on demand
    group: str = ""  # named group of hosts


@dataclass(frozen=True)
class JobLine:
    job: str
    name: str
    micros: int  # its share of the hosts that its generations used
    on_demand_micros: int
    useful_steps: int
    micros_per_1000_steps: int | None  # None before the first step
    repeated_steps: int
    repeated_micros: int  # hosts that made steps again after a pause
    pause_micros: int  # hosts from the last step before a generation formed to the first one in it
    traffic_micros: int = 0  # between zones; not part of `micros`
    unknown_micros: int = 0  # the part of `micros` for work outside training: its kind is unknown
    no_trial_micros: int | None = None  # the part of `micros` that no trial of Ray Tune has used; None: it had none

    @property
    def uncounted(self) -> bool:
        """Whether it has cost money without a counted step: a command, or a script that starts anew as a whole."""
        return not self.useful_steps and bool(self.micros or self.unknown_micros)


@dataclass(frozen=True)
class CostReport:
    at: float
    fleet: str
    lines: tuple[HostLine, ...]
    jobs: tuple[JobLine, ...]
    micros: int  # total
    on_demand_micros: int  # total on demand, with the same disks, addresses and traffic
    dispatcher_micros: int
    idle_micros: int  # worker hosts while no job held them
    boot_micros: int  # worker hosts from the start of a run until they joined; part of idle
    repeated_micros: int
    pause_micros: int
    useful_steps: int
    micros_per_1000_steps: int | None
    missing_before: float | None = None  # a ledger was lost then: earlier ended machines may be missing from the bill
    since: float | None = None  # start of the window; None: from the beginning
    until: float | None = None  # None: up to `at`
    machine_micros: int = 0  # the host lines
    disk_micros: int = 0
    address_micros: int = 0
    traffic_micros: int = 0
    extras: tuple[ExtraLine, ...] = ()  # disks, addresses and traffic, line by line
    unknown_micros: int = 0  # jobs' scripts and commands outside training
    boots: tuple[BootLine, ...] = ()  # `boot_micros`, boot by boot
    trials: tuple[TrialLine, ...] = ()  # trials of Ray Tune, as parts of their jobs

    @property
    def unpriced(self) -> tuple[str, ...]:
        """Pools without a known on-demand price; they make the savings unknown too."""
        return tuple(dict.fromkeys(line.pool for line in self.lines if line.micros and not line.on_demand_micros))

    @property
    def savings_percent(self) -> float:
        """Savings against the same seconds on demand; 0 for a fleet without costs yet, or if unknown."""
        if not self.on_demand_micros or self.unpriced:
            return 0.0
        return 100 * (self.on_demand_micros - self.micros) / self.on_demand_micros


def report(events: Iterable[Event], now: float, since: float | None = None, until: float | None = None) -> CostReport:
    """Return the bill by `now`, or the part that fell due in [since, until).

    `events` are those of all ledgers of the fleet, one after the other: the dispatcher's, then the laptop's. Runs that
    have not ended count up to `now`.
    """
    return Meter(events, now).report(since, until)


@dataclass(frozen=True)
class _Billed:
    """Run of a host, with the cost of the runs before it."""

    host: CostHost
    bill: Bill
    parts: int
    on_demand_parts: int

    def line(self, since: float, until: float) -> HostLine:
        begin, end = self.bill.due(since), self.bill.due(until)
        (a, full_a), (b, full_b) = self.bill.parts(begin), self.bill.parts(end)
        run, offer = self.bill.run, self.host.offer
        return HostLine(
            self.host.request_id, self.host.role.value, offer.pool, offer.sold, run.started_at, run.ended_at,
            run.taken, end - begin, round_half_up(self.parts + b) - round_half_up(self.parts + a),
            round_half_up(self.on_demand_parts + full_b) - round_half_up(self.on_demand_parts + full_a),
            self.host.group)

    def boot(self, since: float, until: float) -> BootLine:
        """Return the part of the run before its agent joined. It is rounded like the run, so that it costs no more."""
        run, host, most = self.bill.run, self.host, self.host.boot_seconds(self.bill.run)
        begin, end = min(most, self.bill.due(since)), min(most, self.bill.due(until))
        joined_at = first_within(host.joined_at, run)
        return BootLine(
            host.request_id, host.offer.pool, host.offer.sold, host.asked_at if run == host.runs[0] else None,
            run.started_at, joined_at, None if joined_at is None else first_within(host.stepped_at, run),
            None if joined_at is None else host.boots.get(joined_at), end - begin,
            round_half_up(self.parts + self.bill.parts(end)[0])
            - round_half_up(self.parts + self.bill.parts(begin)[0]))


class Meter:
    """Bill of a fleet for any number of windows, from ledgers that are read once."""

    def __init__(self, events: Iterable[Event], now: float) -> None:
        self.events, self.now = list(events), now
        self.created = next((e for e in self.events if isinstance(e, FleetCreated)), None)
        self._rules = self.created.billing if self.created else BillingRules()
        self._prices = PriceBook(e for e in self.events if isinstance(e, PriceChanged))
        self._rates = RateBook(e for e in self.events if isinstance(e, RatesStamped))
        self.hosts = hosts(self.events)
        self._billed: list[_Billed] = [b for host in self.hosts.values() for b in self._bills(host)]
        self._metered: list[Metered] = [
            m for host in self.hosts.values()
            for m in cost_extras.metered(host, self._rates, self._rules.of(host.offer.provider), now)]

    def _bills(self, host: CostHost) -> Iterator[_Billed]:
        parts = full_parts = 0
        for run in host.runs:
            ended_at = self.now if run.ended_at is None else run.ended_at
            history = self._prices.history(host.offer, run.started_at, ended_at)
            bill = Bill(run, history, self._rules.of(host.offer.provider), self.now)
            yield _Billed(host, bill, parts, full_parts)
            more, more_full = bill.parts(bill.seconds)
            parts, full_parts = parts + more, full_parts + more_full

    @cached_property
    def jobs(self) -> dict[str, CostJob]:
        return jobs(self.events, self.now)

    @cached_property
    def _crossings(self) -> dict[str, dict[tuple[str, str], Crossings]]:
        return {name: cost_extras.crossings(job, self.hosts, self._rates) for name, job in self.jobs.items()}

    @cached_property
    def _stretches(self) -> list[tuple[_Billed, int, int, _Holder, Fraction]]:
        """(run, from, until, holder, its share of the host) for each period in which a job holds slots of a run."""
        uses: dict[str, list[SlotUse]] = {}
        for job in self.jobs.values():
            for name, of in job.slot_uses.items():
                whole = self.hosts[name].offer.slots if job.whole_hosts and name in self.hosts else 0
                uses.setdefault(name, []).extend(replace(use, slots=max(whole, use.slots)) for use in of)
        return [(b, *stretch) for b in self._billed if b.host.role is Role.WORKER
                for stretch in _split(b.bill, uses.get(b.host.request_id, []), b.host.offer.slots)]

    def lines(self, since: float = BEGINNING, until: float = END) -> list[HostLine]:
        """Return the host lines by start; for a window only those with a part that fell due in it."""
        lines = [b.line(since, until) for b in self._billed]
        if (since, until) != (BEGINNING, END):
            lines = [line for line in lines if line.seconds or line.micros or line.on_demand_micros]
        return sorted(lines, key=lambda line: (line.started_at, line.host))

    def boots(self, since: float = BEGINNING, until: float = END) -> list[BootLine]:
        """Return the boots of worker hosts by start; for a window only those with a part that fell due in it."""
        lines = [b.boot(since, until) for b in self._billed if b.host.role is Role.WORKER]
        if (since, until) != (BEGINNING, END):
            lines = [line for line in lines if line.seconds or line.micros]
        return sorted(lines, key=lambda line: (line.running_at, line.host))

    def extras(self, since: float = BEGINNING, until: float = END) -> list[ExtraLine]:
        lines = [line for metered in self._metered if (line := metered.line(since, until)) is not None]
        for job, found in self._crossings.items():
            lines += cost_extras.traffic_lines(job, found, since, until)
        return lines

    def micros(self, since: float = BEGINNING, until: float = END) -> int:
        """Return everything that fell due in [since, until)."""
        return (sum(b.line(since, until).micros for b in self._billed)
                + sum(line.micros for line in self.extras(since, until)))

    def on_demand_micros(self) -> int | None:
        """Return `report().on_demand_micros`; None where a price on demand is not known."""
        lines = self.lines()
        if any(line.micros and not line.on_demand_micros for line in lines):
            return None
        return sum(line.on_demand_micros for line in lines) + sum(line.micros for line in self.extras())

    def report(self, since: float | None = None, until: float | None = None) -> CostReport:
        low, high = BEGINNING if since is None else since, END if until is None else until
        lines, extras, boots = self.lines(low, high), self.extras(low, high), self.boots(low, high)
        job_lines = self._job_lines(low, high, extras)
        trial_lines = self._trial_lines(low, high, job_lines)
        in_trials: Counter[str] = Counter()
        for trial in trial_lines:
            in_trials[trial.job] += trial.micros
        job_lines = [replace(job, no_trial_micros=job.micros - in_trials[job.job]) if job.job in in_trials else job
                     for job in job_lines]
        machines = sum(line.micros for line in lines)
        dispatcher = sum(line.micros for line in lines if line.role == Role.DISPATCHER.value)
        of = {kind: sum(e.micros for e in extras if e.kind == kind) for kind in ("disk", "address", "traffic")}
        micros, steps = machines + sum(of.values()), sum(job.useful_steps for job in job_lines)
        lost = [e.at for e in self.events
                if isinstance(e, HistoryLost) or (isinstance(e, TakenOver) and not e.restored)]
        return CostReport(
            at=self.now,
            fleet=self.created.fleet if self.created else "",
            lines=tuple(lines),
            jobs=tuple(job_lines),
            micros=micros,
            on_demand_micros=sum(line.on_demand_micros for line in lines) + sum(of.values()),
            dispatcher_micros=dispatcher,
            idle_micros=machines - dispatcher - sum(job.micros for job in job_lines),
            boot_micros=sum(boot.micros for boot in boots),
            repeated_micros=sum(job.repeated_micros for job in job_lines),
            pause_micros=sum(job.pause_micros for job in job_lines),
            useful_steps=steps,
            micros_per_1000_steps=_per_1000(micros, steps),
            missing_before=max(lost, default=None),
            since=since,
            until=until,
            machine_micros=machines,
            disk_micros=of["disk"],
            address_micros=of["address"],
            traffic_micros=of["traffic"],
            extras=tuple(extras),
            unknown_micros=sum(job.unknown_micros for job in job_lines),
            boots=tuple(boots),
            trials=tuple(trial_lines),
        )

    def _shares(self, at: float) -> dict[str, tuple[int, int, int]]:
        """Return job -> its whole micro-dollars by `at`, those of the same time on demand, and those of unknown work.
        """
        held: dict[str, tuple[Fraction, Fraction, Fraction]] = {}
        for billed, begin, until, (job, known), share in self._stretches:
            bill = billed.bill
            parts, full = bill.between(begin, max(begin, min(until, bill.due(at))))
            a, b, c = held.get(job, (Fraction(0), Fraction(0), Fraction(0)))
            held[job] = a + share * parts, b + share * full, c if known else c + share * parts
        return {job: (int(a / PARTS), int(b / PARTS), int(c / PARTS)) for job, (a, b, c) in held.items()}

    def _job_lines(self, since: float, until: float, extras: list[ExtraLine]) -> list[JobLine]:
        before, after = self._shares(since) if since > BEGINNING else {}, self._shares(until)
        lines = []
        for name, job in self.jobs.items():
            (a, full_a, unknown_a), (b, full_b, unknown_b) = before.get(name, (0, 0, 0)), after.get(name, (0, 0, 0))
            steps = job.steps(until) - job.steps(since)
            repeats, repeated, paused = self._losses(job, until)
            repeats_a, repeated_a, paused_a = self._losses(job, since)
            crossed = sum(e.micros for e in extras if e.kind == "traffic" and e.name == name)
            line = JobLine(name, job.name, b - a, full_b - full_a, steps, _per_1000(b - a, steps), repeats - repeats_a,
                           repeated - repeated_a, paused - paused_a, crossed, unknown_b - unknown_a)
            figures = (steps, crossed, line.on_demand_micros, line.micros, line.repeated_steps, line.pause_micros)
            if (since, until) == (BEGINNING, END) or any(figures):
                lines.append(line)
        return lines

    @cached_property
    def _trial_stretches(self) -> list[tuple[_Billed, int, int, tuple[str, str], Fraction]]:
        """(run, from, until, job and trial, its share of the host) for each period in which a trial has workers."""
        uses = trials.trial_uses(self.events)
        found = []
        for billed, begin, until, (job, _known), share in self._stretches if uses else ():
            of = [use for use in uses.get(billed.host.request_id, ()) if use.job == job]
            found += [(billed, low, high, (job, trial), share * part)
                      for low, high, trial, part in trials.split(billed.bill.run, begin, until, of)]
        return found

    def _trial_shares(self, at: float) -> dict[tuple[str, str], tuple[int, Fraction]]:
        """Return job and trial -> whole micro-dollars, and seconds times slots, by `at`."""
        held: dict[tuple[str, str], tuple[Fraction, Fraction]] = {}
        for billed, begin, until, trial, share in self._trial_stretches:
            end = max(begin, min(until, billed.bill.due(at)))
            a, b = held.get(trial, (Fraction(0), Fraction(0)))
            held[trial] = (a + share * billed.bill.between(begin, end)[0],
                           b + share * billed.host.offer.slots * (end - begin))
        return {trial: (int(a / PARTS), b) for trial, (a, b) in held.items()}

    def _trial_lines(self, since: float, until: float, jobs: Iterable[JobLine]) -> list[TrialLine]:
        """Return the trials of these jobs, job by job."""
        before, after = self._trial_shares(since) if since > BEGINNING else {}, self._trial_shares(until)
        names, of = trials.trial_names(self.events), {job.job: list[TrialLine]() for job in jobs}
        for (job, trial), (b, slots_b) in after.items():
            a, slots_a = before.get((job, trial), (0, Fraction(0)))
            if job in of and slots_b > slots_a:
                of[job].append(TrialLine(job, trial, names[job, trial], b - a, round(float(slots_b - slots_a), 3)))
        return [line for job in jobs for line in trials.within(of[job.job], job.micros)]

    def _losses(self, job: CostJob, at: float) -> tuple[int, int, int]:
        """Return the steps repeated by `at`, their cost, and the cost of pauses."""
        repeats, repeated, paused = 0, Fraction(0), Fraction(0)
        for event in job.resumed:
            if event.at < at:
                burn = self._burn(job.formed.get(event.generation), event.at)
                repeats += event.repeated
                repeated += burn * event.after_pause * Fraction(job.step_s(event.at))
                paused += burn * Fraction(event.pause_s)
        return repeats, half_up(repeated / PARTS), half_up(paused / PARTS)

    def _burn(self, formed: GenerationFormed | None, at: float) -> Fraction:
        """Return micro-dollars per hour of the slots that a generation holds."""
        total = Fraction(0)
        for name, slots in (slots_of(formed) if formed else Counter()).items():
            if name in self.hosts:
                offer = self.hosts[name].offer
                total += Fraction(self._prices.at(offer, at).micros_h * slots, max(slots, offer.slots))
        return total


def _split(bill: Bill, uses: list[SlotUse], slots: int) -> Iterator[tuple[int, int, _Holder, Fraction]]:
    """Yield (from, until, holder, its share) for every period of a run in which the held slots stay the same."""
    changes: list[tuple[int, _Holder, int]] = []
    for use in uses:
        since, until = seconds_until(bill.run, use.since), min(bill.length, seconds_until(bill.run, use.until))
        if since < until:
            holder = (use.job, use.known)
            changes += [(since, holder, use.slots), (until, holder, -use.slots)]
    held: Counter[_Holder] = Counter()
    changes.sort()
    for i, (begin, holder, count) in enumerate(changes):
        held[holder] += count
        until = changes[i + 1][0] if i + 1 < len(changes) else begin
        if until == begin:
            continue
        whole = max(slots, held.total())
        for holder, holds in held.items():
            if holds:
                yield begin, until, holder, Fraction(holds, whole)


def _per_1000(micros: int, steps: int) -> int | None:
    return (2 * micros * 1000 + steps) // (2 * steps) if steps else None
