"""The life of a host on a machine that exists: claimed, listed, cut off, back again, ended. The hosts do nothing."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from hashlib import sha256
from threading import Thread

import pytest

from spotfleet.bootstrap import script, wheel
from spotfleet.errors import NoCapacity, SpotfleetError
from spotfleet.model import CloudState, Role, SshAccess
from spotfleet.providers.ssh import SshProvider, inventory, launch, transport
from spotfleet.providers.ssh.diagnosis import Diagnosis, MachineError
from tests.support.ssh_provider.host_stage import dispatcher, line, quicken, request, say, states
from tests.support.ssh_provider.sshd_machines import IDLE, Machines, marked, user, wait

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


# ---- a machine becomes a host


def test_a_worker_host_is_listed_with_its_machine_its_address_and_the_way_in(machines):
    provider = dispatcher(machines)
    provider.launch(request(machines))
    told = line(provider)
    machine = machines["w0"]
    assert (told.state, told.role, told.address, told.port) == (
        CloudState.RUNNING, Role.WORKER, machine.address, 0)
    assert told.ssh == SshAccess(machine.address, user(), machine.port, (machine.host_key,), jump=False)
    assert SshProvider(machines.config()).hosts("f")[0].ssh == replace(told.ssh, jump=True)
    assert abs(told.runs[0].started_at - time.time()) < 60


def test_what_a_host_is_told_is_for_its_user_alone_and_lies_there_before_it_starts(machines):
    dispatcher(machines).launch(request(machines))
    folder = machines["w0"].root / "f-1"
    assert (folder / "boot.json").read_text() == "{}"
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir() if p.is_file() and p.name != "state"} == {0o600}
    assert not list(folder.glob(".listing*")) and not list(folder.glob("*.part"))


def test_the_dispatchers_machine_gets_a_free_port_an_address_and_our_own_code(machines):
    laptop = SshProvider(machines.config())
    laptop.launch(request(machines, "head", "f-d-0", Role.DISPATCHER))
    told = line(laptop, "f-d-0")
    assert told.address == machines["head"].address and told.ssh is not None and not told.ssh.jump
    with socket.create_server((told.address, told.port)):
        pass  # nobody else has it
    folder = machines["head"].root / "f-d-0"
    assert (folder / "wheel" / wheel.build().name).read_bytes() == wheel.build().data
    settings = (folder / "settings.sh").read_text()
    assert f"PORT={told.port}\n" in settings and f"ADDRESS={told.address}\n" in settings


def test_a_worker_is_told_the_code_of_its_dispatcher_by_digest_and_fetches_it_itself(machines, tmp_path, monkeypatch):
    code = tmp_path / "spotfleet-9-py3-none-any.whl"
    code.write_bytes(b"the code")
    monkeypatch.setenv("SPOTFLEET_WHEEL", str(code))
    dispatcher(machines).launch(request(machines))
    folder = machines["w0"].root / "f-1"
    assert "WHEEL_NAME=spotfleet-9-py3-none-any.whl\n" in (folder / "settings.sh").read_text()
    assert f"WHEEL_SHA256={sha256(b'the code').hexdigest()}\n" in (folder / "settings.sh").read_text()
    assert list((folder / "wheel").iterdir()) == []


def test_two_processes_that_launch_the_same_host_at_once_make_one(machines):
    failed: list[SpotfleetError] = []

    def ask(process: str) -> None:
        try:
            dispatcher(machines, process).launch(request(machines))
        except SpotfleetError as error:
            failed.append(error)

    callers = [Thread(target=ask, args=(f"{n}",)) for n in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert failed == []
    wait("it runs", lambda: "f-1" in _idle(machines))
    assert _idle(machines) == ["f-1"]


def _idle(machines: Machines) -> list[str]:
    """Hosts of these machines alone: tests of other files run at the same time."""
    return [host for host, process in marked() if process.name() == "sleep"
            and process.environ()["HOME"].startswith(str(machines.folder))]


def test_two_fleets_that_want_one_machine_do_not_both_get_it(machines):
    dispatcher(machines).launch(request(machines, request_id="g-1", fleet="g"))
    with pytest.raises(NoCapacity) as caught:
        dispatcher(machines).launch(request(machines))
    assert str(caught.value) == (f"{machines.zone('w0')}: it runs g-1 of fleet g (`spotfleet down g` frees it)")
    wait("it runs", lambda: machines["w0"].hosts() == ["g-1"])
    assert not (machines["w0"].root / "f-1").exists()


def test_a_claim_whose_launch_died_is_cleared_after_a_while(machines):
    root = machines["w0"].root
    (root / "f-0").mkdir(parents=True)
    (root / "f-0" / "boot.json").write_text("a secret")
    (root / "claim").write_text("f-0\n")
    with pytest.raises(NoCapacity, match="a launch of f-0 is under way there"):
        dispatcher(machines).launch(request(machines))
    old = time.time() - 60 * 4
    os.utime(root / "claim", (old, old))
    dispatcher(machines).launch(request(machines))
    wait("it runs", lambda: machines["w0"].hosts() == ["f-1"])
    assert not (root / "f-0").exists()


def test_a_launch_that_fails_on_its_way_leaves_nothing(machines, monkeypatch):
    def fail(self, folder, files, limit_s):
        raise MachineError(self.machine.name, Diagnosis("its disk is full"))

    monkeypatch.setattr(transport.SshTransport, "put", fail)
    with pytest.raises(NoCapacity, match="its disk is full"):
        dispatcher(machines).launch(request(machines))
    assert machines["w0"].holds() == []


def test_a_launch_that_was_cut_off_goes_on_when_it_is_asked_for_again(machines, monkeypatch):
    provider = dispatcher(machines)
    with monkeypatch.context() as cut:
        cut.setattr(launch, "_give_back", lambda *_: None)
        cut.setattr(transport.SshTransport, "put", lambda self, *_: machines["w0"].stop() or self.run("true"))
        with pytest.raises(NoCapacity):
            provider.launch(request(machines))
    assert (machines["w0"].root / "claim").read_text() == "f-1\n" and states(provider) == {}
    machines["w0"].start()
    wait("it is looked at", lambda: not _troubled(provider, machines))
    provider.launch(request(machines))
    assert states(provider) == {"f-1": "running"}


def _troubled(provider: SshProvider, machines: Machines) -> list[str]:
    return [v.machine.name for v in provider._inventory.views() if v.trouble is not None]


# ---- its end


def test_after_its_end_the_machine_holds_nothing_and_this_process_remembers_it(machines):
    provider = dispatcher(machines)
    provider.launch(request(machines))
    before = line(provider)
    provider.terminate("f-1")
    assert machines["w0"].holds() == [] and machines["w0"].hosts() == []
    after = line(provider)
    assert after.state is CloudState.TERMINATED and after.why == "ended"
    assert after.runs[0].started_at == before.runs[0].started_at < after.runs[0].ended_at
    assert states(dispatcher(machines, "another")) == {}


def test_a_host_that_somebody_else_removed_has_ended(machines):
    provider = dispatcher(machines)
    provider.launch(request(machines))
    assert states(provider) == {"f-1": "running"}
    dispatcher(machines, "another").terminate("f-1")
    assert line(provider).state is CloudState.TERMINATED
    assert line(provider).why == "it was removed from its machine"


def test_a_host_that_ended_itself_is_cleaned_up_by_the_next_launch(machines):
    provider = dispatcher(machines)
    provider.launch(request(machines))
    say(machines, "off 5000000000 spotfleet.agent has ended: the host wants to be off")
    assert (line(provider).state, line(provider).why) == (CloudState.TERMINATED, "it has ended itself")
    provider.launch(request(machines, request_id="f-2"))
    wait("it runs", lambda: machines["w0"].hosts() == ["f-2"])
    assert not (machines["w0"].root / "f-1").exists()
    assert states(provider) == {"f-1": "terminated", "f-2": "running"}


def test_a_machine_whose_host_could_not_be_made_says_why_and_is_left_in_peace_for_a_while(machines, monkeypatch):
    monkeypatch.setattr(inventory, "TRY_AGAIN_S", 1000.0)
    provider = dispatcher(machines)
    provider.launch(request(machines))
    say(machines, "failed 100 bootstrap.sh line 9: pip install torch: no such version")
    assert (line(provider).state, line(provider).why) == (
        CloudState.TERMINATED, "bootstrap.sh line 9: pip install torch: no such version")
    with pytest.raises(NoCapacity) as caught:
        provider.launch(request(machines, request_id="f-2"))
    assert str(caught.value) == (f"{machines.zone('w0')}: its host f-1 could not be made: bootstrap.sh line 9: "
                                 "pip install torch: no such version")
    provider._inventory.failed[machines.zone("w0")].until = time.monotonic()  # that while is over
    provider.launch(request(machines, request_id="f-3"))
    wait("it runs", lambda: machines["w0"].hosts() == ["f-3"] and states(provider)["f-3"] == "running")
    say(machines, "failed 200 again", host="f-3")
    assert line(provider, "f-3").state is CloudState.TERMINATED
    assert provider._inventory.failed[machines.zone("w0")].count == 1  # it has run meanwhile


def test_a_host_whose_launch_died_before_it_began_has_failed(machines):
    provider = dispatcher(machines)
    provider.launch(request(machines))
    folder = machines["w0"].root / "f-1"
    (folder / "state").unlink()
    assert line(provider).state is CloudState.PENDING
    old = time.time() - 60 * 4
    os.utime(folder / "listing.json", (old, old))
    assert line(provider).why == "its launch was cut off before it began"


MORTAL = IDLE.replace("look)", 'look) [ ! -e "$host/dead" ] || { echo failed 1 nothing of it runs; exit; }\n').replace(
    "start)", 'start) [ -e "$host/dead" ] && rm "$host/dead" && exit 0\n')


def test_a_host_whose_machine_was_restarted_is_started_again_once_in_each_run_of_the_machine(machines, monkeypatch):
    real = script.text
    monkeypatch.setattr(script, "text", lambda name: MORTAL if name == "bootstrap.sh" else real(name))
    provider = dispatcher(machines)
    provider.launch(request(machines))
    folder = machines["w0"].root / "f-1"
    (folder / "dead").touch()
    assert states(provider) == {"f-1": "running"} and not (folder / "dead").exists()
    (folder / "dead").touch()
    assert (line(provider).state, line(provider).why) == (CloudState.TERMINATED, "nothing of it runs")
    (folder / "revived").write_text("an earlier run\n")
    assert states(provider) == {"f-1": "running"}
