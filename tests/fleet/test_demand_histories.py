"""Random histories of a Ray cluster's demand, with seeds; `demand_history.py` says what must hold in each.

More of them: `python -m tests.sim.many_histories demand COUNT`; one: `python -m tests.support.fleet.demand_history
SEED`.
"""

from __future__ import annotations

import os

import pytest

from tests.support.fleet.demand_history import history

HISTORIES = 1000 if os.environ.get("SPOTFLEET_LONG") else 12
BLOCK = 4
TROUBLES = {"died", "drained", "refused", "late", "taken back", "idle"}


@pytest.mark.parametrize("first", range(0, HISTORIES, BLOCK))
def test_a_random_history_of_demand_buys_no_more_than_first_fit_and_settles(first: int):
    seen = {line for seed in range(first, first + BLOCK) for line in history(seed).log}
    assert first or seen >= TROUBLES, "the first histories have every trouble"
