"""scripts/smoke-aws whole: the real command line, machines that run, a user who may do what is printed for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotfleet.providers.aws.mapping import policies
from tests.support.aws.aws_stage import USER, AwsStage, why_not
from tests.support.network.ssh_stage import WORK

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="the long form: SPOTFLEET_LONG=1"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(900),
]


def experiments_come_true(cloud: Any) -> list[str]:
    """moto keeps FIS experiments, and nothing follows from them. The instances that met with one, from now on."""
    from moto.fis.models import fis_backends

    fis_backends.reset()
    met: list[str] = []

    def after(call: Any) -> None:
        if call.service == "fis":
            begun = fis_backends[cloud.ACCOUNT]["us-east-1"].experiments.values()
            arns = [a for e in begun for target in e.targets.values() for a in target["resourceArns"]]
            for instance in [arn.rpartition("/")[2] for arn in arns[len(met):]]:
                met.append(instance)
                cloud.rebalance(instance)
                cloud.interrupt(instance, notice_s=20.0, room=None)

    cloud.after = after
    return met


def test_a_user_with_the_printed_permissions_runs_all_of_it_and_leaves_nothing():
    with AwsStage.made() as stage:
        met = experiments_come_true(stage.cloud)
        stage.cloud.allow(USER, {*policies.actions(policies.laptop(policies.Scope())), "fis:*"})
        here = {"environment": {"python": sys.executable, "inherit": True},
                "aws": {"ssh_from": [f"{stage.machines.laptop.address}/32"]}}
        stage.write("with.yaml", yaml.safe_dump(here))
        done = stage.machines.laptop.run(
            sys.executable, str(SCRIPTS / "smoke_aws.py"), "--region", "us-east-1", "--with", "with.yaml",
            "--report", "report.txt", "--name", "smoke", ok=False, timeout_s=800, cwd=WORK,
            env={**stage.env, "AWS_DEFAULT_REGION": "us-east-1", "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, f"{done.stderr}\n{stage.story()}"
        assert "ALL WENT WELL" in done.stderr and len(met) == 1
        assert stage.cloud.everything() == []
        assert [c for c in stage.cloud.calls if c.code in ("UnauthorizedOperation", "AccessDenied")] == []
        report = stage.machines.laptop.path(f"{WORK}/report.txt").read_text()
        assert stage.cloud.ACCOUNT not in report and "0 steps were repeated" in report
