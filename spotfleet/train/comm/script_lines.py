"""Lines of the user's script for an error to name, found in the text of the code that runs at present.

Threads: any; where none of the script's code runs on the calling thread (autograd's), that of the main thread counts.
"""

from __future__ import annotations

import ast
import linecache
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

NOT_THE_SCRIPT = (f"{Path(__file__).parents[2]}/", f"{Path(torch.__file__).parent}/", "<")
LAUNCHER = f"{Path(__file__).parents[2]}/ray/"  # calls the script's function; Ray's files around it take long to parse
_parsing = threading.Lock()  # Python 3.11 cannot parse in two threads at once


def parse_ahead(function: Any) -> None:
    """Parse the files of `function` and of the script's code that runs now. The first search in a file takes 30 ms for
    500 lines, which after a loss all workers would wait for."""
    code = getattr(function, "__code__", None)
    paths = {frame.f_code.co_filename for frame in _frames()} | ({code.co_filename} if code is not None else set())
    for path in paths:
        if not path.startswith(NOT_THE_SCRIPT):
            _nodes(path)


def call_site() -> str:
    """Return "folder/file:line" of the newest call outside torch and this package; "" if there is none."""
    frame = next(_of_script(sys._getframe(1)), None)
    return _site(frame, frame.f_lineno) if frame is not None else ""


def running_loops(state: Any) -> dict[str, str]:
    """Return the names of `state` that loops run over at present, the outermost first, with the loop's "file:line"."""
    found: dict[str, str] = {}
    for frame in reversed(_frames()):
        for loop in _loops(frame.f_code.co_filename):
            if loop.lineno <= frame.f_lineno <= (loop.end_lineno or loop.lineno):
                over = loop.target if isinstance(loop, ast.For) else loop.test
                found.update((n.attr, _site(frame, loop.lineno)) for n in ast.walk(over)
                             if isinstance(n, ast.Attribute) and _value(n.value, frame) is state)
    return found


def where_set(name: str) -> str:
    """Return "file:line" of the lines that set `OBJECT.name`, in the functions that run or elsewhere, of that which
    passes it by keyword, or of the call at hand; "" without a script."""
    frames = _frames()
    for nodes, limits in ((_stores, _function), (_stores, _file), (_keywords, _file)):
        for frame in frames:
            first, last = limits(frame)
            found = {line for n, line in nodes(frame.f_code.co_filename) if n == name and first <= line <= last}
            if found:
                return _site(frame, *sorted(found)[:3])
    return _site(frames[0], frames[0].f_lineno) if frames else ""


@dataclass(frozen=True)
class Loop:
    """A loop of the script, by its place in a file."""

    path: str
    first: int
    end: int

    @property
    def line(self) -> str:
        return _place(self.path, self.first)

    def is_running(self) -> bool:
        """Return whether the script is in this loop now."""
        return any(f.f_code.co_filename == self.path and self.first <= f.f_lineno <= self.end
                   and _function(f)[0] <= self.first for f in _frames())


@dataclass(frozen=True)
class LoopAround:
    """The innermost loop around the call at hand."""

    loop: Loop
    commit: str  # "file:line" of the call in the loop's body
    is_last: bool  # nothing follows the call in the body
    _node: ast.For | ast.While
    _frame: FrameType

    @property
    def is_for(self) -> bool:
        return isinstance(self._node, ast.For)

    def step(self) -> int | None:
        """Return the difference between its values if its text shows that; None otherwise."""
        if not isinstance(self._node, ast.For):
            return None
        calls = {_called(n): n for n in ast.walk(self._node.iter) if isinstance(n, ast.Call)}
        for name, most in (("range", 2), ("trange", 2), ("count", 1), ("enumerate", 2)):
            if name in calls:
                given = calls[name].args[most:]
                step = given[0] if given else ast.Constant(1)
                return step.value if isinstance(step, ast.Constant) and type(step.value) is int else None
        return None

    def set_later(self, state: Any) -> list[tuple[str, str]]:
        """Return the names of `state` that statements of the body set after the call, with "file:line"."""
        later = [s for s in self._node.body if s.lineno > self._frame.f_lineno and isinstance(
            s, ast.Assign | ast.AugAssign)]
        return [(n.attr, _site(self._frame, n.lineno)) for s in later for n in ast.walk(s) if isinstance(
            n, ast.Attribute) and isinstance(n.ctx, ast.Store) and _value(n.value, self._frame) is state]


def loop_around() -> LoopAround | None:
    """Return the innermost loop around the present call, in the functions that run."""
    for frame in _frames():
        path, at, first = frame.f_code.co_filename, frame.f_lineno, _function(frame)[0]
        found = [n for n in _loops(path) if first <= n.lineno and n.body[0].lineno <= at <= _end(n.body[-1])]
        if found:
            node = max(found, key=lambda n: n.lineno)
            return LoopAround(Loop(path, node.lineno, _end(node)), _site(frame, at), _ends(node.body, at), node, frame)
    return None


def header_of(frame: FrameType, name: str, state: Any) -> Loop | None:
    """Return the `for` loop over `state.name` whose next value `frame` sets; None if it is another statement."""
    path, at = frame.f_code.co_filename, frame.f_lineno
    for node in _loops(path):
        if isinstance(node, ast.For) and node.lineno <= at < node.body[0].lineno and any(
                isinstance(n, ast.Attribute) and n.attr == name and _value(n.value, frame) is state
                for n in ast.walk(node.target)):
            return Loop(path, node.lineno, _end(node))
    return None


def bound_in_loops(code: CodeType | None, names: Collection[str]) -> list[str]:
    """Return those of a function's variables that statements in its loops set, each with "file:line"."""
    if code is None or not names:
        return []
    path, first, last = code.co_filename, code.co_firstlineno, max(n or 0 for _, _, n in code.co_lines())
    found = {n.id: n.lineno for loop in _loops(path) if first <= loop.lineno <= last for n in ast.walk(loop)
             if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id in names}
    return [f"{name} ({_place(path, line)})" for name, line in found.items()]


def place_of(function: Any) -> str:
    """Return "file:line" of a function; "" if it is none of Python's."""
    code = getattr(function, "__code__", None)
    return _place(code.co_filename, code.co_firstlineno) if code is not None else ""


def _ends(body: list[ast.stmt], at: int) -> bool:
    """Return whether line `at` is in the last statement of `body`, wherever that branches."""
    last = body[-1]
    if not last.lineno <= at <= _end(last):
        return False
    blocks = [b for b in (getattr(last, field, []) for field in ("body", "orelse", "finalbody")) if b]
    inner = [b for b in blocks if b[0].lineno <= at <= _end(b[-1])]
    return _ends(inner[0], at) if inner else True


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")

def _site(frame: FrameType, *lines: int) -> str:
    return _place(frame.f_code.co_filename, *lines)


def _place(path: str, *lines: int) -> str:
    return "/".join(path.split("/")[-2:]) + ":" + ", ".join(map(str, lines))


def _frames() -> list[FrameType]:
    """Return the script's frames, the innermost first."""
    main = threading.main_thread().ident
    return list(_of_script(sys._getframe(1))) or list(_of_script(sys._current_frames().get(main or 0)))


def _of_script(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and not frame.f_code.co_filename.startswith(LAUNCHER):
        if not frame.f_code.co_filename.startswith(NOT_THE_SCRIPT):
            yield frame
        frame = frame.f_back


def _value(node: ast.AST, frame: FrameType) -> Any:
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    return getattr(_value(node.value, frame), node.attr, None) if isinstance(node, ast.Attribute) else None


@lru_cache(64)
def _nodes(path: str) -> list[ast.AST]:
    try:
        with _parsing:
            return list(ast.walk(ast.parse("".join(linecache.getlines(path)))))
    except SyntaxError:
        return []


def _loops(path: str) -> list[ast.For | ast.While]:
    return [n for n in _nodes(path) if isinstance(n, ast.For | ast.While)]


def _file(frame: FrameType) -> tuple[int, int]:
    return 1, sys.maxsize


def _function(frame: FrameType) -> tuple[int, int]:
    """Return the first and last line of the innermost function around the frame's."""
    found = [(n.lineno, n.end_lineno or n.lineno) for n in _nodes(frame.f_code.co_filename)
             if isinstance(n, ast.FunctionDef) and n.lineno <= frame.f_lineno <= (n.end_lineno or n.lineno)]
    return max(found, default=(1, 0))


def _stores(path: str) -> Iterator[tuple[str, int]]:
    return ((n.attr, n.lineno) for n in _nodes(path) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))


def _keywords(path: str) -> Iterator[tuple[str, int]]:
    return ((n.arg, n.value.lineno) for n in _nodes(path) if isinstance(n, ast.keyword) and n.arg)
