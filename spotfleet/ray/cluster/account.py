"""User of the head's processes and of submitted scripts, where the dispatcher is root: one with no rights of its own.

    head.py, root --HeadUser.enter, between fork and exec--> Ray's head, observer, scripts: a user id of this cluster

The id is in no file of the machine. Its processes gain no rights by executing a program, cannot read the dispatcher's
files, and reach no metadata server: a rule of the kernel's routing refuses their connections to it. The environment of
a dispatcher often lies in a folder that only root can enter. Then they see an empty folder in its place, with the
environment alone, by a mount of their own that ends with them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pwd
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

FIRST_ID, IDS = 300_000, 200_000  # above users' ids, below the range that systemd uses for containers
METADATA = (("-4", "169.254.0.0/16"), ("-6", "fd00:ec2::254/128"), ("-6", "fd20:ce::254/128"))
PRIORITY = "100"  # before the machine's own rules
WHOLE = "complete"  # file in an environment that bootstrap.sh has made
TRY = "import importlib.util as u\nfor name in 'ray', 'spotfleet':\n    open(u.find_spec(name).origin).close()"
TRY_S = 30.0
# Folders of the dispatcher's user, which another one cannot enter.
DROPPED = ("XDG_RUNTIME_DIR", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
_NEW_NAMESPACE, _BIND, _MOVE, _RECURSIVE, _PRIVATE = 0x20000, 0x1000, 0x2000, 0x4000, 0x40000
_PR_SET_NO_NEW_PRIVS = 38
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class HeadUser:
    """A user id, and the folders that its processes see empty but for the environment."""

    id: int
    seen: tuple[tuple[str, str], ...] = ()  # (folder, where they see it)
    hidden: tuple[str, ...] = ()
    shown: tuple[tuple[str, str], ...] = ()  # (folder in a hidden one that they see, an empty folder elsewhere)

    def enter(self) -> None:
        """Become this user, for good. Raises OSError. Called in a child process, before it runs its program."""
        _check(_libc.unshare(_NEW_NAMESPACE), "unshare")
        _mount("none", "/", _RECURSIVE | _PRIVATE)
        for folder, target in self.seen:
            _mount(folder, target, _BIND)
        self._hide()
        os.setgroups([])
        os.setresgid(self.id, self.id, self.id)
        os.setresuid(self.id, self.id, self.id)
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")

    def _hide(self) -> None:
        for folder, outside in self.shown:
            _mount(folder, outside, _BIND | _RECURSIVE)
        for folder in self.hidden:
            _mount("tmpfs", folder, 0, "tmpfs", "mode=755,size=1m")
        mask = os.umask(0o022)
        for folder, outside in self.shown:
            os.makedirs(folder, 0o755, exist_ok=True)
            _mount(outside, folder, _MOVE)
        os.umask(mask)

    def end_all(self) -> None:
        """Kill every process of this user, also those whose environment does not name the cluster any more."""
        subprocess.run(["true"], preexec_fn=self._kill_all, stdin=subprocess.DEVNULL, cwd="/", check=False)

    def _kill_all(self) -> None:
        os.setresuid(self.id, self.id, self.id)
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all that this user may signal, except for the caller

    def give(self, folder: Path) -> None:
        """Make this user the owner of a folder and of all that lies in it."""
        os.chown(folder, self.id, self.id)
        for top, folders, files in os.walk(folder):
            for name in (*folders, *files):
                os.chown(os.path.join(top, name), self.id, self.id, follow_symlinks=False)


def find(folder: Path, environ: Mapping[str, str]) -> tuple[HeadUser | None, str]:
    """Return the account for the cluster in `folder`, or None and the reason why there is none."""
    if os.getuid() != 0:
        return None, "the dispatcher does not run as root"
    plain = HeadUser(_free_id(folder))
    if not _try(plain, environ):
        return plain, ""
    account = _in_view(plain, folder)
    if (why := _try(account, environ)) and (Path(sys.prefix) / WHOLE).exists():
        _open(Path(sys.prefix))
        why = _try(account, environ)
    return (None, f"another user cannot use the Python environment {sys.prefix}: {why}") if why else (account, "")


def _in_view(account: HeadUser, folder: Path) -> HeadUser:
    """Return the account for processes that see the environment although it lies in closed folders."""
    needed = dict.fromkeys((sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix),
                            str(Path(sys.executable).resolve().parents[1])))
    closed = {each: found for each in needed if (found := closed_folder(Path(each))) is not None}
    shown = [(each, str(folder / f"e{number}")) for number, each in enumerate(closed)]
    for _, outside in shown:
        Path(outside).mkdir(exist_ok=True)
    return replace(account, hidden=tuple(dict.fromkeys(map(str, closed.values()))), shown=tuple(shown))


def environment(environ: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the variables for a process of another user, whose home folder is `home`."""
    return {k: v for k, v in environ.items() if k not in DROPPED} | {"HOME": str(home), "USER": "ray", "LOGNAME": "ray"}


def closed_folder(folder: Path) -> Path | None:
    """Return the topmost folder on the way to `folder` that other users cannot enter."""
    way = [*reversed(folder.parents), folder][1:]
    return next((each for each in way if not each.stat().st_mode & stat.S_IXOTH), None)


def rules(account: HeadUser) -> list[list[str]]:
    """Return the arguments of `ip` that keep this user from the metadata servers of clouds, without "add"."""
    return [[family, "rule", "to", net, "ipproto", "tcp", "uidrange", f"{account.id}-{account.id}", "priority",
             PRIORITY, "prohibit"] for family, net in METADATA]


def close_metadata(account: HeadUser) -> str:
    """Refuse this user's connections to metadata servers, until `open_metadata`; return why that fails, or ""."""
    open_metadata(account)
    for words in rules(account):
        if words[0] == "-6" and not Path("/proc/net/if_inet6").exists():
            continue  # the kernel has no IPv6
        if why := _ip([*words[:2], "add", *words[2:]]):
            open_metadata(account)
            return why
    return ""


def open_metadata(account: HeadUser) -> None:
    """Remove the rules of this user, also those of a supervisor that was killed."""
    for words in rules(account):
        while not _ip([*words[:2], "del", *words[2:]]):
            pass


def forget(folder: Path, *, clouds: bool) -> None:
    """End what the user of the cluster in `folder` has left. `clouds`: there may be rules for it."""
    if os.getuid() == 0:
        user = HeadUser(_free_id(folder))
        user.end_all()
        if clouds:
            open_metadata(user)


def _ip(words: list[str]) -> str:
    try:
        done = subprocess.run(["ip", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRY_S,
                              env={"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"ip: {error}"
    return "" if done.returncode == 0 else done.stderr.strip() or f"ip ended with status {done.returncode}"


def _free_id(folder: Path) -> int:
    first = int(hashlib.sha256(str(folder).encode()).hexdigest(), 16)
    return next(each for n in range(IDS) if not _is_known(each := FIRST_ID + (first + n) % IDS))


def _is_known(number: int) -> bool:
    try:
        pwd.getpwuid(number)
    except KeyError:
        return False
    return True


def _try(account: HeadUser, environ: Mapping[str, str]) -> str:
    """Return why this user cannot import Ray and this package; "" if it can."""
    kept = {name: environ[name] for name in ("PATH", "PYTHONPATH") if name in environ}
    try:
        done = subprocess.run([sys.executable, "-c", TRY], env=kept, cwd="/", stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=TRY_S, preexec_fn=account.enter, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]


def _open(folder: Path) -> None:
    """Let everybody read an environment, which holds packages only. The folders above it stay closed."""
    for top, _, files in os.walk(folder):
        os.chmod(top, os.stat(top).st_mode | 0o055)
        for name in files:
            path = os.path.join(top, name)
            found = os.lstat(path)
            if stat.S_ISREG(found.st_mode):
                os.chmod(path, found.st_mode | (0o055 if found.st_mode & stat.S_IXUSR else 0o044))


def _mount(source: str, target: str, flags: int, kind: str = "", data: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags),
                       data.encode() or None)
    _check(done, f"mount {target}")


def _check(done: int, what: str) -> None:
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
