"""A user with a project on Google Cloud that is a fake, whose machines really run: for end-to-end tests of gcp.

    with GcpStage.made() as stage:
        stage.fleet_file()                     # examples/gcp-l4.yaml, for machines as they are here
        stage.cli("up", "fleet.yaml", "-y")    # the real command line, on a laptop with a service account's key
        stage.cloud.preempt(...)               # and whatever else tests/support/fakes/gcp can do

As `aws_stage.AwsStage`, from which everything comes that is the same on every cloud. After `restrict`, the laptop may
do what the role has that `spotfleet check gcp --policy laptop` prints, and the dispatcher's machine what its role has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spotfleet.providers.gcp.mapping import names
from tests.support.aws.aws_stage import AwsStage
from tests.support.fakes.aws_machines import AwsMachines
from tests.support.fakes.gcp import GcpCloud, InstanceView
from tests.support.fakes.gcp_machines import GcpMachines, why_not
from tests.support.network.ssh_stage import COUNTING

__all__ = ["GcpStage", "why_not"]

USER = "laptop@acme-training.iam.gserviceaccount.com"
KEY = "/root/key.json"  # on the laptop
EXAMPLE = Path(__file__).parents[3] / "examples" / "gcp-l4.yaml"
OPEN_RULES = ("default-allow-ssh", "default-allow-internal")  # that a new project has


def key_text(cloud: GcpCloud, machines: GcpMachines, account: str) -> str:
    """A service account's key file, for use on the machines."""
    return json.dumps(json.loads(cloud.key_file(account).read_text()) | {"token_uri": f"{machines.endpoint}/token"})


@dataclass
class GcpStage(AwsStage):
    cloud: GcpCloud  # type: ignore[assignment]
    machines: GcpMachines

    @staticmethod
    @contextmanager
    def made(beside: AwsMachines | None = None) -> Iterator[GcpStage]:  # type: ignore[override]
        """Hosts have an image without any SDK of a cloud, and with nothing that installs packages. The rules by which
        all may enter the default network are gone: the laptop's address here is one of the network's."""
        with GcpCloud() as cloud:
            for rule in OPEN_RULES:
                del cloud.things[f"projects/{cloud.project}/global/firewalls/{rule}"]
            bare = tuple(i.name for i in cloud.images if i.driver)
            with GcpMachines(cloud, bare, beside) as machines:
                cloud.anonymous = ""
                machines.laptop.path(KEY).write_text(key_text(cloud, machines, USER))
                env = {"SPOTFLEET_GCP_ENDPOINT": machines.endpoint, "GOOGLE_APPLICATION_CREDENTIALS": KEY,
                       "GOOGLE_CLOUD_PROJECT": cloud.project}
                stage = GcpStage(cloud, machines, env)
                stage.write("counting.py", COUNTING)
                yield stage
                assert cloud.runner_errors == [], stage.story()
                assert not cloud.findings, cloud.findings[:10]
                assert not cloud.bugs, cloud.bugs[0]

    def fleet_file(self, **changed: Any) -> dict[str, Any]:
        """fleet.yaml: see `AwsStage.fleet_file`."""
        wanted = yaml.safe_load(EXAMPLE.read_text())
        wanted |= {"environment": {"python": sys.executable, "inherit": True}, "workdir": "."} | changed
        wanted["gcp"] = wanted.get("gcp", {}) | {"ssh_from": [f"{self.machines.laptop.address}/32"]}
        self.fleet = wanted["name"]
        self.write("fleet.yaml", yaml.safe_dump(wanted, sort_keys=False))
        return wanted

    def restrict(self) -> None:
        for who, principal in (("laptop", USER), ("dispatcher", self.cloud.default_account)):
            self.cloud.allow(principal, self.permitted(who))

    def permitted(self, who: str) -> frozenset[str]:
        said = self.cli("check", "gcp", "--policy", who, "fleet.yaml").stdout
        return frozenset(yaml.safe_load(said)["includedPermissions"])

    def instances(self, role: str = "") -> list[InstanceView]:  # type: ignore[override]
        """Those that run, or are on their way; of "worker" or "dispatcher"."""
        return [view for view in self.cloud.instances() if names.FLEET in view.labels
                and view.state in ("pending", "running") and role in ("", view.labels.get(names.ROLE))]

    def home(self, view: InstanceView) -> Path:  # type: ignore[override]
        return self.machine(view).path(f"/root/.spotfleet-host/{names.host_of(view.name)}")

    def bills(self) -> dict[str, float]:
        return {names.host_of(name): usd for name, usd in self.cloud.invoice().items()}

    def denials(self) -> list[str]:
        return sorted({f"{c.principal}: {c.action}: {c.code}" for c in self.cloud.calls if c.status in (401, 403)})
