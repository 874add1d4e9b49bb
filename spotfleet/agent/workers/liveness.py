"""Liveness of a worker's process: stopped, silent, or without a step for long."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from spotfleet.protocol.messages import WorkerReport

MUTE_S = 5.0  # a worker reports each second; after this silence it counts as not waiting for peers
HANGS_S = 20.0  # a worker that is ended after this time without a step first dumps its stacks into its log
DUMP_S = 0.3  # time for that dump, before SIGTERM


class Liveness:
    """Liveness of one worker, from its reports. Cheap, as it is read for each report of the agent."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._reported_at = self._moved_at = now
        self._at = (0, 0, False)  # generation, version, and whether it waits for peers

    def record(self, report: WorkerReport) -> None:
        now, at = time.monotonic(), (report.generation, report.version, report.waits)
        self._reported_at = now
        if at != self._at or report.generation == 0:
            self._at, self._moved_at = at, now

    @property
    def quiet_s(self) -> float:
        """Whole seconds since `version` or `waits` last changed in one generation; 0 outside of any.

        The change of `waits` counts because the first rank to finish a long evaluation waits only from then on.
        """
        return float(int(time.monotonic() - self._moved_at)) if self._at[0] else 0.0

    def corrected(self, report: WorkerReport) -> WorkerReport:
        """Return the last report, with `waits` cleared once the worker has been silent for MUTE_S."""
        mute = report.waits and time.monotonic() - self._reported_at > MUTE_S
        return replace(report, waits=False) if mute else report


def state_of(pid: int) -> str:
    """Return the process state letter as in `ps`: T and t stopped (SIGSTOP, a debugger), Z ended; "" if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""
