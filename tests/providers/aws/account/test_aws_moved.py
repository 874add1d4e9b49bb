"""A laptop that has moved since it was let in: commands that enter machines open the door, where they find it shut."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from spotfleet.api.access import ssh, targets
from spotfleet.model import CloudHost, CloudState, Role, SshAccess
from spotfleet.ssh import keys
from tests.support.aws.aws_hosts import dispatcher
from tests.support.aws.aws_laptop import OFFICE, Laptop, laptop

KEY = keys.pinned(keys.derived_host_key("a secret", "f-d-0").public)


@pytest.fixture
def moved(cloud, tmp_path, monkeypatch) -> Laptop:
    """At home in a fleet whose door lets nobody in."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(targets, "LET_IN_S", 0.3)
    found = laptop(tmp_path / "house", reached=True)
    pair = keys.make("f")
    found.folder.save_keys(replace(found.folder.keys, ssh_private=pair.private, ssh_public=pair.public))
    found.prepare()
    door = rules(cloud)
    cloud.client("ec2", "us-east-1").revoke_security_group_ingress(
        GroupId=door["GroupId"], IpPermissions=[{k: v for k, v in p.items() if v} for p in door["IpPermissions"]])
    cloud.forget_calls()
    return found


def rules(cloud) -> dict:
    named = [{"Name": "group-name", "Values": ["spotfleet-f-door"]}]
    (found,) = cloud.client("ec2", "us-east-1").describe_security_groups(Filters=named)["SecurityGroups"]
    return found


def let_in(cloud) -> list[str]:
    return [net["CidrIp"] for rule in rules(cloud)["IpPermissions"] for net in rule["IpRanges"]]


def enters(found: Laptop, port: int) -> None:
    """The fleet's machines are at this port of ours."""
    asked = dispatcher()
    head = CloudHost("f-d-0", "i-1", "f", Role.DISPATCHER, asked.offer, CloudState.RUNNING, address="10.0.0.1",
                     port=7443, ssh=SshAccess("127.0.0.1", "ubuntu", port, (KEY,)))
    worker = replace(head, request_id="f-0", provider_id="i-2", role=Role.WORKER, port=0,
                     ssh=SshAccess("10.0.0.2", "ubuntu", host_keys=(KEY,), jump=True))
    ssh.refresh(found.folder, [head, worker])


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that drops what comes, as a security group does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        with socket.create_connection(server.getsockname()):  # the only one that there is room for
            yield server.getsockname()[1]


@pytest.mark.parametrize("target", ["", "f", "f-0"], ids=["no name", "the fleet", "a worker"])
def test_whoever_finds_the_door_shut_is_let_in_from_where_he_is(cloud, moved: Laptop, silent: int, target: str):
    enters(moved, silent)
    said: list[str] = []
    assert targets.find_target(moved.house, target, said.append)[1].host == (target if target == "f-0" else "f-d-0")
    assert let_in(cloud) == list(OFFICE)
    assert said == [f"SSH to the dispatcher is let in from {OFFICE[0]}"]


def test_before_all_workers_are_asked_for_too(cloud, moved: Laptop, silent: int, monkeypatch):
    enters(moved, silent)
    monkeypatch.setattr(targets, "_is_current", lambda *_: let_in(cloud) == list(OFFICE))
    assert [way.host for way in targets.workers(moved.folder, print)] == ["f-0"]


@pytest.mark.parametrize("listens", [True, False], ids=["an sshd answers", "the machine refuses"])
def test_where_the_machine_answers_nobody_is_asked(cloud, moved: Laptop, listens: bool):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        enters(moved, port)
        targets.fleet_target(moved.folder, "", print)
    assert cloud.calls == []
