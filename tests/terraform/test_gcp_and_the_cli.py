"""The module for Google Cloud and the CLI: the same rights, rules and machines, so that neither changes alone.

The CLI's requests are those that the fake of Google Cloud receives for a fleet on the base, which is read from the
module's output. The module's values are the planned ones of its own tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from spotfleet.config import Given, base, parse
from spotfleet.model import CheckpointSpec, FleetSpec, Market, Need, Nodes, Offer, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.gcp import GcpProvider
from spotfleet.providers.gcp.mapping import names, quotas
from spotfleet.providers.gcp.plugin import GCP
from spotfleet.providers.gcp.spec import parsed
from tests.providers.gcp.conftest import cloud, cloud_time, gcp, shared_cloud
from tests.terraform.conftest import module
from tests.terraform.schema.run import TestReport

__all__ = ["cloud", "cloud_time", "gcp", "shared_cloud"]

PROJECT = "my-project-123"  # in the module's tests
BASE, FLEET = "research", "f"
DISPATCHER = Offer("gcp", "us-central1", "us-central1-b", "e2-medium", Market.ON_DEMAND, 1, 33_000, 33_000)
L4 = Offer("gcp", "us-central1", "us-central1-b", "g2-standard-4", Market.SPOT, 1, 300_000, 700_000, "L4",
           quota="PREEMPTIBLE_NVIDIA_L4_GPUS")
T4 = Offer("gcp", "us-central1", "us-central1-b", "n1-standard-8+nvidia-tesla-t4x2", Market.SPOT, 2, 300_000, 700_000,
           "T4", quota="PREEMPTIBLE_NVIDIA_T4_GPUS")
MARKET = ("provisioningModel", "instanceTerminationAction", "preemptionNoticeDuration")  # chosen at the launch
OF_A_RUN = (names.POOL, names.BEHAVIOR, names.ENCODING, names.USER_DATA, "spotfleet-base")  # metadata


@dataclass(frozen=True)
class PlannedBase:
    """What the module plans in one run of its tests, and a provider whose fleet is on that base by its output."""

    planned: Mapping[str, dict[str, Any]]
    output: Mapping[str, Any]
    provider: GcpProvider
    cloud: Any

    def launched(self, role: Role, offer: Offer) -> dict[str, Any]:
        """Launch one machine; return the body of the request."""
        self.provider.launch(LaunchRequest(f"{FLEET}-1", FLEET, role, offer, Boot("idle_host", {"boot.json": "x"}),
                                           tags=self.output["tags"]))
        [call] = [c for c in self.cloud.calls if c.action == "compute.instances.insert"]
        return call.params["body"]


@pytest.fixture
def on_base(module_tests: Callable[[str], TestReport], gcp: Callable[..., GcpProvider],
            cloud: Any) -> Callable[[str], PlannedBase]:
    def make(run: str) -> PlannedBase:
        report = module_tests("gcp")
        output = report.planned_outputs(run)["spotfleet"]
        read = base.parse(here(json.dumps(output), cloud), "output of the module")
        spec = parse("nodes: 2\nresources: {accelerators: L4:1}", Path("/work/f.yaml"), {},
                     given=Given(base=read)).spec
        assert spec.checkpoint.target == here(output["checkpoints"], cloud)
        section = parsed(spec.section)
        cloud.add_network(names.last(output["network"]), auto=False, regions=(output["region"],))
        provider = gcp(**{f.name: getattr(section, f.name) for f in fields(section)})
        for email in output["identities"].values():
            provider.account.rest("iam", f"/v1/projects/{cloud.project}/serviceAccounts",
                                  {"accountId": email.partition("@")[0], "serviceAccount": {}})
        cloud.forget_calls()
        return PlannedBase(report.planned(run), output, provider, cloud)

    return make


def here(text: str, cloud: Any) -> str:
    """Return a name of the module's project as one of the fake's."""
    return text.replace(PROJECT, cloud.project)


# ---- rights


@pytest.mark.parametrize("role", ["dispatcher", "laptop", "host"])
def test_roles_have_the_permissions_that_check_policy_prints(module_tests, role):
    planned = module_tests("gcp").planned("complete")
    permissions = {key: set(planned[f'google_project_iam_custom_role.this["{key}"]']["permissions"])
                   for key in ("dispatcher", "laptop", "host", "act_as")}
    spec = FleetSpec("f", checkpoint=CheckpointSpec(target="gs://bucket/prefix"))
    printed = set(GCP.policies.document(role, spec, "gcp")["includedPermissions"])
    assert permissions["act_as"] == {"iam.serviceAccounts.actAs"}
    assert permissions[role] == printed - permissions["act_as"]


def test_the_right_to_act_as_an_account_is_given_on_that_account_alone(module_tests):
    planned = module_tests("gcp").planned("complete")
    given = {address: after for address, after in planned.items() if address.startswith("google_service_account_iam_")}
    assert {(address.partition(".")[2].partition("[")[0], after["member"].partition(":")[0])
            for address, after in given.items()} == {("dispatcher_acts_as_host", "serviceAccount"),
                                                     ("operators_act_as", "group")}
    for address, after in planned.items():
        if address.startswith("google_project_iam_member."):
            assert "act_as" not in str(after.get("role")), address


def test_hosts_have_rights_on_their_folder_of_the_bucket_alone(module_tests):
    planned = module_tests("gcp").planned("defaults")
    member = planned['google_storage_bucket_iam_member.checkpoints["host"]']
    assert member["bucket"] == f"spotfleet-{BASE}-{PROJECT}"
    assert f"/buckets/spotfleet-{BASE}-{PROJECT}/objects/spotfleet/'" in member["condition"][0]["expression"]
    assert not any(after.get("member", "").startswith(f"serviceAccount:sf-{BASE}-host")
                   for address, after in planned.items() if address.startswith("google_project_iam_member."))


def test_operators_may_read_the_description_of_the_base_alone(module_tests):
    planned = module_tests("gcp").planned("complete")
    role = planned['google_project_iam_custom_role.this["discover"]']
    assert sorted(role["permissions"]) == ["storage.buckets.list", "storage.objects.get"]
    member = planned['google_project_iam_member.operators_discover["group:ml@example.com"]']
    thing = planned["google_storage_bucket_object.base[0]"]
    assert member["condition"][0]["expression"].endswith(
        f"resource.name == 'projects/_/buckets/{thing['bucket']}/objects/{thing['name']}'")
    assert planned["google_storage_bucket.checkpoints[0]"]["labels"]["spotfleet-base"] == BASE


# ---- firewall


def test_the_rules_are_those_that_up_makes_for_a_fleet_without_a_base(module_tests, gcp, cloud):
    planned = module_tests("gcp").planned("complete")
    inside, door = planned["google_compute_firewall.inside[0]"], planned["google_compute_firewall.ssh[0]"]
    gcp(ssh_from=tuple(door["source_ranges"])).prepare(BASE, {}, lambda line: None)
    made = {c.params["body"]["name"]: c.params["body"] for c in cloud.calls if c.action == "compute.firewalls.insert"}
    assert plain_rule(inside) == rest_rule(made.pop(inside["name"]))
    [of_up] = made.values()
    assert plain_rule(door) == rest_rule(of_up)


def test_a_fleet_on_the_base_makes_no_rules_and_has_the_tags_of_the_bases(on_base, cloud):
    on = on_base("complete")
    on.provider.prepare(FLEET, {}, lambda line: None)
    assert not [c for c in cloud.calls if c.action == "compute.firewalls.insert"]
    section = on.provider.account.settings.spec
    assert list(section.network_tags) == on.planned["google_compute_firewall.inside[0]"]["target_tags"]
    assert list(section.dispatcher_network_tags) == on.planned["google_compute_firewall.ssh[0]"]["target_tags"]


@pytest.mark.parametrize("run", ["defaults", "complete"])
def test_check_finds_the_rules_of_the_base_and_nothing_that_stops_a_fleet(on_base, run):
    on = on_base(run)
    for address, rule in on.planned.items():
        if address.startswith("google_compute_firewall."):
            on.provider.account.change("firewalls", "insert", firewall_resource={
                "name": rule["name"], "network": here(on.output["network"], on.cloud), "direction": "INGRESS",
                "source_tags": rule["source_tags"] or [], "source_ranges": rule["source_ranges"] or [],
                "target_tags": rule["target_tags"],
                "allowed": [{"I_p_protocol": a["protocol"], "ports": a["ports"] or []} for a in rule["allow"]]})
    spec = FleetSpec(FLEET, provider="gcp", any_of=(Need(instance_type="g2-standard-4", region="us-central1"),),
                     dispatcher=Need(use_spot=False, instance_type="e2-medium"), nodes=Nodes(1, 1, 1))
    findings = list(on.provider.findings(spec))
    assert [f for f in findings if f.level in ("blocker", "absent")] == []
    [door] = [f for f in findings if f.about == "SSH"]
    assert door.level == ("ok" if run == "complete" else "warning")  # by default nobody comes in


def plain_rule(planned: Mapping[str, Any]) -> dict[str, Any]:
    return {"direction": planned["direction"], "sourceTags": planned["source_tags"] or [],
            "sourceRanges": sorted(planned["source_ranges"] or []), "targetTags": planned["target_tags"],
            "allowed": [(a["protocol"], a["ports"] or []) for a in planned["allow"]]}


def rest_rule(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"direction": body["direction"], "sourceTags": body.get("sourceTags", []),
            "sourceRanges": sorted(body.get("sourceRanges", [])), "targetTags": body["targetTags"],
            "allowed": [(a["IPProtocol"], a.get("ports", [])) for a in body["allowed"]]}


# ---- machines


@pytest.mark.parametrize(("run", "offer"), [("defaults", L4), ("complete", T4)])
def test_the_template_has_the_values_of_a_host_that_the_dispatcher_launches(on_base, run, offer):
    on = on_base(run)
    planned = on.planned['google_compute_instance_template.this["host"]']
    [disk] = planned["disk"]
    key = "".join(k["kms_key_self_link"] for k in disk["disk_encryption_key"])
    body = on.launched(Role.WORKER, offer)
    assert planned_machine(planned, {**disk, "key": key}, on.cloud) == launched_machine(body, on.cloud)
    assert planned["scheduling"][0]["provisioning_model"] is None  # the launch chooses the market


def test_the_dispatcher_of_terraform_has_the_values_of_one_that_up_makes(on_base):
    on = on_base("complete")
    planned = on.planned["google_compute_instance.dispatcher[0]"]
    boot = planned["boot_disk"][0]
    disk = boot["initialize_params"][0] | {"boot": True, "auto_delete": boot["auto_delete"]}
    disk |= {"source_image": disk["image"], "disk_size_gb": disk["size"], "disk_type": disk["type"],
             "key": boot["kms_key_self_link"] or ""}
    body = on.launched(Role.DISPATCHER, DISPATCHER)
    made = planned_machine(planned, disk, on.cloud)
    extra = {key: made["metadata"].pop(key) for key in ("ssh-keys", "user-data")}  # the CLI's own come at its launch
    assert made == launched_machine(body, on.cloud) and all(extra.values())


def planned_machine(planned: Mapping[str, Any], disk: Mapping[str, Any], cloud: Any) -> dict[str, Any]:
    [nic], [account], [scheduling] = (planned[k] for k in ("network_interface", "service_account", "scheduling"))
    return {
        "type": planned["machine_type"],
        "tags": sorted(planned["tags"]),
        "metadata": dict(planned["metadata"]),
        "base": planned["labels"]["spotfleet-base"],
        "disk": (disk["boot"], disk["auto_delete"], disk["source_image"], int(disk["disk_size_gb"]), disk["disk_type"],
                 disk["key"]),
        "subnet": here(nic["subnetwork"], cloud),
        "public": len(nic["access_config"]),
        "gpus": [(g["type"], g["count"]) for g in planned["guest_accelerator"] or ()],
        "account": (here(account["email"], cloud), account["scopes"]),
        "scheduling": {"automaticRestart": scheduling["automatic_restart"],
                       "onHostMaintenance": scheduling["on_host_maintenance"]},
    }


def launched_machine(body: Mapping[str, Any], cloud: Any) -> dict[str, Any]:
    [disk], [nic], [account] = (body[k] for k in ("disks", "networkInterfaces", "serviceAccounts"))
    start = disk["initializeParams"]
    image = next(i for i in cloud.images if i.name == names.last(start["sourceImage"]))
    return {
        "type": names.last(body["machineType"]),
        "tags": sorted(set(body["tags"]["items"]) - {names.network_tag(FLEET), names.network_tag(FLEET, door=True)}),
        "metadata": {i["key"]: i["value"] for i in body["metadata"]["items"] if i["key"] not in OF_A_RUN},
        "base": body["labels"]["spotfleet-base"],
        "disk": (disk["boot"], disk["autoDelete"], f"projects/{image.project}/global/images/family/{image.family}",
                 int(start["diskSizeGb"]), names.last(start["diskType"]),
                 disk.get("diskEncryptionKey", {}).get("kmsKeyName", "")),
        "subnet": nic["subnetwork"],
        "public": len(nic.get("accessConfigs", ())),
        "gpus": [(names.last(g["acceleratorType"]), g["acceleratorCount"]) for g in body.get("guestAccelerators", ())],
        "account": (account["email"], account["scopes"]),
        "scheduling": {k: v for k, v in body["scheduling"].items() if k not in MARKET},
    }


def test_the_gpus_that_the_module_attaches_are_those_that_the_cli_knows():
    text = (module("gcp") / "variables.tf").read_text()
    listed = text.partition('variable "gpu"')[2].partition("contains([")[2].partition("]")[0]
    assert {word.strip(' "') for word in listed.split(",")} == set(quotas.ATTACHED)
