"""Inventory of the working directory and of `file_mounts`: names and `stat` results; no contents are read.

Always left out: `.git`, `__pycache__`, `.venv` and any other virtual environment, spotfleet's own home directory,
sockets and devices, symbolic links that lead out of the directory; also the names that `ignore.py` leaves out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spotfleet.bundle import ignore
from spotfleet.errors import UsageError

ALWAYS = frozenset({".git", "__pycache__", ".venv"})
TELL_EACH = 1000  # progress is reported after so many entries
PATH_BYTES = 3000  # a host's system takes 4096, including its own folder


class File(NamedTuple):
    name: str  # in the bundle
    path: str  # on this machine
    bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    runs: bool  # its owner may execute it


@dataclass(frozen=True)
class Tree:
    """Everything that travels, sorted by name."""

    folders: tuple[str, ...]
    links: tuple[tuple[str, str], ...]  # name, target
    files: tuple[File, ...]
    left_out: tuple[str, ...]  # "NAME: why", for entries that the user might miss; ignored files are not listed

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class _Walk:
    def __init__(self, shut: frozenset[str], tell: Callable[[int], object]) -> None:
        self.folders: set[str] = set()
        self.links: dict[str, str] = {}
        self.files: dict[str, File] = {}
        self.left_out: list[str] = []
        self._shut, self._tell, self._seen = shut, tell, 0

    def below(self, top: str, prefix: str) -> None:
        """Add the contents of `top`, which is resolved, so that it can be compared with `shut`."""
        left: list[tuple[str, str, list[ignore.Rules]]] = [(top, prefix, [])]
        while left:
            path, prefix, above = left.pop()
            rules = [*above, *ignore.read(path, os.fsencode(prefix))]
            try:
                entries = list(os.scandir(path))
            except OSError as error:
                self.left_out.append(f"{shown(prefix.rstrip('/')) or path}: cannot be read ({error.strerror})")
                continue
            for entry in entries:
                name, is_folder = prefix + entry.name, entry.is_dir(follow_symlinks=False)
                if entry.name in ALWAYS or entry.path in self._shut or \
                        (rules and ignore.ignored(os.fsencode(name), is_folder, rules)):
                    continue
                if len(os.fsencode(name)) > PATH_BYTES:
                    self.left_out.append(f"{shown(name)[:80]}...: its path has more than {PATH_BYTES} bytes")
                elif not is_folder:
                    self.one(name, entry.path, entry.stat)
                elif not os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
                    self.folders.add(name)
                    left.append((entry.path, name + "/", rules))

    def one(self, name: str, path: str, look: Callable[..., os.stat_result]) -> None:
        """Add a file or a link."""
        self._seen += 1
        if not self._seen % TELL_EACH:
            self._tell(self._seen)
        try:
            found = look(follow_symlinks=False)
            target = os.readlink(path) if stat.S_ISLNK(found.st_mode) else ""
        except OSError as error:
            self.left_out.append(f"{shown(name)}: cannot be read ({error.strerror})")
            return
        if target:
            inside = os.path.normpath(os.path.join(os.path.dirname(name), target))
            if os.path.isabs(target) or inside == ".." or inside.startswith("../"):
                self.left_out.append(f"{shown(name)}: a link out of the working directory (to {shown(target)})")
            else:
                self.links[name] = target
        elif stat.S_ISREG(found.st_mode):
            self.files[name] = File(name, path, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino,
                                    bool(found.st_mode & stat.S_IXUSR))
        else:
            self.left_out.append(f"{shown(name)}: neither file nor folder")

    def mount(self, name: str, source: Path) -> None:
        """Add `source` at `name`, replacing the entry of the working directory there."""
        parts = name.split("/")
        for end in range(1, len(parts)):
            self._clear("/".join(parts[:end]), keep_folder=True)
            self.folders.add("/".join(parts[:end]))
        self._clear(name, keep_folder=source.is_dir())
        if source.is_dir():
            self.folders.add(name)
            self.below(str(source.resolve()), name + "/")
        else:
            self.one(name, str(source.resolve()), source.resolve().stat)

    def _clear(self, name: str, *, keep_folder: bool) -> None:
        self.links.pop(name, None)
        self.files.pop(name, None)
        if not keep_folder and name in self.folders:
            below = name + "/"
            self.folders = {n for n in self.folders if n != name and not n.startswith(below)}
            self.links = {n: t for n, t in self.links.items() if not n.startswith(below)}
            self.files = {n: f for n, f in self.files.items() if not n.startswith(below)}


def scan(workdir: Path, *, mounts: Mapping[str, Path] | None = None, houses: Iterable[Path] = (),
         tell: Callable[[int], object] = lambda count: None) -> Tree:
    """Return the inventory. `mounts` puts further files or folders at names inside the bundle; `houses` are spotfleet's
    own folders. `tell` gets the number of files found so far.

    Raises UsageError when something named does not exist.
    """
    if not workdir.is_dir():
        raise UsageError(f"workdir: {workdir} is not a folder", hint="set `workdir` in the fleet file")
    walk = _Walk(frozenset(str(h.resolve()) for h in houses), tell)
    walk.below(str(workdir.resolve()), "")
    for name, source in sorted((mounts or {}).items()):
        if not source.exists():
            raise UsageError(f"file_mounts.{name}: {source} does not exist",
                             hint="make it, or change `file_mounts` in the fleet file and `spotfleet up FILE` again")
        walk.mount(name, source)
    return Tree(tuple(sorted(walk.folders)), tuple(sorted(walk.links.items())),
                tuple(walk.files[name] for name in sorted(walk.files)), tuple(sorted(walk.left_out)))


def shown(name: str) -> str:
    """Return a name in a form that a terminal can print, whatever bytes it has."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")

