"""`up` that ends half way, wherever it stands, and `down` after it: nothing may be left on any machine."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from tests.support.network.machines import why_not
from tests.support.network.ssh_stage import CLI, WORK, SshStage

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not()),
              pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="`scripts/test --long` runs it")]


@pytest.mark.parametrize("after_s", [1.0, 2.0, 3.0, 4.5, 6.0, 8.0])
def test_down_leaves_nothing_of_an_up_that_was_killed(after_s: float):
    with SshStage.made(hosts=2) as stage:
        stage.fleet_file(2, 2)
        up = stage.laptop.start(CLI, "up", "fleet.yaml", "-y", cwd=WORK)
        time.sleep(after_s)  # wherever it stands then
        for child in psutil.Process(up.pid).children():
            child.kill()
        up.wait(30)
        down = stage.cli("down", "-y", ok=False)
        print(down.stdout, down.stderr)
        assert down.returncode == 0 or "there is no fleet" in down.stderr
        assert stage.left() == {}


def test_an_up_that_was_killed_is_finished_by_the_next():
    with SshStage.made(hosts=2) as stage:
        stage.fleet_file(2, 2)
        up = stage.laptop.start(CLI, "up", "fleet.yaml", "-y", cwd=WORK)
        stage.wait("a host on its way", lambda: stage.claim("w0"))
        for child in psutil.Process(up.pid).children():
            child.kill()
        up.wait(30)
        stage.cli("up", "fleet.yaml", "-y")
        assert [h["state"] for h in stage.status()["hosts"]] == ["up"] * 3
        stage.cli("up", "fleet.yaml", "-y")  # and once more, which changes nothing
        stage.cli("down", "-y")
        assert stage.left() == {}
