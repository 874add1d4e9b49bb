"""Allocation of a fleet's hosts to its jobs. Pure.

Jobs share a fleet on disjoint hosts and keep theirs. Free hosts go first to running jobs below their min, then to
queued jobs, then to jobs below their max; each of these by priority, then in order of submission. A queued job starts
only when its min fits. Free hosts are reserved for it if the hosts being launched will make it fit; otherwise other
jobs may use them, so that no paid host is idle. Once a queued job is overdue, no job behind it starts, so that small
jobs do not overtake a large one for ever.

A job that lacks its min takes hosts of jobs with lower priorities, if that makes it fit: first those that a job can
spare above its min, then all of a job whose processes may be ended, the lowest priority and the latest submission
first. Such a job is preempted: it is queued again, in its old place. A Ray cluster can do both: it gives what it can
spare, and ends only where that is not enough.

A job that names a group of hosts uses no others.

A leaving host, or one whose agent is away, stays with its job but offers no slots: a replacement can come before it
goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spotfleet.words import counted


@dataclass(frozen=True)
class JobNeed:
    job: str
    min_workers: int
    max_workers: int
    order: int  # place in the order of submission
    per_host: bool = False  # each worker takes a whole host
    priority: int = 0
    takes: bool = False  # it has lacked its min for long enough to take hosts of jobs with lower priorities
    overdue: bool = False  # it has lacked its min for so long that no job may overtake it
    yields: bool = False  # its processes may be ended for a higher priority, and started again later
    shrinks: bool = False  # it may go on with its min for a higher priority
    group: str = ""  # group of hosts that it may use; "": any


@dataclass(frozen=True)
class HostRoom:
    """A host that exists or is being launched; one that is gone is left out."""

    host: str
    slots: int
    leaving: bool = False  # noticed or draining
    ready: bool = True  # its agent has joined and answers; the caller may overlook a short silence
    group: str = ""


@dataclass(frozen=True)
class Allocation:
    held: dict[str, tuple[str, ...]]  # job -> hosts, longest held first; no entry for a queued job
    why: dict[str, str]  # every job: what it holds or what it waits for
    preempted: dict[str, str] = field(default_factory=dict)  # jobs whose processes must end now -> for which, why
    shrunk: dict[str, str] = field(default_factory=dict)  # jobs that lose hosts above their min now -> the same
    lacking: frozenset[str] = frozenset()  # jobs without room for their min


def allocate(jobs: Sequence[JobNeed], hosts: Sequence[HostRoom], held: Mapping[str, tuple[str, ...]]) -> Allocation:
    """Allocate hosts to jobs. `held`: as returned by the last call."""
    queue = sorted(jobs, key=lambda j: (j.order, j.job))
    allocator = _Allocator(hosts, held, queue)
    for need in queue:
        allocator.shrink(need)
    for need in sorted(queue, key=lambda n: n.job not in allocator.held):  # the hosts of a stalled job would lie idle
        allocator.give_min(need)
    for need in queue:
        if need.job in allocator.preempted:
            allocator.give_min(need)  # with hosts that are left
    for need in queue:
        if need.job in allocator.held:
            allocator.fill(need, need.max_workers)
    allocator.held = {n.job: allocator.held[n.job] for n in queue if n.job in allocator.held}
    held_now = {job: tuple(names) for job, names in allocator.held.items()}
    return Allocation(held_now, {n.job: allocator.why(n) for n in queue}, allocator.preempted, allocator.shrunk,
                      frozenset(n.job for n in queue if allocator.lacks(n)))


def shares(jobs: Sequence[JobNeed], held: Mapping[str, Sequence[str]], hosts: int, slots: int,
           group: str = "") -> dict[str, int]:
    """Return the number of hosts of each job once `hosts` hosts of `slots` slots are up; 0 for a job that waits.

    `held` as for `allocate`, without leaving hosts. `group`: that of the hosts.
    """
    names = list(dict.fromkeys(name for own in held.values() for name in own))[:hosts]
    names += [f"({n})" for n in range(hosts - len(names))]  # no real host has such a name
    rooms = [HostRoom(n, slots, group=group) for n in names]
    found = allocate(jobs, rooms, {job: tuple(own) for job, own in held.items()}).held
    return {need.job: len(found.get(need.job, ())) for need in jobs}


def by_priority(needs: Sequence[JobNeed], priorities: Mapping[str, int]) -> list[JobNeed]:
    """Return `needs`, in order of submission, with their places by priority, the highest first."""
    queue = sorted(needs, key=lambda need: (-priorities[need.job], need.order))
    return [replace(need, order=place, priority=priorities[need.job]) for place, need in enumerate(queue)]


class _Allocator:
    """Working state of one allocation."""

    def __init__(
        self, hosts: Sequence[HostRoom], held: Mapping[str, tuple[str, ...]], queue: Sequence[JobNeed]
    ) -> None:
        self.rooms = {h.host: h for h in hosts}
        self.queue = queue
        self.held: dict[str, list[str]] = {}
        taken: set[str] = set()
        for need in queue:
            own = [h for h in dict.fromkeys(held.get(need.job, ())) if h in self.rooms and h not in taken]
            taken.update(own)
            if need.job in held:
                self.held[need.job] = own  # also when all are gone: a job that has run is no longer queued
        self.free = [h.host for h in hosts if h.ready and not h.leaving and h.host not in taken]
        self.coming = [h for h in hosts if not h.ready and not h.leaving and h.host not in taken]
        self.reserved: set[str] = set()
        self.overdue: list[JobNeed] = []
        self.preempted: dict[str, str] = {}
        self.shrunk: dict[str, str] = {}
        self.intends: dict[str, str] = {}  # job -> the jobs from which it will take hosts

    def room(self, names: Sequence[str], need: JobNeed) -> int:
        """Count the job's workers that have room on those hosts that are ready and stay."""
        return _room([r for r in (self.rooms[n] for n in names) if r.ready and not r.leaving], need)

    def shrink(self, need: JobNeed) -> None:
        """Free the newest hosts while the job keeps its max without them."""
        own = self.held.get(need.job, [])
        room = self.room(own, need)
        for name in [n for n in reversed(own) if self.room([n], need)]:
            room -= self.room([name], need)
            if room < need.max_workers:
                return
            own.remove(name)
            self.free.append(name)

    def give_min(self, need: JobNeed) -> None:
        if self._is_behind(need):
            return
        room = self.room((*self.held.get(need.job, ()), *self.free), need)
        coming = [r for r in self.coming if _fits(r, need)]
        if room < need.min_workers and room + _room(coming, need) < need.min_workers:
            self._take(need, need.min_workers - room)
            room = self.room((*self.held.get(need.job, ()), *self.free), need)
        if need.job in self.held:
            self.fill(need, need.min_workers)
        elif room >= need.min_workers:
            self.held[need.job] = []
            self.fill(need, need.min_workers)
        elif room + _room(coming, need) >= need.min_workers:
            while room < need.min_workers:
                self.coming.remove(coming[0])
                room += _room([coming.pop(0)], need)
            self.reserved.update(n for n in self.free if _fits(self.rooms[n], need))
            self.free = [n for n in self.free if n not in self.reserved]
        elif need.overdue and _room([r for r in self.rooms.values() if not r.leaving], need) >= need.min_workers:
            self.overdue.append(need)

    def _is_behind(self, need: JobNeed) -> JobNeed | None:
        """Return the overdue job that is to start before this one; None if it need not wait."""
        groups = ("", need.group)
        return next((late for late in self.overdue if need.order > late.order and need.job not in self.held
                     and (not need.group or late.group in groups)), None)

    def _take(self, need: JobNeed, lacking: int) -> None:
        """Free hosts of jobs with lower priorities, if that gives `need` room for `lacking` more workers."""
        lower = [n for n in reversed(self.queue) if n.priority < need.priority and self.held.get(n.job)]
        spare = [(n, [name]) for n in lower if n.shrinks for name in self._above_min(n) if self.room([name], need)]
        whole = [(n, [h for h in self.held[n.job] if self.room([h], need)]) for n in lower if n.yields]
        chosen: list[tuple[JobNeed, list[str]]] = []
        for victim, hosts in (*spare, *whole):
            names = [h for h in hosts if all(h not in before for _, before in chosen)]
            if lacking > 0 and names:
                chosen.append((victim, names))
                lacking -= self.room(names, need)
        if lacking > 0:
            return
        for victim, names in list(reversed(chosen)):
            if (gain := self.room(names, need)) <= -lacking:  # the others are enough
                chosen.remove((victim, names))
                lacking += gain
        if not need.takes:
            self.intends[need.job] = ", ".join(dict.fromkeys(victim.job for victim, _ in chosen))
            return
        for victim in {v.job: v for v, _ in chosen}.values():
            self._free(victim, [h for v, names in chosen if v is victim for h in names], need)

    def _above_min(self, need: JobNeed) -> list[str]:
        """List the hosts that the job can spare, the newest first."""
        own, found = self.held[need.job], []
        room = self.room(own, need)
        for name in [n for n in reversed(own) if self.room([n], need)]:
            room -= self.room([name], need)
            if room < need.min_workers:
                break
            found.append(name)
        return found

    def _free(self, victim: JobNeed, names: Sequence[str], need: JobNeed) -> None:
        why = f"{need.job}, which has priority {need.priority} over {victim.priority} and needs {self._wanted(need)}"
        left = [h for h in self.held[victim.job] if h not in names]
        if victim.yields and not (victim.shrinks and self.room(left, victim) >= victim.min_workers):
            self.free += [*names, *(h for h in left if self.room([h], need))]
            del self.held[victim.job]
            self.preempted[victim.job] = why
        else:
            self.free += names
            self.held[victim.job] = left
            self.shrunk[victim.job] = why

    def fill(self, need: JobNeed, workers: int) -> None:
        room = self.room(self.held[need.job], need)
        given: list[str] = []
        for name in self.free:
            if room >= workers:
                break
            if _fits(self.rooms[name], need):
                room += self.room([name], need)
                given.append(name)
        self.held[need.job] += given
        if given:
            taken = set(given)
            self.free = [n for n in self.free if n not in taken]

    def lacks(self, need: JobNeed) -> bool:
        return self.room(self.held.get(need.job, ()), need) < need.min_workers

    def why(self, need: JobNeed) -> str:
        own = self.held.get(need.job)
        if own is not None and not self.lacks(need):
            return f"holds {_hosts(len(own))}"
        usable = [name for name, room in self.rooms.items() if _fits(room, need)]
        free = len({*self.free, *self.reserved}.intersection(usable))
        others = {job: len(found) for job, names in self.held.items()
                  if job != need.job and (found := set(names).intersection(usable))}
        holders = ", ".join(f"{n} of {len(usable)} held by {job}" for job, n in others.items())
        text = f"needs {self._wanted(need)}, "
        text += f"holds {len(own)}, {free} free" if own is not None else f"{free} free"
        text = f"{text}: {holders}" if holders else text
        if late := self._is_behind(need):
            return f"{text}; {late.job} has waited for long and goes first"
        return f"{text}; takes hosts of {self.intends[need.job]} soon" if need.job in self.intends else text

    def _wanted(self, need: JobNeed) -> str:
        one_each = need.per_host or all(r.slots == 1 for r in self.rooms.values() if _fits(r, need))
        wanted = _hosts(need.min_workers) if one_each else f"room for {counted(need.min_workers, 'worker')}"
        return f"{wanted} of group {need.group}" if need.group else wanted


def _fits(room: HostRoom, need: JobNeed) -> bool:
    return need.group in ("", room.group)


def _room(rooms: Sequence[HostRoom], need: JobNeed) -> int:
    """Count the job's workers for which the hosts of its group have room."""
    fitting = [r for r in rooms if _fits(r, need)]
    return len(fitting) if need.per_host else sum(r.slots for r in fitting)


def _hosts(n: int) -> str:
    return counted(n, "host")
