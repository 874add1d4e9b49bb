"""Random histories of planner and reconciler, with seeds; `planner_history.py` says what must hold in each.

More of them: `python tests/sim/many_histories.py planner COUNT`; one: `python tests/fleet/planner_history.py SEED`.
"""

from __future__ import annotations

import pytest
from planner_history import TROUBLES, history

HISTORIES, BLOCK = 30, 10


@pytest.mark.parametrize("first", range(0, HISTORIES, BLOCK))
def test_a_random_history_of_the_planner_is_safe_and_ends_with_the_wanted_hosts(first: int):
    for seed in range(first, first + BLOCK):
        history(seed)


def test_the_histories_have_every_trouble():
    told = {line for seed in range(HISTORIES) for line in history(seed).told}
    assert told >= TROUBLES.keys() | {"killed"}
