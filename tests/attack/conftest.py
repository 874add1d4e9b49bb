"""Seeds, tallies and the lines at a run's end; a home for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.support.attack.live import live_stage
from tests.support.attack.tally import LINES, ONCE, TURNS, Tally, seed_of, tallied
from tests.support.e2e.e2e_stage import Stage


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "turn" in metafunc.fixturenames and ONCE.mark not in metafunc.definition.own_markers:
        metafunc.parametrize("turn", range(TURNS))


@pytest.fixture
def seed(turn: int) -> int:
    return seed_of(turn)


@pytest.fixture
def attack(seed: int, record_property) -> Callable[[str], AbstractContextManager[Tally]]:
    """`with attack("K1 ...") as tally`: see `tallied`."""
    return partial(tallied, seed=seed, record=record_property)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with live_stage(tmp_path) as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found]
    lines = {value: None for report in reports for name, value in getattr(report, "user_properties", ())
             if name == LINES}
    if lines:
        terminalreporter.section("attacks")
        for line in sorted(lines, key=_order):
            terminalreporter.write_line(line)


def _order(line: str) -> tuple[int, str]:
    """K2 comes before K10."""
    number = line.split()[0].removeprefix("K")
    return int(number) if number.isdigit() else 0, line
