"""`spotfleet cost` as it is typed: which fleets, which time, cut how, in which form, to where."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace

import pytest

from spotfleet.api import Fleet
from spotfleet.cli import render
from spotfleet.cli.commands import cost_table
from spotfleet.cli.commands.cost import window
from spotfleet.errors import UsageError
from spotfleet.fleet.cost.groups import WAYS
from spotfleet.protocol.messages import FleetStatus
from spotfleet.words import dollars

TWO = "name: two\nnodes: {min: 1, target: 1}\nresources: {instance_type: cpu.small}\n"


@pytest.fixture
def both(up):
    """`digits` is down, `two` lives."""
    up.ok("down -y")
    up.write("two.yaml", TWO)
    up.ok("up two.yaml -y")
    return up


def test_every_cut_and_every_form_of_an_ended_fleet_tell_the_same_sum(up):
    up.ok("down -y")
    whole = json.loads(up.ok("cost -o json").out)
    assert whole["micros"] == up.cloud.market.invoice(up.cloud.clock(), "digits").micros
    assert sum(whole["breakdown"].values()) == whole["micros"]
    for way in WAYS:
        rows = list(csv.DictReader(io.StringIO(up.ok(f"cost --by {way} -o csv").out)))
        assert sum(int(r["micros"]) for r in rows) == whole["micros"]
        groups = json.loads(up.ok(f"cost --by {way} -o json").out)["groups"]
        assert [g["micros"] for g in groups] == [int(r["micros"]) for r in rows]
        last = next(line for line in up.ok(f"cost --by {way}").out.splitlines() if line.startswith("total"))
        assert f"${whole['micros'] / 1e6:.6f}" in last


def test_the_table_says_what_was_saved_where_it_went_and_what_interruptions_cost(up):
    said = up.ok("cost").out
    assert "against on-demand machines of the same types and seconds" in said
    assert "where the money went" in said and "dispatcher" in said
    assert "no interruptions; repeated steps and pauses cost $0.000000" in said


def test_that_nobody_knows_what_disks_addresses_and_traffic_cost_is_said_in_every_cut(up):
    told = "disks, public addresses and traffic are not counted: their prices are not known"
    for line in ("cost", "cost --by pool", "cost --all"):
        assert told in up.ok(line).out
    assert json.loads(up.ok("cost -o json").out)["rated"] is False
    assert [f["rated"] for f in json.loads(up.ok("cost --all -o json").out)["fleets"]] == [False]


def test_the_dispatcher_comes_first_then_hosts_by_number(up):
    report = Fleet("digits").cost()
    lines = [replace(report.lines[0], host=f"digits-{n}", role="worker") for n in (10, 2, 1)]
    lines.append(replace(report.lines[0], host="digits-d-0", role="dispatcher"))
    shown = cost_table.report(replace(report, lines=tuple(lines)), ())
    assert [row.split()[0] for row in shown.splitlines()[1:5]] == ["digits-d-0", "digits-1", "digits-2", "digits-10"]


def test_by_job_no_machine_time_is_told_that_jobs_share(up):
    rows = list(csv.DictReader(io.StringIO(up.ok("cost --by job -o csv").out)))
    assert {r["key"]: (bool(r["spot_micros"]), bool(r["seconds"])) for r in rows} == {
        "(no job)": (False, False), "(dispatcher)": (True, True)}
    assert [g["spot_dollars"] for g in json.loads(up.ok("cost --by job -o json").out)["groups"]] == [None, "0.000000"]
    total = next(line for line in up.ok("cost --by job").out.splitlines() if line.startswith("total"))
    assert total.split()[1] == "-"


def test_a_time_in_which_nothing_was_spent_has_an_empty_report_that_says_so(up):
    said = up.ok("cost --until 2020-01-01").out
    assert "nothing was spent in this time\n" in said and "saved" not in said and "not counted" not in said
    assert "nothing was spent in this time\n" in up.ok("cost --until 2020-01-01 --by day").out


def test_a_credit_has_its_sign_before_the_dollar():
    assert (dollars(-24, 6), dollars(24, 6)) == ("-$0.000024", "$0.000024")


def test_all_fleets_have_a_line_each_and_one_sum(both):
    found = json.loads(both.ok("cost --all -o json").out)
    assert {(f["fleet"], f["living"]) for f in found["fleets"]} == {("digits", False), ("two", True)}
    assert found["micros"] == sum(f["report"]["micros"] for f in found["fleets"])
    lines = both.ok("cost digits two").out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["fleet", "digits", "two", "total"]


def test_html_goes_to_stdout_for_other_programs_and_to_a_file_from_a_terminal(both, monkeypatch):
    said = both.ok("cost two -o html")
    assert said.out.startswith("<!doctype html>") and "This fleet has cost $" in said.out and said.err == ""
    assert "These 2 fleets have cost $" in both.ok("cost --all -o html").out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    said = both.ok("cost digits -o html")
    assert said.out == "" and said.err.startswith("written: digits-cost.html\nnote: it is in this directory; ")
    assert "This fleet cost $" in (both.work / "digits-cost.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", ["table", "json", "csv", "html"])
def test_any_form_can_go_to_a_file(up, form):
    said = up.ok(f"cost -o {form} --output-file bill.txt")
    assert said.out == "" and said.err == "written: bill.txt\n"
    assert (up.work / "bill.txt").stat().st_size > 100


def test_a_file_that_cannot_be_written_is_an_error_with_its_name(up):
    assert "nowhere/bill.txt" in up.fails("cost --output-file nowhere/bill.txt").err


def test_where_no_fleet_has_been_all_of_them_have_cost_nothing(user):
    assert user.ok("cost --all").out == "no fleet has been here: nothing has been spent\n"
    assert json.loads(user.ok("cost --all -o json").out)["micros"] == 0
    assert "There is no fleet to report on." in user.ok("cost --all -o html").out


@pytest.mark.parametrize("inside", [".", "deeper"])
def test_a_home_that_is_a_file_is_no_home_where_no_fleet_has_been(user, monkeypatch, inside):
    user.write("plain", "")
    monkeypatch.setenv("SPOTFLEET_HOME", str(user.work / "plain" / inside))
    for line in ("cost --all", "status"):
        said = user.fails(line, code=2).err
        assert f"{user.work / 'plain'} is no folder" in said and "set SPOTFLEET_HOME to a folder" in said


def test_the_name_of_other_tools_works_and_is_not_advertised(up):
    assert "where the money went" in up.ok("cost-report").out
    assert "cost-report" not in up.ok("--help").out


@pytest.mark.parametrize(("line", "said"), [
    ("cost --by flavour", "--by: 'flavour' is none\nhint: use one of: host, group, pool, day, job, fleet"),
    ("cost --since yesterday", "--since: 'yesterday' is no time\nhint: use 2026-11-22, 2026-11-22T14:30 (UTC), "),
    ("cost --until 2026-13-01", "--until: '2026-13-01' is no time"),
    ("cost --since 2999-01-01", "--since 2999-01-01: that has not come yet"),
    ("cost --since 2h --until 3h", "--since 2h is not before --until 3h"),
    ("cost digits --all", "--all is every fleet: name none beside it\nhint: spotfleet cost --all"),
    ("cost --reconcile x.csv -o html", "--reconcile has no form html"),
    ("cost --reconcile x.csv --since 7d", "--reconcile compares all that the file covers"),
    ("cost --reconcile x.csv", "x.csv cannot be read: No such file or directory"),
], ids=lambda value: value.replace("cost ", "") if value.startswith("cost") else "")
def test_what_cannot_be_meant_is_refused_with_what_can(up, line, said):
    assert f"error: {said}" in up.fails(line, code=2).err


def test_an_unknown_fleet_is_named_with_those_that_are(up):
    assert "there is no fleet 'digit'" in up.fails("cost digit").err
    assert "there is no fleet 'other'" in up.fails("cost digits other").err


def test_the_status_tells_what_burns_an_hour_and_what_is_spent():
    status = FleetStatus("digits", "up", "", 1, 2, 3, burn_micros_h=1_230_000, on_demand_burn_micros_h=3_690_000)
    line = render.fleet_status(status).splitlines()[1]
    assert line == "1..3 hosts, target 2; 0s old; costs $1.2300/h now, on demand $3.6900/h (67 % less)"
    spent = replace(status, spent_micros=4_560_000)
    assert render.fleet_status(spent).splitlines()[1] == f"{line}; $4.5600 spent so far"
    assert [row.split()[-1] for row in render.fleets([status, spent]).splitlines()[1:]] == ["-", "$4.5600"]


def test_instants_are_utc_and_spans_reach_back_from_now():
    now = 1_795_000_000.0
    assert window("", "", now) == (None, None)
    assert window("7d", "36h", now) == (now - 7 * 86400, now - 36 * 3600)
    assert window("2026-11-01", "2026-11-02T06:00", now) == (1_793_491_200.0, 1_793_491_200.0 + 30 * 3600)
    with pytest.raises(UsageError, match="has not come yet"):
        window("2026-11-19", "", now)
