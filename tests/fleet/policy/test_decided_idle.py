"""`auto` while no job runs or waits: spot hosts alone, but for nodes.min."""

from __future__ import annotations

import pytest

from spotfleet.fleet.policy.decide import DeadlineJob, decide
from tests.fleet.policy.test_decide import FULL, HOUR, SPOT, Story, chosen, wants

NOTHING_ON_SALE = {"offers": (FULL,)}


@pytest.mark.parametrize(("needed", "base", "expected", "held"), [
    (None, 0, (3, 3), 0), (3, 0, (3, 3), 0), (2, 0, (3, 2), 1), (0, 0, (3, 0), 3), (1, 1, (2, 1), 2), (2, 1, (2, 2), 1),
    (0, 1, (2, 1), 2)])
def test_on_demand_hosts_fill_in_up_to_what_is_needed_and_the_base_stays(needed, base, expected, held):
    inputs = wants(3, "auto", base, needed=needed, **NOTHING_ON_SALE)
    choice = decide(inputs, Story().state(), 0.0)
    assert (choice.spot, choice.on_demand) == expected and choice.held == held
    assert choice.why.startswith("no job runs or waits, so ") == bool(held)


def test_spot_hosts_that_work_are_enough_for_what_is_needed_and_those_that_boot_are_not():
    story = Story().up(0.0)
    assert chosen(wants(3, needed=1, **NOTHING_ON_SALE), story, 10.0) == (3, 0)
    assert chosen(wants(3, needed=2, **NOTHING_ON_SALE), story, 10.0) == (3, 1)
    story = Story().up(0.0, FULL)
    story.launch(5.0)
    assert chosen(wants(3, needed=1), story, 10.0) == (3, 1)


def test_on_demand_hosts_that_nobody_needs_go_at_once_and_come_back_with_a_job():
    story = Story().up(0.0, FULL).up(0.0, FULL).refused(50.0)
    inputs = wants(2, offers=(SPOT, FULL))
    assert chosen(inputs, story, 5000.0) == (2, 2)
    assert chosen(wants(2, needed=1, offers=(SPOT, FULL)), story, 5000.0) == (2, 1)
    gone = Story().up(0.0).refused(50.0)
    assert chosen(wants(2, needed=0, offers=(SPOT, FULL)), gone, 5000.0) == (2, 0)
    assert chosen(inputs, gone, 5000.0) == (2, 1)  # no need to wait: it was refused all the while


def test_a_deadline_knows_nothing_of_it():
    near = DeadlineJob("j", 10 * HOUR + 60.0, 20 * HOUR)
    story = Story().up(0.0).refused(1.0)
    assert chosen(wants(2, "auto", 0, near, needed=0), story, 100_000.0) == (
        chosen(wants(2, "auto", 0, near), story, 100_000.0))
