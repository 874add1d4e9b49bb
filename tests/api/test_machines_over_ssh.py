"""`up`, `down` and `attach` of machines over SSH: whose key opens them, which of them can be used, what is left."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet import providers
from spotfleet.api.access import ssh
from spotfleet.api.account import leaks
from spotfleet.api.lifecycle import host_keys
from spotfleet.errors import SpotfleetError
from spotfleet.model import CloudHost, CloudState, Market, Need, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.local.market.market import LocalMarket as Machines
from spotfleet.providers.local.market.pools import LocalPool, MarketRules
from tests.support.cli.cli_cloud import FakeCloud
from tests.support.cli.cli_user import User

USERS_KEY = "the user's own key"
SILENT = "it does not answer"


def key(byte: int) -> str:
    blob = (11).to_bytes(4, "big") + b"ssh-ed25519" + (32).to_bytes(4, "big") + bytes([byte] * 32)
    return f"ssh-ed25519 {base64.b64encode(blob).decode()}"


class Lab(FakeCloud):
    """Machines that exist: each has its authorized keys, and may be away."""

    def __init__(self, disk: Path, machines: list[str]) -> None:
        super().__init__(disk)
        kinds = [("dispatcher", machines[0]), *(("machine", name) for name in machines[1:])]
        self.market = Machines(MarketRules(tuple(LocalPool(name, kind, Market.ON_DEMAND, 0, 1) for kind,
                                                 name in kinds)),
                               time.time())
        self.keys: dict[str, list[str]] = {name: [USERS_KEY] for name in machines}
        self.away: set[str] = set()
        self.deaf: set[str] = set()  # they answer, and take no key of ours
        self.forgotten: set[str] = set()  # machines that the script names no more
        self.spoilt = ""  # why no machine becomes a host
        self.told: list[dict[str, str]] = []

    def launch(self, request: LaunchRequest) -> None:
        super().launch(request)
        if self.spoilt and request.request_id in self.living():
            self.dispatchers.pop(request.request_id).close()
            self.market.power_off(request.request_id, self.clock())

    def hosts(self, fleet: str) -> list[CloudHost]:
        if "head" in self.away:
            raise SpotfleetError("head: it does not answer")
        return [replace(h, why=self.spoilt) if h.state is CloudState.TERMINATED else h for h in super().hosts(fleet)]

    def launched(self) -> list[str]:
        return list(self.market.hosts)

    def machines(self) -> list[str]:
        """As the fleet file or its script names them."""
        return [n for n in self.keys if n not in self.forgotten]

    def install_key(self, fleet: str, public_key: str) -> dict[str, str]:
        for name in self.keys.keys() - self.away - self.deaf:
            self.keys[name] += [] if public_key in self.keys[name] else [public_key]
        return dict.fromkeys(sorted(self.away | self.deaf), SILENT)

    def remove_fleet(self, fleet: str) -> dict[str, str]:
        told = {h["host"] for h in next(t["ssh"] for t in reversed(self.told) if "ssh" in t)["hosts"]}
        for name in self.keys.keys() - self.away - (self.forgotten - told):
            self.keys[name] = [k for k in self.keys[name] if not k.endswith(f"spotfleet:{fleet}")]
        return dict.fromkeys(sorted(self.away), SILENT)

    def problems(self) -> list[str]:
        return [f"{name}: {SILENT}" for name in sorted(self.away)]

    def keyed(self) -> list[str]:
        """The machines that a key of ours opens."""
        return sorted(name for name, found in self.keys.items() if found != [USERS_KEY])


@pytest.fixture
def lab(user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    found = Lab(tmp_path / "lab", ["head", "n1", "n2", "n3"])

    def load(_name: str, config: dict[str, str]) -> Lab:
        found.told.append(config)
        return found

    monkeypatch.setattr(providers, "load", load)
    monkeypatch.setattr(ssh, "dialer", lambda *_: None)  # the fake dispatcher answers without a tunnel
    monkeypatch.setenv("HOME", str(tmp_path))
    (user.work / "id").touch(mode=0o600)
    (user.work / "known").write_text("".join(f"{name} {key(i)}\n" for i, name in enumerate(found.keys)))
    write(user)
    yield found
    found.close()


def write(user: User, hosts: str = "[n1, n2, n3]", more: str = "nodes: {min: 2, target: 3}\n",
          identity: str = "id") -> None:
    user.write("fleet.yaml", "name: lab\nprovider: ssh\nssh:\n  dispatcher: head\n  known_hosts: known\n"
                             f"  identity_file: {identity}\n  hosts: {hosts}\n{more}")


def boot(lab: Lab) -> dict:
    """What the dispatcher was told at its birth."""
    return next(iter(lab.dispatchers.values())).boot


def test_the_plan_shows_the_machines_and_that_they_cost_nothing_and_touches_none(user, lab):
    said = user.ok("up fleet.yaml --plan")
    assert [line.split()[:4] for line in said.out.splitlines()[3:4]] == [
        ["dispatcher", "dispatcher", "on-demand", "head"]]
    assert [line.split()[:5] for line in said.out.splitlines()[4:7]] == [
        ["1", "host", "machine", "on-demand", n] for n in ("n1", "n2", "n3")]
    assert said.out.count("$0.0000") >= 4 and "% less" not in said.out
    assert lab.keyed() == [] and not (user.home / "fleets").exists()


def test_up_admits_the_fleets_own_key_everywhere_and_down_takes_it_away_again(user, lab):
    user.ok("up fleet.yaml -y")
    assert lab.keyed() == ["head", "n1", "n2", "n3"]
    (own,) = {k for found in lab.keys.values() for k in found} - {USERS_KEY}
    assert own.startswith("ssh-ed25519 ") and own.endswith(" spotfleet:lab")
    assert "removing the fleet's key" in user.ok("down -y").err
    assert lab.keyed() == [] and lab.living() == []
    assert "PRIVATE KEY" not in json.loads((user.home / "fleets/lab/keys.json").read_text())["ssh_private"]


def test_the_private_key_is_in_keys_json_and_the_dispatchers_boot_file_and_nowhere_else(user, lab):
    user.ok("up fleet.yaml -y")
    private = json.loads((user.home / "fleets/lab/keys.json").read_text())["ssh_private"]
    told = boot(lab)["provider_config"]
    assert private.startswith("-----BEGIN OPENSSH PRIVATE KEY-----")
    assert (told["private_key"], told["side"]) == (private, "dispatcher")
    assert lab.told[-1]["private_key"] == private and lab.told[-1]["side"] == "laptop"
    holding = [p.relative_to(user.home).as_posix() for p in user.home.rglob("*")
               if p.is_file() and private.splitlines()[1].encode() in p.read_bytes()]
    assert [p for p in holding if "/ssh/" not in p] == ["fleets/lab/keys.json"]


def test_the_dispatcher_is_told_every_pinned_key_and_no_file_of_the_laptop(user, lab):
    write(user, hosts=f"[n1, {{host: n2, port: 2200, host_key: '{key(9)}'}}]", more="nodes: 1\n")
    user.ok("up fleet.yaml -y")
    told = boot(lab)["provider_config"]
    assert told["known_hosts"] == f"head {key(0)}\nn1 {key(1)}\n[n2]:2200 {key(9)}\n"
    assert str(user.work) not in json.dumps(told["ssh"]) and told["ssh"]["hosts"][0]["host"] == "n1"


def test_the_discovery_script_goes_along_as_text(user, lab):
    user.write("find.sh", "#!/bin/sh\necho n1\n")
    (user.work / "find.sh").chmod(0o755)
    write(user, hosts="[]\n  discovery_script: find.sh", more="nodes: 1\n")
    user.ok("up fleet.yaml -y")
    assert boot(lab)["provider_config"]["script"] == "#!/bin/sh\necho n1\n"


def test_down_cleans_machines_too_that_the_script_names_no_more(user, lab):
    user.write("find.sh", "#!/bin/sh\necho n1\n")
    (user.work / "find.sh").chmod(0o755)
    write(user, hosts="[n1]\n  discovery_script: find.sh", more="nodes: 1\n")
    user.ok("up fleet.yaml -y")
    lab.forgotten = {"n2"}
    user.ok("down -y")
    assert lab.keyed() == []


def test_only_machines_that_the_script_alone_names_are_recorded_as_discovered(user, lab):
    lab.keys["[n2]:2200"] = lab.keys.pop("n2")
    user.write("find.sh", "#!/bin/sh\necho n3\n")
    (user.work / "find.sh").chmod(0o755)
    write(user, hosts=f"[n1, {{host: n2, port: 2200, host_key: '{key(9)}'}}]\n  discovery_script: find.sh",
          more="nodes: 1\n")
    user.ok("up fleet.yaml -y")
    assert json.loads((user.home / "fleets/lab/fleet.json").read_text())["met"] == ["n3"]


def test_a_machine_whose_host_key_nobody_knows_stops_up_before_anything_is_touched(user, lab, monkeypatch):
    monkeypatch.setattr(host_keys.socket, "getaddrinfo", lambda *_: ["an address"])
    write(user, hosts="[n1, n2, stranger]")
    said = user.fails("up fleet.yaml -y", code=3)
    assert "no host key is known of stranger" in said.err and "ssh-keyscan -t ed25519 stranger" in said.err
    assert lab.keyed() == [] and not (user.home / "fleets").exists()


def test_a_machine_that_does_not_answer_is_warned_about_once_and_admitted_by_the_next_up(user, lab):
    lab.away = {"n3"}
    said = user.ok("up fleet.yaml -y")
    assert said.err.count("warning: n3: it does not answer") == 1
    assert lab.keyed() == ["head", "n1", "n2"]
    lab.away = set()
    assert "warning" not in user.ok("up fleet.yaml").err
    assert lab.keyed() == ["head", "n1", "n2", "n3"]


def test_without_the_dispatchers_machine_nothing_is_started(user, lab):
    lab.deaf = {"head"}
    said = user.fails("up fleet.yaml -y", code=3)
    assert "the dispatcher's machine cannot be used: head: it does not answer" in said.err
    assert lab.living() == []


def test_a_dispatchers_machine_that_bears_another_fleets_is_said_to_at_once(user, lab, monkeypatch):
    user.ok("up fleet.yaml -y")
    taken = lab.offers
    monkeypatch.setattr(lab, "offers", lambda need: [o for o in taken(need) if o.zone != "head"])  # it has one host
    user.write("fleet.yaml", (user.work / "fleet.yaml").read_text().replace("name: lab", "name: second"))
    said = user.fails("up fleet.yaml -y", code=3)
    assert "the dispatcher's machine runs lab-d-0 of fleet lab" in said.err
    assert "`spotfleet down lab` frees it" in said.err and "lab-d-0" in lab.living()


def test_with_fewer_machines_than_the_fleet_needs_that_is_said_at_once(user, lab):
    lab.away = {"n2", "n3"}
    said = user.fails("up fleet.yaml -y")
    assert "1 of 3 machines can be used, and nodes.min is 2" in said.err
    assert said.err.count("warning: ") == 2 and lab.living() == []


def test_a_machine_that_has_never_let_the_fleet_in_does_not_keep_down_from_its_end(user, lab):
    lab.away = {"n3"}
    user.ok("up fleet.yaml -y")
    user.ok("up fleet.yaml")
    assert "note: n3: it does not answer; it has never let the fleet in" in user.ok("down -y").err
    assert lab.keyed() == []


def test_a_machine_that_has_let_the_fleet_in_once_must_be_clean_at_the_end(user, lab):
    lab.away = {"n3"}
    user.ok("up fleet.yaml -y")
    lab.away = set()
    user.ok("up fleet.yaml")
    lab.away = {"n3"}
    assert "something of the fleet is still on n3" in user.fails("down -y").err


def test_down_names_the_machine_that_it_could_not_clean_and_ends_once_it_has(user, lab):
    user.ok("up fleet.yaml -y")
    lab.away = {"n2"}
    said = user.fails("down -y")
    assert "something of the fleet is still on n2: it does not answer" in said.err
    assert lab.keyed() == ["n2"] and lab.living() == []
    assert "is going down" in user.fails("up fleet.yaml -y").err
    lab.away = set()
    user.ok("down -y")
    assert lab.keyed() == []
    assert "down already" in user.ok("down -y").err


def test_discard_closes_the_books_and_says_what_may_be_left(user, lab):
    user.ok("up fleet.yaml -y")
    lab.away = {"n2"}
    assert "note: something of the fleet may still be on n2: it does not answer" in user.ok("down -y --discard").err
    assert "down already" in user.ok("down -y").err


def test_a_look_at_a_fleet_that_ended_by_itself_closes_it_only_when_all_machines_are_clean(user, lab):
    user.ok("up fleet.yaml -y")
    next(iter(lab.dispatchers.values())).end_itself()
    lab.away = {"n1"}
    user.fails("status")
    lab.away = set()
    assert "down" in user.ok("status").out and lab.keyed() == []


def test_ways_in_from_the_laptop_may_change_while_the_fleet_is_up_and_its_machines_may_not(user, lab):
    user.ok("up fleet.yaml -y")
    (user.work / "other").touch(mode=0o600)
    write(user, identity="other")
    assert "nothing to change" in user.ok("up fleet.yaml").err
    assert lab.told[-1]["ssh"]["identity_file"] == str(user.work / "other")
    assert "PRIVATE KEY" in json.loads((user.home / "fleets/lab/keys.json").read_text())["ssh_private"]
    write(user, hosts="[n1, n2]")
    said = user.fails("up fleet.yaml", code=2)
    assert "ssh cannot change while it is" in said.err and "spotfleet down lab" in said.err
    assert "a list that changes is what `ssh.discovery_script` is for" in said.err


def test_what_kept_a_machine_from_becoming_the_dispatchers_is_mended_in_the_file_and_up_goes_on(user, lab):
    lab.spoilt = "no Python 3.11 or newer on this machine"
    said = user.fails("up fleet.yaml -y", code=3)
    assert "the dispatcher's machine could not be prepared: no Python 3.11" in said.err
    assert lab.launched() == ["lab-d-0"]
    lab.spoilt = ""
    write(user, more="nodes: {min: 2, target: 3}\nenvironment: {python: /opt/python3.12}\n")
    user.ok("up fleet.yaml -y")
    assert boot(lab)["provider_config"]["environment"]["python"] == "/opt/python3.12"


def test_another_laptop_attaches_with_the_fleets_file(user, lab, monkeypatch, tmp_path):
    user.ok("up fleet.yaml -y")
    first = json.loads((user.home / "fleets/lab/keys.json").read_text())
    monkeypatch.setenv("SPOTFLEET_HOME", str(tmp_path / "other"))
    assert "found by the fleet's file only" in user.fails("attach lab --provider ssh", code=2).err
    (user.work / "mine").touch(mode=0o600)
    write(user, identity="mine")
    user.ok("attach --file fleet.yaml")
    second = json.loads((tmp_path / "other/fleets/lab/keys.json").read_text())
    assert {k: second[k] for k in ("ssh_private", "ssh_public", "admin_token")} == {
        k: first[k] for k in ("ssh_private", "ssh_public", "admin_token")}
    assert lab.told[-1]["ssh"]["identity_file"] == str(user.work / "mine")
    user.ok("down -y")
    assert lab.keyed() == []


def test_leaks_shows_once_what_is_left_on_machines_of_several_fleets_and_takes_its_key_away(user, lab, monkeypatch):
    monkeypatch.setattr(leaks, "FRESH_S", 0.0)
    user.ok("up fleet.yaml -y")
    user.ok("down -y")
    (user.work / "other").touch(mode=0o600)
    write(user, more="nodes: {min: 1, target: 1}\n", identity="other")
    user.write("fleet.yaml", (user.work / "fleet.yaml").read_text().replace("name: lab", "name: second"))
    user.ok("up fleet.yaml -y")
    (offer,) = [o for o in lab.offers(Need(instance_type="machine", use_spot=False)) if o.zone == "n3"]
    lab.launch(LaunchRequest("gone-0", "gone", Role.WORKER, offer, Boot("none")))
    lab.keys["n3"].append("ssh-ed25519 AAAA spotfleet:gone")
    assert user.types("leaks").out.count("gone-0") == 1
    user.ok("leaks --fix -y")
    assert "gone-0" not in lab.living() and not any("spotfleet:gone" in k for k in lab.keys["n3"])
    assert len(lab.living()) == 2 and lab.keyed() == ["head", "n1", "n2", "n3"]


def test_leaks_says_which_machines_do_not_answer_and_looks_at_the_others(user, lab):
    user.ok("up fleet.yaml -y")
    lab.away = {"n3"}
    assert "n3: it does not answer" in user.ok("leaks").err
    lab.away = {"head"}
    assert "was not asked: head: it does not answer" in user.ok("leaks").err


def test_a_fleet_whose_dispatchers_machine_is_away_is_not_down_unless_it_is_given_up(user, lab):
    user.ok("up fleet.yaml -y")
    lab.away = {"head"}
    said = user.fails("down -y")
    assert "the fleet is not down, and its results are not here: head: it does not answer" in said.err
    said = user.ok("down -y --discard")
    assert "note: no results were copied here: head: it does not answer; something of the fleet may" in said.err
    assert lab.keyed() == ["head"]
