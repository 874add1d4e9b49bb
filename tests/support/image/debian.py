"""A Debian 12 in a folder: what a stock cloud image has, but for the kernel. Commands run in it as root.

Its base is downloaded once by mmdebstrap, as are the wheels for its pip; ~/.cache/spotfleet-tests keeps both.
Each command has its own process ids and mounts, and cannot switch anything off. The network is this machine's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGES = "apt,ca-certificates,kmod,openssh-server,systemd,systemd-sysv"
COMPONENTS = "main,contrib,non-free,non-free-firmware"
PYTHON = "3.11"  # Debian 12 has it
MAKE_S, COMMAND_S = 900.0, 600.0
WHEELS = "/wheels"
ROOM_BYTES = 4 << 30
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENTER = """
set -e
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount --bind "$2" "$1{wheels}"
root=$1
shift 2
exec setpriv --bounding-set -sys_boot --inh-caps -sys_boot chroot "$root" /usr/bin/env -i "$@"
""".replace("{wheels}", WHEELS)


def room() -> str | None:
    """Return a folder for such a system: in memory, where there is enough, since it has 40,000 files."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > ROOM_BYTES else None


def why_not() -> str:
    """Return the reason why no such system can be made here; "" if it can."""
    if os.geteuid() != 0:
        return "a Debian in a folder takes root"
    missing = [name for name in ("mmdebstrap", "unshare", "setpriv", "chroot") if shutil.which(name) is None]
    return f"a Debian in a folder is made with {' and '.join(missing)}: apt-get install mmdebstrap" if missing else ""


class Debian:
    def __init__(self, root: Path, wheels: Path) -> None:
        self.root, self.wheels = root, wheels
        self.root.mkdir(parents=True)
        subprocess.run(["tar", "-xf", str(_base()), "-C", str(root), "--numeric-owner"], check=True, timeout=MAKE_S)
        (root / WHEELS.lstrip("/")).mkdir()
        shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")

    def path(self, inside: str) -> Path:
        return self.root / inside.lstrip("/")

    def argv(self, command: Sequence[str], env: dict[str, str] | None = None) -> list[str]:
        variables = {"PATH": PATH, "SYSTEMD_OFFLINE": "1", **(env or {})}
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "-", str(self.root),
                str(self.wheels), *(f"{name}={value}" for name, value in variables.items()), *command]

    def run(self, *command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.argv(command, env), capture_output=True, text=True, timeout=COMMAND_S,
                              stdin=subprocess.DEVNULL)

    def ok(self, *command: str, env: dict[str, str] | None = None) -> str:
        done = self.run(*command, env=env)
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def tree(self, inside: str = "/") -> dict[str, str]:
        """Map each path below `inside` to its mode, owner and digest, but for what is mounted."""
        found = {}
        for folder, names, files in os.walk(self.path(inside)):
            at = os.path.relpath(folder, self.root)
            if at == ".":
                names[:] = [n for n in names if n not in ("proc", "dev", "sys", WHEELS.lstrip("/"))]
            for name in (*names, *files):
                path = Path(folder, name)
                about = path.lstat()
                kind = f"{stat.filemode(about.st_mode)} {about.st_uid}:{about.st_gid}"
                if path.is_symlink():
                    kind += f" -> {path.readlink()}"
                elif path.is_file():
                    kind += f" {hashlib.sha256(path.read_bytes()).hexdigest()}"
                found[os.path.join(at, name)] = kind
        return found


def _base() -> Path:
    with _alone() as cache:
        base = cache / f"bookworm-{hashlib.sha256(f'{PACKAGES} {COMPONENTS}'.encode()).hexdigest()[:8]}.tar"
        if not base.exists():
            part = base.with_suffix(".part.tar")
            subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}",
                            f"--components={COMPONENTS}", "bookworm", str(part)], check=True, timeout=MAKE_S)
            part.replace(base)
        return base


def wheelhouse(requirements: Sequence[str]) -> Path:
    """Return a folder with wheels of these requirements and all that they need. They come from where pip is set up to
    find them, so torch may be that of the developer's machine."""
    with _alone() as cache:
        key = hashlib.sha256(" ".join(sorted(requirements)).encode()).hexdigest()[:8]
        folder, whole = cache / f"wheels-{PYTHON}-{key}", cache / f"wheels-{PYTHON}-{key}" / "whole"
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            # -I: without the guard of the tests' network, which the package index is outside of
            subprocess.run([sys.executable, "-I", "-m", "pip", "download", "-qq", "--disable-pip-version-check", "-d",
                            str(folder), "--python-version", PYTHON, "--only-binary", ":all:", *requirements],
                           check=True, timeout=MAKE_S)
            whole.touch()
        return folder


@contextlib.contextmanager
def _alone() -> Iterator[Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spotfleet-tests"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache
