"""Releases of one protocol work together: an earlier wheel's command line, and its agents, with today's dispatcher.

The wheel is built from a fixed commit of this repository's history. Cheaper tests read old messages; only here all
the code of an earlier release runs, with its own reading of what today's code writes.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from spotfleet.bootstrap.wheel import build_from
from tests.support.e2e.e2e_stage import LIMIT_S, Stage, output

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
TOP = Path(__file__).parents[2]
PREVIOUS = "ec52ef386388b8a22e7c5289759f4e7bc9c13609"  # the first commit of PROTOCOL 5 on the main line
SCRIPT = """
import torch
import spotfleet
import spotfleet.train as hvd

hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    for state.batch in range(state.batch, 20):
        opt.zero_grad()
        model(torch.ones(1)).sum().backward()
        opt.step()
        state.commit()

train(hvd.elastic.TorchState(model, opt, batch=0))
print("counted", model.weight.item(), "on", hvd.size(), "with", spotfleet.__file__, flush=True)
"""


def git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *words], cwd=TOP, capture_output=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of the earlier commit."""
    if git("cat-file", "-e", f"{PREVIOUS}^{{commit}}").returncode:
        pytest.skip(f"this copy's history lacks commit {PREVIOUS[:8]} (a shallow clone, or no repository)")
    tree, unpacked = tmp_path_factory.mktemp("previous"), tmp_path_factory.mktemp("wheel")
    with tarfile.open(fileobj=io.BytesIO(git("archive", PREVIOUS, "spotfleet", "pyproject.toml").stdout)) as archive:
        archive.extractall(tree, filter="data")
    with zipfile.ZipFile(io.BytesIO(build_from(tree / "spotfleet").data)) as wheel:
        wheel.extractall(unpacked)
    return unpacked


def test_the_previous_command_line_works_with_todays_dispatcher(stage: Stage, previous: Path):
    (stage.work / "skew.py").write_text(SCRIPT)
    fleet = stage.fleet("skew", least=2, target=2)

    def old(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", "spotfleet.cli", *words], cwd=stage.work, text=True,
                              capture_output=True, timeout=2 * LIMIT_S, stdin=subprocess.DEVNULL,
                              env={**os.environ, "PYTHONPATH": str(previous)})
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout

    where = subprocess.run([sys.executable, "-c", "import spotfleet; print(spotfleet.__file__)"], text=True, check=True,
                           capture_output=True, cwd=stage.work, env={**os.environ, "PYTHONPATH": str(previous)}).stdout
    assert where.startswith(str(previous)), "the earlier code runs"
    counted = old("train", "skew.py", "--np", "2")
    assert "counted -20.0 on 2" in counted and str(TOP) in counted
    (job,) = fleet.jobs()
    assert "succeeded" in old("jobs") and "skew" in old("status") and "counted -20.0" in old("logs", job.id)
    assert job.id in old("events") and old("queue") == ""
    old("down", "skew", "--yes")
    assert stage.cloud.truth() == [] and (fleet.archive / "jobs" / job.id).is_dir()


def test_agents_of_the_previous_release_train_with_todays_dispatcher(stage: Stage, previous: Path,
                                                                    monkeypatch: pytest.MonkeyPatch):
    shim = stage.home.parent / "shim"
    shim.mkdir()
    guard = TOP / "tests" / "netguard" / "sitecustomize.py"
    (shim / "sitecustomize.py").write_text(
        f"import sys\nif any(word.startswith('spotfleet.agent') for word in sys.orig_argv):\n"
        f"    sys.path.insert(0, {str(previous)!r})\n"
        f"with open({str(guard)!r}) as file:\n    exec(compile(file.read(), file.name, 'exec'))\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(shim), os.environ["PYTHONPATH"]]))
    (stage.work / "skew.py").write_text(SCRIPT)
    fleet = stage.fleet("skew", least=2, target=2)
    job = fleet.train("skew.py", np=(2, 2), detach=True)
    job.wait(LIMIT_S)
    said = output(job)
    assert "counted -20.0 on 2" in said and str(previous) in said, "agents and workers are the earlier code"
    fleet.down()
    assert stage.cloud.truth() == []
