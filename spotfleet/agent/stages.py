"""Parts of this host's boot, measured by its own clock since the start of the kernel.

`bootstrap.sh` writes the file `stages` in the host's folder: lines "NAME BOOT_ID SECONDS", of which the first of a name
and of this boot counts.

    lent, own   the set-up begins: on a machine that a cloud started for this host, or on one that was there before
    ready       the packages are ready, and the agent's process starts
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from spotfleet.model import BootStages

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class BootClock:
    """Parts of this host's boot, which end when its agent has connected."""

    def __init__(self, home: Path) -> None:
        self._home, self._found = home, BootStages()

    def stages(self, *, connected: bool) -> BootStages:
        """Return the parts until now, or until `connected` was true for the first time."""
        if not connected or self._found.agent_s is None:
            self._found = measured(_read(self._home / "stages"), _read(_BOOT_ID).strip(), _process_started_s(),
                                   time.clock_gettime(time.CLOCK_BOOTTIME))
        return self._found


def measured(text: str, boot_id: str, started_s: float, now_s: float) -> BootStages:
    """Return the parts of the boot by the file `stages`. `started_s`: the start of the agent's process."""
    reached: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        boot, _, seconds = rest.partition(" ")
        if boot == boot_id and seconds.replace(".", "", 1).isdecimal():
            reached.setdefault(name, float(seconds))
    began, ready = reached.get("lent", reached.get("own")), reached.get("ready")
    return BootStages(
        system_s=reached.get("lent"),
        setup_s=None if began is None or ready is None else round(max(0.0, ready - began), 2),
        agent_s=round(max(0.0, now_s - (started_s if ready is None else ready)), 2))


def _process_started_s() -> float:
    """Return when this process started, in seconds since the start of the kernel. Source: proc_pid_stat(5), field 22.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
