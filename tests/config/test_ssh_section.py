"""What a fleet file may say of machines over SSH and of their Python, and what is said about one that is wrong."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from spotfleet.codec import to_json
from spotfleet.config import load, parse
from spotfleet.config.machine_values import line
from spotfleet.errors import UsageError
from spotfleet.model import EnvironmentSpec, FleetSpec, Need, Nodes
from spotfleet.providers.ssh.section.spec import SshMachine, SshSpec, parsed

FILE = Path("/work/fleet.yaml")
KEY = "ssh-ed25519 " + base64.b64encode(
    (11).to_bytes(4, "big") + b"ssh-ed25519" + (32).to_bytes(4, "big") + bytes(range(32))).decode()
HEAD = "provider: ssh\nssh:\n  dispatcher: head\n"


def spec(text: str) -> FleetSpec:
    return parse(text, FILE, {}).spec


def problems(text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        parse(text, FILE, {})
    lines = [one.strip() for one in str(caught.value).splitlines()]
    return [one.removeprefix(f"{FILE}:") for one in lines[1 if len(lines) > 1 else 0:]]


def test_a_full_file_becomes_a_spec():
    assert spec(f"""
provider: ssh
nodes: {{min: 2, target: 4}}
ssh:
  user: ubuntu
  port: 2200
  identity_file: keys/id
  dispatcher: {{host: head, address: 10.1.0.1, host_key: "{KEY} root@head"}}
  hosts:
    - node1
    - node2:8
    - "[fd00::1]:8"
    - {{host: 10.0.0.7, port: 2222, user: root, slots: 4, accelerator: A100, host_key: "10.0.0.7 {KEY}",
       address: 10.1.0.7, hourly_cost: 1.20, folder: /scratch/sf/}}
  discovery_script: find.sh
  discovery_timeout: 30s
  known_hosts: known
  folder: ~/ours
environment: {{python: /usr/bin/python3.11, packages: [torch==2.13.0], inherit: true,
  index_url: "https://pypi.example.com/simple", installer: pip}}
""") == FleetSpec(
        name="fleet", provider="ssh", workdir="/work", nodes=Nodes(2, 4, 4),
        any_of=(Need(instance_type="machine", use_spot=False),),
        dispatcher=Need(instance_type="dispatcher", use_spot=False),
        environment=EnvironmentSpec("/usr/bin/python3.11", ("torch==2.13.0",), True,
                                    "https://pypi.example.com/simple", "pip"),
        section=to_json(SshSpec(
            dispatcher=SshMachine("head", address="10.1.0.1", host_key=KEY),
            hosts=(SshMachine("node1"), SshMachine("node2", 8), SshMachine("fd00::1", 8),
                   SshMachine("10.0.0.7", 4, 2222, "root", KEY, "10.1.0.7", "A100", 1_200_000, "/scratch/sf")),
            user="ubuntu", port=2200, identity_file="/work/keys/id", known_hosts="/work/known",
            discovery_script="/work/find.sh", discovery_timeout_s=30.0, folder="~/ours")),
    )


@pytest.mark.parametrize(("given", "expected"), [
    ("node1", ("node1", 1)), (" node2:8\n", ("node2", 8)), ("10.0.0.7:2", ("10.0.0.7", 2)), ("fd00::1", ("fd00::1", 1)),
    ("[fd00::1]", ("fd00::1", 1)), ("[FD00:0::1]:8", ("fd00::1", 8)), ("gpu-01.rack_2.example:4",
                                                                     ("gpu-01.rack_2.example", 4)),
])
def test_a_line_names_a_machine_and_its_slots(given, expected):
    assert line(given) == expected


@pytest.mark.parametrize("given", ["", "a b", "-oProxyCommand=x", "a:b", "a:", "a:0", "[fd00::1", "[zz::1]:2", "a;b",
                                   "fe80::1%eth0", "u@a", "$(x)", "a\nb"])
def test_a_line_that_is_no_machine_is_refused(given):
    with pytest.raises(ValueError, match="expected"):
        line(given)


def test_two_sshds_at_one_address_are_two_machines():
    found = spec(HEAD + "  hosts: [a, {host: a, port: 2222}, {host: head, port: 2222}]").section
    assert [(m.host, m.port) for m in parsed(found).hosts] == [("a", 0), ("a", 2222), ("head", 2222)]


def test_without_nodes_all_machines_of_the_list_are_wanted():
    assert spec(HEAD + "  hosts: [a, b, c]").nodes == Nodes(1, 3, 3)
    assert spec(HEAD + "  hosts: [a, b, c]\nnodes: 2").nodes == Nodes(2, 2, 2)
    assert spec(HEAD + "  discovery_script: f\nnodes: 2..9").nodes == Nodes(2, 9, 9)


@pytest.mark.parametrize(("text", "said"), [
    ("provider: ssh", "1: ssh: is missing: it lists the machines, such as `ssh: {dispatcher: head, "
                      "hosts: [node1, node2:8]}`"),
    ("provider: ssh\nssh: {dispatcher: a, hosts: [b]}\nreplace_slow: true",
     "3: replace_slow: the machines of ssh are given, and none can be launched in the place of a slow one; remove "
     "this"),
    ("name: a\nssh: {dispatcher: a, hosts: [b]}", "2: ssh: is for provider ssh, but the fleet's is 'local'; write "
                                                  "`provider: ssh`, or remove the section"),
    ("provider: ssh\nssh:\n  hosts: [a]", "2: ssh.dispatcher: is missing: the machine that runs the dispatcher, and "
                                          "no workers; any small one that all others can reach"),
    (HEAD, "2: ssh.hosts: lists no machine; write `hosts: [node1, node2:8]`, or name a `discovery_script` that prints "
           "such lines"),
    (HEAD + "  hosts:\n  - a\n  - b\n  - A:2", "7: ssh.hosts[2]: A is in the list already; its workers are counted by "
                                               "its `slots`"),
    (HEAD + "  port: 2200\n  hosts:\n  - a\n  - {host: a, port: 2200}",
     "7: ssh.hosts[1]: a is in the list already; its workers are counted by its `slots`"),
    (HEAD + "  hosts:\n  - a\n  - head", "6: ssh.hosts[1]: head runs the dispatcher, and so no workers; remove it "
                                         "here, or name another machine under `ssh.dispatcher`"),
    (HEAD + "  hosts:\n  - a:0", "5: ssh.hosts[0]: expected slots, a whole number of at least 1: room for so many "
                                 "workers, one for each GPU, got 0"),
    (HEAD + "  hosts:\n  - a\n  - {host: b, slots: no}",
     "6: ssh.hosts[1].slots: expected slots, a whole number of at least 1: room for so many workers, one for each GPU, "
     "got False"),
    (HEAD + "  hosts: [a:2222]", "4: ssh.hosts[0]: expected at most 256 slots, got 2222; a port is written "
                                 "{host: NAME, port: NUMBER}"),
    (HEAD + "  hosts: [root@a]", "4: ssh.hosts[0]: expected the name or the address of a machine, got 'root@a'; write "
                                 "{host: a, user: root}"),
    (HEAD + "  hosts: a", "4: ssh.hosts: expected a list of machines such as [node1, node2:8], got 'a'"),
    (HEAD + "  hosts:\n  - {slots: 2}", "5: ssh.hosts[0]: host is missing: the name or the address of the machine"),
    (HEAD + "  hosts:\n  - 7", "5: ssh.hosts[0]: expected HOST, HOST:SLOTS, or {host: HOST, slots: 8, port: 22, "
                               "user: ...}, got 7"),
    (HEAD + "  hosts:\n  - {host: a, slotz: 2}", "5: ssh.hosts[0].slotz: unknown key; did you mean 'slots'?"),
    (HEAD + "  hosts: [a]\n  identity: x", "5: ssh.identity: unknown key; did you mean 'identity_file'?"),
    ("provider: ssh\nssh: {dispatcher: a:2, hosts: [b]}",
     "2: ssh.dispatcher: the dispatcher's machine runs no workers, so it has no slots; remove them"),
    (HEAD + "  hosts: [a]\nnodes:\n  min: 2", "6: nodes.min: asks for 2 hosts, but ssh.hosts lists 1; list more "
                                              "machines, or ask for fewer"),
    (HEAD + "  hosts: [a]\nnum_nodes: 2", "5: num_nodes: asks for 2 hosts, but ssh.hosts lists 1; list more "
                                          "machines, or ask for fewer"),
    (HEAD + "  discovery_script: f", "1: nodes: is missing: write how many of the machines that the script finds shall "
                                     "work, such as `nodes: 1..8`"),
    (HEAD + "  hosts:\n  - {host: a, address: ib0}",
     "5: ssh.hosts[0].address: expected an IP address of one of the machine's own interfaces, such as 10.1.0.7 or "
     "fd00::7, got 'ib0'"),
    (HEAD + "  hosts: [a]\n  port: 0", "5: ssh.port: expected a port, 1 to 65535, got 0"),
    (HEAD + "  hosts: [a]\n  user: a b", "5: ssh.user: expected the name of a user on the machine, got 'a b'"),
    (HEAD + "  hosts: [a]\n  folder: /", "5: ssh.folder: expected a folder of our own on the machine, such as "
                                         "~/.spotfleet-host or /scratch/spotfleet, got '/'"),
    (HEAD + "  hosts: [a]\n  discovery_timeout: 5",
     "5: ssh.discovery_timeout: expected a duration such as \"90s\", \"10m\" or \"2h\", got 5; write \"5s\""),
    (HEAD + "  hosts: [a]\ndispatcher: {zone: x}", "5: dispatcher.zone: means nothing for machines over SSH; name the "
                                                   "machine under `ssh.dispatcher`"),
    (HEAD + "  hosts: [a]\nresources:\n  use_spot: true", "6: resources.use_spot: machines over SSH are on no spot "
                                                          "market; remove this"),
    (HEAD + "  hosts: [a]\ninterruption_behavior: stop", "5: interruption_behavior: machines over SSH are never "
                                                         "stopped; remove this"),
    ("environment: {python: python3.11}", "1: environment: means nothing for provider local, whose hosts use the "
                                          "Python that runs spotfleet; remove it"),
    (HEAD + "  hosts: [a]\nenvironment: {packages: torch}",
     "5: environment.packages: expected a list of requirements such as [torch==2.13.0], got 'torch'"),
    (HEAD + "  hosts: [a]\nenvironment: {packages: [--pre]}",
     "5: environment.packages: expected a list of requirements such as [torch==2.13.0], got '--pre'; options of pip "
     "have no place here"),
    (HEAD + "  hosts: [a]\nenvironment: {installer: conda}",
     "5: environment.installer: expected auto or uv or pip, got 'conda'"),
    (HEAD + "  hosts: [a]\nenvironment: {index_url: \"https://me:hunter22@x/simple\"}",
     "5: environment.index_url: expected the URL of a package index, such as https://pypi.example.com/simple, without "
     "a user and a password: they would be written down; keep them in the machine's netrc or pip.conf"),
    (HEAD + "  hosts: [a]\nenvironment: {pyton: x}", "5: environment.pyton: unknown key; did you mean 'python'?"),
])
def test_a_wrong_file_names_line_key_and_fix(text, said):
    assert problems(text) == [said]


@pytest.mark.parametrize(("given", "more"), [
    ("nonsense", ""), ("ssh-ed25519", ""), ("ssh-ed25519 AAA", "its second word is not base64: is it cut off?"),
    (KEY.replace("ed25519 ", "rsa "), "its second word holds no ssh-rsa key"),
    ("SHA256:abc", "a fingerprint is not enough"),
])
def test_what_is_no_host_key_is_refused(given, more):
    (said,) = problems(HEAD + f"  hosts:\n  - {{host: a, host_key: '{given}'}}")
    assert said.startswith("5: ssh.hosts[0].host_key: expected a public host key such as \"ssh-ed25519 AAAA...\"")
    assert said.endswith(more)


def test_files_on_this_machine_must_be_there_and_of_use(tmp_path):
    file = tmp_path / "fleet.yaml"
    file.write_text("provider: ssh\nnodes: 1\nssh:\n  dispatcher: head\n  identity_file: id\n  known_hosts: known\n"
                    "  discovery_script: find.sh\n")

    def said() -> list[str]:
        with pytest.raises(UsageError) as caught:
            load(file, {})
        return [one.rpartition("fleet.yaml:")[2].strip() for one in str(caught.value).splitlines()][-3:]

    assert said() == [f"5: ssh.identity_file: expected a file, but there is none at {tmp_path}/id",
                      f"6: ssh.known_hosts: expected a file, but there is none at {tmp_path}/known",
                      f"7: ssh.discovery_script: expected a file, but there is none at {tmp_path}/find.sh"]
    for name in ("id", "known", "find.sh"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o644)  # whatever the umask is
    assert said()[-2:] == [
        f"5: ssh.identity_file: {tmp_path}/id can be read by others, and ssh refuses such keys; `chmod 600 "
        f"{tmp_path}/id`",
        f"7: ssh.discovery_script: {tmp_path}/find.sh is not executable; `chmod +x {tmp_path}/find.sh`"]
    (tmp_path / "id").chmod(0o600)
    (tmp_path / "find.sh").chmod(0o755)
    assert parsed(load(file, {}).spec.section).identity_file == str(tmp_path / "id")
