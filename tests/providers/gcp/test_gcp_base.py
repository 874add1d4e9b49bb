"""A base that Terraform made in a project: read as its fleets' surroundings, used unchanged, found by its label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotfleet.config import Given, base, parse
from spotfleet.errors import NeedsPerson
from spotfleet.model import Role
from spotfleet.providers import LaunchRequest
from spotfleet.providers.gcp.base import OBJECT, found
from spotfleet.providers.gcp.spec import parsed
from tests.providers.gcp.test_gcp_launch import DISPATCHER, request

CONTRACT: dict[str, Any] = {
    "version": 1, "module": "0.1.0", "provider": "gcp", "name": "lab", "account": "my-project-123",
    "region": "us-central1", "network": "projects/my-project-123/global/networks/spotfleet-lab",
    "subnets": ["projects/my-project-123/regions/us-central1/subnetworks/spotfleet-lab"], "public_addresses": False,
    "firewall": {"hosts": ["spotfleet-lab"], "dispatcher": ["spotfleet-lab-door"]},
    "identities": {"hosts": "h@my-project-123.iam.gserviceaccount.com",
                   "dispatcher": "d@my-project-123.iam.gserviceaccount.com"},
    "checkpoints": "gs://acme/spotfleet", "queue": "", "image": "", "dispatcher_image": "", "disk_gib": 120,
    "dispatcher_disk_gib": 30, "disk_key": "projects/p/locations/us/keyRings/r/cryptoKeys/k",
    "launch_template": {"id": "x", "version": ""}, "dispatcher": None, "worker_group": None,
    "tags": {"spotfleet-base": "lab"},
}


def test_a_base_sets_what_lasts_and_the_file_what_a_run_decides():
    spec = parse("nodes: 2\nresources: {accelerators: L4:1}", Path("/work/fleet.yaml"), {},
                 given=Given(base=base.parse(json.dumps(CONTRACT), "x.json"))).spec
    gcp = parsed(spec.section)
    assert (spec.provider, spec.checkpoint.target, spec.tags) == (
        "gcp", "gs://acme/spotfleet", {"spotfleet-base": "lab"})
    assert (gcp.project, gcp.regions, gcp.public_addresses, gcp.disk_gib) == (
        "my-project-123", ("us-central1",), False, 120)
    assert (gcp.network, gcp.subnetworks) == (CONTRACT["network"], {"us-central1": CONTRACT["subnets"][0]})
    assert (gcp.network_tags, gcp.dispatcher_network_tags) == (("spotfleet-lab",), ("spotfleet-lab-door",))
    assert (gcp.service_account, gcp.dispatcher_service_account, gcp.disk_key) == (
        "h@my-project-123.iam.gserviceaccount.com", "d@my-project-123.iam.gserviceaccount.com", CONTRACT["disk_key"])


def test_machines_on_a_base_have_its_tags_and_key_and_no_rule_is_made(gcp, cloud):
    provider = gcp(network_tags=("spotfleet-lab",), dispatcher_network_tags=("spotfleet-lab-door",),
                   disk_key=CONTRACT["disk_key"])
    provider.prepare("f", {}, lambda _line: None)
    provider.allow_ssh_from_here("f", lambda _line: None)
    assert cloud.everything() == []
    provider.launch(request(tags={"spotfleet-base": "lab"}))
    provider.launch(LaunchRequest("f-d-0", "f", Role.DISPATCHER, DISPATCHER, request().boot))
    tags = {line["labels"]["spotfleet-role"]: line["tags"]["items"] for line in bodies(cloud)}
    assert tags == {"worker": ["spotfleet-f", "spotfleet-lab"],
                    "dispatcher": ["spotfleet-f", "spotfleet-f-door", "spotfleet-lab", "spotfleet-lab-door"]}
    assert {line["disks"][0]["diskEncryptionKey"]["kmsKeyName"] for line in bodies(cloud)} == {CONTRACT["disk_key"]}
    assert bodies(cloud)[0]["labels"]["spotfleet-base"] == "lab"


def bodies(cloud: Any) -> list[dict[str, Any]]:
    """Bodies of the requests that made machines."""
    return [c.params["body"] for c in cloud.calls if c.action == "compute.instances.insert"]


def test_a_base_is_found_by_the_label_of_its_bucket(gcp, cloud, monkeypatch):
    account = gcp().account
    pages = {"": {"items": [{"name": "other"}, {"name": "b0", "labels": {"spotfleet-base": "labs"}}],
                  "nextPageToken": "2"},
             "2": {"items": [{"name": "acme", "labels": {"spotfleet-base": "lab"}}]}}

    def rest(service: str, path: str) -> tuple[dict[str, Any], float]:
        assert service == "storage"
        if path == f"/storage/v1/b/acme/o/{OBJECT}?alt=media":
            return CONTRACT, 0.0
        return pages[path.partition("pageToken=")[2]], 0.0

    monkeypatch.setattr(account, "rest", rest)
    assert json.loads(found(account, "lab")) == CONTRACT
    with pytest.raises(NeedsPerson, match=f"no base la is in project {cloud.project}"):
        found(account, "la")
