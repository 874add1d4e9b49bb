"""Durations measured for this release, with date and source. No figure here is an estimate."""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "bench/RESULTS.md, 2026-11-20, 2 cores, gloo, 10.2 M parameters"


@dataclass(frozen=True)
class Figure:
    name: str  # shown to users
    seconds: float
    source: str


LOSS = Figure("pause beyond one step when hosts are lost without notice", 0.128, f"{SOURCE}: kill host, median of 20")
LEAVE = Figure("pause beyond one step when a host leaves in time", 0.117, f"{SOURCE}: graceful leave, median of 8")
JOIN = Figure("pause beyond one step when hosts join", 0.148, f"{SOURCE}: scale-up, median of 43")
REDONE = Figure("work computed again per host lost", 0.0, f"{SOURCE}: no step repeated in 40 kills; the one under way "
                "when it happened is in the pause")
COMMIT = Figure("one commit in memory, where a job needs a copy", 0.0066, f"{SOURCE}: 123 MB; by default none is made")

ALL = (LOSS, LEAVE, JOIN, REDONE, COMMIT)

BOOT_S = 180.0  # from a launch until the host works, paid: as the benchmarks define it, where none was measured
NOTICE_S = 120.0  # EC2 User Guide, "Spot Instance interruption notices"
