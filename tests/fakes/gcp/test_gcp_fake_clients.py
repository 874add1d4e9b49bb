"""A second client of the fake of Google Cloud: google-api-python-client, which is made of the discovery document alone.

What the fake makes up to please google-cloud-compute would not please this one, which has other code for everything:
requests, parameters, pages, errors.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gcp.gcp_asks import ZONE

BODY = {
    "name": "f-1", "machineType": f"zones/{ZONE}/machineTypes/g2-standard-4", "labels": {"spotfleet": "f"},
    "disks": [{"boot": True, "autoDelete": True, "initializeParams": {
        "sourceImage": "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64", "diskSizeGb": "50",
        "diskType": f"zones/{ZONE}/diskTypes/pd-balanced"}}],
    "networkInterfaces": [{"network": "global/networks/default", "accessConfigs": [{"type": "ONE_TO_ONE_NAT"}]}],
    "scheduling": {"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE",
                   "preemptionNoticeDuration": {"seconds": "120"}}}


@pytest.fixture
def compute(cloud) -> Any:
    from google.api_core.client_options import ClientOptions
    from google.oauth2.credentials import Credentials
    from googleapiclient.discovery import build

    return build("compute", "v1", credentials=Credentials(cloud.rights.token(cloud.owner)), static_discovery=True,
                 client_options=ClientOptions(api_endpoint=f"{cloud.url}/compute/v1/"))


def test_a_client_made_of_the_document_runs_an_instance_from_its_insertion_to_its_end(cloud, compute):
    at = {"project": cloud.project, "zone": ZONE}
    operation = compute.instances().insert(**at, body=BODY).execute()
    done = compute.zoneOperations().wait(**at, operation=operation["name"]).execute()
    assert (done["status"], "error" in done) == ("DONE", False)
    found = compute.instances().get(**at, instance="f-1").execute()
    assert (found["status"], found["scheduling"]["preemptible"]) == ("RUNNING", True)
    listed = compute.instances().aggregatedList(project=cloud.project, filter="labels.spotfleet=f").execute()
    assert [i["name"] for scope in listed["items"].values() for i in scope.get("instances", ())] == ["f-1"]
    cloud.preempt("f-1", notice_s=None)
    operations = compute.zoneOperations().list(
        **at, filter='operationType="compute.instances.preempted"').execute()["items"]
    assert [o["targetId"] for o in operations] == [found["id"]]
    assert cloud.everything() == []


def test_its_pages_follow_each_other(cloud, compute):
    seen, request = [], compute.zones().list(project=cloud.project, maxResults=4)
    while request is not None:
        answer = request.execute()
        seen.append(len(answer["items"]))
        request = compute.zones().list_next(request, answer)
    assert seen == [4, 4, 2]


def test_its_errors_have_the_reason(cloud, compute):
    from googleapiclient.errors import HttpError

    with pytest.raises(HttpError) as caught:
        compute.instances().insert(project=cloud.project, zone=ZONE, body=BODY | {"labels": {"Team": "x"}}).execute()
    assert caught.value.error_details[0]["reason"] == "invalid" and caught.value.status_code == 400
