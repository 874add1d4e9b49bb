"""Notices of planned maintenance: a hint days before, a notice when it is near.

A machine that will be rebooted loses its memory like one that will be stopped. So each of them is replaced first, then
left in time and ended. Codes: EC2 User Guide, "Scheduled events for your instances".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from spotfleet.model import Notice

NEAR_S = 600.0  # maintenance counts as a notice from this long before: time to launch another machine and warm it up
# codes of events that lose the machine's memory
ENDS = ("instance-reboot", "system-reboot", "instance-stop", "instance-retirement")
OVER = ("canceled", "cancelled", "completed", "closed")


@dataclass(frozen=True)
class Planned:
    code: str  # "system-reboot"
    starts_at: float  # Unix seconds
    state: str = "active"


def notice_of(planned: Iterable[Planned], now: float) -> Notice | None:
    """Return the notice or hint for planned maintenance; None if nothing is still to come."""
    ahead = sorted((p for p in planned if p.state.casefold() not in OVER), key=lambda p: (p.starts_at, p.code))
    near = next((p for p in ahead if p.code in ENDS and p.starts_at - now <= NEAR_S), None)
    if near is not None:
        return Notice(max(0.0, near.starts_at - now), "terminate", why=_reason(near))
    return Notice(0.0, kind="maintenance", why=_reason(ahead[0])) if ahead else None


def _reason(planned: Planned) -> str:
    at = datetime.fromtimestamp(planned.starts_at, UTC)
    return f"maintenance of the cloud: {planned.code} at {at:%Y-%m-%d %H:%M} UTC"
