"""`up` and `check` of a fleet on Google Cloud from the command line: what is planned, and what is refused at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from spotfleet.api.access import ssh
from spotfleet.api.lifecycle.first_contact import DispatcherStartup
from spotfleet.providers.gcp import session
from spotfleet.ssh.tunnel import NotConnected
from tests.support.cli.cli_user import User, user

__all__ = ["user"]

FILE: dict[str, Any] = {
    "name": "l4", "provider": "gcp", "nodes": {"min": 1, "target": 2}, "workdir": ".",
    "resources": {"accelerators": "L4:1"}, "tags": {"team": "vision"},
    "gcp": {"regions": ["us-central1", "us-east4"], "ssh_from": ["203.0.113.7"]},
}
LOGIN = "gcloud auth application-default login"


@dataclass
class Laptop:
    user: User
    cloud: Any

    def file(self, **changed: Any) -> None:
        self.user.write("l4.yaml", yaml.safe_dump(FILE | changed))


@pytest.fixture
def laptop(user: User, cloud: Any, monkeypatch: pytest.MonkeyPatch) -> Laptop:
    """A user with a project, whose machines never let anybody in."""
    def closed(self: DispatcherStartup, *_: object) -> bool:
        self.why = "waiting for its sshd"
        return False

    def nobody(*_: object) -> Any:
        def dial(_timeout_s: float) -> Any:
            raise NotConnected("its sshd does not answer")

        return dial

    session.reset()
    monkeypatch.setattr(DispatcherStartup, "advance", closed)
    monkeypatch.setattr(ssh, "dialer", nobody)
    made = Laptop(user, cloud)
    made.file()
    return made


def test_the_plan_shows_regions_pools_and_what_is_not_in_the_price_and_makes_nothing(laptop):
    said = laptop.user.ok("up l4.yaml --dryrun").out
    assert said.startswith("fleet l4 on gcp in us-") and "2 hosts" in said and "g2-standard-4" in said
    assert "not in these prices: 230 GiB of disks, 3 public addresses" in said
    rows = [line.split() for line in said.splitlines()]
    reasons = [" ".join(row) for row in rows if row[:1] in (["us-central1"], ["us-east4"])]
    assert len(reasons) == 2 and "chosen; Google Cloud scores its capacity" in reasons[0] and "dearer" in reasons[1]
    assert laptop.cloud.everything() == []


def test_the_dispatcher_is_made_with_its_door_and_down_removes_all(laptop):
    laptop.user.types("up l4.yaml -y --timeout 0.1s")
    [machine] = laptop.cloud.instances()
    assert machine.name.startswith("l4-") and "-d-" in machine.name and machine.labels["team"] == "vision"
    assert {t.kind for t in laptop.cloud.everything()} >= {"instance", "firewall"}
    laptop.user.types("down l4 -y --discard")
    assert laptop.cloud.everything() == []


def no_credentials(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")


def no_project(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT")
    key = laptop.cloud.key_file(laptop.cloud.owner)
    key.write_text(json.dumps({k: v for k, v in json.loads(key.read_text()).items() if k != "project_id"}))


def api_off(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop.cloud.services.discard("compute.googleapis.com")


def no_quota(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop.cloud.set_quota("", "GPUS_ALL_REGIONS", 0)


def no_such_zone(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop.file(resources={"accelerators": "L4:1", "infra": "gcp/us-central1/us-central1-z"})


def no_such_accelerator(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop.file(resources={"instance_type": "g2-standard-4", "accelerators": "H100:1"})


def no_such_type(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop.file(resources={"instance_type": "g2-standrad-4"})


@pytest.mark.parametrize(("wrong", "what", "fix"), [
    (no_credentials, "no credentials", LOGIN), (no_project, "no project is named", "gcp: {project: ID}"),
    (api_off, "the API is not enabled", "gcloud services enable compute.googleapis.com"),
    (no_quota, "GPUS_ALL_REGIONS", "console.cloud.google.com/iam-admin/quotas"),
    (no_such_zone, "us-central1-z", "gcloud compute zones list"),
    (no_such_accelerator, "H100", "`resources`"), (no_such_type, "g2-standard-4", "`resources`")])
def test_bad_input_is_one_clear_error_with_its_fix_and_nothing_is_left(laptop, monkeypatch, wrong, what, fix):
    wrong(laptop, monkeypatch)
    said = laptop.user.types("check gcp l4.yaml")
    assert said.code == 3 and said.out.count("BLOCKER") == 1, said
    assert what in said.out and fix in said.out, said
    if wrong is not no_quota:  # which only the hosts need
        up = laptop.user.types("up l4.yaml -y --timeout 0.1s")
        assert up.code != 0 and what in up.err and "Traceback" not in up.err, up
        assert laptop.cloud.everything() == []
