"""Lines of the user's script for an error to name, found in the text of the code that runs at present.

Threads: any; where none of the script's code runs on the calling thread (autograd's), that of the main thread counts.
"""

from __future__ import annotations

import ast
import linecache
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

NOT_THE_SCRIPT = (f"{Path(__file__).parents[2]}/", f"{Path(torch.__file__).parent}/", "<")
_parsing = threading.Lock()  # Python 3.11 cannot parse in two threads at once


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


def _site(frame: FrameType, *lines: int) -> str:
    return "/".join(frame.f_code.co_filename.split("/")[-2:]) + ":" + ", ".join(map(str, lines))


def _frames() -> list[FrameType]:
    """Return the script's frames, the innermost first."""
    main = threading.main_thread().ident
    return list(_of_script(sys._getframe(1))) or list(_of_script(sys._current_frames().get(main or 0)))


def _of_script(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
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
