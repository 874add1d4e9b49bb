"""Count of an attack: its line, and that a broken promise fails the test."""

from __future__ import annotations

import pytest

from tests.support.attack.tally import LINES, PromiseBroken, Tally, tallied


def recorded(work) -> tuple[list[str], BaseException | None]:
    """Return the lines that were recorded for `work(tally)`, and what it raised."""
    lines: list[str] = []
    try:
        with tallied("K0 a kind", 7, lambda name, value: lines.append(f"{name}: {value}")) as tally:
            work(tally)
    except (PromiseBroken, OSError, pytest.skip.Exception) as error:
        return lines, error
    return lines, None


def test_a_kind_whose_promises_hold_prints_one_line_with_its_seed():
    def work(tally: Tally) -> None:
        tally.check("one", True)
        tally.none("some", (), 3)
        tally.note("a figure")

    assert recorded(work) == ([f"{LINES}: K0 a kind, seed 7: tried 4, kept 4, broken 0; a figure"], None)


def test_a_broken_promise_is_named_and_fails_the_test_once_all_are_tried():
    def work(tally: Tally) -> None:
        tally.check("one", False, "why")
        tally.none("some", {"a": 1}, 2)
        tally.check("two", True)

    lines, error = recorded(work)
    assert lines == [f"{LINES}: K0 a kind, seed 7: tried 4, kept 2, broken 2\n    broken: one: why\n"
                     "    broken: some: ('a', 1)"]
    assert isinstance(error, PromiseBroken)


def test_an_error_counts_as_a_broken_promise_and_a_skip_names_its_reason():
    def fails(tally: Tally) -> None:
        tally.check("one", True)
        raise OSError("no answer")

    lines, error = recorded(fails)
    assert lines == [f"{LINES}: K0 a kind, seed 7: tried 2, kept 1, broken 1\n"
                     "    broken: the attack comes to its end: OSError: no answer"]
    assert isinstance(error, OSError)
    lines, error = recorded(lambda tally: pytest.skip("needs root"))
    assert lines == [f"{LINES}: K0 a kind, seed 7: skipped: needs root"]
    assert isinstance(error, pytest.skip.Exception)
