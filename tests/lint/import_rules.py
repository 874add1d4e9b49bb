"""Lint rules about imports: layers, circles, SDKs, torch."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.lint.layers import EFFECTS, ENGINES, LAYERS, PURE, SDKS, layer
from tests.support.source_tree import LOAD, PRODUCT, TYPING, Edge, Import, Source, Tree, closing_edges

DAEMONS = {"agent": {"dispatcher", "worker", *ENGINES}, "dispatcher": {"agent", "worker", *ENGINES}}
SHARED = 2  # the highest layer whose modules both daemons may import of each other


def imports_point_down_the_layers(tree: Tree) -> list[str]:
    return [f"{edge.at}: {edge.source} (layer {layer(edge.source)}) imports {edge.target} (layer {layer(edge.target)})"
            for edge in tree.edges
            if edge.kind != TYPING and edge.source != PRODUCT and edge.target != PRODUCT
            and layer(edge.target) > layer(edge.source)]


def agent_and_dispatcher_share_only_messages(tree: Tree) -> list[str]:
    return [f"{edge.at}: {edge.source} imports {edge.target}"
            for edge in tree.edges
            if edge.kind != TYPING and _folder(edge.target) in DAEMONS.get(_folder(edge.source), set())
            and layer(edge.target) > SHARED]


def an_engine_imports_only_itself_and_what_workers_share(tree: Tree) -> list[str]:
    return [f"{edge.at}: {edge.source} imports {edge.target}"
            for edge in tree.edges
            if edge.kind != TYPING and _folder(edge.source) in {*ENGINES, "worker"}
            and _folder(edge.target) not in {_folder(edge.source), "worker", "protocol", "storage"}
            and layer(edge.target) > 0 and edge.target != PRODUCT]


def the_worker_knows_no_engine(tree: Tree) -> list[str]:
    return [f"{edge.at}: {edge.source} imports {edge.target}"
            for edge in tree.edges if _folder(edge.source) == "worker" and _folder(edge.target) in ENGINES]


def the_runtime_needs_only_torch_and_the_standard_library(tree: Tree) -> list[str]:
    allowed = {*sys.stdlib_module_names, "torch", "numpy", PRODUCT}
    return [f"{source.name}:{found.line}: imports {found.name}"
            for source, found in _imports(tree)
            if found.kind != TYPING and _folder(source.module) in ("train", "worker")
            and found.name.split(".")[0] not in allowed]


def only_the_runtime_imports_torch(tree: Tree) -> list[str]:
    return [f"{source.name}:{found.line}: imports {found.name}"
            for source, found in _imports(tree)
            if found.kind != TYPING and _folder(source.module) != "train" and found.name.split(".")[0] == "torch"]


def only_its_own_folder_imports_ray(tree: Tree) -> list[str]:
    """Ray's C++ ends a process that it disagrees with: a daemon must not depend on it."""
    return [f"{source.name}:{found.line}: imports {found.name}"
            for source, found in _imports(tree)
            if found.kind != TYPING and _folder(source.module) != "ray" and found.name.split(".")[0] == "ray"]


def an_sdk_is_imported_inside_functions_only(tree: Tree) -> list[str]:
    return [f"{source.name}:{found.line}: imports {found.name} when it is loaded"
            for source, found in _imports(tree)
            if found.kind == LOAD and found.name.split(".")[0] in SDKS]


def a_pure_module_imports_nothing_that_has_effects(tree: Tree) -> list[str]:
    return [f"{source.name}:{found.line}: imports {found.name}"
            for source, found in _imports(tree)
            if found.kind != TYPING and found.name.split(".")[0] in EFFECTS
            and (any(source.module == name or source.module.startswith(name + ".") for name in PURE)
                 or (source.name.count("/") == 1 and source.module != PRODUCT))]


def every_module_in_the_table_of_layers_exists(tree: Tree) -> list[str]:
    return [f"tests/lint/layers.py:1: {name} does not exist" for name in LAYERS if name not in tree.modules]


def modules_do_not_import_each_other_in_a_circle(tree: Tree) -> list[str]:
    """Imports of all kinds count: at load, for type checkers, inside functions, by `importlib.import_module`."""
    return _circles(module_edges(tree))


def folders_do_not_import_each_other_in_a_circle(tree: Tree) -> list[str]:
    """A folder's own files are the front of what is below it: imports between it and its subfolders are no circle, as
    long as no modules form one."""
    return _circles(folder_edges(tree))


def areas_do_not_import_each_other_in_a_circle(tree: Tree) -> list[str]:
    """An area is a folder right below the package with all that is in it, or a module there."""
    return _circles(area_edges(tree))


def module_edges(tree: Tree) -> list[tuple[str, str, Edge]]:
    return [(edge.source, edge.target, edge) for edge in tree.edges]


def folder_edges(tree: Tree) -> list[tuple[str, str, Edge]]:
    edges = _edges_between(tree, lambda source: _dotted(Path(source.name).parent.parts, source))
    return [(a, b, edge) for a, b, edge in edges if a.count(".") == b.count(".") == 2
            and a.rpartition(".")[0] == b.rpartition(".")[0]]


def area_edges(tree: Tree) -> list[tuple[str, str, Edge]]:
    return _edges_between(tree, lambda source: _dotted(Path(source.name).parent.parts[:2], source))


def _dotted(folder: tuple[str, ...], source: Source) -> str:
    return source.module if folder == (PRODUCT,) else ".".join(folder)


def _edges_between(tree: Tree, node: Callable[[Source], str]) -> list[tuple[str, str, Edge]]:
    """Edges between nodes of several modules, those of many imports first: the rarest import closes a circle."""
    between: dict[tuple[str, str], list[Edge]] = defaultdict(list)
    for edge in tree.edges:
        source, target = (node(tree.modules[name]) for name in (edge.source, edge.target))
        if source != target:
            between[source, target].append(edge)
    return [(*pair, edges[0]) for pair, edges in sorted(between.items(), key=lambda item: (-len(item[1]), item[0]))]


def _circles(edges: list[tuple[str, str, Edge]]) -> list[str]:
    return [f"{edge.at}: {source} imports {target} ({edge.kind}), which leads back to {source}"
            for source, target, edge in closing_edges(edges)]


def _imports(tree: Tree) -> Iterator[tuple[Source, Import]]:
    return ((source, found) for source in tree.product for found in source.imports)


def _folder(module: str) -> str:
    """The part below the package: "agent" of "spotfleet.agent.link", "" of "spotfleet"."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""
