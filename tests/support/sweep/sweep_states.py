"""State of a sweep's world: a digest of all that outlives the victim's process.

Two crash points with the same state are one: the next run finds the same account, disks and time, and the same memory
in every other process. A read request, for one, leaves the state that was before it.
"""

from __future__ import annotations

import hashlib
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from datetime import date, datetime, timedelta
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

PLAIN = (type(None), bool, int, float, complex, str, bytes, datetime, date, timedelta, count, range, Path)
CODE = (type, types.ModuleType, types.BuiltinFunctionType, property)
MACHINERY = ("threading", "_thread", "queue", "logging", "weakref", "re", "random", "_random")
INDEX = "-shm"  # sqlite makes it anew from its log


def digest(*roots: object, opaque: Iterable[object] = ()) -> str:
    """Return the hash of everything that can be reached from `roots`, by value, but not through `opaque`. Locks,
    threads, modules and classes count by their kind; functions by their name and what they hold."""
    walk = _Walk(opaque)
    for root in roots:
        walk.add(root)
    return walk.hash.hexdigest()


class _Walk:
    def __init__(self, opaque: Iterable[object]) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._kept = list(opaque)  # so that no id is used twice
        self._numbers = {id(o): n for n, o in enumerate(self._kept)}  # id of an object -> its number

    def add(self, found: Any) -> None:
        kind = type(found)
        if kind in PLAIN:
            self._say(f"{kind.__name__} {found!r}")
        elif isinstance(found, Enum):
            self._say(f"{kind.__name__}.{found.name}")
        elif isinstance(found, CODE):
            self._say(getattr(found, "__qualname__", "") or getattr(found, "__name__", ""))
        elif kind.__module__ in MACHINERY:
            self._say(kind.__name__)
        elif id(found) in self._numbers:
            self._say(f"again {self._numbers[id(found)]}")
        else:
            self._numbers[id(found)] = len(self._numbers)
            self._kept.append(found)
            self._parts(found, kind)

    def _parts(self, found: Any, kind: type) -> None:
        self._say(f"<{kind.__qualname__}")
        if isinstance(found, (types.FunctionType, types.MethodType)):
            function = found.__func__ if isinstance(found, types.MethodType) else found
            self._say(function.__qualname__)
            self._all((getattr(found, "__self__", None), function.__defaults__))
            self._all(_held(function))
        elif isinstance(found, Mapping):
            for name, value in list(found.items()):
                self.add(name)
                self.add(value)
        elif isinstance(found, (list, tuple, deque)):
            self._all(found)
        elif isinstance(found, Set):
            self._all(sorted(digest(item) for item in found))
        for name, value in sorted(_fields(found, kind)):
            self._say(name)
            self.add(value)
        self._say(">")

    def _all(self, items: Iterable[object]) -> None:
        for item in items:
            self.add(item)

    def _say(self, text: str) -> None:
        self.hash.update(text.encode(errors="surrogatepass") + b"\0")


def _held(function: Any) -> list[object]:
    """Return what a function holds in its closure."""
    held = []
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not yet assigned
            held.append(None)
    return held


def _fields(found: Any, kind: type) -> list[tuple[str, Any]]:
    if isinstance(found, (types.FunctionType, types.MethodType)):
        return []
    named = dict(getattr(found, "__dict__", None) or {})
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(found, slot):
                named[slot] = getattr(found, slot)
    return list(named.items())


def disks(root: Path) -> str:
    """Return the hash of every file and folder below `root`: path, mode, contents."""
    told = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*")):
        if path.name.endswith(INDEX):
            continue
        told.update(f"{path.relative_to(root)}\0{path.lstat().st_mode:o}\0".encode())
        if path.is_symlink():
            told.update(str(path.readlink()).encode())
        elif path.is_file():
            told.update(hashlib.blake2b(path.read_bytes()).digest())
    return told.hexdigest()


class Recorder:
    """States of a world at the points of a flow, as the fuse passes them."""

    def __init__(self, state: Callable[[], str]) -> None:
        self._state, self._numbers = state, dict[str, int]()
        self.points: dict[tuple[int, bool], int] = {}  # number of the effect, after it -> number of the state

    def __call__(self, at: int, after: bool) -> None:
        self.points[at, after] = self._numbers.setdefault(self._state(), len(self._numbers) + 1)
