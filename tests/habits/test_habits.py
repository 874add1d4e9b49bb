"""Each loop of the table under plain torch, undisturbed, and through every kind of loss and change: the same bits."""

from __future__ import annotations

import re

import pytest

import spotfleet.train as hvd
from spotfleet.errors import UsageError
from tests.habits import page
from tests.habits.kit import TABLE, Disturbance, Habit, Kit, Result
from tests.support.train import thread_fleet
from tests.support.train.thread_fleet import ThreadFleet, Worker

KILLS = [Disturbance("kill", point) for point in ("forward", "reduced", "stepped")]
CHANGES = [
    Disturbance(),
    *KILLS,
    Disturbance("kill", "reduced", spares=1),
    Disturbance("notice", "forward"),
    Disturbance("notice", "forward", spares=1),
    Disturbance("kill", "stepped", at=3, spares=1, second=4),
]


def title(d: Disturbance) -> str:
    if not d.what:
        return "undisturbed"
    more = ", replaced" if d.spares else ""
    return f"{d.what} at {d.point}{more}" + (", then the other one" if d.second else "")


@pytest.fixture
def play(monkeypatch):
    """play(habit, disturbance): the results of the workers whose loop came to its end."""
    thread_fleet.install(monkeypatch)

    def run(habit: Habit, disturbance: Disturbance) -> list[Result]:
        def script(worker: Worker) -> Result:
            hvd.init()
            return habit.loop(Kit(worker, disturbance))

        fleet = ThreadFleet(script, 2, disturbance.spares)
        try:
            return [worker.result for worker in fleet.finish()]
        finally:
            fleet.close()

    return run


def differences(found: Result, expected: Result) -> list[str]:
    return [f"{name}: {found.get(name)} instead of {expected.get(name)}"
            for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]


@pytest.mark.parametrize("habit", TABLE, ids=lambda habit: f"{habit.family}: {habit.name}")
def test_each_habit_gives_the_bits_of_plain_torch_or_is_refused(habit, play, capfd):
    if habit.verdict == "refused":
        with pytest.raises(UsageError, match=habit.message):
            for disturbance in CHANGES:
                play(habit, disturbance)
        return
    expected = habit.loop(Kit())
    wrong = []
    for disturbance in CHANGES:
        try:
            results = play(habit, disturbance)
        except Exception as error:  # noqa: BLE001 - one table of all that is wrong
            wrong.append(f"{title(disturbance)}: {type(error).__name__}: {error}")
            continue
        if not results:
            wrong.append(f"{title(disturbance)}: nobody came to the end")
        if habit.verdict == "noticed" and re.search(habit.message, capfd.readouterr().err):
            continue
        for found in results:
            wrong += [f"{title(disturbance)}: {line}" for line in differences(found, expected)]
    assert not wrong, "\n".join(wrong)


def test_the_page_for_users_is_that_of_the_table():
    assert page.PAGE.read_text() == page.page(), "write it anew: python -m tests.habits.page"
