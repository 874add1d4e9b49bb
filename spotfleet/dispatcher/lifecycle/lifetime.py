"""Lifetime limits: when the fleet ends by itself, and the limits that its hosts receive. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from spotfleet.model import FleetSpec

HOST_GRACE_S = 300.0  # time after max_lifetime in which the dispatcher ends hosts; then they end themselves
LAST_RESORT_S = 900.0  # time for a fleet that goes down to end all machines in good order


@dataclass(frozen=True)
class Idleness:
    """Inputs of autostop."""

    up_since: float
    running: int  # jobs that have not ended
    last_ended_at: float = 0.0  # 0: no job has ended yet
    down_asked: str = ""  # name of an ended job that was submitted with `--down`


def reason_to_stop(spec: FleetSpec, idleness: Idleness, now: float) -> str:
    """Return why the fleet ends now, for people; empty if it continues. Only max_lifetime ends a running job."""
    if is_too_old(spec, idleness.up_since, now):
        return f"max_lifetime of {spec.max_lifetime_s:g} s is over"
    if idleness.running:
        return ""
    if idleness.down_asked:
        return f"job {idleness.down_asked} has ended and was submitted with --down"
    idle_s = now - max(idleness.up_since, idleness.last_ended_at)
    if spec.autostop.idle_s and spec.autostop.down and idle_s >= spec.autostop.idle_s:
        return f"idle for {spec.autostop.idle_s:g} s (autostop)"
    return ""


def is_too_old(spec: FleetSpec, up_since: float, now: float) -> bool:
    """Return whether max_lifetime is over."""
    return bool(spec.max_lifetime_s) and now - up_since >= spec.max_lifetime_s


def told_to_host(spec: FleetSpec, up_since: float, now: float) -> dict[str, float | str]:
    """Return a new host's own limits, after which it ends itself without a dispatcher (`agent/policy/orphan.py`)."""
    left_s = max(0.0, up_since + spec.max_lifetime_s - now) + HOST_GRACE_S if spec.max_lifetime_s else 0.0
    return {"orphan_after_s": spec.orphan_after_s, "lifetime_s": left_s, "target": spec.checkpoint.target}


def may_power_off(spec: FleetSpec, decided_at: float, hosts_left: int, now: float) -> bool:
    """Return whether the dispatcher must stop its own bill although the cloud has not ended every machine.

    Remaining hosts end themselves once they lose contact with us. If they have no such limit, the dispatcher must stay.
    """
    return now - decided_at >= LAST_RESORT_S and (
        not hosts_left or spec.orphan_after_s > 0 or spec.max_lifetime_s > 0)
