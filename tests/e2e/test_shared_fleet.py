"""Two jobs on one fleet of real processes: an elastic one gives a host to a job of a higher priority and goes on.

The schedule's tests show who gets which host; only here a worker leaves and another joins, and no step is lost.
"""

from __future__ import annotations

import pytest

from tests.support.e2e.e2e_stage import Stage, output, trains, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def test_an_elastic_job_gives_a_host_to_a_higher_priority_and_takes_it_back(stage: Stage):
    fleet = stage.fleet("share", least=2, target=2)
    job = stage.counting(fleet, 2000, (1, 2))
    wait_for("two workers that train", lambda: trains(job, 2, step=5))
    urgent = fleet.run("echo urgent; sleep 1", priority=5, detach=True)
    urgent.wait(180)
    assert b"".join(fleet.logs(urgent.id)) == b"urgent\n"
    wait_for("both again", lambda: trains(job, 2))
    stage.hurry()
    job.wait(180)
    assert "counted -2000.0 of -2000" in output(job)
    events = [e for e in fleet.events() if e.get("job") == job.id]
    formed = [(e["cause"], len(e["members"])) for e in events if e["kind"] == "GenerationFormed"]
    assert formed == [("start", 2), ("drain", 1), ("join", 2)], formed
    assert sum(e["repeated"] for e in events if e["kind"] == "JobResumed") == 0, "the leave was planned"
    whys = [e["why"] for e in events if e["kind"] == "JobChanged"]
    assert f"gives hosts to {urgent.id}, which has priority 5 over 0 and needs 1 host" in whys
    fleet.down()
    assert stage.cloud.truth() == []
