"""Any history of a job is safe at every moment, and whole again soon after the trouble ends.

SPOTFLEET_HISTORIES=2000 looks at more; `python tests/membership/membership_history.py SEED` replays one.
"""

from __future__ import annotations

import os

import pytest
from membership_history import history

HISTORIES = int(os.environ.get("SPOTFLEET_HISTORIES", "100"))
BLOCK = 10


@pytest.mark.parametrize("first", range(0, HISTORIES, BLOCK))
def test_a_random_history_is_safe_and_ends_well(first: int):
    for seed in range(first, first + BLOCK):
        history(seed)
