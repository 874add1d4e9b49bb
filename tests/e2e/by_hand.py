"""A house of its own for a script that is started by hand: kept on disk when something went wrong."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from spotfleet.providers.local import LocalCloud
from tests.support.e2e.e2e_stage import Stage


@contextmanager
def house(name: str) -> Iterator[Stage]:
    """A home and a working directory; all that runs in it is ended, and what is left then is an error."""
    top = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    work = top / "work"
    work.mkdir()
    os.environ |= {"SPOTFLEET_HOME": str(top / "home"), "SPOTFLEET_LOCAL_OWNER_PID": str(os.getpid())}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(work)
    passed = False
    try:
        yield Stage(top / "home", work)
        passed = True
    finally:
        LocalCloud(top / "home").shutdown()
        if passed and not left(top):
            os.chdir(top.parent)
            shutil.rmtree(top, ignore_errors=True)
        else:
            print(f"kept: {top}; processes left: {left(top)}", flush=True)


def left(top: Path) -> list[str]:
    """Processes, other than this one, that were started with something below `top` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(str(top) in value for value in process.environ().values()):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        except psutil.Error:
            continue  # it has ended, or is none of ours
    return found
