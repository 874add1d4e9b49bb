"""Shutdown controller: acts on the decisions of `orphan.py` about this host's end.

It asks workers for checkpoints, keeps and stores their results, and saves the state. `HOME/life.json` holds the
`OrphanState`, so that an agent killed at any line continues from there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spotfleet.agent.boot import AgentBoot
from spotfleet.agent.files.bundles import folder_name
from spotfleet.agent.files.uploads import CheckpointShipper
from spotfleet.agent.link import DispatcherLink
from spotfleet.agent.policy.orphan import (
    Instant,
    Limits,
    LiveWorker,
    OrphanObservation,
    OrphanPhase,
    OrphanState,
    advance,
    unsaved,
    with_elapsed,
)
from spotfleet.agent.shutdown.stash import CheckpointStash
from spotfleet.agent.workers.supervisor import Workers
from spotfleet.agent.workers.worker import AgentWorker
from spotfleet.codec import from_json, to_json
from spotfleet.model import Notice
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import atomic, json_file

log = logging.getLogger("spotfleet.agent")

PERIOD_S = 0.5
WRITE_S = 5.0  # most of the counted time that a killed agent may lose
LEAVE_S = 60.0  # to store the files that workers left, once the host is to power off
DESERTED_S = 5.0  # after this silence a notice sends the checkpoint to the target: no dispatcher will save it
ALONE_S = 30.0  # after this silence each new checkpoint goes to the target: it would be lost with this host
COPY_AGAIN_S = 2.0
USELESS_S = 3600.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ShutdownDeps:
    """Objects that the shutdown controller observes and calls."""

    workers: Workers
    link: DispatcherLink
    shipper: CheckpointShipper
    notice: Callable[[], Notice | None]


class ShutdownController:
    """Periodic task that advances the orphan state and saves what this host holds."""

    def __init__(self, boot: AgentBoot, home: Path, deps: ShutdownDeps,
                 clock: Callable[[], Instant] | None = None) -> None:
        self._limits = Limits(boot.orphan_after_s, boot.lifetime_s)
        self._home, self._deps, self._clock = home, deps, clock or moment
        self._stash = CheckpointStash(boot, home)
        self._life = read_life(home, self._clock())
        self._orders_seen = 0
        self._asked: dict[str, int] = {}
        self._written: OrphanState | None = None
        self._storing: asyncio.Task[None] | None = None
        self._uploading: asyncio.Task[None] | None = None
        self._copying: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run until the host is to power off; before the return all files are stored as far as possible."""
        try:
            while True:
                self._advance()
                if self._life.phase is OrphanPhase.OFF:
                    break
                await asyncio.sleep(PERIOD_S)
            await self._deps.workers.halt()
            await self._stash.leave(LEAVE_S)
        finally:
            for task in (self._storing, self._uploading, self._copying):
                if task is not None:
                    task.cancel()
        log.warning("powering off: %s", self._life.why)

    def _advance(self) -> None:
        link, live_workers, before = self._deps.link, self._deps.workers.live_workers(), self._life
        has_orders, self._orders_seen = link.orders_received != self._orders_seen, link.orders_received
        if not link.connected or before.phase is not OrphanPhase.IN_CONTACT:
            for report in (t.report for t in live_workers):
                if report.checkpoint is not None:
                    self._stash.keep(report.job, report.checkpoint)
        observed = OrphanObservation(has_orders, unsaved(live_workers, self._asked), self._stash.unstored)
        self._life = advance(before, self._clock(), observed, self._limits)
        if self._life.phase is not before.phase:
            log.warning("%s: %s", self._life.phase.value, self._life.why or "a dispatcher gives orders again")
        self._act(live_workers)
        if has_orders and self._stash.kept() and (self._uploading is None or self._uploading.done()):
            self._uploading = asyncio.create_task(self._hand_over())
        self._remember(before)

    def _act(self, live_workers: Sequence[LiveWorker]) -> None:
        """Have checkpoints saved and stored as the phase demands, also at a notice without a dispatcher."""
        phase, notice = self._life.phase, self._deps.notice()
        deserted = self._life.silent_s >= DESERTED_S and notice is not None and notice.kind == "interruption"
        saving = phase is OrphanPhase.SAVING or (deserted and phase is OrphanPhase.IN_CONTACT)
        self._asked = {t.report.worker: t.report.version for t in live_workers} | self._asked if saving else {}
        self._deps.workers.save_now(saving)
        leaves = self._deps.workers.to_target
        self._copy_unsent(leaves)
        self._store(leaves or deserted or phase in (OrphanPhase.SAVING, OrphanPhase.STORING)
                    or self._life.silent_s >= ALONE_S)

    def _copy_unsent(self, wanted: bool) -> None:
        """Have what does not reach the dispatcher copied to the target, as the dispatcher ordered."""
        if not wanted or (self._copying is not None and not self._copying.done()):
            return
        for job, made in self._deps.shipper.waiting():
            self._stash.keep(job, made)
        if holding := self._deps.workers.holding():
            self._copying = asyncio.create_task(self._copy_worker(holding[0]))

    async def _copy_worker(self, worker: AgentWorker) -> None:
        worker.stored = await self._stash.put_worker(worker.folder)
        if not worker.stored:
            await asyncio.sleep(COPY_AGAIN_S)

    def is_stored(self, job: str, made: Checkpoint) -> bool:
        """Return whether the checkpoint of a job is in the target."""
        return self._stash.is_stored(job, made)

    def _store(self, wanted: bool) -> None:
        if wanted and self._storing is None:
            self._storing = asyncio.create_task(self._stash.store())
        elif not wanted and self._storing is not None:
            self._storing.cancel()
            self._storing = None

    async def _hand_over(self) -> None:
        """Upload the stashed checkpoints to the dispatcher that is back."""
        for kept in self._stash.kept():
            uploads = self._home / "jobs" / folder_name(kept.job) / "uploads"
            self._deps.shipper.offer(kept.job, kept.checkpoint, uploads)
            await self._deps.shipper.settled(kept.job)
            self._stash.drop(kept)

    def _remember(self, before: OrphanState) -> None:
        """Save the state when its phase has changed, and every WRITE_S."""
        now, written = self._life, self._written
        if written is not None and now.phase is before.phase and 0 <= now.now.at - written.now.at < WRITE_S:
            return
        try:
            write_life(self._home, now)
        except OSError as error:  # a full disk: the state stays in memory until this process ends
            if written is not None:
                log.warning("life.json cannot be written: %s", error)
        self._written = now


def moment() -> Instant:
    """Return the current time on a clock that is independent of the wall clock."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return Instant(boot, time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)))


def read_life(home: Path, now: Instant) -> OrphanState:
    """Read the saved state, advanced to `now`; a new state where none is readable."""
    path = home / "life.json"
    try:
        return with_elapsed(from_json(OrphanState, json_file.read(path)), now)
    except FileNotFoundError:
        return OrphanState(now)
    except (OSError, ValueError) as error:
        log.warning("%s: %s; this host's life begins anew", path, error)
        return OrphanState(now)


def is_useless(home: Path, clock: Callable[[], Instant] = moment) -> bool:
    """Return whether an agent that cannot start has failed repeatedly for USELESS_S.

    The delay leaves a person time to inspect the machine.
    """
    now = clock()
    life = advance(read_life(home, now), now, OrphanObservation(has_orders=False), Limits(orphan_after_s=USELESS_S))
    write_life(home, life)
    return life.phase is OrphanPhase.OFF


def write_life(home: Path, life: OrphanState) -> None:
    path = home / "life.json"
    atomic.write(path, json_file.text_of(to_json(life)), mode=atomic.BY_UMASK, draft=home / "life.json.new", sync=False)
