"""An unchanged script for torchrun through a kill, a notice and a join. The cheaper tests see one part each; only here
real processes find each other by torchrun's variables and their own checkpoints travel."""

from __future__ import annotations

import re
import time

import pytest

from spotfleet.api import Job
from spotfleet.api.train import RestartOptions
from tests.support.e2e.e2e_stage import Stage, output, wait_for
from tests.support.e2e.launched import DDP, HVD

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


def begun(text: str) -> list[tuple[int, int, int]]:
    """(step, size, restart) of each start of rank 0."""
    return [tuple(map(int, found)) for found in re.findall(r"begins at (\d+): rank 0 of (\d+), restart (\d+)", text)]


def test_a_torchrun_script_goes_on_from_its_own_checkpoint_after_a_kill_a_notice_and_a_join(stage: Stage):
    (stage.work / "ddp.py").write_text(DDP)
    fleet = stage.fleet("ddp", least=1, target=2)
    hurry = stage.work / "hurry"
    said: list[str] = []
    job = fleet.train("ddp.py", ["--steps", "2000", "--hurry", str(hurry)], np=(1, 2), detach=True,
                      progress=said.append, options=RestartOptions(
                          checkpoint_dir="out", resume_args="--resume out/last.pt", grace_s=20.0))
    assert any("ddp.py: restart job" in line for line in said)

    def rounds(count: int) -> bool:
        return len(begun(output(job))) >= count

    def saved() -> int:
        return int((re.findall(r"saved (\d+)", output(job)) or ["0"])[-1])

    def kept(since: float) -> bool:
        """Whether the dispatcher has a copy of the checkpoint folder that is younger than `since`, monotonic."""
        age_s = job.status().folder_age_s
        return age_s is not None and time.monotonic() - age_s > since

    wait_for("two workers", lambda: rounds(1))
    assert job.status().kind == "restart" and begun(output(job)) == [(0, 2, 0)]
    wait_for("a checkpoint at the dispatcher", lambda: kept(0.0))
    fleet.interrupt(leader(job), None)
    wait_for("a start after the kill", lambda: rounds(2))
    assert begun(output(job))[1][0] >= 5, output(job)
    wait_for("both hosts again", lambda: begun(output(job))[-1][1] == 2, 150)
    count, since = len(begun(output(job))), time.monotonic()
    wait_for("progress of both", lambda: saved() > begun(output(job))[-1][0] and kept(since))

    before = saved()
    fleet.interrupt(leader(job), 60.0)
    wait_for("a start after the notice", lambda: rounds(count + 1), 150)
    assert begun(output(job))[count][0] >= before, output(job)
    hurry.touch()
    job.wait(240)
    steps = [step for step, _, _ in begun(output(job))]
    assert steps == sorted(steps) and all(steps[1:]), steps
    assert "done at 2000: rank 0" in output(job) and "ranks differ" not in output(job)
    assert job.status().restarts == len(steps) - 1 >= 2
    changes = [e for e in fleet.events() if e["kind"] == "JobChanged" and "start anew" in e["why"]]
    assert len(changes) == len(steps) - 1
    fleet.down()
    assert stage.cloud.truth() == []
    assert (fleet.archive / "jobs" / job.id / "outputs" / "checkpoint-folder" / "last.pt").is_file()


def test_a_preempted_script_saves_at_sigterm_and_goes_on_from_there_once_the_other_job_has_ended(stage: Stage):
    (stage.work / "ddp.py").write_text(DDP)
    fleet = stage.fleet("share", least=2, target=2)
    hurry = stage.work / "hurry"
    job = fleet.train("ddp.py", ["--steps", "2000", "--hurry", str(hurry)], np=(2, 2), detach=True,
                      options=RestartOptions(checkpoint_dir="out", resume_args="--resume out/last.pt", grace_s=30.0))
    wait_for("a checkpoint at the dispatcher", lambda: job.status().folder_age_s is not None)
    urgent = fleet.run("sleep 2; echo urgent", priority=5, detach=True)
    urgent.wait(180)
    why = f"preempted by {urgent.id}, which has priority 5 over 0 and needs 1 host"
    changes = [e["why"] for e in fleet.events() if e["kind"] == "JobChanged" and e["job"] == job.id]
    assert f"{why}; its processes get 30 s to save" in changes, changes
    wait_for("its next start", lambda: len(begun(output(job))) > 1)
    hurry.touch()
    job.wait(240)
    starts, first = begun(output(job)), output(job).partition("restart 1")[0]
    assert [(size, restart) for _, size, restart in starts] == [(2, 0), (2, 1)], starts
    assert starts[1][0] == int(re.findall(r"saved (\d+)", first)[-1]), output(job)
    assert "done at 2000: rank 0" in output(job) and b"".join(fleet.logs(urgent.id)) == b"urgent\n"


def leader(job: Job) -> str:
    """The host of rank 0."""
    return next(w.host for w in job.status().workers if w.rank == 0)


def test_a_horovod_script_without_elastic_run_goes_on_from_its_own_checkpoint_after_a_kill(stage: Stage):
    (stage.work / "train.py").write_text(HVD)
    fleet = stage.fleet("hvd", least=1, target=2)
    hurry = stage.work / "hurry"
    job = fleet.train("train.py", ["--steps", "1000", "--hurry", str(hurry)], np=(1, 2), detach=True)
    wait_for("a checkpoint at the dispatcher", lambda: job.status().folder_age_s is not None)
    assert job.status().kind == "restart" and begun(output(job)) == [(0, 2, 0)]
    fleet.interrupt(leader(job), None)
    wait_for("a start after the kill", lambda: len(begun(output(job))) > 1)
    hurry.touch()
    job.wait(240)
    step, _, restart = begun(output(job))[1]
    assert step >= 5 and restart == 1 and "done at 1000: rank 0" in output(job)


def test_a_command_runs_on_several_hosts_at_once_and_its_status_is_that_of_the_process_that_failed(stage: Stage):
    fleet = stage.fleet("run", least=2, target=2)
    line = 'echo "node $SPOTFLEET_NODE_RANK of $SKYPILOT_NUM_NODES at $(echo "$SKYPILOT_NODE_IPS" | wc -l) addresses"'
    done = stage.cli("run", "--nodes", "2", "--", line)
    assert done.stdout == "node 0 of 2 at 2 addresses\n" and "command job" in done.stderr
    failed = stage.cli("run", "--nodes", "2", "--", 'test "$NODE_RANK" = 0 || exit 7; sleep 60', ok=False)
    assert failed.returncode == 7 and "rank 1 (" in failed.stderr and "failed with status 7" in failed.stderr
    (stage.work / "task.yaml").write_text("name: task\nprovider: local\nnum_nodes: 2\nenvs: {WORD: hello}\n"
                                          "resources: {instance_type: cpu.small}\nrun: echo $WORD $RANK\n")
    assert stage.cli("run", "-f", "task.yaml").stdout == "hello 0\n"
    each = fleet.run("echo alone; sleep 1", each=True, detach=True)
    each.wait(90)
    assert [b"".join(fleet.logs(each.id, rank=rank)) for rank in (0, 1)] == [b"alone\n"] * 2

    wrong = stage.cli("run", "echo", "x", ok=False)
    assert wrong.returncode == 2 and "after `--`" in wrong.stderr
