"""What goes wrong in a user's hands: a clear message, an exit status that is not 0, and nothing left behind."""

from __future__ import annotations

import time

import pytest

from tests.support.e2e.e2e_stage import Stage, hosts

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("command", [["status", "lab"], ["train", "counting.py"], ["cost"], ["down", "-y"], ["hosts"]])
def test_a_fleet_that_does_not_exist(stage: Stage, command):
    done = stage.cli(*command, ok=False)
    assert done.returncode == 1
    assert "there is no fleet" in done.stderr
    assert "spotfleet up" in done.stderr  # the next thing to try
    assert stage.cloud.truth() == []


def test_an_unknown_provider(stage: Stage):
    (stage.work / "bad.yaml").write_text("name: bad\nprovider: locall\n")
    done = stage.cli("up", "bad.yaml", "-y", ok=False)
    assert done.returncode == 2
    assert "bad.yaml:2" in done.stderr
    assert "'local'" in done.stderr or "local?" in done.stderr  # the nearest right word
    assert not (stage.home / "fleets" / "bad").exists()


def test_mistakes_on_a_running_fleet(stage: Stage):
    """One fleet for all of them, since each must leave it as it was."""
    fleet = stage.fleet("small", least=1, target=1)
    before = {h.host for h in hosts(fleet)}

    missing = stage.cli("train", "nowhere.py", ok=False)
    assert (missing.returncode, "nowhere.py" in missing.stderr) == (2, True)

    too_many = stage.cli("train", "counting.py", "--np", "2:2", ok=False)
    assert too_many.returncode == 1
    assert "2" in too_many.stderr
    assert all(job.state.ended for job in fleet.jobs())  # none waits for hosts that nobody asked for

    began = time.monotonic()
    raising = stage.cli("train", "raising.py", "--np", "1:1", ok=False)
    assert raising.returncode == 1
    assert "ValueError: a bug in the script, seen by rank 0" in raising.stdout + raising.stderr
    assert time.monotonic() - began < 60  # at once: it is not tried on other hosts

    again = stage.cli("up", "small.yaml", "-y")
    assert again.returncode == 0  # the same file: nothing to do

    assert {h.host for h in hosts(fleet)} == before
    stage.cli("down", "-y")
    assert stage.cloud.truth() == []
