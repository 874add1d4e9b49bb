"""Others' launchers as commands, one on each host, through a kill and a notice: the real torchrun, the real `accelerate
launch`, and a stand-in for DeepSpeed's with its documented options. Only here launchers start processes of their own,
which have to find each other."""

from __future__ import annotations

import pytest

from spotfleet.api import Fleet
from spotfleet.api.train import RestartOptions
from tests.launched.test_started_anew import begun
from tests.support.e2e.e2e_stage import LIMIT_S, Stage, output, wait_for
from tests.support.e2e.launched import ACCELERATED, DDP, DEEPSPEED

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


# As on hosts with GPUs, but for the variable in its environment.
ACCELERATE = ("accelerate launch --multi_gpu --num_machines $SPOTFLEET_NUM_NODES --machine_rank $SPOTFLEET_NODE_RANK "
              "--main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT --num_processes 2 ")
ON_CPU = {"ACCELERATE_USE_CPU": "true"}


def test_accelerate_goes_on_from_its_saved_state_after_a_kill_a_notice_and_with_a_host_more(stage: Stage):
    (stage.work / "train.py").write_text(ACCELERATED)
    fleet = stage.fleet("hugs", least=2, target=2, most=3)
    options = RestartOptions(checkpoint_dir="out", resume_args="--resume out")
    hurry = stage.work / "hurry"
    job = fleet.run(f"{ACCELERATE} train.py --steps 2000 --hurry {hurry}", nodes=2, envs=ON_CPU, detach=True,
                    options=options)
    wait_for("a checkpoint at the dispatcher", lambda: job.status().folder_age_s is not None, 180)
    for rank, notice_s in ((1, None), (0, 60.0)):  # the host that joins replaces the lost one: a command has `nodes`
        starts = len(begun(output(job)))
        fleet.interrupt(next(w.host for w in job.status().workers if w.rank == rank), notice_s)
        wait_for("a start after it", lambda starts=starts: len(begun(output(job))) > starts, 180)
    hurry.touch()
    job.wait(240)
    starts = begun(output(job))
    assert starts[0] == (0, 2, 0) and all(step >= 5 and size == 2 for step, size, _ in starts[1:]), starts
    assert [step for step, _, _ in starts] == sorted(step for step, _, _ in starts), starts
    assert "done at 2000: rank 0 of 2" in output(job) and "ranks differ" not in output(job)

    hurry.unlink()
    job = fleet.train("train.py", ["--steps", "2000", "--hurry", str(hurry)], np=(2, 3), envs=ON_CPU, detach=True,
                      options=options)
    wait_for("a checkpoint of the script alone", lambda: job.status().folder_age_s is not None, 180)
    assert job.status().kind == "restart" and begun(output(job)) == [(0, 2, 0)]
    Fleet(stage.fleet_file("hugs", 2, 3, 3), home=stage.home).up(timeout_s=LIMIT_S)
    wait_for("a start with three", lambda: begun(output(job))[-1][1] == 3, 180)
    hurry.touch()
    job.wait(240)
    assert begun(output(job))[-1][0] >= 5 and "done at 2000: rank 0 of 3" in output(job)
