"""A parameter that falls by exactly 1 per applied step ends at minus the number of batches, whatever happens.

Real processes, since only a real SIGKILL leaves sockets, kernels and half-sent messages as a lost machine does.
"""

from __future__ import annotations

import random

import pytest

from tests.support.train.train_scripts import COUNT

pytestmark = pytest.mark.processes


def finish(fleet, batches: int) -> None:
    """Every worker that reached the end holds minus the number of batches."""
    fleet.wait_end()
    weights = fleet.lines("WEIGHT")
    assert weights and set(weights) == {str(float(-batches))}, fleet.story()


@pytest.mark.parametrize("every", [1, 7, 1000])
def test_each_batch_is_applied_once_through_kills_notices_and_joins(fleets, every):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    env = {"EVERY": str(every), "EPOCHS": "10", "BATCHES": "60", "NAP": "0.004"}
    fleet = fleets(COUNT, founders=3)
    fleet.start_all(**env)
    fleet.start(**env)
    for version in sorted(chance.sample(range(20, 400), 4)):
        fleet.wait_version(version)
        members = [m for m in fleet.members if fleet.workers[m].alive and not fleet.workers[m].leaving]
        if len(members) > 1:
            chance.choice([fleet.kill, fleet.drain])(chance.choice(members))
            fleet.start(**env)
    finish(fleet, 600)


def test_the_pause_after_a_kill_is_short_and_one_gradient_at_most_is_computed_again(fleets):
    fleet = fleets(COUNT)
    a, b, c = fleet.start_all(EPOCHS="10", BATCHES="50")
    fleet.wait_version(100)
    fleet.kill(b)
    fleet.wait(lambda: fleet.report(a).resumed == fleet.report(c).resumed == 2, what="training goes on")
    reports = [fleet.report(a), fleet.report(c)]
    print("pause after SIGKILL:", [round(r.pause_s, 3) for r in reports])
    assert all(r.pause_s < 5.0 and r.recomputed <= 1 and r.repeated == 0 for r in reports)
    finish(fleet, 500)


def test_a_planned_leave_and_a_planned_join_repeat_no_step(fleets):
    fleet = fleets(COUNT)
    env = {"EPOCHS": "20", "BATCHES": "60"}
    a, b, c = fleet.start_all(**env)
    d = fleet.start(**env)
    fleet.wait_version(50)
    fleet.drain(a)
    fleet.wait(lambda: fleet.generation >= 2 and fleet.report(c).resumed == fleet.generation, what="a has left")
    fleet.wait(lambda: d in fleet.members and fleet.report(d).resumed == fleet.generation, what="d has joined")
    print("pauses:", [round(fleet.report(w).pause_s, 3) for w in (b, c)])
    assert [(r.repeated, r.recomputed, r.failed) for r in map(fleet.report, (b, c, d))] == [(0, 0, 0)] * 3
    fleet.wait(lambda: fleet.workers[a].exit == 0, what="a has ended by itself")
    finish(fleet, 1200)


def test_a_failure_in_a_users_collective_after_the_step_replays_the_iteration_without_its_step(fleets):
    fleet = fleets(COUNT)
    fleet.start_all(DIE="h1/0/1:stepped:40", METRIC="1", EPOCHS="2", BATCHES="40")
    finish(fleet, 80)
    assert [(r.recomputed, r.repeated) for r in map(fleet.report, ("h0/0/1", "h2/0/1"))] == [(1, 0)] * 2


LATE = COUNT.replace("hvd.init()", '''hvd.init()
from spotfleet.train.comm.group import Group
finish_as_built, seen = Group.finish, [0]
def finish(self, works):
    finish_as_built(self, works)
    seen[0] += 1
    if ME == "h2/0/1" and seen[0] == 40:
        raise self.refuse("this rank did not see the end of the reduction")
Group.finish = finish''')


def test_a_survivor_that_missed_a_step_takes_over_the_newest_state(fleets):
    """Ranks 0 and 1 apply a step whose reduction fails on rank 2: they are one version ahead, for real."""
    fleet = fleets(LATE)
    fleet.start_all(EPOCHS="2", BATCHES="40")
    finish(fleet, 80)
    assert fleet.report("h2/0/1").failed == 1 and len(fleet.lines("WEIGHT")) == 3


def test_models_that_differ_at_the_start_are_made_equal(fleets):
    fleet = fleets(COUNT)
    fleet.start_all(EQUAL="0", EPOCHS="1", BATCHES="5")
    finish(fleet, 5)


def test_reset_callbacks_see_the_new_size_on_every_rank_and_do_not_run_at_the_start(fleets):
    fleet = fleets(COUNT)
    a, _, c = fleet.start_all(EPOCHS="3", BATCHES="40", DIE="h1/0/1:reduced:30")
    finish(fleet, 120)
    assert [[x for x in fleet.log(w).splitlines() if x.startswith("RESET")] for w in (a, c)] == [["RESET 2"]] * 2


LAST = COUNT.replace("\nME", '''
as_built = runtime.Runtime._finish
def finish(self, state):
    if os.environ["SPOTFLEET_WORKER"] == "h1/0/1":
        os.kill(os.getpid(), signal.SIGKILL)
    as_built(self, state)
runtime.Runtime._finish = finish
ME''')


def test_a_death_at_the_very_end_does_not_run_the_function_again(fleets):
    fleet = fleets(LAST.replace("    for state.epoch in", "    print('ENTERED', flush=True)\n    for state.epoch in"))
    a, _, c = fleet.start_all(EPOCHS="1", BATCHES="10")
    fleet.start(EPOCHS="1", BATCHES="10")  # may come in time to join the finished state, and must not train it on
    finish(fleet, 10)
    for survivor in (a, c):
        assert fleet.log(survivor).count("ENTERED") == 1 and "RETURNED done" in fleet.log(survivor)


def test_a_worker_whose_function_has_returned_and_that_is_told_to_stop_runs_the_rest_of_its_script(fleets):
    fleet = fleets(LAST, founders=2)
    a, b = fleet.start_all(EPOCHS="1", BATCHES="10")
    fleet.hold = True  # nobody gives it another generation in which to pass the barrier
    fleet.wait(lambda: not fleet.workers[b].alive and fleet.report(a).failed == 1, what="the barrier breaks")
    fleet.order(a, stop=True)
    finish(fleet, 10)
    assert fleet.workers[a].exit == 0 and "RETURNED done" in fleet.log(a)
