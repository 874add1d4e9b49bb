"""Parsed Python files of a repository and the imports between them."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

TOP = Path(__file__).parents[2]
PRODUCT = "spotfleet"
CODE = (PRODUCT, "tests", "examples", "bench", "scripts")  # folders with Python files of ours
LOAD, TYPING, FUNCTION = "load", "typing", "function"  # kinds of import

N = TypeVar("N", bound=ast.AST)
E = TypeVar("E")


@dataclass(frozen=True)
class Import:
    name: str  # full dotted name, relative ones resolved; `from a import b` is "a.b" only if that is a module
    kind: str  # LOAD when the module is imported, TYPING for type checkers alone, FUNCTION when a function runs
    line: int


@dataclass(frozen=True)
class Edge:
    """One import of a module of ours by another."""

    source: str
    target: str
    kind: str
    at: str  # file:line


class Source:
    """One Python file."""

    def __init__(self, tree: Tree, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(tree.root).as_posix()
        parts = path.relative_to(tree.root).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.module = ".".join(parts[:-1] if self.is_package else parts)
        self._tree = tree

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def parsed(self) -> ast.Module:
        """The syntax tree. It lives as long as the process, so the garbage collector may leave it out."""
        gc.disable()
        try:
            return ast.parse(self.text)
        finally:
            gc.freeze()
            gc.enable()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the syntax tree."""
        return list(ast.walk(self.parsed))

    @cached_property
    def imports(self) -> list[Import]:
        return [*self._imports(self.parsed.body, LOAD), *self._imports_by_name()]

    def of_type(self, *types: type[N]) -> Iterator[N]:
        return (node for node in self.nodes if isinstance(node, types))

    def _imports(self, statements: list[ast.stmt], kind: str) -> Iterator[Import]:
        for statement in statements:
            match statement:
                case ast.Import():
                    yield from (Import(alias.name, kind, statement.lineno) for alias in statement.names)
                case ast.ImportFrom():
                    base = self._base(statement)
                    for alias in statement.names:
                        full = f"{base}.{alias.name}"
                        yield Import(full if self._tree.has_module(full) else base, kind, statement.lineno)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from self._imports(statement.body, TYPING if kind == TYPING else FUNCTION)
                case ast.If() if "TYPE_CHECKING" in ast.unparse(statement.test):
                    yield from self._imports(statement.body, TYPING)
                    yield from self._imports(statement.orelse, kind)
                case _:
                    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                        yield from self._imports(getattr(statement, part, []), kind)

    def _imports_by_name(self) -> Iterator[Import]:
        """Yield `importlib.import_module("spotfleet.a")` as an import inside a function."""
        if "import_module(" not in self.text:
            return
        for call in self.of_type(ast.Call):
            match call:
                case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                              args=[ast.Constant(value=str(name)), *_]) if name.startswith(PRODUCT):
                    yield Import(name, FUNCTION, call.lineno)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.module.split(".") if self.is_package else self.module.split(".")[:-1]
        parts = package[: len(package) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])


class Tree:
    """A repository's files below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def code(self) -> list[Source]:
        """All Python files of ours."""
        found = (p for d in CODE for p in sorted((self.root / d).rglob("*.py")) if "__pycache__" not in p.parts)
        return [Source(self, path) for path in found]

    @cached_property
    def product(self) -> list[Source]:
        """The files of the package that users install."""
        return [source for source in self.code if source.name.startswith(f"{PRODUCT}/")]

    @cached_property
    def modules(self) -> dict[str, Source]:
        return {source.module: source for source in self.product}

    @cached_property
    def documents(self) -> list[Path]:
        return sorted([*self.root.glob("*.md"), *self.root.glob("docs/**/*.md")])

    @cached_property
    def edges(self) -> list[Edge]:
        """Imports of the product's modules by each other: first those at load, then for typing, then in functions."""
        edges = [Edge(source.module, i.name, i.kind, f"{source.name}:{i.line}")
                 for source in self.product for i in source.imports
                 if i.name in self.modules and i.name != source.module]
        return sorted(edges, key=lambda edge: (LOAD, TYPING, FUNCTION).index(edge.kind))

    def has_module(self, name: str) -> bool:
        return name in self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(source.module for source in self.code)


@cache
def read_tree(root: Path = TOP) -> Tree:
    """Return the tree of `root`, the same one each time, so that each file is parsed once."""
    return Tree(root)


def closing_edges(edges: Iterable[tuple[str, str, E]]) -> list[tuple[str, str, E]]:
    """Return the edges that close a circle among those before them: without them there is none."""
    after: dict[str, set[str]] = {}
    closing = []
    for source, target, what in edges:
        if _reaches(after, target, source):
            closing.append((source, target, what))
        else:
            after.setdefault(source, set()).add(target)
    return closing


def _reaches(after: dict[str, set[str]], start: str, goal: str) -> bool:
    seen, todo = {start}, [start]
    while todo:
        if (here := todo.pop()) == goal:
            return True
        new = after.get(here, set()) - seen
        seen |= new
        todo += new
    return False
