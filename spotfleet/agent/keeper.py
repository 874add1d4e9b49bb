"""Looks after this host's end: `orphan.py` decides, this asks the workers, keeps what they leave, and remembers.

`HOME/life.json` holds the `Life`, so that an agent that is killed at any line goes on where it stood.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spotfleet.agent.boot import Boot
from spotfleet.agent.bundles import folder_name
from spotfleet.agent.legacy import Legacy
from spotfleet.agent.link import Link
from spotfleet.agent.orphan import Life, Limits, Moment, Phase, Sight, Trainee, look, passed, unsaved
from spotfleet.agent.ship import CheckpointShipper
from spotfleet.agent.workers import Workers
from spotfleet.codec import from_json, to_json
from spotfleet.model import Notice

log = logging.getLogger("spotfleet.agent")

PERIOD_S = 0.5
WRITE_S = 5.0  # how much of its life a killed agent may forget
LEAVE_S = 60.0  # for what workers left, when the decision has fallen
DESERTED_S = 5.0  # silent for so long at a notice: the checkpoint goes to the target, as nobody else will save it
ALONE_S = 30.0  # silent for so long: checkpoints go to the target as they come, or they would die with this host
USELESS_S = 3600.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Around:
    """What a keeper watches and asks."""

    workers: Workers
    link: Link
    shipper: CheckpointShipper
    notice: Callable[[], Notice | None]


class Keeper:
    def __init__(self, boot: Boot, home: Path, around: Around, clock: Callable[[], Moment] | None = None) -> None:
        self._limits = Limits(boot.orphan_after_s, boot.lifetime_s)
        self._home, self._around, self._clock = home, around, clock or moment
        self._legacy = Legacy(boot, home)
        self._life = read_life(home, self._clock())
        self._heard = 0
        self._asked: dict[str, int] = {}
        self._written: Life | None = None
        self._storing: asyncio.Task[None] | None = None
        self._handing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Look until the host is to power off; then all is done that could be done."""
        try:
            while True:
                self._look()
                if self._life.phase is Phase.OFF:
                    break
                await asyncio.sleep(PERIOD_S)
            await self._around.workers.halt()
            await self._legacy.leave(LEAVE_S)
        finally:
            for task in (self._storing, self._handing):
                if task is not None:
                    task.cancel()
        log.warning("powering off: %s", self._life.why)

    def _look(self) -> None:
        link, trainees, before = self._around.link, self._around.workers.trainees(), self._life
        heard, self._heard = link.heard != self._heard, link.heard
        if not link.connected or before.phase is not Phase.HEARD:
            for report in (t.report for t in trainees):
                if report.checkpoint is not None:
                    self._legacy.keep(report.job, report.checkpoint)
        sight = Sight(heard, unsaved(trainees, self._asked), self._legacy.unstored)
        self._life = look(before, self._clock(), sight, self._limits)
        if self._life.phase is not before.phase:
            log.warning("%s: %s", self._life.phase.value, self._life.why or "a dispatcher gives orders again")
        self._act(trainees)
        if heard and self._legacy.kept() and (self._handing is None or self._handing.done()):
            self._handing = asyncio.create_task(self._hand_over())
        self._remember(before)

    def _act(self, trainees: Sequence[Trainee]) -> None:
        """Have saved and stored what the phase demands, and at a notice that no dispatcher will answer."""
        phase, notice = self._life.phase, self._around.notice()
        deserted = self._life.silent_s >= DESERTED_S and notice is not None and notice.kind == "interruption"
        saving = phase is Phase.SAVING or (deserted and phase is Phase.HEARD)
        self._asked = {t.report.worker: t.report.version for t in trainees} | self._asked if saving else {}
        self._around.workers.save_now(saving)
        self._store(phase in (Phase.SAVING, Phase.STORING) or deserted or self._life.silent_s >= ALONE_S)

    def _store(self, wanted: bool) -> None:
        if wanted and self._storing is None:
            self._storing = asyncio.create_task(self._legacy.store())
        elif not wanted and self._storing is not None:
            self._storing.cancel()
            self._storing = None

    async def _hand_over(self) -> None:
        """Give the dispatcher that is back what was kept aside."""
        for kept in self._legacy.kept():
            uploads = self._home / "jobs" / folder_name(kept.job) / "uploads"
            self._around.shipper.offer(kept.job, kept.checkpoint, uploads)
            await self._around.shipper.settled(kept.job)
            self._legacy.drop(kept)

    def _remember(self, before: Life) -> None:
        """Write the life down when it has changed in kind, and every WRITE_S."""
        now, written = self._life, self._written
        if written is not None and now.phase is before.phase and 0 <= now.now.at - written.now.at < WRITE_S:
            return
        try:
            write_life(self._home, now)
        except OSError as error:  # a full disk: we remember until our own end
            if written is not None:
                log.warning("life.json cannot be written: %s", error)
        self._written = now


def moment() -> Moment:
    """Now, on a clock that no change of the wall clock moves."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return Moment(boot, time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)))


def read_life(home: Path, now: Moment) -> Life:
    """What this host remembers, up to `now`; a new life where nothing readable is."""
    path = home / "life.json"
    try:
        return passed(from_json(Life, json.loads(path.read_text())), now)
    except FileNotFoundError:
        return Life(now)
    except (OSError, ValueError) as error:
        log.warning("%s: %s; this host's life begins anew", path, error)
        return Life(now)


def is_useless(home: Path, clock: Callable[[], Moment] = moment) -> bool:
    """Has an agent that cannot even start failed again and again for USELESS_S? A person may look for so long."""
    now = clock()
    life = look(read_life(home, now), now, Sight(heard=False), Limits(orphan_after_s=USELESS_S))
    write_life(home, life)
    return life.phase is Phase.OFF


def write_life(home: Path, life: Life) -> None:
    draft = home / "life.json.new"
    draft.write_text(json.dumps(to_json(life)))
    draft.replace(home / "life.json")
