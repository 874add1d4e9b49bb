"""Loops of one elastic run, in threads of the driver or of a detached actor.

    actors asked for --ready--> named, added to the coordinator, train --returned--> results by rank
            ^                          |
            '---- lost, evicted <------'

The run ends when the functions of all ranks have returned, or when one raises an error of its own. It fails also when
fewer than `min_workers` train for `elastic_timeout`, after `reset_limit` changes, and when workers end again and again
without a step.

Threads: `_loop` decides, and waits for events only. `_tend` makes all calls that wait for Ray's control service: it
lists the nodes, asks for actors and ends them. `_lock` guards all fields.
"""

from __future__ import annotations

import queue
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.membership import Change, Evicted, Ordered
from spotfleet.protocol.messages import JOB_KEY, Stage
from spotfleet.ray import drains
from spotfleet.ray.installed import About, check_same, connected_ray, own_python
from spotfleet.ray.params import ElasticParams, HostSource
from spotfleet.ray.run.actors import Outcome
from spotfleet.ray.run.checkpoints import WORK, RunCheckpoints, newest, target_of, work_folder
from spotfleet.ray.run.coordinator import JOB, Coordinator, Leaving, RunStatus, is_held_up
from spotfleet.ray.run.pool import ActorPool, ActorSpec, CallEnded, Ready, cannot_be_sent
from spotfleet.ray.run.staffing import ActorStage, Cooldown, StaffMember, gpu_place, room_on, staff_change

TICK_S = 0.05
TEND_S = 0.1
DRAINS_EVERY_S = 0.25
NODES_EVERY_S = 1.0
UNLISTED_S = 30.0  # for workers on a node that the discovery lists no more
LOSSES = 3  # for each worker wanted: losses in a row without a step that end the run
BRING = 'have Ray bring it to the nodes: ray.init(runtime_env={"working_dir": "."})'
PLAIN = "return plain data: numbers, texts, lists and dicts of them"
NAME_CHARS = 12  # length of a node's id in worker names


class WorkerTraceback(Exception):
    """Traceback of a worker, shown as the cause of its error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@dataclass
class _Actor:
    stage: ActorStage = ActorStage.ASKED
    node: str = ""
    slot: int = -1
    name: str = ""
    about: About | None = None
    since: float = 0.0  # monotonic: start of its process, once `about` is known


@dataclass(frozen=True)
class TrainingCall:
    """A user's function with its arguments, as they are or as references to objects of Ray."""

    function: Any
    args: Any
    kwargs: Any


@dataclass
class RunEnd:
    """Result of a run: values by rank, or an error."""

    results: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    text: str = ""  # the traceback, where the error came from a worker

    def get(self) -> list[Any]:
        if self.error is None:
            return self.results
        raise self.error from (WorkerTraceback(self.text) if self.text else self.error.__cause__)


class ElasticJob:
    """The actors, the coordinator and the threads of one executor; one run at a time."""

    def __init__(self, params: ElasticParams, env: dict[str, str], verbose: int = 0,
                 discovery: HostSource | None = None, warm: tuple[str, ...] | None = None,
                 on_log: Callable[[str, Any], Any] | None = None) -> None:
        """`on_log(worker, value)` takes the values that workers send, in the place of `logs`; its result is the
        answer. It may wait: then the worker's call waits, too."""
        self.params, self._verbose, self._discovery = params, verbose, discovery
        self._least, self._most = params.min_workers, params.max_workers
        self._ray = connected_ray()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        spec = ActorSpec(params.cpus_per_worker, params.gpus, env)
        self._pool = ActorPool(spec if warm is None else ActorSpec(spec.cpus, spec.gpus, env, warm), self._wake.set)
        self._actors: dict[int, _Actor] = {}
        self._rooms: dict[str, int] = {}  # workers that each node could hold
        self._gpus: dict[str, int] = {}  # number on each node
        self._next_look = {"drains": 0.0, "nodes": 0.0}
        self._draining: dict[str, Leaving] = {}
        self._unlisted: dict[str, Leaving] = {}
        self._stop = threading.Event()
        self._staff_news = threading.Event()
        self._to_end: list[int] = []  # actors
        self.logs: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._on_log = on_log or (lambda worker, info: self.logs.put((worker, info)))
        self._worker_s = 0.0  # time of the actors that have ended
        self.changes: list[str] = []  # each change of membership, in one line
        self._begin_run()
        self._tender = threading.Thread(target=self._tend, name="spotfleet-elastic-staff", daemon=True)
        self._thread = threading.Thread(target=self._loop, name="spotfleet-elastic-job", daemon=True)
        self._tender.start()
        self._thread.start()

    def _begin_run(self) -> None:
        self._key = secrets.token_hex(16)
        self._work: TrainingCall | None = None
        self._cooldown = Cooldown(self.params.cooldown_range)
        self._outcomes: dict[str, Outcome] = {}
        self._outside: tuple[str, Outcome] | None = None  # a worker that lost a peer outside of elastic.run
        self._last_error = ""
        self._held_since: float | None = None
        self._end: RunEnd | None = None
        self.ended = threading.Event()
        self._coordinator: Coordinator | None = None

    # Any thread

    def begin(self, work: TrainingCall) -> None:
        """Train with this function in all actors. Raises SpotfleetError while it trains, and after `shutdown`."""
        if self._stop.is_set():
            raise SpotfleetError("the executor was shut down", hint="make a new one and call start()")
        target = target_of(self.params.checkpoint_target, self.params.checkpoint_every_s)
        found = newest(target) if target else None
        with self._lock:
            if self._work is not None and not self.ended.is_set():
                raise SpotfleetError("the executor runs a function already",
                                     hint="result() waits for its end, shutdown() ends it")
            self._begin_run()
            address = self._ray.util.get_node_ip_address()
            self._coordinator = Coordinator(address, self._key, self._least, self._wanted(), self._wake.set,
                                            self._on_log, self.params.pace)
            self._work = work
            self._coordinator.use(RunCheckpoints(target, found))
        self._wake.set()

    def result(self) -> RunEnd:
        """Return the run's end, once `ended` is set."""
        assert self._end is not None
        return self._end

    def resize(self, min_workers: int | None, max_workers: int | None) -> ElasticParams:
        """Change the limits; return the parameters with the new ones. UsageError for impossible ones."""
        with self._lock:
            changed = replace(self.params, min_workers=self._least if min_workers is None else min_workers,
                              max_workers=self._most if max_workers is None else max_workers)
            self._least, self._most = changed.min_workers, changed.max_workers
        self._wake.set()
        return changed

    def standing(self) -> RunStatus:
        with self._lock:
            if self._coordinator is None:
                return RunStatus("starting", f"{len(self._actors)} actors asked for", 0, (), 0)
            return self._coordinator.standing()

    def worker_s(self) -> float:
        """Return the time that all actors have had their places for, in seconds."""
        now = time.monotonic()
        with self._lock:
            return self._worker_s + sum(now - a.since for a in self._actors.values() if a.about is not None)

    def places(self) -> dict[str, int]:
        """Return the number of actors that have their places on each node, by its id."""
        with self._lock:
            return dict(Counter(a.node for a in self._actors.values() if a.about is not None))

    def shutdown(self) -> None:
        """End all actors."""
        self._stop.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # The two threads

    def _loop(self) -> None:
        try:
            while not self._stop.is_set():
                self._wake.wait(TICK_S)
                self._wake.clear()
                with self._lock:
                    self._step(time.monotonic())
        except Exception as error:  # noqa: BLE001 - the thread of run() raises it
            self._finish(RunEnd(error=error))
        finally:
            with self._lock:
                if self._work is not None and not self.ended.is_set():
                    self._finish(RunEnd(error=SpotfleetError("the executor was shut down while it trained")))
            self._stop.set()
            self._tender.join()
            self._pool.close()

    def _tend(self) -> None:
        try:
            while not self._stop.is_set():
                self._staff_news.wait(TEND_S)
                self._staff_news.clear()
                self._look(time.monotonic())
                with self._lock:
                    start = self._staff(time.monotonic())
                    end, self._to_end = self._to_end, []
                for number in end:
                    self._pool.end(number)
                for number, node in start:
                    self._pool.ask(number, node)
        except Exception as error:  # noqa: BLE001 - the thread of run() raises it
            with self._lock:
                self._finish(RunEnd(error=error))

    def _step(self, now: float) -> None:
        for event in self._pool.take():
            if event.number in self._actors:
                self._on_ready(event) if isinstance(event, Ready) else self._on_ended(event, now)
        coordinator = self._coordinator
        if coordinator is not None and not self.ended.is_set():
            self._train_idle(coordinator)
            coordinator.resize(self._least, self._wanted())
            coordinator.leaving = self._leaving()
            for change in coordinator.step(self._coming()):
                self._note(change)
            for remark in coordinator.checkpoints.take_remarks():
                self._tell(remark)
            self._cooldown.progressed(coordinator.standing().version)
            self._check_end(coordinator, now)

    def _on_ready(self, event: Ready) -> None:
        actor = self._actors[event.number]
        try:
            check_same(event.about, self._ray.__version__, own_python())
        except SpotfleetError as error:
            self._finish(RunEnd(error=error))
        actor.about, actor.node, actor.stage = event.about, event.about.node, ActorStage.IDLE
        actor.since = time.monotonic() - event.about.warm_s

    def _on_ended(self, event: CallEnded, now: float) -> None:
        """Process the end of a worker's function, or of its process."""
        actor = self._actors[event.number]
        if isinstance(event.result, Outcome) and actor.name:
            self._outcomes[actor.name] = event.result
            in_init = self._coordinator is not None and self._coordinator.report(actor.name).stage is Stage.INIT
            if event.result.blame_peer and in_init:
                self._outside = actor.name, event.result
        elif actor.name and (why := cannot_be_sent(event.error)):
            what = "what the function returns, or it, or an argument cannot be sent between driver and worker"
            error = UsageError(f"{what}: {why}", hint=BRING if "No module named" in why else PLAIN)
            self._outcomes[actor.name] = Outcome(False, None, error, str(event.error))
        else:
            self._last_error = str(event.error or "").strip() or type(event.error).__name__
        self._drop(event.number)
        done = actor.name in self._outcomes and self._outcomes[actor.name].done
        if isinstance(event.error, self._ray.exceptions.ActorUnschedulableError):
            self._rooms[actor.node] = 0  # it went after the last look at the nodes; nothing was lost
        elif not done:
            self._cooldown.lost(now)

    def _drop(self, number: int) -> None:
        actor = self._remove(number)
        if self._coordinator is not None and actor.name:
            self._coordinator.ended(actor.name)

    def _remove(self, number: int) -> _Actor:
        """Let `_tend` end an actor."""
        actor = self._actors.pop(number)
        if actor.about is not None:
            self._worker_s += time.monotonic() - actor.since
        self._to_end.append(number)
        self._staff_news.set()
        return actor

    def _train_idle(self, coordinator: Coordinator) -> None:
        """Let warm actors train; the first ones once there are enough of them."""
        here = [(n, a) for n, a in self._actors.items() if a.stage is not ActorStage.ASKED]
        if coordinator.membership.generation > 0 or len(here) >= self._least:
            for number, actor in here:
                if actor.stage is ActorStage.IDLE:
                    self._train(number, actor, coordinator)

    def _train(self, number: int, actor: _Actor, coordinator: Coordinator) -> None:
        """Give an actor its worker's name, and its place among those of its node."""
        assert actor.about is not None and self._work is not None
        given = actor.about.gpus if self.params.gpus == 1 else ()
        gpu, visible = gpu_place(given, actor.about.visible, self._gpus.get(actor.node, 0))
        taken = {a.slot for a in self._actors.values() if a.node == actor.node}
        slot = gpu if gpu is not None else next(n for n in range(len(taken) + 1) if n not in taken)
        host = actor.node[:NAME_CHARS]
        actor.slot, actor.name, actor.stage = slot, f"{host}/{slot}/{number}", ActorStage.RUNS
        coordinator.add(actor.name, host, slot)
        env = {"SPOTFLEET_SOCKET": coordinator.path, "SPOTFLEET_WORKER": actor.name, "SPOTFLEET_JOB": JOB,
               "SPOTFLEET_ADDRESS": actor.about.address, "SPOTFLEET_LOCAL_RANK": str(slot), JOB_KEY: self._key,
               "SPOTFLEET_WORKERS": f"{self._least}:{self._wanted()}"}
        if self.params.checkpoint_target:
            env[WORK] = work_folder(self._key)
        if visible:
            env["CUDA_VISIBLE_DEVICES"] = visible
        self._pool.train(number, env, self._work.function, self._work.args, self._work.kwargs)

    # Nodes

    def _look(self, now: float) -> None:
        if now >= self._next_look["nodes"]:
            self._next_look["nodes"] = now + NODES_EVERY_S
            nodes = drains.alive_nodes()
            listed = self._discovery.find_available_hosts_and_slots() if self._discovery is not None else None
            with self._lock:
                self._rooms = {n: room_on(r, self.params.cpus_per_worker, self.params.gpus) for n, r in nodes.items()}
                self._gpus = {n: int(r.get("GPU", 0)) for n, r in nodes.items()}
                if listed is not None:
                    self._use_only(listed, now)
        if now >= self._next_look["drains"]:
            self._next_look["drains"] = now + DRAINS_EVERY_S
            found = drains.draining()
            with self._lock:
                self._draining = {n: Leaving(now + left_s, "notice") for n, left_s in found.items()}

    def _use_only(self, listed: dict[str, int], now: float) -> None:
        """Use the hosts of the user's discovery only: workers elsewhere leave."""
        self._rooms = {n: min(slots, self._rooms.get(n, 0)) for n, slots in listed.items()}
        nodes = {a.node for a in self._actors.values() if a.node}
        self._unlisted = {n: self._unlisted.get(n, Leaving(now + UNLISTED_S, "drain"))
                          for n in nodes if n not in listed}

    def _leaving(self) -> dict[str, Leaving]:
        return {n[:NAME_CHARS]: leaving for n, leaving in {**self._unlisted, **self._draining}.items()}

    # Number of workers

    def _wanted(self) -> int:
        room = sum(r for n, r in self._rooms.items() if n not in self._draining)
        most = max(self._least, room) if self._most is None else self._most
        return max(1, min(most, room)) if self._discovery is not None else most

    def _coming(self) -> int:
        """Return how many actors are asked for and have room, so that they may come soon."""
        asked = sum(a.stage is ActorStage.ASKED for a in self._actors.values())
        here = len(self._actors) - asked
        idle = sum(a.stage is ActorStage.IDLE for a in self._actors.values())
        return idle + max(0, min(asked, sum(self._rooms.values()) - here))

    def _staff(self, now: float) -> list[tuple[int, str]]:
        """Note the actors to end; return those to start, each with its node."""
        coordinator = self._coordinator
        members = frozenset(coordinator.membership.members) if coordinator is not None else frozenset()
        staff = [StaffMember(n, a.stage, a.name in members, a.node in self._draining or a.node in self._unlisted,
                             coordinator is None or not a.name or coordinator.wanted(a.name))
                 for n, a in self._actors.items()]
        complete = any(o.done for o in self._outcomes.values()) or self.ended.is_set()
        change = staff_change(staff, self._wanted(), complete=complete)
        for number in change.end:
            self._drop(number)
        start = []
        for _ in range(change.start if now >= self._cooldown.until else 0):
            start.append((number := self._pool.number(), node := self._place()))
            self._actors[number] = _Actor(node=node)
        return start

    def _place(self) -> str:
        """Return the node for the next actor; "": Ray chooses."""
        if self._discovery is None:
            return ""
        used = Counter(a.node for a in self._actors.values())
        free = [n for n, room in self._rooms.items() if room > used[n]]
        return min(free, key=lambda n: used[n], default="")

    # The end

    def _check_end(self, coordinator: Coordinator, now: float) -> None:
        failed = next(((n, o) for n, o in self._outcomes.items() if not (o.done or o.blame_peer or o.blame_host)), None)
        if failed is not None:
            self._finish(_failure(*failed))
            return
        if self._outside is not None:
            name, outcome = self._outside
            why = f"a worker was lost, and the function of {name} was not in hvd.elastic.run"
            self._finish(RunEnd(error=SpotfleetError(why, hint="train inside a function with @hvd.elastic.run"),
                                text=outcome.text))
            return
        if any(o.done for o in self._outcomes.values()) and not any(
                a.stage is ActorStage.RUNS for a in self._actors.values()):
            order = coordinator.finished or coordinator.group or tuple(self._outcomes)
            done = {n: o for n, o in self._outcomes.items() if o.done}
            self._finish(RunEnd([done[n].value if n in done else None for n in order]))
            return
        self._check_limits(coordinator, now)

    def _check_limits(self, coordinator: Coordinator, now: float) -> None:
        standing, limit = coordinator.standing(), self.params.reset_limit
        if limit is not None and coordinator.resets > limit:
            why = f"the membership has changed {coordinator.resets} times, and reset_limit is {limit}"
            self._finish(RunEnd(error=SpotfleetError(why, hint="raise reset_limit, or leave it out")))
        most = LOSSES * max(1, self._wanted())
        if self._cooldown.losses >= most:
            why = f"{self._cooldown.losses} workers in a row have ended without a step in between"
            self._finish(RunEnd(error=SpotfleetError(f"{why}: {self._last_error or 'lost'}"[:4000],
                                                     hint="look at the workers' output in Ray's logs")))
        held = is_held_up(coordinator.membership.phase)
        self._held_since = (self._held_since or now) if held else None
        if self._held_since is not None and now - self._held_since >= self.params.elastic_timeout:
            room = sum(self._rooms.values())
            why = (f"no training for elastic_timeout ({self.params.elastic_timeout:g} s): {standing.why}; "
                   f"the cluster has room for {room} of {self._least} workers")
            self._finish(RunEnd(error=SpotfleetError(why, hint="add nodes, or ask for fewer or smaller workers")))

    def _finish(self, end: RunEnd) -> None:
        if self.ended.is_set():
            return
        self._end = end
        if self._coordinator is not None:
            self._coordinator.close()
        self.ended.set()
        for number in [n for n, a in self._actors.items() if a.stage is ActorStage.RUNS]:
            self._remove(number)

    def _note(self, change: Change) -> None:
        if isinstance(change, Ordered | Evicted):
            size = f"generation {change.generation}, {len(change.members)} workers: " if isinstance(
                change, Ordered) else "evicted: "
            self._tell(size + change.why)

    def _tell(self, line: str) -> None:
        self.changes.append(line)
        if self._verbose:
            print(f"spotfleet: {line}", file=sys.stderr, flush=True)


def _failure(worker: str, outcome: Outcome) -> RunEnd:
    error = outcome.error or SpotfleetError(f"{worker} failed: {outcome.text.strip().splitlines()[-1]}")
    return RunEnd(error=error, text=outcome.text)


def pump(job: ElasticJob, callbacks: list[Callable[[Any], Any]]) -> None:
    """Call each callback with each logged value, until the run has ended and none is left."""
    while True:
        over = job.ended.is_set()
        try:
            _, info = job.logs.get(timeout=0.02 if over else 0.2)
        except queue.Empty:
            if over:
                return
            continue
        for callback in callbacks:
            callback(info)
