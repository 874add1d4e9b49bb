"""Workers in containers that runc really runs. The cheaper tests see command lines only; here processes enter and leave
namespaces, get signals through them, and end with their agent."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from spotfleet.model import ContainerSpec
from spotfleet.protocol.messages import Exit
from tests.agent.workers.test_agent_sockets import TALK
from tests.support.agent.agent_stage import HOST, Stage, all_gone, eventually

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]  # the first one makes the root file system

FIRST, SECOND = f"{HOST}/0/1", f"{HOST}/1/1"
FOREVER = "trap '' TERM; echo begun; while :; do sleep 0.1; done"


def containers(stage: Stage) -> list[Path]:
    return list((stage.home / "containers").glob("*"))


def nothing_is_left(stage: Stage) -> bool:
    """Neither a container nor a mount of its layers."""
    return not containers(stage) and str(stage.home) not in Path("/proc/mounts").read_text()


def begun(stage: Stage) -> Callable[[], bool]:
    return lambda: "begun" in stage.log(FIRST)


def test_a_command_runs_in_the_image_with_its_setup_files_and_variables_and_leaves_nothing(stage: Stage, root: Path):
    stage.boot()
    ended = stage.run(setup="echo installed >/usr/local/lib/thing",
                      run="cat /usr/local/lib/thing; echo $COLOUR-$TOKEN-$0; pwd; test -d $SPOTFLEET_OUTPUT && exit 3",
                      container=ContainerSpec(str(root)), envs={"COLOUR": "it's red"}, secrets={"TOKEN": "hush"},
                      kind="command")
    assert ended.exit == Exit(3) and "exited with code 3" in ended.report.error
    assert stage.log() == f"installed\nit's red-hush-bash\n{stage.home}/jobs/job/source\n"
    assert not (root / "usr/local/lib/thing").exists()  # the image stays as it is
    stage.order()
    eventually(lambda: nothing_is_left(stage))


def test_scripts_are_forked_by_one_warm_process_of_the_image_and_setup_runs_once(stage: Stage, root: Path):
    stage.boot()
    stage.job("import os, sys, time\nimport spotfleet.protocol\n"
              "print('begun', os.getppid(), sys.executable, open('/made').read())\n"
              "time.sleep(float(sys.argv[1]))\n", args=("1000",), setup="echo once >>/made",
              container=ContainerSpec(str(root)), kind="command")
    stage.order(FIRST, SECOND)
    eventually(lambda: "begun" in stage.log(FIRST) and "begun" in stage.log(SECOND))
    parents = {stage.log(name).split()[1] for name in (FIRST, SECOND)}
    assert len(parents) == 1 and stage.log(FIRST).split()[2:] == ["/usr/bin/python3", "once"]
    pids = [stage.dispatcher.wait_worker(name, lambda w: w.pid).pid for name in (FIRST, SECOND)]
    assert [psutil.Process(pid).cmdline()[0] for pid in pids] == ["/usr/bin/python3"] * 2  # pids of this namespace
    os.kill(pids[0], signal.SIGKILL)
    assert stage.dispatcher.wait_worker(FIRST, lambda w: w.exit).exit == Exit(-9)
    third = f"{HOST}/0/2"
    stage.order(SECOND, third)
    eventually(lambda: "begun" in stage.log(third))
    assert {stage.log(third).split()[1]} == parents and "once" in stage.log(third)


def test_a_command_gets_sigterm_with_its_children_and_sigkill_after_its_grace(stage: Stage, root: Path):
    stage.boot()
    image = ContainerSpec(str(root))
    stage.job(run="(trap 'echo child ends; exit' TERM; while :; do sleep 0.05; done) & trap 'echo ends' TERM; "
                  "echo begun; wait; wait; exit 5", container=image, kind="command")
    stage.order(FIRST)
    eventually(begun(stage))
    stage.order()
    eventually(lambda: {"ends", "child ends"} <= set(stage.log(FIRST).splitlines()))
    eventually(lambda: nothing_is_left(stage))
    stubborn = f"{HOST}/1/2"
    stage.job(job="other", run=FOREVER, container=image, kind="command")
    stage.order(stubborn, job="other")
    eventually(lambda: "begun" in stage.log(stubborn))
    inside = stage.processes_with("trap '' TERM")
    stage.order(job="other")
    eventually(lambda: nothing_is_left(stage) and all_gone(inside))
    assert inside


def test_a_process_of_a_command_in_a_container_reports_to_the_agent_and_receives_orders(stage: Stage, root: Path):
    (talk := stage.home.parent / "talk.py").write_text(TALK + "say()\nprint('orders', lines.readline()[:1])\n")
    stage.boot()
    ended = stage.run(run="python3 /talk/talk.py >answer; cat answer", kind="command",
                      container=ContainerSpec(str(root), mounts=(f"{talk.parent}:/talk:ro",)))
    assert ended.exit == Exit(0, done=True) and stage.log() == "orders {\n"


def test_nothing_of_a_container_outlives_a_killed_agent(stage: Stage, root: Path):
    stage.boot()
    stage.job(run=FOREVER, container=ContainerSpec(str(root)), kind="command")
    stage.order(FIRST)
    eventually(begun(stage))
    inside = stage.processes()
    assert stage.agent is not None
    stage.agent.kill()
    stage.agent.wait()
    eventually(lambda: all_gone(inside))
    assert str(stage.home) not in Path("/proc/mounts").read_text()


def test_the_next_agent_removes_a_container_that_has_not_ended(stage: Stage, root: Path):
    stage.boot()
    stage.job(run=FOREVER, container=ContainerSpec(str(root)), kind="command")
    stage.order(FIRST)
    eventually(begun(stage))
    held = os.open(containers(stage)[0] / "alive", os.O_RDWR)  # so that it does not end
    try:
        inside = stage.processes_with("read -r")
        assert inside and stage.agent is not None
        stage.order()
        stage.agent.kill()
        stage.agent.wait()
        assert not all_gone(inside)
        stage.boot()
        eventually(lambda: all_gone(inside) and nothing_is_left(stage))
    finally:
        os.close(held)


def test_an_image_without_python_torch_or_root_file_system_is_named_with_what_to_do(stage: Stage, root: Path,
                                                                                   tmp_path: Path):
    bare = tmp_path / "bare"
    shutil.copytree(root, bare, symlinks=True, copy_function=os.link, ignore=shutil.ignore_patterns("python3*", "dev"))
    stage.boot()
    jobs = {"torchless": (root, "elastic"), "bare": (bare, "restart"), "gone": (tmp_path / "gone", "command")}
    for number, (job, (image, kind)) in enumerate(jobs.items()):
        stage.job("print(1)", job=job, container=ContainerSpec(str(image)), kind=kind)
        stage.order(f"{HOST}/{number}/1", job=job)
        ended = stage.dispatcher.wait_worker(f"{HOST}/{number}/1", lambda w: w.exit)
        error = {"torchless": f"{root} has no torch for /usr/bin/python3",
                 "bare": f"{bare} has no Python 3.11 or newer",
                 "gone": f"there is no root file system in folder {tmp_path / 'gone'}"}[job]
        assert error in ended.report.error and ended.exit == Exit(1)
        assert (ended.report.setup_tries, ended.report.setup_sure) == (1, job != "gone")
        stage.order()
    eventually(lambda: nothing_is_left(stage))
