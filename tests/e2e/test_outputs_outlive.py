"""Outputs and the output of setup on a whole fleet: there while the job runs, and after the host that made them."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfleet.api import Job
from tests.support.e2e.e2e_stage import Stage, hosts, wait_for

pytestmark = pytest.mark.processes

WRITES = """
import os, pathlib, sys, time
out = pathlib.Path(os.environ["SPOTFLEET_OUTPUT"])
(out / "plots").mkdir()
(out / "plots" / "first.txt").write_text(open("made").read())
(out / "model.tmp").write_bytes(bytes(range(256)) * 4096)
os.rename(out / "model.tmp", out / "model.bin")
with open(out / "steps.log", "w") as log:
    for n in range(100_000):
        print(n, file=log, flush=True)
        if os.path.exists(sys.argv[1]):
            break
        time.sleep(0.005)
"""
MODEL = bytes(range(256)) * 4096
SETUP = "setup: |\n  echo preparing\n  echo made-by-setup > made"


def brought(stage: Stage, job: Job) -> dict[str, bytes]:
    """{WORKER/NAME: bytes} of what `spotfleet outputs` brings now."""
    into = stage.work / "brought"
    stage.cli("outputs", job.id, str(into))
    return {str(p.relative_to(into)): p.read_bytes() for p in sorted(into.rglob("*")) if p.is_file()}


def counted(data: bytes) -> int:
    """How many lines of a log that must hold exactly these, the last one perhaps not to its end."""
    lines = data.decode().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    assert whole == [f"{n}\n" for n in range(len(whole))] and len(lines) - len(whole) <= 1
    return len(whole)


def test_outputs_of_a_host_that_is_killed_are_kept_byte_for_byte_as_far_as_they_had_come(stage: Stage):
    (stage.work / "writes.py").write_text(WRITES)
    fleet = stage.fleet("kept", least=1, target=1, more=SETUP)
    job = fleet.train("writes.py", [str(stage.work / "hurry")], np=(1, 1), detach=True)
    wait_for("the first of it", lambda: job.status().output_bytes > len(MODEL) + 500)
    (killed,) = (h.host for h in hosts(fleet))
    early = brought(stage, job)
    (worker,) = {name.split("/")[0] for name in early}
    assert set(early) == {f"{worker}/{n}" for n in ("plots/first.txt", "model.bin", "steps.log")}
    fleet.interrupt(killed, None)
    wait_for("another host's outputs", lambda: job.status().output_bytes > 2 * len(MODEL))
    stage.hurry()
    job.wait(120)

    late = brought(stage, job)
    assert late[f"{worker}/model.bin"] == MODEL and late[f"{worker}/plots/first.txt"] == b"made-by-setup\n"
    assert counted(late[f"{worker}/steps.log"]) >= counted(early[f"{worker}/steps.log"]) > 0
    (second,) = {name.split("/")[0] for name in late} - {worker}
    assert late[f"{second}/model.bin"] == MODEL and late[f"{second}/steps.log"].endswith(b"\n")
    ran = stage.cli("logs", job.id, "--setup").stdout
    assert ran.count("preparing\n") == 2 and ran.count("==> ") == 2 and ran.count("setup has succeeded after ") == 2
    assert stage.cli("logs", job.id, "--host", killed).stdout.startswith(f"==> {killed} <==\nspotfleet: ")
    assert " MB, " in stage.cli("jobs").stdout

    fleet.down()
    home = stage.home / "fleets/kept/archive/jobs" / job.id / "outputs"
    assert contents(home) == late == brought(stage, job)
    assert stage.cli("logs", job.id, "--setup").stdout == ran


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
