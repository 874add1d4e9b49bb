"""Test files that a change can reach, by the imports between files. In doubt a test is reached.

A file depends on the modules that it imports, also inside functions, on those that its strings name ("python -m a.b",
patched names, scripts), and a test file on the `conftest.py` of its folders. Tests and their helpers that start
processes may run the whole product: they depend on all of it, but for code of another tier (`tiers.OWN_CODE`), of which
only imports count.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.support.source_tree import PRODUCT, TYPING, Source, Tree
from tests.support.tiers import CORE, owner_of

WITH_PROCESSES = re.compile(r"\bmark\.(processes|exclusive)\b")
MODULE = re.compile(rf"\b{PRODUCT}(?:\.\w+)+")
FILE = re.compile(r"[\w-]+\.py\b")
READ_BY_LINT_ONLY = re.compile(r"(.*\.md|LICENSE|tests/durations\.json|tests/mutants/mutants\.toml|tests/lint/.*)")

Graph = dict[str, set[str]]  # file -> files that it needs


def is_test(file: str) -> bool:
    name = PurePosixPath(file).name
    return file.startswith("tests/") and name.startswith("test_") and name.endswith(".py")


def reached(graph: Graph, changed: set[str]) -> set[str] | None:
    """Return the test files that need a changed file; None: the change may reach any test."""
    changed = {file for file in changed if not READ_BY_LINT_ONLY.fullmatch(file)}
    if changed - graph.keys() - {file for file in changed if is_test(file)}:  # a deleted test reaches none
        return None
    users: Graph = defaultdict(set)
    for file, needs in graph.items():
        for need in needs:
            users[need].add(file)
    seen, todo = set(changed), list(changed)
    while todo:
        new = users[todo.pop()] - seen
        seen |= new
        todo += new
    return {file for file in seen if is_test(file) and file in graph}


def needs_of(tree: Tree) -> Graph:
    """Read what each Python file needs."""
    by_module = {source.module: source.name for source in tree.code}
    by_stem: Graph = defaultdict(set)
    for source in tree.code:
        if not source.name.startswith(f"{PRODUCT}/"):
            by_stem[PurePosixPath(source.name).stem].add(source.name)
    plugins = {by_module[name] for name in _plugins(tree) if name in by_module}
    graph = {}
    for source in tree.code:
        needs = {file for name in _names(source) for file in _files(name, by_module, by_stem)}
        if "entry_points" in source.text:
            needs |= {file for file in plugins if owner_of(file) == CORE}
        graph[source.name] = (needs | _conftests(source, tree)) - {source.name}
    product = {source.name for source in tree.product if owner_of(source.name) == CORE}
    for source in tree.code:
        if _starts_processes(source):
            graph[source.name] |= product
    return graph


def _starts_processes(source: Source) -> bool:
    """Does a test, or a helper of tests, run anything of which its imports say nothing?"""
    if not source.name.startswith("tests/") or source.name.startswith("tests/lint/"):
        return False
    if PurePosixPath(source.name).parent == PurePosixPath("tests/support"):
        return False  # what runs the tests, not what they use
    return bool(WITH_PROCESSES.search(source.text)) or any(i.name == "subprocess" for i in source.imports)


def _names(source: Source) -> Iterator[str]:
    """Yield the modules and files that a file names."""
    yield from (i.name for i in source.imports if i.kind != TYPING)
    documents = {id(node.value) for node in source.of_type(ast.Expr)}
    for node in source.of_type(ast.Constant):
        if isinstance(node.value, str) and id(node) not in documents:
            yield from MODULE.findall(node.value)
            yield from (found.removesuffix(".py") for found in FILE.findall(node.value))


def _files(name: str, by_module: dict[str, str], by_stem: Graph) -> Iterator[str]:
    """Yield the files that run when `name` is imported: the module and the packages around it."""
    parts = name.split(".")
    if parts[0] != PRODUCT:
        yield from [by_module[name]] if name in by_module else by_stem.get(parts[-1], ())
        return
    while parts and ".".join(parts) not in by_module:
        parts.pop()
    if parts == [PRODUCT]:
        yield by_module[PRODUCT]
    while len(parts) > 1:
        if (package := ".".join(parts)) in by_module:
            yield by_module[package]
        parts.pop()


def _conftests(source: Source, tree: Tree) -> set[str]:
    if not source.name.startswith("tests/"):
        return set()
    folders = PurePosixPath(source.name).parents
    return {name for folder in folders if (tree.root / (name := str(folder / "conftest.py"))).is_file()}


def _plugins(tree: Tree) -> Iterator[str]:
    """Yield the modules of the entry points in pyproject.toml."""
    path = tree.root / "pyproject.toml"
    project = tomllib.loads(path.read_text())["project"] if path.is_file() else {}
    for group in project.get("entry-points", {}).values():
        yield from (target.partition(":")[0] for target in group.values())
