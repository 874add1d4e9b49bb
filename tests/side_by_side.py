"""Which tests may run beside others, where several processes share a run (pytest-xdist).

Tests that stay in their process, or start little, share the processes file by file. All others run alone, one at a
time in one process, once those are through: they start real machines, dispatchers and workers, which need the cores
for themselves to keep their times. A new folder's tests run alone until it stands here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).parent
BESIDE = {
    "agent", "aws", "bad_days", "bench", "bootstrap", "catalog", "cli", "config", "contract", "dispatcher", "durable",
    "fakes", "fleet", "local", "membership", "mutants", "policy", "report", "shell", "sim", "simulate",
    "sweep", "wire", "",
}  # folders of tests; of these, files that are marked `slow` run alone all the same
WAITING = {"agent", "bootstrap", "local"}  # except here: they wait for what happens, however long it takes
ALONE = "alone"


@cache
def alone(file: str) -> bool:
    """Must the tests of this file, as "tests/fleet/test_cost.py", have the machine for themselves?"""
    path = TOP.parent / file
    if not path.is_relative_to(TOP) or not path.is_file():
        return False  # no test of ours
    folder = path.relative_to(TOP).parts[0] if path.parent != TOP else ""
    return folder not in BESIDE or (folder not in WAITING and "mark.slow" in path.read_text())


def file_of(test: str) -> str:
    return test.partition("::")[0]


def order(items: list[pytest.Item]) -> None:
    """Those that run alone last, otherwise as they stand."""
    items.sort(key=lambda item: alone(file_of(item.nodeid)))


def scheduler(config: pytest.Config, log: object) -> object | None:
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # else the largest first: those that run alone
    return schedule(config, log)


def schedule(config: pytest.Config, log: object = None) -> object:
    from xdist.scheduler import LoadFileScheduling

    class SideBySide(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return ALONE if alone(file_of(nodeid)) else file_of(nodeid)

        def _reschedule(self, node: Any) -> None:
            if node in self.registered_collections:  # else it is new and has not told its tests
                super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """What a test that ended its process left goes to others; the test itself, which xdist would try again and
            again, has failed."""
            units = self.assigned_work.pop(node)
            left = [(unit, test) for unit in units.values() for test in unit if not unit[test]]
            if not left:
                return None
            unit, ended = left[0]
            unit[ended] = True
            self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return ended

    return SideBySide(config, log)
