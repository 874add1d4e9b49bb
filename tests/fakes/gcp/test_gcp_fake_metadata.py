"""The metadata server of the fake of Google Cloud, as docs "About VM metadata" and "Query VM metadata" have it."""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.support.fakes.gcp import GcpCloud
from tests.support.gcp.gcp_asks import PLATFORM, instance, made

FLAVOR = {"Metadata-Flavor": "Google"}
ROOT = "/computeMetadata/v1/"
METADATA = {"items": [{"key": "user-data", "value": "#cloud-config"}, {"key": "spotfleet-host", "value": "f-1"}]}


def ask(cloud, target, headers=FLAVOR, **more):
    return cloud.metadata("f-1", ROOT + target, headers=headers, **more)


@pytest.fixture
def vm(cloud):
    return made(cloud, instance(metadata=METADATA, service_accounts=[{"email": "default", "scopes": [PLATFORM]}]))


def test_the_flavor_is_in_each_request_and_each_answer(cloud, vm):
    assert ask(cloud, "instance/name", {})[0] == 403
    assert ask(cloud, "instance/name", {"metadata-flavor": "google"})[0] == 403
    assert ask(cloud, "instance/name", FLAVOR | {"X-Forwarded-For": "10.0.0.1"})[0] == 403
    status, headers, body = ask(cloud, "instance/name")
    assert (status, headers["Metadata-Flavor"], body) == (200, "Google", b"f-1") and headers["ETag"]


def test_what_a_machine_reads_of_itself(cloud, vm):
    assert ask(cloud, "instance/zone")[2] == b"projects/123456789012/zones/us-central1-a"
    assert ask(cloud, "instance/id")[2].decode() == str(vm.id)
    assert ask(cloud, "instance/attributes/user-data")[2] == b"#cloud-config"
    assert ask(cloud, "instance/attributes/gone")[0] == 404
    assert ask(cloud, "instance/network-interfaces/0/ip")[2].decode() == vm.network_interfaces[0].network_i_p
    assert ask(cloud, "instance/scheduling/preemptible")[2] == b"TRUE"
    assert ask(cloud, "project/project-id")[2].decode() == cloud.project
    assert ask(cloud, "instance/attributes/")[2] == b"user-data\nspotfleet-host\n"


def test_recursive_answers_with_a_directory_as_json(cloud, vm):
    status, headers, body = ask(cloud, "instance/?recursive=true")
    found = json.loads(body)
    assert status == 200 and headers["Content-Type"] == "application/json"
    assert found["attributes"] == {"user-data": "#cloud-config", "spotfleet-host": "f-1"}
    assert found["networkInterfaces"][0]["ip"] == vm.network_interfaces[0].network_i_p
    assert found["maintenanceEvent"] == "NONE"
    assert json.loads(ask(cloud, "instance/attributes/?recursive=True")[2]) == found["attributes"]


def test_a_token_is_that_of_the_service_account(cloud, vm):
    token = json.loads(ask(cloud, "instance/service-accounts/default/token")[2])["access_token"]
    assert cloud.rights.caller(f"Bearer {token}") == (cloud.default_account, (PLATFORM,))


def test_a_machine_writes_guest_attributes_where_they_are_enabled(cloud, vm):
    assert ask(cloud, "instance/guest-attributes/a/b", method="PUT", body=b"x")[0] == 403
    cloud.machine("f-1").body["metadata"]["items"].append({"key": "enable-guest-attributes", "value": "TRUE"})
    assert ask(cloud, "instance/guest-attributes/a/b", method="PUT", body=b"x")[0] == 200
    assert ask(cloud, "instance/guest-attributes/a/b")[2] == b"x"


def test_an_old_etag_is_answered_at_once_and_the_newest_waits(cloud, vm):
    etag = ask(cloud, "instance/preempted")[1]["ETag"]
    target = f"instance/preempted?wait_for_change=true&last_etag={etag}&timeout_sec=1"
    cloud.preempt("f-1", notice_s=60.0)
    status, headers, body = ask(cloud, target)
    assert (status, body) == (200, b"TRUE") and headers["ETag"] != etag


def test_a_machine_that_does_not_run_is_not_answered(cloud, vm):
    cloud.metadata_down("f-1")
    assert ask(cloud, "instance/name")[0] == 0
    cloud.metadata_down("f-1", False)
    cloud.preempt("f-1", notice_s=None)
    assert ask(cloud, "instance/name")[0] == 0


def test_a_request_that_waits_holds_up_no_change():
    """Its condition wants the cloud's lock, and a change that holds the lock wakes those that wait."""
    cloud, asked, answers = GcpCloud(), threading.Event(), []

    def changed() -> bool:
        asked.set()
        with cloud.lock:
            return True

    def wait() -> None:
        cloud.wait_until(changed, 60.0)
        answers.append("changed")

    with cloud.lock:
        waits = threading.Thread(target=wait, daemon=True)
        waits.start()
        assert asked.wait(30)
        wakes = threading.Thread(target=lambda: cloud.noise_of(None), daemon=True)
        wakes.start()
        wakes.join(10)
        assert not wakes.is_alive()
    waits.join(30)
    assert answers == ["changed"]


def test_a_long_poll_ends_with_the_change_or_its_timeout():
    """In real time: a request that waits sees the notice that comes meanwhile."""
    with GcpCloud() as cloud:
        made(cloud)
        etag = ask(cloud, "instance/preempted")[1]["ETag"]
        answers: list[bytes] = []
        waits = threading.Thread(target=lambda: answers.append(
            ask(cloud, f"instance/preempted?wait_for_change=true&last_etag={etag}&timeout_sec=60")[2]))
        waits.start()
        time.sleep(0.1)
        assert answers == []
        cloud.preempt("f-1", notice_s=60.0)
        waits.join(30)
        assert answers == [b"TRUE"]
        newest = ask(cloud, "instance/preempted")[1]["ETag"]
        again = ask(cloud, f"instance/preempted?wait_for_change=true&last_etag={newest}&timeout_sec=0.1")
        assert again[1]["ETag"] == newest and again[2] == b"TRUE"
