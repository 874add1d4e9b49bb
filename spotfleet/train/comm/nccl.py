"""A generation over NCCL. NCCL may not raise when a peer dies, so an abort from here must end a wait.

    form: meet -> the last generation's communicator ends -> a new one -> one warm-up reduction
    abort() -> aborted = True -> [spotfleet-abort: abort, then the device falls idle] -> over
                                    '-- too long, or the device is lost: the process exits with STUCK_EXIT

Constraints on the design:
- Kernels run behind the host: `wait()` makes a stream wait, not the host, and after an abort they end like any others,
  with garbage. So the host polls an event behind the last reduction and then checks `aborted`, which is set before the
  communicator is touched. Only then is the optimizer's step launched, so no step is counted whose reduction may have
  failed.
- Two things unblock a wait: the control thread, when the dispatcher reports the death; an error that NCCL did detect.
- ncclCommAbort can hang (pytorch#119215, #149153). It has ABORT_LIMIT_S in a thread of its own, the device then
  IDLE_LIMIT_S. After that the process sends a last report and exits with STUCK_EXIT, and a warm spare or a new worker
  takes its slot. It does the same when the device is lost. A failed assertion of a kernel is the user's own error.
- Several communicators in one process can deadlock each other's abort (nccl#1013). So there is one: tensors of the host
  (small control values) travel through the device, not through a second group, and a generation ends the last one's
  communicator before it makes its own, which is safe once all members have met: they have left the last one.
- NCCL reads its interface and address once. A process whose host has another address since then exits, too.
- An abort during the first backward can crash (pytorch#149418): hence the warm-up.

Threads: as in group.py. Only `spotfleet-abort` ends a communicator; it and `spotfleet-form` touch the device, too.
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

from spotfleet.protocol.messages import STUCK_EXIT
from spotfleet.train.comm import group
from spotfleet.train.comm.group import Group
from spotfleet.worker.activity import peer_wait
from spotfleet.worker.sockets import interface_of

ABORT_LIMIT_S = 5.0  # for ncclCommAbort
IDLE_LIMIT_S = 10.0  # for the work queued on the device once none of it waits for a peer
CLOSE_LIMIT_S = 2.0  # for a communicator to end in agreement with its peers, at the end of a job; then it is aborted
LAST_REPORT_S = 2.0
SPIN_S, NAP_S = 0.002, 0.00005  # a wait polls without a pause for SPIN_S, then with pauses of NAP_S

# torch's own guards would end the process, or wait where this module does not. This module replaces them, so users
# cannot set these variables.
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RANKS_PER_ROOT": "1000000",  # more roots need methods that the bootstrap store does not have
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(int(group.FORM_LIMIT_S)),
}


def visible_devices() -> int:
    """Return the number of CUDA devices that this process can use with NCCL."""
    return torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0


def set_up(environ: MutableMapping[str, str], address: str) -> None:
    """Set the variables that NCCL and torch read at the first communicator. A user's interface and NVLS choice stay."""
    environ.update(NCCL_ENVIRONMENT)
    environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if name := interface_of(address):
        environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def bounded(what: str, call: Callable[[], Any], limit_s: float) -> str:
    """Run `call` in a thread of its own, which is abandoned after `limit_s`. Return "" if it returned, else why not."""
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
    """Work on tensors of the device, and the tensors elsewhere that receive the results."""

    work: Any
    copies: list[tuple[torch.Tensor, torch.Tensor]]  # (user's, device's)


class CommunicatorHolder:
    """Holder of the one communicator of this process."""

    def __init__(self) -> None:
        self.group: NcclGroup | None = None
        self.address = ""  # NCCL listens here from its first communicator to the process's end


HOLDER = CommunicatorHolder()


class NcclGroup(Group):
    """Group over NCCL."""

    backend = "nccl"
    reduces = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16,
                         torch.int64, torch.int32, torch.int8, torch.uint8})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._holder = HOLDER
        self._comm: Any = None  # the communicator, which an abort ends
        self._lock = threading.Lock()  # guards `_comm` and `_ending`
        self._ending = False
        self._ended = threading.Event()  # nothing of the communicator is left, and the device is idle
        self.device = self._choose_device()

    # The device. tests/support/train/stuck_group.py replaces these

    def _choose_device(self) -> torch.device:
        return torch.device("cuda", self._assignment.local_rank % max(1, torch.cuda.device_count()))

    def _device_id(self) -> str:
        properties = torch.cuda.get_device_properties(self.device)
        return str(getattr(properties, "uuid", "")).replace(" ", "_")

    def _open(self, store: dist.Store) -> tuple[Any, Any]:
        """Return a process group over a new communicator, and the backend with `abort`, `shutdown` and `get_error`."""
        set_up(os.environ, self._address)
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(days=365)  # torch's watchdog never ends the process: this module sets the limits
        comm = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        made = dist.ProcessGroup(store, self.rank, self.size)
        made._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        made._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, comm)
        return made, comm

    def _record_event(self) -> Any:
        """Record an event; its `query()` is True once all work launched so far on this thread's stream is done."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _idle(self) -> None:
        """Wait until the device is idle; RuntimeError when it is lost."""
        torch.cuda.synchronize(self.device)

    # Beginning and end

    def _connect(self) -> Any:
        if self._holder.address not in ("", self._address):
            self._exit_stuck(f"this host is at {self._address} now, but NCCL stays at {self._holder.address}")
        self._holder.address = self._address
        store = self._meet()
        before, self._holder.group = self._holder.group, self
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
        # torch holds a lock while a communicator is made; waiting costs less than the state of all survivors.
        abort_s = ABORT_LIMIT_S + (group.FORM_LIMIT_S if self.forming else 0.0)
        threading.Thread(target=self._end_communicator, args=(abort_s,), name="spotfleet-abort", daemon=True).start()

    def _end_communicator(self, abort_s: float) -> None:
        for what, call, limit_s in (("abort", self._comm.abort, abort_s), ("idle", self._idle, IDLE_LIMIT_S)):
            if why := bounded(what, call, limit_s):
                self._exit_stuck(why)
        self._comm = None
        self._ended.set()

    def end(self) -> None:
        """End the communicator, if there is one. Return when nothing of it is left; otherwise the process exits."""
        if self._comm is not None or self._ending:
            self.abort()
            self._ended.wait()  # bounded: else the process leaves

    def _exit_stuck(self, why: str) -> None:
        """End this process, which cannot recover, after a last report."""
        message = f"generation {self.generation}, rank {self.rank}: {why}; this process exits, another takes its slot"
        print(f"spotfleet: {message}", file=sys.stderr, flush=True)
        bounded("last word", lambda: self._on_stuck(message), LAST_REPORT_S)
        os._exit(STUCK_EXIT)

    def _dispose(self, doomed: list[Any]) -> None:
        """Close the communicator. At the end of a job all ranks do so together, and pending data must arrive first."""
        comm = self._comm
        if not self.aborted and comm is not None:
            problem = bounded("close", comm.shutdown, CLOSE_LIMIT_S)
            with self._lock:
                if not problem and not self._ending:
                    self._comm = None
        self.end()
        doomed.clear()
        if self._holder.group is self:
            self._holder.group = None

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
            for target, result in flight.copies:
                target.copy_(result)
        return None

    @peer_wait
    def _wait(self, works: list[Flight], limit_s: float) -> RuntimeError | None:
        """Wait for `works`. Return None when all are done without an abort, after which they appear done, too."""
        try:
            for flight in works:
                flight.work.wait()  # this thread's stream waits, not the host
            event, began = self._record_event(), time.monotonic()
            while not event.query():
                waited_s = time.monotonic() - began
                if self.aborted:
                    break
                if waited_s > limit_s:
                    return RuntimeError(f"a peer did not come to a collective for {limit_s:g} s")
                if problem := self._problem() or self.order.stalled(waited_s):
                    return problem
                time.sleep(0 if waited_s < SPIN_S else NAP_S)
        except RuntimeError as error:
            return self._classify(error)
        return RuntimeError("the group was aborted") if self.aborted else self._problem()

    def _problem(self) -> RuntimeError | None:
        """Return the error that NCCL has detected by itself. It may not detect any."""
        comm = self._comm
        if comm is None:
            return None
        found = comm.get_error().name
        return None if found == "SUCCESS" else RuntimeError(f"NCCL reports {found}")

    def _classify(self, error: RuntimeError) -> RuntimeError:
        """Return an error of a wait if the group caused it; raise the user's; exit if the device is lost."""
        if "CUDA error" not in str(error):
            return error
        if "assert" in str(error) and not self.aborted:
            raise error
        self._exit_stuck(f"the device is lost: {error}")
        return error
