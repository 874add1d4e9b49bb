"""A real agent and a real worker whose dispatcher goes away for good. The finer cases: test_orphan_keeper.py."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest

from spotfleet.protocol.messages import Checkpoint, WorkerOrders, load
from spotfleet.storage.folder import fleet_store
from tests.agent.workers.test_agent_sockets import ASSIGNMENT, FIRST, TALK
from tests.support.agent.agent_stage import Stage, all_gone, eventually

pytestmark = pytest.mark.processes

TRAINS = TALK + """
say(stage="ready", generation=1, version=7)
for line in lines:
    if json.loads(line)["checkpoint_now"]:
        say(stage="ready", generation=1, version=8, checkpoint=checkpoint(8))
"""


@pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="`scripts/test --long` runs it")
def test_an_orphan_has_its_worker_save_is_killed_while_it_stores_and_powers_off_in_its_next_life(
        stage: Stage, tmp_path: Path):
    target = tmp_path / "target"  # not there yet, like a file system that is not mounted
    stage.told = {"orphan_after_s": 3.0, "target": str(target)}
    stage.order()
    stage.boot()
    stage.job(TRAINS)
    stage.order(FIRST, orders=WorkerOrders(ASSIGNMENT, founded=True))
    stage.dispatcher.wait_worker(FIRST, lambda w: w.report.generation == 1)
    stage.dispatcher.stop()
    eventually(lambda: json.loads((stage.home / "life.json").read_text())["phase"] == "storing")

    family = stage.processes()
    assert len(family) > 1 and not target.exists()
    stage.agent.send_signal(signal.SIGKILL)
    stage.agent.wait()
    eventually(lambda: all_gone(family))
    target.mkdir()
    stage.boot(wait=False)
    assert stage.agent.wait(60) == 0

    there, data = fleet_store(str(target), "fleet", stage.dispatcher.ca), b"state 8" * 1000
    named = load(Checkpoint, there.find("jobs/job/quarantine/8-1.json").read_bytes())
    assert named == Checkpoint(8, hashlib.sha256(data).hexdigest(), len(data), 1)
    assert there.find("jobs/job/quarantine/8-1.ckpt").read_bytes() == data
