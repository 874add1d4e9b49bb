"""Histories of a whole fleet, and what runs many of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim import many_histories
from tests.support.fleet.fleet_history import history

HISTORIES, BLOCK = 9, 3


@pytest.mark.parametrize("first", range(0, HISTORIES, BLOCK))
def test_in_a_random_history_of_a_fleet_every_job_ends_nothing_is_left_and_the_bill_is_right(first: int):
    for seed in range(first, first + BLOCK):
        history(seed)


@pytest.mark.parametrize("raised", ["AssertionError('two train')", "KeyError('h1')"])
def test_a_history_that_goes_wrong_is_told_with_its_seed_and_stops_no_other(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    driver = tmp_path / f"driver_{raised[:3].lower()}.py"
    driver.write_text(f"def history(seed):\n    if seed in (4, 6):\n        raise {raised}\n")
    monkeypatch.setitem(many_histories.DRIVERS, "odd", driver.stem)
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = many_histories.block("odd", 0, 10)
    assert [seed for seed, _ in wrong] == [4, 6]
    assert all(what.startswith(raised.partition("(")[0]) for _, what in wrong)
