"""A user with a base on Google Cloud: `check`, `up` and `down` by the module's output, on the fake.

Terraform's own part stands for the plan that `terraform test` made: its network, rules and accounts are put into the
fake as planned. Nothing here was applied.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from spotfleet.providers.gcp.mapping import names
from tests.providers.gcp.conftest import cloud, cloud_time, gcp, shared_cloud
from tests.providers.gcp.test_gcp_up import Laptop, laptop, user
from tests.terraform.schema.run import TestReport
from tests.terraform.test_gcp_and_the_cli import PROJECT

__all__ = ["cloud", "cloud_time", "gcp", "laptop", "shared_cloud", "user"]

FILE: dict[str, Any] = {"name": "l4", "nodes": {"min": 1, "target": 2}, "workdir": ".",
                        "resources": {"accelerators": "L4:1"}}


@pytest.fixture
def base(module_tests: Callable[[str], TestReport], laptop: Laptop, gcp: Callable[..., Any]) -> dict[str, Any]:
    """Put what the run `complete` plans into the fake, and its output where the user can read it."""
    report, fake = module_tests("gcp"), laptop.cloud
    output = json.loads(json.dumps(report.planned_outputs("complete")["spotfleet"]).replace(PROJECT, fake.project))
    fake.add_network(names.last(output["network"]), auto=False, regions=(output["region"],))
    account = gcp().account
    for email in output["identities"].values():
        account.rest("iam", f"/v1/projects/{fake.project}/serviceAccounts",
                     {"accountId": email.partition("@")[0], "serviceAccount": {}})
    for address, rule in report.planned("complete").items():
        if address.startswith("google_compute_firewall."):
            account.change("firewalls", "insert", firewall_resource={
                "name": rule["name"], "network": output["network"], "direction": rule["direction"],
                "source_tags": rule["source_tags"] or [], "source_ranges": rule["source_ranges"] or [],
                "target_tags": rule["target_tags"],
                "allowed": [{"I_p_protocol": a["protocol"], "ports": a["ports"] or []} for a in rule["allow"]]})
    laptop.user.write("base.json", json.dumps({"spotfleet": {"sensitive": False, "value": output}}))
    laptop.user.write("l4.yaml", yaml.safe_dump(FILE))
    return output


def made(fake: Any) -> set[tuple[str, str]]:
    return {(thing.kind, thing.name) for thing in fake.everything()}


def test_a_fleet_comes_up_on_the_base_and_down_leaves_what_is_terraforms(laptop, base):
    before = made(laptop.cloud)
    assert ("firewall", "spotfleet-research-in") in before
    checked = laptop.user.types("check l4.yaml --from-terraform base.json")
    assert checked.code == 0 and "research in us-central1" in checked.out, checked
    laptop.user.types("up l4.yaml --from-terraform base.json -y --timeout 0.1s")
    [machine] = laptop.cloud.instances()
    assert {"spotfleet-research", "spotfleet-research-door"} <= set(machine.tags)
    assert machine.network == base["network"] and machine.service_account == base["identities"]["dispatcher"]
    assert machine.labels["spotfleet-base"] == "research" and machine.labels["spotfleet"].startswith("l4-")
    assert {kind for kind, _ in made(laptop.cloud) - before} == {"instance", "disk"}  # no rule
    laptop.user.types("down l4 -y --discard")
    assert made(laptop.cloud) == before
    assert laptop.user.ok("leaks -o json") and made(laptop.cloud) == before
