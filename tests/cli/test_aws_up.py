"""`up`, `attach` and `down` of a fleet on AWS against the fake cloud, whose machines do not run: what is planned,
chosen, told to the dispatcher's machine and refused. Machines that run: `tests/e2e/clouds/test_aws_story.py`."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotfleet.api.access import ssh
from spotfleet.api.lifecycle import attach
from spotfleet.api.lifecycle.first_contact import DispatcherStartup
from spotfleet.cli.commands import write
from spotfleet.providers.aws import session
from spotfleet.providers.aws.account import ssh_ingress
from spotfleet.providers.aws.plugin import AWS
from spotfleet.ssh.tunnel import NotConnected
from tests.support.cli.cli_user import Said, User

FILE: dict[str, Any] = {
    "name": "g5", "provider": "aws", "nodes": {"min": 1, "target": 2}, "workdir": ".",
    "resources": {"accelerators": "A10G:1"}, "tags": {"team": "vision"},
    "aws": {"regions": ["us-east-1", "us-west-2"], "ssh_from": ["203.0.113.7"]},
}
UP = "up g5.yaml -y --timeout 0.1s"


@pytest.fixture(scope="module")
def shared_cloud() -> Iterator[Any]:
    from tests.support.fakes.aws import AwsCloud

    with AwsCloud() as cloud:
        yield cloud


@dataclass
class Laptop:
    user: User
    cloud: Any
    house: Path

    def file(self, **changed: Any) -> None:
        self.user.write("g5.yaml", yaml.safe_dump(FILE | changed))

    def ok(self, line: str) -> Said:
        return self.user.ok(line)

    def fails(self, line: str, code: int = 1) -> Said:
        return self.user.fails(line, code=code)

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.house / "fleets" / "g5" / "fleet.json").read_text())

    def told(self, name: str) -> str:
        """A file of the dispatcher's machine."""
        (view,) = self.cloud.instances()
        files = yaml.safe_load(gzip.decompress(view.user_data))["write_files"]
        return next(f["content"] for f in files if f["path"].endswith(f"/{name}"))


@pytest.fixture
def laptop(user: User, shared_cloud: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Laptop]:
    """One with an account, whose machines never let anybody in."""
    def closed(self: DispatcherStartup, *_: object) -> bool:
        self.why = "waiting for its sshd"
        return False

    def nobody(*_: object) -> Any:
        def dial(_timeout_s: float) -> Any:
            raise NotConnected("its sshd does not answer")

        return dial

    shared_cloud.reset()
    session.reset()
    for name, value in shared_cloud.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(user.home.parent))
    monkeypatch.setattr(DispatcherStartup, "advance", closed)
    monkeypatch.setattr(ssh, "dialer", nobody)
    monkeypatch.setattr(ssh_ingress, "own_address", lambda **_: "192.0.2.44/32")
    made = Laptop(user, shared_cloud, user.home)
    made.file()
    yield made
    assert not shared_cloud.findings, shared_cloud.findings[:10]


def test_the_plan_shows_regions_pools_savings_and_what_is_not_in_the_price_and_makes_nothing(laptop: Laptop):
    laptop.cloud.set_price("us-west-2b", "g5.xlarge", 0.2)
    said = laptop.ok("up g5.yaml --dryrun").out
    assert said.startswith("fleet g5 on aws in us-west-2: to be made; 1..2 hosts, target 2\n")
    rows = [line.split() for line in said.splitlines()]
    assert [row[-1] for row in rows if row[:1] in (["us-west-2"], ["us-east-1"])] == ["chosen", "dearer"]
    assert any(row[:4] == ["dispatcher", "t3a.small", "on-demand", "us-west-2a"] for row in rows)
    assert any(row[:7] == ["2", "hosts", "g5.xlarge", "spot", "us-west-2b", "1", "$0.2000"] for row in rows)
    assert "not in these prices: 230 GiB of disks, 3 public addresses, traffic" in said and "% less)" in said
    assert laptop.cloud.everything() == [] and not (laptop.house / "fleets").exists()
    writing = {a for a in laptop.cloud.actions() if not a.partition(":")[2].startswith(("Describe", "Get", "List"))}
    assert writing == set()


def test_a_new_fleet_settles_on_the_cheapest_region_and_stays_there_whatever_prices_do(laptop: Laptop):
    laptop.cloud.set_price("us-west-2b", "g5.xlarge", 0.2)
    laptop.fails(UP)
    (first,) = laptop.cloud.instances()
    laptop.cloud.set_price("us-east-1b", "g5.xlarge", 0.01)
    said = laptop.fails(UP)
    assert "fleet g5 on aws in us-west-2: started before, to be continued" in said.err
    assert [(v.id, v.region) for v in laptop.cloud.instances()] == [(first.id, "us-west-2")]
    assert laptop.record["provider_config"]["section"]["regions"] == ["us-west-2"]
    assert AWS.region(laptop.record["provider_config"]) == "us-west-2"
    assert laptop.record["spec"]["section"]["regions"] == ["us-east-1", "us-west-2"]  # as the file says
    assert {t.region for t in laptop.cloud.everything() if t.region} == {"us-west-2"}


def test_each_life_of_a_fleet_has_a_name_of_its_own_in_the_cloud(laptop: Laptop):
    """What EC2 remembers of an earlier one, and a fleet of that name in another region, are none of it."""
    lives = []
    for _ in range(2):
        laptop.fails(UP)
        lives.append(laptop.record["cloud_name"])
        assert re.fullmatch("g5-[0-9a-f]{4}", lives[-1])
        assert {t.tags["spotfleet"] for t in laptop.cloud.everything() if t.tags} == {lives[-1]}
        laptop.fails(UP)  # goes on with it
        assert laptop.record["cloud_name"] == lives[-1]
        laptop.ok("down g5 -y")
    assert lives[0] != lives[1]


def test_a_living_fleet_of_that_name_of_another_laptop_is_told_of_and_left_alone(laptop: Laptop, monkeypatch):
    laptop.fails(UP)
    (theirs,) = laptop.cloud.instances()
    monkeypatch.setenv("SPOTFLEET_HOME", str(laptop.house.parent / "other"))
    said = laptop.fails(UP)
    assert f"still running, not of this fleet: {theirs.tags['spotfleet-host']}\n" in said.err
    laptop.ok("down g5 -y")
    assert [v.id for v in laptop.cloud.instances()] == [theirs.id]


def test_the_dispatchers_policy_for_a_file_is_that_of_every_life_of_its_fleet(laptop: Laptop):
    """Who names profiles makes them before the fleet is up."""
    of_file = json.loads(laptop.ok("check --policy dispatcher g5.yaml").out)
    tags = {(how, value) for statement in of_file["Statement"] for how, keys in statement.get("Condition", {}).items()
            for key, value in keys.items() if key.endswith("Tag/spotfleet")}
    assert tags == {("StringLike", "g5-????")}


def test_the_region_that_was_shown_is_the_region_that_is_taken(laptop: Laptop, monkeypatch: pytest.MonkeyPatch):
    laptop.cloud.set_price("us-west-2b", "g5.xlarge", 0.2)

    def slowly(*_: object) -> bool:
        laptop.cloud.set_price("us-east-1b", "g5.xlarge", 0.01)
        session.reset()  # minutes have passed
        return True

    monkeypatch.setattr(write, "confirm", slowly)
    laptop.fails("up g5.yaml --timeout 0.1s")
    assert {v.region for v in laptop.cloud.instances()} == {"us-west-2"}


def test_the_dispatcher_is_told_its_side_and_keys_and_nothing_of_the_laptop(laptop: Laptop, monkeypatch):
    keys = {name.lower(): value for name, value in laptop.cloud.environ().items() if "KEY" in name}
    (laptop.user.work / "aws").write_text("\n".join(["[profile mine]", *(f"{k} = {v}" for k, v in keys.items())]))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(laptop.user.work / "aws"))
    laptop.file(aws=FILE["aws"] | {"profile": "mine"}, environment={"packages": ["torch==2.13.0"]}, placement="zone",
                checkpoint={"target": "s3://bucket/runs"})
    laptop.fails(UP)
    boot = json.loads(laptop.told("boot.json"))
    keys = json.loads((laptop.house / "fleets" / "g5" / "keys.json").read_text())
    told = boot["provider_config"]
    assert (told["side"], told["placement"], told["target"]) == ("dispatcher", "zone", "s3://bucket/runs")
    assert (told["public_key"], told["private_key"], told["secret"]) == (
        keys["ssh_public"], keys["ssh_private"], keys["fleet_secret"])
    assert (boot["admin_from_here"], boot["archive"], told["endpoint_url"]) == (True, "", laptop.cloud.url)
    assert "mine" not in json.dumps(boot) and told["environment"]["packages"] == ["torch==2.13.0"]
    assert laptop.told("packages.txt") == "" and "EXTRAS='[aws]'" in laptop.told("settings.sh")
    stored = laptop.record["provider_config"]
    assert stored["section"]["profile"] == "mine" and not {"secret", "private_key"} & stored.keys()


def test_what_only_the_laptop_uses_may_change_while_the_fleet_is_up_and_its_machines_may_not(laptop: Laptop):
    laptop.fails(UP)
    laptop.file(aws=FILE["aws"] | {"ssh_from": ["198.51.100.0/24"]})
    said = laptop.fails(UP)
    assert "SSH to the dispatcher is let in from 198.51.100.0/24" in said.err
    assert "SSH to the dispatcher is no longer let in from 203.0.113.7/32" in said.err
    laptop.file(aws=FILE["aws"] | {"disk": 300})
    assert "and aws cannot change while it is" in laptop.fails("up g5.yaml -y", code=2).err


def test_what_the_account_does_not_let_us_do_is_said_with_exit_code_3(laptop: Laptop, monkeypatch):
    laptop.cloud.deny("owner", {"ec2:CreateSecurityGroup"})
    assert "CreateSecurityGroup" in laptop.fails(UP, code=3).err
    assert laptop.cloud.instances() == []
    laptop.cloud.deny("owner", set())
    laptop.cloud.expire("owner")
    assert "expired" in laptop.fails("up g5.yaml --dryrun", code=3).err
    laptop.cloud.expire("owner", False)


def test_without_boto3_the_extra_to_install_is_named(laptop: Laptop, monkeypatch: pytest.MonkeyPatch):
    for name in ("boto3", "botocore.config"):
        monkeypatch.setitem(sys.modules, name, None)
    laptop.file(name="other", tags={"another": "account"})
    said = laptop.fails(UP, code=3)
    assert "provider aws needs boto3" in said.err and "hint: pip install '.[aws]'" in said.err


def test_a_fleet_file_that_no_user_data_can_hold_is_refused_before_anything_is_made(laptop: Laptop):
    import random

    laptop.file(setup="".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=20_000)))
    said = laptop.fails(UP, code=2)
    assert "bytes packed, and a cloud takes 16384" in said.err
    assert laptop.cloud.everything() == []


def test_another_laptop_attaches_from_the_account_alone(laptop: Laptop, monkeypatch: pytest.MonkeyPatch):
    laptop.fails(UP)
    mine = json.loads((laptop.house / "fleets" / "g5" / "keys.json").read_text())
    other = laptop.house.parent / "other"
    monkeypatch.setenv("SPOTFLEET_HOME", str(other))
    monkeypatch.setattr(attach, "PATIENCE_S", 0.1)
    assert "note: no answer from the dispatcher" in laptop.ok("attach g5 --provider aws").err
    keys = json.loads((other / "fleets" / "g5" / "keys.json").read_text())
    config = json.loads((other / "fleets" / "g5" / "fleet.json").read_text())["provider_config"]
    assert (keys["ssh_private"], keys["fleet_secret"]) == (mine["ssh_private"], mine["fleet_secret"])
    assert (config["side"], config["section"]["regions"]) == ("laptop", ["us-east-1"])
    assert not {"secret", "private_key", "public_key"} & config.keys()


def test_down_of_a_fleet_that_never_came_up_leaves_nothing(laptop: Laptop):
    laptop.fails(UP)
    assert laptop.cloud.everything() != []
    laptop.ok("down -y")
    assert laptop.cloud.everything() == []
