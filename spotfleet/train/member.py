"""This process as a member of its job: a place, a group, and what the control thread may do to them.

    init() --founder--> group of generation 1
       |
       +---joiner---> provisional place, no group; `enter_generation` waits for one

Waits that have no limit of their own: `init` and `enter_generation`, until the dispatcher gives a place in a newer
generation or says `stop` (exit 0, at once).

Threads: the main thread owns everything here. The control thread calls `_on_orders`, `_tick` and `live` with
`control.cv` held; they read and abort `group`, which the main thread replaces under `control.cv` only. `on_broken` may
be called by any thread that finds a collective broken.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.messages import JOB_KEY, Assignment, Stage, WorkerOrders, WorkerReport
from spotfleet.train import group as groups
from spotfleet.train.control import Control, silence
from spotfleet.train.errors import CommBroken
from spotfleet.train.group import Group, open_store
from spotfleet.train.sockets import holds, sockets

FLUSH_LIMIT_S = 2.0  # how long a last word to the agent may take


@dataclass(frozen=True)
class Place:
    """Where this process stands among the workers of its job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0  # among the workers with this local_rank, one per host
    cross_size: int = 1


def place_of(a: Assignment) -> Place:
    """Worker names are HOST/SLOT/INCARNATION; hosts count in the order of their first rank."""
    hosts = [m.split("/")[0] for m in a.members]
    wide = [h for h in dict.fromkeys(hosts) if hosts.count(h) > a.local_rank]
    mine = hosts[a.rank]
    return Place(a.rank, a.world_size, a.local_rank, a.local_size, wide.index(mine) if mine in wide else 0, len(wide))


class Dismissed(Exception):
    """Told to stop while only waiting for others to return from the function."""


class Member:
    def __init__(self, environ: Any = os.environ) -> None:
        self.worker = environ.get("SPOTFLEET_WORKER", "local")
        self.job = environ.get("SPOTFLEET_JOB", "local")
        self.address = environ.get("SPOTFLEET_ADDRESS", "127.0.0.1")
        self.work = environ.get("SPOTFLEET_WORK", "")
        self._key = environ.get(JOB_KEY, "")
        self.place = Place()
        self.placed = False  # `place` is one in a generation, not provisional
        self.generation = 0  # the newest one entered or tried
        self.group: Group | None = None
        self.retiring: Group | None = None  # left as planned; kept until the next one has formed
        self.initialized = False
        self._stores: list[Any] = []  # ours, the newest last
        self._refused: set[str] = set()  # addresses that this machine did not have
        self._unreached: tuple[str, ...] = ()
        self._remarked = ""  # what the dispatcher has had us write into the log
        path = environ.get("SPOTFLEET_SOCKET", "")
        self.control = Control(path, WorkerReport(self.worker, self.job)) if path else None

    def live(self) -> dict[str, Any]:
        """Fields of the report that change all the time."""
        return {}

    def has_finished(self) -> bool:
        """The user's function has returned here."""
        return False

    # Start and end

    def init(self) -> None:
        """Enter the job: returns when its first generation has formed, or at once if it has had one."""
        if self.initialized:
            return
        self.initialized = True
        if self.control is None:
            self.group = groups.make_group(Assignment(0, 0, (self.worker,), ""), self.job, self.address)
            self.placed = True
            return
        self.control.on_orders, self.control.live, self.control.tick = self._on_orders, self.live, self._tick
        if not self._key:
            raise UsageError(f"hvd.init(): {JOB_KEY} is not in this process's environment",
                             hint="pass the worker's environment on to the process that trains")
        self.control.update(stage=Stage.INIT, store=self._listen(self.address))
        self.control.start()
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self.shutdown)
        sys.excepthook = self._on_uncaught
        while self.group is None:
            if not self.enter_generation(unless_founded=True):
                orders = self.control.orders
                self.place = Place(orders.provisional_rank, orders.provisional_size)
                return
            self._form_first()

    def _listen(self, address: str) -> str:
        """Open our bootstrap store there and say where it is; "" while this host does not have that address."""
        try:
            server, store = open_store(address, self._key)
        except OSError as error:
            if address not in self._refused:
                print(f"spotfleet: cannot listen on {address}: {error}; tried again", file=sys.stderr, flush=True)
            self._refused.add(address)
            return ""
        self._stores.append(server)  # the last ones serve on: who stands in an older generation may still ask them
        self.address = address
        return store

    def _form_first(self) -> None:
        assert self.group is not None and self.control is not None
        try:
            self.group.form()
        except CommBroken:
            self.drop_group()
            return
        self.control.update(generation=self.generation)

    def shutdown(self) -> None:
        """Say the last word to the agent and let the group go; harmless when done already."""
        if self.control is None or not self.initialized:
            return
        self.initialized = False
        self.control.flush(FLUSH_LIMIT_S)
        with self.control.cv:
            groups, self.group, self.retiring = (self.group, self.retiring), None, None
        for reaper in [g.retire() for g in groups if g is not None]:
            reaper.join(FLUSH_LIMIT_S)
        self.control.close()

    def enter_generation(self, unless_founded: bool = False) -> bool:
        """Wait for a newer generation with a place for us and take it; False if `unless_founded` and it is founded."""
        assert self.control is not None
        with self.control.cv:
            self.control.cv.wait_for(lambda: self.is_offered() or (unless_founded and self.control.orders.founded))
            orders = self.control.orders
            if orders.stop:
                self._leave()
            a = orders.assignment
            if a is None or a.generation <= self.generation or a.rank < 0:
                return False
            self.generation, self.place, self.placed = a.generation, place_of(a), True
            # Under the lock, since orders may abort it.
            self.group = groups.make_group(a, self.job, self.address, self._key, self.on_broken, self.on_stuck)
            self.group.listens = self.control.report.store
            self.group.on_unreached = partial(self.on_unreached, a.generation)
            self.on_unreached(a.generation, ())
            return True

    def is_offered(self) -> bool:
        """Do the orders hold a place for us in a newer generation, or our end?"""
        orders = self.control.orders
        a = orders.assignment
        return orders.stop or (a is not None and a.generation > self.generation and a.rank >= 0)

    def become_joiner(self) -> None:
        """Before `elastic.run`: the first generation is lost; the next one is entered there."""
        self.drop_group()

    def _leave(self) -> None:
        """`stop`: the process ends here, unless the function has returned already."""
        if self.has_finished():
            raise Dismissed
        raise SystemExit(0)

    # Called by the control thread, with control.cv held

    def _on_orders(self, orders: WorkerOrders) -> None:
        if orders.address and (orders.address != self.address or not self._stores):
            self._move(orders.address)
        if orders.remark and orders.remark != self._remarked:
            self._remarked = orders.remark
            print(f"spotfleet: {orders.remark}", file=sys.stderr, flush=True)
        group, a = self.group, orders.assignment
        if group is None:
            return
        if a is not None and a.generation > group.generation:
            if a.urgent:
                group.abort()
            else:
                group.change_waits = True
        if orders.stop:
            group.change_waits = True

    def _move(self, address: str) -> None:
        """This host is reached at another address by now: generations to come meet there. One that stands on an
        address that this machine has no more is over."""
        before, store = self.address, self._listen(address)
        if not store:
            return
        self.control.update(store=store)
        if self.group is not None and before != address and not holds(before):
            self.group.abort()
            self.on_broken(self.group.generation)

    def _tick(self) -> bool:
        group = self.group
        if group is not None and group.aborted and group.forming:
            group.abort()
            return True
        return False

    # Any thread

    def on_broken(self, generation: int) -> None:
        if self.control is not None and self.control.report.failed < generation:
            self.control.update(failed=generation, generation=0)

    def on_unreached(self, generation: int, peers: tuple[str, ...]) -> None:
        """Who of the generation that forms cannot be reached from here; what comes late of an older one is not told."""
        if self.control is not None and self._unreached != peers and generation == self.generation:
            self._unreached = peers
            self.control.update(unreached=peers)

    def on_stuck(self, why: str) -> None:
        """The last word of a process that can not be helped any more."""
        if self.control is not None:
            self.control.update(error=why, blame_peer=True)
            self.control.flush(FLUSH_LIMIT_S)

    def _after_fork(self) -> None:
        """In a child (a DataLoader worker): let go of all that would hide this process's death or speak for it."""
        ports = {store.port for store in self._stores}
        fds = self.control.descriptors() if self.control is not None else []  # no lock: its owner is not here
        for group in (self.group, self.retiring):
            fds += group.descriptors() if group is not None else []
        for fd in sockets():
            with socket.socket(fileno=os.dup(fd)) as sock:
                name = sock.getsockname()
                if isinstance(name, tuple) and name[1] in ports:
                    fds.append(fd)
        silence(sorted(set(fds)))
        # Kept alive for ever: their destructors would wait for threads that this process does not have.
        self._inherited = (self.group, self.retiring, self._stores, self.control)
        self.group = self.retiring = self.control = None
        sys.excepthook = sys.__excepthook__

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, tb: Any) -> None:
        if self.control is not None and issubclass(kind, Exception):
            text = "".join(traceback.format_exception(kind, error, tb))
            self.control.update(error=text, blame_peer=bool(getattr(error, "blame_peer", False)))
            self.control.flush(FLUSH_LIMIT_S)
        sys.__excepthook__(kind, error, tb)

    def drop_group(self) -> None:
        self.retire_old()
        if self.control is None:
            return
        with self.control.cv:
            group, self.group = self.group, None
        if group is not None:
            group.abort()
            group.retire()

    def retire_old(self) -> None:
        old, self.retiring = self.retiring, None
        if old is not None:
            old.retire()
