"""What a worker's process opens to the network."""

from __future__ import annotations

import psutil

COUNTING = """
import torch
import spotfleet.train as hvd

hvd.init()
model = torch.nn.Linear(1, 1)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    while True:
        opt.zero_grad()
        model(torch.ones(1)).sum().backward()
        opt.step()
        state.commit()

train(hvd.elastic.TorchState(model, opt))
"""


def test_a_worker_that_trains_listens_on_its_advertised_address_only(fleets):
    two = fleets(COUNTING, founders=2)
    names = two.start_all()
    two.wait_version(3)
    for name in names:
        address = two.report(name).store.rpartition(":")[0]
        found = psutil.Process(two.workers[name].pid).net_connections("inet")
        listening = {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}
        assert listening == {address}, (name, found)
