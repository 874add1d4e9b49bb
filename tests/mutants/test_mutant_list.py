"""The list of seeded faults fits the code. Code has changed? Change the fault's text in mutants.toml, too."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from run import TOP, Mutant, mutants

LISTED = mutants()


@pytest.mark.parametrize("mutant", LISTED, ids=lambda m: m.name.replace(" ", "-"))
def test_a_listed_fault_can_be_sown_and_its_test_exists(mutant: Mutant):
    assert mutant.sown((TOP / mutant.file).read_text()) != (TOP / mutant.file).read_text()
    path, _, test = mutant.test.partition("::")
    name = re.sub(r"\[.*", "", test.rpartition("::")[2])
    assert re.search(rf"(def|class) {re.escape(name)}\b|^{re.escape(name)} = ", (TOP / path).read_text(), re.M)


def test_names_are_unique_and_every_part_that_decides_has_its_faults():
    assert [n for n, times in Counter(m.name for m in LISTED).items() if times > 1] == []
    per_file = Counter(Path(m.file).name for m in LISTED)
    assert {f for f in ("machine.py", "fence.py", "picture.py", "schedule.py", "plan.py", "fold.py", "reconcile.py",
                        "cost.py", "billing.py", "checkpoints.py", "restart.py", "sync.py", "sampler.py", "reducer.py",
                        "state.py", "auth.py") if not per_file[f]} == set()
