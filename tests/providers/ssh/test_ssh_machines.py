"""Which machines there are, what they offer and how they are entered."""

from __future__ import annotations

import json

import pytest

from spotfleet.codec import to_json
from spotfleet.model import Market, Need, Offer, Role, SshAccess
from spotfleet.providers import UNLISTED
from spotfleet.providers.ssh import SshProvider
from spotfleet.providers.ssh.diagnosis import Diagnosis, MachineError
from spotfleet.providers.ssh.inventory import MachineInventory
from spotfleet.providers.ssh.machines import ResolvedMachine, machines, offers
from spotfleet.providers.ssh.section.spec import SshMachine, SshSpec
from spotfleet.providers.ssh.transport import CommandResult
from spotfleet.ssh.known_hosts import known_keys

KEY, OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA", "ssh-rsa AAAAB3NzaC1yc2E"
HEAD = SshMachine("head", host_key=KEY)
SPEC = SshSpec(HEAD, (SshMachine("gpu1", 8, accelerator="A100", price_micros_h=9), SshMachine("gpu2", 8)), user="ann")


def named(spec: SshSpec, discovered=(), known: str = "") -> list[str]:
    return [m.name for m in machines(spec, discovered, known, "me")]


def test_what_the_fleet_file_leaves_open_is_filled_in():
    head, first, second = machines(SPEC, (), f"gpu1 {KEY}\ngpu1 {OTHER}\n", "me")
    assert head == ResolvedMachine("head", "head", 22, "ann", "~/.spotfleet-host", Role.DISPATCHER, host_keys=(KEY,))
    assert first == ResolvedMachine("gpu1", "gpu1", 22, "ann", "~/.spotfleet-host", Role.WORKER, 8, "", "A100", 9,
                                    (KEY, OTHER))
    assert second.host_keys == ()
    (alone,) = machines(SshSpec(hosts=(SshMachine("h", user="bob", port=2222, folder="/data/x"),)), (), "", "me")
    assert (alone.user, alone.port, alone.root) == ("bob", 2222, "/data/x")
    assert machines(SshSpec(hosts=(SshMachine("h"),)), (), "", "me")[0].user == "me"


def test_a_machine_is_named_by_its_host_and_by_its_port_where_that_is_unusual():
    spec = SshSpec(HEAD, (SshMachine("a"), SshMachine("a", port=2222), SshMachine("fd00::1", port=2222)))
    assert named(spec) == ["head", "a", "[a]:2222", "[fd00::1]:2222"]


def test_the_script_adds_machines_and_the_list_says_more_about_those_that_it_names_too():
    found = machines(SPEC, [("gpu3", 4), ("gpu1", 2), ("head", 1)], f"gpu3 {KEY}\n", "me")
    assert [(m.name, m.role, m.slots) for m in found] == [
        ("head", Role.DISPATCHER, 1), ("gpu1", Role.WORKER, 8), ("gpu2", Role.WORKER, 8), ("gpu3", Role.WORKER, 4)]
    assert found[-1].host_keys == (KEY,)


class Connection:
    """A machine where every script succeeds, or that does not answer: "[a]:2222", by way of the dispatcher's."""

    def __init__(self, machine: ResolvedMachine) -> None:
        self.machine = machine

    def run(self, text: str) -> CommandResult:
        if self.machine.name == "[a]:2222":
            raise MachineError("head", Diagnosis("it forwards nothing", "see its sshd_config"))
        return CommandResult(0, "", "")

    def close(self) -> None:
        """Nothing is open. Every inventory of the process is closed after the tests of another file."""


def test_machines_that_fail_are_named_as_in_the_list_each_with_the_reason(monkeypatch):
    monkeypatch.setattr(MachineInventory, "_made", lambda _self, machine: Connection(machine))
    spec = to_json(SshSpec(HEAD, (SshMachine("a"), SshMachine("a", port=2222))))
    provider = SshProvider({"ssh": json.dumps(spec), "script": "#!/bin/sh\nexit 3\n"})
    failed = {"[a]:2222": "head, on the way to it: it forwards nothing (see its sshd_config)"}
    assert set(provider.machines()) == {"head", "a", "[a]:2222"}
    assert provider.install_key("f", "ssh-ed25519 AAAA") == failed
    left = provider.remove_fleet("f")
    assert left.pop(UNLISTED).startswith("the discovery script ended with status 3") and left == failed


def sold(need: Need) -> list[Offer]:
    return offers(machines(SPEC, (), "", "me"), need)


def test_each_machine_is_a_pool_of_its_own_cheapest_first():
    assert sold(Need(use_spot=False)) == [
        Offer("ssh", "ssh", "gpu2", "machine", Market.ON_DEMAND, 8, 0, 0, room=1),
        Offer("ssh", "ssh", "gpu1", "machine", Market.ON_DEMAND, 8, 9, 9, "A100", room=1)]


@pytest.mark.parametrize("need, zones", [
    (Need(use_spot=False, instance_type="dispatcher"), ["head"]),
    (Need(use_spot=False, instance_type="machine"), ["gpu2", "gpu1"]),
    (Need(use_spot=False), ["gpu2", "gpu1"]),
    (Need(use_spot=True), []),
    (Need(use_spot=True, instance_type="dispatcher"), []),
    (Need(use_spot=False, accelerator="a100"), ["gpu1"]),
    (Need(use_spot=False, accelerator="A100", accelerator_count=8), ["gpu1"]),
    (Need(use_spot=False, accelerator="A100", accelerator_count=4), []),
    (Need(use_spot=False, zone="gpu2"), ["gpu2"]),
    (Need(use_spot=False, max_micros_h=8), ["gpu2"]),
])
def test_a_need_gets_the_machines_that_it_describes_and_workers_never_the_dispatchers(need, zones):
    assert [o.zone for o in sold(need)] == zones


def test_a_door_names_all_that_a_way_in_needs():
    head, first, _ = machines(SPEC, (), f"gpu1 {KEY}\n", "me")
    assert head.access(jump=False) == SshAccess("head", "ann", 22, (KEY,), jump=False)
    assert first.access(jump=True) == SshAccess("gpu1", "ann", 22, (KEY,), jump=True)


HASHED = "|1|5uC2Hj4NUAuha+XyiX3AsNYtXE4=|5xdo0pYx6QQfnYknAMp78SHdZi8="  # hash of [node]:2222, by ssh-keygen -H


@pytest.mark.parametrize("line, keys", [
    (f"node {KEY} comment", []),
    (f"[node]:2222 {KEY}", [KEY]),
    (f"other,[node]:2222 {KEY}", [KEY]),
    (f"[NODE]:2222 {KEY}", [KEY]),
    (f"[no*]:2222 {KEY}", [KEY]),
    (f"[no*]:2222,![node]:2222 {KEY}", []),
    (f"@cert-authority * {KEY}", []),
    (f"[node]:2222 {KEY}\n[node]:2222 {OTHER}\n@revoked [node]:2222 {KEY}", [OTHER]),
    (f"# [node]:2222 {KEY}", []),
    (f"|1|bad {KEY}", []),
    (f"{HASHED} {KEY}", [KEY]),
    ("[node]:2222 ssh-dss AAAA", []),
])
def test_known_hosts_are_read_as_sshd_8_says(line, keys):
    assert known_keys(line, "node", 2222) == keys
