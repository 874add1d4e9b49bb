"""One generation's communication: what every backend promises, and what all of them share. See gloo.py and nccl.py.

    make_group(assignment) -> forming --all have come--> open --retire()--> gone
                                 '------------------------'-- abort() --> aborted, for good

| state | what frees it | at most |
|---|---|---|
| forming | the last member comes; an abort | FORM_LIMIT_S, then it counts as failed here |
| a collective under way | all ranks call it; an abort | COLLECTIVE_LIMIT_S; only a living, silent peer lets it pass |
| aborted | - | gloo: at once. NCCL: see nccl.py; a process that cannot get free in time leaves with STUCK_EXIT |

CommBroken: this generation is over, here and soon everywhere; tensors that went in are undefined, and nothing writes
to them any more (but see `forgot`). UsageError: these ranks, or this type of numbers, will never do; no retry helps.
Any other RuntimeError is the user's own, such as a kernel of theirs that failed.

Threads: the main thread forms, communicates and retires; autograd threads may `launch` while the main thread waits in
backward(). `abort` may be called by any thread, at any time, again and again, and never blocks. Whoever aborts a
forming group calls `abort` every few milliseconds until `forming` is False, since gloo may still be opening sockets.
`change_waits` and `save_waits` are set by the control thread and read by the main thread.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from spotfleet.addresses import joined, plain, split
from spotfleet.errors import UsageError
from spotfleet.messages import Assignment
from spotfleet.train import reach
from spotfleet.train.errors import CommBroken
from spotfleet.train.sockets import Link, links, sockets
from spotfleet.train.store import Client, Server

BACKEND = "SPOTFLEET_BACKEND"  # auto, gloo or nccl
FORM_LIMIT_S = 30.0
COLLECTIVE_LIMIT_S = 1800.0
FORM_SLICE_S = 0.02
store_ports: set[int] = set()  # connections accepted by our own store may belong to another generation: never shut


def open_store(address: str, key: str) -> tuple[Server, str]:
    """A bootstrap store that listens on `address` only, for those that know the job's `key`, and its "address:port"."""
    store = Server(address, key)
    store_ports.add(store.port)
    return store, joined(address, store.port)


def make_group(assignment: Assignment, job: str, address: str, key: str = "",
               on_broken: Callable[[int], None] = lambda generation: None,
               on_stuck: Callable[[str], None] = lambda why: None,
               environ: Mapping[str, str] = os.environ) -> Group:
    """The group that `environ` asks for or this machine suggests; UsageError where there can be none."""
    from spotfleet.train.gloo import GlooGroup
    from spotfleet.train.nccl import NcclGroup, visible_devices

    asked = environ.get(BACKEND, "auto")
    devices = 0 if asked == "gloo" else visible_devices()
    kind = {"gloo": GlooGroup, "nccl": NcclGroup}[choose_backend(asked, assignment.local_size, devices)]
    return kind(assignment, job, address, key, on_broken, on_stuck)


def choose_backend(asked: str, local_size: int, devices: int) -> str:
    """ "gloo" or "nccl", for `local_size` workers on this host, each of which sees `devices` that NCCL could use.

    One device that several workers see may be one for all or one for each: then NCCL has to be asked for.
    """
    match asked:
        case "gloo":
            return "gloo"
        case "auto":
            return "nccl" if devices >= max(1, local_size) else "gloo"
        case "nccl" if devices > 0:
            return "nccl"
        case "nccl":
            raise UsageError(f"{BACKEND} is 'nccl', but this worker has no CUDA device or a torch without NCCL",
                             hint=f"leave {BACKEND} out, or set it to auto or gloo")
    raise UsageError(f"{BACKEND} is {asked!r}", hint="set it to auto, gloo or nccl, or leave it out")


class Group(ABC):
    backend = ""
    reduces: frozenset[torch.dtype] = frozenset()  # what `launch` takes; broadcast and allgather take every type
    device = torch.device("cpu")  # where tensors need not be moved to travel

    def __init__(self, assignment: Assignment, job: str, address: str, key: str = "",
                 on_broken: Callable[[int], None] = lambda generation: None,
                 on_stuck: Callable[[str], None] = lambda why: None) -> None:
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
        self.waited_s = 0.0  # in `finish`, in all
        self.begun, self.begun_bytes = 0, 0  # collectives, and what this rank has put into them
        self.next_address = ""  # of the rank after this one
        self.listens = ""  # "address:port" of this worker's own store
        self.on_unreached: Callable[[tuple[str, ...]], None] = lambda peers: None  # told while it takes long to form
        self._assignment, self._job, self._address, self._key = assignment, job, address, key
        self._on_broken, self._on_stuck = on_broken, on_stuck
        self._before: dict[int, int] = {}
        self._mine: dict[int, int] | None = None
        self._peers: set[str] = {split(assignment.store)[0]} if assignment.store else set()
        self._known: list[tuple[str, str]] = [(m, assignment.store) for m in assignment.members[:1] if self.rank > 0]
        self._pg: Any = None
        self._store: Client | None = None

    # What a backend adds

    @abstractmethod
    def _connect(self) -> Any:
        """Meet the others and return torch's process group; runs in a thread that an abort leaves to its own end."""

    @abstractmethod
    def _unblock(self) -> None:
        """Let every call in flight fail, as far as this process can. Any thread; never blocks."""

    @abstractmethod
    def _complete(self, works: list[Any]) -> RuntimeError | None:
        """Wait until all `works` are done or failed and none touches memory any more; what failed, if anything did.

        A failure of one is a failure of all: it aborts.
        """

    @abstractmethod
    def is_done(self, work: Any) -> bool:
        """Would `finish` return or raise at once? Never blocks."""

    def _dispose(self, doomed: list[Any]) -> None:
        """Free torch's objects; a thread of its own."""
        doomed.clear()

    def _unit(self) -> str:
        """What no two ranks may share; "" for nothing."""
        return ""

    # Beginning and end

    def form(self) -> None:
        """Meet the other members; CommBroken when one does not come, or the group is aborted meanwhile."""
        self._before, self.forming = sockets(), True
        try:
            if self.size > 1:
                self._connect_abortably()
        except (RuntimeError, OSError, ValueError) as error:
            raise self._broken(error) from error
        finally:
            self._mine = self._born()
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
            except (RuntimeError, OSError, ValueError, UsageError) as error:
                ended.append(error)

        thread = threading.Thread(target=connect, name="spotfleet-form", daemon=True)
        thread.start()
        reach.watch(lambda: self._known, lambda: self.forming and not self.aborted, self.on_unreached)
        while not ended:
            thread.join(FORM_SLICE_S)
            if self.aborted and not ended:
                raise ConnectionAbortedError("aborted while it formed")
        if isinstance(ended[0], Exception):
            reach.look(self._known, self.on_unreached)
            raise ended[0]
        self._pg = ended[0]
        self.on_unreached(())

    def _meet(self) -> Client:
        """The generation's store, once every member has said there who it is; UsageError if they do not go together."""
        store = self._store = self._dial(*split(self._assignment.store))
        store.set(f"member/{self.rank}", f"{self._address} {self.backend} {self._unit()} {self.listens}")
        members = [store.get(f"member/{r}").decode().split(" ") for r in range(self.size)]
        self._peers |= {address for address, *_ in members}
        named = zip(self._assignment.members, members, strict=True)
        self._known = [(name, m[3]) for name, m in named if m[3] and m[3] != self.listens]
        self.next_address = plain(members[(self.rank + 1) % self.size][0])
        check_alike([m[1] for m in members], [m[2] for m in members])
        return store

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

    def dial(self, under: str, limit_s: float) -> Client:
        """A client of the generation's store, for a thread that takes no part in collectives; keys of its own `under`
        a name. OSError as Client's, who also says what `limit_s` is."""
        host, port = split(self._assignment.store)
        return Client(host, port, f"{self._job}/{self.generation}/{under}", limit_s, self._key, connect_s=limit_s)

    def _born(self) -> dict[int, int]:
        """Descriptor -> inode of the sockets that came to be while the group formed; more may come while it forms."""
        if self._mine is not None:
            return self._mine
        return {fd: inode for fd, inode in sockets().items() if self._before.get(fd) != inode}

    def links(self) -> list[Link]:
        """What the kernel knows of the connections to peers on other addresses. Any thread."""
        return links(self._mine or {}, self._peers - {self._address})

    def abort(self) -> None:
        """Unblock every call in flight, here and (gloo) on the peers. Any thread, any number of times; never blocks."""
        self.aborted = True
        if self._mine is not None or self.forming:  # else it holds nothing yet, and `form` will see the flag
            self._unblock()

    def retire(self) -> threading.Thread:
        """Forget the group; its destructor takes about 10 ms per peer, so another thread runs it."""
        doomed, self._pg, self._store = [self._pg, self._store], None, None
        reaper = threading.Thread(target=self._dispose, args=(doomed,), name="spotfleet-reaper", daemon=True)
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

    # Collectives

    def launch(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Begin to reduce `tensor` in place over all ranks; `finish` waits. Its type is complex or one of `reduces`."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.dtype not in self.reduces:
            raise UsageError(f"{self.backend} does not reduce {tensor.dtype}",
                             hint="convert it first, to torch.float32 for instance")
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._start(lambda pg, t: pg.allreduce([t], options), tensor)

    def _start(self, begin: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """begin(process group, *tensors); the tensors are written to until the work is complete."""
        if self.aborted or self._pg is None:
            raise self._broken(RuntimeError("the group was aborted"))
        self.begun += 1
        self.begun_bytes += tensors[0].nbytes
        try:
            return begin(self._pg, *tensors)
        except RuntimeError as error:
            raise self._broken(error) from error

    def finish(self, works: list[Any]) -> None:
        """Wait until all `works` are done, as the host sees it; after a failure none touches memory any more."""
        began = time.monotonic()
        problem = self._complete(works)
        self.waited_s += time.monotonic() - began
        if problem is not None:
            raise self._broken(problem) from problem

    def drain(self, works: list[Any]) -> None:
        """Abort, and return when none of `works` touches memory any more."""
        self.abort()
        self._complete(works)

    def allreduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduces in place, also a tensor that is not on `device`."""
        if self.size > 1:
            self.finish([self.launch(tensor, op)])
        return tensor

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self.finish([self._start(lambda pg, t: pg.broadcast([t], options), tensor)])
        return tensor

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        """Begin to send `tensor` to one rank, which calls `receive`; `finish` waits."""
        return self._start(lambda pg, t: pg.send([t], to, tag), tensor)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Begin to receive into `tensor`, which is contiguous."""
        return self._start(lambda pg, t: pg.recv([t], source, tag), tensor)

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """One tensor per rank; all must have the shape of `tensor`."""
        if self.size == 1:
            return [tensor.clone()]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.finish([self._start(lambda pg, t, *into: pg.allgather([list(into)], [t]), tensor, *parts)])
        return parts


def check_alike(backends: list[str], units: list[str]) -> None:
    """UsageError unless all ranks have one backend and no two the same unit."""
    if len(set(backends)) > 1:
        who = ", ".join(f"{b}: rank {backends.index(b)}" for b in sorted(set(backends)))
        raise UsageError(f"the ranks of one generation have different backends ({who} first)",
                         hint=f"set {BACKEND} to gloo for all workers, or give each a CUDA device")
    for rank, unit in enumerate(units):
        if unit and (first := units.index(unit)) < rank:
            raise UsageError(f"ranks {first} and {rank} share the device {unit}, which NCCL does not allow",
                             hint=f"set {BACKEND} to gloo for all workers, or give each a device of its own")
