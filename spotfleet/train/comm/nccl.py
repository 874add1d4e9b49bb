"""A generation over NCCL. NCCL may not raise when a peer dies, so an abort from here must end a wait.

    form: meet -> the last generation's communicator ends -> a new one -> one warm-up reduction
    abort() -> aborted = True -> [spotfleet-abort: abort, then the device falls idle] -> over
                                    '-- too long, or the device is lost: the process exits with STUCK_EXIT

Constraints on the design:
- Kernels run behind the host: `wait()` makes a stream wait, not the host, and after an abort they end like any others,
  with garbage. So the host polls an event behind the last reduction and then checks `aborted`, which is set before the
  communicator is touched. Only then is the optimizer's step launched, so no step is counted whose reduction may have
  failed.
- Three things unblock a wait: the control thread, when the dispatcher reports the death; an error that NCCL did detect;
  after STALL_S, a peer whose machine refuses connections to its process. torch may never report what NCCL detected: it
  keeps the first value other than success, an operation in progress too.
- ncclCommAbort can hang (pytorch#119215, #149153), and it waits for work that the user has queued before a launched
  reduction. So it has END_LIMIT_S in a thread of its own, together with the device that falls idle. After that the
  process sends a last report and exits with STUCK_EXIT, and a warm spare or a new worker takes its slot. It does the
  same when the device is lost. An error that a kernel alone can cause is the user's own (worker/device_errors.py).
- Several communicators in one process can deadlock each other's abort (nccl#1013). So this module has one: tensors of
  the host (small control values) travel through the device, not through a second group, and a generation ends the last
  one's communicator before it makes its own, which is safe once all members have met: they have left the last one. A
  user's own NCCL group keeps the variables and the error handling of its user (nccl_environment.py).
- NCCL reads its interface and address once. A process whose host has another address since then exits, too.
- An abort during the first backward can crash (pytorch#149418): hence the warm-up.
- A launch may report that it is still in progress while NCCL connects to peers. torch polls for that on the host, no
  longer than TORCH_NCCL_NONBLOCKING_TIMEOUT. So all connections for reductions are made while the group forms
  (NCCL_RUNTIME_CONNECT=0); otherwise a rank that comes late to its first reduction would break the generation.
- A launch and an abort of one communicator must not run at once. So an abort waits for a launch in progress, for
  LAUNCH_LIMIT_S at most: one that never returns needs the abort.
- `work.wait()` ends the communicator in the calling thread, without a limit, once torch's watchdog has noted an error
  (ProcessGroupNCCL.cpp: WorkNCCL::synchronizeInternal). So `get_error` is read first.

Threads: as in group.py. Only `spotfleet-abort` ends a communicator, and `spotfleet-form` one that an abort came too
early for; these threads make the group's device their current one, so that none opens a context on another.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spotfleet.errors import UsageError
from spotfleet.protocol.messages import STUCK_EXIT
from spotfleet.train.comm import group, order
from spotfleet.train.comm.group import Group
from spotfleet.train.comm.nccl_environment import LOAN, connect_limit_s, no_detail, untested
from spotfleet.worker.activity import peer_wait
from spotfleet.worker.connectivity import RefusalWatch
from spotfleet.worker.device_errors import is_lost, is_of_device, is_users

END_LIMIT_S = 40.0  # for ncclCommAbort and an idle device: the kernels of a whole iteration of the user's end first
CLOSE_LIMIT_S = 5.0  # for a communicator to be closed once the last rank has come
LAUNCH_LIMIT_S = 2.0  # for a launch in progress to return before the communicator is aborted
LAST_REPORT_S = 2.0
SPIN_S, NAP_S = 0.002, 0.00005  # a wait polls without a pause for SPIN_S, then with pauses of NAP_S


def visible_devices() -> int:
    """Return the number of CUDA devices that this process can use with NCCL."""
    return torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0


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
    thread.join(max(0.0, limit_s))
    return ended[0] if ended else f"{what} took more than {round(limit_s, 1):g} s"


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
        self.ready = False  # the device has a context, and a remark about torch's version has been printed


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
        self._launching = threading.Lock()  # held by a launch, and by the abort of its communicator
        self._refusals = RefusalWatch(lambda: self._known_peers)
        self._closing = False  # the job is done here: this process needs the device no more
        self._ended = threading.Event()  # nothing of the communicator is left, and the device is idle
        self.device = self._choose_device()

    # The device. tests/support/train/stuck_group.py replaces these

    def _choose_device(self) -> torch.device:
        return torch.device("cuda", self._assignment.local_rank % max(1, torch.cuda.device_count()))

    def _device_id(self) -> str:
        """Return the device's identifier. Processes with different values of NCCL_HOSTID may share a device, since NCCL
        takes them for different hosts."""
        properties = torch.cuda.get_device_properties(self.device)
        return (str(getattr(properties, "uuid", "")) + os.environ.get("NCCL_HOSTID", "")).replace(" ", "_")

    def _enter_device(self) -> None:
        """Make the device this thread's current one."""
        torch.cuda.set_device(self.device)

    def _open(self, store: dist.Store) -> tuple[Any, Any]:
        """Return a process group over a new communicator, and the backend with `abort`, `shutdown` and `get_error`."""
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(days=365)  # torch's watchdog never ends the process: this module sets the limits
        with no_detail():
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
        self._prepare()
        before = self._holder.group
        if before is not None and before.aborted:
            before.end()  # it may wait for kernels of the user's, and peers would wait with it
        store = self._meet()
        self._holder.group = self
        if before is not None:
            before.end()
        with LOAN.taken(self._address):
            made, comm = self._open(store)
            with self._lock:
                self._comm = comm
            if self.aborted:
                self._unblock()
                raise ConnectionAbortedError("aborted while it formed")
            comm.eager_connect_single_device(self.device)  # else a `send` would make a communicator of its own
            if self.aborted:
                self._end_late(comm)
                raise ConnectionAbortedError("aborted while it formed")
            self._warm_up(made)
        return made

    def _prepare(self) -> None:
        """Open the device's context, which takes seconds, before peers wait for it within the limit of a connection."""
        self._enter_device()
        if not self._holder.ready:
            self._holder.ready = True
            if remark := untested(torch.__version__):
                print(f"spotfleet: {remark}", file=sys.stderr, flush=True)
            torch.zeros(1, device=self.device)

    def _end_late(self, comm: Any) -> None:
        """End a communicator that came to be after the abort had looked for one."""
        self._unblock()
        self._ended.wait()
        if why := self._bounded("abort", comm.abort, END_LIMIT_S + connect_limit_s(os.environ)):
            self._exit_stuck(why)

    def _warm_up(self, made: Any) -> None:
        one = torch.ones(1, device=self.device)
        limit_s = max(group.FORM_LIMIT_S, connect_limit_s(os.environ))
        with self._launching:
            work = made.allreduce([one], dist.AllreduceOptions())
        problem = self._complete([Flight(work, [])], limit_s)
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
        # torch holds a lock while a communicator is made or closed; waiting costs less than the state of all survivors.
        limit_s = END_LIMIT_S + (connect_limit_s(os.environ) if self.forming or self._closing else 0.0)
        threading.Thread(target=self._end_communicator, args=(limit_s,), name="spotfleet-abort", daemon=True).start()

    def _end_communicator(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        for what, call in (("abort", self._abort_alone), ("idle", self._idle)):
            if why := self._bounded(what, call, end - time.monotonic()):
                if self._closing:
                    break  # the job is done, and its status shall not be that of a failure
                self._exit_stuck(why)
        self._comm = None
        self._ended.set()

    def _abort_alone(self) -> None:
        """Abort the communicator once no launch is in progress; a launch that begins later finds the group aborted."""
        alone = self._launching.acquire(timeout=LAUNCH_LIMIT_S)
        try:
            self._comm.abort()
        finally:
            if alone:
                self._launching.release()

    def _bounded(self, what: str, call: Callable[[], Any], limit_s: float) -> str:
        def run() -> None:
            self._enter_device()
            call()

        return bounded(what, run, limit_s)

    def end(self) -> None:
        """End the communicator, if there is one. Return when nothing of it is left; otherwise the process exits."""
        if self._comm is not None or self._ending:
            self.abort()
            self._ended.wait()  # bounded: else the process leaves

    def _exit_stuck(self, why: str) -> None:
        """End this process, which cannot recover, after a last report."""
        message = (f"generation {self.generation}, rank {self.rank}: {why.partition(chr(10))[0]}; "
                   "this process exits, another takes its slot")
        print(f"spotfleet: {message}", file=sys.stderr, flush=True)
        bounded("last word", lambda: self._on_stuck(message, is_lost(RuntimeError(why))), LAST_REPORT_S)
        os._exit(STUCK_EXIT)

    def _dispose(self, doomed: list[Any]) -> None:
        """Close the communicator. At the end of a job all ranks do so together, and pending data must arrive first."""
        comm = self._comm
        if not self.aborted and comm is not None:
            # `shutdown` holds the lock that an abort needs until the last rank closes, and has a limit of its own.
            self._closing = True
            problem = self._bounded("close", comm.shutdown, connect_limit_s(os.environ) + CLOSE_LIMIT_S)
            with self._lock:
                if not problem and not self._ending:
                    self._comm = None
        self.end()
        doomed.clear()
        if self._holder.group is self:
            self._holder.group = None

    # Collectives

    def _start(self, begin: Callable[..., Any], *tensors: torch.Tensor) -> Flight:
        for t in tensors:
            if t.device.type == self.device.type and t.device != self.device:
                raise UsageError(f"NCCL uses {self.device} here, but a tensor is on {t.device}",
                                 hint="call torch.cuda.set_device(hvd.local_rank()) after hvd.init(), before the model "
                                      f"is built, or set {group.BACKEND} to gloo")
        moved = [t.to(self.device).contiguous() for t in tensors]  # the same tensor where it can travel as it is
        copies = [(t, m) for t, m in zip(tensors, moved, strict=True) if m is not t]
        with self._launching:
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
            if problem := self._problem():
                return problem
            for flight in works:
                flight.work.wait()  # this thread's stream waits, not the host
            event, began = self._record_event(), time.monotonic()
            while not event.query():
                waited_s = time.monotonic() - began
                if self.aborted:
                    break
                if waited_s > limit_s:
                    return RuntimeError(f"a peer did not come to a collective for {limit_s:g} s")
                if problem := self._problem() or self.order.stalled(waited_s) or self._ended_peer(waited_s):
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

    def _ended_peer(self, waited_s: float) -> RuntimeError | None:
        """Return an error if a peer's process has ended. The dispatcher says so sooner, unless it is lost, too."""
        gone = self._refusals.gone() if waited_s > order.STALL_S else ()
        return RuntimeError(f"{', '.join(gone)}: the process has ended") if gone else None

    def _classify(self, error: RuntimeError) -> RuntimeError:
        """Return an error of a wait if the group caused it; raise the user's; exit if the device is lost."""
        if not is_of_device(error):
            return error
        if is_users(error) and not self.aborted:
            raise error
        self._exit_stuck(f"the device is lost: {error}")
        return error
