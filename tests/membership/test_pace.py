"""How fast a membership changes by our own choice; deaths and notices never wait."""

from __future__ import annotations

import pytest

from spotfleet.membership import Pace
from spotfleet.membership.pace import Pacer
from spotfleet.protocol.messages import Stage
from tests.support.membership.membership_desk import Desk, training


@pytest.mark.parametrize(("size", "wanted", "since_s", "limit"), [
    (2, 8, 100.0, 3),  # one more
    (4, 1, 100.0, 2),  # two fewer
    (4, 3, 100.0, 3),
    (4, 4, 100.0, 4),
    (2, 8, 59.9, 2),  # too soon
    (4, 1, 59.9, 4),
])
def test_the_next_size(size, wanted, since_s, limit):
    assert Pace(max_join=1, max_leave=2, every_s=60.0).limit(size, wanted, since_s) == limit


def test_without_limits_everybody_comes_and_goes_at_once():
    assert [Pace().limit(2, wanted, 0.0) for wanted in (1, 8)] == [1, 8]


def paced(*workers: str, **pace: float) -> Desk:
    """A job that trains on these workers, whose changes are to be slow."""
    desk = training(*workers)
    desk.core.pacer = Pacer(Pace(**pace))
    return desk


def ready(desk: Desk, *workers: str) -> None:
    desk.put(*workers, stage=Stage.READY)


def test_joins_come_in_parts_and_the_rest_waits_its_turn():
    desk = paced("a", max_join=2, every_s=60.0)
    ready(desk, "b", "c", "d")
    desk.see()
    assert desk.ordered(after=0.3) == ("join", ("a", "b", "c"))
    desk.form()
    assert desk.ordered(after=50.0) is None
    assert desk.core.why == "generation 2 on 3 workers; 1 more may join in 10 s"
    desk.see(after=10.0)
    assert desk.ordered(after=0.3) == ("join", ("a", "b", "c", "d"))


def test_a_smaller_job_lets_go_of_its_workers_in_parts():
    desk = paced("a", "b", "c", "d", max_leave=1)
    desk.core.max_workers = 2
    desk.see()
    assert desk.ordered(after=0.3) == ("drain", ("a", "b", "c"))
    desk.form()
    assert desk.ordered(after=0.3) == ("drain", ("a", "b"))


def test_a_death_waits_for_nothing_and_brings_in_no_more_than_it_took():
    desk = paced("a", "b", "c", max_join=1, every_s=60.0)
    ready(desk, "d", "e", "f")
    desk.see()
    assert desk.ordered(after=0.3) == ("join", ("a", "b", "c", "d"))
    desk.form()
    desk.put("b", exited=True)
    assert desk.ordered(after=1.0) == ("death", ("a", "e", "c", "d"))


def test_a_death_while_a_generation_forms_brings_in_no_more_than_it_was_to_have():
    desk = paced("a", max_join=1)
    ready(desk, "b", "c", "d")
    desk.see()
    assert desk.ordered(after=0.3) == ("join", ("a", "b"))
    desk.put("b", exited=True)
    assert desk.ordered() == ("death", ("a", "c"))


def test_a_notice_waits_for_nothing():
    desk = paced("a", "b", "c", max_join=1, max_leave=1, every_s=60.0)
    ready(desk, "d")
    desk.see()
    desk.ordered(after=0.3)
    desk.form()
    desk.put("b", "c", leaving_s=4.0, leaving_why="notice")
    assert desk.ordered(after=1.0) == ("notice", ("a", "d"))


def test_where_nobody_trains_all_begin_at_once():
    desk = training("a", "b", min_workers=2)
    desk.core.pacer = Pacer(Pace(max_join=1, every_s=60.0))
    desk.put("a", "b", leaving_s=4.0, leaving_why="notice")
    assert desk.ordered() == ("notice", ())
    desk.put("a", "b", leaving_s=None)
    ready(desk, "c", "d")
    desk.see()
    assert desk.ordered(after=0.3) == ("notice", ("a", "b", "c", "d"))


def test_a_restarted_dispatcher_takes_the_last_change_for_one_of_just_now():
    desk = paced("a", max_join=1, every_s=60.0)
    desk.core.pacer.resumed()
    ready(desk, "b")
    desk.see()
    assert desk.ordered(after=59.9) is None
    desk.see(after=0.1)
    assert desk.ordered(after=0.3) == ("join", ("a", "b"))
