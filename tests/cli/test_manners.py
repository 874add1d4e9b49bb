"""Empty lists, output that is cut short, and a file of the wrong kind."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from spotfleet import plugins, version
from spotfleet.api import train
from spotfleet.cli import completion, console, main
from spotfleet.cli.app import app
from spotfleet.cli.commands import follow
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec, JobSpec, JobState
from tests.support.cli.cli_cloud import FakeHandler, FakeJob
from tests.support.cli.cli_user import COMMANDS


@pytest.mark.parametrize("command", ["status", "jobs", "events"])
def test_without_a_fleet_a_list_is_empty_and_no_error(user, command):
    said = user.ok(command)
    assert (said.out, said.err) == ("", "there is no fleet; `spotfleet up FILE` makes one\n")
    assert json.loads(user.ok(f"{command} -o json").out) == []


def test_the_status_of_all_fleets_lists_also_ended_ones(up):
    up.write("two.yaml", "name: two\nresources: {instance_type: cpu.small}\n")
    up.ok("up two.yaml -y")
    up.ok("down two -y")
    listed = [line.split()[:2] for line in up.ok("status --all").out.splitlines()[1:]]
    assert listed == [["digits", "up"], ["two", "down"]]
    assert [f["fleet"] for f in json.loads(up.ok("status -a -o json").out)] == ["digits", "two"]
    assert "leave the name" in up.fails("status two --all", code=2).err


def test_of_many_fleets_that_have_ended_the_newest_are_named_and_the_others_counted(up):
    up.ok("down digits -y")
    fleets = up.home / "fleets"
    record = json.loads((fleets / "digits" / "fleet.json").read_text())
    for number in range(7):
        (fleets / f"train-{number}").mkdir()
        text = json.dumps(record | {"spec": record["spec"] | {"name": f"train-{number}"}})
        (fleets / f"train-{number}" / "fleet.json").write_text(text)
        os.utime(fleets / f"train-{number}" / "fleet.json", (number, number))
    said = up.ok("status")
    assert [line.split()[0] for line in said.out.splitlines()[1:]] == [
        "digits", "train-3", "train-4", "train-5", "train-6"]
    assert "and 3 more fleets that ended before: `spotfleet status --all`" in said.err
    assert len(json.loads(up.ok("status -o json").out)) == 8
    named = "digits, train-3, train-4, train-5, train-6 and 3 more, see `spotfleet status --all`"
    assert f"one of: {named}" in up.fails("events", code=2).err
    assert f"there are: {named}" in up.fails("status lab").err


def test_ctrl_c_while_modules_are_imported_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr("spotfleet.cli.app.handle_sigterm", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_a_fleet_that_is_named_and_does_not_exist_is_an_error(user):
    assert "there is no fleet 'lab'" in user.fails("status lab").err


def test_a_command_that_only_waits_ends_when_nothing_reads_its_output(monkeypatch):
    read, write = os.pipe()
    with os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(console, "READER_S", 0.01)
        began = time.monotonic()
        with pytest.raises(BrokenPipeError), console.ends_with_its_reader():
            threading.Timer(0.02, os.close, [read]).start()
            time.sleep(60)
        assert time.monotonic() - began < 50


def test_the_plan_says_that_an_emulated_clouds_prices_are_invented(user):
    shown = " ".join(user.ok("up fleet.yaml --dryrun").out.split())
    assert "provider local emulates a cloud on this machine: its prices are invented and nothing is billed" in shown


def test_the_help_names_every_provider_of_this_package():
    packaged = [name for name in plugins.names() if plugins.load(name).__module__.startswith("spotfleet.")]
    assert {"aws", "gcp", "local", "ssh"} <= {*packaged}
    assert [name for name in packaged if not re.search(rf"\b{name}\b", app.info.help or "")] == []


@pytest.mark.parametrize(("script", "command", "name"), [
    ("a/Train_it.py", "", "train-it"), ("", "", "lab"), ("", "torchrun train.py --lr 3", "train"),
    ("", "A=1 /opt/bin/python3.11 -u a/x.py b.py", "x"), ("", "python -m timeit", "python"), ("", "cat x.py", "cat"),
    ("", "CUDA_VISIBLE_DEVICES=0 ./bin/prepare.sh", "prepare"), ("", "A=1", "lab"), ("", "[ -e x ]", "job"),
    ("", "x" * 90, "x" * 40),
])
def test_a_command_is_named_after_its_program_as_a_fleet_and_a_number_may_be_a_host(script, command, name):
    assert train.job_name(script, command, FleetSpec("lab")) == name


@pytest.mark.parametrize(("name", "hint"), [
    ("snapshot.pt", "'snapshot*.pt' for this file; snapshot.pt/ if"), ("out/last.ckpt", "'out/last*.ckpt'"),
    ("checkpoint.pth.tar", "'checkpoint.pth*.tar'"),
])
def test_a_file_in_the_place_of_the_folder_of_checkpoints_is_refused_with_its_pattern(name, hint):
    with pytest.raises(UsageError, match="names a file") as refused:
        train.inside_folder(name)
    assert hint in (refused.value.hint or "")


@pytest.mark.parametrize("name", ["out", "out/", "*.pt", "out/last*.ckpt", "snapshot.pt/", "v1.2"])
def test_a_folder_or_a_pattern_of_checkpoints_is_taken(name):
    assert train.inside_folder(name) == name.rstrip("/")


def test_the_way_to_install_changes_in_one_place_with_publication(monkeypatch):
    assert version.install("aws").startswith("pip install '.[aws]'   (in a clone") and "git pull" in version.upgrade()
    monkeypatch.setattr(version, "PUBLISHED", True)
    assert version.install("aws") == "pip install 'spotfleet[aws]'" and version.install() == "pip install 'spotfleet'"
    assert version.upgrade() == "`pip install --upgrade spotfleet`"


def test_a_fleet_file_in_the_place_of_a_script_is_refused_before_it_is_sent(up):
    said = up.fails("train fleet.yaml", code=2)
    assert "fleet.yaml is a YAML file, not a Python script" in said.err and "`spotfleet up fleet.yaml`" in said.err
    assert up.dispatcher.jobs == {}


HOSTS = ["digits-0", "digits-1", "digits-2"]


@pytest.mark.parametrize(("line", "found"), [
    ("status d", ["digits"]), ("status x", []), ("logs h", ["hello-1"]), ("logs -c digits hello", ["hello-1"]),
    ("logs -c other h", []), ("drain digits-", HOSTS), ("ssh digits-", HOSTS),
    ("train -c ", ["digits"]), ("cancel h", ["hello-1"]), ("cost d", ["digits"]),
])
def test_the_shell_completes_names_without_a_request(up, monkeypatch, line, found):
    up.ok("train hello.py")
    up.ok("status")
    for dispatcher in up.cloud.dispatchers.values():
        dispatcher.stop()
    words = ["spotfleet", *line.split(" ")]
    monkeypatch.setenv("_SPOTFLEET_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    up.capture.readouterr()
    with pytest.raises(SystemExit):
        COMMANDS(app).main(args=[], prog_name="spotfleet", standalone_mode=False)
    assert up.capture.readouterr().out.split() == found


def test_damaged_or_missing_names_complete_nothing(up):
    folder = up.home / "fleets/digits"
    for text in ("", "[1]", '{"jobs": 3}', "{}"):
        (folder / "names.json").write_text(text)
        assert completion.jobs(SimpleNamespace(params={}), "") == []
    (folder / "names.json").unlink()
    assert completion.hosts(SimpleNamespace(params={}), "") == []


PRINTS = "for n in range(5): print('line', n)\n"


def test_logs_print_the_last_lines_of_a_running_and_of_an_ended_fleet(up):
    up.write("prints.py", PRINTS)
    up.ok("train prints.py")
    assert up.ok("logs -n 2").out == "line 3\nline 4\n"
    up.ok("down -y")
    assert up.ok("logs -n 2").out == "line 3\nline 4\n" and up.ok("logs prints-1 --tail 0").out == ""
    assert "does not hold the time of a line" in up.fails("logs --since 5m", code=2).err
    assert up.ok("logs --all -n 1").out == "rank 0: line 4\n"
    (up.home / "fleets/digits/archive/jobs/prints-1/logs/digits-0#setup.log").write_text("one\ntwo\n")
    assert up.ok("logs --setup -n 1").out == "==> digits-0 <==\ntwo\n"


def test_the_last_lines_are_counted_here_where_the_dispatcher_is_of_an_earlier_release(up, monkeypatch):
    serve = FakeHandler._jobs

    def of_before(handler, rest):
        return handler._answer({}, 405) if rest[-1:] == ["start"] else serve(handler, rest)

    monkeypatch.setattr(FakeHandler, "_jobs", of_before)
    up.write("prints.py", PRINTS)
    up.ok("train prints.py")
    assert up.ok("logs -n 2").out == "line 3\nline 4\n"
    up.write("prints.py", PRINTS + "print('the end', end='')\n")
    up.ok("train prints.py")
    assert up.ok("logs -n 2").out == "line 4\nthe end" and up.ok("logs -n 0").out == ""
    assert up.ok("logs -n 99").out == up.ok("logs --since 1h").out == up.ok("logs").out


def test_logs_of_all_ranks_name_the_rank_of_each_line(up):
    up.write("prints.py", PRINTS)
    up.ok("train prints.py --np 2")
    for line in ("logs --all", "logs -af"):
        assert sorted(up.ok(line).out.splitlines()) == sorted(f"rank {r}: line {n}" for r in (0, 1) for n in range(5))


@pytest.mark.parametrize("line", ["logs --since soon", "logs --all --rank 1"])
def test_logs_refuse_what_makes_no_sense(up, line):
    up.ok("train hello.py")
    assert "--since: expected a duration" in (err := up.fails(line, code=2).err) or "leave --rank" in err


def test_a_job_takes_some_slots_and_has_a_priority(up):
    up.ok("train hello.py --slots 1 --priority 5")
    up.ok("train hello.py")
    up.ok("run --priority 3 -- true")
    found = [(j.spec.min_workers, j.spec.max_workers, j.spec.priority) for j in up.dispatcher.jobs.values()]
    assert found == [(1, 1, 5), (2, 3, 0), (1, 1, 3)]
    assert "--np" in up.fails("train hello.py --slots 1 --np 2", code=2).err
    assert "--priority" in up.fails("train hello.py --priority 9999", code=2).err


def test_the_queue_lists_running_jobs_then_waiting_ones_by_priority(up, monkeypatch):
    assert up.ok("queue").err == "no job runs or waits on fleet digits\n"
    states = [("a", JobState.QUEUED, 0), ("b", JobState.QUEUED, 5), ("c", JobState.RUNNING, -1),
              ("d", JobState.SUCCEEDED, 9), ("e", JobState.QUEUED, 0)]
    status = FakeJob.status
    monkeypatch.setattr(FakeJob, "status", lambda job: replace(status(job), priority=job.spec.priority))
    for name, state, priority in states:
        up.dispatcher.jobs[name] = FakeJob(name, JobSpec(name, priority=priority), {}, state, "waits")
    assert [job["job"] for job in json.loads(up.ok("queue -o json").out)] == ["c", "b", "a", "e"]
    head, *rows = up.ok("queue").out.splitlines()
    assert head.split()[:4] == ["job", "name", "state", "priority"] and rows[1].split()[:4] == ["b", "b", "queued", "5"]
    up.dispatcher.jobs.clear()  # the fleet's end would wait for them


@pytest.mark.parametrize(("state", "why", "printed"), [
    (JobState.QUEUED, "needs 2 hosts, 0 free: 3 of 3 held by hello-1",
     "job hello-1 is queued: needs 2 hosts, 0 free: 3 of 3 held by hello-1\n"),
    (JobState.QUEUED, "", "job hello-1 is queued: it waits for hosts\n"),
    (JobState.STARTING, "1 starting", ""),
])
def test_a_job_that_waits_for_another_is_reported_also_without_attaching(up, monkeypatch, state, why, printed):
    monkeypatch.setattr(follow, "REASON_S", 0.01)
    submit = up.dispatcher.submit

    def queued(*given):
        name = submit(*given)
        up.dispatcher.jobs[name] = FakeJob(name, given[0], {}, state, why)
        return name

    monkeypatch.setattr(up.dispatcher, "submit", queued)
    said = up.ok("train hello.py -d")
    assert f"job hello-1 on fleet digits\n{printed}next: " in said.err
    up.dispatcher.jobs.clear()  # the fleet's end would wait for it


def test_verify_refuses_a_script_for_torchrun_before_it_starts_it(user):
    user.write("ddp.py", "import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    said = user.fails("train --verify ddp.py", code=2)
    assert "ddp.py is a script for torchrun: it uses init_process_group" in said.err and "docs/jobs.md" in said.err


def test_words_without_two_dashes_and_a_script_in_a_fleet_files_place_get_the_command_to_type(up):
    assert "hint: spotfleet run -- python hello.py, or" in up.fails("run python hello.py", code=2).err
    for command in ("up", "launch"):
        said = up.fails(f"{command} hello.py", code=2)
        assert "hello.py is a Python script, not a fleet file" in said.err and "`spotfleet train hello.py`" in said.err
