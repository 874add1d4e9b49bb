"""The dispatcher's process is killed again and again while a job trains: see dispatcher_kills.py."""

from __future__ import annotations

import os
import random

import pytest

from tests.e2e.dispatcher_kills import kill_dispatchers
from tests.support.e2e.e2e_stage import Stage

pytestmark = pytest.mark.processes


def test_killing_the_dispatcher_at_any_moment_costs_no_step_and_no_worker(stage: Stage):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    kill_dispatchers(stage, seed, kills=3, digits=False)


@pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="takes minutes; `scripts/test --long` runs it")
def test_fifty_kills_of_the_dispatcher_change_no_bit_of_the_weights(stage: Stage):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    kill_dispatchers(stage, seed, kills=50, digits=True)
