"""Time for which a worker has shown no progress, from its reports. Pure."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.protocol.messages import WorkerReport

MUTE_S = 5.0  # a worker reports each second; after this silence it counts as not waiting for peers


class QuietWatch:
    """Progress of one worker. Cheap, as it is updated with each report."""

    def __init__(self, now: float) -> None:
        self._reported_at = self._moved_at = now
        self._at = (0, 0, False)  # generation, version, and whether it waits for peers

    def record(self, report: WorkerReport, now: float) -> None:
        at = (report.generation, report.version, report.waits)
        self._reported_at = now
        if at != self._at or report.generation == 0:
            self._at, self._moved_at = at, now

    def quiet_s(self, now: float) -> float:
        """Return the whole seconds since `version` or `waits` last changed in one generation; 0 outside of any.

        The change of `waits` counts because the first rank to finish a long evaluation waits only from then on.
        """
        return float(int(now - self._moved_at)) if self._at[0] else 0.0

    def corrected(self, report: WorkerReport, now: float) -> WorkerReport:
        """Return the last report, with `waits` cleared once the worker has been silent for MUTE_S."""
        mute = report.waits and now - self._reported_at > MUTE_S
        return replace(report, waits=False) if mute else report
