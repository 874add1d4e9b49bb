"""A generation over NCCL. Nothing in it raises when a peer dies; an abort from here is all that ends a wait.

    form: meet -> the last generation's communicator ends -> a new one -> one warm-up reduction
    abort() -> aborted = True -> [spotfleet-abort: abort, then the device falls idle] -> over
                                    '-- too long, or the device is lost: the process leaves with STUCK_EXIT

What decides the shape of it:
- Kernels run behind the host: `wait()` makes a stream wait, not the host, and after an abort they end like any others,
  with garbage. So the host polls an event behind the last reduction and then asks for `aborted`, set before the
  communicator is touched. Only then is the optimizer's step launched: none is counted whose reduction may have failed.
- Who unblocks: the control thread, told by the dispatcher of the death; or an error that NCCL did notice.
- ncclCommAbort can hang (pytorch#119215, #149153). It has ABORT_LIMIT_S in a thread of its own, the device then
  IDLE_LIMIT_S; after that the process says a last word and leaves with STUCK_EXIT, and a warm spare or a new worker
  takes its slot. So it does when the device is lost. A failed assertion of a kernel is the user's own error.
- Several communicators in one process can deadlock each other's abort (nccl#1013). So there is one: tensors of the host
  (small control values) travel through the device, not through a second group, and a generation ends the last one's
  communicator before it makes its own, which is safe once all members have met: they have left the last one.
- NCCL reads its interface and address once. A process whose host has got another address since leaves, too.
- An abort during the first backward can crash (pytorch#149418): hence the warm-up.

Threads: as in group.py. `spotfleet-abort` alone ends a communicator; it and `spotfleet-form` touch the device, too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spotfleet.messages import STUCK_EXIT
from spotfleet.train import group
from spotfleet.train.group import Group
from spotfleet.train.sockets import interface_of

ABORT_LIMIT_S = 5.0  # for ncclCommAbort
IDLE_LIMIT_S = 10.0  # for what is queued on the device once nothing of it waits for a peer
CLOSE_LIMIT_S = 2.0  # for a communicator to end in agreement with its peers, at the end of a job; then it is aborted
LAST_WORD_S = 2.0
SPIN_S, NAP_S = 0.002, 0.00005  # how long a wait asks without a pause, and the pause then

# torch's own guards would end the process, or wait where we do not. Ours take their place, so these are not the user's.
OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RANKS_PER_ROOT": "1000000",  # more roots would need a store that can do more than ours
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(int(group.FORM_LIMIT_S)),
}


def visible_devices() -> int:
    """CUDA devices that this process could use with NCCL."""
    return torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0


def set_up(environ: MutableMapping[str, str], address: str) -> None:
    """What NCCL and torch read when the first communicator is made. A user's choice of interface or NVLS stays."""
    environ.update(OURS)
    environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if name := interface_of(address):
        environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def bounded(what: str, call: Callable[[], Any], limit_s: float) -> str:
    """Run `call` in a thread of its own: "" once it has returned, else why not; after `limit_s` the thread is left."""
    ended: list[str] = []

    def run() -> None:
        try:
            call()
            ended.append("")
        except (RuntimeError, OSError) as error:
            ended.append(f"{what} failed: {error}")

    thread = threading.Thread(target=run, name=f"spotfleet-{what}", daemon=True)
    thread.start()
    thread.join(limit_s)
    return ended[0] if ended else f"{what} took more than {limit_s:g} s"


@dataclass(frozen=True)
class Flight:
    """Work on tensors of the device, and which tensors elsewhere are to get the results."""

    work: Any
    copies: list[tuple[torch.Tensor, torch.Tensor]]  # (user's, device's)


class Hold:
    """The one communicator of this process."""

    def __init__(self) -> None:
        self.holder: NcclGroup | None = None
        self.address = ""  # where NCCL listens, from its first communicator to the process's end


HOLD = Hold()


class NcclGroup(Group):
    backend = "nccl"
    reduces = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16,
                         torch.int64, torch.int32, torch.int8, torch.uint8})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hold = HOLD
        self._comm: Any = None  # what an abort ends
        self._lock = threading.Lock()  # guards `_comm` and `_ending`
        self._ending = False
        self._over = threading.Event()  # nothing of the communicator is left, and the device is idle
        self.device = self._choose_device()

    # The device. tests/train/stuck_group.py stands in for these

    def _choose_device(self) -> torch.device:
        return torch.device("cuda", self._assignment.local_rank % max(1, torch.cuda.device_count()))

    def _unit(self) -> str:
        properties = torch.cuda.get_device_properties(self.device)
        return str(getattr(properties, "uuid", "")).replace(" ", "_")

    def _open(self, store: dist.Store) -> tuple[Any, Any]:
        """A process group over a new communicator, and what `abort`, `shutdown` and `get_error` are asked of."""
        set_up(os.environ, self._address)
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(days=365)  # torch's watchdog never ends the process: limits are ours
        comm = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        made = dist.ProcessGroup(store, self.rank, self.size)
        made._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        made._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, comm)
        return made, comm

    def _mark(self) -> Any:
        """`query()` of it is True once all that was launched so far on this thread's stream is done."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _idle(self) -> None:
        """Return when the device has nothing to do; RuntimeError when it is lost."""
        torch.cuda.synchronize(self.device)

    # Beginning and end

    def _connect(self) -> Any:
        if self._hold.address not in ("", self._address):
            self._leave(f"this host is at {self._address} now, but NCCL stays at {self._hold.address}")
        self._hold.address = self._address
        store = self._meet()
        before, self._hold.holder = self._hold.holder, self
        if before is not None:
            before.end()
        made, comm = self._open(store)
        with self._lock:
            self._comm = comm
        if self.aborted:
            self._unblock()
            raise ConnectionAbortedError("aborted while it formed")
        comm.eager_connect_single_device(self.device)  # else a `send` would make a communicator of its own
        self._warm_up(made)
        return made

    def _warm_up(self, made: Any) -> None:
        one = torch.ones(1, device=self.device)
        problem = self._complete([Flight(made.allreduce([one], dist.AllreduceOptions()), [])], group.FORM_LIMIT_S)
        if problem is not None:
            raise problem
        if one.item() != self.size:
            raise RuntimeError(f"{one.item():g} ranks took part in the warm-up of {self.size}")

    def _unblock(self) -> None:
        store = self._store
        if store is not None:
            store.interrupt()
        with self._lock:
            if self._comm is None or self._ending:
                return
            self._ending = True
        # torch holds a lock while a communicator comes to be; waiting costs less than the state of all survivors.
        abort_s = ABORT_LIMIT_S + (group.FORM_LIMIT_S if self.forming else 0.0)
        threading.Thread(target=self._end_communicator, args=(abort_s,), name="spotfleet-abort", daemon=True).start()

    def _end_communicator(self, abort_s: float) -> None:
        for what, call, limit_s in (("abort", self._comm.abort, abort_s), ("idle", self._idle, IDLE_LIMIT_S)):
            if why := bounded(what, call, limit_s):
                self._leave(why)
        self._comm = None
        self._over.set()

    def end(self) -> None:
        """End the communicator, if it has one, and return when nothing of it is left, or not at all."""
        if self._comm is not None or self._ending:
            self.abort()
            self._over.wait()  # bounded: else the process leaves

    def _leave(self, why: str) -> None:
        """This process can not be helped any more."""
        said = f"generation {self.generation}, rank {self.rank}: {why}; this process leaves, another takes its slot"
        print(f"spotfleet: {said}", file=sys.stderr, flush=True)
        bounded("last word", lambda: self._on_stuck(said), LAST_WORD_S)
        os._exit(STUCK_EXIT)

    def _dispose(self, doomed: list[Any]) -> None:
        """At the end of a job all ranks come here together, and what the last one still lacks must reach it first."""
        comm = self._comm
        if not self.aborted and comm is not None:
            problem = bounded("close", comm.shutdown, CLOSE_LIMIT_S)
            with self._lock:
                if not problem and not self._ending:
                    self._comm = None
        self.end()
        doomed.clear()
        if self._hold.holder is self:
            self._hold.holder = None

    # Collectives

    def _start(self, begin: Callable[..., Any], *tensors: torch.Tensor) -> Flight:
        moved = [t.to(self.device).contiguous() for t in tensors]  # the same tensor where it can travel as it is
        copies = [(t, m) for t, m in zip(tensors, moved, strict=True) if m is not t]
        return Flight(super()._start(begin, *moved), copies)

    def is_done(self, work: Flight) -> bool:
        return self.aborted or work.work.is_completed()

    def _complete(self, works: list[Flight], limit_s: float | None = None) -> RuntimeError | None:
        if not works:
            return None
        problem = self._wait(works, group.COLLECTIVE_LIMIT_S if limit_s is None else limit_s)
        if problem is not None:
            self.end()
            return problem
        for flight in works:
            for theirs, ours in flight.copies:
                theirs.copy_(ours)
        return None

    def _wait(self, works: list[Flight], limit_s: float) -> RuntimeError | None:
        """None when all `works` are done and nobody has aborted; after the latter they look done, too."""
        try:
            for flight in works:
                flight.work.wait()  # this thread's stream does, not the host
            mark, began = self._mark(), time.monotonic()
            while not mark.query():
                waited_s = time.monotonic() - began
                if self.aborted:
                    break
                if waited_s > limit_s:
                    return RuntimeError(f"a peer did not come to a collective for {limit_s:g} s")
                if problem := self._problem():
                    return problem
                time.sleep(0 if waited_s < SPIN_S else NAP_S)
        except RuntimeError as error:
            return self._judge(error)
        return RuntimeError("the group was aborted") if self.aborted else self._problem()

    def _problem(self) -> RuntimeError | None:
        """What NCCL has noticed by itself, which may be nothing at all."""
        comm = self._comm
        if comm is None:
            return None
        found = comm.get_error().name
        return None if found == "SUCCESS" else RuntimeError(f"NCCL says {found}")

    def _judge(self, error: RuntimeError) -> RuntimeError:
        """Whose fault an error of a wait is; raises the user's, and does not return where the device is lost."""
        if "CUDA error" not in str(error):
            return error
        if "assert" in str(error) and not self.aborted:
            raise error
        self._leave(f"the device is lost: {error}")
        return error
