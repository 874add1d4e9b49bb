"""Sender of orders to agents: sends when orders change or an answer is due."""

from __future__ import annotations

import time
from collections.abc import Callable

from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.hosts import RESEND_S
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.dispatcher.recovery.takeover import Takeover
from spotfleet.protocol.messages import AgentOrders, SlotOrder


class OrderSender:
    """Orders of all agents, and their transmission."""

    def __init__(self, core: Core, takeover: Takeover, stuck: Callable[[], frozenset[str]]) -> None:
        """`stuck` returns the hosts that are to copy what they hold to the checkpoint target."""
        self._core, self._takeover, self._stuck = core, takeover, stuck
        self._ordered: dict[str, dict[str, list[SlotOrder]]] = {}  # by job and host

    def send(self) -> None:
        """Wake each connection whose answer is due or whose orders have changed."""
        now, jobs = time.monotonic(), [self._orders_of(j) for j in self._core.jobs.values()]
        stuck, silent = self._stuck(), self._without_orders()
        for connection in self._core.connections.values():
            host = connection.host
            if host in silent:
                continue
            orders = AgentOrders(host, tuple(o for by_host in jobs for o in by_host.get(host, ())),
                                 tell=self._takeover.asked(host), send=self._takeover.missing_bundles(host),
                                 clock=self._core.fleet_clock.asks, to_target=host in stuck)
            if connection.connected and (connection.due or orders != connection.orders):
                connection.orders, connection.due, connection.resend_at = orders, False, now + RESEND_S
                connection.wake()

    def _orders_of(self, job: ManagedJob) -> dict[str, list[SlotOrder]]:
        """Return the job's orders by host. While its record cannot be written, return the previous orders: no worker
        receives a generation that a restart would not know."""
        job.unsaved = job.unsaved and not jobfile.try_save(job.folder, job.record)
        if not job.unsaved:
            self._ordered[job.id] = job.orders()
        return self._ordered.get(job.id, {})

    def _without_orders(self) -> set[str]:
        """Return the hosts with workers of a job of which this process has no orders yet that a restart would know:
        without an answer they go on as they are, while empty orders would end these workers."""
        return {host for job in self._core.jobs.values() if job.unsaved and job.id not in self._ordered
                for host in job.workers.hosts()}
