"""`spotfleet down` and the commands that look: what is brought home, proved, and still known afterwards."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest

from spotfleet.api import Fleet, transfers
from spotfleet.api.home import Home
from spotfleet.api.lifecycle import down as down_module
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.domain.events import FleetDown, GenerationFormed, JobProgress, JobResumed, ResultsLost
from spotfleet.model import Role
from spotfleet.protocol.archive import ArchiveFile
from tests.support.cli.cli_cloud import FakeHandler
from tests.support.cli.cli_user import FILE

READS = ("status", "hosts", "jobs", "events", "cost")


def test_down_brings_the_results_home_and_ends_every_machine(up):
    up.ok("train hello.py")
    said = up.ok("down -y")
    archive = up.home / "fleets/digits/archive"
    assert (archive / "jobs/hello-1/logs/rank-0.log").read_text() == "hello \n"
    assert (archive / "ledger.db").exists()
    assert up.cloud.living() == []
    assert "the provider lists nothing of it" in said.err and "next: spotfleet cost digits" in said.err


def test_no_host_is_left_when_the_results_are_copied(up, monkeypatch):
    send, left = FakeHandler._archive, []

    def archive(handler):
        left.append(up.workers())
        send(handler)

    monkeypatch.setattr(FakeHandler, "_archive", archive)
    up.ok("down -y")
    assert left == [[]]


def test_checkpoints_that_stay_where_they_are_are_printed(up, monkeypatch):
    stays = ArchiveFile("jobs/hello-1/checkpoints/7-1.ckpt", 22_000_000, "0" * 64, "/target/7-1.ckpt")

    def fetch(client, draft, *_, **options):
        (draft / "files").mkdir(parents=True)
        asked.append(options["bring_checkpoints"])
        return transfers.Fetched(draft / "files", 0, 0.0, () if asked[-1] else (stays,))

    asked: list[bool] = []
    monkeypatch.setattr(transfers, "fetch", fetch)
    said = up.ok("down -y")
    assert asked == [False] and "checkpoint 7-1 of hello-1 (22.0 MB) stays at /target/7-1.ckpt" in said.err
    listed = json.loads((up.home / "fleets/digits/archive/checkpoints-elsewhere.json").read_text())
    assert [(file["key"], file["at"]) for file in listed] == [(stays.key, stays.at)]
    up.ok("up fleet.yaml -y")
    assert "stays at" not in up.ok("down -y --bring-checkpoints").err and asked == [False, True]


def test_a_checkpoint_is_brought_from_an_object_store_into_the_archive(up, monkeypatch):
    lies = ArchiveFile("jobs/hello-1/checkpoints/7-1", 22_000_000, "0" * 64, "s3://bucket/7-1")

    def fetch(client, draft, *_, **options):
        (draft / "files").mkdir(parents=True)
        return transfers.Fetched(draft / "files", 0, 0.0, (lies,))

    def bring(checkpoint, draft, progress, seed):
        assert checkpoint == lies
        (draft / "files").mkdir(parents=True)
        (draft / "files/.metadata").write_text("where")
        return draft / "files"

    monkeypatch.setattr(transfers, "fetch", fetch)
    monkeypatch.setattr(transfers, "bring", bring)
    assert "stays at" not in up.ok("down -y --bring-checkpoints").err
    assert (up.home / "fleets/digits/archive" / lies.key / ".metadata").read_text() == "where"


def test_down_names_what_was_not_collected_and_has_not_succeeded_unless_it_was_to_be_given_up(up):
    lost = ResultsLost(time.time(), "hello-1", "digits-0", "output", 22_000_000, "its disk is full")
    up.dispatcher.ledger.append(lost)
    said = up.types("down -y")
    assert said.code == 1 and up.cloud.living() == [], said
    assert "not collected: 22.0 MB of the output of hello-1 (lost with digits-0)" in said.err
    assert "; not-collected.json there lists what was not collected" in said.err
    assert "the provider lists nothing of it; what was collected is in " in said.err
    up.ok("up fleet.yaml -y")
    up.dispatcher.ledger.append(lost)
    assert "not collected: 22.0 MB of the output" in up.ok("down -y --discard").err


def test_what_is_known_of_a_fleet_is_known_after_its_end(up):
    up.ok("train hello.py")
    up.ok("down -y")
    assert "fleet digits: down" in up.ok("status").out and "hello-1" in up.ok("jobs").out
    assert json.loads(up.ok("jobs -o json").out)[0]["kind"] == "command"
    assert up.ok("logs hello-1").out == "hello \n"
    kinds = [e["kind"] for e in json.loads(up.ok("events -o json").out)]
    assert kinds[-1] == "FleetDown" and {"FleetCreated", "JobSubmitted", "HostJoined"} <= set(kinds)
    assert up.ok("hosts").out == ""
    assert "no output of job 'hello-9'" in up.fails("logs hello-9").err


def test_only_the_owner_may_read_what_is_kept_of_a_fleet(user):
    before = os.umask(0)
    try:
        user.ok("up fleet.yaml -y")
        user.ok("train hello.py")
        user.ok("down -y")
    finally:
        os.umask(before)
    folder = user.home / "fleets/digits"
    assert (folder / "archive/jobs/hello-1/logs/rank-0.log").exists() and (folder / "ledger.db").exists()
    assert [path for path in (user.home, *user.home.rglob("*")) if path.stat().st_mode & 0o077] == []


def test_an_earlier_fleet_of_the_same_name_is_read_by_the_name_that_up_prints(up):
    up.ok("train hello.py")
    up.ok("down -y")
    said = up.ok("up fleet.yaml -y").err
    name, archive = re.search(r"digits is now called (\S+); its results are in (\S+)", said).groups()
    assert (Path(archive) / "jobs/hello-1/logs/rank-0.log").read_text() == "hello \n"
    assert up.ok(f"logs -c {name}").out == up.ok(f"logs hello-1 -c {name}").out == "hello \n"
    assert "hello-1" in up.ok(f"events {name}").out and "hello-1" in up.ok(f"jobs {name}").out
    assert up.ok(f"outputs hello-1 -c {name}").code == 0
    assert up.ok(f"status {name}").out.startswith(f"fleet {name}: down")
    assert "is down already" in up.ok(f"down {name} -y").err and f"fleet '{name}' is down" in up.fails(
        f"train hello.py -c {name}").err
    assert len(up.workers()) == 3 and up.ok("status").out.startswith("fleet digits: up")


def test_a_damaged_folder_that_attach_replaced_is_no_earlier_fleet(up):
    home = Home(up.home)
    old = home.move_to_old(home.folder("digits"))  # its record says that it is up
    assert "there is no fleet" in up.fails(f"down {old.name} -y").err and len(up.workers()) == 3


def test_the_bill_after_the_end_is_the_clouds_own_and_stays_so(up):
    up.ok("down -y")
    bill = json.loads(up.ok("cost -o json").out)
    invoice = up.cloud.market.invoice(up.cloud.clock(), "digits")
    assert {line["host"]: line["micros"] for line in bill["lines"]} == invoice.hosts
    assert len(bill["lines"]) == 4
    assert json.loads(up.ok("cost -o json").out) == bill


def test_cost_as_csv_has_one_line_per_host(up):
    rows = list(csv.DictReader(io.StringIO(up.ok("cost -o csv").out)))
    assert sorted(r["role"] for r in rows) == ["dispatcher", "worker", "worker", "worker"]


@pytest.mark.parametrize("command", READS)
def test_each_read_command_speaks_json_on_stdout_alone(up, command):
    said = up.ok(f"{command} -o json")
    assert json.loads(said.out) is not None and said.err == ""


def test_hosts_prints_what_a_host_discovery_script_prints(up):
    addresses = [h.address for h in up.cloud.hosts("digits") if h.role is Role.WORKER]
    assert sorted(up.ok("hosts").out.splitlines()) == sorted(f"{a}:1" for a in addresses)


def test_status_shows_hosts_and_what_they_cost(up):
    out = up.ok("status").out
    assert out.startswith("fleet digits: up") and "; costs $" in out
    assert all(name in out for name in up.workers()) and "\x1b" not in out


def test_status_of_a_fleet_without_hosts_says_that_its_dispatcher_still_runs_and_how_to_end_it(up):
    up.dispatcher.going_down = "asked by `spotfleet down`"
    while up.workers():
        up.dispatcher.tick()
    said = up.ok("status").err
    assert "its dispatcher's machine still runs" in said and "`spotfleet down digits` copies them here" in said
    up.ok("down -y")
    assert "still runs" not in up.ok("status").err


def test_the_second_down_says_that_nothing_is_left(up):
    up.ok("down -y")
    assert "is down already" in up.ok("down").err
    assert "is down" in up.fails("train hello.py").err


def test_down_asks_first(up):
    assert "add -y" in up.fails("down", code=2).err
    assert len(up.workers()) == 3


def test_down_names_the_jobs_that_it_would_cancel_before_it_asks(up):
    assert "cancelled" not in up.fails("down", code=2).err
    up.write("long.py", "import time\ntime.sleep(600)\n")
    up.ok("train long.py -d")
    assert "1 job is not done and will be cancelled: long-1 (" in up.fails("down", code=2).err
    up.ok("cancel long-1")


def test_a_dead_dispatcher_is_not_given_up_without_being_told_so(up):
    up.dispatcher.stop()
    said = up.fails("down -y")
    assert "cannot be copied to this machine" in said.err and "--discard" in said.err
    assert len(up.cloud.living()) == 4
    said = up.ok("down -y --discard")
    assert "no results were copied here" in said.err
    assert up.cloud.living() == []
    assert "no results were copied here" in up.ok("status").out


def test_a_dispatcher_that_restarts_is_waited_for(up):
    up.dispatcher.stop()
    fleet = Fleet("digits")
    up.dispatcher.start()
    assert fleet.status().state == "up"
    up.ok("down -y")


def test_a_dispatcher_that_restarts_late_in_a_long_down_is_waited_for_as_long_as_at_its_begin(up, monkeypatch):
    dispatcher, asked = up.dispatcher, []

    def restart_after_a_while(client, *_):
        asked.append(True)
        if len(asked) == 1:
            time.sleep(2.2)  # longer than `down` has patience with a dispatcher that it has never heard
            dispatcher.stop()
            try:
                client.status()
            finally:
                threading.Timer(0.1, dispatcher.start).start()

    monkeypatch.setattr(down_module, "PATIENCE_S", 2.0)
    monkeypatch.setattr(down_module, "_wait_for_workers", restart_after_a_while)
    up.ok("down -y")
    assert len(asked) == 2 and up.cloud.living() == []


def test_a_dispatcher_whose_archive_never_arrives_is_not_asked_for_ever(up, monkeypatch):
    def break_off(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.close_connection = True

    monkeypatch.setattr(FakeHandler, "_archive", break_off)
    monkeypatch.setattr(down_module, "RESTARTS", 1)
    assert "cannot be copied to this machine" in up.fails("down -y").err


def test_a_dispatcher_whose_machine_was_lost_is_said_to_be_gone(up):
    dispatcher = up.dispatcher
    dispatcher.stop()
    up.cloud.interrupt(dispatcher.boot["host"], None)
    assert "the dispatcher's machine is gone" in up.fails("down -y").err
    up.ok("down -y --discard")
    assert up.cloud.living() == []


def test_every_command_says_what_to_type_when_the_dispatchers_machine_is_gone_and_up_does_it(up):
    first = up.dispatcher
    first.stop()
    up.cloud.interrupt(first.boot["host"], None)
    for command in ("status", "hosts", "jobs", "events", "train hello.py", "drain digits-0"):
        said = up.fails(command)
        assert "the dispatcher's machine is gone; 3 hosts go on without it" in said.err, said
        assert "`spotfleet up FILE` starts a new one, which takes over 3 hosts" in said.err, said
    up.cloud.dispatchers.pop(first.boot["host"])
    said = up.ok("up fleet.yaml -y")
    assert "the dispatcher's machine is gone; a new one takes over 3 hosts" in said.err
    assert "a new dispatcher has taken over: fleet digits is up with 3 hosts" in said.err
    assert "nothing to change" not in said.err
    assert len(up.workers()) == 3 and up.dispatcher.boot["host"] == "digits-d-1"
    assert {k: v for k, v in up.dispatcher.boot.items() if k != "host"} == {
        k: v for k, v in first.boot.items() if k != "host"}
    up.ok("status")


def test_a_fleet_that_lost_all_machines_goes_on_from_its_target_and_is_not_taken_for_ended(user, tmp_path):
    user.write("fleet.yaml", f"{FILE}checkpoint: {{target: {tmp_path}}}\n")
    user.ok("up fleet.yaml -y")
    first = user.dispatcher
    first.stop()
    for host in user.cloud.living():
        user.cloud.interrupt(host, None)
    said = user.fails("status")
    assert "all machines are gone" in said.err and f"goes on from {tmp_path}" in said.err
    assert f"`spotfleet up FILE` goes on from {tmp_path}" in user.fails("down -y").err
    user.cloud.dispatchers.pop(first.boot["host"])
    assert "all machines are gone; a new one goes on from" in user.ok("up fleet.yaml -y").err
    assert user.dispatcher.boot["fleet_secret"] == first.boot["fleet_secret"]  # the same fleet, not a new one


def test_an_up_that_never_reached_its_dispatcher_can_be_taken_down(user):
    start = user.cloud.launch

    def launch_mute(request):
        start(request)
        if request.role is Role.DISPATCHER:
            user.dispatcher.stop()

    user.cloud.launch = launch_mute
    assert "does not answer" in user.fails("up fleet.yaml -y --timeout 3s").err
    assert user.cloud.living() == ["digits-d-0"]
    assert "no dispatcher yet" in user.fails("train hello.py").err
    user.ok("down -y")
    assert user.cloud.living() == []


def test_looking_at_a_fleet_whose_machine_is_not_listed_yet_does_not_end_it(user):
    start, hosts = user.cloud.launch, user.cloud.hosts

    def launch_and_be_interrupted(request):
        start(request)
        raise KeyboardInterrupt

    user.cloud.launch, user.cloud.hosts = launch_and_be_interrupted, lambda fleet: []
    user.types("up fleet.yaml -y")
    assert "no dispatcher yet" in user.fails("status").err
    user.cloud.launch, user.cloud.hosts = start, hosts
    assert user.cloud.living() == ["digits-d-0"]
    user.ok("up fleet.yaml -y")


def test_an_interrupted_up_is_continued(user):
    start, user.cloud.launch = user.cloud.launch, lambda _request: (_ for _ in ()).throw(KeyboardInterrupt)
    said = user.types("up fleet.yaml -y")
    assert said.code == 130
    assert "`spotfleet up fleet.yaml` goes on, `spotfleet down digits` ends them" in said.err
    assert said.err.count("interrupted") == 1
    user.cloud.launch = start
    said = user.ok("up fleet.yaml -y")
    assert "started before, to be continued" in said.err and len(user.workers()) == 3


def test_a_fleet_that_has_stopped_itself_is_found_down_with_its_results_at_home(up):
    up.ok("train hello.py")
    up.dispatcher.end_itself()
    assert "fleet digits: down" in up.ok("status").out
    assert up.ok("logs hello-1").out == "hello \n"
    up.ok("down -y")
    invoice = up.cloud.market.invoice(up.cloud.clock(), "digits")
    assert json.loads(up.ok("cost -o json").out)["micros"] == invoice.micros


def test_a_fleet_that_has_stopped_itself_is_made_anew_by_up(up):
    up.dispatcher.end_itself()
    assert "to be made" in up.ok("up fleet.yaml -y").err
    assert len(up.workers()) == 3
    up.ok("down -y")
    assert up.cloud.living() == []


def test_hosts_can_be_drained_and_interrupted_by_name_or_address(up):
    first, second, _ = [h for h in up.cloud.hosts("digits") if h.role is Role.WORKER]
    assert f"draining {first.request_id}" in up.ok(f"drain {first.address}").err
    up.ok(f"chaos kill {second.request_id}")
    assert second.request_id not in up.workers()
    assert "after a notice of 30 s" in up.ok(f"chaos preempt {first.request_id} --notice 30").err
    assert "has no host 'digits-99'" in up.fails("chaos kill digits-99").err


def test_events_are_told_in_sentences_and_routine_only_when_asked_for(up):
    up.ok("train hello.py")
    lines = up.ok("events").out.splitlines()
    assert lines[0].endswith(" UTC") and "on local begun on this machine: 2..3 hosts, target 3" in lines[1]
    assert any("digits-0    is up: its agent has joined" in line for line in lines)
    assert any("hello-1     submitted for 2..3 workers: hello.py" in line for line in lines)
    assert not any(" costs $" in line for line in lines)
    assert any(" costs $" in line for line in up.ok("events --all").out.splitlines())


def test_the_status_of_an_ended_fleet_says_why_it_ended_how_long_it_lived_and_what_each_job_reached(up):
    up.ok("train hello.py")
    job = next(iter(up.dispatcher.jobs))
    at = time.time()
    up.dispatcher.ledger.append(GenerationFormed(at, job, 4, ("digits-0/0/1",), "death", "digits-1/0/2 fell silent", 3))
    up.dispatcher.ledger.append(JobResumed(at, job, 4, 4, 2, 0.1))
    up.dispatcher.ledger.append(JobProgress(at, job, 7, 0.0125))
    up.dispatcher.ledger.append(FleetDown(at, "idle for 6 s (autostop)"))
    up.dispatcher.end_itself()
    said = up.ok("status")
    lines = said.out.splitlines()
    assert lines[0] == "fleet digits: down, idle for 6 s (autostop); nothing of it is left"
    assert lines[1].startswith("2..3 hosts, target 3; it lived ")
    assert lines[-1].split()[:10] == ["hello-1", "hello", "command", "succeeded", "-", "(2..3)", "4", "7", "2", "12.5"]
    assert "next: spotfleet cost digits" in said.err
    found = json.loads(up.ok("status -o json").out)
    assert found["age_s"] > 0
    folder = Home(up.home).folder("digits")
    folder.update(down_at=folder.record.down_at + 600)  # as if nobody had looked for ten minutes
    assert json.loads(up.ok("status -o json").out)["age_s"] == found["age_s"]


def test_status_calls_a_fleet_by_its_own_name_also_where_the_cloud_knows_it_by_another(up):
    up.ok("down -y")
    up.ok("up fleet.yaml -y")
    assert up.workers()[0].startswith("digits-") and up.workers()[0].count("-") == 2
    assert up.ok("status").out.startswith("fleet digits: up")


def test_a_rank_or_worker_that_the_job_cannot_have_is_refused_with_those_it_has(up):
    up.ok("train hello.py --np 1:2")
    said = up.fails("logs hello-1 --rank 2")
    assert "job 'hello-1' has no rank 2" in said.err and "at most 2 workers: 0..1" in said.err
    said = up.fails("logs hello-1 --worker digits-9/0/1")
    assert "job 'hello-1' has no worker 'digits-9/0/1'" in said.err and "it has digits-0/0/1" in said.err
    assert up.ok("logs hello-1 --worker digits-0/0/1").out == "hello \n"


@pytest.mark.parametrize("command", ["drain", "chaos kill", "chaos preempt"])
def test_the_dispatchers_machine_cannot_be_taken_away(up, command):
    said = up.fails(f"{command} digits-d-0")
    assert said.err.startswith("error: digits-d-0 is the dispatcher's machine")
    assert "digits-0, digits-1, digits-2" in said.err and "digits-d-0" in up.cloud.living()


@pytest.mark.parametrize("command", ["drain", "revoke", "chaos kill", "chaos preempt"])
def test_a_command_on_a_host_without_its_name_lists_the_hosts(up, command):
    said = up.fails(command, code=2)
    assert "no host of fleet 'digits' is named" in said.err and "it has digits-0, digits-1, digits-2" in said.err


def test_hosts_of_an_ended_fleet_are_not_looked_for(up):
    up.ok("down -y")
    assert "fleet 'digits' is down" in up.fails("drain digits-0").err


def test_the_users_secrets_are_forgotten_when_the_fleet_is_down(user, monkeypatch):
    monkeypatch.setenv("TOKEN", "hunter22")
    user.write("fleet.yaml", "name: digits\nresources: {instance_type: cpu.small}\nsecrets: {TOKEN: }\n")
    user.ok("up fleet.yaml -y")
    keys = user.home / "fleets/digits/keys.json"
    assert "hunter22" in keys.read_text()
    assert "hunter22" not in json.dumps(user.dispatcher.boot)  # each job brings its own; the machine needs none
    user.ok("down -y")
    assert "hunter22" not in keys.read_text()


def test_what_a_killed_command_was_writing_is_removed_by_the_next(up):
    gone = subprocess.Popen(["true"])
    gone.wait()
    folder = up.home / "fleets/digits"
    dead, living = folder / f".keys.json.{gone.pid}", folder / f".fleet.json.{os.getppid()}"
    dead.write_text("half")
    living.write_text("half")
    up.ok("up fleet.yaml")
    assert not dead.exists() and living.exists()


def test_when_all_fleets_have_ended_one_must_be_named(up):
    up.write("two.yaml", "name: two\nresources: {instance_type: cpu.small}\n")
    up.ok("up two.yaml -y")
    up.ok("down two -y")
    up.ok("down digits -y")
    said = up.fails("down", code=2)
    assert "no fleet is up, and several have been" in said.err and "digits, two" in said.err
    assert "`spotfleet up FILE` makes one" in said.err and "`spotfleet logs -c digits`" in said.err
    listed = up.ok("status").out.splitlines()[1:]
    assert [line.split()[:2] for line in listed] == [["digits", "down"], ["two", "down"]]


@pytest.mark.parametrize("command", ["train hello.py", "down -y", "cost", "hosts", "logs"])
def test_without_a_fleet_a_command_that_needs_one_says_how_to_make_one(user, command):
    said = user.fails(command)
    assert "there is no fleet" in said.err and "spotfleet up FILE" in said.err


def test_a_fleet_that_does_not_exist_is_named_with_those_that_do(up):
    said = up.fails("status other")
    assert "there is no fleet 'other'" in said.err and "there are: digits" in said.err


def test_several_fleets_must_be_named(up):
    up.write("two.yaml", "name: two\nresources: {instance_type: cpu.small}\n")
    assert "spotfleet train SCRIPT.py -c two" in up.ok("up two.yaml -y").err
    said = up.fails("cost", code=2).err
    assert "say which one" in said and "-c digits" in said and "makes one" not in said
    listed = up.ok("status").out.splitlines()[1:]
    assert [line.split()[:2] for line in listed] == [["digits", "up"], ["two", "up"]]
    assert "fleet two: up" in up.ok("status two").out
    assert up.ok("train hello.py -c two").out == "hello \n"
    up.ok("down two -y")
    assert "fleet digits: up" in up.ok("status").out  # only one is left
    up.ok("down -y")
    assert up.cloud.living() == []


def test_the_python_api_does_the_same(user):
    fleet = Fleet(user.work / "fleet.yaml")
    lines: list[str] = []
    fleet.up(progress=lines.append)
    assert lines
    got: list[bytes] = []
    job = fleet.train("hello.py", ["x"], np=(1, 2), envs={"A": "1"}, output=got.append)
    assert b"".join(got) == b"hello x 1\n" == b"".join(job.logs())
    assert job.state.value == "succeeded" and job.wait().version == 7
    assert [j.id for j in fleet.jobs()] == ["hello-1"]
    with pytest.raises(SpotfleetError, match="no job 'none'"):
        fleet.job("none")
    fleet.down()
    assert fleet.ended and fleet.status().state == "down" and user.cloud.living() == []
