"""Environment variables of torch and NCCL that a communicator of this package needs, and versions of torch.

torch and NCCL read them between the constructor of a process group and its first reduction. Afterwards they have the
user's values again, so that child processes are not affected. Nor are the user's own process groups, except by
`DEFAULTS`: a process reads these once, so whichever group comes first decides. Set them for the job to choose.

Threads: any.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

import torch.distributed as dist

from spotfleet.worker.sockets import interface_of

CONNECT_LIMIT_S = 15  # for a communicator to be made once all members have met, in whole seconds
RANKS_PER_S = 8  # a job that may have more workers gets a second more for each so many
WORKERS = "SPOTFLEET_WORKERS"  # "least:most" of the job
TESTED_TORCH = ((2, 11), (2, 13))  # the oldest and the newest minor version that nccl.py was compared with

# torch's own guards would end the process, or wait where nccl.py does not. It replaces them, so users cannot set these
# variables.
GUARDS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # it turns the error handling on again
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RANKS_PER_ROOT": "1000000",  # more roots need methods that the bootstrap store does not have
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    # For each failed operation the watchdog sleeps four times as long, with a lock that the next launch waits for.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
CONNECT_LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"  # torch reads it once
DEFAULTS = {"NCCL_NVLS_ENABLE": "0", "NCCL_RUNTIME_CONNECT": "0"}


def variables(environ: Mapping[str, str], address: str) -> dict[str, str]:
    """Return the variables to set while a communicator is made. Where `DEFAULTS` has one, a user's value stays."""
    defaults = DEFAULTS | {CONNECT_LIMIT: f"{connect_limit_s(environ):g}"}
    wanted = {name: value for name, value in defaults.items() if name not in environ} | GUARDS
    if (name := interface_of(address)) and "NCCL_SOCKET_IFNAME" not in environ:
        wanted["NCCL_SOCKET_IFNAME"] = f"={name}"
    return wanted


def connect_limit_s(environ: Mapping[str, str]) -> float:
    """Return the time that torch gives a communicator to be made, and to be closed.

    torch reads it once, so it depends on the most workers that the job may have, not on those of a generation.
    """
    text, most = environ.get(CONNECT_LIMIT, ""), environ.get(WORKERS, "").partition(":")[2]
    return float(text) if text.isdecimal() else float(
        CONNECT_LIMIT_S + (int(most) // RANKS_PER_S if most.isdecimal() else 0))


def untested(version: str) -> str:
    """Return a remark about a version of torch outside `TESTED_TORCH`; "" for others."""
    oldest, newest = TESTED_TORCH
    numbers = tuple(int(n) for n in version.split(".")[:2] if n.isdecimal())
    if len(numbers) < 2 or oldest <= numbers <= newest:
        return ""
    first, last = (f"{a}.{b}" for a, b in TESTED_TORCH)
    return f"torch {version} is outside the versions that NCCL was tested with here, {first} to {last}"


class EnvironmentLoan:
    """Environment variables of this process, changed while a communicator is made.

    Several threads may be inside at once, since an abort abandons a thread that forms; the last one restores.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._users = 0
        self._ours: dict[str, str] = {}
        self._before: dict[str, str | None] = {}

    @contextmanager
    def taken(self, address: str) -> Iterator[None]:
        """Set the variables for a host at `address` inside this context."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._ours = variables(self._environ, address)
                self._before = {name: self._environ.get(name) for name in self._ours}
                self._environ.update(self._ours)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._restore()

    def _restore(self) -> None:
        for name, value in self._before.items():
            if self._environ.get(name) != self._ours[name]:
                continue  # somebody else has set it meanwhile
            if value is None:
                del self._environ[name]
            else:
                self._environ[name] = value


LOAN = EnvironmentLoan(os.environ)


@contextmanager
def no_detail() -> Iterator[None]:
    """Lower TORCH_DISTRIBUTED_DEBUG=DETAIL inside this context: it makes a process group end its process on errors."""
    level = dist.get_debug_level()
    if level == dist.DebugLevel.DETAIL:
        dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        yield
    finally:
        dist.set_debug_level(level)
