"""What is wrong with a machine is said in words that help, soon, and the other machines go on."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import paramiko
import pytest

from spotfleet.errors import NeedsPerson, NoCapacity
from spotfleet.model import CloudState, Market, Need, Offer, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.ssh import SshProvider, diagnosis, poller, transport
from spotfleet.providers.ssh.diagnosis import Diagnosis
from spotfleet.providers.ssh.section.spec import SshSpec
from tests.support.ssh_provider.sshd_machines import Machines, idle_hosts, user, wait

pytestmark = pytest.mark.processes

WORKERS = 2
BOUND_S = 30.0  # on a busy machine; it is about four where nobody says a word, and less elsewhere


def offer_of(machines: Machines, name: str) -> Offer:
    return Offer("ssh", "ssh", machines.zone(name), "machine", Market.ON_DEMAND, 1, 0, 0)


def launch(provider: SshProvider, offer: Offer, request_id: str = "f-1", role: Role = Role.WORKER) -> None:
    provider.launch(LaunchRequest(request_id, "f", role, offer, Boot("idle", {"boot.json": "{}"})))


def changed(machines: Machines, **more: object) -> SshSpec:
    """The fleet file with this about w0."""
    spec = machines.spec()
    return replace(spec, hosts=(replace(spec.hosts[0], **more), spec.hosts[1]))


def new_key(machines: Machines) -> SshSpec:
    machines["w0"].stop()
    spec = machines.spec()
    machines["w0"].new_host_key()
    machines["w0"].start()
    return spec


def stopped(machines: Machines) -> SshSpec:
    machines["w0"].stop()
    return machines.spec()


def hangs(machines: Machines) -> SshSpec:
    machines["w0"].hang()
    return machines.spec()


def forced(machines: Machines) -> SshSpec:
    keys = machines["w0"].keys_file
    keys.write_text("".join(f'command="echo This account is for backups" {k}\n' for k in keys.read_text().splitlines()))
    return machines.spec()


def no_files(machines: Machines) -> SshSpec:
    machines["w0"].stop()
    machines["w0"].more = "Subsystem sftp /bin/false"
    machines["w0"].start()
    return machines.spec()


def chatty(machines: Machines) -> SshSpec:
    machines["w0"].stop()
    machines["w0"].more = "Subsystem sftp echo Welcome to this node"  # as a ~/.bashrc does it
    machines["w0"].start()
    return machines.spec()


def in_the_way(machines: Machines) -> SshSpec:
    machines["w0"].root.write_text("a file")
    return machines.spec()


CASES: dict[str, tuple[Callable[[Machines], SshSpec], str]] = {
    "changed host key": (new_key, "its host key has changed: it shows ssh-ed25519 SHA256:"),
    "unknown host key": (lambda m: changed(m, host_key=""), "its host key is not pinned, and none is trusted on first"),
    "damaged host key": (lambda m: changed(m, host_key="ssh-ed25519 AAAAC3NzaC1"), "its host key is not pinned"),
    "wrong user": (lambda m: changed(m, user="nobody"), "its sshd refuses user 'nobody' with the fleet's key"),
    "nobody listens": (stopped, "it runs no sshd at port "),
    "accepts and hangs": (hangs, "something accepts connections at port "),
    "forced command": (forced, "does not run our commands; it prints: This account is for backups"),
    "no SFTP": (no_files, "it takes no files over SFTP"),
    "a shell that prints": (chatty, "its login shell prints something before we can bring files"),
    "a file in the way": (in_the_way, "is no folder there"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_machine_that_cannot_be_used_is_refused_with_the_reason_and_the_rest_goes_on(case, machines, monkeypatch):
    idle_hosts(monkeypatch)
    make, said = CASES[case]
    spec = make(machines)
    provider = SshProvider(machines.config(spec, side="dispatcher"))
    offers = provider.offers(Need(use_spot=False))
    bad = next(o for o in offers if o.zone == machines.zone("w0"))
    began = time.monotonic()
    with pytest.raises(NoCapacity) as caught:
        launch(provider, bad)
    assert time.monotonic() - began < BOUND_S
    assert caught.value.scope == "pool" and said in str(caught.value) and str(caught.value).startswith(f"{bad.zone}: ")
    launch(provider, offer_of(machines, "w1"), "f-2")
    assert [(h.request_id, h.state) for h in provider.hosts("f")] == [("f-2", CloudState.RUNNING)]
    assert machines["w0"].hosts() == [] and not (machines["w0"].root / "claim").exists()


@pytest.mark.parametrize(("case", "request_name"), [
    ("forced command", "exec_command"), ("no SFTP", "invoke_subsystem"), ("a shell that prints", "invoke_subsystem")])
def test_what_a_machine_says_before_it_hangs_up_is_heard_though_we_are_late(case, request_name, machines, monkeypatch):
    make, said = CASES[case]
    spec = make(machines)
    ask = getattr(paramiko.Channel, request_name)

    def late(channel: paramiko.Channel, *more: str) -> None:
        ask(channel, *more)
        if channel.getpeername()[1] == machines["w0"].port:
            wait("it hangs up", lambda: channel.closed)

    monkeypatch.setattr(paramiko.Channel, request_name, late)
    with pytest.raises(NoCapacity) as caught:
        launch(SshProvider(machines.config(spec, side="dispatcher")), offer_of(machines, "w0"))
    assert said in str(caught.value)


def test_a_host_key_that_is_not_pinned_is_shown_with_the_line_that_pins_it(machines):
    provider = SshProvider(machines.config(changed(machines, host_key=""), side="dispatcher"))
    with pytest.raises(NoCapacity) as caught:
        launch(provider, offer_of(machines, "w0"))
    key = machines["w0"].host_key
    assert f"if they are the same, write `host_key: {key}` for it in the fleet file" in str(caught.value)
    pinned = SshProvider(machines.config(changed(machines, host_key=key), side="dispatcher"))
    assert machines.zone("w0") in [o.zone for o in pinned.offers(Need(use_spot=False))]


def test_a_machine_without_python_or_with_an_old_one_is_refused_before_anything_is_left_on_it(machines, tmp_path):
    old = tmp_path / "python3.7"
    old.write_text("#!/bin/sh\necho 3.7 0\n")
    old.chmod(0o755)
    for python, said in ((str(tmp_path / "none"), f"it has no {tmp_path / 'none'} (install Python 3.11 or newer there"),
                         (str(old), f"its {old} is Python 3.7, and 3.11 or newer is needed")):
        told = {**machines.config(side="dispatcher"), "environment": f'{{"python": "{python}"}}'}
        with pytest.raises(NoCapacity) as caught:
            launch(SshProvider(told), offer_of(machines, "w0"))
        assert said in str(caught.value)
        assert machines["w0"].holds() in ([], [".spotfleet-host"])
        assert [line for line in SshProvider(told).problems() if said in line]  # as long as nothing better is known


def test_the_dispatchers_machine_needs_a_person(machines):
    machines["head"].stop()
    machines["head"].new_host_key()
    spec = machines.spec()
    machines["head"].new_host_key()
    machines["head"].start()
    provider = SshProvider(machines.config(spec))
    for ask in (provider.check, lambda: launch(
            provider, replace(offer_of(machines, "head"), instance_type="dispatcher"), "f-d-0", Role.DISPATCHER)):
        with pytest.raises(NeedsPerson, match="its host key has changed") as caught:
            ask()
        assert "ssh-keygen -R" in caught.value.hint


def test_on_the_laptop_the_machine_between_is_held_to_its_pinned_key_too(machines):
    spec = machines.spec()
    machines["head"].stop()
    machines["head"].new_host_key()
    machines["head"].start()
    through = transport.SshTransport(_machine(spec, "head", machines),
                                     transport.Keyring(identity=str(machines.identity)))
    behind = transport.SshTransport(_machine(spec, "w0", machines), transport.Keyring(identity=str(machines.identity)),
                                    through)
    with pytest.raises(diagnosis.MachineError, match="its host key has changed"):
        through.transport()
    assert behind.run("echo there").out == "there\n"  # past it: w0 can be reached directly, and shows the pinned key
    behind.close()


def test_the_end_of_the_machine_between_is_trouble_and_no_error_of_ours(machines):
    spec = machines.spec()
    through = transport.SshTransport(_machine(spec, "head", machines),
                                     transport.Keyring(identity=str(machines.identity)))
    behind = transport.SshTransport(_machine(spec, "w0", machines), transport.Keyring(identity=str(machines.identity)),
                                    through)
    assert behind.run("echo there").out == "there\n"
    through.transport().packetizer.close()  # its connection has just broken, and nobody has noticed
    behind.close()
    through.close()


def _machine(spec: SshSpec, name: str, machines: Machines):
    from spotfleet.providers.ssh.machines import machines as list_machines

    return next(m for m in list_machines(spec, (), "", user()) if m.name == machines.zone(name))


def test_a_machine_behind_the_dispatchers_is_entered_through_it(machines):
    provider = SshProvider(machines.config())
    assert len(provider.offers(Need(use_spot=False))) == 2
    assert {s.laddr for p in machines["head"].sessions() for s in p.net_connections("tcp")} >= {
        (machines["head"].address, machines["head"].port)}
    ends = {c.raddr for p in machines["head"].sessions() for c in p.net_connections("tcp") if c.raddr}
    assert {(machines[n].address, machines[n].port) for n in ("w0", "w1")} <= ends


def test_a_machine_in_trouble_is_waited_for_once_and_then_looked_at_beside_the_others(machines, monkeypatch):
    idle_hosts(monkeypatch)
    monkeypatch.setattr(poller, "BACKOFF_S", 0.0)  # somebody is always looking
    provider = SshProvider(machines.config(side="dispatcher"))
    launch(provider, offer_of(machines, "w1"))
    monkeypatch.setattr(transport, "BANNER_S", 4.0)  # the other machine has been entered
    machines["w0"].hang()
    provider.hosts("f")
    began = time.monotonic()
    for _ in range(8):
        assert [h.request_id for h in provider.hosts("f")] == ["f-1"]
    assert time.monotonic() - began < 8 * transport.BANNER_S / 2


def test_a_frozen_machine_holds_up_a_listing_once_and_its_neighbours_are_listed(machines, monkeypatch):
    idle_hosts(monkeypatch)
    monkeypatch.setattr(poller, "BACKOFF_S", 0.05)
    monkeypatch.setattr(poller, "AWAY_S", 0.3)
    provider = SshProvider(machines.config(side="dispatcher"))
    launch(provider, offer_of(machines, "w0"))
    launch(provider, offer_of(machines, "w1"), "f-2")
    assert states(provider) == {"f-1": "running", "f-2": "running"}
    monkeypatch.setattr(poller, "POLL_S", 3.0)
    monkeypatch.setattr(transport, "BANNER_S", 0.3)  # both have been entered, and the other one answers in time
    machines["w0"].freeze()
    wait("it is believed", lambda: states(provider) == {"f-1": "stopped", "f-2": "running"})
    monkeypatch.setattr(transport, "BANNER_S", BOUND_S)  # it is entered anew
    machines["w0"].thaw()
    wait("it is back", lambda: states(provider) == {"f-1": "running", "f-2": "running"})


def states(provider: SshProvider) -> dict[str, str]:
    return {h.request_id: h.state.value for h in provider.hosts("f")}


def test_a_machine_in_trouble_is_offered_until_somebody_has_heard_why_not_and_again_when_it_is_well(machines,
                                                                                                    monkeypatch):
    monkeypatch.setattr(poller, "BACKOFF_S", 0.1)
    provider = SshProvider(machines.config(side="dispatcher"))
    machines["w0"].stop()

    def zones() -> list[str]:
        return [o.zone for o in provider.offers(Need(use_spot=False))]

    assert machines.zone("w0") in zones()
    with pytest.raises(NoCapacity, match="it runs no sshd"):
        launch(provider, offer_of(machines, "w0"))
    assert zones() == [machines.zone("w1")]
    machines["w0"].start()
    wait("it is offered again", lambda: machines.zone("w0") in zones())


@pytest.mark.parametrize("error, told", [
    (ConnectionRefusedError(errno.ECONNREFUSED, "x"), Diagnosis(
        "it runs no sshd at port 2200", "start sshd there, or correct `port` in the fleet file", away=True)),
    (OSError(errno.EHOSTUNREACH, "x"), Diagnosis(
        "there is no route to it", "is it switched on, and on a network that this machine reaches?", away=True)),
    (TimeoutError("x"), Diagnosis(
        "it does not answer", "is it switched on, and does a firewall let us through to port 2200?", away=True)),
    (socket.gaierror(-2, "Name or service not known"), Diagnosis(
        "the name node is not known here", "correct it in the fleet file, or write its address", away=True)),
    (EOFError(), Diagnosis("the connection broke: EOFError", "it is tried again", away=True, broken=True)),
])
def test_an_error_of_the_network_says_what_to_look_at(error, told):
    assert diagnosis.of_error(error, "node", "ann", 2200) == told


@pytest.mark.parametrize("said, what", [
    ("sh: 3: printf: I/O error\nsh: 1: echo: No space left on device", "its disk is full: "),
    ("mkdir: cannot create directory '/data': Read-only file system", "its disk is read-only: "),
    ("mkdir: cannot create directory '/data': Permission denied", "its user must not write to /data/x: "),
    ("sh: 1: bash: not found", "it has no bash: "),
    ("something else", "a command of ours failed there with status 2: something else"),
    ("", "a command of ours failed there with status 2"),
])
def test_what_a_command_printed_is_put_into_words(said, what):
    assert diagnosis.of_output(2, said, "/data/x").what.startswith(what)


@pytest.mark.parametrize("text, told", [
    (None, "the key {path} cannot be read: No such file or directory"),
    ("no key at all", "the key {path} cannot be read: "),
    ("locked", "the key {path} is locked by a passphrase"),
])
def test_a_key_of_the_user_that_cannot_be_used_is_named(text, told, machines, tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    path = tmp_path / "my_key"
    if text is not None:
        path.write_bytes(_locked_key() if text == "locked" else text.encode())
        path.chmod(0o600)
    with pytest.raises(NeedsPerson) as caught:
        SshProvider(machines.config(machines.spec(identity_file=str(path)))).check()
    assert told.format(path=path) in str(caught.value)
    assert ("ssh-add" if text == "locked" else "identity_file") in caught.value.hint


def _locked_key() -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.BestAvailableEncryption(b"pass"))
