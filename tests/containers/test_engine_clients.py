"""Jobs through clients that are called `docker` and `podman`, check each command line, and run the container by runc:
for what no registry and no host is there. The real engines run in test_real_engines.py."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from spotfleet.model import ContainerSpec
from spotfleet.protocol.messages import Exit, WorkerState
from tests.support.agent.agent_stage import HOST, Stage, eventually
from tests.support.containers.fake_engine import EngineWorld, FakeEngines

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]  # the first one makes the root file system

ENGINES = ("docker", "podman")
IMAGE, PRIVATE, PASSWORD = "debian:12", "registry.example.com/team/debian:12", "correct-horse-battery"
LOGIN = {"SKYPILOT_DOCKER_USERNAME": "ada", "SKYPILOT_DOCKER_PASSWORD": PASSWORD,
         "SKYPILOT_DOCKER_SERVER": "registry.example.com"}


@pytest.fixture
def engines(tmp_path: Path, stage: Stage, root: Path):
    """Both clients on the agent's PATH, and one public and one private image."""
    fakes = FakeEngines(tmp_path / "engines")
    world = EngineWorld({IMAGE: str(root), PRIVATE: str(root)}, {"registry.example.com": f"ada:{PASSWORD}"})
    clients = fakes.install(world, *ENGINES)
    tools = tmp_path / "tools"  # instead of this machine's own PATH, which may have such clients, too
    tools.mkdir()
    for name in ("runc", "unshare", "sh", "mount", "mkdir", "test", "bash"):
        (tools / name).symlink_to(shutil.which(name) or "")
    stage.env["PATH"] = f"{clients}:{tools}"
    yield fakes
    stage.end()
    assert fakes.violations == "" and fakes.running() == []


def ended(stage: Stage, number: int, job: str, **spec) -> WorkerState:
    name = f"{HOST}/{number}/1"
    stage.job(job=job, kind="command", **spec)
    stage.order(name, job=job)
    return stage.dispatcher.wait_worker(name, lambda w: w.exit)


@pytest.mark.parametrize("engine", ENGINES)
def test_scripts_and_commands_run_by_the_documented_command_lines(engines: FakeEngines, stage: Stage, engine: str):
    stage.boot()
    container = ContainerSpec(IMAGE, engine, (f"{stage.home.parent}:/of/host:ro",))
    done = ended(stage, 0, "command", run="test -d /of/host/home && ! touch /of/host/x && echo in", container=container)
    assert done.exit == Exit(0, done=True) and "in\n" in stage.log(f"{HOST}/0/1"), stage.log(f"{HOST}/0/1")
    stage.job("print('as a script')", job="script", kind="command", container=container)
    stage.order(f"{HOST}/1/2", job="script")
    assert stage.dispatcher.wait_worker(f"{HOST}/1/2", lambda w: w.exit).exit == Exit(0, done=True)
    assert stage.log(f"{HOST}/1/2") == "as a script\n"
    assert {call[0] for call in engines.calls} == {engine}
    runs = [call for call in engines.calls if call[1] == "run"]
    labels = {"spotfleet.fleet=fleet", f"spotfleet.host={HOST}", f"spotfleet.home={stage.home}"}
    assert len(runs) == 2 and all(labels <= set(run) for run in runs)
    stage.order()
    eventually(lambda: engines.running() == [])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_private_registry_gets_credentials_that_no_command_line_log_or_file_shows(engines: FakeEngines, stage: Stage,
                                                                                     engine: str):
    stage.boot()
    container = ContainerSpec("team/debian:12", engine)
    done = ended(stage, 0, "let", run="env", container=container, secrets=LOGIN)
    assert done.exit == Exit(0, done=True), done.report.error
    wrong = ended(stage, 1, "wrong", run="env", container=ContainerSpec("team/other", engine),
                  secrets=LOGIN | {"SKYPILOT_DOCKER_PASSWORD": "no"})
    assert "the registry refuses to give registry.example.com/team/other" in wrong.report.error
    assert "SKYPILOT_DOCKER_PASSWORD" in wrong.report.error and wrong.report.setup_sure
    stage.order()
    eventually(lambda: engines.running() == [])
    written = [path for path in files(stage.home, engines.folder)
               if path.name != "world.json" and PASSWORD in contents(path)]
    assert written == [] and PASSWORD not in stage.log(f"{HOST}/0/1") and "SKYPILOT" not in stage.log(f"{HOST}/0/1")


def files(*folders: Path) -> list[Path]:
    """Files that are there now, of folders that others may be removing."""
    return [Path(folder, name) for top in folders for folder, _, names in os.walk(top) for name in names]


def contents(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace") if path.is_file() else ""
    except FileNotFoundError:
        return ""


def test_each_refusal_of_an_engine_names_the_next_step(engines: FakeEngines, stage: Stage, root: Path):
    stage.boot()
    missing = ended(stage, 0, "missing", run="true", container=ContainerSpec("debian:99"))
    assert "there is no image debian:99: check its name and tag" in missing.report.error and missing.report.setup_sure
    folder = ended(stage, 1, "mounts", run="true", container=ContainerSpec(IMAGE, mounts=("/not/there",)))
    assert "container.mounts: there is no /not/there on this host" in folder.report.error
    engines.set(EngineWorld(daemon=False))
    down = ended(stage, 2, "down", run="true", container=ContainerSpec(IMAGE, "docker"))
    assert "the Docker daemon of this host does not run" in down.report.error and not down.report.setup_sure
    for name in ENGINES:
        (engines.folder / "bin" / name).unlink()
    gone = ended(stage, 3, "gone", run="true", container=ContainerSpec(IMAGE))
    assert "this host has no docker and no podman" in gone.report.error
    assert "apt-get install podman" in gone.report.error
