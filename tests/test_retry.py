"""Pauses between tries."""

from __future__ import annotations

from spotfleet.retry import Backoff, growing_s


def test_pauses_double_up_to_the_last_and_start_again_after_a_success():
    backoff = Backoff(0.5, 3.0)
    assert backoff.is_fresh and [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert not backoff.is_fresh
    backoff.reset()
    assert backoff.is_fresh and backoff.next_s() == 0.5


def test_a_loop_that_failed_for_years_still_has_a_pause():
    assert growing_s(10**6, 0.05, 2.0) == 2.0
