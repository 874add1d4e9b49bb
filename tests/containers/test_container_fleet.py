"""A whole fleet whose jobs run in containers: an elastic job, one that is started anew and a command, each through a
kill. The cheaper tests have one host; here workers in containers find each other and hand on their state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spotfleet.api.train import RestartOptions
from tests.e2e.conftest import stage  # noqa: F401
from tests.support.containers.root_fs import torch_mount
from tests.support.e2e.e2e_stage import Stage, hosts_of, output, trains, wait_for
from tests.support.e2e.launched import DDP

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


def test_all_three_kinds_of_jobs_recover_in_containers_and_down_leaves_nothing(stage: Stage, root: Path):  # noqa: F811
    (stage.work / "ddp.py").write_text(DDP)
    data = stage.work / "data.txt"
    data.write_text("from the laptop")
    fleet = stage.fleet("boxes", least=1, target=2, more=(
        f"container: {{image: {root}, mounts: ['{torch_mount()}']}}\nsetup: test ! -e /set && touch /set\n"))
    job = stage.counting(fleet, 100, (2, 2))
    wait_for("two workers that train", lambda: trains(job, 2, step=5))
    killed = hosts_of(job)[1]
    fleet.interrupt(killed, None)
    wait_for("a replacement", lambda: trains(job, 2, without=killed))
    stage.hurry()
    job.wait(120)
    assert "counted -100.0 of -100" in output(job) and job.status().repeated <= 1

    hurry = stage.work / "hurry2"
    again = fleet.train("ddp.py", ["--steps", "150", "--hurry", str(hurry)], np=(2, 2), detach=True,
                        options=RestartOptions(checkpoint_dir="out", resume_args="--resume out/last.pt"))

    def begins() -> list[int]:
        return [int(step) for step in re.findall(r"begins at (\d+): rank 0", output(again))]

    wait_for("a checkpoint at the dispatcher", lambda: again.status().folder_age_s is not None)
    fleet.interrupt(next(w.host for w in again.status().workers if w.rank == 1), None)
    wait_for("a start after the kill", lambda: len(begins()) > 1)
    hurry.touch()
    again.wait(120)
    assert begins()[0] == 0 and min(begins()[1:]) >= 5, output(again)
    assert "done at 150: rank 0" in output(again)

    task = stage.work / "task.yaml"
    task.write_text(
        "name: task\nprovider: local\nnum_nodes: 2\n"
        f"container: {{image: {root}, mounts: ['{stage.work}:/laptop:ro']}}\n"
        f"file_mounts: {{/data/in.txt: {data}}}\nenvs: {{COLOUR: red}}\nsetup: touch /set\n"
        "run: cat /laptop/data.txt /data/in.txt; echo \" $COLOUR rank $SKYPILOT_NODE_RANK\"; test -e /set\n")
    assert stage.cli("run", "-f", str(task)).stdout == "from the laptop" * 2 + " red rank 0\n"
    fleet.down()
    assert stage.cloud.truth() == []
    assert str(stage.home) not in Path("/proc/mounts").read_text()
