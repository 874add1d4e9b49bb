"""The fleet's ssh_config, as real OpenSSH understands it in the middle of any user's own."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.api.access import targets
from spotfleet.api.access.ssh import SshTarget, SshTargets, list_targets
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.model import CloudState, Role, SshAccess
from spotfleet.protocol.messages import HostStatus
from spotfleet.ssh import include, openssh
from spotfleet.ssh.config import Entry, SshFiles, config_text, known_hosts_text
from tests.support.shell.shell_fleet import listed

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh (Debian: openssh-client)")
KEY, RSA = "ssh-ed25519 AAAAed", "ssh-rsa AAAArsa"
HEAD = Entry(("digits",), "digits-d-0", SshAccess("203.0.113.9", "ubuntu", 2222, (KEY,)))
WORKER = Entry(("digits-w0", "digits-1"), "digits-1", SshAccess("10.0.0.7", "trainer", 22, (KEY, RSA), jump=True))
FILES = SshFiles("/home/u/my fleets/100%/id_ed25519", "/home/u/my fleets/100%/known_hosts")
NASTY = """
Host *
    HostName evil.example
    Port 1
    User root
    ProxyCommand nc %h %p
    ProxyUseFdpass yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    GlobalKnownHostsFile /etc/evil
    HostKeyAlias evil
    HostKeyAlgorithms ssh-rsa
    KnownHostsCommand /bin/evil
    VerifyHostKeyDNS yes
    CheckHostIP yes
    UpdateHostKeys yes
    NoHostAuthenticationForLocalhost yes
    IdentitiesOnly no
    IdentityFile ~/.ssh/other
    IdentityAgent /tmp/agent
    AddKeysToAgent yes
    PKCS11Provider /usr/lib/evil.so
    PreferredAuthentications password
    PubkeyAuthentication no
    PubkeyAcceptedAlgorithms ssh-rsa
    CanonicalizeHostname always
    AddressFamily inet6
    ConnectTimeout 1
    ConnectionAttempts 9
    TCPKeepAlive no
    ServerAliveInterval 0
    ServerAliveCountMax 99
    ControlMaster auto
    ControlPath /tmp/evil-%h
    ForwardAgent yes
    ForwardX11 yes
    PermitLocalCommand yes
    Tunnel yes
    RequestTTY force
    RemoteCommand tmux
    SessionType none
    StdinNull yes
    ForkAfterAuthentication yes
    ExitOnForwardFailure yes
Match all
    ProxyJump evil@jump.example
    User nobody
"""


def understood(config: Path, alias: str) -> list[str]:
    """Each option and its value, as the real client takes them."""
    done = subprocess.run(["ssh", "-G", "-F", str(config), alias], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    """A user's ssh config, at whose top the fleet's is included."""
    fleets = tmp_path / "my fleets [1]"
    (fleets / "digits" / "ssh").mkdir(parents=True)
    (fleets / "digits" / "ssh" / "config").write_text(config_text("digits", [HEAD, WORKER], FILES, openssh.version()))
    spot = include.IncludeLine(tmp_path / "config", include.include_line(fleets, "*/ssh/config"), tmp_path / "lock")
    spot.config.write_text("")
    include.add(spot)
    return spot.config


@pytest.mark.parametrize("theirs", [NASTY, NASTY.replace("ProxyCommand nc %h %p", "ProxyJump evil.example"),
                                    NASTY.replace("Host *", "Match host *"),
                                    NASTY.replace("Host *\n", "")], ids=["host", "jump", "match", "bare"])
def test_nothing_in_a_users_config_changes_how_a_fleets_machine_is_entered(user_file, theirs):
    alone = {alias: understood(user_file, alias) for alias in ("digits", "digits-w0")}
    with user_file.open("a") as file:
        file.write(theirs)
    for alias, before in alone.items():
        after = understood(user_file, alias)
        assert [line for line in after if line not in before] == ["identityfile ~/.ssh/other"]  # tried after ours
        assert [line for line in before if line not in after] == []


def test_other_hosts_of_the_user_are_as_before(user_file, tmp_path):
    plain = tmp_path / "plain"
    plain.write_text(NASTY)
    with user_file.open("a") as file:
        file.write(NASTY)
    assert understood(user_file, "github.com") == understood(plain, "github.com")


def test_a_machine_is_entered_with_the_fleets_key_and_only_as_the_machine_that_is_pinned(user_file):
    found = understood(user_file, "digits")
    assert {"hostname 203.0.113.9", "port 2222", "user ubuntu", f"identityfile {FILES.key.replace('%', '%%')}",
            "identitiesonly yes", "stricthostkeychecking true", f"userknownhostsfile {FILES.known_hosts}",
            "globalknownhostsfile /dev/null", "hostkeyalias digits-d-0", "hostkeyalgorithms ssh-ed25519"} <= {
                line.replace("100%%", "100%") if line.startswith("userknown") else line for line in found}
    assert not [line for line in found if line.startswith(("proxyjump", "proxycommand"))]
    assert {"proxyjump digits", "hostname 10.0.0.7", "user trainer", "hostkeyalias digits-1",
            "hostkeyalgorithms ssh-ed25519,rsa-sha2-512,rsa-sha2-256,ssh-rsa",
            } <= set(understood(user_file, "digits-w0"))


def test_known_hosts_lists_each_pinned_key_under_the_hosts_own_name():
    assert known_hosts_text([HEAD, WORKER]) == (
        "digits-d-0 ssh-ed25519 AAAAed\ndigits-1 ssh-ed25519 AAAAed\ndigits-1 ssh-rsa AAAArsa\n")


def test_without_a_dispatchers_machine_a_worker_is_entered_directly():
    assert "ProxyJump" not in config_text("digits", [WORKER], FILES)


def test_an_older_client_is_told_no_word_that_it_does_not_know():
    old, new = (config_text("digits", [HEAD], FILES, version) for version in ((7, 4), (9, 2)))
    assert [word for word in ("KnownHostsCommand", "SessionType", "RemoteCommand") if word in old] == []
    assert [word for word in ("KnownHostsCommand", "SessionType", "RemoteCommand") if word not in new] == []


@pytest.mark.parametrize("door", [
    SshAccess("10.0.0.1\nProxyCommand evil", "u"), SshAccess("10.0.0.1 x", "u"), SshAccess('"', "u"),
    SshAccess("", "u"),
    SshAccess("a", "u u"), SshAccess("a", "-oProxyCommand=x"), SshAccess("a", "u", 22, ("a\nb c",))])
def test_what_ssh_config_cannot_say_is_refused_and_never_written(door):
    with pytest.raises(UsageError, match="cannot stand in an ssh config"):
        config_text("digits", [Entry(("digits",), "digits-d-0", door)], FILES)


@pytest.mark.parametrize("path", ['/home/"u"/key', "/home/u\\/key", "/home/${USER}/key"])
def test_a_path_that_ssh_would_read_otherwise_is_refused(path):
    with pytest.raises(UsageError, match="cannot stand in an ssh config"):
        config_text("digits", [HEAD], SshFiles(path, "/x"))


def test_addresses_of_ipv6_reach_ssh_as_they_are(tmp_path):
    door = SshAccess("fe80::1%eth0", "u", 22, (KEY,))
    (tmp_path / "config").write_text(config_text("digits", [replace(HEAD, door=door)], FILES, openssh.version()))
    assert "hostname fe80::1%eth0" in understood(tmp_path / "config", "digits")


# --- who is called how


DOOR = SshAccess("10.0.0.1", "u", 22, (KEY,))


def test_aliases_follow_the_order_of_launch_and_leave_out_who_is_gone_or_has_no_sshd():
    found = list_targets("digits", [
        listed("digits-10", Role.WORKER, DOOR, since=5.0), listed("digits-9", Role.WORKER, DOOR, since=5.0),
        listed("digits-3", Role.WORKER, DOOR, since=5.1), listed("digits-1", Role.WORKER, None, since=1.0),
        listed("digits-2", Role.WORKER, DOOR, since=1.0, state=CloudState.TERMINATED),
        listed("digits-d-0", Role.DISPATCHER, DOOR, state=CloudState.PENDING, since=8.0),
        listed("digits-d-1", Role.DISPATCHER, DOOR, since=7.0, port=9)])
    assert [way.aliases for way in found.ways] == [
        ("digits", "digits-d-1"), ("digits-d-0",), ("digits-w0", "digits-3"), ("digits-w1", "digits-9"),
        ("digits-w2", "digits-10")]


def test_no_alias_takes_the_name_of_another_fleet():
    found = list_targets("digits", [listed("digits-1", Role.WORKER, DOOR)], others=["digits-w0"])
    assert found == SshTargets((SshTarget(("digits-1",), "digits-1", "worker", DOOR, "127.0.0.1"),))


def test_hosts_that_have_stopped_are_left_out_of_all_with_one_line(laptop, monkeypatch):
    laptop.make_fleet()
    door = SshAccess("127.0.0.1", "me", 22, (KEY,))
    first, second, third = (listed(f"digits-{n}", Role.WORKER, door, n) for n in (1, 2, 3))
    laptop.enters(first, second, third)
    monkeypatch.setattr(targets, "_reported", lambda folder: None)
    laptop.list(first, replace(second, state=CloudState.STOPPED), replace(third, state=CloudState.STOPPED))
    lines: list[str] = []
    assert [way.host for way in targets.workers(laptop.folder, lines.append)] == ["digits-1"]
    assert lines == ["left out: digits-w1, digits-w2 have stopped"]

    def says(**states: str) -> None:
        hosts = [HostStatus(f"digits-{n}", "worker", states.get(f"h{n}", "up"), "p", 1, 1, 1) for n in (1, 2, 3)]
        monkeypatch.setattr(targets, "_reported", lambda folder: hosts)

    says(h1="stopped")
    assert [way.host for way in targets.workers(laptop.folder, lines.append)] == ["digits-2", "digits-3"]
    assert lines[1:] == ["left out: digits-w0 has stopped"], "the dispatcher knows better than the last listing"
    says(h1="stopped", h2="stopped", h3="stopped")
    with pytest.raises(SpotfleetError, match="no worker host now: digits-w0, digits-w1, digits-w2 have stopped"):
        targets.workers(laptop.folder, lines.append)
