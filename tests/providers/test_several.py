"""Several clouds in one fleet: the file, the plugin and the provider that are made of theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.codec import from_json, to_json
from spotfleet.config import parse
from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.fleet.cost.meter import Meter
from spotfleet.fleet.memory_ledger import MemoryLedger
from spotfleet.fleet.planner.plan import Launch
from spotfleet.fleet.reconcile import Observed, Wanted, create, tick
from spotfleet.matching import matches
from spotfleet.model import BillingRules, FleetSpec, Need, Nodes, Role
from spotfleet.plugins import Machines
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.plugin import plugin_of, traits_of
from spotfleet.providers.several import SeveralClouds
from tests.support.contract.provider_worlds import InProcessWorld
from tests.support.toy import toy_world
from tests.support.toy.toy_world import ToyWorld

FILE = """
name: both
provider: [toy, aws]
nodes: 2
resources:
  any_of:
    - {infra: toy, accelerators: "TOY:1"}
    - {infra: aws/us-east-1, instance_type: g5.xlarge}
dispatcher: {instance_type: toy.small}
toy: {account: /srv/toy}
aws: {disk: 200}
"""
TOY, EMU = Need(accelerator="TOY", provider="toy"), Need(accelerator="EMU", provider="local")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    toy_world.install(monkeypatch)
    yield
    toy_world.forget()


def spec(text: str = FILE) -> FleetSpec:
    return parse(text, Path("f.yaml"), {}).spec


def test_a_file_names_several_clouds_and_each_reads_its_own_section_and_needs(toy: None):
    found = spec()
    assert (found.provider, [c["plugin"] for c in found.section["clouds"]]) == ("toy+aws", ["toy", "aws"])
    sections = {c["plugin"]: c["section"] for c in found.section["clouds"]}
    assert sections["toy"]["account"] == "/srv/toy"
    assert (sections["aws"]["disk_gib"], sections["aws"]["regions"]) == (200, ["us-east-1"])
    assert [(n.provider, n.region) for n in found.any_of] == [("toy", ""), ("aws", "us-east-1")]
    assert found.dispatcher.provider == "toy"
    assert from_json(FleetSpec, json.loads(json.dumps(to_json(found)))) == found


@pytest.mark.parametrize(("changed", "said"), [
    (("provider: [toy, aws]", "provider: toy"),
     "resources.any_of[1].infra: names provider 'aws', but the fleet's is 'toy'; for a fleet on several clouds write "
     "`provider: [toy, aws]`"),
    (("provider: [toy, aws]", "provider: [toy, toy]"), "provider: toy is here twice"),
    (("provider: [toy, aws]", "provider: []"), "provider: expected a provider, or a list of clouds, got []"),
    (("toy: {account: /srv/toy}", ""), "toy: is missing: it names the account"),
    (("aws: {disk: 200}", "aws: {regions: [us-west-2]}"),
     "is in us-east-1, which is none of aws.regions: us-west-2"),
    (("aws: {disk: 200}", "interruption_behavior: stop"), "machines of toy are never stopped"),
])
def test_problems_of_each_cloud_are_told_in_one_go(toy: None, changed: tuple[str, str], said: str):
    with pytest.raises(UsageError) as caught:
        spec(FILE.replace(*changed))
    assert said in str(caught.value)


def test_machines_that_exist_are_no_cloud_of_several(toy: None):
    with pytest.raises(UsageError, match="machines of provider ssh exist before the fleet"):
        plugin_of("toy+ssh")


def test_a_fleet_of_one_cloud_is_as_it_was(toy: None):
    one = spec("provider: toy\ntoy: {account: /srv/toy}\nresources: {infra: toy}")
    assert (one.provider, one.any_of, one.section["account"]) == ("toy", (Need(),), "/srv/toy")


def test_the_plugin_of_several_has_the_traits_and_configurations_of_all(toy: None):
    both, plugin = spec(), plugin_of("toy+aws")
    traits = traits_of(both)
    assert (traits.machines, traits.settles_region, traits.placement) == (Machines.MADE, True, False)
    assert (traits.poll_s, traits.notice_poll_s, traits.keeps_results_s) == (2.0, 0.5, 86_400.0)
    config = plugin.config(both, {}, "/home")
    parts = dict(plugin.parts({**config, "secret": "s", "public_key": "k"}))
    assert parts["toy"]["section"]["account"] == "/srv/toy" and parts["toy"]["secret"] == "s"
    assert (parts["aws"]["section"]["disk_gib"], parts["aws"]["public_key"]) == (200, "k")
    assert dict(plugin.parts(plugin.for_dispatcher(config)))["aws"]["side"] == "dispatcher"
    assert plugin.unpriced(both, 2).startswith("toy: not in these prices: the electricity of this machine; aws: not ")
    assert plugin.portable(plugin.portable(both)) == plugin.portable(both)


def test_each_cloud_settles_its_own_region_and_stays_there(toy: None, tmp_path: Path):
    both = spec(FILE.replace("/srv/toy", str(tmp_path)))
    plugin = plugin_of("toy+aws")
    config = plugin.config(both, {}, "")
    settled, _ = plugin.settle(plugin.open(config), config, both, 2, "south+us-east-1")
    assert plugin.region(settled) == "south+us-east-1"
    assert plugin.region(plugin.moved(settled, both)) == "south+us-east-1"


def test_a_cloud_that_the_dispatcher_cannot_call_is_left_out_unless_the_fleet_needs_it(
        toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def settled(changed: str = "", now: str = ""):
        both = spec(FILE.replace("/srv/toy", str(tmp_path)).replace(changed, now))
        config = plugin.config(both, {}, "")
        return plugin.settle(plugin.open(config), config, both, 2, "")

    made = replace(plugin_of("toy").traits, machines=Machines.MADE)  # else it has the laptop's own credentials
    monkeypatch.setattr(plugin_of("toy"), "traits", made)
    plugin = plugin_of("toy+aws")
    config, rows = settled()
    assert rows[-1].region == "aws" and rows[-1].why.startswith(
        "left out: the dispatcher on toy has no credentials for aws (name them as `dispatcher_credentials` in section")
    assert ([name for name, _ in plugin.parts(config)], plugin.region(config)) == (["toy"], "south+none")
    assert list(plugin.open(config).clouds) == ["toy"]
    assert plugin.region(plugin.moved(config, spec())) == "south+none"
    assert plugin.region(plugin.for_dispatcher(config)) == "south+none"
    with pytest.raises(NeedsPerson, match="the dispatcher on toy has no credentials for aws"):
        settled("- {infra: toy, accelerators: \"TOY:1\"}", "")


def test_a_dispatcher_gets_the_sdks_of_all_its_clouds_and_the_credentials_of_the_others(
        toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = tmp_path / "credentials"
    keys.write_text("[fleet]\naws_access_key_id = AKIA\naws_secret_access_key = hidden\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    both, plugin = spec(FILE.replace("{disk: 200}", "{dispatcher_credentials: fleet}")), plugin_of("toy+aws")
    config = plugin.config(both, {}, "")
    parts = dict(plugin.parts(plugin.for_dispatcher(config)))
    assert parts["aws"]["credentials"] == {"aws_access_key_id": "AKIA", "aws_secret_access_key": "hidden"}
    assert "credentials" not in parts["toy"] and "hidden" not in json.dumps(config)
    assert parts["toy"]["beside"] == {"extras": ["aws"], "modules": ["boto3"]} and "beside" not in parts["aws"]
    assert "hidden" not in json.dumps(plugin.moved(plugin.for_dispatcher(config), both))  # a second laptop's


def test_a_dispatcher_gets_no_temporary_key_which_would_expire_under_the_fleet(toy, tmp_path, monkeypatch):
    keys = tmp_path / "credentials"
    keys.write_text("[fleet]\naws_access_key_id = ASIA\naws_secret_access_key = hidden\naws_session_token = t\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    plugin = plugin_of("toy+aws")
    config = plugin.config(spec(FILE.replace("{disk: 200}", "{dispatcher_credentials: fleet}")), {}, "")
    with pytest.raises(UsageError, match="'fleet' is a temporary one: within hours the dispatcher could"):
        plugin.for_dispatcher(config)


# ---- machines: the toy and the emulated cloud, both in this process


class Clouds:
    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.toy, self.local = ToyWorld(home, monkeypatch), InProcessWorld()
        self.local.clock.now = self.toy.clock.now
        self.ledger = MemoryLedger()
        local = self.local.provider()
        local.billing = lambda: BillingRules(600)  # type: ignore[method-assign]
        self.provider = SeveralClouds({"toy": self.toy.provider(), "local": local})
        create(self.ledger, self.provider, "f", Nodes(2, 2, 2), self.toy.clock())

    def pool(self, need: Need) -> str:
        return self.provider.offers(need)[0].pool

    def ticks(self, count: int = 8, every_s: float = 1.0, hosts: int = 2) -> list:
        """Let agents join as soon as their hosts run."""
        done = []
        for _ in range(count):
            for world in (self.toy, self.local):
                world.let_pass(every_s)
            running = {h.request_id: h.provider_id for h in self.provider.hosts("f") if h.state.value == "running"}
            done += tick(Wanted("f", Role.WORKER, hosts, (TOY, EMU)), self.ledger, self.provider,
                         lambda host, _offer: Boot("idle_host", {"boot.json": host}), Observed(running),
                         self.toy.clock())
        return done

    def living(self) -> list[int]:
        return [len(self.toy.machines()), len(self.local.machines())]


@pytest.fixture
def clouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clouds]:
    made = Clouds(tmp_path, monkeypatch)
    yield made
    made.toy.close()


def close_toy(clouds: Clouds) -> None:
    for offer in clouds.provider.offers(TOY):
        clouds.toy.full(offer.pool)


def test_where_one_cloud_has_no_capacity_the_other_one_gets_the_hosts(clouds: Clouds):
    close_toy(clouds)
    launched = [a.offer.provider for a in clouds.ticks() if isinstance(a, Launch)]
    assert (launched, clouds.living()) == (["toy", "toy", "local", "local"], [0, 2])


def test_offers_of_both_are_ranked_together_and_a_cloud_in_trouble_hides_none_of_the_other(clouds: Clouds):
    prices = [o.price_micros_h for o in clouds.provider.offers(Need())]
    assert prices == sorted(prices) and {o.provider for o in clouds.provider.offers(Need())} == {"toy", "local"}
    assert {o.provider for o in clouds.provider.offers(TOY)} == {"toy"}
    clouds.toy.lose("offers", "before")
    assert {o.provider for o in clouds.provider.offers(Need())} == {"local"}
    clouds.toy.lose("offers", "before")
    with pytest.raises(SpotfleetError):
        clouds.provider.offers(TOY)


def test_a_need_that_names_a_cloud_is_met_by_no_offer_of_another(clouds: Clouds):
    for offer in clouds.provider.offers(Need()):
        assert [matches(Need(provider=name), offer) for name in ("", offer.provider, "cumulus")] == [True, True, False]


def test_a_listing_without_one_cloud_is_no_listing(clouds: Clouds):
    clouds.toy.lose("hosts", "before")
    with pytest.raises(SpotfleetError):
        clouds.provider.hosts("f")


def test_hosts_of_both_are_listed_tagged_read_and_ended_wherever_they_are(clouds: Clouds):
    for number, need in enumerate((TOY, EMU)):
        offer = clouds.provider.offers(need)[0]
        boot = Boot("idle_host", {"x": need.provider})
        clouds.provider.launch(LaunchRequest(f"f-{number}", "f", Role.WORKER, offer, boot))
    assert sorted(h.offer.provider for h in clouds.provider.hosts("f")) == ["local", "toy"]
    assert [clouds.provider.boot_files(f"f-{n}")["x"] for n in range(2)] == ["toy", "local"]
    clouds.provider.tag("f-1", {"color": "red"})
    assert clouds.local.tag("f-1", "color") == "red"
    with pytest.raises(UsageError, match="f-9"):
        clouds.provider.tag("f-9", {})
    for number in range(2):
        clouds.provider.terminate(f"f-{number}")
    assert clouds.living() == [0, 0]


def test_a_host_is_ended_while_another_cloud_does_not_answer_and_that_is_told(clouds: Clouds):
    offer = clouds.provider.offers(EMU)[0]
    clouds.provider.launch(LaunchRequest("f-1", "f", Role.WORKER, offer, Boot("idle_host")))
    clouds.toy.lose("terminate", "before")
    with pytest.raises(SpotfleetError, match="toy: terminate was not answered"):
        clouds.provider.terminate("f-1")
    assert clouds.living() == [0, 0]


def test_an_offer_of_a_cloud_that_the_fleet_is_not_on_is_refused(clouds: Clouds):
    offer = replace(clouds.provider.offers(TOY)[0], provider="cumulus")
    with pytest.raises(UsageError, match="the fleet is not on cumulus"):
        clouds.provider.launch(LaunchRequest("f-1", "f", Role.WORKER, offer, Boot("idle_host")))


def test_hosts_of_one_cloud_are_launched_together_only_where_that_cloud_can(clouds: Clouds):
    with pytest.raises(NoCapacity, match="toy launches no hosts together"):
        clouds.provider.launch_together([LaunchRequest(
            "f-1", "f", Role.WORKER, clouds.provider.offers(TOY)[0], Boot("idle_host"))])


def test_the_bill_of_each_host_follows_the_rules_of_its_cloud(clouds: Clouds):
    rules = clouds.provider.billing()
    assert (rules.of("toy"), rules.of("local")) == (BillingRules(1), BillingRules(600))
    clouds.ticks()
    close_toy(clouds)
    clouds.provider.interrupt(next(iter(clouds.toy.machines())), None)
    clouds.ticks()
    bill = Meter(clouds.ledger.rows, clouds.toy.clock())
    shortest = {name: min(line.seconds for line in bill.lines(0.0, clouds.toy.clock())
                          if line.pool.startswith(f"{name}/")) for name in clouds.provider.clouds}
    assert 0 < shortest["toy"] < 60 and shortest["local"] == 600
    assert from_json(BillingRules, json.loads(json.dumps(to_json(rules)))) == rules
