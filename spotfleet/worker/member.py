"""Membership of this process in its job: its place, its group (see world.py), and the orders that change them.

    init() --founder--> group of generation 1
       |
       +---joiner---> provisional place, no group; `enter_generation` waits for one

The provisional place is the one that the dispatcher predicts for this worker. What the script reads of it binds the
worker (place_reads.py).

Two waits have no limit of their own: `init` and `enter_generation` wait until the dispatcher assigns a place in a newer
generation or orders `stop` (exit 0, at once); `init` of a joiner until the dispatcher has predicted its place.

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
from functools import partial
from typing import Any, Generic

from spotfleet.errors import UsageError
from spotfleet.protocol.messages import JOB_KEY, Assignment, RankInfo, Stage, WorkerOrders, WorkerReport
from spotfleet.protocol.proofs import MemberProof
from spotfleet.worker.control import AgentLine, silence
from spotfleet.worker.device_errors import is_lost
from spotfleet.worker.errors import CommBroken
from spotfleet.worker.place_reads import PlaceReads
from spotfleet.worker.sockets import holds, sockets
from spotfleet.worker.store import Server, open_store
from spotfleet.worker.world import MakeWorld, W

FLUSH_LIMIT_S = 2.0  # for the last report to the agent


class Dismissed(Exception):
    """Order to stop, received after the user's function has returned here and while others still run it."""


class Member(Generic[W]):
    """This worker's place, group and connection to the agent."""

    def __init__(self, make_world: MakeWorld[W], environ: Any = os.environ) -> None:
        """`make_world` makes each generation's communication; it may read attributes of this object."""
        self._make_world = make_world
        self.worker = environ.get("SPOTFLEET_WORKER", "local")
        self.job = environ.get("SPOTFLEET_JOB", "local")
        self.address = environ.get("SPOTFLEET_ADDRESS", "127.0.0.1")
        self.work = environ.get("SPOTFLEET_WORK", "")
        self.shared = environ.get("SPOTFLEET_FETCHED", self.work)  # folder of the job for all its workers here
        self._key = environ.get(JOB_KEY, "")
        self._gang = environ.get("SPOTFLEET_LAUNCHER") == "torchrun"
        self.place = RankInfo()
        self.placed = False  # `place` belongs to a generation and is not provisional
        self.reads = PlaceReads()  # numbers of a provisional place
        self.generation = 0  # the newest one entered or tried
        self._grant = ""  # that of `generation`
        self.group: W | None = None
        self.retiring: W | None = None  # left by a planned change; kept until the next one has formed
        self.initialized = False
        self._stores: list[Server] = []  # servers of this process, the newest last
        self._refused: set[str] = set()  # addresses that this machine did not have
        self._unreached: tuple[str, ...] = ()
        self._remarked = ""  # the last remark of the dispatcher that was written to the log
        path = environ.get("SPOTFLEET_SOCKET", "")
        self.control = AgentLine(path, WorkerReport(self.worker, self.job), self._key) if path else None

    def live(self) -> dict[str, Any]:
        """Return the fields of the report that change continuously."""
        return {}

    @property
    def proof(self) -> MemberProof:
        """Proof for checkpoints that this worker writes in its newest generation."""
        return MemberProof(self.job, self._key, self._grant)

    def has_formed(self, group: W) -> None:
        """Act on a group that has just formed. For engines."""

    def has_left(self) -> None:
        """Act on the group's end, or on a planned leave, before the next one forms. For engines."""

    def has_finished(self) -> bool:
        """Return whether the user's function has returned here."""
        return False

    # Start and end

    def init(self) -> None:
        """Enter the job: return once its first generation has formed, or at once if it has had one."""
        if self.initialized:
            return
        self.initialized = True
        if self.control is None:
            self.group = self._make_world(Assignment(0, 0, (self.worker,), ""), self.address)
            self.placed = True
            self.has_formed(self.group)
            return
        if self._gang:
            raise UsageError("hvd.init(): this job's processes were started as torchrun starts them",
                             hint="submit the script with `spotfleet train --launcher elastic`")
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
                self.place, self.placed = self.control.orders.provisional or RankInfo(), False
                return
            self._form_first()

    def _listen(self, address: str) -> str:
        """Open a bootstrap store on `address` and return its "address:port"; "" while this host lacks the address."""
        try:
            server, store = open_store(address, self._key)
        except OSError as error:
            if address not in self._refused:
                print(f"spotfleet: cannot listen on {address}: {error}; tried again", file=sys.stderr, flush=True)
            self._refused.add(address)
            return ""
        self._stores.append(server)  # earlier ones stay open: members of an older generation may still use them
        self.address = address
        return store

    def _form_first(self) -> None:
        assert self.group is not None and self.control is not None
        try:
            self.group.form()
        except CommBroken:
            self.drop_group()
            return
        self.has_formed(self.group)
        self.control.update(generation=self.generation)

    def shutdown(self) -> None:
        """Send the last report to the agent and retire the group; a repeated call does nothing."""
        if self.control is None or not self.initialized:
            return
        self.initialized = False
        self.control.update()  # numbers that change continuously are as old as the last report
        self.has_left()
        self.control.flush(FLUSH_LIMIT_S)
        with self.control.cv:
            groups, self.group, self.retiring = (self.group, self.retiring), None, None
        for reaper in [g.retire() for g in groups if g is not None]:
            reaper.join(FLUSH_LIMIT_S)
        self.control.close()

    def enter_generation(self, unless_founded: bool = False) -> bool:
        """Wait for a place in a newer generation and take it.

        Returns False without one: with `unless_founded`, when the job has had a generation. PlaceDiffers when the
        script has read other numbers.
        """
        assert self.control is not None
        with self.control.cv:
            self.control.cv.wait_for(lambda: self.is_offered() or (unless_founded and self._is_joiner()))
            orders = self.control.orders
            if orders.stop:
                self._leave()
            a = orders.assignment
            if a is None or a.generation <= self.generation or a.rank < 0:
                return False
            self.reads.check(a.place)
            self.generation, self.place, self.placed, self._grant = a.generation, a.place, True, a.grant
            # The lock is held, since orders may abort it.
            self.group = self._make_world(a, self.address)
            self.group.listens = self.control.report.store
            self.group.on_unreached = partial(self.on_unreached, a.generation)
            self.on_unreached(a.generation, ())
            return True

    def is_offered(self) -> bool:
        """Return whether the orders hold a place in a newer generation, or `stop`."""
        orders = self.control.orders
        a = orders.assignment
        return orders.stop or (a is not None and a.generation > self.generation and a.rank >= 0)

    def _is_joiner(self) -> bool:
        """Return whether the job has had a generation, and this worker's place in a later one is predicted."""
        orders = self.control.orders
        return orders.founded and orders.provisional is not None

    def bound(self) -> dict[str, int | None]:
        """Return the fields of the report that bind this worker to the place that its script has read."""
        return {"read_rank": self.reads.rank, "read_size": self.reads.size}

    def become_joiner(self) -> None:
        """Drop the lost first generation before `elastic.run`, which enters the next one."""
        self.drop_group()

    def _leave(self) -> None:
        """Obey `stop`: exit, or raise Dismissed if the user's function has returned already."""
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
        """Listen on the host's new address, for later generations.

        A current generation that uses an address which this machine has lost is aborted.
        """
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
        """Report the unreachable peers of the generation that forms; late results of an older one are ignored."""
        if self.control is not None and self._unreached != peers and generation == self.generation:
            self._unreached = peers
            self.control.update(unreached=peers)

    def on_stuck(self, why: str, blame_host: bool) -> None:
        """Send the last report of a process that is blocked for good, by a peer's loss or by its host's device."""
        if self.control is not None:
            self.control.update(error=why, blame_peer=True, blame_host=blame_host)
            self.control.flush(FLUSH_LIMIT_S)

    def _after_fork(self) -> None:
        """Release, in a forked child (a DataLoader worker), the sockets that would hide the parent's death.

        The child also must not report in the parent's name.
        """
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
        # Never freed: their destructors would wait for threads that exist only in the parent.
        self._inherited = (self.group, self.retiring, self._stores, self.control)
        self.group = self.retiring = self.control = None
        sys.excepthook = sys.__excepthook__

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, tb: Any) -> None:
        if self.control is not None and not issubclass(kind, KeyboardInterrupt):
            text = "".join(traceback.format_exception(kind, error, tb))
            self.control.update(error=text, blame_peer=bool(getattr(error, "blame_peer", False)),
                                blame_host=bool(getattr(error, "blame_host", False)) or is_lost(error))
            self.control.flush(FLUSH_LIMIT_S)
        sys.__excepthook__(kind, error, tb)

    def drop_group(self) -> None:
        self.has_left()
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
