"""Cost of the trials of Ray Tune on a fleet's Ray cluster: parts of what their job has cost. Pure.

A trial holds parts of hosts (`TrialHeld`). It costs these parts of the seconds that its job held the host for, so all
trials of a job together never cost more than the job. What is left belongs to no trial: free room, trials' own
processes, and other work in Ray. Trials whose parts add up to more than a host share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from spotfleet.fleet.cost.billing import seconds_until
from spotfleet.fleet.domain.events import Event, TrialHeld
from spotfleet.model import Run

WHOLE = 10**6  # millionths of a host


@dataclass(frozen=True)
class TrialLine:
    """Cost of one trial, a part of its job's."""

    job: str
    trial: str  # Tune's id
    name: str
    micros: int
    slot_s: float  # seconds times slots of hosts


@dataclass(frozen=True)
class TrialUse:
    """Period in which a trial held a part of one host; `until` None: until its job holds the host no more."""

    job: str
    trial: str
    millionths: int
    since: float
    until: float | None


def trial_names(events: Iterable[Event]) -> dict[tuple[str, str], str]:
    """Return the name of each trial, by its job and id."""
    return {(e.job, e.trial): e.name for e in events if isinstance(e, TrialHeld)}


def trial_uses(events: Iterable[Event]) -> dict[str, list[TrialUse]]:
    """Return the periods by host."""
    found: dict[str, list[TrialUse]] = {}
    open_: dict[tuple[str, str], TrialHeld] = {}

    def close(event: TrialHeld, until: float | None) -> None:
        for host, millionths in event.hosts.items():
            found.setdefault(host, []).append(TrialUse(event.job, event.trial, millionths, event.at, until))

    for event in events:
        if isinstance(event, TrialHeld):
            before = open_.get((event.job, event.trial))
            if before is not None:
                close(before, max(before.at, event.at))
            open_[event.job, event.trial] = event
    for event in open_.values():
        close(event, None)
    return found


def split(run: Run, begin: int, until: int, uses: Iterable[TrialUse]) -> Iterator[tuple[int, int, str, Fraction]]:
    """Yield (from, until, trial, its share) for the parts of a period of a run in which the trials stay the same.

    `uses` are those of one job on the run's host.
    """
    changes: list[tuple[int, str, int]] = []
    for use in uses:
        low = max(begin, seconds_until(run, use.since))
        high = until if use.until is None else min(until, seconds_until(run, use.until))
        if low < high:
            changes += [(low, use.trial, use.millionths), (high, use.trial, -use.millionths)]
    changes.sort()
    held: Counter[str] = Counter()
    for i, (low, trial, millionths) in enumerate(changes):
        held[trial] += millionths
        high = changes[i + 1][0] if i + 1 < len(changes) else low
        if high > low:
            whole = max(WHOLE, held.total())
            yield from ((low, high, name, Fraction(part, whole)) for name, part in held.items() if part)


def within(lines: Sequence[TrialLine], micros: int) -> list[TrialLine]:
    """Return one job's lines with a sum of at most `micros`, its cost: in a window, rounding may exceed it."""
    over = sum(line.micros for line in lines) - micros
    if over <= 0:
        return list(lines)
    largest = max(lines, key=lambda line: line.micros)
    return [replace(line, micros=line.micros - over) if line is largest else line for line in lines]
