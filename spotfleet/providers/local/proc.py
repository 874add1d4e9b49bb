"""Processes of this machine, read from /proc; without /proc, by process group only."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
MARK = "SPOTFLEET_LOCAL_HOST"  # in the environment of every process of a host: its provider_id
KILL_S = 5.0  # a process that survives SIGKILL this long is stuck in the kernel: given up, and reported


@dataclass(frozen=True)
class HostProcess:
    pid: int
    parent: int
    session: int
    started: int  # clock ticks since boot: with the pid, an identity
    zombie: bool


def read_process(pid: int) -> HostProcess | None:
    """Return the process, or None when it is gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before ")" may contain any character
    return HostProcess(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in "ZX")


def alive(pid: int, started: int) -> bool:
    """Return whether this very process runs; without /proc, whether the pid is in use."""
    if not PROC.is_dir() or not read_process(os.getpid()):
        return _signal(pid, 0)
    found = read_process(pid)
    return found is not None and not found.zombie and found.started == started


def started(pid: int) -> int:
    """Return the start of a process in clock ticks since boot; 0 if it is gone."""
    found = read_process(pid)
    return found.started if found else 0


def of_host(session: int, mark: str) -> list[HostProcess]:
    """List every live process of a host, the session's leader first, then the oldest: in its session, with its mark, or
    a child of such a process.

    `session` 0: only marks and children count. A caller passes it where the leader died long ago, as another program's
    session may have that number by now.
    """
    pids = [int(name) for name in os.listdir(PROC) if name.isdigit()] if PROC.is_dir() else []
    everything = [p for pid in pids if pid != os.getpid() and (p := read_process(pid)) is not None and not p.zombie]
    found = {p.pid: p for p in everything if (session > 0 and p.session == session) or _marked(p.pid, mark)}
    grown = True
    while grown:
        children = [p for p in everything if p.parent in found and p.pid not in found]
        found |= {p.pid: p for p in children}
        grown = bool(children)
    return sorted(found.values(), key=lambda p: (p.pid != session, p.started, p.pid))


def kill_host(session: int, mark: str, grace_s: float = 0.0) -> list[int]:
    """End all processes of a host; return the pids that survive, [] if none.

    With `grace_s` they get SIGTERM first. SIGKILL goes to the leader first, so that it cannot report the
    others' deaths: a machine that loses power reports nothing.
    """
    if grace_s > 0:
        for process in of_host(session, mark):
            _signal(process.pid, signal.SIGTERM)
        _wait_for_none(session, mark, grace_s)
    deadline = time.monotonic() + KILL_S
    while True:
        left = of_host(session, mark)
        for process in left:
            _signal(process.pid, signal.SIGKILL)
        if not left:
            _kill_group(session)
            return []
        if time.monotonic() > deadline:
            return [p.pid for p in left]
        time.sleep(0.01)


def _wait_for_none(session: int, mark: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while of_host(session, mark) and time.monotonic() < deadline:
        time.sleep(0.05)


def _marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _kill_group(group: int) -> None:
    if not PROC.is_dir() and group > 1:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
