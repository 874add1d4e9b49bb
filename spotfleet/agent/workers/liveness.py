"""Liveness of a worker's process: stopped, silent, or without a step for long."""

from __future__ import annotations

import time
from pathlib import Path

from spotfleet.membership.quiet import QuietWatch
from spotfleet.protocol.messages import WorkerReport

HANGS_S = 20.0  # a worker that is ended after this time without a step first dumps its stacks into its log
DUMP_S = 0.3  # time for that dump, before SIGTERM


class Liveness:
    """Liveness of one worker, from its reports. Cheap, as it is read for each report of the agent."""

    def __init__(self) -> None:
        self._watch = QuietWatch(time.monotonic())

    def record(self, report: WorkerReport) -> None:
        self._watch.record(report, time.monotonic())

    @property
    def quiet_s(self) -> float:
        return self._watch.quiet_s(time.monotonic())

    def corrected(self, report: WorkerReport) -> WorkerReport:
        return self._watch.corrected(report, time.monotonic())


def state_of(pid: int) -> str:
    """Return the process state letter as in `ps`: T and t stopped (SIGSTOP, a debugger), Z ended; "" if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""
