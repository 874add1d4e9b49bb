"""Root file system of Debian with Python, made once by mmdebstrap and kept between runs; it stands for an image."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}  # Debian's releases by their Python
PACKAGES = "python3,libstdc++6"
# Namespaces of its own: a command that is killed leaves neither a process nor a mount, such as of /proc, in its folder.
ALONE = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")
LIMIT_S = 600.0  # 18 s on a quiet machine


def why_not() -> str:
    """Return the reason why no container can run here; "" if it can."""
    if os.geteuid() != 0:
        return "mounts and namespaces need root"
    if missing := [name for name in ("runc", "mmdebstrap", "unshare") if shutil.which(name) is None]:
        return f"there is no {' and no '.join(missing)}: scripts/setup-tests installs it on Debian"
    if sys.version_info[:2] not in SUITES:
        return f"no release of Debian has Python {sys.version_info[0]}.{sys.version_info[1]}, for which torch is here"
    return ""


def make() -> Path:
    """Return the folder. Raises OSError, with mmdebstrap's last lines, where it cannot be made."""
    suite = SUITES[sys.version_info[:2]]

    def install(folder: Path) -> None:
        run(*ALONE, "mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(folder))

    return kept(f"{suite}-{PACKAGES.replace(',', '-')}", install)


def kept(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that is kept between runs; `make` makes it once. Raises what `make` raises."""
    top = Path(tempfile.gettempdir(), f"spotfleet-root-fs-{os.getuid()}")
    top.mkdir(mode=0o700, exist_ok=True)
    with (top / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (top / name).is_dir():
            fresh = top / "fresh"
            shutil.rmtree(fresh, ignore_errors=True)
            make(fresh)
            fresh.rename(top / name)
    return top / name


def run(*command: str, cwd: Path | None = None) -> None:
    """Run a command that may take a while. Raises OSError with its last lines."""
    try:
        done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} has not ended after {LIMIT_S:g} s") from None
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr[-500:]}")


def torch_mount() -> str:
    """Return a mount that gives the root file system's Python the packages of this one."""
    return f"{sysconfig.get_paths()['purelib']}:/usr/lib/python3/dist-packages:ro"
