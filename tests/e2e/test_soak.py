"""Minutes of random trouble, with everything real: `scripts/test --long tests/e2e/test_soak.py`."""

from __future__ import annotations

import os
import random

import pytest

from tests.e2e.soak import soak
from tests.support.e2e.e2e_stage import Stage

MINUTES = 5.0


@pytest.mark.processes
@pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="takes minutes; `scripts/test --long` runs it")
def test_the_count_and_the_bill_are_right_after_minutes_of_random_trouble(stage: Stage):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    soak(stage, seed, MINUTES)
