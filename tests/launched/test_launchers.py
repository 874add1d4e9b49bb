"""Others' launchers as commands, one on each host, through a kill: the real torchrun, and a stand-in for DeepSpeed's
with its documented options. Only here launchers start processes of their own, which have to find each other."""

from __future__ import annotations

import pytest

from spotfleet.api.train import RestartOptions
from tests.launched.test_started_anew import begun
from tests.support.e2e.e2e_stage import Stage, output, wait_for
from tests.support.e2e.launched import DDP, DEEPSPEED

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

LAUNCHERS = {
    "torchrun": "torchrun",
    "deepspeed": 'for ip in $SPOTFLEET_NODE_IPS; do echo "$ip slots=$SPOTFLEET_NUM_SLOTS_PER_NODE"; done >hosts; '
                 "python deepspeed --hostfile hosts --no_ssh --node_rank $NODE_RANK --master_addr $MASTER_ADDR "
                 "--master_port $MASTER_PORT --no_local_rank",
}


def test_a_launcher_on_each_host_starts_again_after_a_kill_and_goes_on_from_the_scripts_checkpoint(stage: Stage):
    (stage.work / "ddp.py").write_text(DDP)
    (stage.work / "deepspeed").write_text(DEEPSPEED)
    fleet = stage.fleet("tools", least=2, target=2)
    for name, launcher in LAUNCHERS.items():
        hurry = stage.work / f"hurry-{name}"
        job = fleet.run(f"{launcher} ddp.py --steps 150 --hurry {hurry}", nodes=2, name=name, detach=True,
                        options=RestartOptions(checkpoint_dir="out", resume_args="--resume out/last.pt"))
        wait_for(f"{name}: a checkpoint at the dispatcher", lambda job=job: job.status().folder_age_s is not None)
        fleet.interrupt(next(w.host for w in job.status().workers if w.rank == 1), None)
        wait_for(f"{name}: a start after the kill", lambda job=job: len(begun(output(job))) > 1)
        hurry.touch()
        job.wait(120)
        starts = begun(output(job))
        assert starts[0][:2] == (0, 2) and all(step >= 5 and size == 2 for step, size, _ in starts[1:]), output(job)
        assert "done at 150: rank 0" in output(job) and "ranks differ" not in output(job)
