"""scripts/smoke-gcp whole: the real command line, machines that run, a user who may do what is printed for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from spotfleet.providers.gcp.mapping import roles
from tests.support.gcp.gcp_stage import USER, GcpStage, why_not
from tests.support.network.ssh_stage import WORK

SCRIPTS = Path(__file__).parents[3] / "scripts"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="the long form: SPOTFLEET_LONG=1"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(900),
]


def test_a_user_with_the_printed_role_runs_all_of_the_smoke_and_leaves_nothing():
    with GcpStage.made() as stage:
        stage.cloud.allow(USER, roles.LAPTOP)
        stage.cloud.allow(stage.cloud.default_account, roles.DISPATCHER)
        here = {"environment": {"python": sys.executable, "inherit": True},
                "gcp": {"ssh_from": [f"{stage.machines.laptop.address}/32"]}}
        stage.write("with.yaml", yaml.safe_dump(here))
        done = stage.machines.laptop.run(
            sys.executable, str(SCRIPTS / "smoke_gcp.py"), "--project", stage.cloud.project, "--region", "us-central1",
            "--with", "with.yaml", "--report", "report.txt", "--name", "smoke", ok=False, timeout_s=800, cwd=WORK,
            env={**stage.env, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, f"{done.stderr}\n{stage.story()}"
        assert "ALL WENT WELL" in done.stderr
        assert stage.cloud.everything() == [] and stage.denials() == []
        report = stage.machines.laptop.path(f"{WORK}/report.txt").read_text()
        assert stage.cloud.project not in report and "instances.simulateMaintenanceEvent by PERSON" in report
        assert "0 steps were repeated" in report  # the host left before its time was over
