"""The first start on a machine: the ledger made, or taken back, and the fleet's hosts found.

A fleet of which the cloud lists hosts already, or of which the target keeps a ledger, had a dispatcher whose machine is
gone. This one goes on in its place and says so in the ledger: `events.TakenOver`. `begun` in the home ends all this.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from spotfleet.dispatcher.boot import DispatcherBoot
from spotfleet.dispatcher.restore import STAGE, Restored, found_before, machine_number, restore
from spotfleet.errors import DiskFull, SpotfleetError
from spotfleet.fleet import reconcile
from spotfleet.fleet.events import HistoryLost, TakenOver
from spotfleet.fleet.ledger import Ledger, problem, set_aside
from spotfleet.fleet.plan import Wanted
from spotfleet.model import Role
from spotfleet.providers import Provider

log = logging.getLogger(__name__)
AGAIN_S = 1.0
MOUNT_S = 30.0
T = TypeVar("T")


async def begin(boot: DispatcherBoot, home: Path, provider: Provider) -> Ledger:
    """The ledger to go on with. Waits for a provider that does not answer, unless the ledger knows the fleet."""
    mark, path = home / "begun", home / "ledger.db"
    lost = await _when_there_is_room(lambda: _put_damaged_aside(mark, path))
    shutil.rmtree(home / STAGE, ignore_errors=True)  # of a process that was killed; it may hold secrets
    found = Restored()
    if not mark.exists():
        found = found_before(home) if path.exists() else await _restored(boot, home)
    ledger = await _when_there_is_room(lambda: Ledger(path))
    if lost is not None:
        ledger.append(lost)
    told = ""
    while not mark.exists():
        try:
            await asyncio.to_thread(_observe, boot, provider, ledger)
        except (SpotfleetError, OSError) as error:
            if str(error) != told:
                log.warning("%s does not answer: %s", provider.name, error)
                told = str(error)
            if not found.ledger:
                await asyncio.sleep(AGAIN_S)
                continue
        await asyncio.to_thread(_remember, boot, ledger, found)
        mark.touch()
    return ledger


async def _restored(boot: DispatcherBoot, home: Path) -> Restored:
    """From the target, which may still be on its way to be mounted on a machine that has just started. No first machine
    waits for that: there is nothing to be taken back."""
    until = time.monotonic() + MOUNT_S
    while True:
        found = await restore(boot, home)
        empty = not found.ledger and not found.jobs and bool(found.troubles)
        if not empty or machine_number(boot.host) == 0 or time.monotonic() >= until:
            return found
        await asyncio.sleep(AGAIN_S)


async def _when_there_is_room(work: Callable[[], T]) -> T:
    """Wait for room on a disk that is full: to end and to be started again would help nobody."""
    told = False
    while True:
        try:
            return await asyncio.to_thread(work)
        except DiskFull as error:
            if not told:
                log.error("%s; tried again each %g s", error, AGAIN_S)
            told = True
        await asyncio.sleep(AGAIN_S)


def _put_damaged_aside(mark: Path, path: Path) -> HistoryLost | None:
    """Begin anew, as on another machine, with a ledger that cannot be read: nobody is here to repair it."""
    found = problem(path) if path.exists() else None
    if found is None:
        return None
    mark.unlink(missing_ok=True)
    aside = set_aside(path)
    log.error("%s; it is kept as %s", found, aside.name)
    return HistoryLost(time.time(), aside.name, str(found))


def _observe(boot: DispatcherBoot, provider: Provider, ledger: Ledger) -> None:
    now = time.time()
    workers = Wanted(boot.fleet, Role.WORKER, boot.spec.nodes.target, boot.spec.any_of)
    if ledger.state().created is None:  # once for each ledger: a fleet that is down is not made anew
        reconcile.create(ledger, provider, boot.fleet, boot.spec.nodes, now)
    reconcile.look(workers, ledger, provider, now)


def _remember(boot: DispatcherBoot, ledger: Ledger, found: Restored) -> None:
    hosts = [h for h in ledger.state().hosts if h.role is Role.WORKER]
    said = any(isinstance(e, TakenOver) and e.host == boot.host for _, e in ledger.events())
    unknown = found.troubles and machine_number(boot.host) > 0  # there may be all that the last machine knew
    if said or not (hosts or found.ledger or found.jobs or unknown):
        return
    target = boot.spec.checkpoint.folder
    parts = [f"{len(hosts)} hosts go on"]
    if found.ledger:
        parts.append(f"ledger and {len(found.jobs)} jobs came back from {target}")
    else:
        parts.append(f"{len(found.jobs)} jobs came back from {target}" if found.jobs else "")
        parts.append("" if target else "no copy of the ledger is kept, as checkpoint.target is no mounted folder")
        parts.append("of hosts and jobs that had ended nothing is known")
    why = "; ".join(filter(None, [*parts, *found.troubles]))
    log.warning("taken over: %s", why)
    ledger.append(TakenOver(time.time(), boot.host, found.ledger, why))
