"""Supervisor of one host's workers.

It starts the workers that the dispatcher lists, ends all others, and reports each end until it is no longer listed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from spotfleet.addresses import host_of, is_number
from spotfleet.agent.files.checkpoint_downloads import CheckpointDownloads
from spotfleet.agent.policy.orphan import LiveWorker
from spotfleet.agent.workers.worker import KILL_S, AgentWorker, HostContext
from spotfleet.protocol.messages import (
    AgentOrders,
    DamagedCheckpoint,
    HeldJob,
    Unsent,
    WorkerOrders,
    WorkerReport,
    WorkerState,
)

_HALT_S = 5.0  # limit for the processes to end, SIGKILL included
_REMEMBERED = 1000  # number of ended workers kept, so that no name is started twice


class Workers:
    """All workers of this host, desired and actual."""

    def __init__(self, host: HostContext) -> None:
        self._host = host
        self._actual: dict[str, AgentWorker] = {}
        self._listed: set[str] = set()
        self._past: dict[str, WorkerState] = {}
        self._delivered: dict[str, WorkerOrders] = {}
        self._restores = CheckpointDownloads(host.transfers, host.bundles.folder, self._push_all, self._blame_host)
        self._push: Callable[[str], None] = lambda worker: None
        self._closing = self._halted = False
        self._saving = False
        self.to_target = False  # the host ends soon: what is unsent is to be copied to the checkpoint target
        self._requested: tuple[str, ...] = ()  # jobs whose state the dispatcher requests

    def on_orders(self, push: Callable[[str], None]) -> None:
        """`push(worker)` is called when that worker's orders may have changed."""
        self._push = push

    def order(self, orders: AgentOrders) -> None:
        """Apply the dispatcher's newest orders."""
        if self._closing:
            return
        self.to_target = orders.to_target
        self._listed = {o.worker for o in orders.workers}
        self._listed |= {n for n, w in self._actual.items() if w.order.job in orders.tell}
        self._answer(orders.tell)
        self._host.bundles.send(orders.send)
        for order in orders.workers:
            worker = self._actual.get(order.worker)
            if worker is not None:
                worker.order = order
                self._push(order.worker)
            elif order.worker not in self._past:
                self._start(order.worker,
                            AgentWorker(self._host, order, lambda o=order: self._slot_free(o.worker, o.slot)))
        for name, worker in list(self._actual.items()):
            if name not in self._listed:
                worker.end()
                self._forget_if_over(name)

    @property
    def asked(self) -> bool:
        """Whether the dispatcher still requests the state of this host's jobs."""
        return bool(self._requested)

    def held(self) -> tuple[HeldJob, ...]:
        """Return the state of each job that the dispatcher requests."""
        return tuple(self._held(job) for job in self._requested)

    def _held(self, job: str) -> HeldJob:
        given = [w.order.orders.assignment for w in self._actual.values() if w.order.job == job]
        return self._host.bundles.held(job, tuple(dict.fromkeys(a for a in given if a is not None)))

    def _answer(self, jobs: tuple[str, ...]) -> None:
        learnt = [w for w in self._actual.values() if w.order.job in self._requested and w.order.job not in jobs]
        fresh, self._requested = jobs != self._requested, jobs
        for worker in learnt:  # the dispatcher knows the job now, and may have lost its files
            self._host.checkpoints.again(worker.order.job)
        for worker in learnt:
            worker.offer_checkpoint()
        if fresh:
            self._host.changed()

    def states(self) -> tuple[WorkerState, ...]:
        if self._halted:
            return ()  # lost with this host, whatever exit status their scripts leave
        relisted = (s for name, s in self._past.items() if name in self._listed)
        return (*map(self._state, self._actual.values()), *relisted)

    def _state(self, worker: AgentWorker) -> WorkerState:
        state, fetched = worker.state, self._restores.fetched(worker.order.job)
        if is_number(at := host_of(state.report.store)) and at != self._host.address():  # that store is unreachable now
            state = replace(state, report=replace(state.report, store=""))
        return replace(state, report=replace(state.report, fetched=fetched)) if fetched else state

    def why(self) -> str:
        """Explain in one line what the workers wait for; "" when all run."""
        waits = []
        for worker in self._actual.values():
            why = worker.why or (self._restores.why(worker.order.job) if worker.process else "")
            waits += [f"{worker.order.job}: {w}" for w in (why, worker.outputs.why) if w]
        return "; ".join(dict.fromkeys(waits))

    def unsent(self) -> tuple[Unsent, ...]:
        """Return what ended workers have left and the dispatcher does not have."""
        return tuple(left for worker in self._actual.values() for left in worker.unsent())

    def holding(self) -> list[AgentWorker]:
        """Return the workers that have left something that is neither at the dispatcher nor in the target."""
        return [w for w in self._actual.values() if w.unsent() and not w.stored]

    def damaged(self) -> tuple[DamagedCheckpoint, ...]:
        """Return the checkpoints that should be restored here and cannot be fetched whole."""
        return self._restores.damaged()

    async def session_of(self, worker: str) -> int:
        """Return the session id, which is the pid, of this worker's process; 0 without a process."""
        found = self._actual.get(worker)
        return await found.session() if found else 0

    def receive(self, report: WorkerReport) -> None:
        if worker := self._actual.get(report.worker):
            worker.receive(report)

    def attached(self, name: str, *, yes: bool) -> None:
        if worker := self._actual.get(name):
            worker.attached(yes=yes)

    def orders_for(self, name: str) -> WorkerOrders:
        """Return the orders for this worker now."""
        worker = self._actual.get(name)
        if worker is None:
            return self._delivered.get(name, WorkerOrders())
        delivered = self._delivered.get(name, WorkerOrders())
        self._delivered[name] = self._restores.resolve(worker.order.job, worker.order.orders, delivered,
                                                       name.partition("/")[0], worker.report.lacks)
        now = replace(self._delivered[name], address=self._host.address())
        return replace(now, checkpoint_now=True) if self._saving else now

    def live_workers(self) -> list[LiveWorker]:
        """List the workers whose processes live, with the assignment that each has received."""
        return [LiveWorker(w.report, self._delivered.get(name, WorkerOrders()).assignment)
                for name, w in self._actual.items() if w.process]

    def moved(self) -> None:
        """Send the host's new address to all workers."""
        self._push_all()

    def save_now(self, wanted: bool) -> None:
        """Set whether workers are asked for a checkpoint regardless of the dispatcher's orders."""
        if wanted is not self._saving:
            self._saving = wanted
            self._push_all()

    async def halt(self) -> None:
        """End all processes and start no more; their files stay on disk."""
        self._closing = self._halted = True
        for worker in self._actual.values():
            worker.end(kill_s=KILL_S)
        gone = [asyncio.ensure_future(w.left_slot.wait()) for w in self._actual.values()]
        if gone:
            await asyncio.wait(gone, timeout=_HALT_S)

    async def close(self, bound_s: float) -> None:
        """End all workers and deliver their logs and output, within `bound_s`."""
        self._closing = True
        for worker in self._actual.values():
            worker.end(kill_s=bound_s / 2)
        if self._actual:
            await asyncio.wait([asyncio.ensure_future(w.ended()) for w in self._actual.values()], timeout=bound_s)
        for worker in self._actual.values():
            worker.discard()

    def _start(self, name: str, worker: AgentWorker) -> None:
        self._actual[name] = worker
        task = asyncio.ensure_future(worker.ended())
        task.add_done_callback(lambda _: self._forget_if_over(name))

    def _forget_if_over(self, name: str) -> None:
        worker = self._actual.get(name)
        if worker is None or name in self._listed or not worker.over:
            return
        del self._actual[name]
        self._delivered.pop(name, None)
        self._past[name] = worker.state
        while len(self._past) > _REMEMBERED:
            del self._past[next(iter(self._past))]
        worker.discard()
        if not any(w.order.job == worker.order.job for w in self._actual.values()):
            self._host.bundles.forget(worker.order.job)
            if self._host.containers is not None:
                self._host.containers.leave(worker.order.job)
            self._restores.forget(worker.order.job)
        self._host.changed()

    def _blame_host(self, job: str, why: str) -> None:
        """Blame this host's disk in its workers of `job`: another host may have room, or a disk that keeps data."""
        for worker in self._actual.values():
            if worker.order.job == job:
                worker.blame_host(why)

    def _push_all(self) -> None:
        for name in self._actual:
            self._push(name)
        self._host.changed()

    async def _slot_free(self, name: str, slot: int) -> None:
        """Wait until no other worker's process is in this slot: they would share its GPU."""
        while others := [w for n, w in self._actual.items()
                         if n != name and w.order.slot == slot and w.process and not w.left_slot.is_set()]:
            await others[0].left_slot.wait()
