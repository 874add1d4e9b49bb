"""Empty lists, output that is cut short, and a file of the wrong kind."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import pytest

from spotfleet.cli import console
from spotfleet.cli.commands import follow
from spotfleet.model import JobState
from tests.support.cli.cli_cloud import FakeJob


@pytest.mark.parametrize("command", ["status", "jobs", "events"])
def test_without_a_fleet_a_list_is_empty_and_no_error(user, command):
    said = user.ok(command)
    assert (said.out, said.err) == ("", "there is no fleet; `spotfleet up FILE` makes one\n")
    assert json.loads(user.ok(f"{command} -o json").out) == []


def test_without_a_fleet_nothing_was_spent_and_a_named_one_is_still_an_error(user):
    assert user.ok("cost").out == "no fleet has been here: nothing has been spent\n"
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


def test_a_fleet_file_in_the_place_of_a_script_is_refused_before_it_is_sent(up):
    said = up.fails("train fleet.yaml", code=2)
    assert "fleet.yaml is a YAML file, not a Python script" in said.err and "`spotfleet up fleet.yaml`" in said.err
    assert up.dispatcher.jobs == {}


PRINTS = "for n in range(5): print('line', n)\n"


def test_logs_print_the_last_lines_of_a_running_and_of_an_ended_fleet(up):
    up.write("prints.py", PRINTS)
    up.ok("train prints.py")
    assert up.ok("logs -n 2").out == "line 3\nline 4\n"
    up.ok("down -y")
    assert up.ok("logs -n 2").out == "line 3\nline 4\n" and up.ok("logs prints-1 --tail 0").out == ""
    assert "does not hold the time of a line" in up.fails("logs --since 5m", code=2).err
    assert up.ok("logs --all -n 1").out == "rank 0: line 4\n"


def test_logs_of_all_ranks_name_the_rank_of_each_line(up):
    up.write("prints.py", PRINTS)
    up.ok("train prints.py --np 2")
    for line in ("logs --all", "logs -af"):
        assert sorted(up.ok(line).out.splitlines()) == sorted(f"rank {r}: line {n}" for r in (0, 1) for n in range(5))


@pytest.mark.parametrize("line", ["logs --since soon", "logs --all --rank 1"])
def test_logs_refuse_what_makes_no_sense(up, line):
    up.ok("train hello.py")
    assert "--since: expected a duration" in (err := up.fails(line, code=2).err) or "leave --rank" in err


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
