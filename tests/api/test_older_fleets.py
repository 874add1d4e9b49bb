"""Files that the release before has written, byte for byte: fleet.json of a laptop and boot.json of a dispatcher.

There the section of provider aws lay under `aws`, and a configuration held JSON text inside its strings.
`tests/support/older/g5.yaml` is the file that made them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotfleet import providers
from spotfleet.api.account.listing import account_of
from spotfleet.api.home import FleetRecord, Home
from spotfleet.api.lifecycle import attach as attach_module
from spotfleet.api.lifecycle.attach import attach
from spotfleet.api.lifecycle.preview import changes
from spotfleet.api.machine import load_provider
from spotfleet.codec import from_json, to_json
from spotfleet.config import parse
from spotfleet.model import EnvironmentSpec, FleetSpec, Need, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.aws import AwsProvider
from spotfleet.providers.aws.plugin import AWS
from spotfleet.providers.aws.section.spec import AwsNetwork, AwsSpec, parsed
from spotfleet.providers.local.inprocess import InProcessProvider, ManualClock
from spotfleet.providers.ssh.inventory import inventory_of
from spotfleet.providers.ssh.section.spec import SshMachine, SshSpec
from spotfleet.transport.boot import read_boot

OLDER = Path(__file__).parents[1] / "support" / "older"
NETWORKS = (AwsNetwork("us-west-2", "vpc-0123456789abcdef0"),)
TORCH = EnvironmentSpec(packages=("torch==2.13.0",))


def record() -> FleetRecord:
    return from_json(FleetRecord, json.loads((OLDER / "fleet.json").read_text()))


def today() -> FleetSpec:
    return parse((OLDER / "g5.yaml").read_text(), Path("/work/g5.yaml"), {}).spec


def test_the_section_of_an_older_fleet_is_that_of_its_file():
    older = record().spec
    assert AWS.portable(older) == AWS.portable(today())  # with all keys, also those that are newer
    assert parsed(older.section) == AwsSpec(("us-east-1", "us-west-2"), networks=NETWORKS, profile="research",
                                            disk_gib=200)


def test_an_older_fleets_provider_has_its_settled_region_and_its_environment():
    provider = load_provider(record())
    assert isinstance(provider, AwsProvider)
    settings = provider.account.settings
    assert (settings.spec, settings.environment) == (
        AwsSpec(("us-west-2",), networks=NETWORKS, profile="research", disk_gib=200), TORCH)
    assert (settings.side, settings.endpoint_url) == ("laptop", "http://127.0.0.1:9")


def test_the_file_of_an_older_fleet_changes_nothing_of_it():
    assert changes(record().spec, today()) == []


def test_a_key_that_the_older_release_did_not_know_is_no_change():
    older = record().spec
    section = {key: value for key, value in older.section.items() if key != "event_queue"}
    assert changes(replace(older, section=section), today()) == []
    assert changes(replace(older, section={**section, "event_queue": True}), today()) == ["section"]


def test_up_and_the_dispatcher_get_a_configuration_of_today():
    moved = AWS.moved(record().provider_config, today())
    assert (moved["section"]["regions"], moved["environment"]) == (["us-west-2"], to_json(TORCH))
    for config in (moved, AWS.for_dispatcher(moved), AWS.for_dispatcher(record().provider_config)):
        assert "aws" not in config and isinstance(config["section"], dict)
    assert AWS.for_dispatcher(record().provider_config)["section"]["profile"] == ""


def test_an_older_fleet_is_of_the_same_account_as_a_new_one():
    spec = today()
    new = AWS.config(spec, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "")
    assert account_of("aws", record().provider_config) == account_of("aws", new)
    assert AWS.region(record().provider_config) == "us-west-2"


def test_an_older_dispatchers_boot_file_is_read(tmp_path: Path):
    (tmp_path / "boot.json").write_text((OLDER / "boot.json").read_text())
    boot = read_boot(tmp_path)
    assert parsed(boot.spec.section).disk_gib == 200
    provider = providers.load(boot.spec.provider, boot.provider_config)
    assert isinstance(provider, AwsProvider) and not provider.account.settings.laptop
    assert provider.account.settings.secret == "secret"


def test_attach_makes_a_folder_of_today_for_a_fleet_of_the_release_before(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch):
    cloud = InProcessProvider(clock=ManualClock(1_700_000_000.0))
    offer = cloud.offers(Need(use_spot=False))[0]
    boot = Boot("spotfleet.dispatcher", {"boot.json": (OLDER / "boot.json").read_text()})
    cloud.launch(LaunchRequest("g5-0a1b-d-0", "g5-0a1b", Role.DISPATCHER, offer, boot))
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(providers, "load", lambda _name, config: told.append(config) or cloud)
    monkeypatch.setattr(attach_module, "_greet", lambda *_: "")
    asked = replace(today(), section=to_json(AwsSpec(("us-west-2",), profile="mine", ssh_from=("192.0.2.0/24",))))
    home = Home(tmp_path)

    assert attach(home, "g5", "aws", asked).fleet == "g5"

    made = json.loads((tmp_path / "fleets" / "g5" / "fleet.json").read_text())
    assert made["spec"]["section"] == to_json(AwsSpec(
        ("us-east-1", "us-west-2"), networks=NETWORKS, profile="mine", ssh_from=("192.0.2.0/24",), disk_gib=200))
    config = made["provider_config"]
    assert config["section"]["regions"] == ["us-west-2"] and config["section"]["profile"] == "mine"
    assert (config["side"], config["environment"], "aws" in config) == ("laptop", to_json(TORCH), False)
    assert not {"secret", "private_key", "public_key"} & config.keys()
    assert home.folder("g5").keys.ssh_private == "private"


def test_machines_over_ssh_of_an_older_fleet_are_known():
    spec = SshSpec(SshMachine("head"), (SshMachine("node1", 2),))
    older = {"ssh": json.dumps(to_json(spec)), "environment": json.dumps(to_json(TORCH)), "side": "dispatcher"}
    found = inventory_of(older)
    assert (found.spec, found.environment) == (spec, TORCH)


@pytest.mark.parametrize("section", [{}, {"section": {}}], ids=["without-a-section", "beside-an-empty-one"])
def test_the_machines_of_an_older_fleet_become_its_section(section: dict[str, Any]):
    machines = to_json(SshSpec(SshMachine("head"), (SshMachine("node1", 2),), identity_file="/here/id"))
    older = from_json(FleetSpec, {"name": "f", "provider": "ssh", "ssh": machines, **section})
    assert older == FleetSpec("f", provider="ssh", section=machines)
    today = parse("name: f\nprovider: ssh\nssh: {dispatcher: head, hosts: ['node1:2'], identity_file: other}",
                  Path("/work/f.yaml"), {}).spec
    assert changes(replace(today, section=older.section), today) == []
    assert changes(replace(today, section={**machines, "port": 2222}), today) == ["section"]
    assert from_json(FleetSpec, {"name": "f", "provider": "local", "ssh": None}) == FleetSpec("f")
