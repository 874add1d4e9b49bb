"""Sizes of elastic trials: how many workers each may have. `Sizes` is pure; an actor, one in a cluster, holds it.

    coordinators of trials --TrialClaim, repeated--> SizesActor --size--> ElasticJob.resize
    schedulers, callbacks, users --wish------------'

An atom is room for one worker. The sum of all sizes never exceeds `atoms`: two trials that grew at once would each hold
a part of the other's room. A trial begins with its `least` workers and grows when somebody wishes it to. A Tune
scheduler, which runs in the driver, uses `SizesClient`:

    self.sizes = SizesClient()                       # connects at the first call
    self.sizes.wish(trial.trial_id, 4)               # -> 3: what it has now; the rest follows once atoms are free
    self.sizes.wish_all({"a1": 1, "b2": 3})          # shrinks first, then grows in this order
    self.sizes.sizes(), self.sizes.atoms             # {"a1": 1, "b2": 3}, 4

Every claim contains all that the actor needs, so that a new actor takes over where one was lost with its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spotfleet.errors import SpotfleetError
from spotfleet.protocol.messages import dump
from spotfleet.protocol.ray_cluster import TRIALS_KEY, TRIALS_NAMESPACE, PlacedTrial, PlacedTrials
from spotfleet.ray import drains
from spotfleet.ray.installed import connected_ray
from spotfleet.ray.params import check_count
from spotfleet.ray.run.staffing import room_on

NAME, NAMESPACE = "spotfleet-tune-sizes", "spotfleet"
EXPIRES_S = 60.0  # a trial without a claim for this long has ended
PLACED_S = 15.0  # a trial without a claim for this long is not in the bill: its workers ended with its process
IDLE_S = 120.0  # without any trial for this long the actor ends itself
ROOM_EVERY_S = 1.0
ANSWER_S = 60.0
NEXT_LIMIT_S, NEXT_EVERY_S = 120.0, 0.5  # for another actor in place of a lost one
HEAD = {"node:__internal_head__": 0.001}  # Ray's own name of the head: the last node that may be lost


@dataclass(frozen=True)
class TrialClaim:
    """State of one trial, as its coordinator repeats it."""

    trial_id: str
    least: int
    most: int
    holds: int = 0  # its size by an earlier answer; 0: it has not begun
    atoms: int = 0  # for all trials together, as the user has set them; 0: the cluster's room
    cpus: float = 1.0  # for each worker
    gpus: float = 0.0
    run: str = ""  # differs after each start of the trial's coordinator
    worker_s: float = 0.0  # time of all workers of this run together
    name: str = ""  # Tune's, for people
    nodes: Mapping[str, int] = field(default_factory=dict)  # id of a node -> workers that have their places there


@dataclass(frozen=True)
class TrialSize:
    """Size of one trial, with its limits."""

    size: int  # 0: it waits for its first atoms
    least: int
    most: int
    goal: int = 0  # the size that it gets once there are atoms: by the newest wish


@dataclass(frozen=True)
class SizesOverview:
    """The sizes of all trials at one moment."""

    atoms: int
    trials: dict[str, TrialSize]

    @property
    def free(self) -> int:
        return self.atoms - sum(t.size for t in self.trials.values())


@dataclass
class _Sized:
    """One trial that has claimed room."""

    claim: TrialClaim
    seen: float
    size: int = 0  # 0: it waits for `least` atoms


@dataclass
class Sizes:
    """The sizes of all trials. `atoms` may change at any time."""

    atoms: int = 0
    holding: bool = False  # no trial begins while others train
    _trials: dict[str, _Sized] = field(default_factory=dict)  # in the order of their first claims
    _wishes: dict[str, tuple[int, int]] = field(default_factory=dict)  # number of workers, and of the wish
    _spent: dict[str, float] = field(default_factory=dict)  # worker-seconds of runs that have ended
    _order: Iterator[int] = field(default_factory=itertools.count)

    def claim(self, claim: TrialClaim, now: float) -> int:
        """Record a trial's claim; return its size, 0 while it waits for its first atoms."""
        found = self._trials.setdefault(claim.trial_id, _Sized(claim, now, claim.holds))
        if found.claim.run != claim.run:
            self._add_up(found.claim)
        found.claim, found.seen = claim, now
        self._settle()
        return found.size

    def spent_s(self, trial_id: str) -> float:
        """Return the worker-seconds of a trial's earlier runs: before it was paused, or its coordinator was lost."""
        return self._spent.get(trial_id, 0.0)

    def wish(self, trial_id: str, workers: int) -> int:
        """Wish that a trial had this many workers; return its size now. The wish counts until the trial leaves, and
        for a trial without a claim from its first claim on."""
        return self.wish_all({trial_id: workers})[trial_id]

    def wish_all(self, wishes: Mapping[str, int]) -> dict[str, int]:
        """Take several wishes at once: atoms that some give up go to the others, in the mapping's order."""
        for trial_id, workers in wishes.items():
            self._wishes[trial_id] = workers, next(self._order)
        self._settle()
        return {trial_id: self.size(trial_id) for trial_id in wishes}

    def hold(self, holding: bool) -> None:
        """Let no trial begin while others train, or let them begin again."""
        self.holding = holding
        self._settle()

    def leave(self, claim: TrialClaim) -> None:
        """Forget a trial that has ended, or is paused. Its new coordinator, if there is one already, stays."""
        found = self._trials.get(claim.trial_id)
        if found is not None and found.claim.run == claim.run:
            self._add_up(claim)
            del self._trials[claim.trial_id]
            self._wishes.pop(claim.trial_id, None)
            self._settle()

    def expire(self, now: float) -> None:
        """Forget trials whose coordinators are gone."""
        for found in [f for f in self._trials.values() if now - f.seen > EXPIRES_S]:
            self.leave(found.claim)

    def size(self, trial_id: str) -> int:
        return self._trials[trial_id].size if trial_id in self._trials else 0

    def sizes(self) -> dict[str, int]:
        """Return the size of each trial; 0: it waits."""
        return {trial_id: found.size for trial_id, found in self._trials.items()}

    def overview(self) -> SizesOverview:
        return SizesOverview(self.atoms, {
            t: TrialSize(found.size, found.claim.least, found.claim.most, self._goal(t))
            for t, found in self._trials.items()})

    def placed(self, now: float) -> tuple[PlacedTrial, ...]:
        """Return the trials whose workers have places, for the bill of a fleet."""
        claims = [f.claim for f in self._trials.values() if f.claim.nodes and now - f.seen <= PLACED_S]
        return tuple(PlacedTrial(c.trial_id, c.name, dict(c.nodes), c.cpus, c.gpus) for c in claims)

    @property
    def free(self) -> int:
        return self.atoms - sum(found.size for found in self._trials.values())

    def _add_up(self, ended: TrialClaim) -> None:
        self._spent[ended.trial_id] = self.spent_s(ended.trial_id) + ended.worker_s

    def _goal(self, trial_id: str) -> int:
        claim = self._trials[trial_id].claim
        wished = self._wishes[trial_id][0] if trial_id in self._wishes else max(claim.least, claim.holds)
        return max(claim.least, min(wished, claim.most))

    def _settle(self) -> None:
        """Shrink as wished, then give trials that wait their first atoms, then let the others grow."""
        begun = {t: found for t, found in self._trials.items() if found.size}
        for trial_id, found in begun.items():
            found.size = min(found.size, self._goal(trial_id))
        self._take_back(max(0, -self.free), begun.values())
        for found in [f for f in self._trials.values() if not f.size]:
            if self.holding and begun:
                break
            self._take_back(found.claim.least - self.free, begun.values())
            if self.free < found.claim.least:
                break  # the next one waits for its turn, also where it would fit
            found.size = found.claim.least
        grows = [t for t, found in self._trials.items() if found.size and t in self._wishes]
        for trial_id in sorted(grows, key=lambda t: self._wishes[t][1]):
            found = self._trials[trial_id]
            found.size += max(0, min(self.free, self._goal(trial_id) - found.size))

    def _take_back(self, atoms: int, begun: Iterable[_Sized]) -> None:
        """Take atoms from the largest trials, if they have as many above their least."""
        spare = sum(f.size - f.claim.least for f in begun)
        for _ in range(min(atoms, spare) if atoms <= spare or self.free < 0 else 0):
            largest = max((f for f in begun if f.size > f.claim.least), key=lambda f: f.size)
            largest.size -= 1


class SizesActor:
    """Actor that holds the sizes. It ends itself once there are no trials."""

    def __init__(self) -> None:
        self._sizes = Sizes()
        self._changed = asyncio.Event()
        self._busy = self._looked = time.monotonic()
        self._tender: Any = None
        self._held_until = 0.0
        self._beat = int(1000 * time.time())  # another number than that of an actor that was lost

    async def claim(self, claim: TrialClaim, known: int, wait_s: float) -> int:
        """Return the trial's size, once it is not `known` any more, or after `wait_s`."""
        loop, end = asyncio.get_running_loop(), time.monotonic() + wait_s
        self._tender = self._tender or loop.create_task(self._tend())
        self._look(claim)
        self._sizes.claim(claim, time.monotonic())
        self._wake()
        while self._sizes.size(claim.trial_id) == known and (left_s := end - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
        return self._sizes.size(claim.trial_id)

    async def wish_all(self, wishes: dict[str, int]) -> dict[str, int]:
        found = self._sizes.wish_all(wishes)
        self._wake()
        return found

    async def hold(self, seconds: float) -> None:
        self._held_until = time.monotonic() + seconds
        self._sizes.hold(seconds > 0)
        self._wake()

    async def leave(self, claim: TrialClaim) -> None:
        self._sizes.leave(claim)
        self._wake()

    async def spent_s(self, trial_id: str) -> float:
        return self._sizes.spent_s(trial_id)

    async def overview(self) -> SizesOverview:
        return self._sizes.overview()

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()

    def _look(self, claim: TrialClaim) -> None:
        """Set the number of atoms. One trial may always begin: its actors are the request for nodes."""
        now = time.monotonic()
        if claim.atoms:
            self._sizes.atoms = claim.atoms
        elif now - self._looked >= ROOM_EVERY_S or not self._sizes.atoms:
            self._looked = now
            room = sum(room_on(r, claim.cpus, claim.gpus) for r in drains.alive_nodes().values())
            self._sizes.atoms = max(room, claim.least)

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            self._sizes.expire(now)
            self._sizes.hold(now < self._held_until)
            self._wake()
            self._beat += 1
            await asyncio.to_thread(_publish, PlacedTrials(self._beat, self._sizes.placed(now)))
            if self._sizes.sizes():
                self._busy = now
            elif now - self._busy > IDLE_S:
                ray = connected_ray()
                ray.kill(ray.get_runtime_context().current_actor)


class SizesClient:
    """Connection to the cluster's sizes, made at the first call, and again where the actor is gone."""

    def __init__(self) -> None:
        self._actor: Any = None

    def claim(self, claim: TrialClaim, known: int, wait_s: float) -> int:
        return self._call("claim", claim, known, wait_s)

    def wish(self, trial_id: str, workers: int) -> int:
        """See `Sizes.wish`."""
        return self.wish_all({trial_id: workers})[trial_id]

    def wish_all(self, wishes: Mapping[str, int]) -> dict[str, int]:
        """See `Sizes.wish_all`."""
        for workers in wishes.values():
            check_count("workers", workers)
        return self._call("wish_all", dict(wishes))

    def hold(self, seconds: float) -> None:
        """Let no trial begin for so long while others train; 0: let them begin. Repeat it while it should last."""
        self._call("hold", seconds)

    def leave(self, claim: TrialClaim) -> None:
        self._call("leave", claim)

    def spent_s(self, trial_id: str) -> float:
        """See `Sizes.spent_s`."""
        return self._call("spent_s", trial_id)

    def sizes(self) -> dict[str, int]:
        """Return the size of each trial that has begun or waits for its first atoms."""
        return {trial_id: found.size for trial_id, found in self.overview().trials.items()}

    def overview(self) -> SizesOverview:
        """Return the sizes of all trials with their limits, and the atoms, of the same moment."""
        return self._call("overview")

    @property
    def atoms(self) -> int:
        """The workers that all trials may have together; 0 before the first trial."""
        return self.overview().atoms

    def _call(self, method: str, *args: Any) -> Any:
        ray, end = connected_ray(), time.monotonic() + NEXT_LIMIT_S
        while True:
            self._actor = self._actor or _actor(ray)
            try:
                return ray.get(getattr(self._actor, method).remote(*args), timeout=ANSWER_S)
            except ray.exceptions.RayActorError as error:
                if time.monotonic() > end:
                    raise SpotfleetError("the actor with the trials' sizes does not answer",
                                         hint="look at the output of SizesActor in Ray's logs") from error
            # It has ended; its name is free once Ray knows that. The next one learns all from the trials' claims.
            self._actor = None
            time.sleep(NEXT_EVERY_S)


def _publish(trials: PlacedTrials) -> None:
    """Write the trials where the observer of a fleet's cluster reads them (`ray/cluster/trials.py`)."""
    kv: Any = importlib.import_module("ray.experimental.internal_kv")
    # Where Ray's head does not answer, the next second's value is as good.
    with contextlib.suppress(connected_ray().exceptions.RayError, RuntimeError):
        kv._internal_kv_put(TRIALS_KEY, dump(trials).encode(), overwrite=True, namespace=TRIALS_NAMESPACE)


def resize(trial_id: str, workers: int) -> int:
    """Wish that a trial had this many workers, while it trains; return its size now. See `Sizes.wish`."""
    return SizesClient().wish(trial_id, workers)


def _actor(ray: Any) -> Any:
    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        pass  # there is none yet
    # Detached: it must not end with the trial that needed it first.
    return ray.remote(SizesActor).options(
        name=NAME, namespace=NAMESPACE, get_if_exists=True, lifetime="detached", num_cpus=0, max_restarts=0,
        resources=HEAD, scheduling_strategy="DEFAULT").remote()
