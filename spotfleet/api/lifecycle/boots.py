"""Measured boots of a fleet, for prices and simulations: from its dispatcher, or from the archive of the earlier fleet
of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from spotfleet.api.home import FleetDir
from spotfleet.api.machine import DispatcherMachine
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.domain.events import FleetCreated, HostJoined, HostListed, HostPlaced, LaunchIntended
from spotfleet.fleet.domain.history import MarketHistory
from spotfleet.fleet.domain.state import fold
from spotfleet.fleet.ledger import read_events
from spotfleet.fleet.policy.lifetimes import BootTime, boot_times, with_boots
from spotfleet.model import FleetSpec
from spotfleet.protocol.messages import FleetStatus
from spotfleet.providers.plugin import plugin_of

PATIENCE_S = 2.0  # a price is no reason to wait for a dispatcher that does not answer
KINDS = (FleetCreated, LaunchIntended, HostPlaced, HostListed, HostJoined)


def measured_boots(folder: FleetDir, spec: FleetSpec, *, living: bool = True) -> MarketHistory:
    """Return the history of the boots that `spec` can expect; an empty one where none was measured, or where the
    records cannot be read. A running dispatcher is asked only if `living`.

    An earlier fleet counts if its hosts had the same image and the same environment.
    """
    with suppress(SpotfleetError, OSError):
        if folder.exists and not folder.record.down_at:
            return with_boots(_of_dispatcher(folder)) if living else MarketHistory()
        path = folder.archive / "ledger.db"
        if folder.exists and path.exists() and _boots_alike(folder.record.spec, spec):
            return with_boots(boot_times(fold(read_events(path, KINDS)).history))
    return MarketHistory()


def _of_dispatcher(folder: FleetDir) -> Mapping[str, BootTime]:
    record = folder.record
    if not record.url:
        return {}
    status: FleetStatus = DispatcherMachine(folder).client(record.url, PATIENCE_S).status()
    return {m.of: BootTime(m.seconds, m.boots) for m in status.boots if m.boots > 0 and m.seconds >= 0}


def _boots_alike(was: FleetSpec, spec: FleetSpec) -> bool:
    """Return whether hosts of both specs boot alike: by provider, environment, and the provider's section, which names
    the image."""
    if (was.provider, was.environment) != (spec.provider, spec.environment):
        return False
    plugin = plugin_of(spec.provider)
    return plugin.portable(was).section == plugin.portable(spec).section
