"""A joiner of a job that waits for its minimum sees its true place, through the real dispatcher and agents: only they
predict it. Rules and histories are in tests/membership/."""

from __future__ import annotations

import pytest

from tests.support.e2e.e2e_stage import Stage, hosts_of, output, trains, wait_for

pytestmark = pytest.mark.processes

# Horovod's tutorial, shortened: a plain sampler from the numbers before elastic.run, epochs of its length. It goes on
# from the batch in the state; from the first one again would be refused.
TUTORIAL = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, DistributedSampler
import spotfleet.train as hvd

hvd.init()
top = (hvd.rank(), hvd.size(), hvd.local_rank())
data = torch.arange(36.0).view(-1, 1)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=2, sampler=sampler)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

@hvd.elastic.run
def train(state):
    assert top == (hvd.rank(), hvd.size(), hvd.local_rank()), top
    while state.epoch < 30:
        sampler.set_epoch(state.epoch)
        batches = list(loader)
        for state.batch in range(state.batch, len(batches)):
            x = batches[state.batch]
            opt.zero_grad()
            (model(x) - model(x).detach() + model.weight - model.weight.detach()).mean().backward()
            opt.step()
            if not os.path.exists(sys.argv[1]):
                time.sleep(0.1)
        state.epoch, state.batch = state.epoch + 1, 0

train(hvd.elastic.TorchState(model, opt, epoch=0, batch=0))
print(f"END {hvd.rank()} of {hvd.size()}: {len(loader)} batches", flush=True)
"""


def test_a_joiner_walks_through_as_many_batches_as_those_it_joins(stage: Stage):
    (stage.work / "tutorial.py").write_text(TUTORIAL)
    fleet = stage.fleet("joiners", least=2, target=3)
    job = fleet.train("tutorial.py", [str(stage.work / "hurry")], np=(3, 3), detach=True)
    wait_for("three workers that train", lambda: trains(job, 3, step=3))

    noticed = hosts_of(job)[1]
    fleet.interrupt(noticed, 4.0)
    wait_for("a replacement", lambda: trains(job, 3, without=noticed))
    killed = hosts_of(job)[0]
    fleet.interrupt(killed, None)
    wait_for("a replacement", lambda: trains(job, 3, without=killed))
    stage.hurry()
    job.wait(120)

    assert "END 0 of 3: 6 batches" in output(job)
    assert job.status().version == 30 * 6
