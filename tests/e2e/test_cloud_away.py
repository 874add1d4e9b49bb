"""The cloud hangs. The in-process tests (tests/dispatcher/cloud/test_outage.py) have one that fails at once."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.support.e2e.e2e_stage import Stage, output, trains, wait_for

pytestmark = pytest.mark.processes


@pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="`scripts/test --long` runs it")
def test_training_goes_on_while_the_cloud_hangs_and_the_status_says_so(stage: Stage):
    fleet = stage.fleet("hangs", least=2, target=2)
    job = stage.counting(fleet, 400, (2, 2))
    wait_for("two workers that train", lambda: trains(job, 2, step=5))
    daemon = json.loads((stage.home / "local" / "cloud.json").read_text())["pid"]
    os.kill(daemon, signal.SIGSTOP)
    try:
        wait_for("a word about it", lambda: "local has not answered for" in fleet.status().why)
        assert "hosts and training go on" in fleet.status().why
        reached = job.status().version
        wait_for("more steps", lambda: trains(job, 2, step=reached + 20))
    finally:
        os.kill(daemon, signal.SIGCONT)
    wait_for("an answer", lambda: fleet.status().why == "2 of 2 hosts are up")
    stage.hurry()
    job.wait(120)
    assert "counted -400.0 of -400" in output(job)
