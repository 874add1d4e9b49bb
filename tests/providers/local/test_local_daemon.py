"""The emulated cloud with real processes: what a machine is, lives through, and leaves behind.

The market's own rules are tested without processes in test_local_market.py.
"""

from __future__ import annotations

import json
import math
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.client import HTTPConnection

import pytest

from spotfleet.errors import NoCapacity, SpotfleetError, UsageError
from spotfleet.fleet.cost.billing import round_half_up
from spotfleet.interruptions.imds import ImdsSource
from spotfleet.model import CloudState, Need, Rates, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.local import LocalCloud, LocalProvider
from spotfleet.providers.local.market.pools import default_rules
from tests.support.local.local_home import LocalHome, eventually, lives

pytestmark = pytest.mark.processes


def test_a_host_is_a_process_with_its_files_and_a_place_of_its_own(house: LocalHome):
    first, second = house.launch("f-1", **{"boot.json": "{}"}), house.launch("f-2")
    env = house.born("f-1")["env"]
    assert (env["SPOTFLEET_HOST_ADDRESS"], env["SPOTFLEET_HOST_PORT"]) == (first.address, str(first.port))
    assert env["SPOTFLEET_METADATA_URL"] == first.metadata_url
    assert first.address.startswith("127.") and first.address != second.address
    file = house.folder() / "boot.json"
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("{}", 0o600)
    assert "born" in house.console()


def test_the_laptops_own_settings_do_not_reach_a_host(house: LocalHome, monkeypatch):
    monkeypatch.setenv("SPOTFLEET_HOME", "/nowhere")
    house.launch()
    assert not {"SPOTFLEET_HOME", "SPOTFLEET_LOCAL_OWNER_PID"} & house.born()["env"].keys()


def test_a_listing_names_the_place_where_the_host_is(house: LocalHome):
    machine, line = house.launch(), house.line()
    assert (line.address, line.port, line.state) == (machine.address, machine.port, CloudState.RUNNING)


def test_a_killed_host_dies_with_all_its_processes_at_once(house: LocalHome):
    house.launch(hide="one")
    pids = house.pids()
    assert len(pids) == 4 and all(map(lives, pids))
    house.cloud.kill("f-1")
    line = house.until(CloudState.TERMINATED)
    assert not any(map(lives, pids))
    assert line.runs[-1].taken and "asked to end" not in house.console()


def test_a_notice_is_told_on_the_host_and_kept(house: LocalHome):
    machine = house.launch()
    source = ImdsSource(machine.metadata_url)
    assert source.poll() is None
    house.provider.interrupt("f-1", 4.0)
    notice = source.poll()
    assert notice.action == "terminate" and 0.5 < notice.seconds_left <= 4.0
    assert all(map(lives, house.pids()))
    line = house.until(CloudState.TERMINATED)
    assert line.runs[-1].taken and line.runs[-1].ended_at - line.runs[-1].started_at > 3.9
    assert not any(map(lives, machine.processes))


def test_a_withdrawn_notice_takes_nothing(house: LocalHome):
    source = ImdsSource(house.launch().metadata_url)
    house.provider.interrupt("f-1", 600)
    house.cloud.withdraw_notice("f-1")
    assert source.poll() is None and house.line().state is CloudState.RUNNING


def test_a_rebalance_recommendation_is_only_a_hint(house: LocalHome):
    source = ImdsSource(house.launch().metadata_url)
    house.cloud.rebalance("f-1")
    assert source.poll().kind == "rebalance"
    assert house.line().state is CloudState.RUNNING


def test_a_terminated_host_is_asked_to_end_before_it_is_made_to(house: LocalHome):
    house.launch()
    pids = house.pids()
    house.provider.terminate("f-1")
    line = house.until(CloudState.TERMINATED)
    assert "asked to end" in house.console() and not line.runs[-1].taken
    assert not any(map(lives, pids))


def test_a_host_that_will_not_end_counts_as_running_until_it_is_gone_but_costs_no_more(house: LocalHome):
    house.launch(stubborn="yes")
    pid = house.pids()[0]
    house.provider.terminate("f-1")
    line = house.line()
    assert (line.state, line.runs[-1].ended_at) == (CloudState.RUNNING, None) and lives(pid)
    bill = house.cloud.invoice()
    line = house.until(CloudState.TERMINATED)
    assert not lives(pid) and house.cloud.invoice().hosts == bill.hosts
    assert line.runs[-1].ended_at is not None


def test_a_terminated_machine_loses_its_disk_but_for_the_console(house: LocalHome):
    house.launch(**{"secret.json": "{}"})
    house.provider.terminate("f-1")
    eventually(lambda: os.listdir(house.folder()) == ["console.log"])


def test_a_machine_runs_its_process_again_when_that_dies_with_the_same_disk_and_place(house: LocalHome):
    before = house.launch(keep="me")
    first = house.born()
    (house.folder() / "exit").write_text("3")
    second = house.born(after=first["pid"])
    after = house.machine()
    assert (after.address, after.port, after.metadata_url) == (before.address, before.port, before.metadata_url)
    assert (house.folder() / "keep").read_text() == "me"
    assert not any(map(lives, [first["pid"], *first["children"]])) and lives(second["pid"])
    assert len(house.line().runs) == 1


def test_a_crash_of_everything_on_a_machine_is_a_restart_not_an_end(house: LocalHome):
    house.launch()
    first = house.born()
    house.cloud.crash("f-1")
    house.born(after=first["pid"])
    assert not any(map(lives, [first["pid"], *first["children"]]))
    assert house.line().state is CloudState.RUNNING and house.machine().starts == 2


def test_a_process_that_keeps_dying_is_started_ever_more_rarely(house: LocalHome):
    started = time.monotonic()
    house.provider.launch(LaunchRequest("f-1", "f", Role.WORKER, house.offer(), Boot("no_such_module")))
    eventually(lambda: house.machine().starts >= 4)
    assert time.monotonic() - started >= 0.2 + 0.4 + 0.8
    assert "No module named no_such_module" in house.console()


def test_a_machine_that_switches_itself_off_has_ended_and_was_not_taken(house: LocalHome):
    house.launch()
    pids = house.pids()
    (house.folder() / "exit").write_text("0")
    line = house.until(CloudState.TERMINATED)
    assert not line.runs[-1].taken and line.why == "powered off by itself"
    assert not any(map(lives, pids))


def test_a_stopped_host_returns_to_its_place_with_its_disk(house: LocalHome):
    before = house.launch(behavior="stop", keep="me")
    first = house.born()
    house.provider.interrupt("f-1", None)
    assert house.until(CloudState.STOPPED).runs[-1].taken
    assert not any(map(lives, [first["pid"], *first["children"]]))
    house.cloud.start("f-1")
    house.born(after=first["pid"])
    after = house.machine()
    assert (after.address, after.port) == (before.address, before.port)
    assert (house.folder() / "keep").read_text() == "me"
    assert [r.taken for r in house.line().runs] == [True, False]


def test_a_killed_daemon_is_continued_by_the_next_one(house: LocalHome):
    before, line = house.launch(), house.line()
    source = ImdsSource(before.metadata_url)
    daemon = house.daemon_pid()
    os.kill(daemon, signal.SIGKILL)
    eventually(lambda: not lives(daemon))
    assert house.line() == line  # the same run goes on
    after = house.machine()
    assert house.daemon_pid() != daemon
    assert (after.processes, after.metadata_url) == (before.processes, before.metadata_url)
    house.provider.interrupt("f-1", 600)
    assert source.poll().action == "terminate"
    house.cloud.kill("f-1")
    house.until(CloudState.TERMINATED)
    assert not any(map(lives, before.processes))


def test_a_machine_that_died_while_no_daemon_looked_is_started_again_and_its_orphans_end(house: LocalHome):
    house.launch()
    first = house.born()
    daemon = house.daemon_pid()
    os.kill(daemon, signal.SIGKILL)
    os.kill(first["pid"], signal.SIGKILL)
    eventually(lambda: not lives(daemon) and not lives(first["pid"]))
    assert house.line().state is CloudState.RUNNING
    house.born(after=first["pid"])
    assert not any(map(lives, first["children"]))


def test_the_daemon_ends_after_its_last_host_and_the_next_one_still_knows_all(house: LocalHome):
    house.launch()
    daemon = house.daemon_pid()
    house.provider.terminate("f-1")
    line = house.until(CloudState.TERMINATED)
    bill = house.cloud.invoice()
    eventually(lambda: not lives(daemon))
    assert not (house.local / "cloud.json").exists()
    assert house.line() == line
    assert house.cloud.invoice().hosts == bill.hosts and bill.micros > 0


OWNER = """
import sys, time
from spotfleet.model import Need, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.local import LocalProvider
cloud = LocalProvider({"home": sys.argv[1]})
cloud.launch(LaunchRequest("f-1", "f", Role.WORKER, cloud.offers(Need())[0], Boot("idler")))
time.sleep(600)
"""


def test_the_cloud_dies_with_its_owner(house: LocalHome):
    home = str(house.home)
    command = f"import os; os.environ['SPOTFLEET_LOCAL_OWNER_PID'] = str(os.getpid())\n{OWNER}"
    owner = subprocess.Popen([sys.executable, "-c", command, home])
    try:
        pids = house.pids()
        daemon = house.daemon_pid()
    finally:
        owner.kill()
        owner.wait()
    eventually(lambda: not any(map(lives, [daemon, *pids])))


def test_many_callers_at_once_start_one_daemon(house: LocalHome):
    seen: list[int] = []
    callers = [threading.Thread(target=lambda: (house.provider.check(), seen.append(house.daemon_pid())))
               for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert len(seen) == 8 and len(set(seen)) == 1


def test_a_second_daemon_of_one_home_gives_way(house: LocalHome):
    house.provider.check()
    daemon = house.daemon_pid()
    command = [sys.executable, "-m", "spotfleet.providers.local.cloud", "--home", str(house.home)]
    assert subprocess.run(command, timeout=30).returncode == 0
    assert house.daemon_pid() == daemon and lives(daemon)


def test_a_daemon_that_cannot_start_shows_its_log(house: LocalHome):
    (house.local / "cloud.lock").mkdir(parents=True)
    with pytest.raises(SpotfleetError, match="did not start") as caught:
        house.provider.check()
    assert "IsADirectoryError" in caught.value.hint
    (house.local / "cloud.lock").rmdir()


def test_shutdown_leaves_no_process_and_keeps_the_bill(house: LocalHome):
    house.launch()
    pids = [house.daemon_pid(), *house.pids()]
    house.cloud.shutdown()
    assert not any(map(lives, pids))
    assert house.cloud.invoice().micros > 0


def test_asking_an_empty_home_for_hosts_starts_nothing(house: LocalHome):
    assert house.provider.hosts("f") == []
    house.cloud.shutdown()
    assert not house.local.exists()


def test_a_state_that_cannot_be_read_is_kept_aside(house: LocalHome):
    house.local.mkdir(parents=True)
    (house.local / "state.json").write_text("{")
    house.launch()
    assert (house.local / "state.json.unreadable").read_text() == "{"


def test_only_who_can_read_the_home_can_call_the_daemon(house: LocalHome):
    house.provider.check()
    path = house.local / "cloud.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    connection = HTTPConnection("127.0.0.1", json.loads(path.read_text())["port"], timeout=10)
    connection.request("POST", "/call", json.dumps({"method": "shutdown", "args": {}}), {"Authorization": "Bearer x"})
    assert connection.getresponse().status == 401
    connection.close()
    assert lives(house.daemon_pid())


def test_bad_names_are_refused_with_the_field_and_leave_nothing(house: LocalHome):
    offer = house.offer()
    for request, field in (
        (LaunchRequest("../f", "f", Role.WORKER, offer, Boot("idler")), "request_id"),
        (LaunchRequest("f-1", "f", Role.WORKER, offer, Boot("idler", {"a/b": ""})), "boot.files"),
    ):
        with pytest.raises(UsageError, match=field):
            house.provider.launch(request)
    assert house.provider.hosts("f") == [] and not (house.local / "hosts").exists()


def test_refusals_come_through_with_their_scope(house: LocalHome):
    house.cloud.refuse(house.offer().pool, "region", for_s=600)
    with pytest.raises(NoCapacity) as caught:
        house.launch()
    assert caught.value.scope == "region"


def test_every_call_can_be_slow(house: LocalHome):
    house.cloud.latency(0.3)
    started = time.monotonic()
    house.provider.offers(Need())
    assert time.monotonic() - started >= 0.3


def test_a_fleet_pays_only_for_its_own_hosts(house: LocalHome):
    house.launch()
    assert house.cloud.invoice("other").hosts == {} and list(house.cloud.invoice("f").hosts) == ["f-1"]


def test_two_homes_are_two_clouds(house: LocalHome, tmp_path):
    house.launch()
    other = tmp_path / "other"
    try:
        assert LocalProvider({"home": str(other)}).offers(Need()) and LocalCloud(other).truth() == []
    finally:
        LocalCloud(other).shutdown()
    assert lives(house.daemon_pid())



def test_disks_and_addresses_are_listed_and_billed_beside_machines(house: LocalHome):
    rates = Rates(disk_micros_gib_month=80_000, address_micros_h=5_000, source="test")
    house.cloud.reset(replace(default_rules(), rates=rates, disk_gib=10**6, addresses=2))
    assert house.provider.rates("local") == rates
    house.launch()
    line = house.until(CloudState.RUNNING)
    assert (line.disk_gib, line.addresses, line.ended_at) == (10**6, 2, None)
    house.provider.terminate("f-1")
    ended = house.until(CloudState.TERMINATED)
    bill = house.cloud.invoice("f")
    seconds = math.ceil(ended.ended_at - ended.runs[0].started_at)
    assert bill.disks == {"f-1": round_half_up(seconds * 10**6 * 80_000, 730 * 3600)}
    assert bill.addresses == {"f-1": round_half_up(seconds * 2 * 5_000)}
    assert bill.micros == bill.hosts["f-1"] + bill.disks["f-1"] + bill.addresses["f-1"]
