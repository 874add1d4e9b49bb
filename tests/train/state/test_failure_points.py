"""What a loss at each point of an iteration costs, for every cadence of commits: the tables of docs/commit.md.

Every job here uses all that a state can hold (thread_scripts.py: everything), and must end as an undisturbed one does.
"""

from __future__ import annotations

import functools

import pytest
import torch

import spotfleet.train as hvd
from tests.support.train.thread_fleet import ThreadFleet, Worker
from tests.support.train.thread_scripts import POINTS, Plan, everything

KILLED_AT = 5
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first steps are skipped


@pytest.fixture
def jobs(threads):
    """jobs(plan, spares): a running fleet of two."""
    for copies in (False, True):
        undisturbed(copies)  # now, while no other fleet runs
    return lambda plan, spares: threads(everything(plan), spares=spares)


@functools.cache
def undisturbed(copies: bool) -> list[dict]:
    """By rank; the cadence of commits changes nothing."""
    fleet = ThreadFleet(everything(Plan(copies=copies)), 2)
    try:
        return [w.result for w in fleet.finish()]
    finally:
        fleet.close()


PER_RANK = ("statistics", "average")  # each rank has its own batch-norm statistics; a new one takes those of another


def check(fleet: ThreadFleet, expected: list[dict]) -> None:
    """Every rank ends with every bit of the undisturbed run; who filled a place, with all but statistics of its own."""
    fleet.finish()
    for rank, name in enumerate(fleet.members):
        worker, due = fleet.workers[name], expected[rank]
        newcomer = int(name[1]) >= fleet.founders
        assert worker.result == {**due, **{k: worker.result[k] for k in PER_RANK if newcomer}}, fleet.story()


def entries(fleet: ThreadFleet, name: str) -> list[tuple]:
    return fleet.workers[name].notes


# ---- step mode: where the survivor goes on, and whether that iteration's step is applied already

STEP_MODE = {
    **dict.fromkeys(["top", "forward", "backward", "second"], (5, "")),
    **dict.fromkeys(["reduced", "clipped", "instep", "stepped", "metric"], (5, "replay")),
    "committed": (6, ""),
}


@pytest.mark.parametrize("every", [1, 3, 0])
@pytest.mark.parametrize("point", POINTS)
def test_in_step_mode_a_loss_at_any_point_costs_one_gradient_whatever_the_cadence(jobs, point, every):
    victim = POINTS.index(point) % 2
    fleet = jobs(Plan(victim, point, KILLED_AT, every), spares=1)
    check(fleet, undisturbed(False))
    survivor = f"h{1 - victim}/0/1"
    assert entries(fleet, survivor) == [(0, "", 2), (*STEP_MODE[point], 2)]
    report = fleet.workers[survivor].control.report
    assert (report.recomputed, report.repeated) == (1, 0)


# ---- copy mode: back to the newest commit

@pytest.mark.parametrize(("every", "before", "after"), [(1, 5, 6), (3, 3, 6), (0, 0, 0)])
@pytest.mark.parametrize("point", POINTS)
def test_in_copy_mode_a_loss_at_any_point_goes_back_to_the_newest_commit(jobs, point, every, before, after):
    victim = POINTS.index(point) % 2
    fleet = jobs(Plan(victim, point, KILLED_AT, every, copies=True), spares=1)
    check(fleet, undisturbed(True))
    assert entries(fleet, f"h{1 - victim}/0/1") == [(0, "", 2), (after if point == "committed" else before, "", 2)]


# ---- notices: nothing is computed twice

@pytest.mark.parametrize("every", [1, 3, 0])
def test_in_step_mode_a_notice_costs_nothing_whatever_the_cadence(jobs, every):
    fleet = jobs(Plan(0, drain_at=KILLED_AT, every=every), spares=1)
    check(fleet, undisturbed(False))
    assert entries(fleet, "h1/0/1") in ([(0, "", 2), (step, "", 2)] for step in (KILLED_AT, KILLED_AT + 1))
    assert fleet.members == ("h2/0/1", "h1/0/1") and fleet.workers["h1/0/1"].control.report.repeated == 0


@pytest.mark.parametrize("every", [1, 3])
def test_in_copy_mode_a_notice_waits_for_the_next_commit_and_costs_nothing(jobs, every):
    fleet = jobs(Plan(0, drain_at=KILLED_AT, every=every, copies=True), spares=1)
    check(fleet, undisturbed(True))
    assert entries(fleet, "h1/0/1") == [(0, "", 2), (6, "", 2)]
    assert fleet.members == ("h2/0/1", "h1/0/1") and fleet.workers["h1/0/1"].control.report.repeated == 0


# ---- parameters that begin to train

def freeing(worker: Worker) -> tuple[float, ...]:
    """The second parameter is in the optimizer from the start and trains from step 3; each rank has data of its own."""
    hvd.init()
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    model.bias.requires_grad_(False)
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    state = hvd.elastic.TorchState(model, opt, step=0)

    @hvd.elastic.run
    def train(state):
        while state.step < 8:
            if state.step == 3:
                model.bias.requires_grad_(True)
            if state.step == 5 and worker.name == "h0/0/1":
                worker.fleet.drain(worker.name)
            opt.zero_grad()
            ((1.0 + hvd.rank()) * model(torch.ones(1, 1))).sum().backward()
            opt.step()
            state.step += 1
        return model.weight.item(), model.bias.item()

    return train(state)


def test_a_parameter_that_is_set_free_later_is_averaged_from_then_on_also_with_one_who_joined_since(threads):
    fleet = threads(freeing, spares=1)
    assert [w.result for w in fleet.finish()] == [(-12.0, -7.5)] * 2  # a gradient of 1 and 2 by rank, 8 and 5 times
    assert fleet.members == ("h2/0/1", "h1/0/1")
