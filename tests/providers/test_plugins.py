"""Discovery of plugins by real entry points, and what loading one may import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from spotfleet import plugins, providers
from spotfleet.api.account.listing import listed
from spotfleet.api.cloud import without_keys
from spotfleet.api.home import FleetRecord, Home, Keys
from spotfleet.api.policies import document
from spotfleet.codec import from_json, to_json
from spotfleet.config import parse
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec, Need
from spotfleet.plugins import FileFacts, Machines, Traits, kind_missing
from spotfleet.providers.kit.plugin import RegionalPlugin
from spotfleet.providers.plugin import BasePlugin, plugin_of, usable
from tests.support.toy import toy_world

ON_A_HOST = """
import sys
for name in ("pydantic", "yaml", "fabric", "boto3", "botocore", "google", "torch"):
    sys.modules[name] = None
from spotfleet.agent.notices import tag_reader
from spotfleet import plugins
assert all(tag_reader(name, "http://127.0.0.1:9", "key") for name in ("aws", "gcp", "local", "ssh"))
print({name: plugins.load(name).traits.notice_poll_s for name in plugins.names()})
"""
GUIDE = Path(__file__).parents[2] / "docs/clouds/new-cloud.md"
Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution with one plugin: `install(NAME, MODULE:OBJECT)`."""
    def add(name: str, what: str) -> None:
        info = tmp_path / f"{name}_plugin-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[spotfleet.clouds]\n{name} = {what}\n")
        monkeypatch.syspath_prepend(tmp_path)
        plugins.installed.cache_clear()

    yield add
    plugins.load.cache_clear()
    plugins.installed.cache_clear()


def test_an_agent_loads_its_plugin_without_what_an_inherited_environment_may_lack():
    done = subprocess.run([sys.executable, "-c", ON_A_HOST], capture_output=True, text=True)
    assert done.stdout == "{'aws': 0.5, 'gcp': 0.5, 'local': 0.5, 'ssh': 0.5}\n", done.stderr


def test_a_process_searches_the_installed_distributions_once(monkeypatch):
    searched: list[str] = []

    def search(group: str) -> list[EntryPoint]:
        searched.append(group)
        return [EntryPoint("one", "nothing:here", group)]

    plugins.installed.cache_clear()
    monkeypatch.setattr(plugins, "entry_points", search)
    try:
        assert plugins.names() == ["one"] and plugins.names() == ["one"]
        with pytest.raises(UsageError, match="unknown provider 'two'"):
            plugins.load("two")
        assert searched == ["spotfleet.clouds"]
    finally:
        plugins.installed.cache_clear()


def test_an_unknown_provider_is_refused_with_the_names_of_the_others():
    with pytest.raises(UsageError, match="unknown provider 'cumulus'") as caught:
        plugin_of("cumulus")
    assert caught.value.hint == "use one of: aws, gcp, local, ssh"


def test_a_plugin_that_cannot_be_loaded_is_named_with_its_distribution_and_hides_no_other(install: Install):
    install("broken", "no_such_module_of_ours:PLUGIN")
    with pytest.raises(UsageError, match="provider broken cannot be loaded: No module named") as caught:
        plugin_of("broken")
    assert caught.value.hint == "install broken-plugin again, with all that it needs"
    assert [plugin.name for plugin in usable()] == ["aws", "gcp", "local", "ssh"]
    with pytest.raises(UsageError, match="provider broken cannot be loaded"):
        parse("provider: broken", Path("f.yaml"), {})
    with pytest.raises(UsageError, match="unknown key; did you mean 'nodes'"):
        parse("nodez: 1", Path("f.yaml"), {})


def test_each_plugin_has_its_name_and_the_kind_of_its_machines():
    found = {name: (plugin_of(name).name, plugin_of(name).traits.machines) for name in plugins.names()}
    assert found == {"aws": ("aws", Machines.MADE), "gcp": ("gcp", Machines.MADE), "local": ("local", Machines.HERE),
                     "ssh": ("ssh", Machines.EXISTING)}


def test_a_plugin_without_a_section_stores_none_and_tells_its_accounts_apart_by_all_of_its_configuration():
    plugin = BasePlugin()
    assert plugin.read_section(None, FileFacts(), lambda _place, _text: None) == {}
    one, other = {"section": {"a": [1]}}, {"section": {"a": [2]}}
    assert plugin.account_key(one) == plugin.account_key(dict(one)) != plugin.account_key(other)


@pytest.mark.parametrize(("need", "open_ended", "missing"), [
    (Need(), True, True), (Need(), False, False), (Need(use_spot=False), True, False),
    (Need(accelerator="A100"), True, False), (Need(instance_type="x"), True, False)])
def test_a_kind_is_missing_only_where_types_are_too_many_to_list(need: Need, open_ended: bool, missing: bool):
    assert kind_missing(Traits(open_ended_types=open_ended), [need]) is missing


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The distribution of a third party: `tests/support/toy/plugin`."""
    toy_world.install(monkeypatch)
    yield
    toy_world.forget()


def test_the_section_of_a_third_party_is_read_by_its_plugin_and_stored_as_it_says(toy: None):
    found = parse("provider: toy\ntoy: {account: /srv/toy}\n", Path("f.yaml"), {}).spec
    assert (found.provider, found.section) == (
        "toy", {"account": "/srv/toy", "regions": ["north", "south"], "processes": True})
    assert from_json(FleetSpec, json.loads(json.dumps(to_json(found)))) == found


@pytest.mark.parametrize(("text", "said"), [
    ("provider: toy", "f.yaml:1: toy: is missing: it names the account, such as `toy: {account: /srv/toy}`"),
    ("provider: toy\ntoy:\n  acount: /srv", "f.yaml:3: toy.acount: unknown key; did you mean 'account'?"),
    ("provider: toy\ntoy:\n  account: 1", "f.yaml:3: toy.account: expected text, got 1; put it in quotes"),
    ("provider: toy\ntoy:\n  account: /srv\n  regions: [west]",
     "f.yaml:4: toy.regions: 'west' is no region; there is north, south"),
    ("provider: toy\ntoy: {account: /srv}\ninterruption_behavior: stop",
     "f.yaml:3: interruption_behavior: machines of toy are never stopped; remove this"),
    ("provider: toy\ntoy: {account: /srv}\nplacement: zone",
     "f.yaml:3: placement: is for provider aws or gcp, but the fleet's is 'toy'; write `provider: aws`, or remove "
     "this"),
    ("provider: toy\ntoy: {account: /srv}\naws: {disk: 50}",
     "f.yaml:3: aws: is for provider aws, but the fleet's is 'toy'; write `provider: aws`, or remove the section"),
    ("name: f\ntoy: {account: /srv}",
     "f.yaml:2: toy: is for provider toy, but the fleet's is 'local'; write `provider: toy`, or remove the section"),
    ("name: f\naccount: /srv", "f.yaml:2: account: unknown key; it belongs under `toy`"),
])
def test_a_section_of_a_third_party_is_checked_as_ours_are(toy: None, text: str, said: str):
    with pytest.raises(UsageError) as caught:
        parse(text, Path("f.yaml"), {})
    assert said in str(caught.value)


def test_a_policy_is_printed_only_of_a_cloud_that_has_some(toy: None, tmp_path: Path):
    file = tmp_path / "f.yaml"
    file.write_text(f"provider: toy\ntoy: {{account: {tmp_path}}}\n")
    with pytest.raises(UsageError, match="is of provider toy, which has no policies") as caught:
        document(Home(tmp_path), "", "", file)
    assert caught.value.hint == "name a fleet file with `provider: aws or gcp`"


def test_a_fleet_that_ended_on_a_cloud_whose_plugin_is_gone_stops_no_search_for_leaks(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(providers, "names", lambda: [])
    home, notes = Home(tmp_path), []
    record = FleetRecord(FleetSpec("old", provider="cumulus"), "old", 1.0, down_at=2.0)
    home.folder("old").make(record, Keys("admin", "secret", "cert", "key"), "ca")
    assert listed(home, notes) == {}
    assert notes == ["fleet old has been on cumulus, which was not asked: unknown provider 'cumulus'"]
    home.folder("old").update(down_at=0.0)  # its machines may run: a search that leaves them out proves nothing
    with pytest.raises(UsageError, match="unknown provider 'cumulus'"):
        listed(home, notes)


def test_a_laptop_that_attaches_keeps_no_key_in_its_configuration_and_is_no_dispatcher():
    spec = FleetSpec("f", provider="cumulus", section={"size": 2}, placement="zone")
    of_dispatcher = {"section": {"size": 1}, "endpoint": "http://x", "side": "dispatcher", "placement": "spread",
                     "public_key": "ssh-ed25519 AAAA", "private_key": "private", "secret": "secret"}
    assert BasePlugin().moved(without_keys(of_dispatcher), spec) == {
        "section": {"size": 2}, "endpoint": "http://x", "side": "laptop", "placement": "zone",
        "environment": to_json(spec.environment)}


def test_the_plugin_in_the_guide_for_new_clouds_is_one():
    """As its text stands there; the section and the provider are for its reader to write."""
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    made: dict[str, Any] = {}
    exec(compile(block, "new-cloud.md", "exec"), made)
    plugin = made["CUMULUS"]
    assert isinstance(plugin, RegionalPlugin) and plugin.traits.settles_region
    assert plugin.settle(None, {"section": {}}, FleetSpec("f"), 1, "south") == ({"section": {"regions": ["south"]}}, ())


def test_a_plugin_that_should_choose_a_region_and_cannot_is_refused_by_name():
    class Cirrus(BasePlugin):
        name = "cirrus"
        traits = Traits(Machines.MADE, settles_region=True)

    with pytest.raises(UsageError, match="provider cirrus has the trait settles_region, and chooses no region"):
        Cirrus().settle(None, {}, FleetSpec("f"), 1, "")
