"""`spotfleet simulate` as a user meets it. All records are made up."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from spotfleet.catalog.pricing.values import Catalog, CatalogPrice, MachineType, Source
from spotfleet.cli import app, tables
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec, Need
from spotfleet.simulate.tariff import PriceOverrides, Tariff, tariff
from spotfleet.simulate.values.trace import Trace

FLEET = "name: f\nresources: {infra: aws/us-west-2, accelerators: 'V100:1'}\nnodes: 2\n"
SHORT = "--work 4h --deadline 8h --windows 2"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Types a command in a folder with a fleet file and a record of 24 hours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPOTFLEET_HOME", str(tmp_path / "home"))
    (tmp_path / "f.yaml").write_text(FLEET)
    values = [2] * 12 + [0] * 24 + [3] * 108
    (tmp_path / "us-west-2a_v100_1.json").write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": values}))
    (tmp_path / "b.csv").write_text("0,add,node1\n3600000,add,node2\n86400000,remove,node1\n")

    def run(words: str, code: int = 0) -> tuple[str, str]:
        assert app.run(["simulate", *words.split()]) == code
        said = capsys.readouterr()
        return said.out, said.err

    return run


RECORD = "us-west-2a_v100_1.json"


def test_the_table_shows_every_strategy_the_money_and_one_windows_reasons(run):
    out, err = run(f"f.yaml --trace {RECORD} {SHORT}")
    assert err == ""
    assert out.startswith("fleet f: 2 hosts, 4h00m of work within 8h00m; 2 windows of 8h00m in us-west-2a_v100_1\n")
    for words in ("spotfleet", "on-demand only", "greedy", "Uniform Progress", "gang restart", "useful  boot",
                  "one window of spotfleet, from", "work: spot hosts are asked for", "note: p3.2xlarge costs $",
                  "all pause 0.128 s when hosts are lost without notice, 0.117 s when a host leaves in time, 0.148 s "
                  "when hosts join (bench/"):
        assert words in out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_on_a_terminal_no_line_is_longer_than_it_and_no_word_is_broken(run, monkeypatch, width):
    wide, _ = run(f"f.yaml --trace {RECORD} {SHORT}")
    monkeypatch.setattr(tables, "columns", lambda _stream=None: width)
    narrow, _ = run(f"f.yaml --trace {RECORD} {SHORT}")
    assert [line for line in narrow.splitlines() if len(line) > width] == []
    shown = re.sub(r"\(not\s+shown\s+at\s+this\s+width:\s+[^)]*\)", "", narrow)
    assert set(shown.split()) <= set(wide.split())


def test_one_of_a_kind_is_told_as_one(run):
    out, _ = run("f.yaml --trace b.csv --work 4h --deadline 8h --windows 1 --hosts 1 --price 1 --on-demand-price 3")
    assert out.startswith("fleet f: 1 host, 4h00m of work within 8h00m; 1 window of 8h00m in b\n")
    assert " 1 host launched, 0 lost, 0 launches refused\n" in out


def test_json_is_the_whole_report(run):
    out, _ = run(f"f.yaml --trace {RECORD} {SHORT} -o json")
    report = json.loads(out)
    assert report["outcomes"][0]["strategy"] == "spotfleet"
    assert len(report["outcomes"][0]["windows"]) == 2
    assert report["full_micros"] == 2 * 4 * 3_060_000
    assert report["stories"][0]["decisions"]


def test_html_is_one_page(run):
    out, _ = run(f"f.yaml --trace {RECORD} {SHORT} -o html")
    assert out.startswith("<!doctype html>") and "Uniform Progress" in out and "<svg" in out


@pytest.mark.parametrize(("deadline", "windows"), [("24h", 1), ("23h58m", 3)])
def test_windows_begin_at_least_a_minute_apart_however_many_are_asked_for(run, deadline, windows):
    out, _ = run(f"f.yaml --trace {RECORD} --work 4h --deadline {deadline} --windows 1000 -o json")
    starts = [w["start_s"] for w in json.loads(out)["outcomes"][0]["windows"]]
    assert starts == [60.0 * k for k in range(windows)]


def test_several_files_may_follow_the_option(run):
    out, _ = run(f"f.yaml --trace {RECORD} b.csv {SHORT} --price 1 --on-demand-price 3 -o json")
    assert [p["name"] for p in json.loads(out)["pools"]] == ["us-west-2a_v100_1", "b"]
    assert "laid side by side" in json.loads(out)["notes"][0]


def test_the_fleet_file_can_hold_the_work_and_its_deadline(run, tmp_path):
    (tmp_path / "f.yaml").write_text(FLEET + "work: 4h\ndeadline: 8h\n")
    out, _ = run(f"f.yaml --trace {RECORD} --windows 1 -o json")
    report = json.loads(out)
    assert (report["work_s"], report["deadline_s"]) == (4 * 3600, 8 * 3600)


def test_the_price_that_is_said_counts(run):
    out, _ = run(f"f.yaml --trace {RECORD} {SHORT} --price 2 --on-demand-price 4 -o json")
    pool = json.loads(out)["pools"][0]
    assert (pool["spot_micros_h"], pool["on_demand_micros_h"]) == (2_000_000, 4_000_000)


WRONG = {
    "no trace": ("f.yaml", "there is no trace to simulate"),
    "a file that is none": ("f.yaml --trace nothing.json", "nothing.json: there is no such file"),
    "no record": ("f.yaml --trace f.yaml", "f.yaml:1: 'name: f' begins no known format"),
    "impossible": (f"f.yaml --trace {RECORD} --work 8h --deadline 8h", "the deadline cannot be met"),
    "too short": (f"f.yaml --trace {RECORD} --work 8h --deadline 80h", f"{RECORD}: 24.0 h long, shorter than"),
    "no work": (f"f.yaml --trace {RECORD} --deadline 8h", "a deadline needs to know the work"),
    "a word for a time": (f"f.yaml --trace {RECORD} --work long", "--work: expected a duration"),
    "endless": (f"f.yaml --trace {RECORD} --work 99999999d", "--work: "),
    "a price below nothing": (f"f.yaml --trace {RECORD} --price -1", "--price: '-1' is no price"),
    "no number of windows": (f"f.yaml --trace {RECORD} --windows 0", "--windows"),
    "too many ways": (f"f.yaml --trace {RECORD} --windows 2 --every 1h", "--every and --windows exclude each other"),
    "windows at once": (f"f.yaml --trace {RECORD} --every 0h", "--every: 0h"),
    "no time at all": (f"f.yaml --trace {RECORD} --work 4h --deadline 0h", "--deadline: 0h"),
    "nothing to do": (f"f.yaml --trace {RECORD} --work 0s --deadline 8h", "--work: 0s"),
    "another polarity": (f"f.yaml --trace {RECORD} --polarity up", "'up'"),
    "upside down": (f"f.yaml --trace {RECORD} --polarity unavailable", "data[0] is 2, but where 1 means unavailable"),
    "no fleet file": (f"no.yaml --trace {RECORD}", "there is no file no.yaml"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_simulated_is_said_with_a_hint(run, what):
    words, said = WRONG[what]
    out, err = run(words, code=2)
    assert out == ""
    assert said in err and "hint: " in err


def test_a_machine_that_nobody_sells_is_named_with_the_nearest(run, tmp_path):
    (tmp_path / "f.yaml").write_text(FLEET.replace("V100:1", "V1000:1"))
    _, err = run(f"f.yaml --trace {RECORD}", code=2)
    assert "aws sells no V1000:1 that the catalog knows" in err and "V100" in err.partition("hint: ")[2]


def test_steps_say_nothing_about_time(run, tmp_path):
    (tmp_path / "f.yaml").write_text(FLEET + 'work: "1000 steps"\ndeadline: 8h\n')
    _, err = run(f"f.yaml --trace {RECORD}", code=2)
    assert "how long a step takes, no record tells" in err and "--work 48h" in err


# ---- what hosts cost


SOURCE = Source("list", "2026-07-30")
V100 = CatalogPrice(MachineType("aws", "p3.2xlarge", accelerator="V100", count=1), "us-west-2", 3_060_000, 970_000,
                    SOURCE, SOURCE)
K80 = CatalogPrice(MachineType("aws", "p2.xlarge", accelerator="K80", count=1), "us-west-2", 900_000, 270_000, SOURCE,
                   SOURCE)
BOOK = Catalog((V100, replace(V100, region="us-east-1", spot_micros_h=500_000), K80))
OF_V100 = Trace("t", 3600.0, ((0.0, 1),), provider="aws", region="us-west-2", instance_type="p3.2xlarge")
ANY, WISHES_V100 = FleetSpec("f", "aws"), FleetSpec("f", "aws", (Need(accelerator="V100"),))


def test_the_catalog_prices_the_records_machine_in_its_region():
    expected = Tariff("p3.2xlarge", ((0.0, 970_000),), 3_060_000, "the catalog of 2026-07-30")
    assert tariff(OF_V100, ANY, BOOK) == expected
    assert tariff(OF_V100, WISHES_V100, BOOK) == expected


def test_a_machine_that_is_not_sold_in_the_records_region_is_priced_in_the_most_alike_and_that_is_said():
    east, sydney = replace(OF_V100, region="us-east-2"), replace(V100, region="ap-southeast-2", spot_micros_h=400_000)
    book = Catalog((V100, sydney, replace(V100, region="us-east-1", spot_micros_h=600_000)))
    assert tariff(east, ANY, book) == Tariff("p3.2xlarge", ((0.0, 600_000),), 3_060_000,
                                             "the catalog of 2026-07-30, in us-east-1")


def test_the_records_own_prices_count_before_the_catalogs():
    found = tariff(replace(OF_V100, prices=((0.0, 1), (60.0, 2)), on_demand_micros_h=9), ANY, BOOK)
    assert found == Tariff("p3.2xlarge", ((0.0, 1), (60.0, 2)), 9, "the record")


def test_the_fleets_machine_is_priced_where_the_record_is_of_another():
    found = tariff(replace(OF_V100, prices=((0.0, 1),)), FleetSpec("f", "aws", (Need(accelerator="K80"),)), BOOK)
    assert found == Tariff("p2.xlarge", ((0.0, 270_000),), 900_000, "the catalog of 2026-07-30")


def test_what_is_said_counts_before_all():
    assert tariff(OF_V100, ANY, BOOK, PriceOverrides(7, 8)) == Tariff("p3.2xlarge", ((0.0, 7),), 8,
                                                                      "--price; on demand: "
                                                            "--on-demand-price")


def test_a_price_that_nobody_says_is_asked_for():
    with pytest.raises(UsageError, match="nobody says what a host costs spot") as raised:
        tariff(Trace("t", 1.0, ((0.0, 1),)), ANY, BOOK)
    assert "--price" in raised.value.hint


def test_a_fleet_on_the_local_cloud_costs_what_that_says():
    found = tariff(Trace("t", 1.0, ((0.0, 1),)), FleetSpec("f", "local", (Need(instance_type="gpu.small"),)), BOOK)
    assert (found.instance_type, found.on_demand_micros_h, found.by) == ("gpu.small", 3_060_000, "the local cloud")


def test_a_window_as_long_as_a_long_record_is_announced_and_its_progress_told(run, tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("spotfleet.cli.commands.simulate.FIRST_LINE_S", 0.0)
    monkeypatch.setattr("spotfleet.cli.commands.simulate.LINE_S", 0.0)
    (tmp_path / "long.json").write_text(json.dumps({"metadata": {"gap_seconds": 86400}, "data": [2] * 40}))
    _, err = run("f.yaml --trace long.json")
    lines = err.splitlines()
    assert lines[0].startswith("no deadline is given, so a window is as long as the records: up to 40d00h of 1 pool, ")
    assert lines[1] == "simulating: 0%, 0 of 3 runs"
    middle = [line for line in lines[2:] if re.fullmatch(r"simulating: \d+%, 0 of 3 runs, \S+ left", line)]
    assert len(middle) > 10, "of the first window alone"
    assert not [line for line in lines[1:] if not line.startswith("simulating: ")]
