"""Loops in real worker processes, one of which is really killed, against an undisturbed run: one of each family of the
table, and those that need a process of their own. All of the table with SPOTFLEET_LONG."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from spotfleet.verify.verdict import judge
from spotfleet.verify.world import Forker, RunSpec
from tests.habits import page  # noqa: F401 - it fills the table
from tests.habits.kit import FAMILIES, TABLE, Habit
from tests.habits.loops_processes import OWN

pytestmark = pytest.mark.processes
LONG = bool(os.environ.get("SPOTFLEET_LONG"))
LIMIT_S = 150.0  # under that of a test, which would end the process
TOP = Path(__file__).parents[2]
SCRIPT = """\
import sys
sys.path.insert(0, {top!r})
import spotfleet.train as hvd
from tests.habits import loops_processes, page
from tests.habits.kit import TABLE, ScriptKit
hvd.init()
next(h for h in TABLE + loops_processes.OWN if h.name == {name!r}).loop(ScriptKit())
"""

EXACT = [h for h in TABLE if h.verdict == "exact"]
FIRST = [next(h for h in EXACT if h.family == family) for family in FAMILIES]


@pytest.fixture(scope="module")
def forker():
    made = Forker()
    yield made
    made.close()


@pytest.mark.parametrize("habit", [*(EXACT if LONG else FIRST), *OWN], ids=lambda h: f"{h.family}: {h.name}")
def test_a_worker_that_is_killed_in_the_loop_costs_no_bit(forker, tmp_path, habit: Habit):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(top=str(TOP), name=habit.name))
    with tempfile.TemporaryDirectory(prefix="sf-", dir="/tmp") as folder:
        verdict = judge(forker, RunSpec(script, (), 2, LIMIT_S), Path(folder), 9, lambda line: None,
                        ("kill", "notice") if habit in OWN else ("kill",))
    assert verdict.result == "exact" and verdict.steps >= 3, verdict
