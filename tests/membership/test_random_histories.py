"""Any history of jobs that share a fleet is safe at every moment, and all is whole again soon after the trouble ends.

More of them: `python -m tests.sim.many_histories membership COUNT`; one alone: `python
tests/support/membership/membership_history.py SEED`.
"""

from __future__ import annotations

import pytest

from tests.support.membership.membership_history import history

HISTORIES, BLOCK = 100, 10


@pytest.mark.parametrize("first", range(0, HISTORIES, BLOCK))
def test_a_random_history_is_safe_and_ends_well(first: int):
    for seed in range(first, first + BLOCK):
        history(seed)
