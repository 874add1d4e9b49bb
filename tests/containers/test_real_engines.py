"""Workers in containers of the real Podman and Docker: their own command lines, storage, monitors and removal."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfleet.model import ContainerSpec
from tests.support.agent.agent_stage import HOST, Stage, all_gone, eventually
from tests.support.containers.real_engines import IMAGE, RealEngine, why_not

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]  # the first one makes the root file system

FIRST, SECOND, THIRD = f"{HOST}/0/1", f"{HOST}/1/1", f"{HOST}/0/3"
WAITING = "import os, time\nprint('begun', os.getppid(), open('/made').read())\ntime.sleep(1000)\n"
ASKED = "trap 'echo asked; exit 4' TERM; echo begun $0; while :; do sleep 0.1; done"


@pytest.fixture(scope="module", params=["podman", "docker"])
def engine(request: pytest.FixtureRequest, root: Path) -> Iterator[RealEngine]:
    if missing := why_not(request.param):
        pytest.skip(missing)
    engine = RealEngine(request.param, Path(tempfile.mkdtemp(prefix="spotfleet-engine-", dir="/tmp")))
    try:
        try:
            engine.load(root)
        except OSError as error:
            pytest.skip(f"no container of {engine.name} runs here: {error}")
        yield engine
    finally:
        engine.end()


def test_setup_scripts_and_commands_run_in_a_container_that_ends_with_the_job_or_the_agent(engine: RealEngine,
                                                                                          stage: Stage):
    def nothing_is_left() -> bool:
        return engine("ps", "--all", "--quiet") == ""

    stage.env |= engine.env
    stage.boot()
    container = ContainerSpec(IMAGE, engine.name)
    stage.job(WAITING, setup="echo once >>/made", container=container, kind="command")
    stage.order(FIRST, SECOND)
    eventually(lambda: "begun" in stage.log(FIRST) and "begun" in stage.log(SECOND))
    assert stage.log(FIRST) == stage.log(SECOND) and "once" in stage.log(FIRST)  # one warm process, one setup
    inside = stage.processes_with("spotfleet.agent.processes.zygote")
    stage.order()
    eventually(nothing_is_left)

    stage.job(job="asked", run=ASKED, container=container, kind="command")
    stage.order(SECOND.replace("1/1", "1/2"), job="asked")
    eventually(lambda: "begun bash" in stage.log(SECOND.replace("1/1", "1/2")))
    stage.order()
    eventually(lambda: "asked" in stage.log(SECOND.replace("1/1", "1/2")) and nothing_is_left())

    assert stage.agent is not None
    stage.order(THIRD, job="asked")
    eventually(lambda: "begun" in stage.log(THIRD))
    held = os.open(next((stage.home / "containers").glob("*/alive")), os.O_RDWR)  # so that it does not end
    try:
        stage.order()
        stage.agent.kill()
        stage.agent.wait()
        assert len(engine("ps", "--quiet", "--filter", f"label=spotfleet.home={stage.home}").split()) == 1
        stage.boot()
        eventually(nothing_is_left)
    finally:
        os.close(held)
    last = f"{HOST}/0/4"
    stage.order(last, job="asked")
    eventually(lambda: "begun" in stage.log(last))
    stage.agent.kill()
    stage.agent.wait()
    eventually(lambda: nothing_is_left() and all_gone(inside))
