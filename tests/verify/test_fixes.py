"""`verify` finds what reviews of the runtime found: without its fix, the script that needs it differs.

The fixes are taken out by the seeded faults of `tests/mutants`, each in a copy of the package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

import spotfleet
from tests.mutants.run import mutants
from tests.support.verify import verify_scripts as scripts

pytestmark = pytest.mark.processes
LIMIT_S = 150.0  # under that of a test, which would end the process
SEEDED = {m.name: m for m in mutants()}
# Seeded fault -> a script that is exact without it, and the disturbance and the name of what differs with it.
FIXES = {
    "moved weights are kept and not put back": (scripts.WEIGHTS_TOUCHED, "kill", "model.weight"),
    "attributes of an optimizer stay behind": (scripts.OPTIMIZER_THAT_COUNTS, "kill", "optimizer.param_groups[0].lr"),
    "a replay counts a step of a schedule-free optimizer once less": (
        scripts.GROUP_THAT_COUNTS, "kill", "optimizer.param_groups[0].lr"),
    "extra state of a module stays behind": (scripts.EXTRA_STATE, "kill", "model.linear.weight"),
    "the forward pass of a repeated iteration uses a number counted twice": (
        scripts.COUNTED_BEFORE_THE_GRADIENT, "kill", "seen"),
    "a scheduler that steps before the gradient steps twice": (
        scripts.SCHEDULED_FIRST, "kill", "scheduler.last_epoch"),
    "each reduction has a position of its own": (scripts.ACCUMULATION, "notice", "model.weight"),
    "an applied step is applied again": (scripts.OPTIMIZER_THAT_COUNTS, "kill", "step"),
    "a buffer that the forward pass sets anew is not followed": (scripts.CENTRED_ANEW, "kill", "model.center"),
    "a newcomer's statistics are those of a replay": (scripts.CENTRED_MEAN, "kill", "model.center"),
    "a repeated forward pass counts twice in the batch-norm statistics": (
        scripts.CENTRED_ALIKE, "kill", "model.center"),
    "a function may begin at its first batch again": (scripts.FROM_THE_START, "kill", "step"),
}


REFUSED = {"a function may begin at its first batch again"}  # with the fix


@pytest.mark.parametrize("fix", FIXES)
def test_a_script_that_needs_a_fix_differs_without_it(fix, tmp_path):
    script, disturbance, name = FIXES[fix]
    found = verdict(script, disturbance, tmp_path / "without", without=fix)
    assert (found["result"], found["difference"]["run"], found["difference"]["name"]) == ("differs", disturbance, name)
    found = verdict(script, disturbance, tmp_path / "with")
    assert found["result"] == ("failed" if fix in REFUSED else "exact"), found


def verdict(script: str, disturbance: str, folder: Path, without: str = "") -> dict:
    """Return what `verify -o json` prints about the script, run by a copy of the package `without` a fix."""
    copytree(Path(spotfleet.__file__).parent, folder / "spotfleet", ignore=ignore_patterns("__pycache__"))
    if without:
        broken = folder / SEEDED[without].file
        broken.write_text(SEEDED[without].sown(broken.read_text()))
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "spotfleet.train.verify", "--steps", "9", "--only", disturbance, "-o", "json"]
    done = subprocess.run([*command, str(folder / "script.py")], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(folder)}, timeout=LIMIT_S)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)
