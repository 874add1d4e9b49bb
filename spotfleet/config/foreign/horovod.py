"""Horovod's lists of hosts as the machines of a fleet: `-H host:slots,...`, a hostfile, a discovery script."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spotfleet.config.foreign.source import without_empty

SLOTS = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)(?:\s.*)?")
HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class HorovodHosts:
    """Where workers run: a list of hosts with their slots, or a script that prints one."""

    hosts: tuple[tuple[str, int], ...] = ()
    script: str = ""  # path of the discovery script
    slots: int = 1  # slots of each host that names none

    @property
    def here(self) -> bool:
        """Whether all workers run on this machine."""
        return not self.script and all(host in HERE for host, _ in self.hosts)


def from_list(text: str, slots: int = 0) -> tuple[tuple[str, int], ...]:
    """Parse "host1:2,host2:4". Raises ValueError, with the word that is wrong."""
    return tuple(_host(word.strip(), slots) for word in text.split(",") if word.strip())


def from_file(text: str, slots: int = 0) -> tuple[tuple[str, int], ...]:
    """Parse a hostfile: lines `host slots=N`, `host:N` or `host`. Raises ValueError, with the line's number."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        try:
            named = SLOTS.fullmatch(entry)
            found.append((named[1], int(named[2])) if named else _host(entry, slots))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return tuple(found)


def _host(word: str, slots: int) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[^\]]+\]|[^\s:,=]+)(?::(\d+))?", word)
    if found is None or found[2] == "0":
        raise ValueError(f"expected HOST:SLOTS, got {word!r}")
    return found[1].strip("[]"), int(found[2] or slots or 1)


def hosts_for(workers: int, slots: int) -> int:
    """Return how many hosts of so many slots hold the workers."""
    return math.ceil(workers / max(1, slots))


def fleet_file(name: str, where: HorovodHosts, dispatcher: str, nodes: Sequence[int], *, user: str = "", port: int = 0,
               identity_file: str = "", python: str = "") -> dict[str, Any]:
    """Return the fleet file. `nodes`: fewest and most hosts; `dispatcher`: the machine that runs no workers."""
    least, most = nodes
    if where.here:
        return {"name": name, "provider": "local", "nodes": {"min": least, "max": most},
                "resources": {"instance_type": "cpu.small", "use_spot": False}}
    ssh = without_empty({
        "dispatcher": dispatcher, "user": user, "port": port or None, "identity_file": identity_file,
        "hosts": [{"host": host, "slots": slots} for host, slots in where.hosts],
        "discovery_script": where.script, "slots": where.slots if where.script and where.slots > 1 else None,
    })
    return {"name": name, "provider": "ssh", "nodes": {"min": least, "max": most}, "ssh": ssh,
            "environment": without_empty({"python": python}) | {"inherit": True}}
