"""Whether a worker's process lives as it should: stopped, mute, or without a step for long."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from spotfleet.messages import WorkerReport

MUTE_S = 5.0  # a worker reports each second; one that says nothing for so long waits for no peer, whatever it said last
HANGS_S = 20.0  # one that is ended after so long without a step leaves its stacks in its log
DUMP_S = 0.3  # for that, before SIGTERM


class Pulse:
    """Of one worker, from its reports. Cheap: asked with each report of the agent."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._heard_at = self._moved_at = now
        self._at = (0, 0, False)  # generation, version, and whether it waits for peers

    def heard(self, report: WorkerReport) -> None:
        now, at = time.monotonic(), (report.generation, report.version, report.waits)
        self._heard_at = now
        if at != self._at or report.generation == 0:
            self._at, self._moved_at = at, now

    @property
    def quiet_s(self) -> float:
        """Since its version, or whether it waits, last changed while it held one generation; 0 outside of any. In whole
        seconds. Who comes first to the end of a long evaluation waits only from then on."""
        return float(int(time.monotonic() - self._moved_at)) if self._at[0] else 0.0

    def corrected(self, report: WorkerReport) -> WorkerReport:
        """Its last report, as far as that still says what it does."""
        mute = report.waits and time.monotonic() - self._heard_at > MUTE_S
        return replace(report, waits=False) if mute else report


def state_of(pid: int) -> str:
    """One letter as in `ps`: T and t are stopped (SIGSTOP, a debugger), Z has ended. Empty where nobody tells."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""
