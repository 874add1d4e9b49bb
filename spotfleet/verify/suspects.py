"""Lines of a script that may cause a difference, found in its syntax tree. Pure.

They are suspects only: `causes.py` shows those that fit the symptoms.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_RANKS = {"rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"}
_DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "uniform", "choice", "shuffle",
          "random", "random_", "multinomial", "bernoulli", "next"}
_SEEDS = {"manual_seed", "manual_seed_all", "seed", "default_rng"}
_IN_PLACE = {"mul_", "add_", "copy_", "sub_", "div_", "fill_", "zero_", "lerp_", "clamp_", "normal_", "load_state_dict"}


@dataclass(frozen=True)
class Suspects:
    """Line numbers by what stands there."""

    ranks: tuple[int, ...] = ()  # rank() or size() is read outside the function that elastic.run calls
    outside: tuple[int, ...] = ()  # that function changes a variable that is not in the state
    draws: tuple[int, ...] = ()  # it draws or fetches before its first loop, also by a function of the script
    unseeded: tuple[int, ...] = ()  # it draws anywhere, and seeds nothing
    weights: tuple[int, ...] = ()  # tensors are changed in place
    buffers: tuple[int, ...] = ()  # register_buffer, BatchNorm
    indices: tuple[int, ...] = ()  # it counts a loader's batches from 0, by enumerate()
    runs: bool = False  # something named elastic.run is used


def find(source: str) -> Suspects:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return Suspects()
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    elastic = [f for f in functions if any(_is_run(d) for d in f.decorator_list)]
    inside = {id(n) for f in elastic for n in ast.walk(f)}
    called = {_name(n.func) for f in elastic for n in ast.walk(f) if isinstance(n, ast.Call)}
    bodies = [*elastic, *(f for f in functions if f.name in called and f not in elastic)]
    inside |= {id(n) for f in bodies for n in ast.walk(f)}
    names = {f.name for f in elastic}
    drawing = _drawing(functions)
    starts = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and _name(n.func) in names]
    return Suspects(
        _lines(n for n in ast.walk(tree) if id(n) not in inside and _calls(n, _RANKS)
               and n.lineno <= max(starts, default=n.lineno)),
        _lines(n for f in bodies for n in _outside(f)),
        _lines(n for f in elastic for statement in _before_loop(f) for n in ast.walk(statement) if _calls(n, drawing)),
        () if any(_calls(n, _SEEDS) for n in ast.walk(tree)) else _lines(
            n for n in ast.walk(tree) if _calls(n, _DRAWS - {"next"})),
        _lines(n for n in ast.walk(tree) if _calls(n, _IN_PLACE) or _sets_data(n)),
        _lines(n for n in ast.walk(tree) if isinstance(n, ast.Call) and (
            _name(n.func) == "register_buffer" or _name(n.func).startswith("BatchNorm"))),
        _lines(n for f in bodies for n in ast.walk(f) if _counts_batches(n)) if any(
            _calls(n, {"ElasticSampler", "ElasticIterable"}) for n in ast.walk(tree)) else (),
        any(_is_run(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)))


def _counts_batches(node: ast.AST) -> bool:
    """Return whether it is a loop by `enumerate(...)` without a start, of which the body uses the number, and not for
    record_batch() alone."""
    if not isinstance(node, ast.For) or not isinstance(node.target, ast.Tuple) or not node.target.elts:
        return False
    calls = [n for n in ast.walk(node.iter) if isinstance(n, ast.Call) and _name(n.func) == "enumerate"]
    number = _name(node.target.elts[0])
    body = [n for statement in node.body for n in ast.walk(statement)]
    recorded = {id(n) for call in body if _calls(call, {"record_batch"}) for n in ast.walk(call)}
    return any(len(c.args) == 1 and not c.keywords for c in calls) and any(
        isinstance(n, ast.Name) and n.id == number and id(n) not in recorded for n in body)


def _drawing(functions: list[ast.FunctionDef]) -> set[str]:
    """Return the names of calls that draw or fetch: torch's and the like, and the script's functions that make them."""
    found, before = set(_DRAWS), -1
    while len(found) > before:
        before = len(found)
        found |= {f.name for f in functions if any(_calls(n, found) for n in ast.walk(f))}
    return found


def _is_run(node: ast.AST) -> bool:
    node = node.func if isinstance(node, ast.Call) else node
    return isinstance(node, ast.Attribute) and node.attr == "run" and _name(node.value) == "elastic"


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _calls(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in names


def _sets_data(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return any(_name(t) == "data" or (isinstance(t, ast.Subscript) and _name(t.value) == "data") for t in targets)


def _outside(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield assignments in `function` that change a variable of the process."""
    shared = {name for n in ast.walk(function) if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names}
    own = {a.arg for a in [*function.args.args, *function.args.kwonlyargs]} | {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} - shared
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(
            node, ast.AugAssign) else []
        for target in targets:
            root: ast.AST = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if isinstance(root, ast.Name) and (root.id in shared or (root is not target and root.id not in own)):
                yield node
        if isinstance(node, ast.Call) and _name(node.func) in ("append", "update", "add", "extend") and isinstance(
                node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id not in own:
            yield node


def _before_loop(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    for statement in function.body:
        if isinstance(statement, ast.For | ast.While):
            return
        yield statement


def _lines(nodes: Iterable[ast.AST]) -> tuple[int, ...]:
    return tuple(sorted({n.lineno for n in nodes}))  # type: ignore[attr-defined]
