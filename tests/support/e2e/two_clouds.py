"""A user with accounts on AWS and on Google Cloud, both fakes, whose machines really run on one network.

    with TwoClouds.made() as stage:
        stage.fleet_file()                      # a dispatcher on AWS, hosts on either cloud
        stage.cli("up", "fleet.yaml", "-y")
        stage.aws.cloud.interrupt(...); stage.gcp.cloud.preempt(...)

What both clouds have comes from `AwsStage`; `aws` and `gcp` are the stages of one cloud each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.support.aws.aws_stage import AwsStage
from tests.support.gcp.gcp_stage import GcpStage, key_text
from tests.support.network.machines import Machine

FLEET_ACCOUNT = "fleet@acme-training.iam.gserviceaccount.com"
FLEET_KEY = "/root/fleet.json"  # on the laptop: what the dispatcher gets


@dataclass
class TwoClouds(AwsStage):
    aws: AwsStage = field(kw_only=True)
    gcp: GcpStage = field(kw_only=True)

    @staticmethod
    @contextmanager
    def made() -> Iterator[TwoClouds]:
        with AwsStage.made() as aws, GcpStage.made(beside=aws.machines) as gcp:
            aws.machines.laptop.path(FLEET_KEY).write_text(key_text(gcp.cloud, gcp.machines, FLEET_ACCOUNT))
            yield TwoClouds(aws.cloud, aws.machines, aws.env | gcp.env, aws=aws, gcp=gcp)

    def fleet_file(self, **changed: Any) -> dict[str, Any]:
        ssh_from = [f"{self.machines.laptop.address}/32"]
        wanted = {
            "name": "both", "provider": ["aws", "gcp"], "nodes": {"min": 2, "target": 2},
            "resources": {"any_of": [{"infra": "aws/us-east-1/us-east-1a", "instance_type": "g5.xlarge"},
                                     {"infra": "gcp/us-central1/us-central1-a", "instance_type": "g2-standard-4"}]},
            "dispatcher": {"instance_type": "t3.small"}, "aws": {"ssh_from": ssh_from},
            "gcp": {"ssh_from": ssh_from, "dispatcher_credentials": FLEET_KEY},
            "environment": {"python": sys.executable, "inherit": True}, "workdir": ".", "max_lifetime": "12h"} | changed
        self.fleet = wanted["name"]
        self.write("fleet.yaml", yaml.safe_dump(wanted, sort_keys=False))
        return wanted

    def permit(self) -> None:
        """The dispatcher's account on Google Cloud may do what the role of `check gcp --policy dispatcher` has."""
        said = self.cli("check", "gcp", "--policy", "dispatcher").stdout
        self.gcp.cloud.allow(FLEET_ACCOUNT, frozenset(yaml.safe_load(said)["includedPermissions"]))

    # ---- the truth

    def instances(self, role: str = "") -> list[Any]:
        running = [view for view in self.aws.instances(role) if view.state in ("pending", "running")]
        return [*running, *self.gcp.instances(role)]

    def cloud_of(self, view: Any) -> AwsStage:
        return self.gcp if view.id in self.gcp.machines else self.aws

    def clouds(self) -> list[str]:
        """The clouds of the hosts that run, sorted."""
        return sorted("gcp" if self.cloud_of(view) is self.gcp else "aws" for view in self.instances("worker"))

    def machine(self, view: Any) -> Machine:
        return self.cloud_of(view).machine(view)

    def home(self, view: Any) -> Path:
        return self.cloud_of(view).home(view)

    def steps(self, view: Any) -> list[Any]:
        return self.cloud_of(view).steps(view)

    def bills(self) -> dict[str, float]:
        return self.aws.bills() | self.gcp.bills()

    def rooms(self, aws: int, gcp: int) -> None:
        """So many more hosts have room in each cloud."""
        self.aws.cloud.set_room("us-east-1a", "g5.xlarge", aws)
        self.gcp.cloud.set_room("us-central1-a", "g2-standard-4", gcp)

    def story(self) -> str:
        calls = [f"{c.principal} {c.action} {c.code}" for c in self.gcp.cloud.calls][-60:]
        return "\n".join([super().story(), self.gcp.machines.story(), "=== calls of gcp", *calls])
