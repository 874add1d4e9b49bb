"""A generation over gloo. gloo has no abort, so `abort` shuts down the group's connections.

Peers receive EOF and fail in turn, so one abort unblocks the whole generation within milliseconds. Listening sockets
are never shut (gloo would terminate the process), and no sockets of other code (own_sockets.py): a socket counts only
if it was opened while the group formed, still has the same inode, and leads to the port of a member's listener or was
accepted by the own one. Each rank publishes that port in the bootstrap store. CUDA tensors travel
through gloo's own copies of them in the host's memory.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spotfleet.addresses import split
from spotfleet.train.comm import group
from spotfleet.train.comm.group import Group
from spotfleet.train.comm.own_sockets import endpoint, listening_port, select
from spotfleet.worker.activity import peer_wait
from spotfleet.worker.sockets import CAN_ABORT, shut, sockets
from spotfleet.worker.store import served_ports

WAIT_SLICE = timedelta(seconds=0.1)
ABORTED_SLICE = timedelta(seconds=0.04)  # for an operation that gloo may have forgotten, once the group is aborted
NO_ABORT_LIMIT_S = 30.0
_listening = threading.Lock()  # so that one listener at a time is opened here


def listen(address: str) -> tuple[Any, int]:
    """Open gloo's listener on `address`; return torch's object and the port, 0 where it is not certain."""
    with _listening:
        before = set(sockets().values())
        device = dist.ProcessGroupGloo.create_device(hostname=address)
        opened = {fd: inode for fd, inode in sockets().items() if inode not in before}
        return device, listening_port(opened, address)


def connect(store: dist.Store, rank: int, size: int, device: Any) -> Any:
    """Make torch's process group over gloo; ranks listen on and dial from the address of their `device`."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=group.FORM_LIMIT_S)
    options._threads = 2
    options._devices = [device]
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    backend._set_default_timeout(timedelta(seconds=group.COLLECTIVE_LIMIT_S if CAN_ABORT else NO_ABORT_LIMIT_S))
    made = dist.ProcessGroup(store, rank, size)
    made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for kind in ("cpu", "cuda"):
        made._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
    return made


class Transfer:
    """Send or receive in progress.

    When gloo's own wait reaches its limit, it closes every connection of the group. So a thread waits as long as it
    takes, and callers wait for the thread. It also ends when the connections do.
    """

    def __init__(self, work: Any) -> None:
        self._error: RuntimeError | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, args=(work,), name="spotfleet-transfer", daemon=True).start()

    def _run(self, work: Any) -> None:
        try:
            work.wait(timedelta(seconds=group.COLLECTIVE_LIMIT_S))
        except RuntimeError as error:
            self._error = error
        self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for the end of the transfer. RuntimeError: it failed, or is still in progress."""
        if not self._ended.wait(limit.total_seconds() if limit is not None else None):
            raise RuntimeError("it is still under way")
        if self._error is not None:
            raise self._error


class GlooGroup(Group):
    """Group over gloo."""

    backend = "gloo"
    reduces = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16,
                         torch.int64, torch.int32, torch.int8, torch.uint8})

    _connections: frozenset[int] = frozenset()  # inodes of those to other members, without the store's

    def form(self) -> None:
        super().form()
        if self.size > 1:
            members = {place for place in self._places - {endpoint(*split(self._assignment.store))} if place[1]}
            own = endpoint(self._address, self._port or -1)
            self._connections = frozenset(select(self._own_sockets or {}, own, members).values())

    def _connect(self) -> Any:
        device, self._port = listen(self._address)
        return connect(self._meet(), self.rank, self.size, device)

    def _unblock(self) -> None:
        if (store := self._store) is not None:
            store.interrupt()
        shut(self._new_sockets(), self._address, self._peers, served_ports())

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        return Transfer(super().send(tensor, to, tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        return Transfer(super().receive(tensor, source, tag))

    def is_cut(self) -> bool:
        return not self._connections <= set(sockets().values())  # gloo closes what a peer has ended

    def is_done(self, work: Any) -> bool:
        return self.aborted or work.is_completed()

    def _complete(self, works: list[Any]) -> RuntimeError | None:
        problem: RuntimeError | None = None
        for work in works:
            try:
                self._wait(work)
            except RuntimeError as error:
                problem = problem or error
                self.abort()
        return problem

    @peer_wait
    def _wait(self, work: Any) -> None:
        """Wait as work.wait() does, but not for ever.

        Sometimes gloo forgets an operation whose peer died as it began. An operation that an abort has not ended within
        a slice counts as failed. Its thread sleeps on without a socket, so it touches no memory. A thread that merely
        was not scheduled may still write to it, hence `abandoned`.
        """
        forgotten, began = False, time.monotonic()
        while True:
            try:
                work.wait(ABORTED_SLICE if self.aborted else WAIT_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises its own error, unless it was only late
                    return
                if forgotten:
                    self.abandoned = True
                    raise
                forgotten = self.aborted
                if verdict := self.order.stalled(time.monotonic() - began):
                    self.abandoned = True
                    raise verdict from None
