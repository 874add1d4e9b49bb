"""The dispatcher's clock: reads this machine's clocks and asks the cloud for `trusted_time.py`, and keeps its record.

`clock.json` in the dispatcher's home holds the time and, of the same moment, the boot of this machine and its boottime
clock, which runs on while no dispatcher does. So a restart on the same boot knows the time exactly. After a boot of the
machine the record is a lower bound, like the ledger's newest event. Without a readable record the ledger alone counts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet.codec import from_json, to_json, to_text
from spotfleet.dispatcher.disk.files import write_json
from spotfleet.dispatcher.disk.space import is_full
from spotfleet.dispatcher.lifecycle.trusted_time import BOUND_S, KnownTime, TrustedTime, hosts_time
from spotfleet.errors import SpotfleetError
from spotfleet.providers import CloudClock, Provider

log = logging.getLogger(__name__)
SAVE_S = 60.0
ASK_S = 10.0  # period of asking the cloud for its time, while it is needed
CLOUD_S = 60.0  # a cloud with a clock that has not answered for this time leaves the decision to the hosts
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class BootMoment:
    """Moment on a clock that is independent of the wall clock and runs from one boot of the machine to the next."""

    boot: str  # identity of the boot; empty where the system has none
    boot_s: float  # since the boot, suspended time included


def boot_moment() -> BootMoment:
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return BootMoment(boot, time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)))


@dataclass(frozen=True)
class MachineClocks:
    """Clocks of this machine."""

    unix: Callable[[], float] = lambda: time.time()
    mono: Callable[[], float] = lambda: time.monotonic()
    boot: Callable[[], BootMoment] = lambda: boot_moment()


@dataclass(frozen=True)
class ClockRecord:
    """Content of `clock.json`."""

    unix: float  # the trusted time
    moment: BootMoment
    confirmed: bool
    digest: str = ""  # SHA-256 of the other fields: a wrong digit must not make a fleet old

    def sealed(self) -> ClockRecord:
        rest = to_text(replace(self, digest=""))
        return replace(self, digest=hashlib.sha256(rest.encode()).hexdigest())


class FleetClock:
    """Trusted time of one dispatcher process."""

    def __init__(self, home: Path, clocks: MachineClocks = MachineClocks()) -> None:
        self._path, self._clocks = home / "clock.json", clocks
        self._record = _read(self._path)
        self._ask_at = self._save_at = -math.inf  # monotonic
        self._answered_at = -math.inf  # monotonic: the cloud's last answer
        self._why = ""
        self.begin(-math.inf)

    def begin(self, newest_at: float) -> None:
        """Begin with what is known now. `newest_at`: the time of the ledger's newest event."""
        unix, mono, moment, record = self._clocks.unix(), self._clocks.mono(), self._clocks.boot(), self._record
        known = None if newest_at == -math.inf else KnownTime(newest_at, exact=False)
        if record is not None:
            exact = bool(moment.boot) and record.moment.boot == moment.boot
            at = record.unix + max(0.0, moment.boot_s - record.moment.boot_s) if exact else max(record.unix, newest_at)
            known = KnownTime(at, exact, record.confirmed)
        self._time = TrustedTime(unix, mono, known)

    def unix(self) -> float:
        """Return the trusted Unix time."""
        return self._time.unix(self._clocks.mono())

    def passed(self) -> float:
        """Return the clock of ages and limits, in seconds: `TrustedTime.passed`."""
        return self._time.passed(self._clocks.mono())

    def take_shift(self) -> float:
        return self._time.take_shift()

    @property
    def why(self) -> str:
        """Why the wall clock is not used, for people; empty while it is."""
        return self._why

    @property
    def asks(self) -> bool:
        """Whether an outside time is needed."""
        return self._time.asks

    def update(self) -> None:
        """Compare the wall clock with the time; must be called often."""
        unix, mono, before = self._clocks.unix(), self._clocks.mono(), self._time.state
        self._time.update(unix, mono)
        self._note(before)

    def cloud_due(self, provider: Provider) -> bool:
        """Return whether the cloud must be asked for its time now."""
        return self.asks and isinstance(provider, CloudClock) and self._clocks.mono() >= self._ask_at

    def ask_cloud(self, provider: Provider) -> None:
        """Decide by the cloud's time. Blocks. The tick that follows reports a cloud that does not answer."""
        assert isinstance(provider, CloudClock)
        began = self._clocks.mono()
        self._ask_at = began + ASK_S
        try:
            cloud = provider.cloud_time()
        except (SpotfleetError, OSError):
            return
        mono = self._clocks.mono()
        if mono - began < BOUND_S:
            self._answered_at = mono
            self._confirm(cloud + (mono - began) / 2, mono, by_cloud=True)

    def compare_hosts(self, readings: Iterable[tuple[float, float]], provider: Provider) -> None:
        """Decide by the hosts' clocks, where the cloud has none or does not answer. `readings`: of each host, when it
        arrived (monotonic), and its clock then."""
        mono = self._clocks.mono()
        if not self.asks or (isinstance(provider, CloudClock)
                             and mono - max(self._answered_at, self._time.since) < CLOUD_S):
            return
        found = hosts_time([clock + mono - at for at, clock in readings if at >= self._time.since])
        if found is not None:
            self._confirm(found, mono, by_cloud=False)

    def _confirm(self, outside: float, mono: float, *, by_cloud: bool) -> None:
        before, confirmed = self._time.state, self._time.confirmed
        self._time.confirm(outside, self._clocks.unix(), mono, by_cloud=by_cloud)
        self._note(before)
        if self._time.confirmed != confirmed:
            self._save_at = -math.inf

    def _note(self, before: object) -> None:
        self._why = self._time.why(self._clocks.unix(), self._clocks.mono())
        if self._time.state is not before:
            log.warning("%s", self._why or "the machine's clock is right, and is used again")
            self._save_at = self._ask_at = -math.inf

    # ---- record

    @property
    def save_due(self) -> bool:
        return self._clocks.mono() >= self._save_at

    def save(self) -> None:
        """Write the record. Blocks. A full disk leaves the last one, which is as good on the same boot."""
        record = ClockRecord(self.unix(), self._clocks.boot(), self._time.confirmed)
        self._save_at = self._clocks.mono() + SAVE_S
        try:
            write_json(self._path, to_json(record.sealed()))
        except OSError as error:
            if not is_full(error):
                raise


def _read(path: Path) -> ClockRecord | None:
    try:
        record = from_json(ClockRecord, json.loads(path.read_bytes()))
        if record.sealed() != record:
            raise ValueError("its digest differs")
        return record
    except FileNotFoundError:
        return None
    except ValueError as error:  # damaged: the ledger's newest event counts instead
        log.warning("%s cannot be read, and is written anew: %s", path.name, error)
        return None
