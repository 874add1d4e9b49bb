"""Workers in containers of the real Podman: its own command line, storage, monitor and removal at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfleet.model import ContainerSpec
from tests.support.agent.agent_stage import HOST, Stage, all_gone, eventually
from tests.support.containers.real_podman import IMAGE, RealPodman

pytestmark = pytest.mark.processes

FIRST, SECOND = f"{HOST}/0/1", f"{HOST}/1/1"
CONTAINER = ContainerSpec(IMAGE, "podman")


@pytest.fixture(scope="module")
def podman(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPodman]:
    if shutil.which("podman") is None:
        pytest.skip("there is no podman: scripts/setup-tests installs it on Debian")
    podman = RealPodman(tmp_path_factory.mktemp("podman") / "podman")
    try:
        try:
            podman.load(root)
        except OSError as error:
            pytest.skip(f"Podman runs no container here: {error}")
        yield podman
    finally:
        podman.end()


def test_scripts_commands_and_setup_run_in_containers_of_podman_which_are_removed(podman: RealPodman, stage: Stage):
    stage.env |= podman.env
    stage.boot()
    stage.job("import os, time\nprint('begun', os.getppid(), open('/made').read())\ntime.sleep(1000)\n",
              setup="echo once >>/made", container=CONTAINER, kind="command")
    stage.order(FIRST, SECOND)
    eventually(lambda: "begun" in stage.log(FIRST) and "begun" in stage.log(SECOND))
    assert stage.log(FIRST) == stage.log(SECOND) and "once" in stage.log(FIRST)  # one warm process, one setup
    names = podman("ps", "--format", "{{.Names}}", "--filter", f"label=spotfleet.host={HOST}").split()
    assert len(names) == 1
    inside = stage.processes()[1:]
    stage.order()
    eventually(lambda: podman("ps", "--all", "--quiet") == "")
    assert [p for p in inside if p.is_running() and "train.py" in " ".join(p.cmdline())] == []


def test_a_command_in_a_container_of_podman_ends_with_its_agent_or_is_removed_by_the_next(podman: RealPodman,
                                                                                         stage: Stage):
    stage.env |= podman.env
    stage.boot()
    stage.job(run="trap 'echo asked; exit 4' TERM; echo begun $0; while :; do sleep 0.1; done", container=CONTAINER,
              kind="command")
    stage.order(FIRST)
    eventually(lambda: "begun bash" in stage.log(FIRST))
    stage.order()
    eventually(lambda: "asked" in stage.log(FIRST) and podman("ps", "--all", "--quiet") == "")
    stage.order(SECOND)
    eventually(lambda: "begun" in stage.log(SECOND))
    held = os.open(next((stage.home / "containers").glob("*/alive")), os.O_RDWR)
    try:
        assert stage.agent is not None
        outside = stage.processes()
        stage.order()
        stage.agent.kill()
        stage.agent.wait()
        assert len(podman("ps", "--quiet").split()) == 1
        stage.boot()
        eventually(lambda: podman("ps", "--all", "--quiet") == "")
        eventually(lambda: all_gone(outside))
    finally:
        os.close(held)
    third = f"{HOST}/0/3"
    stage.order(third)
    eventually(lambda: "begun" in stage.log(third))
    stage.agent.kill()
    stage.agent.wait()
    eventually(lambda: podman("ps", "--all", "--quiet") == "")
