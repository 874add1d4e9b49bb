"""From what a machine says of its hosts to lines of a listing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfleet.model import CloudHost, CloudState, Market, Offer, Role, Run
from spotfleet.providers.ssh.listing import ListedHost, Report, away, read, written

OFFER = Offer("ssh", "ssh", "gpu1", "machine", Market.ON_DEMAND, 8, 0, 0)
BORN = CloudHost("f-1", "gpu1/f-1", "f", Role.WORKER, OFFER, CloudState.PENDING, (Run(100.0),), "10.0.0.1")


def said(*lines: str, claim: str = "f-1") -> Report:
    whole = ["time 500.5", "host f-1", f"listing {written(BORN, ['boot.json'])}", *lines, f"claim {claim}"]
    return read("\n".join(whole) + "\n")


def line_of(*lines: str) -> CloudHost:
    (held,) = said(*lines).hosts
    return held.line


def test_a_host_is_told_with_the_time_of_its_machine_and_what_it_was_told_at_birth():
    assert said("state running 200 spotfleet.agent") == Report(
        500.5, (ListedHost("f-1", replace(BORN, state=CloudState.RUNNING), ("boot.json",)),), "f-1", (),
        {"claim": "f-1"})


@pytest.mark.parametrize("line, state, why", [
    (None, CloudState.PENDING, ""),
    ("state installing 120 searches for Python", CloudState.PENDING, "installing: searches for Python"),
    ("state running 200 spotfleet.agent", CloudState.RUNNING, ""),
    ("state running 200 spotfleet.agent; it ended with status 1 before: oh", CloudState.RUNNING,
     "spotfleet.agent; it ended with status 1 before: oh"),
    ("state something new", CloudState.PENDING, ""),
])
def test_a_host_that_has_not_ended_has_its_run_open(line, state, why):
    assert line_of(*([line] if line else [])) == replace(BORN, state=state, why=why)


@pytest.mark.parametrize("line, ended_at, taken, why", [
    ("state off 300 spotfleet.agent has ended", 300.0, False, "it has ended itself"),
    ("state failed 300 its disk is full", 300.0, False, "its disk is full"),
    ("taken 300.25 interrupted", 300.25, True, "interrupted"),
    ("state failed 100 at once", 100.001, False, "at once"),  # longer than nothing
    ("unstarted yes", 100.001, False, "its launch was cut off before it began"),
])
def test_a_host_that_has_ended_says_when_and_why(line, ended_at, taken, why):
    assert line_of(line) == replace(BORN, state=CloudState.TERMINATED, why=why,
                                    runs=(Run(100.0, ended_at, taken=taken),))


def test_a_host_that_is_being_ended_is_neither_failed_nor_to_be_made_again():
    (held,) = said("ending yes", "state failed 300 nothing of it runs").hosts
    assert (held.line.state, held.failed) == (CloudState.RUNNING, "")


def test_only_a_host_that_could_not_be_made_counts_as_failed():
    assert said("state failed 300 no Python").hosts[0].failed == "no Python"
    assert [said(line).hosts[0].failed for line in ("taken 300 interrupted", "state off 300 x", "state running 1 x")
            ] == ["", "", ""]


@pytest.mark.parametrize("report, free", [
    (read("time 1\n"), True),
    (read("time 1\nclaim \n"), True),
    (said("state running 200 x"), False),
    (said("state off 200 x"), True),  # cleaned up on the way
    (said("state off 200 x", claim="g-1"), False),  # another's launch
    (said("state off 200 x", claim=""), True),
])
def test_a_machine_is_free_when_nobody_that_lives_has_claimed_it(report, free):
    assert report.free is free


def test_a_listing_that_cannot_be_read_is_named_and_hides_no_other():
    text = f"time 1\nhost bad\nlisting {{\nhost f-1\nlisting {written(BORN, [])}\nclaim f-1\n"
    report = read(text)
    assert report.broken == ("bad",) and [h.request_id for h in report.hosts] == ["f-1"]


def test_a_host_whose_machine_does_not_answer_is_stopped_with_its_run_open():
    running = replace(BORN, state=CloudState.RUNNING)
    assert away(running, "x") == replace(BORN, state=CloudState.STOPPED, why="x")
