"""Hosts that see a mounted checkpoint target write there, and read their shares of it after a total loss."""

from __future__ import annotations

import pytest

from spotfleet.protocol.checkpoint_files import MANIFEST
from spotfleet.storage.checkpoint_folder import problem_in
from tests.support.e2e.e2e_stage import Stage, hosts_of, output, trains, wait_for

pytestmark = pytest.mark.processes


def test_a_job_whose_checkpoints_no_dispatcher_has_touched_outlives_all_of_its_hosts(stage: Stage):
    target = stage.work / "target"
    target.mkdir()
    (stage.work / ".spotfleetignore").write_text("target\n")
    fleet = stage.fleet("writers", least=2, target=2, more=f"checkpoint: {{target: {target}, interval: 1s}}")
    job = stage.counting(fleet, 400, (2, 2))

    def written() -> list[dict]:
        return [e for e in fleet.events() if e["kind"] == "CheckpointKept" and e["url"].startswith("file://")]

    wait_for("checkpoints that hosts wrote", lambda: len(written()) >= 2)
    lost = hosts_of(job)
    for host in lost:
        stage.cloud.interrupt(host, None)
    wait_for("training on others", lambda: trains(job, 2, step=1) and not set(lost) & set(hosts_of(job)))
    count = len(written())
    wait_for("checkpoints of the new hosts", lambda: len(written()) > count)
    assert not any(e["kind"] == "CheckpointLost" for e in fleet.events())
    stage.hurry()
    job.wait(120)
    assert "counted -400.0 of -400" in output(job)
    formed = [e for e in fleet.events() if e["kind"] == "GenerationFormed"]
    assert formed[-1]["version"] > 0
    newest = max(target.glob(f"*/jobs/{job.id}/checkpoints/*-*/"), key=lambda p: int(p.name.partition("-")[0]))
    kept = next(e for e in reversed(written()) if newest.name == f"{e['version']}-{e['generation']}")
    assert (newest / MANIFEST).is_file() and problem_in(newest, kept["digest"]) == ""
    fleet.down()
    assert stage.cloud.truth() == []
