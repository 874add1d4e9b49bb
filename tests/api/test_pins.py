"""Which host keys machines over SSH must show, from the fleet file and the user's known_hosts."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest

from spotfleet.api.lifecycle.host_keys import pinned
from spotfleet.errors import NeedsPerson
from spotfleet.providers.ssh.section.spec import SshMachine, SshSpec
from spotfleet.ssh.known_hosts import known_keys


def key(byte: int, kind: str = "ssh-ed25519") -> str:
    blob = len(kind).to_bytes(4, "big") + kind.encode() + (32).to_bytes(4, "big") + bytes([byte] * 32)
    return f"{kind} {base64.b64encode(blob).decode()}"


A, B, C = key(1), key(2), key(3)


def spec(*hosts: SshMachine, port: int = 22, script: str = "", known: str = "") -> SshSpec:
    return SshSpec(SshMachine("head", host_key=A), hosts, port=port, discovery_script=script, known_hosts=known)


@pytest.mark.parametrize(("text", "host", "port", "found"), [
    (f"node1 {A}\nnode1 {B} a comment\nnode2 {C}", "node1", 22, [A, B]),
    (f"node1,10.0.0.7 {A}", "10.0.0.7", 22, [A]),
    (f"[node1]:2222 {A}\nnode1 {B}", "node1", 2222, [A]),
    (f"[node1]:2222 {A}\nnode1 {B}", "node1", 22, [B]),
    (f"[fd00::1]:2222 {A}\nfd00::1 {B}", "fd00::1", 2222, [A]),
    (f"[fd00::1]:2222 {A}\nfd00::1 {B}", "fd00::1", 22, [B]),
    (f"NODE1 {A}", "node1", 22, [A]),
    (f"node* {A}", "node17", 22, [A]),
    (f"node*,!node17 {A}", "node17", 22, []),
    (f"# node1 {A}\n\nnode1\nnode1 ssh-dss AAAA\n@cert-authority node1 {B}", "node1", 22, []),
    (f"node1 {A}\n@revoked * {A}\nnode1 {B}", "node1", 22, [B]),
    (f"n {A}", "node1", 22, []),
])
def test_a_machine_is_looked_up_as_sshd_says(text, host, port, found):
    assert known_keys(text, host, port) == found


@pytest.mark.parametrize(("host", "port"), [("node1", 22), ("node1", 2222), ("fd00::1", 22), ("fd00::1", 2200)])
def test_a_name_that_ssh_keygen_has_hashed_is_found(tmp_path: Path, host, port):
    file = tmp_path / "known"
    name = host if port == 22 else f"[{host}]:{port}"
    file.write_text(f"other {B}\n{name} {A}\n")
    subprocess.run(["ssh-keygen", "-H", "-f", file], check=True, capture_output=True)
    assert name not in file.read_text()
    assert known_keys(file.read_text(), host, port) == [A]
    assert known_keys(file.read_text(), host, port + 1) == []


def test_every_machine_gets_its_keys_those_of_the_file_first():
    found = pinned(spec(SshMachine("node1"), SshMachine("node2", port=2200, host_key=B), port=2222),
                   f"[node1]:2222 {C}\n[node2]:2200 {A}\n[head]:2222 {B}\n")
    assert found == f"[head]:2222 {A}\n[node1]:2222 {C}\n[node2]:2200 {B}\n"


def test_with_a_discovery_script_all_that_is_known_goes_along():
    known = f"later {C}\nnode1 {B}\n"
    assert pinned(spec(SshMachine("node1"), script="/f"), known) == f"head {A}\nnode1 {B}\n{known}"


def test_machines_without_a_key_are_named_with_the_way_to_pin_one():
    with pytest.raises(NeedsPerson) as raised:
        pinned(spec(SshMachine("node1"), SshMachine("node2"), SshMachine("node3", host_key=B), port=2200), "",
               lambda _host: True)
    assert str(raised.value) == ("ssh: no host key is known of [node1]:2200, [node2]:2200, and none is trusted on "
                                 "first use")
    assert raised.value.hint == (
        "`ssh-keyscan -p 2200 -t ed25519 node1 node2` prints what answers; compare it with "
        "/etc/ssh/ssh_host_ed25519_key.pub on the machine itself (its console, its owner), then add the line to "
        "~/.ssh/known_hosts, or write `host_key:` in the fleet file")


def test_a_name_without_an_address_is_named_as_such_and_not_as_a_missing_key():
    with pytest.raises(NeedsPerson) as raised:
        pinned(spec(SshMachine("node1"), SshMachine("nosuch")), "", lambda host: host == "node1")
    assert str(raised.value) == "ssh: nosuch cannot be resolved to an address here, and no host key of it is known"
    assert "ssh-keyscan" not in raised.value.hint
