"""Machines that are cut off and return, the dispatcher's own machine, notices, and a list that changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from spotfleet.bootstrap import MARK
from spotfleet.errors import NeedsPerson, SpotfleetError, UsageError
from spotfleet.interruptions.folder import FolderSource
from spotfleet.model import CloudState, Market, Need, Offer, Role
from spotfleet.providers import UNLISTED
from spotfleet.providers.ssh import SshProvider, discovery, inventory
from tests.support.ssh_provider.host_stage import dispatcher, line, quicken, request, say, states
from tests.support.ssh_provider.sshd_machines import Machines, wait

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


# ---- machines that do not answer


def test_a_machine_that_stops_answering_leaves_and_one_that_answers_again_returns(machines):
    provider = dispatcher(machines)
    provider.launch(request(machines))
    before = line(provider)
    machines["w0"].stop()
    assert line(provider).state is CloudState.RUNNING  # one lost answer ends no host
    wait("it is believed", lambda: line(provider).state is CloudState.STOPPED)
    assert line(provider).why.startswith(f"does not answer over SSH: {machines.zone('w0')}: it runs no sshd")
    assert line(provider).runs == before.runs
    machines["w0"].start()
    wait("it is back", lambda: line(provider).state is CloudState.RUNNING)
    assert line(provider) == before


def test_a_host_to_be_ended_on_a_machine_that_is_away_ends_when_the_machine_answers(machines):
    provider = dispatcher(machines)
    provider.launch(request(machines))
    provider.hosts("f")
    machines["w0"].stop()
    wait("it is believed", lambda: line(provider).state is CloudState.STOPPED)
    provider.terminate("f-1")
    assert line(provider).state is CloudState.STOPPED
    machines["w0"].start()
    wait("it has ended", lambda: line(provider).state is CloudState.TERMINATED)
    wait("its claim, which goes last", lambda: machines["w0"].holds() == [])


def test_a_host_to_be_ended_on_a_machine_that_stays_away_is_given_up_so_that_the_fleet_can_end(machines, monkeypatch):
    monkeypatch.setattr(inventory, "GIVE_UP_S", 0.5)
    provider = dispatcher(machines)
    provider.launch(request(machines))
    provider.hosts("f")
    machines["w0"].stop()
    wait("it is believed", lambda: line(provider).state is CloudState.STOPPED)
    provider.terminate("f-1")
    wait("it is given up", lambda: line(provider).state is CloudState.TERMINATED)
    assert line(provider) == line(provider) and "given up, since its machine does not answer" in line(provider).why
    machines["w0"].start()
    wait("it has ended", lambda: line(provider).state is CloudState.TERMINATED and machines["w0"].holds() == [])


def test_another_process_does_not_list_what_lies_on_a_machine_that_is_away(machines):
    dispatcher(machines).launch(request(machines))
    machines["w0"].stop()
    assert states(dispatcher(machines, "another")) == {}


def test_on_the_laptop_a_dispatchers_machine_that_does_not_answer_is_no_empty_listing(machines):
    laptop = SshProvider(machines.config())
    assert laptop.hosts("f") == []
    machines["head"].stop()
    with pytest.raises(SpotfleetError, match="it runs no sshd"):
        laptop.hosts("f")


# ---- the dispatcher's own machine, notices, discovery


def test_a_dispatcher_finds_its_own_host_and_ends_itself(machines):
    SshProvider(machines.config()).launch(request(machines, "head", "f-d-0", Role.DISPATCHER))
    ask = ("import json, sys, time; from spotfleet.providers.ssh import SshProvider\n"
           "p = SshProvider(json.loads(sys.argv[1])); print([h.request_id for h in p.hosts('f')], flush=True)\n"
           "p.terminate('f-d-0'); time.sleep(60)")
    told = json.dumps(machines.config(side="dispatcher"))
    env = {**os.environ, MARK: "f-d-0", "HOME": str(machines["head"].home), "TMPDIR": str(machines["head"].folder)}
    done = subprocess.run([sys.executable, "-c", ask, told], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "['f-d-0']\n" and done.returncode < 0, done.stderr  # it was ended with its host
    wait("nothing is left", lambda: machines["head"].holds() == [])
    wait("what removed it has ended too", lambda: not _processes_in(str(machines["head"].folder / "spotfleet-")))


def _processes_in(beginning: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"])
            if any(word.startswith(beginning) for word in p.info["cmdline"] or [])]


def test_a_notice_is_seen_by_the_host_and_may_be_withdrawn(machines):
    provider = dispatcher(machines)
    provider.launch(request(machines))
    source = FolderSource(str(machines["w0"].root / "f-1"))
    assert source.poll() is None
    provider.interrupt("f-1", 5.0)  # time enough to withdraw it, on a busy machine too
    notice = source.poll()
    assert notice is not None and 0 < notice.seconds_left <= 5.0 and notice.action == "terminate"
    (machines["w0"].root / "f-1" / "notice.json").unlink()
    wait("its time is over", lambda: not _takers(machines))
    assert states(provider) == {"f-1": "running"} and machines["w0"].hosts() == ["f-1"]


def _takers(machines: Machines) -> list[psutil.Process]:
    """Processes that wait to take a host away, or are at it."""
    script = str(machines["w0"].root / "f-1" / "take.sh")
    return [p for p in psutil.process_iter(["cmdline"]) if script in (p.info["cmdline"] or [])]


def test_an_ended_host_cannot_be_interrupted(machines):
    provider = dispatcher(machines)
    provider.launch(request(machines))
    say(machines, "off 5000000000 x")
    with pytest.raises(UsageError, match="there is no host 'f-1'"):
        provider.interrupt("f-1", None)


def test_a_machine_that_the_script_adds_is_used_and_one_that_it_drops_gives_notice(machines, tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "AGAIN_S", 0.0)
    monkeypatch.setattr(inventory, "DELISTED_S", 0.1)
    named = tmp_path / "named"
    named.write_text("")
    w0 = machines["w0"]
    spec = replace(machines.spec(), hosts=(), port=w0.port)
    told = machines.config(spec, "dispatcher", script=f"cat {named}",
                           known_hosts=f"[{w0.address}]:{w0.port} {w0.host_key}\n")
    provider = SshProvider(told)
    assert provider.hosts("f") == []
    named.write_text(f"{w0.address}:3\n")
    offer = Offer("ssh", "ssh", w0.address, "machine", Market.ON_DEMAND, 3, 0, 0)
    wait("it is found", lambda: provider._inventory.machine(w0.address))
    provider.launch(replace(request(machines), offer=offer))
    assert states(provider) == {"f-1": "running"}
    named.write_text("")
    notice = FolderSource(str(w0.root / "f-1"))
    monkeypatch.setattr(inventory, "LEAVE_S", 1000.0)
    wait("it is told", lambda: provider.hosts("f") and notice.poll())
    named.write_text(f"{w0.address}:3\n")
    wait("it may stay", lambda: provider.hosts("f") and notice.poll() is None)
    assert provider.offers(Need(use_spot=False)) == []
    monkeypatch.setattr(inventory, "LEAVE_S", 0.5)
    named.write_text("")
    wait("it leaves", lambda: line(provider).state is CloudState.TERMINATED)
    assert line(provider).why == "the discovery script does not name its machine any more"
    wait("nothing is left there", lambda: states(provider) == {"f-1": "terminated"} and w0.holds() == [])
    assert provider._inventory.machine(w0.address) is None


def test_without_any_list_of_the_script_nothing_is_listed_as_gone(machines, tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "AGAIN_S", 0.0)
    named = tmp_path / "named"
    provider = SshProvider(machines.config(side="dispatcher", script=f"cat {named}"))
    with pytest.raises(SpotfleetError, match="the discovery script ended with status 1: cat: "):
        provider.hosts("f")
    laptop = SshProvider(machines.config(script=f"cat {named}"))
    with pytest.raises(NeedsPerson, match="the discovery script ended with status 1"):
        laptop.check()
    assert laptop.hosts("f") == []  # a fleet can be taken down all the same, and what may be left is said
    assert {name: why[:41] for name, why in laptop.remove_fleet("f").items()} == {
        UNLISTED: "the discovery script ended with status 1:"}
    named.write_text("")
    wait("there is a list", lambda: _lists(provider))
    named.unlink()
    wait("it fails", lambda: not _lists(provider) or provider._inventory.discovery.trouble)
    assert _lists(provider)  # the last good list holds


def _lists(provider: SshProvider) -> bool:
    try:
        return provider.hosts("f") == []
    except SpotfleetError:
        return False
