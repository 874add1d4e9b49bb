"""Whether the fleet should end by itself now, and what its hosts know of their own ends. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from spotfleet.model import FleetSpec

HOST_GRACE_S = 300.0  # at max_lifetime the dispatcher ends hosts in good order; so much later they do it themselves
KEEP_S = 86_400.0  # of a fleet that has ended by itself, so long its dispatcher keeps what nobody has fetched
LAST_RESORT_S = 900.0  # a fleet that goes down tries so long to end all machines in good order


@dataclass(frozen=True)
class Idleness:
    """What autostop needs to know."""

    up_since: float
    running: int  # jobs that have not ended
    last_ended_at: float = 0.0  # 0: no job has ended yet
    down_asked: str = ""  # name of an ended job that was submitted with `--down`


def reason_to_stop(spec: FleetSpec, idleness: Idleness, now: float) -> str:
    """Why the fleet ends now, for people; empty while it goes on. A running job is cut short by max_lifetime only."""
    age_s = now - idleness.up_since
    if spec.max_lifetime_s and age_s >= spec.max_lifetime_s:
        return f"max_lifetime of {spec.max_lifetime_s:g} s is over"
    if idleness.running:
        return ""
    if idleness.down_asked:
        return f"job {idleness.down_asked} has ended and was submitted with --down"
    idle_s = now - max(idleness.up_since, idleness.last_ended_at)
    if spec.autostop.idle_s and spec.autostop.down and idle_s >= spec.autostop.idle_s:
        return f"idle for {spec.autostop.idle_s:g} s (autostop)"
    return ""


def keep_s(spec: FleetSpec) -> float:
    """How long a dispatcher waits, its fleet ended by itself, for somebody who brings the results home.

    The emulated cloud leaves them on the laptop itself. A machine of a cloud takes them with it, and is small.
    """
    return KEEP_S if spec.aws is not None else 0.0


def told_to_host(spec: FleetSpec, up_since: float, now: float) -> dict[str, float | str]:
    """What a host that is launched `now` is told at birth, so that it ends without us; `agent/orphan.py` obeys."""
    left_s = max(0.0, up_since + spec.max_lifetime_s - now) + HOST_GRACE_S if spec.max_lifetime_s else 0.0
    return {"orphan_after_s": spec.orphan_after_s, "lifetime_s": left_s, "target": spec.checkpoint.target}


def may_power_off(spec: FleetSpec, decided_at: float, hosts_left: int, now: float) -> bool:
    """Must the dispatcher of a fleet that goes down stop its own bill, though the cloud has not ended every machine?

    Hosts that are left end themselves when they hear of us no more; where they were told never to, somebody must stay.
    """
    return now - decided_at >= LAST_RESORT_S and (
        not hosts_left or spec.orphan_after_s > 0 or spec.max_lifetime_s > 0)
