"""Parts of a host's boot, put together from the ledger and from the report of its agent. Pure."""

from __future__ import annotations

from spotfleet.fleet.domain.host import Host
from spotfleet.model import BootStages, CloudState


def boot_stages(host: Host, reported: BootStages | None, now: float) -> BootStages:
    """Return the parts of the boot that ends `now`, as the agent of `host` connects.

    A part that is no number of seconds within the whole is left out: an agent reports it, and its machine may be
    anybody's, or have booted long before it became a host.
    """
    whole_s = max(0.0, now - host.since)
    ran = host.runs[-1].started_at - host.since if host.runs and host.cloud is CloudState.RUNNING else None
    said = reported or BootStages()

    def within(seconds: float | None) -> float | None:
        return round(seconds, 2) if seconds is not None and 0.0 <= seconds <= whole_s else None

    return BootStages(round(whole_s, 2), within(ran), within(said.system_s), within(said.setup_s),
                      within(said.agent_s))
