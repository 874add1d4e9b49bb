"""One generation's communication: a free-standing gloo group over a prefixed store, with an abort.

    Group(assignment) -> form() -> collectives ... -> retire()
                            \\-> abort() from any thread, at any time: every call in flight raises CommBroken

gloo has no abort, so ours shuts down the connected sockets born with the group, the store client's too. Peers see
EOF and fail in turn, so one abort unblocks the whole generation within milliseconds. Listening sockets are never
shut (gloo would terminate the process), nor sockets of anybody else: a socket counts only if it was born while the
group formed, still has the same inode, and talks to a member's address or was accepted by a listener of the group
(on the advertised address).

Time limits: FORM_LIMIT_S to form, then the generation counts as failed here; COLLECTIVE_LIMIT_S for a collective,
which only a peer that is alive and silent can reach (a dead one shows as EOF; the dispatcher evicts a stuck one).

Threads: the main thread forms and communicates; autograd threads may launch collectives while the main thread waits
in backward(). `abort` may be called by any thread, also while `form` runs; whoever aborts a forming group calls
`abort` again every few milliseconds until `forming` is False, since gloo may still be opening sockets.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spotfleet.messages import Assignment
from spotfleet.train.errors import CommBroken
from spotfleet.train.store import Client, Server

FORM_LIMIT_S = 30.0
COLLECTIVE_LIMIT_S = 1800.0
FORM_SLICE_S = 0.02
WAIT_SLICE = timedelta(seconds=0.25)
FD_DIR = "/proc/self/fd"
CAN_ABORT = os.path.isdir(FD_DIR)  # elsewhere (macOS) a short collective limit has to do
NO_ABORT_LIMIT_S = 30.0
_store_ports: set[int] = set()  # connections accepted by our own store may belong to another generation: never shut


def sockets() -> dict[int, int]:
    """Descriptor -> inode of every socket of this process."""
    found: dict[int, int] = {}
    if not CAN_ABORT:
        return found
    for name in os.listdir(FD_DIR):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # closed since it was listed
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def _host(address: Any) -> str:
    return str(address[0]).removeprefix("::ffff:") if isinstance(address, tuple) else ""


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def open_store(address: str, key: str) -> tuple[Server, str]:
    """A bootstrap store that listens on `address` only, for those that know the job's `key`, and its "address:port"."""
    store = Server(address, key)
    _store_ports.add(store.port)
    return store, f"{address}:{store.port}"


class Group:
    def __init__(self, assignment: Assignment, job: str, address: str, key: str = "",
                 on_broken: Callable[[int], None] = lambda generation: None) -> None:
        """`key` is what the job's workers know each other by; without peers there is no use for one."""
        self.generation = assignment.generation
        self.rank, self.size = assignment.rank, assignment.world_size
        self.change_waits = False  # set by the control thread: leave at the next step boundary
        self.change_agreed = False  # every rank knows, from the same reduction
        self.save_waits = False  # a checkpoint is due: all ranks shall write their parts of it at the next boundary
        self.save_agreed = False  # every rank knows
        self.aborted = False
        self.forming = False
        self.forgot = False  # an operation was given up: what it was to write must not be used again
        self._assignment, self._job, self._address, self._key = assignment, job, address, key
        self._on_broken = on_broken
        self._before: dict[int, int] = {}
        self._mine: dict[int, int] | None = None
        self._peers: set[str] = {_split(assignment.store)[0]} if assignment.store else set()
        self._pg: Any = None
        self._store: Any = None

    def form(self) -> None:
        """Meet the other members; CommBroken when one does not come, or the group is aborted meanwhile."""
        self._before, self.forming = sockets(), True
        try:
            if self.size > 1:
                self._connect_abortably()
        except (RuntimeError, OSError, ValueError) as error:
            raise self._broken(error) from error
        finally:
            self._mine = {fd: inode for fd, inode in sockets().items() if self._before.get(fd) != inode}
            self.forming = False
        if self.aborted:
            raise self._broken(RuntimeError("aborted while it formed"))

    def _connect_abortably(self) -> None:
        """While a member dies just then, gloo waits for FORM_LIMIT_S where no socket is open that an abort could shut.
        So another thread connects, and an abort leaves it to its own end."""
        ended: list[Any] = []

        def connect() -> None:
            try:
                ended.append(self._connect())
            except (RuntimeError, OSError, ValueError) as error:
                ended.append(error)

        thread = threading.Thread(target=connect, name="spotfleet-form", daemon=True)
        thread.start()
        while not ended:
            thread.join(FORM_SLICE_S)
            if self.aborted and not ended:
                raise ConnectionAbortedError("aborted while it formed")
        if isinstance(ended[0], Exception):
            raise ended[0]
        self._pg = ended[0]

    def _connect(self) -> Any:
        host, port = _split(self._assignment.store)
        store = self._store = self._dial(host, port)
        store.set(f"address/{self.rank}", self._address)
        self._peers |= {store.get(f"address/{r}").decode() for r in range(self.size)}
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=FORM_LIMIT_S)
        options._threads = 2
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        backend = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        limit_s = COLLECTIVE_LIMIT_S if CAN_ABORT else NO_ABORT_LIMIT_S
        backend._set_default_timeout(timedelta(seconds=limit_s))
        group = dist.ProcessGroup(store, self.rank, self.size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        for kind in ("cpu", "cuda"):
            group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
        return group

    def _dial(self, host: str, port: int) -> Client:
        """A client of the generation's store; OSError when nobody serves it within FORM_LIMIT_S."""
        deadline = time.monotonic() + FORM_LIMIT_S
        while True:
            if self.aborted:
                raise ConnectionAbortedError("aborted while it formed")
            try:
                return Client(host, port, f"{self._job}/{self.generation}", FORM_LIMIT_S, self._key)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def abort(self) -> None:
        """Unblock every call in flight, here and on the peers. Any thread, any number of times; never blocks."""
        self.aborted = True
        mine = self._mine
        if mine is None and not self.forming:
            return  # it has no socket yet, and `form` will see the flag
        if mine is None:
            mine = {fd: inode for fd, inode in sockets().items() if self._before.get(fd) != inode}
        found = []
        for fd, inode in mine.items():
            try:
                if os.fstat(fd).st_ino != inode:
                    continue
                found.append(socket.socket(fileno=os.dup(fd)))
            except OSError:
                continue  # closed meanwhile
        listeners = {s.getsockname()[:2] for s in found if s.family != socket.AF_UNIX and _listens(s)
                     and _host(s.getsockname()) == self._address}
        for sock in found:
            with closing(sock):
                self._shut(sock, listeners)

    def _shut(self, sock: socket.socket, listeners: set[Any]) -> None:
        try:
            if sock.family == socket.AF_UNIX or _listens(sock):
                return
            local, peer = sock.getsockname(), sock.getpeername()
            if local[1] in _store_ports:
                return
            if (_host(local), local[1]) in listeners or _host(peer) in self._peers:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was not connected any more

    def retire(self) -> threading.Thread:
        """Forget the group; its destructor takes about 10 ms per peer, so another thread runs it."""
        doomed, self._pg, self._store = [self._pg, self._store], None, None
        reaper = threading.Thread(target=doomed.clear, name="spotfleet-reaper", daemon=True)
        reaper.start()
        return reaper

    def descriptors(self) -> list[int]:
        """Descriptors that a forked child must not keep: they would hide this process's death from its peers."""
        now = sockets()
        return [fd for fd, inode in (self._mine or {}).items() if now.get(fd) == inode]

    def _broken(self, error: Exception) -> CommBroken:
        """Tell everybody that this generation is over, and make the exception that says so."""
        self.abort()
        self._on_broken(self.generation)
        return CommBroken(f"generation {self.generation}, rank {self.rank} of {self.size}: {error}")

    def refuse(self, problem: str) -> CommBroken:
        """Break the group because it does not do what it should."""
        return self._broken(RuntimeError(problem))

    def launch(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Begin to reduce `tensor` in place over all ranks; `finish` waits."""
        if self.aborted or self._pg is None:
            raise self._broken(RuntimeError("the group was aborted"))
        options = dist.AllreduceOptions()
        options.reduceOp = op
        try:
            return self._pg.allreduce([tensor], options)
        except RuntimeError as error:
            raise self._broken(error) from error

    def finish(self, works: list[Any]) -> None:
        """Wait for all `works`; after a failure none of them touches memory any more."""
        problem: RuntimeError | None = None
        for work in works:
            try:
                self._wait(work)
            except RuntimeError as error:
                problem = problem or error
                self.abort()
        if problem is not None:
            raise self._broken(problem) from problem

    def drain(self, works: list[Any]) -> None:
        """Abort, and return when none of `works` touches memory any more."""
        self.abort()
        for work in works:
            try:
                self._wait(work)
            except RuntimeError:
                continue  # aborted just now

    def _wait(self, work: Any) -> None:
        """As work.wait(). gloo now and then forgets an operation whose peer died as it began: one that an abort has not
        ended within a slice counts as failed. Its thread sleeps on without a socket, so it touches nothing; one that
        merely was not given a processor may, hence `forgot`."""
        forgotten = False
        while True:
            try:
                work.wait(WAIT_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises its own error, if it was not just late
                    return
                if forgotten:
                    self.forgot = True
                    raise
                forgotten = self.aborted

    def allreduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        if self.size > 1:
            self.finish([self.launch(tensor, op)])
        return tensor

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._call(lambda pg: pg.broadcast([tensor], options))
        return tensor

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """One tensor per rank; all must have the shape of `tensor`."""
        if self.size == 1:
            return [tensor.clone()]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._call(lambda pg: pg.allgather([parts], [tensor]))
        return parts

    def _call(self, start: Callable[[Any], Any]) -> None:
        if self.aborted or self._pg is None:
            raise self._broken(RuntimeError("the group was aborted"))
        try:
            self._wait(start(self._pg))
        except RuntimeError as error:
            raise self._broken(error) from error


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
