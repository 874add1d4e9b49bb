"""The project of the fake of Google Cloud: callers, rights, APIs, service accounts, networks, rules, advice."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from tests.support.fakes.gcp import Lost
from tests.support.gcp.gcp_asks import (
    KIND,
    PLATFORM,
    REGION,
    ZONE,
    act,
    errors,
    insert,
    instance,
    made,
    operations,
    refused,
    waited,
)

FLAVOR = {"Metadata-Flavor": "Google"}


def call(cloud: Any, verb: str, path: str, body: Any = None, token: str = "") -> tuple[int, Any]:
    token = token or cloud.rights.token(cloud.owner)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    made = urllib.request.Request(f"{cloud.url}{path}", method=verb, headers=headers,
                                  data=json.dumps(body).encode() if body is not None else None)
    try:
        with urllib.request.urlopen(made, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


# ---- callers and rights


def test_google_auth_gets_its_tokens_from_the_key_file_that_the_fake_gives(cloud, monkeypatch):
    import google.auth
    from google.api_core.client_options import ClientOptions
    from google.auth.transport.requests import Request
    from google.cloud import compute_v1

    for name, value in cloud.environ("laptop@example.com").items():
        monkeypatch.setenv(name, value)
    credentials, project = google.auth.default(scopes=[PLATFORM])
    client = compute_v1.ZonesClient(credentials=credentials, client_options=ClientOptions(api_endpoint=cloud.url))
    assert len(list(client.list(project=project))) == 10
    assert cloud.calls[-1].principal == "laptop@example.com"
    credentials.refresh(Request())
    assert cloud.rights.caller(f"Bearer {credentials.token}")[0] == "laptop@example.com"


def test_a_stranger_and_an_expired_caller_are_refused(cloud):
    cloud.anonymous = ""
    plain = urllib.request.Request(f"{cloud.url}/compute/v1/projects/{cloud.project}/zones")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(plain, timeout=30)
    assert call(cloud, "GET", f"/compute/v1/projects/{cloud.project}/zones", token="x")[0] == 401
    cloud.expire(cloud.owner)
    assert call(cloud, "GET", f"/compute/v1/projects/{cloud.project}/zones")[0] == 401


@pytest.mark.parametrize(("permission", "resource"), [
    ("compute.instances.create", {}), ("compute.disks.create", {}), ("compute.subnetworks.use", {}),
    ("compute.subnetworks.useExternalIp", {}), ("compute.instances.setLabels", {}),
    ("compute.instances.setMetadata", {"metadata": {"items": [{"key": "a", "value": "b"}]}}),
    ("compute.instances.setTags", {"tags": {"items": ["a"]}}),
    ("compute.instances.setServiceAccount", {"service_accounts": [{"email": "default", "scopes": [PLATFORM]}]})])
def test_an_instance_needs_the_permission_for_each_of_its_parts(cloud, permission, resource):
    cloud.deny(cloud.owner, {permission})
    with refused("forbidden", f"Required '{permission}' permission"):
        insert(cloud, instance(**resource))
    cloud.deny(cloud.owner, ())
    made(cloud, instance(**resource))


def test_a_machine_needs_the_right_to_act_as_its_service_account(cloud):
    cloud.deny(cloud.owner, {"iam.serviceAccounts.actAs"})
    done = waited(cloud, insert(cloud, instance(service_accounts=[{"email": "default", "scopes": [PLATFORM]}])))
    assert errors(done) == ["SERVICE_ACCOUNT_ACCESS_DENIED"] and cloud.everything() == []


@pytest.mark.parametrize("verb", ["delete", "stop", "start", "get"])
def test_each_change_of_an_instance_needs_its_own_permission(cloud, verb):
    made(cloud)
    cloud.deny(cloud.owner, {f"compute.instances.{verb}"})
    with refused("forbidden", f"compute.instances.{verb}"):
        getattr(cloud.client("InstancesClient"), verb)(project=cloud.project, zone=ZONE, instance="f-1")


def test_a_token_of_a_machine_reaches_as_far_as_its_scopes(cloud):
    read = "https://www.googleapis.com/auth/compute.readonly"
    made(cloud, instance(service_accounts=[{"email": "default", "scopes": [read]}]))
    body = cloud.metadata("f-1", "/computeMetadata/v1/instance/service-accounts/default/token", headers=FLAVOR)[2]
    token, zone = json.loads(body)["access_token"], f"/compute/v1/projects/{cloud.project}/zones/{ZONE}"
    assert call(cloud, "GET", f"{zone}/instances/f-1", token=token)[0] == 200
    status, error = call(cloud, "DELETE", f"{zone}/instances/f-1", token=token)
    assert status == 403 and "insufficient authentication scopes" in error["message"]


def test_an_api_that_is_off_says_where_it_is_enabled(cloud):
    cloud.services.discard("compute.googleapis.com")
    with refused("accessNotConfigured", "has not been used in project acme-training before or it is disabled"):
        cloud.client("ZonesClient").list(project=cloud.project)
    services = f"/v1/projects/{cloud.project}/services"
    name = f"projects/{cloud.project}/services/compute.googleapis.com"
    assert call(cloud, "GET", f"{services}:batchGet?names={name}")[1]["services"][0]["state"] == "DISABLED"
    off = call(cloud, "GET", f"{services}?filter=state:DISABLED")[1]["services"]
    assert [s["config"]["name"] for s in off] == ["compute.googleapis.com"]
    assert call(cloud, "POST", f"{services}:batchEnable", {"serviceIds": ["compute.googleapis.com"]})[1]["done"]
    assert len(list(cloud.client("ZonesClient").list(project=cloud.project))) == 10


def test_a_project_that_is_not_the_caller_s_is_not_found(cloud):
    with refused("notFound", "projects/somebody-else"):
        cloud.client("ZonesClient").list(project="somebody-else")
    assert call(cloud, "GET", "/v1/projects/somebody-else")[0] == 403
    assert call(cloud, "GET", f"/v1/projects/{cloud.project}")[1]["projectNumber"] == cloud.NUMBER


def test_permissions_are_tested_by_name(cloud):
    cloud.deny(cloud.owner, {"compute.firewalls.*"})
    asked = {"permissions": ["compute.instances.create", "compute.firewalls.create"]}
    path = f"/v1/projects/{cloud.project}:testIamPermissions"
    assert call(cloud, "POST", path, asked)[1] == {"permissions": ["compute.instances.create"]}
    assert call(cloud, "POST", path, {"permissions": ["compute.*"]})[0] == 400


def test_a_service_account_is_made_bound_and_deleted(cloud, pass_s):
    cloud.account_lag_s = 10.0
    accounts, policy = f"/v1/projects/{cloud.project}/serviceAccounts", f"/v1/projects/{cloud.project}"
    status, made_ = call(cloud, "POST", accounts, {"accountId": "spotfleet-d", "serviceAccount": {"displayName": "d"}})
    assert (status, made_["email"]) == (200, f"spotfleet-d@{cloud.project}.iam.gserviceaccount.com")
    assert call(cloud, "POST", accounts, {"accountId": "spotfleet-d"})[0] == 409
    assert call(cloud, "POST", accounts, {"accountId": "short"})[0] == 400
    bindings = [{"role": "roles/compute.viewer", "members": [f"serviceAccount:{made_['email']}"]}]
    current = call(cloud, "POST", f"{policy}:getIamPolicy", {})[1]
    wanted = {"policy": {"bindings": bindings, "etag": current["etag"]}}
    status, error = call(cloud, "POST", f"{policy}:setIamPolicy", wanted)  # a new account is not known at once
    assert status == 400 and "does not exist" in error["message"]
    pass_s(10)
    assert call(cloud, "POST", f"{policy}:setIamPolicy", wanted)[0] == 200
    assert call(cloud, "POST", f"{policy}:setIamPolicy", wanted)[0] == 409  # by the etag of what was read
    assert sorted(t.kind for t in cloud.everything()) == ["binding", "serviceAccount"]
    assert call(cloud, "DELETE", made_["name"].join(("/v1/", "")))[0] == 200
    assert call(cloud, "GET", made_["name"].join(("/v1/", "")))[0] == 404


def test_each_answer_has_the_time_of_the_cloud(cloud, pass_s):
    pass_s(1000)
    with urllib.request.urlopen(f"{cloud.url}/compute/v1/projects/{cloud.project}/zones", timeout=30) as answer:
        (date,) = answer.headers.get_all("Date")
    assert parsedate_to_datetime(date).timestamp() == cloud.now()


# ---- faults


def test_a_fault_is_answered_as_often_as_it_was_arranged(cloud):
    cloud.fault("compute.instances.insert", code="rateLimitExceeded", times=2)
    for _ in range(2):
        with refused("rateLimitExceeded"):
            insert(cloud)
    cloud.fault("compute.instances.insert", code="429")
    with refused("rateLimitExceeded"):
        insert(cloud)
    assert cloud.calls[-1].status == 429
    made(cloud)


@pytest.mark.parametrize(("when", "there"), [("before", 0), ("after", 1)])
def test_an_answer_is_lost_before_or_after_the_request_took_effect(cloud, when, there):
    from requests.exceptions import ConnectionError as NoConnection

    cloud.fault("compute.instances.insert", lost=when)
    with pytest.raises(NoConnection):
        insert(cloud)
    assert len(cloud.instances()) == there
    assert cloud.calls[-1].code == "lost"


def test_a_hook_may_end_the_connection(cloud):
    from requests.exceptions import ConnectionError as NoConnection

    def lose(call):
        raise Lost

    cloud.before = lose
    with pytest.raises(NoConnection):
        cloud.client("ZonesClient").list(project=cloud.project)


def test_requests_per_minute_are_limited(cloud, pass_s):
    cloud.throttles = True
    with refused("rateLimitExceeded", "Queries per minute"):
        for n in range(200):
            insert(cloud, instance(f"f-{n}", kind="e2-small", scheduling={}))
    pass_s(60)
    made(cloud, instance("g-1", kind="e2-small", scheduling={}))


def test_an_aggregated_listing_leaves_out_and_names_a_zone_that_cannot_be_reached(cloud):
    made(cloud)
    cloud.unreachable.add(f"zones/{ZONE}")
    status, found = call(cloud, "GET", f"/compute/v1/projects/{cloud.project}/aggregated/instances")
    assert status == 200 and [u.rpartition("/")[2] for u in found["unreachables"]] == [ZONE]
    assert not [i for scope in found["items"].values() for i in scope.get("instances", ())]


# ---- networks, rules, quotas, types


def test_a_firewall_rule_is_made_changed_and_deleted(cloud):
    client, ask = cloud.client("FirewallsClient"), {"project": cloud.project}
    rule = {"name": "f-ssh", "network": "global/networks/default", "source_ranges": ["192.0.2.1/32"],
            "target_tags": ["f"], "allowed": [{"I_p_protocol": "tcp", "ports": ["22"]}]}
    client.insert(request=ask | {"firewall_resource": rule})
    with refused("alreadyExists"):
        client.insert(request=ask | {"firewall_resource": rule})
    client.patch(request=ask | {"firewall": "f-ssh", "firewall_resource": rule | {"source_ranges": ["192.0.2.2/32"]}})
    found = client.get(request=ask | {"firewall": "f-ssh"})
    assert (list(found.source_ranges), found.priority, found.direction) == (["192.0.2.2/32"], 1000, "INGRESS")
    client.delete(request=ask | {"firewall": "f-ssh"})
    assert cloud.everything() == []


@pytest.mark.parametrize(("change", "words"), [
    ({"source_ranges": ["192.0.2.1/24"]}, "valid CIDR"), ({"allowed": []}, "exactly one of allowed and denied"),
    ({"allowed": [{"I_p_protocol": "tpc"}]}, "Invalid protocol"),
    ({"allowed": [{"I_p_protocol": "icmp", "ports": ["22"]}]}, "Ports may only be specified"),
    ({"allowed": [{"I_p_protocol": "tcp", "ports": ["70000"]}]}, "Invalid port"),
    ({"target_tags": ["Web"]}, "Must be a match of regex"), ({"priority": 70000}, "between 0 and 65535"),
    ({"name": "SSH"}, "Must be a match of regex")])
def test_a_firewall_rule_that_is_wrong_is_refused(cloud, change, words):
    rule = {"name": "f-ssh", "source_ranges": ["192.0.2.1/32"], "allowed": [{"I_p_protocol": "tcp", "ports": ["22"]}]}
    with refused("invalid", words):
        cloud.client("FirewallsClient").insert(project=cloud.project, firewall_resource=rule | change)


def test_a_rule_needs_the_right_to_change_its_network_s_policy(cloud):
    cloud.deny(cloud.owner, {"compute.networks.updatePolicy"})
    with refused("forbidden", "compute.networks.updatePolicy"):
        cloud.client("FirewallsClient").delete(project=cloud.project, firewall="default-allow-ssh")


def test_a_network_or_a_disk_in_use_cannot_be_deleted(cloud):
    made(cloud)
    with refused("resourceInUseByAnotherResource", "already being used by"):
        cloud.client("NetworksClient").delete(project=cloud.project, network="default")
    with refused("resourceInUseByAnotherResource", "instances/f-1"):
        cloud.client("DisksClient").delete(project=cloud.project, zone=ZONE, disk="f-1")


def test_quotas_are_shown_with_their_use_and_those_of_the_newest_gpus_are_not(cloud):
    cloud.set_quota(REGION, "PREEMPTIBLE_NVIDIA_L4_GPUS", 8)
    made(cloud)
    found = {q.metric: (q.limit, q.usage) for q in cloud.client("RegionsClient").get(
        project=cloud.project, region=REGION).quotas}
    assert found["PREEMPTIBLE_NVIDIA_L4_GPUS"] == (8.0, 1.0) and found["PREEMPTIBLE_CPUS"][1] == 4.0
    assert not [m for m in found if "H100" in m or "B200" in m]
    everywhere = {q.metric: q.usage for q in cloud.client("ProjectsClient").get(project=cloud.project).quotas}
    assert everywhere["GPUS_ALL_REGIONS"] == 1.0
    act(cloud, "stop")
    everywhere = {q.metric: q.usage for q in cloud.client("ProjectsClient").get(project=cloud.project).quotas}
    assert everywhere["GPUS_ALL_REGIONS"] == 0.0  # a stopped VM uses none


def test_machine_types_name_their_gpus(cloud):
    client = cloud.client("MachineTypesClient")
    found = client.get(project=cloud.project, zone=ZONE, machine_type="a3-highgpu-8g")
    (gpus,) = found.accelerators
    assert (found.guest_cpus, gpus.guest_accelerator_type, gpus.guest_accelerator_count) == (208, "nvidia-h100-80gb", 8)
    assert found.bundled_local_ssds.partition_count == 16
    zones = [z for z, scope in client.aggregated_list(project=cloud.project)
             if any(t.name == KIND for t in scope.machine_types)]
    assert f"zones/{ZONE}" in zones and "zones/us-central1-f" not in zones


def test_advice_knows_how_scarce_capacity_is_and_what_it_has_cost(cloud, pass_s):
    cloud.set_price(ZONE, KIND, 0.25)
    pass_s(3600)
    cloud.set_price(ZONE, KIND, 0.30)
    asked = {"instanceProperties": {"machineType": KIND}, "types": ["PRICE", "PREEMPTION"],
             "locationPolicy": {"location": f"zones/{ZONE}"}}
    advice = f"/compute/v1/projects/{cloud.project}/regions/{REGION}/advice"
    status, found = call(cloud, "POST", f"{advice}/capacityHistory", asked)
    prices = [int(p["listPrice"]["units"]) + p["listPrice"]["nanos"] / 1e9 for p in found["priceHistory"]]
    assert status == 200 and prices[-2:] == [0.25, 0.30] and found["preemptionHistory"][0]["preemptionRate"] == 0.05
    for free, score in ((None, 0.9), (2, 0.4), (1, 0.1)):
        for zone in ("us-central1-a", "us-central1-b", "us-central1-c"):
            cloud.set_room(zone, KIND, free)
        status, found = call(cloud, "POST", f"{advice}/capacity", {
            "size": 2, "instanceProperties": {"scheduling": {"provisioningModel": "SPOT"}},
            "instanceFlexibilityPolicy": {"instanceSelections": {"a": {"machineTypes": [KIND]}}}})
        assert (status, found["recommendations"][0]["scores"]["obtainability"]) == (200, score)


def test_an_image_family_is_its_newest_image(cloud):
    cloud.add_image("mine-1", "mine")
    cloud.add_image("mine-2", "mine", size_gb=30)
    found = cloud.client("ImagesClient").get_from_family(project=cloud.project, family="mine")
    assert (found.name, found.disk_size_gb) == ("mine-2", 30)


def test_an_operation_of_another_scope_is_not_found(cloud):
    accepted = insert(cloud)
    with refused("notFound"):
        cloud.client("GlobalOperationsClient").get(project=cloud.project, operation=accepted.name)
    act(cloud, "delete")
    assert sorted(operations(cloud)) == [("delete", cloud.owner), ("insert", cloud.owner)]  # they outlive it
