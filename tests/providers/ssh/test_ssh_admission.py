"""The fleet's own key is let in, and at the end nothing of the fleet is left on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

import pytest

from spotfleet.model import Market, Need, Offer, Role
from spotfleet.providers import Boot, ExistingMachines, LaunchRequest
from spotfleet.providers.ssh import SshProvider
from spotfleet.providers.ssh.diagnosis import MachineError, of_error
from spotfleet.providers.ssh.transport import CommandResult, SshTransport
from tests.support.ssh_provider.sshd_machines import Machines, idle_hosts, wait

pytestmark = pytest.mark.processes

WORKERS = 2
OTHERS = "ssh-ed25519 AAAAsomebody colleague@elsewhere\n# a comment\n"


@pytest.fixture
def machines(running: Machines, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Which the user's key alone opens."""
    idle_hosts(monkeypatch)
    for machine in running:
        machine.keys_file.write_text(machine.keys_file.read_text() + OTHERS)
    yield running
    running.renew()


def laptop(machines: Machines) -> SshProvider:
    return SshProvider(machines.config(private_key=machines.fleet_private))


def launch(provider: SshProvider, machines: Machines, name: str, request_id: str, fleet: str = "f") -> None:
    offer = Offer("ssh", "ssh", machines.zone(name), "machine", Market.ON_DEMAND, 1, 0, 0)
    provider.launch(LaunchRequest(request_id, fleet, Role.WORKER, offer, Boot("idle", {})))


def test_the_fleets_key_is_added_once_beside_those_that_are_there(machines):
    before = machines["w0"].keys_file.read_text()
    mode = machines["w0"].keys_file.stat().st_mode
    for _ in range(2):
        assert laptop(machines).install_key("f", machines.fleet_public + " whatever") == {}
    assert machines["w0"].keys_file.read_text() == f"{before}{machines.fleet_public} spotfleet:f\n"
    assert machines["w0"].keys_file.stat().st_mode == mode
    dispatcher = SshProvider(machines.config(side="dispatcher"))  # which has no other key
    assert len(dispatcher.offers(Need(use_spot=False))) == 2 and dispatcher._inventory.poller._views[
        machines.zone("w0")].trouble is None


def test_a_line_without_an_end_and_a_missing_file_are_no_obstacle(machines):
    machines["w0"].keys_file.write_text(f"{machines.public} user@laptop")
    assert laptop(machines).install_key("f", machines.fleet_public) == {}
    assert machines["w0"].keys_file.read_text() == (
        f"{machines.public} user@laptop\n{machines.fleet_public} spotfleet:f\n")


def test_a_fleets_new_key_takes_the_place_of_its_old_one(machines):
    old = machines["w0"].keys_file.read_text()
    machines["w0"].keys_file.write_text(f"{old}ssh-ed25519 AAAAold spotfleet:f\nssh-ed25519 AAAAg spotfleet:g\n")
    assert laptop(machines).install_key("f", machines.fleet_public) == {}
    assert machines["w0"].keys_file.read_text() == (
        f"{old}ssh-ed25519 AAAAg spotfleet:g\n{machines.fleet_public} spotfleet:f\n")


def test_fleets_that_are_admitted_at_once_all_get_in(machines):
    names = [f"f{n}" for n in range(4)]
    callers = [Thread(target=laptop(machines).install_key, args=(n, machines.fleet_public)) for n in names]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    lines = machines["w0"].keys_file.read_text().splitlines()
    assert sorted(line.rpartition(":")[2] for line in lines if "spotfleet:" in line) == names


def test_each_machine_that_does_not_let_the_key_in_is_named_and_the_others_do(machines):
    machines["w0"].stop()
    failed = laptop(machines).install_key("f", machines.fleet_public)
    assert list(failed) == [machines.zone("w0")]
    assert failed[machines.zone("w0")].startswith(f"it runs no sshd at port {machines['w0'].port} (")
    assert "spotfleet:f" in machines["w1"].keys_file.read_text()


def test_a_connection_that_breaks_is_replaced_once(machines, monkeypatch):
    run, broken = SshTransport.run, list[str]()

    def breaking(self: SshTransport, script: str, *limit_s: float) -> CommandResult:
        if self.machine.name == machines.zone("w0") and len(broken) < breaks:
            broken.append(script)
            raise MachineError(self.machine.name, of_error(OSError("Socket is closed"), "w0", "root", 22))
        return run(self, script, *limit_s)

    monkeypatch.setattr(SshTransport, "run", breaking)
    breaks = 2
    failed = laptop(machines).install_key("f", machines.fleet_public)
    assert failed == {machines.zone("w0"): "the connection broke: Socket is closed (it is tried again)"}
    broken.clear()
    breaks = 1
    assert laptop(machines).install_key("f", machines.fleet_public) == {}


def test_a_machine_that_reads_another_file_of_keys_is_found_out(machines):
    home = machines["w0"].home
    (home / "elsewhere").write_text(machines["w0"].keys_file.read_text())
    machines["w0"].stop()
    machines["w0"].more = f"AuthorizedKeysFile {home}/elsewhere"
    machines["w0"].start(first=True)
    (said,) = laptop(machines).install_key("f", machines.fleet_public).values()
    assert "refuses user" in said and "with the fleet's key" in said and "AuthorizedKeysFile" in said


def test_parting_leaves_machines_as_they_were(machines):
    before = {m.name: m.keys_file.read_text() for m in machines}
    provider = laptop(machines)
    assert isinstance(provider, ExistingMachines) and provider.install_key("f", machines.fleet_public) == {}
    launch(provider, machines, "w0", "f-1")
    (machines["w1"].root / "f-2").mkdir(parents=True)  # left by a launch that died
    (machines["w1"].root / "claim").write_text("f-2\n")
    (machines["head"].root / "f-d-0").mkdir(parents=True)
    (machines["head"].root / "claim").write_text("f-d-0\n")
    assert provider.remove_fleet("f") == {}
    assert {m.name: m.keys_file.read_text() for m in machines} == before
    assert {m.name: m.holds() for m in machines} == {"head": [], "w0": [], "w1": []}
    assert [m.hosts() for m in machines] == [[], [], []] and provider.remove_fleet("f") == {}


def test_parting_leaves_another_fleet_alone(machines):
    provider = laptop(machines)
    provider.install_key("f", machines.fleet_public)
    provider.install_key("f-2", machines.fleet_public)  # its hosts' names begin alike
    launch(provider, machines, "w0", "f-2-0", "f-2")
    wait("it runs", lambda: machines["w0"].hosts() == ["f-2-0"])
    assert provider.remove_fleet("f") == {}
    assert machines["w0"].hosts() == ["f-2-0"] and "spotfleet:f-2" in machines["w0"].keys_file.read_text()


def test_parting_leaves_the_host_of_a_fleet_alone_that_is_named_as_our_dispatchers_would_be(machines):
    provider = laptop(machines)
    provider.install_key("f", machines.fleet_public)
    launch(provider, machines, "w0", "f-d-0", "f-d")
    wait("it runs", lambda: machines["w0"].hosts() == ["f-d-0"])
    assert provider.remove_fleet("f") == {}
    assert machines["w0"].hosts() == ["f-d-0"]


def test_a_machine_that_cannot_be_parted_with_is_named(machines):
    provider = laptop(machines)
    provider.install_key("f", machines.fleet_public)
    machines["w1"].stop()
    left = provider.remove_fleet("f")
    assert list(left) == [machines.zone("w1")] and left[machines.zone("w1")].startswith("it runs no sshd")
    assert "spotfleet:f" not in machines["w0"].keys_file.read_text() + machines["head"].keys_file.read_text()


def test_a_file_of_keys_that_we_made_is_gone_when_we_are(machines, tmp_path):
    home = machines["w0"].home
    (home / "elsewhere").write_text(f"{machines['w0'].keys_file.read_text()}{machines.fleet_public}\n")
    machines["w0"].keys_file.unlink()
    machines["w0"].keys_file.parent.rmdir()
    machines["w0"].stop()
    machines["w0"].more = f"AuthorizedKeysFile {home}/elsewhere"
    machines["w0"].start(first=True)
    provider = laptop(machines)
    assert provider.install_key("f", machines.fleet_public) == {}
    assert machines["w0"].keys_file.exists()
    assert provider.remove_fleet("f") == {}
    assert not machines["w0"].keys_file.parent.exists()
