"""`launch` and `horovodrun` from beginning to end: the fleet comes up, the job runs, and the fleet stays or ends."""

from __future__ import annotations

import json

import pytest

from spotfleet.cli.launchers import horovodrun
from tests.support.cli.cli_user import User

TASK = ("name: Task_1\nnum_nodes: 1\nresources: {infra: local, ports: 80, instance_type: cpu.small}\n"
        "envs: {WHO: null}\nsetup: echo ready\nrun: echo ran $WHO\n")


def test_launch_brings_a_fleet_up_runs_the_task_and_leaves_the_fleet(user: User):
    user.write("task.yaml", TASK)
    said = user.ok("launch task.yaml -y --env WHO=me")
    assert said.out == "ran me\n"
    assert "note: the fleet's name is 'task-1'" in said.err and "has succeeded" in said.err
    assert user.dispatcher.jobs["task-1-run-1"].spec.setup == "echo ready"
    assert user.ok("launch task.yaml -y --env WHO=you").out == "ran you\n"  # on the same fleet
    assert len(user.cloud.dispatchers) == 1


def test_launch_names_the_fleet_detaches_and_ends_it(user: User):
    user.write("task.yaml", TASK)
    assert user.ok("launch task.yaml -y -c other -d --env WHO=x").out == ""
    assert (user.home / "fleets/other").is_dir() and not (user.home / "fleets/task-1").exists()
    assert "is down" in user.ok("launch task.yaml -y -c other --down --env WHO=x").err
    assert user.cloud.living() == []


def test_launch_without_a_value_or_a_command_says_so(user: User):
    user.write("task.yaml", TASK)
    assert "envs.WHO: has no value here" in user.fails("launch task.yaml -y", code=2).err
    said = user.ok("launch task.yaml --dryrun")
    assert "before `up`" in said.out and "envs.WHO" in said.out and user.cloud.living() == []
    user.write("task.yaml", "name: t\nresources: {infra: local, instance_type: cpu.small}\n")
    assert "has no `run`: fleet t is up, and runs nothing" in user.ok("launch task.yaml -y").err


def test_horovodrun_runs_the_script_writes_what_was_asked_for_and_ends_the_fleet(user: User):
    said = user.ok("horovodrun -np 2 --max-np 3 --output-filename out --timeline-filename t.json "
                   "python -u hello.py -np 9 --lr 3")
    assert said.out == "hello -np 9 --lr 3 \n"
    assert "starting machines for 2 workers; --verbose shows each step" in said.err
    assert user.cloud.living() == []
    assert (user.work / "out/rank.0/stdout").read_text() == said.out
    trace = json.loads((user.work / "t.json").read_text())
    assert trace and all(e["ph"] == "i" and e["ts"] >= 0 for e in trace)


def test_horovodrun_of_a_script_that_fails_fails_and_ends_the_fleet(user: User):
    user.write("broken.py", "raise ValueError('a bug')\n")
    assert "job broken-1 failed" in user.fails_with_traceback("horovodrun -np 1 python broken.py").err
    assert user.cloud.living() == []


def test_ctrl_c_ends_the_fleet_as_horovodrun_ends_its_workers(user: User, monkeypatch: pytest.MonkeyPatch):
    def interrupted(_data: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(horovodrun, "_stream", interrupted)
    said = user.types("horovodrun -np 1 python hello.py")
    assert said.code == 130 and "interrupted: ending the workers" in said.err and user.cloud.living() == []


