"""A group that behaves as NCCL does, without a GPU: NcclGroup itself over a made-up device and communicator.

What goes over the wire goes through gloo; everything else is as on a GPU:
- `wait()` returns at once. Results appear later, written by the device's thread, in the order of the launches.
- A peer's death raises nothing: the operation goes on for ever, and so does all that is queued behind it.
- Only an abort ends it. Then every operation looks complete, and its tensors hold what they held, or `garbage` that
  ends as the sum of equal values would: a wrong gradient before a tail that seems right.
- An abort waits for what was queued before the communicator's last launch, the user's own kernels too.
- `abort_hangs`: the abort itself never returns.
- After an error that NCCL noticed, torch's watchdog sleeps with a lock that a launch needs, and `wait()` ends the
  communicator in the calling thread (`Communicator.ended_by`).
- `shutdown` returns once every rank has called it, or fails after torch's limit; an abort waits for it meanwhile.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from spotfleet.train.comm import gloo, nccl
from spotfleet.train.comm.nccl import CommunicatorHolder, NcclGroup
from spotfleet.worker.sockets import shut
from spotfleet.worker.store import served_ports

GARBAGE = 7e7
END_LIMIT_S, nccl.END_LIMIT_S = nccl.END_LIMIT_S, 60.0  # the made-up device is a thread, which a busy machine delays


def spoil(tensor: torch.Tensor, size: int) -> torch.Tensor:
    tensor.mul_(size)
    tensor.view(-1)[:1] = GARBAGE if tensor.is_floating_point() else 7
    return tensor


class Operation:
    """Something in the device's queue. What NCCL calls Work."""

    def __init__(self, run: Callable[[], None], communicator: Communicator | None = None) -> None:
        self.run, self.done, self._communicator = run, threading.Event(), communicator

    def wait(self) -> bool:
        if self._communicator is not None and self._communicator.error != "SUCCESS":
            self._communicator.abort()
            raise RuntimeError("NCCL error")
        return True  # the stream waits, not the host

    def is_completed(self) -> bool:
        return self.done.is_set()

    query = is_completed


class Device:
    """One stream: a thread that does what is queued, in order."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Operation | None] = queue.Queue()
        threading.Thread(target=self._work, name="made-up-device", daemon=True).start()

    def launch(self, run: Callable[[], None], communicator: Communicator | None = None) -> Operation:
        operation = Operation(run, communicator)
        self._queue.put(operation)
        return operation

    def _work(self) -> None:
        while (operation := self._queue.get()) is not None:
            operation.run()
            operation.done.set()

    def close(self) -> None:
        self._queue.put(None)


class Communicator:
    """Stands for both torch's process group and its NCCL backend."""

    def __init__(self, inner: Any, device: Device, cut: Callable[[], None], garbage: bool, abort_hangs: bool,
                 late_s: float) -> None:
        self._inner, self._device, self._cut = inner, device, cut
        self._garbage, self._abort_hangs, self._late_s = garbage, abort_hangs, late_s
        self._watchdog_s = 4e-3 * float(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000"))
        self._connect_s = float(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800"))
        self._lock = threading.Lock()  # torch's own, of the communicator
        self.lives = False
        self.late_to_close = threading.Event()  # set: the other ranks have called `shutdown`
        self.late_to_close.set()
        self.ended_by: list[str] = []  # names of threads
        self.aborted = threading.Event()
        self.error = "SUCCESS"
        self._last: Operation | None = None

    @property
    def name(self) -> str:
        return self.error

    def get_error(self) -> Communicator:
        return self

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.lives = True

    def abort(self) -> None:
        if self._abort_hangs:
            threading.Event().wait()
        with self._lock:
            self.ended_by.append(threading.current_thread().name)
            self.lives = False
            self.aborted.set()
            self._cut()
            if self._last is not None:
                self._last.done.wait()

    def shutdown(self) -> None:
        with self._lock:
            if not self.late_to_close.wait(self._connect_s):
                raise RuntimeError("NCCL timeout")
            self.lives = False
            self.aborted.set()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Operation:
        return self._launch(tensors, lambda held: self._inner.allreduce(held, options))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Operation:
        return self._launch(tensors, lambda held: self._inner.broadcast(held, options))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Operation:
        return self._launch([*outputs[0], *inputs], lambda held: self._inner.allgather([held[:-1]], held[-1:]))

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Operation:
        return self._launch(tensors, lambda held: self._inner.send(held, to, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Operation:
        return self._launch(tensors, lambda held: self._inner.recv(held, source, tag))

    def _launch(self, tensors: list[torch.Tensor], begin: Callable[[list[torch.Tensor]], Any]) -> Operation:
        if self.error != "SUCCESS":
            time.sleep(min(self._watchdog_s, 60.0))
        self._last = self._device.launch(lambda: self._run(tensors, begin), self)
        return self._last

    def _run(self, tensors: list[torch.Tensor], begin: Callable[[list[torch.Tensor]], Any]) -> None:
        time.sleep(self._late_s)  # nobody may rely on a result that was there by chance
        held = [t.clone() for t in tensors]
        try:
            if self.aborted.is_set():
                raise RuntimeError("aborted")
            transfer = gloo.Transfer(begin(held))
            while not transfer.is_completed() and not self.aborted.is_set():  # gloo forgets some that a cut meets
                transfer._ended.wait(0.02)
            transfer.wait(timedelta(0))
        except RuntimeError:
            self.aborted.wait()  # a dead peer is no event for a kernel that spins
            if self._garbage:
                held = [spoil(t, self._inner.size()) for t in held]
        for theirs, ours in zip(tensors, held, strict=True):
            theirs.copy_(ours)


class StuckGroup(NcclGroup):
    def __init__(self, *args: Any, garbage: bool = False, abort_hangs: bool = False, late_s: float = 0.0,
                 holder: CommunicatorHolder | None = None) -> None:
        """`late_s`: how long after its launch an operation begins. `holder`: this process's, unless ranks share it."""
        super().__init__(*args)
        self._holder = holder or CommunicatorHolder()
        self._stream = Device()
        self.entered: list[str] = []  # threads that made the device their current one
        self._faults = garbage, abort_hangs, late_s

    def _choose_device(self) -> torch.device:
        return torch.device("cpu")

    def _device_id(self) -> str:
        return f"made-up-{os.getpid()}-{self.rank}"

    def _enter_device(self) -> None:
        self.entered.append(threading.current_thread().name)

    def _open(self, store: Any) -> tuple[Any, Any]:
        inner = gloo.connect(store, self.rank, self.size, gloo.listen(self._address)[0])
        communicator = Communicator(inner, self._stream, self._cut, *self._faults)
        return communicator, communicator

    def _cut(self) -> None:
        shut(self._new_sockets(), self._address, self._peers, served_ports())

    def _record_event(self) -> Operation:
        return self._stream.launch(lambda: None)

    def _idle(self) -> None:
        self._record_event().done.wait()

    def _dispose(self, doomed: list[Any]) -> None:
        super()._dispose(doomed)
        self._stream.close()
