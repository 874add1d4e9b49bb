"""`spotfleet horovodrun` with a discovery script, on machines with real sshds, from its command to nothing left."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.network.machines import why_not
from tests.support.network.ssh_stage import WORK, SshStage

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]
SCRIPT = """
import torch
import spotfleet.train as hvd

hvd.init()
weights = torch.nn.Parameter(torch.zeros(4))
opt = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), [("weights", weights)])

@hvd.elastic.run
def train(state):
    while state.step < 5:
        opt.zero_grad()
        weights.sum().backward()
        opt.step()
        state.step += 1
        state.commit()

train(hvd.elastic.TorchState(weights=weights, optimizer=opt, step=0))
print("trained to", weights.tolist()[0], "on", hvd.size(), flush=True)
hvd.shutdown()
"""


@pytest.fixture
def stage() -> Iterator[SshStage]:
    with SshStage.made(hosts=2) as stage:
        stage.write("train.py", SCRIPT)
        stage.write("discover_hosts.sh", "#!/bin/sh\necho w0\necho w1\n")
        stage.laptop.path(f"{WORK}/discover_hosts.sh").chmod(0o755)
        yield stage


def test_the_command_of_horovods_users_trains_on_the_machines_that_the_script_finds_and_leaves_nothing(stage: SshStage):
    said = stage.cli("horovodrun", "-np", "4", "--min-np", "2", "--max-np", "4", "--host-discovery-script",
                     "discover_hosts.sh", "--slots", "2", "--dispatcher", "d", "--output-filename", "out", "--verbose",
                     sys.executable, "train.py")
    assert said.stdout == "trained to -5.0 on 4\n", said
    written = [stage.laptop.path(f"{WORK}/out/rank.{rank}/stdout").read_text() for rank in range(4)]
    assert written == ["trained to -5.0 on 4\n"] * 4
    assert stage.left() == {}
