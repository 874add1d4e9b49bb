"""Which job holds which hosts. Pure.

Jobs share a fleet on disjoint hosts and keep what they hold. In order of submission, free hosts go first to jobs below
their min, then to jobs below their max. A queued job starts only when its min fits; hosts that are free meanwhile are
kept for it if those being launched will make it fit, else others may use them, so that nothing paid lies idle.

A leaving host, or one whose agent is away, stays with its job but fills no place: a replacement can come before it
goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class JobNeed:
    job: str
    min_workers: int
    max_workers: int
    order: int  # of submission


@dataclass(frozen=True)
class HostRoom:
    """A host that exists or is being launched; one that is gone is left out."""

    host: str
    slots: int
    leaving: bool = False  # noticed or draining
    ready: bool = True  # its agent has joined and answers; the caller may overlook a short silence


@dataclass(frozen=True)
class Allocation:
    held: dict[str, tuple[str, ...]]  # job -> hosts, longest held first; no entry for a queued job
    why: dict[str, str]  # every job: what it holds or what it waits for


def allocate(jobs: Sequence[JobNeed], hosts: Sequence[HostRoom], held: Mapping[str, tuple[str, ...]]) -> Allocation:
    """Say who holds what from now on. `held` is what the last call returned."""
    queue = sorted(jobs, key=lambda j: (j.order, j.job))
    desk = _Desk(hosts, held, queue)
    for need in queue:
        desk.shrink(need)
    for need in queue:
        desk.give_min(need)
    for need in queue:
        if need.job in desk.held:
            desk.fill(need.job, need.max_workers)
    desk.held = {n.job: desk.held[n.job] for n in queue if n.job in desk.held}
    return Allocation({job: tuple(names) for job, names in desk.held.items()}, {n.job: desk.why(n) for n in queue})


def shares(jobs: Sequence[JobNeed], held: Mapping[str, Sequence[str]], hosts: int, slots: int) -> dict[str, int]:
    """How many hosts each job has once `hosts` of so many slots are up; 0 for one that waits. `held` as for `allocate`;
    hosts that leave are not in it."""
    names = list(dict.fromkeys(name for mine in held.values() for name in mine))[:hosts]
    names += [f"({n})" for n in range(hosts - len(names))]  # no host is called so
    found = allocate(jobs, [HostRoom(n, slots) for n in names], {job: tuple(mine) for job, mine in held.items()}).held
    return {need.job: len(found.get(need.job, ())) for need in jobs}


class _Desk:
    """The hosts while they are being handed out."""

    def __init__(
        self, hosts: Sequence[HostRoom], held: Mapping[str, tuple[str, ...]], queue: Sequence[JobNeed]
    ) -> None:
        self.rooms = {h.host: h for h in hosts}
        self.held: dict[str, list[str]] = {}
        taken: set[str] = set()
        for need in queue:
            mine = [h for h in dict.fromkeys(held.get(need.job, ())) if h in self.rooms and h not in taken]
            taken.update(mine)
            if need.job in held:
                self.held[need.job] = mine  # also when all are gone: a job that has run is no longer queued
        self.free = [h.host for h in hosts if h.ready and not h.leaving and h.host not in taken]
        self.coming = sum(h.slots for h in hosts if not h.ready and not h.leaving and h.host not in taken)
        self.reserved: set[str] = set()

    def slots(self, names: Sequence[str]) -> int:
        """Room in those of the hosts that count."""
        return sum(r.slots for r in (self.rooms[n] for n in names) if r.ready and not r.leaving)

    def shrink(self, need: JobNeed) -> None:
        """Free the newest hosts as long as the job has its max without them."""
        mine = self.held.get(need.job, [])
        room = self.slots(mine)
        for name in [n for n in reversed(mine) if self.slots([n])]:
            room -= self.slots([name])
            if room < need.max_workers:
                return
            mine.remove(name)
            self.free.append(name)

    def give_min(self, need: JobNeed) -> None:
        room = self.slots(self.free)
        if need.job in self.held:
            self.fill(need.job, need.min_workers)
        elif room >= need.min_workers:
            self.held[need.job] = []
            self.fill(need.job, need.min_workers)
        elif room + self.coming >= need.min_workers:
            self.coming -= need.min_workers - room
            self.reserved.update(self.free)
            self.free = []

    def fill(self, job: str, workers: int) -> None:
        room, given = self.slots(self.held[job]), 0
        while given < len(self.free) and room < workers:
            room += self.slots([self.free[given]])
            given += 1
        self.held[job] += self.free[:given]
        self.free = self.free[given:]

    def why(self, need: JobNeed) -> str:
        mine = self.held.get(need.job)
        if mine is not None and self.slots(mine) >= need.min_workers:
            return f"holds {_hosts(len(mine))}"
        one_each = all(r.slots == 1 for r in self.rooms.values())
        wanted = _hosts(need.min_workers) if one_each else f"room for {need.min_workers} workers"
        free = len(self.free) + len(self.reserved)
        others = {job: len(names) for job, names in self.held.items() if names and job != need.job}
        holders = ", ".join(f"{n} of {len(self.rooms)} held by {job}" for job, n in others.items())
        text = f"needs {wanted}, "
        text += f"holds {len(mine)}, {free} free" if mine is not None else f"{free} free"
        return f"{text}: {holders}" if holders else text


def _hosts(n: int) -> str:
    return "1 host" if n == 1 else f"{n} hosts"
