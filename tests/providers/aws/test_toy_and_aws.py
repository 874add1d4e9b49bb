"""One fleet on the toy and on the AWS fake, from its file: hosts, costs, `down` and leaks cover both."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotfleet.api.account import leaks
from spotfleet.api.account.leaks import Ownership
from spotfleet.api.account.listing import listed
from spotfleet.api.home import FleetRecord, Home, Keys
from spotfleet.api.machine import load_provider
from spotfleet.config import parse
from spotfleet.fleet.cost.meter import Meter
from spotfleet.fleet.memory_ledger import MemoryLedger
from spotfleet.fleet.reconcile import Observed, Wanted, create, leftovers, tick
from spotfleet.model import CloudState, Nodes, Role
from spotfleet.providers import Boot, LaunchRequest, ManagedResources
from spotfleet.providers.aws import session
from spotfleet.providers.plugin import plugin_of
from spotfleet.providers.several import SeveralClouds
from tests.support.toy import toy_world

FILE = """
name: both
provider: [toy, aws]
nodes: 2
resources:
  any_of:
    - {infra: toy, accelerators: "TOY:1"}
    - {infra: aws/us-east-1, instance_type: g5.xlarge}
dispatcher: {instance_type: toy.small}
toy: {account: ACCOUNT, processes: false}
aws: {ssh_from: [192.0.2.1/32], dispatcher_credentials: fleet}
"""
ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")


class Both:
    """A fleet of two hosts. Agents join as soon as a cloud lists their hosts as running."""

    def __init__(self, home: Path, text: str, cloud: Any) -> None:
        self.cloud, self.ahead_s = cloud, 0.0
        spec = parse(text, home / "both.yaml", {}).spec
        plugin = plugin_of(spec.provider)
        record = FleetRecord(spec, "both", time.time(), plugin.config(spec, os.environ, str(home)))
        settled, self.regions = plugin.settle(load_provider(record), record.provider_config, spec, 2, "")
        self.record = replace(record, provider_config=settled)
        self.folder = Home(home).folder("both")
        self.folder.make(self.record, Keys("admin", "secret", "cert", "key", ssh_public="ssh-ed25519 AAAA x"), "ca")
        provider = load_provider(self.record, self.folder)
        assert isinstance(provider, SeveralClouds)
        self.provider, self.ledger = provider, MemoryLedger()
        provider.prepare("both", {}, lambda _line: None)
        create(self.ledger, provider, "both", Nodes(2, 2, 2), time.time())

    def full(self, provider: str) -> None:
        if provider == "aws":
            for zone in ZONES:
                self.cloud.set_room(zone, "g5.xlarge", 0)
        else:
            with self.provider.clouds["toy"].state() as state:
                state["refused"] = {f"toy/{region}-1/toy.gpu/spot": "full" for region in ("north", "south")}

    def open(self, provider: str) -> None:
        with self.provider.clouds[provider].state() as state:
            state["refused"] = {}

    def ticks(self, count: int = 8, every_s: float = 5.0) -> list[str]:
        """Return the clouds of the hosts that are up afterwards."""
        for _ in range(count):
            self.ahead_s += every_s
            running = {h.request_id: h.provider_id for h in self.provider.hosts("both")
                       if h.state is CloudState.RUNNING}
            tick(Wanted("both", Role.WORKER, 2, self.record.spec.any_of), self.ledger, self.provider,
                 lambda host, _offer: Boot("a.b", {"boot.json": host}), Observed(running), time.time() + self.ahead_s)
        return sorted(h.offer.provider for h in self.ledger.state().hosts if h.counts)


@pytest.fixture
def both(cloud: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hurried: None) -> Iterator[Both]:
    toy_world.install(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = tmp_path / "credentials"
    keys.write_text("[fleet]\naws_access_key_id = AKIA\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    session.reset()
    account = tmp_path / "account"
    account.mkdir()
    yield Both(tmp_path / "home", FILE.replace("ACCOUNT", str(account)), cloud)
    toy_world.forget()


def test_hosts_go_to_the_cloud_that_has_capacity_and_to_the_other_one_when_that_changes(both: Both):
    assert plugin_of("toy+aws").region(both.record.provider_config) == "south+us-east-1"
    assert {row.region for row in both.regions} == {"south", "north", "us-east-1"}
    both.full("toy")
    assert both.ticks() == ["aws", "aws"]
    both.full("aws")
    both.open("toy")
    for instance in both.cloud.instances():
        both.cloud.take(instance.id)
    assert both.ticks(60) == ["toy", "toy"]
    bill = Meter(both.ledger.rows, time.time() + both.ahead_s)
    assert {h.offer.provider for h in bill.hosts.values()} == {"toy", "aws"}
    assert both.ledger.state().created.billing.of("aws") == both.provider.clouds["aws"].billing()


def test_down_ends_the_hosts_and_the_resources_of_both(both: Both):
    both.full("toy")
    both.ticks()
    both.open("toy")
    provider: ManagedResources = both.provider
    assert len(leftovers(both.provider, "both")) == 2
    for host in leftovers(both.provider, "both"):
        both.provider.terminate(host.request_id)
    both.cloud.settle()
    left = provider.list_resources("both")
    assert {one.kind for one in left} >= {"aws security-group"}
    for one in sorted(left, key=lambda r: provider.resource_kinds().index(r.kind)):
        provider.delete_resource(one)
    assert (provider.list_resources("both"), leftovers(both.provider, "both")) == ([], [])


def test_leaks_look_into_the_accounts_of_both_and_a_dispatcher_in_one_guards_hosts_in_the_other(
        both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    both.full("toy")
    both.ticks()
    home = Home(tmp_path / "home")
    accounts = {account[0]: found for account, found in listed(home, []).items()}
    assert [len([h for h in accounts[name].lines if h.fleet == "both"]) for name in ("toy", "aws")] == [0, 2]
    assert leaks.search(home).leaks == ()  # the fleet is known here

    monkeypatch.setattr(leaks.time, "time", lambda real=time.time: real() + 7200.0)
    another = Home(tmp_path / "another")  # this laptop has another fleet in the same accounts
    record = replace(both.record, spec=replace(both.record.spec, name="other"), cloud_name="other")
    another.folder("other").make(record, Keys("admin", "secret", "cert", "key"), "ca")
    assert {s.verdict for s in leaks.search(another).suspects} == {Ownership.LEAK}
    dispatcher = both.provider.offers(both.record.spec.dispatcher)[0]
    both.open("toy")
    both.provider.launch(LaunchRequest("both-d-0", "both", Role.DISPATCHER, dispatcher, Boot("a.b")))
    assert {s.verdict for s in leaks.search(another).suspects} == {Ownership.ELSEWHERE}
