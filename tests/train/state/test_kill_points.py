"""Real workers really killed at exact points: the job goes on, and ends with the bits of plain torch undisturbed.

Several deaths per run, each replaced by a spare that has waited from the start. What must hold whatever dies:
chaos_reference.py.
"""

from __future__ import annotations

import signal

import pytest

from spotfleet.protocol.messages import Stage
from tests.support.train import chaos_reference
from tests.support.train.train_scripts import chaos_script

pytestmark = pytest.mark.processes


@pytest.fixture
def train(fleets, tmp_path):
    """train(size, workers, {number: death, ...}) -> the fleet after one epoch, and what its workers noted."""

    def run(size: int, workers: int, deaths: dict[int, str]):
        notes, stop = tmp_path / "notes", tmp_path / "stop"
        notes.mkdir()
        stop.touch()
        fleet = fleets(chaos_script(notes, stop, "kill_points"), founders=size)
        fleet.hold = True
        names = [fleet.start(DIE=deaths.get(number, "")) for number in range(workers)]
        fleet.wait(lambda: all(fleet.report(n).stage is Stage.INIT for n in names[:size]), what="founders")
        fleet.form(tuple(names[:size]), "start")
        fleet.wait(lambda: all(fleet.report(n).stage is Stage.READY for n in names[size:]), what="spares")
        fleet.hold = False
        fleet.wait_end()
        killed = {n for n, name in enumerate(names) if fleet.workers[name].exit == -signal.SIGKILL}
        assert killed == set(deaths), fleet.story()
        job = chaos_reference.check(notes)
        job.check_repeats()
        return fleet, job

    return run


def test_a_death_at_any_point_of_an_iteration_changes_no_bit_and_repeats_one_step_at_most(train):
    fleet, job = train(3, 10, {
        1: "forward:3", 2: "backward:7", 0: "collective:11", 3: "instep:15", 4: "stepped:17", 5: "metric:20",
        6: "instep:23"})
    assert [world for _, world in job.applied] == [3] * job.steps
    assert fleet.generation == 8


def test_deaths_while_generations_form_and_while_the_state_is_handed_on_change_no_bit(train):
    """One death leads to the next: each hits the generation that replaces the one before it."""
    fleet, job = train(3, 9, {
        1: "backward:5", 3: "forming:2", 4: "formed:3", 5: "receiving:4", 0: "sending:5", 6: "receiving:6"})
    assert [cause for _, _, cause in fleet.history] == ["start"] + ["death"] * 6
    assert {generation for generation, _ in job.applied} == {1, 7}
    assert fleet.members == ("h7/0/1", "h8/0/1", "h2/0/1")


def test_two_at_once_and_then_all_but_one_leave_enough_to_go_on_with(train):
    fleet, job = train(4, 9, {
        1: "collective:4:2", 2: "collective:4:2", 4: "forward:12", 0: "instep:12:2", 3: "instep:12:2"})
    assert {world for _, world in job.applied} == {4}
    assert job.applied[-1][0] == fleet.generation
