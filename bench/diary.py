"""Figures of an event from the workers' diaries: latency, pause, repeated steps. And the benches' statistics. Pure.

A worker writes a line after each optimizer step. `label` identifies a membership: all its ranks have the same label,
and no other membership has it. All instants are of the machine's monotonic clock.

    latency    all survivors' next step: event -> each process that outlived it has finished a step in a newer
               membership; where every process was restarted, and for a join, each rank of the new membership
    pause      the longest time that a survivor spent between its last step of the old membership and its next one;
               where every process was restarted, between the last old step and that of the slowest
    beyond     pause less one step of the new membership, which is part of any such gap
    repeated   steps that the old membership had finished and the new one finished again
"""

from __future__ import annotations

import json
import random
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SETTLED = 3  # gaps between steps that suffice for the step time


@dataclass(frozen=True)
class Note:
    """One finished step of one process."""

    pid: int
    rank: int
    world: int
    step: int
    at: float
    label: str


@dataclass(frozen=True)
class Outcome:
    """Cost of an event."""

    latency_s: float
    pause_s: float
    step_s: float  # median of the new membership
    repeated: int
    world_before: int
    world_after: int
    next_at: float

    @property
    def beyond_s(self) -> float:
        return self.pause_s - self.step_s


class Diary:
    """Reader of the notes in a folder while they are written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[Note] = []
        self._read: dict[Path, int] = {}

    def read(self, since: float = 0.0) -> list[Note]:
        """Return all notes from `since` on, by time. An unfinished line is left for the next call."""
        known = len(self.notes)
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._read[path] = self._read.get(path, 0) + len(whole) + 1
                self.notes += [Note(**json.loads(line)) for line in whole.splitlines()]
        if len(self.notes) > known:
            self.notes.sort(key=lambda n: n.at)
        return self.notes[bisect_left(self.notes, since, key=lambda n: n.at):]


def by_label(notes: Sequence[Note]) -> dict[str, list[Note]]:
    """Group notes by membership, in the order of the memberships' first steps."""
    found: dict[str, list[Note]] = {}
    for note in sorted(notes, key=lambda n: n.at):
        found.setdefault(note.label, []).append(note)
    return found


def step_s(notes: Sequence[Note]) -> float | None:
    """Return the median time between two steps of one process; None if too few are known."""
    gaps = []
    for pid in {n.pid for n in notes}:
        gaps += [b - a for a, b in pairwise(sorted(n.at for n in notes if n.pid == pid))]
    return statistics.median(gaps) if len(gaps) >= SETTLED else None


def is_whole(notes: Sequence[Note], world: int, steps: int) -> bool:
    """Return whether the newest membership has `world` ranks, each with at least so many noted steps."""
    newest = notes[-1].label if notes else ""
    recent = [n for n in notes if n.label == newest and n.world == world]
    return all(sum(n.rank == r for n in recent) >= steps for r in range(world))


def changed(notes: Sequence[Note], event_at: float) -> str | None:
    """Return the first membership that began after `event_at`, once each of its ranks has done a step."""
    memberships = by_label(notes)
    for label, held in memberships.items():
        if held[0].at > event_at and len({n.rank for n in held}) == held[0].world:
            return label
    return None


def survivors_back(notes: Sequence[Note], event_at: float, survivors: int) -> bool:
    """Return whether all `survivors` of the event at `event_at` have done a step in a newer membership.

    A membership of new processes alone has no survivor to wait for.
    """
    label = changed(notes, event_at)
    if label is None:
        return False
    memberships = by_label(notes)
    labels = list(memberships)
    at = labels.index(label)
    old = {n.pid for n in memberships[labels[at - 1]]} if at else set()
    back = {n.pid for held in labels[at:] for n in memberships[held]} & old
    return not back or len(back) >= survivors


def outcome(notes: Sequence[Note], event_at: float, joined: str = "") -> Outcome:
    """Return the outcome of the event at `event_at`: of a loss, or of the join that made membership `joined`."""
    label = joined or changed(notes, event_at) or ""
    memberships = by_label(notes)
    if label not in memberships:
        raise ValueError("no membership began after the event")
    labels = list(memberships)
    if labels.index(label) == 0:
        raise ValueError("no membership was there before the event")
    old, new = memberships[labels[labels.index(label) - 1]], memberships[label]
    newer = new if joined else [n for held in labels[labels.index(label):] for n in memberships[held]]
    first = {pid: min(n.at for n in newer if n.pid == pid) for pid in {n.pid for n in newer}}
    last = {pid: max(n.at for n in old if n.pid == pid) for pid in {n.pid for n in old}}
    survivors = [pid for pid in first if pid in last]
    waited = survivors if survivors and not joined else {n.pid for n in new}
    next_at = max(first[pid] for pid in waited)
    pause_s = max((first[p] - last[p] for p in survivors), default=next_at - max(last.values()))
    seconds = step_s(new) or step_s(old) or 0.0
    done = {n.step for n in old}
    return Outcome(next_at - event_at, pause_s, seconds, len(done & {n.step for n in new}), old[-1].world,
                   new[0].world, next_at)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


def interval(values: Sequence[float], statistic: Callable[[Sequence[float]], float] = statistics.median,
             rounds: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a statistic of `values`."""
    draw = random.Random(seed)
    found = sorted(statistic(draw.choices(values, k=len(values))) for _ in range(rounds))
    return found[int(0.025 * rounds)], found[int(0.975 * rounds) - 1]
