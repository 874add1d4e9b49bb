"""Retention time of results after a fleet has ended by itself. Pure."""

from __future__ import annotations

from spotfleet.model import FleetSpec

KEEP_S = 86_400.0  # retention of unfetched results on the dispatcher after the fleet has ended by itself


def keep_s(spec: FleetSpec) -> float:
    """Return for how many seconds the dispatcher of a fleet that has ended by itself keeps results for fetching.

    The emulated cloud keeps its results on the laptop itself. A cloud machine loses them when it ends, and is small.
    """
    return KEEP_S if spec.aws is not None else 0.0
