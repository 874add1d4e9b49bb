"""Live fleet on the local cloud, with its processes in reach."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from spotfleet.api import Fleet, Job
from spotfleet.errors import SpotfleetError
from spotfleet.providers.local import LocalCloud, LocalMachine
from tests.support.attack.tally import Tally
from tests.support.e2e.e2e_stage import Stage, wait_for
from tests.support.e2e.troubles import dispatches, workers_of

T = TypeVar("T")
LIMIT_S = 120.0  # for any one thing to happen on a busy machine


@contextmanager
def live_stage(folder: Path) -> Iterator[Stage]:
    """Yield a home and a working directory below `folder`; all that runs there ends with it."""
    home, work = folder / "home", folder / "work"
    work.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPOTFLEET_HOME", str(home))
        patch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))
        patch.chdir(work)
        try:
            yield Stage(home, work)
        finally:
            LocalCloud(home).shutdown()


def eventually(what: str, ask: Callable[[], T], limit_s: float = LIMIT_S) -> T:
    """Return the first true answer; a dispatcher that is coming back may refuse meanwhile. Raises AssertionError."""
    found: list[T] = []

    def answered() -> bool:
        with suppress(SpotfleetError):
            found.append(ask())
        return bool(found and found[-1])

    wait_for(what, answered, limit_s)
    return found[-1]


class LiveFleet:
    """A fleet that is up."""

    def __init__(self, stage: Stage, fleet: Fleet) -> None:
        self.stage, self.fleet = stage, fleet
        self._killed: set[int] = set()

    # ---- processes

    def machines(self) -> list[LocalMachine]:
        """Its hosts with processes, in order of their names."""
        return sorted((m for m in self.stage.cloud.truth() if m.processes and not dispatches(m)),
                      key=lambda m: m.request_id)

    def machine(self, host: str) -> LocalMachine:
        return next(m for m in self.stage.cloud.truth() if m.request_id == host)

    def dispatcher(self) -> LocalMachine:
        return next(m for m in self.stage.cloud.truth() if dispatches(m))

    def dispatcher_pid(self) -> int:
        """The process of the dispatcher, once there is another than those that were killed."""
        end = time.monotonic() + LIMIT_S
        while True:
            processes = self.dispatcher().processes
            if processes and processes[0] not in self._killed:
                return processes[0]
            assert time.monotonic() < end, "the dispatcher's process does not come back"
            time.sleep(0.02)

    def kill_dispatcher(self, pid: int = 0) -> None:
        """Kill its process, or `pid`, which it is known to be: at once then."""
        pid = pid or self.dispatcher_pid()
        self._killed.add(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def answers(self) -> bool:
        """Wait until the dispatcher answers."""
        return eventually("the dispatcher's answer", lambda: self.fleet._client(1).healthy())

    def workers(self) -> list[psutil.Process]:
        return [process for machine in self.machines() for process in workers_of(machine)]

    def up(self) -> list[str]:
        return [h.host for h in self.fleet.hosts() if h.role == "worker" and h.state == "up"]

    # ---- jobs

    def run(self, script: str, *args: object, workers: tuple[int, int] = (1, 1)) -> Job:
        return self.fleet.train(script, [str(arg) for arg in args], np=workers, detach=True, wait=True)

    def ended(self) -> bool:
        """Have all jobs ended?"""
        return all(job.state in ("succeeded", "failed", "cancelled") for job in self.fleet.client.jobs())

    def check_end(self, tally: Tally) -> None:
        """Take the fleet down: nothing is left, and the cloud bills what our ledger holds."""
        self.fleet.down()
        left = [m.request_id for m in self.stage.cloud.truth()]
        tally.check("nothing is left", not left, left)
        billed, ours = self.stage.cloud.invoice(self.fleet.name).micros, self.fleet.cost().micros
        tally.check("the bill is the invoice", billed == ours, f"billed {billed}, our cost {ours}")
