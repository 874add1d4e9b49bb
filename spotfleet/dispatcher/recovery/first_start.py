"""First start on a machine: create or restore the ledger, and find the fleet's hosts.

If the cloud already lists hosts of the fleet, or the target keeps its ledger, an earlier dispatcher's machine was lost.
This one takes over and records `events.TakenOver`. The file `begun` in the home marks the first start as complete.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from spotfleet.dispatcher.checkpoints.ledger_restore import STAGE, Restored, found_before, machine_number, restore
from spotfleet.dispatcher.lifecycle.fleet_clock import FleetClock
from spotfleet.errors import DiskFull, SpotfleetError
from spotfleet.fleet import reconcile
from spotfleet.fleet.domain.events import HistoryLost, TakenOver
from spotfleet.fleet.ledger import Ledger, problem, set_aside
from spotfleet.fleet.planner.plan import Wanted
from spotfleet.model import Role
from spotfleet.providers import Provider
from spotfleet.storage import atomic
from spotfleet.transport.boot import DispatcherBoot
from spotfleet.words import counted

log = logging.getLogger(__name__)
AGAIN_S = 1.0
MOUNT_S = 30.0
T = TypeVar("T")


async def begin(boot: DispatcherBoot, home: Path, provider: Provider, clock: FleetClock) -> Ledger:
    """Return the ledger to use, with `clock` begun.

    Waits for a provider that does not answer, unless the ledger was restored.
    """
    mark, path = home / "begun", home / "ledger.db"
    lost = await _when_there_is_room(lambda: _set_damaged_aside(mark, path))
    shutil.rmtree(home / STAGE, ignore_errors=True)  # left by a killed process; it may hold secrets
    found = Restored()
    if not mark.exists():
        found = found_before(home) if path.exists() else await _restored(boot, home)
    ledger = await _when_there_is_room(lambda: Ledger(path))
    clock.begin(ledger.state().clock)
    if lost is not None:
        ledger.append(HistoryLost(clock.unix(), *lost))
    logged = ""
    while not mark.exists():
        try:
            await asyncio.to_thread(_observe, boot, provider, ledger, clock)
        except (SpotfleetError, OSError) as error:
            if str(error) != logged:
                log.warning("%s does not answer: %s", provider.name, error)
                logged = str(error)
            if not found.ledger:
                await asyncio.sleep(AGAIN_S)
                continue
        await asyncio.to_thread(_record_takeover, boot, ledger, found, clock)
        _complete(mark)
    return ledger


async def _restored(boot: DispatcherBoot, home: Path) -> Restored:
    """Restore from the target, which may not be mounted yet on a machine that has just started. The fleet's first
    machine does not wait for that: there is nothing to restore."""
    until = time.monotonic() + MOUNT_S
    while True:
        found = await restore(boot, home)
        empty = not found.ledger and not found.jobs and bool(found.troubles)
        if not empty or machine_number(boot.host) == 0 or time.monotonic() >= until:
            return found
        await asyncio.sleep(AGAIN_S)


async def _when_there_is_room(work: Callable[[], T]) -> T:
    """Run `work`, and retry while the disk is full: a restart of the process would not help."""
    logged = False
    while True:
        try:
            return await asyncio.to_thread(work)
        except DiskFull as error:
            if not logged:
                log.error("%s; tried again each %g s", error, AGAIN_S)
            logged = True
        await asyncio.sleep(AGAIN_S)


def _set_damaged_aside(mark: Path, path: Path) -> tuple[str, str] | None:
    """Set a damaged ledger aside and start as on a new machine: there is no person here to repair it. Return its new
    name, and why; None where it is not damaged."""
    found = problem(path) if path.exists() else None
    if found is None:
        return None
    mark.unlink(missing_ok=True)
    aside = set_aside(path)
    log.error("%s; it is kept as %s", found, aside.name)
    return aside.name, str(found)


def _complete(mark: Path) -> None:
    """Mark the first start as complete; a power cut must not make a takeover of the next start."""
    atomic.write(mark, "")


def _observe(boot: DispatcherBoot, provider: Provider, ledger: Ledger, clock: FleetClock) -> None:
    if clock.cloud_due(provider):
        clock.ask_cloud(provider)
    now = clock.unix()
    workers = Wanted(boot.fleet, Role.WORKER, boot.spec.nodes.target, boot.spec.any_of)
    if ledger.state().created is None:  # once for each ledger: a fleet that is down is not created again
        ranges = {g.name: g.nodes for g in boot.spec.groups}
        reconcile.create(ledger, provider, boot.fleet, boot.spec.nodes, now, ranges)
    reconcile.record_listing(workers, ledger, provider, now)


def _record_takeover(boot: DispatcherBoot, ledger: Ledger, found: Restored, clock: FleetClock) -> None:
    hosts = [h for h in ledger.state().hosts if h.role is Role.WORKER]
    recorded = any(isinstance(e, TakenOver) and e.host == boot.host for _, e in ledger.each())
    unknown = found.troubles and machine_number(boot.host) > 0  # the target may hold all records of the last machine
    if recorded or not (hosts or found.ledger or found.jobs or unknown):
        return
    target = boot.spec.checkpoint.folder
    parts = [f"{counted(len(hosts), 'host')} still running"]
    if found.ledger:
        parts.append(f"records and {counted(len(found.jobs), 'job')} came back from {target}")
    else:
        parts.append(f"{counted(len(found.jobs), 'job')} came back from {target}" if found.jobs else "")
        parts.append("" if target else "no copy of the records is kept, as checkpoint.target is no mounted folder")
        parts.append("of hosts and jobs that had ended nothing is known")
    why = "; ".join(filter(None, [*parts, *found.troubles]))
    log.warning("taken over: %s", why)
    ledger.append(TakenOver(clock.unix(), boot.host, found.ledger, why))
