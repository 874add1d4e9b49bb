"""Which address an agent tells its peers to reach its host at."""

from __future__ import annotations

import pytest

from spotfleet.agent.address import AdvertisedAddress
from spotfleet.agent.boot import local_source
from tests.agent.workers.test_agent_sockets import TALK
from tests.support.agent.agent_stage import ADDRESS, HOST, Stage

NOBODYS = "192.0.2.1"  # for documentation; no interface has it


def test_it_is_the_source_of_the_route_to_the_dispatcher_and_follows_it():
    at = AdvertisedAddress("")
    assert (at.address, at.connected("10.0.0.7"), at.address) == ("", "10.0.0.7", "10.0.0.7")
    assert at.connected("::ffff:10.0.0.8") == "10.0.0.8"
    assert (at.connected("2001:DB8:0::7"), at.why) == ("2001:db8::7", "")


def test_one_that_was_asked_for_is_taken_if_the_host_has_it():
    at = AdvertisedAddress("127.0.0.9")
    assert (at.address, at.connected("10.0.0.7"), at.why) == ("127.0.0.9", "127.0.0.9", "")


@pytest.mark.parametrize("asked, why", [
    (NOBODYS, f"{NOBODYS} cannot be advertised: no interface of this host has that address"),
    ("2001:db8::1", "2001:db8::1 cannot be advertised: no interface of this host has that address"),
    ("head.example", "'head.example' cannot be advertised: it is a name, not an IP address")])
def test_one_that_the_host_does_not_have_is_told_and_the_routes_is_taken(asked, why):
    at = AdvertisedAddress(asked)
    assert (at.connected("10.0.0.7"), at.why) == ("10.0.0.7", why)


def test_one_that_the_host_has_later_is_taken_then(monkeypatch: pytest.MonkeyPatch):
    held = set[str]()
    monkeypatch.setattr("spotfleet.agent.address.is_held", held.__contains__)
    at = AdvertisedAddress(NOBODYS)
    assert (at.address, at.connected("10.0.0.7")) == ("", "10.0.0.7")
    held.add(NOBODYS)
    assert (at.connected("10.0.0.7"), at.why) == (NOBODYS, "")


@pytest.mark.parametrize("asked, dispatcher, source", [
    ("127.0.3.7", "https://127.0.0.1:7", "127.0.3.7"), ("10.9.0.7", "https://10.0.0.1:7", ""),
    ("", "https://127.0.0.1:7", ""), ("127.0.3.7", "https://10.0.0.1:7", "")])
def test_only_loopback_is_spoken_from_as_asked_as_other_addresses_may_be_in_other_networks(asked, dispatcher, source):
    assert local_source(asked, dispatcher) == source


@pytest.mark.processes
def test_a_worker_hears_its_hosts_address_and_a_store_elsewhere_is_not_offered_to_peers(stage: Stage):
    stage.boot()
    stage.job(TALK + f"say(store='127.0.9.9:77')\nprint(json.loads(lines.readline())['address'], flush=True)\n"
                     f"say(stage='init', store='127.0.9.9:77'); time.sleep(0.2)\n"
                     f"say(stage='ready', store='{ADDRESS}:77'); time.sleep(1000)\n")
    stage.order(f"{HOST}/0/1")
    seen = {}

    def look(worker) -> bool:
        seen[worker.report.stage.value] = worker.report.store
        return worker.report.stage.value == "ready"

    stage.dispatcher.wait_worker(f"{HOST}/0/1", look)
    assert (seen.get("init", ""), seen["ready"]) == ("", f"{ADDRESS}:77")
    stage.dispatcher.wait(lambda _: stage.log())  # it may be behind the report
    assert stage.log() == f"{ADDRESS}\n"
