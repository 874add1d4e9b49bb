"""How the code comes to a machine that a cloud has made: real scripts and bootstrap.sh; `ssh` and `sudo` are played."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.api.access import ssh
from spotfleet.api.home import FleetDir, FleetRecord, Keys
from spotfleet.api.lifecycle import first_contact
from spotfleet.api.lifecycle.first_contact import DispatcherStartup
from spotfleet.bootstrap import HostPlan, Wheel, script, wheel
from spotfleet.errors import NeedsPerson
from spotfleet.model import CloudHost, CloudState, FleetSpec, Market, Offer, Role, SshAccess

HOST = "g5-d-0"
CODE = Wheel("spotfleet-1-py3-none-any.whl", hashlib.sha256(b"code" * 1000).hexdigest(), b"code" * 1000)
RUNNING = CloudHost(HOST, "i-1", "g5", Role.DISPATCHER, Offer("aws", "us-east-1", "us-east-1a", "t3.small",
                                                              Market.ON_DEMAND, 1, 0, 0),
                    CloudState.RUNNING, address="10.0.0.5", port=7443, ssh=SshAccess("198.51.100.5", "ubuntu"))
SSH = """#!/bin/sh
[ ! -e {folder}/says ] || {{ cat {folder}/says >&2; exit 255; }}
for last; do :; done
echo x >>{folder}/calls
exec sh -c "$last"
"""
SUDO = """#!/bin/sh
[ ! -e {folder}/asks ] || {{ echo "sudo: a password is required" >&2; exit 1; }}
shift
exec "$@"
"""


class World:
    """A machine in a folder, and a laptop that enters it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.root = folder, folder / "root"
        self.home = self.root / HOST
        self.root.mkdir()
        (folder / "bin").mkdir()
        for name, text in {"ssh": SSH, "sudo": SUDO}.items():
            (folder / "bin" / name).write_text(text.format(folder=shlex.quote(str(folder))))
            (folder / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("HOME", str(folder))
        monkeypatch.setattr(first_contact, "ROOT", str(self.root))
        monkeypatch.setattr(wheel, "build", lambda: CODE)
        monkeypatch.setattr(ssh, "tunnel", lambda *_: SimpleNamespace(connect=lambda: None, control=folder / "control"))
        monkeypatch.setattr(ssh.openssh, "version", lambda: (9, 0))
        self.fleet = FleetDir(folder / "house" / "fleets" / "g5")
        self.fleet.make(FleetRecord(FleetSpec("g5", provider="aws"), "g5", 0.0),
                        Keys("token", "secret", "cert", "key", ssh_private="private", ssh_public="public"), "ca")
        self.told: list[str] = []
        self.startup = DispatcherStartup(self.fleet, "aws", self.told.append)

    def boot(self, code: Wheel = CODE) -> None:
        """What cloud-init does."""
        plan = HostPlan(HOST, "g5", Role.DISPATCHER, "spotfleet.dispatcher", {"boot.json": "{}"}, code.name,
                        code.sha256)
        self.home.mkdir()
        for name, text in script.files(plan).items():
            (self.home / name).write_text(text)
        self.state("installing", "waits for its code")

    def state(self, word: str, why: str) -> None:
        (self.home / "state").write_text(f"{word} 99999999999 {why}\n")

    def says(self, text: str) -> None:
        """`ssh` does not get in."""
        (self.folder / "says").write_text(text)

    def advance(self, host: CloudHost = RUNNING) -> bool:
        return self.startup.advance([host], HOST)

    @property
    def brought(self) -> bytes:
        path = self.home / "wheel" / CODE.name
        return path.read_bytes() if path.exists() else b""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_each_step_of_a_machine_is_told_once_until_its_dispatcher_can_be_asked(world, monkeypatch):
    assert not world.startup.advance([], HOST)
    assert not world.advance(replace(RUNNING, state=CloudState.PENDING))
    world.says("ssh: connect to host 198.51.100.5 port 22: Connection refused")
    assert not world.advance()
    (world.folder / "says").unlink()
    assert not world.advance() and not world.advance()
    world.boot()
    assert not world.advance()
    assert not world.advance()
    world.state("installing", "makes a Python environment")
    assert not world.advance()
    world.state("running", "spotfleet.dispatcher")
    line = "2026-11-22 12:25:41,096 spotfleet.dispatcher.recovery.first_start WARNING aws is slow\n"
    (world.home / "console.log").write_text(line)
    assert world.advance()
    assert [re.sub(r" \(.*|: .*Connection.*", "", line) for line in world.told] == [
        "waiting for aws to list g5-d-0", "g5-d-0 is pending at aws",
        "g5-d-0 boots; its sshd at 198.51.100.5 does not answer yet",
        "g5-d-0 answers over SSH; cloud-init prepares it", "bringing the code to g5-d-0",
        "g5-d-0: makes a Python environment", "g5-d-0 runs its dispatcher"]
    monkeypatch.setattr(first_contact, "LATE_S", 0.0)
    assert world.advance()
    assert world.told[-1] == "g5-d-0 runs its dispatcher, which says: aws is slow"


def test_the_code_is_brought_whole_once_and_by_whoever_comes_after_a_kill(world: World):
    world.boot()
    (world.home / "wheel").mkdir()
    (world.home / "wheel" / ".part.77").write_bytes(b"half")
    (world.home / "wheel" / CODE.name).write_bytes(b"cut off")
    world.advance()
    assert world.brought == CODE.data
    assert [p.name for p in (world.home / "wheel").iterdir()] == [CODE.name]
    calls = (world.folder / "calls").read_text()
    DispatcherStartup(world.fleet, "aws", world.told.append).advance([RUNNING], HOST)
    assert (world.folder / "calls").read_text() == calls + "x\n"  # it looked, and brought nothing
    assert sum("bringing the code" in line for line in world.told) == 1


def test_code_that_does_not_arrive_whole_is_not_put_in_place_and_is_brought_again(world, monkeypatch):
    world.boot()
    monkeypatch.setattr(wheel, "build", lambda: replace(CODE, data=CODE.data[:100]))
    assert not world.advance()
    assert world.brought == b"" and "what came is not whole" in world.startup.why
    monkeypatch.setattr(wheel, "build", lambda: CODE)
    world.advance()
    assert world.brought == CODE.data


def test_a_bootstrap_that_has_failed_is_told_with_its_reason(world: World):
    world.boot()
    world.state("failed", "the disk of /root is full (3 MiB free)")
    with pytest.raises(NeedsPerson, match="could not be prepared: the disk of /root is full") as error:
        world.advance()
    assert "`spotfleet down g5`" in error.value.hint


def test_a_machine_that_another_version_launched_is_not_given_our_code(world: World):
    world.boot(replace(CODE, sha256="ab" * 32))
    with pytest.raises(NeedsPerson, match=r"waits for other code .* another version launched it"):
        world.advance()
    assert world.brought == b""


def test_a_machine_that_boots_may_not_know_our_key_for_a_while_and_no_longer(world, monkeypatch):
    world.says("ubuntu@198.51.100.5: Permission denied (publickey).")
    assert not world.advance()
    assert "waiting for g5-d-0 to take our keys" in world.startup.why
    monkeypatch.setattr(first_contact, "BOOTING_S", 0.0)
    with pytest.raises(NeedsPerson, match="does not let the fleet's key in"):
        world.advance()


def test_an_image_whose_user_cannot_become_root_is_refused_with_the_key_to_change(world, monkeypatch):
    monkeypatch.setattr(first_contact, "BOOTING_S", 0.0)
    (world.folder / "asks").touch()
    with pytest.raises(NeedsPerson, match="ubuntu may not become root on g5-d-0: sudo: a password") as error:
        world.advance()
    assert "`aws.user`" in error.value.hint


def test_machines_that_end_by_themselves_one_after_another_are_not_launched_for_ever():
    first_contact.refuse_dying(["Client.InvalidKMSKey.InvalidState"], "g5")
    with pytest.raises(NeedsPerson, match=r"2 machines .* have ended by themselves: Client.InvalidKMSKey"):
        first_contact.refuse_dying(["Server.InternalError", "Client.InvalidKMSKey.InvalidState"], "g5")
