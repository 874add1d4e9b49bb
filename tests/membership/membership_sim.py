"""A whole job in one thread: a dispatcher, agents, links that lose and reorder messages, and a clock that we move.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from membership_workers import Workers

from spotfleet.dispatcher.membership import Change, Evicted, Finished, Formed, Membership, Ordered, Phase, WorkerView
from spotfleet.messages import Stage

DT = 0.1
REPORT_S = 0.3  # so often agents report and get orders


@dataclass
class Host:
    name: str
    slots: int = 1
    noticed_until: float | None = None  # then the cloud takes it
    draining_until: float | None = None
    gone: bool = False
    listed_gone_at: float = 0.0  # when the provider says so
    away_until: float = 0.0  # its agent is not connected
    stopped_until: float = 0.0  # the whole machine stands still


@dataclass
class Links:
    loss: float = 0.0
    delay_s: float = 0.0
    queue: list[tuple[float, Callable[[], None]]] = field(default_factory=list)


class JobSim:
    """`min_workers` to `max_workers` on hosts that come and go. Every change is checked when it happens."""

    def __init__(self, min_workers: int = 2, max_workers: int = 4, seed: int = 0, total_steps: int = 10**9) -> None:
        self.rng = random.Random(seed)
        self.min, self.max = min_workers, max_workers
        self.now = 0.0
        self.world = Workers(self.rng, total_steps)
        self.hosts: dict[str, Host] = {}
        self.links = Links()
        self.core = Membership("job", min_workers, max_workers)
        self.down_until = 0.0  # the dispatcher
        self.heard: dict[str, WorkerView] = {}  # newest report that came, by worker
        self.started: dict[str, str] = {}  # workers that the dispatcher has started, on disk -> host
        self.ended: set[str] = set()  # confirmed
        self.reported = 0  # newest generation that the dispatcher was told of
        self.ledger: list[Ordered] = []
        self.changes: list[Change] = []
        self.refill = True  # ended workers are started anew, lost hosts replaced
        self._names = 0
        self._next_exchange = 0.0
        self._replaced: set[str] = set()

    @property
    def ended_well(self) -> bool:
        return any(isinstance(c, Finished) for c in self.changes)

    # ---- things that happen

    def add_host(self, slots: int = 1) -> Host:
        self._names += 1
        host = Host(f"h{self._names}", slots)
        self.hosts[host.name] = host
        for slot in range(slots):
            self._start_worker(host, slot)
        return host

    def _start_worker(self, host: Host, slot: int) -> None:
        self._names += 1
        name = f"{host.name}/{slot}/{self._names}"
        self.started[name] = host.name
        self.world.spawn(name, host.name)

    def kill_host(self, host: Host, listed_after_s: float) -> None:
        """The machine vanishes: nobody says a word until the provider does."""
        host.gone, host.listed_gone_at = True, self.now + listed_after_s
        for worker in self.on(host):
            self.world.kill(worker, vanishes=True)

    def on(self, host: Host) -> list:
        return [w for w in self.world.alive() if w.host == host.name]

    def restart_dispatcher(self, down_s: float) -> None:
        self.down_until = self.now + down_s
        self.core = Membership("job", self.min, self.max)
        for order in self.ledger:
            self.core.adopt(order.generation, order.members)
        self.heard = {}
        self.links.queue.clear()

    # ---- time

    def run(self, seconds: float) -> None:
        end = self.now + seconds - DT / 2
        while self.now < end:
            self.tick()

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        end = self.now + limit_s
        while self.now < end and not condition():
            self.tick()
        return condition()

    def tick(self) -> None:
        self.now += DT
        for host in list(self.hosts.values()):
            self._age(host)
        self.world.advance(DT)
        due = [entry for entry in self.links.queue if entry[0] <= self.now]
        self.links.queue = [entry for entry in self.links.queue if entry[0] > self.now]
        for _, deliver in due:
            deliver()
        if self.now >= self._next_exchange:
            self._next_exchange = self.now + REPORT_S
            self._exchange()
        if self.now >= self.down_until and not self.ended_well:
            self._decide()

    def _age(self, host: Host) -> None:
        if host.gone:
            if self.now >= host.listed_gone_at:
                self.ended |= {w for w, h in self.started.items() if h == host.name}
                if self.refill and host.name not in self._replaced:
                    self._replaced.add(host.name)
                    self.add_host(host.slots)
            return
        if host.noticed_until is not None and self.now >= host.noticed_until:
            self.kill_host(host, listed_after_s=1.0)
        elif host.draining_until is not None and (
            self.now >= host.draining_until or not any(w.group or w.forming for w in self.on(host))
        ):
            self.kill_host(host, listed_after_s=0.5)

    # ---- messages

    def connected(self, host: Host) -> bool:
        up = not host.gone and max(host.away_until, host.stopped_until) <= self.now
        return up and self.now >= self.down_until

    def _send(self, deliver: Callable[[], None]) -> None:
        if self.rng.random() >= self.links.loss:
            self.links.queue.append((self.now + self.rng.random() * self.links.delay_s, deliver))
            if self.links.loss and self.rng.random() < 0.2:  # and once more, later
                self.links.queue.append((self.now + self.rng.random() * 2 * self.links.delay_s, deliver))

    def _exchange(self) -> None:
        for host in self.hosts.values():
            if not self.connected(host):
                continue
            for name in [w for w, h in self.started.items() if h == host.name and w not in self.ended]:
                worker = self.world.all[name]
                if worker.dead:
                    self._send(lambda name=name: self.ended.add(name))
                    continue
                view = WorkerView(
                    worker=name,
                    host=host.name,
                    local_rank=int(name.split("/")[1]),
                    stage=worker.stage,
                    generation=worker.group.generation if worker.group else 0,
                    failed=worker.failed,
                    version=worker.version,
                    store=f"{name}:1" if worker.stage is not Stage.STARTING else "",
                )
                self._send(lambda view=view: self._hear(view))
                if name in self.heard:
                    orders = self.core.orders(name)
                    self._send(lambda worker=worker, orders=orders: worker.hears(orders) if worker.acts else None)

    def _hear(self, view: WorkerView) -> None:
        if self.now >= self.down_until:
            self.heard[view.worker] = view
            self.reported = max(self.reported, view.generation)

    def views(self) -> list[WorkerView]:
        views = []
        for name, host_name in self.started.items():
            if name in self.ended:
                continue
            host = self.hosts[host_name]
            blank = WorkerView(worker=name, host=host_name, local_rank=0, stage=Stage.STARTING)
            view = self.heard.get(name, blank)
            silent = not self.connected(host) or (name not in self.heard and bool(self.ledger))
            left_s, why = None, ""
            if host.noticed_until is not None:
                left_s, why = max(0.0, host.noticed_until - self.now), "notice"
            elif host.draining_until is not None:
                left_s, why = max(0.0, host.draining_until - self.now), "drain"
            views.append(replace(view, silent=silent, leaving_s=left_s, leaving_why=why))
        return views

    # ---- the dispatcher

    def _decide(self) -> None:
        views = self.views()
        expected = sum(v.stage is Stage.STARTING or (v.stage is Stage.INIT and self.core.generation > 0) for v in views)
        for change in self.core.observe(views, expected, self.now):
            self.changes.append(change)
            match change:
                case Ordered():
                    self._check_order(change, {v.worker: v for v in views})
                    self.ledger.append(change)
                case Evicted():
                    for name in change.workers:
                        self.world.kill(self.world.all[name])
                case Formed() | Finished():
                    pass
        if self.refill:
            self._restart_ended()

    def _restart_ended(self) -> None:
        for name in list(self.started):
            host = self.hosts[self.started[name]]
            if name in self.ended:
                del self.started[name]
                self.ended.discard(name)
                self.heard.pop(name, None)
                if self.connected(host) and not self.ended_well:
                    self._start_worker(host, int(name.split("/")[1]))

    def _check_order(self, order: Ordered, views: dict[str, WorkerView]) -> None:
        assert order.generation > max([0, *(o.generation for o in self.ledger)]), "generations only grow"
        assert len(set(order.members)) == len(order.members), "a worker holds two ranks"
        leaving = [w for w in order.members if views[w].leaving_s is not None]
        staying = [w for w in self.world.last_formed.members if w in order.members and w not in leaving]
        assert len(leaving) <= 1, "noticed hosts enter a new generation"
        known = self.reported == self.world.last_formed.generation
        if leaving and known and not self.links.delay_s and not self.links.loss:
            assert all(self.world.all[w].version < 0 for w in staying), "a noticed host enters without need"
        assert len(order.members) <= (max(self.max, 2) if leaving else self.max)
        assert not any(views[w].exited for w in order.members)
        finishing = any(v.stage is Stage.FINISHED for v in views.values()) or any(
            w.stage is Stage.FINISHED for w in self.world.all.values()
        )
        assert not order.members or finishing or len(order.members) >= self.min

    # ---- the end of trouble

    def calm(self) -> None:
        self.links.loss = self.links.delay_s = 0.0
        self.world.cut.clear()
        for host in self.hosts.values():
            host.away_until = host.stopped_until = min(self.now, host.stopped_until)
        for worker in self.world.alive():
            founder = worker.in_init and worker.forming is not None
            for_membership = founder or (worker.stage is Stage.READY and not worker.group)
            if worker.frozen_s > 1.0 and not for_membership:
                self.world.kill(worker)  # by a watchdog; who hangs while a generation forms does so for ever
            else:
                worker.frozen_s = 1e9 if worker.frozen_s > 1.0 else 0.0
        self.down_until = min(self.down_until, self.now)

    def able(self) -> int:
        hosts = [h for h in self.hosts.values() if not h.gone and h.noticed_until is None and h.draining_until is None]
        return sum(len(self.on(h)) for h in hosts)

    def whole(self) -> bool:
        """Every able worker up to max trains, or all is finished."""
        if self.ended_well:
            return True
        training = [w for w in self.world.alive() if w.acts and w.group and w.group.formed and not w.group.broken]
        return (
            self.core.phase is Phase.RUNNING
            and len(training) == min(self.max, self.able()) == len(self.core.members)
            and {w.name for w in training} == set(self.core.members)
        )

    def check_alive(self, limit_s: float = 900.0) -> None:
        self.calm()
        if self.able() < self.min and not self.refill:
            return
        assert self.run_until(self.whole, limit_s), self.story()
        before = self.world.steps
        moved = self.run_until(lambda: self.ended_well or self.world.steps > before + 3, limit_s)
        assert moved, self.story()

    def story(self) -> str:
        lines = [f"{type(c).__name__} {c}" for c in self.changes[-12:]]
        workers = [
            f"{w.name} {w.stage.value} v{w.version} failed={w.failed} group={w.group and w.group.generation} "
            f"forming={w.forming and w.forming.generation} last={w.last}"
            for w in self.world.alive()
        ]
        return "\n".join([f"at {self.now:.1f}: {self.core.phase.value}: {self.core.why}", *lines, *workers])
