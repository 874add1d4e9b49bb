"""Any history of a job's workers ends well, and its steps are counted exactly, for the torch engine and for a toy.

More of them: `python -m tests.sim.many_histories engines COUNT`; 10,000 with `scripts/test --long`.
"""

from __future__ import annotations

import os

import pytest

from tests.support.membership.engine_history import history

HISTORIES, BLOCK = (10_000, 100) if os.environ.get("SPOTFLEET_LONG") else (100, 2)


@pytest.mark.parametrize("first", range(0, HISTORIES, BLOCK))
def test_all_engines_count_exactly_through_any_history(first: int):
    for seed in range(first, first + BLOCK):
        history(seed)
