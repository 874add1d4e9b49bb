"""Lint rules about the list of seeded faults, `tests/mutants/mutants.toml`."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.lint.known import FAULTS_KILLED_OUTSIDE_CORE
from tests.mutants.run import Mutant, mutants
from tests.support.impact import needs_of, reached
from tests.support.source_tree import Tree
from tests.support.tiers import PLACES, REACHING, TIERS, tier_of, tiers_run_for

LIST = "tests/mutants/mutants.toml"
DECIDE = ("machine.py", "fence.py", "picture.py", "schedule.py", "plan.py", "state.py", "reconcile.py", "meter.py",
          "billing.py", "store.py", "restart.py", "sync.py", "sampler.py", "reducer.py", "auth.py")


def a_seeded_fault_fits_the_code(tree: Tree) -> list[str]:
    """The code has changed? Change the fault's text, too."""
    found = []
    for mutant in _mutants(tree.root):
        path = tree.root / mutant.file
        times = _text(path).count(mutant.old) if path.is_file() else 0
        if times != 1:
            found.append(f"{_place(tree, mutant)}: {mutant.name}: the old text occurs {times} times in {mutant.file}")
        elif mutant.old == mutant.new:
            found.append(f"{_place(tree, mutant)}: {mutant.name}: changes nothing")
    return found


def the_test_of_a_seeded_fault_exists(tree: Tree) -> list[str]:
    found = []
    for mutant in _mutants(tree.root):
        path, _, test = mutant.test.partition("::")
        name = re.escape(re.sub(r"\[.*", "", test.rpartition("::")[2]))
        text = _text(tree.root / path) if (tree.root / path).is_file() else ""
        if not text or (test and not re.search(rf"(def|class) {name}\b|^{name} = ", text, re.M)):
            found.append(f"{_place(tree, mutant)}: {mutant.name}: {mutant.test} does not exist")
    return found


def each_seeded_fault_has_a_name_of_its_own(tree: Tree) -> list[str]:
    return [f"{LIST}:1: {times} faults are named {name}"
            for name, times in Counter(m.name for m in _mutants(tree.root)).items() if times > 1]


def every_file_that_decides_has_a_seeded_fault(tree: Tree) -> list[str]:
    with_fault = {Path(m.file).name for m in _mutants(tree.root)}
    return [f"{LIST}:1: no fault is seeded in {name}" for name in DECIDE if name not in with_fault]


def the_default_tests_kill_each_seeded_fault(tree: Tree) -> list[str]:
    """A test outside core may kill a fault in code whose every change runs its tier."""
    return [f"{_place(tree, m)}: {m.name}: only tier {tier_of(m.test)} kills it, and not each run has that one"
            for m in _killed_elsewhere(tree) if m.name not in FAULTS_KILLED_OUTSIDE_CORE]


def each_known_fault_is_still_killed_elsewhere(tree: Tree) -> list[str]:
    names = {m.name for m in _killed_elsewhere(tree)}
    return [f"tests/lint/known.py:1: FAULTS_KILLED_OUTSIDE_CORE: {name}: remove it from the list"
            for name in sorted(FAULTS_KILLED_OUTSIDE_CORE - names)]


def the_table_of_tiers_names_what_exists(tree: Tree) -> list[str]:
    return [f"tests/support/tiers.py:1: {place}: {tier}" for place, tier in PLACES.items()
            if tier not in TIERS or not (tree.root / place).exists()]


def each_change_to_code_of_a_tier_reaches_it(tree: Tree) -> list[str]:
    graph = needs_of(tree)
    found = []
    for source in tree.product:
        for tier in {tier for place, tier in REACHING.items() if source.name.startswith(place)}:
            tests = reached(graph, {source.name})
            if tests is not None and not any(tier_of(test) == tier for test in tests):
                found.append(f"{source.name}:1: no import leads from the tier {tier} to this file")
    return found


def _killed_elsewhere(tree: Tree) -> list[Mutant]:
    return [m for m in _mutants(tree.root) if tier_of(m.test) not in tiers_run_for(m.file)]


def _place(tree: Tree, mutant: Mutant) -> str:
    before = _text(tree.root / LIST).partition(f'name = "{mutant.name}"')[0]
    return f"{LIST}:{before.count(chr(10)) + 1}"


@cache
def _mutants(root: Path) -> list[Mutant]:
    return mutants(root / LIST) if (root / LIST).is_file() else []


@cache
def _text(path: Path) -> str:
    return path.read_text()
