"""Everything around a first fleet on the fake of Google Cloud: checks, firewall, leaks."""

from __future__ import annotations

import pytest

from spotfleet.errors import NeedsPerson, UsageError
from spotfleet.model import FleetSpec, Need, Nodes
from spotfleet.providers import Finding
from spotfleet.providers.gcp import session
from spotfleet.providers.gcp.mapping import roles
from spotfleet.providers.gcp.session import GcpAccount
from tests.providers.gcp.test_gcp_launch import KIND, request

SPEC = FleetSpec("f", provider="gcp", any_of=(Need(instance_type=KIND, region="us-central1"),),
                 dispatcher=Need(use_spot=False, instance_type="e2-medium"), nodes=Nodes(2, 2, 2))


def found(provider, spec: FleetSpec | None = SPEC) -> dict[str, list[Finding]]:
    by_subject: dict[str, list[Finding]] = {}
    for finding in provider.findings(spec):
        assert finding.level == "ok" or finding.fix, finding
        by_subject.setdefault(finding.about, []).append(finding)
    return by_subject


def blockers(provider, spec: FleetSpec | None = SPEC) -> list[Finding]:
    return [f for of in found(provider, spec).values() for f in of if f.level in ("blocker", "absent")]


def test_a_project_that_is_set_up_has_no_blocker(gcp, cloud):
    provider = gcp()
    subjects = found(provider)
    assert blockers(provider) == [] and blockers(provider, None) == []
    assert set(subjects) >= {"credentials", "clock", "permissions", "OS Login", "service account", "SSH", "pools",
                             "GPU quota", "network", "image", "notices"}
    assert cloud.everything() == []


def test_without_credentials_one_finding_says_how_to_log_in(gcp, monkeypatch, tmp_path):
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setattr("google.auth.default", lambda **_: pytest.fail("it may wait for a metadata server"))
    [only] = list(gcp().findings(SPEC))
    assert only.level == "absent" and only.fix == "gcloud auth application-default login"
    with pytest.raises(NeedsPerson) as caught:
        gcp().launch(request())
    assert caught.value.hint == "gcloud auth application-default login"


def test_without_a_project_one_finding_says_where_to_name_it(gcp, cloud, monkeypatch):
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT")
    provider = gcp(project="")
    monkeypatch.setattr(provider.account, "_credentials", (provider.account._found_credentials()[0], ""))
    [only] = list(provider.findings(SPEC))
    assert only.level == "blocker" and "gcp: {project: ID}" in only.fix


def test_refused_credentials_say_how_to_renew_them(gcp, cloud):
    cloud.expire(cloud.owner)
    [only] = list(gcp().findings(SPEC))
    assert only.level == "blocker" and "gcloud auth application-default login" in only.fix


def test_an_api_that_is_off_has_its_command(gcp, cloud):
    cloud.services.discard("compute.googleapis.com")
    [only] = list(gcp().findings(SPEC))
    assert only.level == "blocker"
    assert only.fix == f"gcloud services enable compute.googleapis.com --project {cloud.project}"


def test_missing_permissions_are_named_with_the_commands_of_a_role(gcp, cloud):
    cloud.deny(cloud.owner, {"compute.firewalls.create"})
    [only] = blockers(gcp())
    assert (only.about, "compute.firewalls.create" in only.what) == ("permissions", True)
    assert "gcloud iam roles create" in only.fix and "add-iam-policy-binding" in only.fix


def test_the_roles_suffice_for_all_that_laptop_and_dispatcher_do(gcp, cloud):
    cloud.allow(cloud.owner, set(roles.LAPTOP))
    laptop = gcp()
    assert blockers(laptop) == []
    laptop.prepare("f", {}, lambda line: None)
    laptop.launch(request())
    laptop.interrupt("f-1", None)
    laptop.terminate("f-1")
    for resource in laptop.list_resources("f"):
        laptop.delete_resource(resource)
    cloud.allow(cloud.owner, set(roles.DISPATCHER))
    dispatcher = gcp(side="dispatcher")
    dispatcher.offers(Need(instance_type=KIND))
    dispatcher.launch_together([request(request_id="f-2"), request(request_id="f-3")])
    dispatcher.tag("f-2", {"a": "b"})
    assert {h.request_id for h in dispatcher.hosts("f")} >= {"f-2", "f-3"}
    dispatcher.terminate("f-2")
    assert {c.action for c in cloud.calls if c.status == 403} <= {"cloudresourcemanager.projects.getIamPolicy"}


@pytest.mark.parametrize("region, metric", [("us-central1", "PREEMPTIBLE_NVIDIA_L4_GPUS"), ("", "GPUS_ALL_REGIONS")])
def test_a_quota_of_zero_gpus_names_the_quota_and_where_to_raise_it(gcp, cloud, region, metric):
    for name in (metric, metric.removeprefix("PREEMPTIBLE_")):
        cloud.set_quota(region, name, 0)
    [only] = blockers(gcp())
    assert (only.about, metric in only.what) == ("GPU quota", True)
    assert f"project={cloud.project}: filter {metric}" in only.fix


def test_a_project_without_preemptible_quota_uses_its_standard_quota(gcp, cloud):
    """As a new project: "In regions where you don't have preemptible quota, you can use standard quota"."""
    for metric in ("PREEMPTIBLE_NVIDIA_L4_GPUS", "PREEMPTIBLE_CPUS"):
        cloud.set_quota("us-central1", metric, 0)
    cloud.set_quota("us-central1", "NVIDIA_L4_GPUS", 4)
    provider = gcp()
    assert blockers(provider) == []
    assert any("'NVIDIA_L4_GPUS' allows 4" in f.what for f in found(provider)["GPU quota"])
    provider.launch(request())
    assert len(cloud.instances()) == 1


def test_apis_that_only_a_check_needs_are_named_and_block_nothing(gcp, cloud):
    """A new project has neither API, and `up` needs none of them."""
    cloud.services -= {"cloudresourcemanager.googleapis.com", "iam.googleapis.com"}
    email = f"dispatcher@{cloud.project}.iam.gserviceaccount.com"
    provider = gcp(dispatcher_service_account=email)
    assert blockers(provider) == []
    apis = {"permissions": "cloudresourcemanager", "service account": "iam"}
    assert {about: found(provider)[about][0].fix for about in apis} == {
        about: f"gcloud services enable {api}.googleapis.com --project {cloud.project}" for about, api in apis.items()}


def test_a_default_service_account_without_a_role_is_a_blocker(gcp, cloud):
    cloud.policy["bindings"] = []
    [only] = blockers(gcp())
    assert only.about == "service account" and "has no role" in only.what
    assert "gcloud iam service-accounts create" in only.fix
    cloud.deny(cloud.owner, {"resourcemanager.projects.getIamPolicy"})
    assert blockers(gcp()) == []


def test_a_quota_that_holds_the_fleet_and_no_replacement_is_a_warning(gcp, cloud):
    cloud.set_quota("us-central1", "PREEMPTIBLE_NVIDIA_L4_GPUS", 2)
    assert [f.level for f in found(gcp())["GPU quota"] if "PREEMPTIBLE" in f.what] == ["warning"]


def test_a_region_and_a_zone_that_do_not_exist_are_named(gcp):
    assert "atlantis-west1" in blockers(gcp(regions=("atlantis-west1",)))[0].what
    nowhere = FleetSpec("f", any_of=(Need(instance_type=KIND, zone="us-central1-z"),), nodes=Nodes(1, 1, 1),
                        dispatcher=SPEC.dispatcher)
    [zone] = blockers(gcp(), nowhere)
    assert zone.what.startswith("there is no zone us-central1-z; did you mean")
    assert "gcloud compute zones list" in zone.fix


def test_a_type_without_the_accelerator_is_named(gcp):
    wrong = FleetSpec("f", any_of=(Need(instance_type=KIND, accelerator="H100"),), nodes=Nodes(1, 1, 1),
                      dispatcher=SPEC.dispatcher)
    [only] = blockers(gcp(), wrong)
    assert only.about == "pools" and "H100" in only.what


def test_a_private_network_without_a_way_out_has_the_commands_of_cloud_nat(gcp, cloud):
    cloud.add_network("walled", auto=False, nat=False)
    cloud.add_network("own", auto=False, nat=True)
    lacking = [f for f in found(gcp(network="walled", public_addresses=False))["network"] if f.level == "warning"]
    assert len(lacking) == 1 and "gcloud compute routers nats create" in lacking[0].fix
    assert [f.level for f in found(gcp(network="own", public_addresses=False))["network"]] == ["ok"]


def test_os_login_is_told_apart(gcp, cloud):
    assert found(gcp())["OS Login"][0].level == "ok"
    cloud.common_metadata["enable-oslogin"] = "TRUE"
    assert found(gcp())["OS Login"][0].level == "warning"


def test_a_service_account_that_does_not_exist_has_the_commands_that_make_it(gcp, cloud):
    email = f"nobody@{cloud.project}.iam.gserviceaccount.com"
    [only] = blockers(gcp(dispatcher_service_account=email))
    assert email in only.what and "gcloud iam service-accounts create" in only.fix


# firewall and leaks


def test_a_fleet_has_one_rule_for_itself_and_one_for_each_laptop(gcp, cloud):
    provider, told = gcp(), []
    provider.prepare("f", {}, told.append)
    provider.prepare("f", {}, told.append)
    assert len(told) == 2 and {t.kind for t in cloud.everything()} == {"firewall"}
    gcp(ssh_from=("198.51.100.7/32",)).allow_ssh_from_here("f", told.append)
    rules = {r["name"]: r for r in cloud.collection("firewalls") if r["name"].startswith("spotfleet-")}
    assert sorted(r.get("sourceRanges", []) for r in rules.values()) == [[], ["198.51.100.7/32"]]
    assert rules["spotfleet-f-in"]["sourceTags"] == rules["spotfleet-f-in"]["targetTags"] == ["spotfleet-f"]


def test_a_fleet_with_the_longest_name_gets_its_rules(gcp, cloud):
    gcp().prepare("f" * 40 + "-1a2b", {}, lambda line: None)
    assert len([t for t in cloud.everything() if t.kind == "firewall"]) == 2


def test_a_rule_of_the_network_that_opens_ssh_to_all_is_named(gcp, cloud):
    [rule] = [f for f in found(gcp())["SSH"] if f.level == "warning"]
    assert "default-allow-ssh" in rule.what and "gcloud compute firewall-rules update default-allow-ssh" in rule.fix
    cloud.add_network("own", auto=False)
    assert [f.level for f in found(gcp(network="own"))["SSH"]] == ["ok"]


def test_the_whole_world_is_not_let_in(gcp):
    with pytest.raises(UsageError, match="whole world"):
        gcp(ssh_from=("0.0.0.0/0",)).prepare("f", {}, lambda line: None)


def test_the_firewall_of_a_shared_vpc_is_left_to_its_owner(gcp, cloud):
    cloud.add_network("common", project="host-project-1")
    provider, told = gcp(network="projects/host-project-1/global/networks/common",
                         subnetworks={"us-central1": "common"}), []
    provider.prepare("f", {}, told.append)
    assert "host-project-1" in told[0] and cloud.everything() == []
    [door] = [f for f in found(provider)["SSH"] if f.level == "warning"]
    assert "--project host-project-1" in door.fix and "--target-tags spotfleet-f" in door.fix


def test_named_network_tags_need_rules_and_those_of_a_fleet_are_not_asked_for(gcp, cloud):
    """On a base without public addresses the laptop's own address does not matter."""
    cloud.add_network("lab", auto=False)
    provider = gcp(network="lab", ssh_from=(), public_addresses=False, network_tags=("lab",),
                   dispatcher_network_tags=("lab-door",))
    missing = found(provider)["SSH"]
    assert [f.level for f in missing] == ["blocker", "warning"]
    assert "--source-tags lab --target-tags lab" in missing[0].fix and "--target-tags lab-door" in missing[1].fix
    for rule in ({"name": "in", "source_tags": ["lab"], "target_tags": ["lab"], "allowed": [{"I_p_protocol": "all"}]},
                 {"name": "ssh", "source_ranges": ["203.0.113.0/24"], "target_tags": ["lab-door"],
                  "allowed": [{"I_p_protocol": "tcp", "ports": ["22"]}]}):
        provider.account.change("firewalls", "insert", firewall_resource={
            **rule, "network": f"projects/{cloud.project}/global/networks/lab", "direction": "INGRESS"})
    [door] = found(provider)["SSH"]
    assert door.level == "ok" and "203.0.113.0/24" in door.what


def test_rules_and_forgotten_disks_are_listed_and_removed(gcp, cloud):
    provider = gcp()
    for fleet in ("f", "g"):
        provider.prepare(fleet, {}, lambda line: None)
    client = cloud.client("DisksClient")
    client.insert(request={"project": cloud.project, "zone": "us-central1-a", "disk_resource": {
        "name": "left", "size_gb": 10, "labels": {"spotfleet": "f"}}})
    client.insert(request={"project": cloud.project, "zone": "us-central1-a", "disk_resource": {
        "name": "foreign", "size_gb": 10}})
    provider.launch(request())
    resources = provider.list_resources("f")
    assert {(r.kind, r.id) for r in resources if r.kind == "disk"} == {("disk", "us-central1-a/left")}
    assert len(resources) == 3 and {r.fleet for r in resources} == {"f"} and all(r.since for r in resources)
    assert {r.fleet for r in provider.list_resources("")} == {"f", "g"}
    assert min(resources, key=lambda r: provider.resource_kinds().index(r.kind)).kind == "disk"
    for resource in resources:
        provider.delete_resource(resource)
        provider.delete_resource(resource)
    assert provider.list_resources("f") == []
    assert {t.name for t in cloud.everything() if t.kind == "disk"} >= {"foreign"}


# requests


def test_what_passes_by_itself_is_asked_again_and_changes_are_sent_once(gcp, cloud):
    provider = gcp()
    cloud.fault("compute.instances.aggregatedList", code="backendError", times=session.ATTEMPTS - 1)
    assert provider.hosts("f") == []
    cloud.forget_calls()
    cloud.fault("compute.instances.insert", lost="before")
    with pytest.raises(Exception, match="was not answered"):
        provider.launch(request())
    assert sum(c.action == "compute.instances.insert" for c in cloud.calls) == 1


def test_a_clock_is_read_from_the_answers(gcp, cloud_time, monkeypatch):
    assert abs(gcp().cloud_time() - cloud_time.at) <= 60.0
    assert found(gcp())["clock"][0].level == "ok"
    monkeypatch.setattr(GcpAccount, "time", lambda account: cloud_time.at + 5000)
    assert found(gcp())["clock"][0].level == "warning"
