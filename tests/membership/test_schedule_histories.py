"""Any history of jobs with priorities on one fleet: no host is held twice, each loss has a reason, none starves.

More of them: `python -m tests.sim.many_histories schedule COUNT`.
"""

from __future__ import annotations

import pytest

from tests.support.membership.schedule_history import history


@pytest.mark.parametrize("first", range(0, 12, 4))
def test_a_random_history_holds_no_slot_twice_ends_no_job_without_a_reason_and_starves_none(first: int):
    for seed in range(first, first + 4):
        history(seed)


def test_histories_have_jobs_that_give_hosts_up_for_others():
    assert sum(history(seed) for seed in range(21, 25)) > 0
