"""One generation's communication: the contract of all backends and their common code. See gloo.py and nccl.py.

    backends.make_group(assignment) -> forming --all have joined--> open --retire()--> gone
                                 '------------------------'-- abort() --> aborted, for good

| state | what frees it | at most |
|---|---|---|
| forming | the last member joins; an abort | FORM_LIMIT_S, then it counts as failed here |
| a collective in progress | all ranks call it; an abort | COLLECTIVE_LIMIT_S, reached only if a living peer is silent |
| aborted | - | gloo: at once. NCCL: see nccl.py; a process not unblocked in time exits with STUCK_EXIT |

CommBroken: this generation is over, here and soon everywhere; its input tensors are undefined, and nothing writes to
them any more (but see `abandoned`). UsageError: these ranks, or this type of numbers, cannot work; no retry helps.
Any other RuntimeError is the user's own, such as a failed kernel of theirs.

Threads: the main thread forms, communicates and retires; autograd threads may `launch` while the main thread waits in
backward(). `abort` may be called by any thread, at any time and repeatedly, and never blocks. A caller that aborts a
forming group calls `abort` every few milliseconds until `forming` is False, since gloo may still be opening sockets.
`change_waits` and `save_waits` are set by the control thread and read by the main thread.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from spotfleet.addresses import plain, split
from spotfleet.errors import UsageError
from spotfleet.protocol.messages import Assignment
from spotfleet.train.comm import order
from spotfleet.train.comm.own_sockets import Endpoint, endpoint, select
from spotfleet.train.comm.torch_store import TorchStore
from spotfleet.worker import connectivity
from spotfleet.worker.errors import CommBroken
from spotfleet.worker.sockets import PeerSocket, links, sockets

BACKEND = "SPOTFLEET_BACKEND"  # auto, gloo or nccl
FORM_LIMIT_S = 30.0
COLLECTIVE_LIMIT_S = 1800.0
SUM = dist.ReduceOp.SUM
FORM_SLICE_S = 0.02


class Group(ABC):
    """Process group of one generation."""

    backend = ""
    reduces: frozenset[torch.dtype] = frozenset()  # types for `launch`; broadcast and allgather take every type
    device = torch.device("cpu")  # tensors on other devices are moved before they travel

    def __init__(self, assignment: Assignment, job: str, address: str, key: str = "",
                 on_broken: Callable[[int], None] = lambda generation: None,
                 on_stuck: Callable[[str, bool], None] = lambda why, host: None) -> None:
        """Make a group that is not formed yet. `key` authenticates the job's workers; a group of one needs none."""
        self.generation = assignment.generation
        self.rank, self.size = assignment.rank, assignment.world_size
        self.change_waits = False  # set by the control thread: leave at the next step boundary
        self.change_agreed = False  # every rank knows, from the same reduction
        self.save_waits = False  # a checkpoint is due: all ranks shall write their parts of it at the next boundary
        self.save_agreed = False  # every rank knows
        self.aborted = False
        self.broken = False  # a collective has failed here
        self.forming = False
        self.abandoned = False  # an operation was given up: its target memory must not be used again
        self.waited_s = 0.0  # total time in `finish`
        self.begun, self.begun_bytes = 0, 0  # number of collectives, and bytes that this rank has put into them
        self.next_address = ""  # address of the next rank
        self.layout: tuple[int, ...] = ()  # for each rank the first one on its host; over NCCL sums depend on it
        self.listens = ""  # "address:port" of this worker's own store
        self.announces = ""  # a word to all ranks, sent while the group forms
        self.announced: list[str] = []  # those of all ranks; empty for a group of one
        self.on_unreached: Callable[[tuple[str, ...]], None] = lambda peers: None  # called while it takes long to form
        self._assignment, self._job, self._address, self._key = assignment, job, address, key
        self._on_broken, self._on_stuck = on_broken, on_stuck
        self._earlier_sockets: set[int] = set()  # inodes, since a thread may duplicate a descriptor for a moment
        self._own_sockets: dict[int, int] | None = None
        self._port = 0  # where this rank accepts connections of the group; 0: any
        self._places: set[Endpoint] = {endpoint(*split(assignment.store))} if assignment.store else set()  # members'
        self._peers: set[str] = {split(assignment.store)[0]} if assignment.store else set()
        self._known_peers: list[tuple[str, str]] = [
            (m, assignment.store) for m in assignment.members[:1] if self.rank > 0]
        self.order = order.CallOrder(self)
        self.graph_calls: weakref.WeakSet[Any] = weakref.WeakSet()  # the user's differentiable collectives
        self._pg: Any = None
        self._store: TorchStore | None = None

    # Implemented by a backend

    @abstractmethod
    def _connect(self) -> Any:
        """Meet the others and return torch's process group; runs in a thread that an abort abandons."""

    @abstractmethod
    def _unblock(self) -> None:
        """Make every call in flight fail, as far as this process can. Any thread; never blocks."""

    @abstractmethod
    def _complete(self, works: list[Any]) -> RuntimeError | None:
        """Wait until all `works` are done or failed and none touches memory any more; return the error, if any.

        A failure of one fails all: it aborts.
        """

    @abstractmethod
    def is_done(self, work: Any) -> bool:
        """Return whether `finish` would return or raise at once. Never blocks."""

    def _dispose(self, doomed: list[Any]) -> None:
        """Free torch's objects, in a thread of its own."""
        doomed.clear()

    def _device_id(self) -> str:
        """Return the identifier of the device, which no two ranks may share; "" for none."""
        return ""

    # Beginning and end

    def form(self) -> None:
        """Meet the other members; CommBroken when one does not join, or the group is aborted meanwhile."""
        self._earlier_sockets, self.forming = set(sockets().values()), True
        try:
            if self.size > 1:
                self._connect_abortably()
        except (RuntimeError, OSError, ValueError, CommBroken) as error:
            raise self._broken(error) from error
        finally:
            self._own_sockets = self._new_sockets()
            self.forming = False
        if self.aborted:
            raise self._broken(RuntimeError("aborted while it formed"))

    def _connect_abortably(self) -> None:
        """Connect in another thread, which an abort abandons.

        When a member dies while the group forms, gloo waits for FORM_LIMIT_S and may have no socket open that an abort
        could shut.
        """
        ended: list[Any] = []

        def connect() -> None:
            try:
                ended.append(self._connect())
            except (RuntimeError, OSError, ValueError, UsageError, CommBroken) as error:
                ended.append(error)

        thread = threading.Thread(target=connect, name="spotfleet-form", daemon=True)
        thread.start()
        connectivity.watch(lambda: self._known_peers, lambda: self.forming and not self.aborted, self.on_unreached)
        while not ended:
            thread.join(FORM_SLICE_S)
            if self.aborted and not ended:
                raise ConnectionAbortedError("aborted while it formed")
        if isinstance(ended[0], BaseException):
            connectivity.probe(self._known_peers, self.on_unreached)
            raise ended[0]
        self._pg = ended[0]
        self.on_unreached(())

    def _meet(self) -> TorchStore:
        """Return the generation's store once every member has registered in it; UsageError if members do not fit."""
        store = self._store = self._dial(*split(self._assignment.store))
        order.prepare(store.set, self.rank)
        store.set(f"member/{self.rank}",
                  f"{self._address} {self.backend} {self._device_id()} {self.listens} {self._port} {self.announces}")
        members = [store.get(f"member/{r}").decode().split(" ") for r in range(self.size)]
        self.announced = [m[5] if len(m) > 5 else "" for m in members]  # an older worker announces nothing
        self._peers |= {address for address, *_ in members}
        self._places |= {endpoint(m[0], int(m[4])) for m in members}
        named = zip(self._assignment.members, members, strict=True)
        self._known_peers = [(name, m[3]) for name, m in named if m[3] and m[3] != self.listens]
        self.next_address = plain(members[(self.rank + 1) % self.size][0])
        self.layout = tuple([m[0] for m in members].index(address) for address, *_ in members)
        check_alike([m[1] for m in members], [m[2] for m in members])
        return store

    def _dial(self, host: str, port: int) -> TorchStore:
        """Connect to the generation's store; OSError when it is not served within FORM_LIMIT_S."""
        deadline = time.monotonic() + FORM_LIMIT_S
        while True:
            if self.aborted:
                raise ConnectionAbortedError("aborted while it formed")
            try:
                return TorchStore(host, port, f"{self._job}/{self.generation}", FORM_LIMIT_S, self._key)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def dial(self, under: str, limit_s: float) -> TorchStore:
        """Connect to the generation's store for a thread outside the collectives, with separate keys `under` a name.

        OSError and `limit_s` as in worker/store.py: StoreClient.
        """
        host, port = split(self._assignment.store)
        return TorchStore(host, port, f"{self._job}/{self.generation}/{under}", limit_s, self._key, connect_s=limit_s)

    def _new_sockets(self) -> dict[int, int]:
        """Return descriptor -> inode of the group's sockets; while it forms, of those so far."""
        if self._own_sockets is not None:
            return self._own_sockets
        opened = {fd: inode for fd, inode in sockets().items() if inode not in self._earlier_sockets}
        return select(opened, endpoint(self._address, self._port), self._places)

    def links(self) -> list[PeerSocket]:
        """Return the kernel's numbers for connections to peers on other addresses. Any thread."""
        return links(self._own_sockets or {}, self._peers - {self._address})

    def abort(self) -> None:
        """Unblock every call in flight, here and (gloo) on the peers. Any thread, any number of times; never blocks."""
        self.aborted = True
        if self._own_sockets is not None or self.forming:  # else it holds nothing yet, and `form` will check the flag
            self._unblock()

    def retire(self) -> threading.Thread:
        """Drop the group. Its destructor takes about 10 ms per peer, so another thread runs it; that is returned."""
        doomed, self._pg, self._store = [self._pg, self._store], None, None
        reaper = threading.Thread(target=self._dispose, args=(doomed,), name="spotfleet-reaper", daemon=True)
        reaper.start()
        return reaper

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        return tuple(member.partition("/")[0] for member in self._assignment.members)

    @property
    def meets_at(self) -> str:
        """"address:port" of the generation's store; "" for a group that needs none."""
        return self._assignment.store

    def descriptors(self) -> list[int]:
        """Return descriptors that a forked child must not keep: they would hide this process's death from its peers."""
        now = sockets()
        return [fd for fd, inode in (self._own_sockets or {}).items() if now.get(fd) == inode]

    def is_cut(self) -> bool:
        """Return whether a connection to a peer is known to have ended, while no collective is in progress."""
        return False

    def _broken(self, error: BaseException) -> CommBroken | UsageError:
        """End this generation here and on the peers, report it, and return the exception to raise."""
        self.broken = True
        self.abort()
        if self.order.verdict is not None:
            return self.order.verdict
        self._on_broken(self.generation)
        return CommBroken(f"generation {self.generation}, rank {self.rank} of {self.size}: {error}")

    def refuse(self, problem: str) -> CommBroken | UsageError:
        """End this generation because of a wrong result, and return the exception to raise."""
        return self._broken(RuntimeError(problem))

    # Collectives

    def launch(self, tensor: torch.Tensor, op: Any = SUM, what: str = "reduction") -> Any:
        """Begin to reduce `tensor` in place over all ranks; `finish` waits. Its type is complex or one of `reduces`.

        `what` names it where ranks differ.
        """
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.dtype not in self.reduces:
            raise UsageError(f"{self.backend} does not reduce {tensor.dtype}",
                             hint="convert it first, to torch.float32 for instance")
        self.order.begin(what, tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._start(lambda pg, t: pg.allreduce([t], options), tensor)

    def raise_if_aborted(self) -> None:
        """Raise CommBroken if the group was aborted. A rank that is alone hears of that in no other way."""
        if self.aborted:
            raise self._broken(RuntimeError("the group was aborted"))

    def _start(self, begin: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """Call begin(process group, *tensors), which may write to the tensors until the work is complete."""
        if self.aborted or self._pg is None:
            raise self._broken(RuntimeError("the group was aborted"))
        self.begun += 1
        self.begun_bytes += tensors[0].nbytes
        try:
            return begin(self._pg, *tensors)
        except RuntimeError as error:
            raise self._broken(error) from error

    def finish(self, works: list[Any]) -> None:
        """Wait on the host until all `works` are done; after a failure none touches memory any more."""
        began = time.monotonic()
        problem = self._complete(works)
        self.waited_s += time.monotonic() - began
        if problem is not None:
            raise self._broken(problem) from problem

    def drain(self, works: list[Any]) -> None:
        """Abort, and return when none of `works` touches memory any more."""
        self.abort()
        self._complete(works)

    def allreduce(self, tensor: torch.Tensor, op: Any = SUM) -> torch.Tensor:
        """Reduce in place, also a tensor on another device than `device`."""
        self.raise_if_aborted()
        if self.size > 1:
            self.finish([self.launch(tensor, op)])
        return tensor

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        if self.size > 1:
            self.finish([self.begin_broadcast(tensor, root)])
        return tensor

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        """Begin to receive into `tensor`, or to send it from rank `root`; `finish` waits."""
        self.order.begin(f"broadcast from rank {root}", tensor)
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._start(lambda pg, t: pg.broadcast([t], options), tensor)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        """Begin to send `tensor` to one rank, which calls `receive`; `finish` waits."""
        return self._start(lambda pg, t: pg.send([t], to, tag), tensor)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Begin to receive into `tensor`, which is contiguous."""
        return self._start(lambda pg, t: pg.recv([t], source, tag), tensor)

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return one tensor per rank; all must have the shape of `tensor`."""
        if self.size == 1:
            return [tensor.clone()]
        self.order.begin("allgather", tensor)
        work, parts = self.begin_allgather(tensor)
        self.finish([work])
        return parts

    def begin_allgather(self, tensor: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        """Begin an allgather that the caller has recorded in `order`; return its work and the results to be."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        return self._start(lambda pg, t, *into: pg.allgather([list(into)], [t]), tensor, *parts), parts


def check_alike(backends: list[str], device_ids: list[str]) -> None:
    """Check that all ranks have one backend and no two the same unit; UsageError otherwise."""
    if len(set(backends)) > 1:
        who = ", ".join(f"{b}: rank {backends.index(b)}" for b in sorted(set(backends)))
        raise UsageError(f"the ranks of one generation have different backends ({who} first)",
                         hint=f"set {BACKEND} to gloo for all workers, or give each a CUDA device")
    for rank, device_id in enumerate(device_ids):
        if device_id and (first := device_ids.index(device_id)) < rank:
            raise UsageError(f"ranks {first} and {rank} share the device {device_id}, which NCCL does not allow",
                             hint=f"set {BACKEND} to gloo for all workers, or give each a device of its own")
