"""What docs/commit.md promises of batch-norm statistics, where each rank has data of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spotfleet.train as hvd
from tests.support.train.loops import Disturbance, Job, fleet_of, seeded

STEPS, CUT = 9, 5


def by_rank(job: Job):
    """Return the statistics; note, at each call of the function, the step and the statistics that it begins with."""
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    seeded(net)
    opt = job.distributed(torch.optim.SGD(net.parameters(), lr=0.1))

    def train(state):
        job.note((state.step, net[0].running_mean.tolist()))
        while state.step < STEPS:
            opt.zero_grad()
            job.at("top", state.step)
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * hvd.rank() + state.step))
            net(x).pow(2).mean().backward()
            opt.step()
            state.step += 1
        return net[0].running_mean.tolist(), net[1].weight.tolist()

    return job.run(train, model=net, optimizer=opt, step=0)


@pytest.mark.parametrize("kind", ["kill", "notice"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_lives_on_keeps_its_statistics_and_a_newcomer_begins_with_those_of_another(threads, kind, lost):
    undisturbed = [w.result for w in fleet_of(threads, by_rank).workers.values()]
    fleet = fleet_of(threads, by_rank, Disturbance(kind, "top", CUT, spares=1, worker=lost))
    kept, newcomer = fleet.workers[f"h{1 - lost}/0/1"], fleet.workers["h2/0/1"]
    assert fleet.members.index("h2/0/1") == lost
    assert kept.result == undisturbed[1 - lost]  # statistics and weights
    assert newcomer.result[1] == undisturbed[lost][1]  # weights
    assert newcomer.notes == kept.notes[1:] and newcomer.result[0] != undisturbed[lost][0]
