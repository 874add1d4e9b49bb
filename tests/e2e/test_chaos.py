"""One job through everything at once, compared with plain torch bit for bit: see chaos.py."""

from __future__ import annotations

import os
import random

import pytest

from spotfleet.providers.local import LocalCloud
from tests.e2e.by_hand import left
from tests.e2e.chaos import LocalWorld, chaos, plan
from tests.support.e2e.e2e_stage import Stage

pytestmark = pytest.mark.processes
SOON = {"kill_worker": 3, "kill": 2, "kill_dispatcher": 2, "kill_two_workers": 2, "both_at_once": 2, "resize": 2,
        "drain": 1, "kill_agent": 1}  # nothing that takes its time


def test_a_few_random_events_change_no_bit_and_leave_no_process(stage: Stage):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chaos(LocalWorld(stage), plan(seed, events=4, kinds=SOON))
    LocalCloud(stage.home).shutdown()
    assert left(stage.home) == []


@pytest.mark.timeout(7200)
@pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="takes half an hour; `scripts/test --long` runs it")
def test_two_hundred_random_events_change_no_bit_and_leave_no_process(stage: Stage):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chaos(LocalWorld(stage), plan(seed, events=200))
    LocalCloud(stage.home).shutdown()
    assert left(stage.home) == []
