"""The first process of a machine (see `machines.py`): makes its file system, starts its sshd, buries what ends.

    python -I -S machine_init.py '{"name": ..., "fresh": [...], "shared": [...], "linked": [...], "hidden": [...],
                                   "folders": [...], "files": {PATH: [TEXT, MODE]}, "size": "64m", "user_id": ...,
                                   "masks": {FOLDER: {NAME: TEXT}}, "door": [COMMAND...]}'

Runs in namespaces of its own, as process 1. Its file system is the real one, seen through an overlay whose changes are
in memory: `fresh` folders begin empty, `shared` ones are read-only and as they are outside, `linked` ones can also be
written to, as a disk in the network, `hidden` files are gone. Folders of `masks`, also in shared ones, hold these files
and nothing else.

Prints a line once the machine stands, and whenever its door opens again, for a line on stdin; and OFF on stderr when it
gets POWER_OFF, as systemd would: the machine wants its power to be switched off. It ends with this process: at the end
of stdin, or when it is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

POWER_OFF, OFF = signal.SIGRTMIN + 4, "power off"
CHANGES = 9  # file descriptor of the folder that holds all that differs from the real file system
_BIND, _REC, _PRIVATE, _RDONLY, _REMOUNT, _DETACH, _NOSUID, _NODEV = 4096, 16384, 1 << 18, 1, 32, 2, 2, 4
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {kind or 'bind'} {source} on {target}")


def make_room(top: Path, spec: dict[str, Any]) -> None:
    """What the overlay adds to the real file system, or takes from it."""
    for name in spec["fresh"]:
        folder = top / name.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        os.setxattr(folder, "trusted.overlay.opaque", b"y")
        folder.chmod(0o1777 if "tmp" in name else 0o711 if name == "/root" else 0o755)
    for name in spec["hidden"]:
        whiteout = top / name.lstrip("/")
        whiteout.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(whiteout, stat.S_IFCHR, os.makedev(0, 0))
    for name in [*spec["shared"], *spec["linked"], *spec["folders"]]:
        (top / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name, (text, mode) in spec["files"].items():
        path = top / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        if path.parent.name == ".ssh":
            path.parent.chmod(0o700)
        if name.startswith("/home/"):
            for owned in (path, path.parent, path.parent.parent):
                os.chown(owned, spec["user_id"], spec["user_id"])


def make_file_system(spec: dict[str, Any]) -> None:
    mount("none", "/", flags=_REC | _PRIVATE)
    place = Path("/run/netns")  # any folder that is there: what is mounted on it is seen in here only
    mount("machine", str(place), "tmpfs", options=f"size={spec['size']},mode=755")
    changes, work, root = place / "changes", place / "work", place / "root"
    for folder in (changes, work, root):
        folder.mkdir()
        folder.chmod(0o755)
    make_room(changes, spec)
    mount("machine", str(root), "overlay", options=f"lowerdir=/,upperdir={changes},workdir={work}")
    for name in spec["shared"]:
        mount(name, f"{root}{name}", flags=_BIND)
        mount(name, f"{root}{name}", flags=_BIND | _REMOUNT | _RDONLY)
    for name in spec["linked"]:
        mount(name, f"{root}{name}", flags=_BIND)
    mount("/dev", f"{root}/dev", flags=_BIND | _REC)
    mount("shm", f"{root}/dev/shm", "tmpfs", _NOSUID | _NODEV)
    mount("/sys", f"{root}/sys", flags=_BIND | _REC)
    mount("proc", f"{root}/proc", "proc")
    for number, (name, files) in enumerate(spec["masks"].items()):
        mask = place / f"mask{number}"
        mask.mkdir()
        for file, text in files.items():
            (mask / file).write_text(text)
        mount(str(mask), f"{root}{name}", flags=_BIND)
    seen = os.open(changes, os.O_DIRECTORY)
    os.dup2(seen, CHANGES)
    os.close(seen)
    os.chdir(root)
    if _libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b".") != 0:
        raise OSError(ctypes.get_errno(), "pivot_root")
    if _libc.umount2(b".", _DETACH) != 0:
        raise OSError(ctypes.get_errno(), "umount of the old root")
    os.chdir("/")


def open_door(spec: dict[str, Any]) -> None:
    if spec["door"]:
        with open("/var/log/door.log", "wb") as log:
            subprocess.Popen(spec["door"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    print("stands", flush=True)


def bury_until_the_end(spec: dict[str, Any]) -> None:
    wake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    for number in (signal.SIGCHLD, POWER_OFF):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    while True:
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        ready, _, _ = select.select([wake, sys.stdin.fileno()], [], [])
        if sys.stdin.fileno() in ready:
            if not os.read(sys.stdin.fileno(), 1):
                return
            open_door(spec)
        if wake in ready and POWER_OFF in os.read(wake, 4096):
            print(OFF, file=sys.stderr, flush=True)


def main() -> None:
    spec = json.loads(sys.argv[1])
    make_file_system(spec)
    socket.sethostname(spec["name"])
    os.environ["HOME"] = "/root"
    open_door(spec)
    bury_until_the_end(spec)


if __name__ == "__main__":
    main()
