"""Processes and folders of a fleet's Ray cluster on one machine. No Ray.

A cluster has one folder (`protocol/ray_cluster.py: folder_of`). Each process that is started for the cluster has a
subfolder of it as MARK in its environment, and all its children inherit that.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from spotfleet.errors import UsageError

MARK = "SPOTFLEET_RAY_FOLDER"
KILL_S = 10.0
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",  # even then a head would report to Ray's authors, once
    "RAY_enable_metrics_collection": "0",
    "RAY_raylet_start_wait_time_s": "180",  # the default is too short for a busy machine
    "RAY_worker_niceness": "0",  # else 15: on a busy machine workers wait for everybody else
}
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def make(folder: Path) -> Path:
    """Make a folder that only we can enter. Ray opens the folder that it is given to everybody: it lies in one of ours.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UsageError(f"{folder} is not a folder of ours", hint="remove it")
    return folder


def marked(folder: Path) -> list[int]:
    """Return the processes that were started for a cluster or a part of it, except this one."""
    wanted = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # ended, or another user's
        if any(v == wanted or v.startswith(wanted + b"/") for v in variables):
            found.append(int(entry.name))
    return found


def end_all(folder: Path, but: frozenset[int] = frozenset()) -> None:
    """Kill all processes of a folder, and remove it."""
    end = time.monotonic() + KILL_S
    while (left := [pid for pid in marked(folder) if pid not in but]) and time.monotonic() < end:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def environment(own: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment of a process of the cluster: no variable of another one, nothing in the home folder."""
    kept = {k: v for k, v in own.items() if not k.startswith("RAY_") or k.startswith("RAY_AUTH_")}
    return kept | SETTINGS | {MARK: str(folder)}


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends, however that ends."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def answers(address: str, timeout_s: float = 1.0) -> bool | None:
    """Return whether something listens at ADDRESS:PORT: False is the kernel's own answer that nothing does, None none.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True
