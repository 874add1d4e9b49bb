"""Lint rules about documents and about files that name other files."""

from __future__ import annotations

import json
import re
from pathlib import Path

from spotfleet.version import PUBLISHED
from tests.support.source_tree import Tree

LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
NAMED = re.compile(r"`((?:spotfleet|examples|scripts|tests|docs|bench)/[\w./-]+\w)`")


def links_in_a_document_lead_somewhere(tree: Tree) -> list[str]:
    return [f"{place}: {link} does not exist"
            for path in tree.documents for place, link in _found(tree, path, LINK)
            if not (path.parent / link).exists()]


def nothing_is_installed_by_a_name_that_is_not_published(tree: Tree) -> list[str]:
    """`spotfleet/version.py: install` is the one place that changes once PyPI has the package."""
    by_name = re.compile(r"""(pip install (?:-\S+ )*['"]?spotfleet\b(?![-./]))""")
    paths = [*tree.documents, *(source.path for source in tree.product)]
    return [] if PUBLISHED else [f"{place}: pip finds no package `{text}`" for path in paths
                                 if path.name != "version.py" for place, text in _found(tree, path, by_name)]


def files_that_a_document_names_exist(tree: Tree) -> list[str]:
    return [f"{place}: {name} does not exist"
            for path in tree.documents for place, name in _found(tree, path, NAMED)
            if not (tree.root / name).exists()]


def recorded_durations_name_test_files(tree: Tree) -> list[str]:
    recorded = tree.root / "tests" / "durations.json"
    names = json.loads(recorded.read_text()) if recorded.exists() else {}
    return [f"tests/durations.json:1: {name} does not exist" for name in names if not (tree.root / name).exists()]


def _found(tree: Tree, path: Path, pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """What the pattern finds in the file, each with its place."""
    text, name = path.read_text(), path.relative_to(tree.root).as_posix()
    return [(f"{name}:{text.count(chr(10), 0, found.start()) + 1}", found[1]) for found in pattern.finditer(text)]
