"""Who goes when a job asks for fewer workers than it has."""

from __future__ import annotations

from tests.support.membership.membership_desk import training

NAMES = "abcdefghijklmnop"


def test_reports_that_come_one_after_the_other_do_not_keep_a_job_from_becoming_smaller():
    desk = training(*NAMES, max_workers=16)
    desk.core.max_workers = 6
    looks = [desk.ordered()]
    for number in range(8):  # somebody else's report is the oldest each time
        desk.put(*NAMES, version=20 + number)
        desk.put(NAMES[number], version=19 + number)
        looks.append(desk.ordered(after=0.1))
    assert [order for order in looks if order] == [("drain", tuple("abcdef"))]


def test_one_that_holds_no_state_goes_before_one_that_does():
    desk = training("a", "b", "c")
    desk.put("a", version=-1)  # half received
    desk.core.max_workers = 2
    desk.see()
    assert desk.ordered(after=0.3) == ("drain", ("b", "c"))
