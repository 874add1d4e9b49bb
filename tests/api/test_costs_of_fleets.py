"""What fleets of one home have cost: those that are down, whose name is used again, or whose ledgers cannot be had."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.api import costs as costs_module
from spotfleet.api import fleet as fleet_module
from spotfleet.api.costs import costs, instant, reconcile
from spotfleet.api.home import FleetDir, FleetRecord, Home, Keys
from spotfleet.cost_export import BilledLine
from spotfleet.errors import DispatcherUnreachable, NoSuchFleet, UsageError
from spotfleet.fleet.cost.extras import ExtraLine
from spotfleet.fleet.cost.groups import WAYS, by_host, by_pool, grouped
from spotfleet.fleet.cost.groups import costs as sum_costs
from spotfleet.fleet.domain.events import Event, FleetCreated, FleetDown, HostListed, LaunchIntended
from spotfleet.fleet.ledger import Ledger
from spotfleet.model import BillingRules, CloudState, FleetSpec, Market, Nodes, Offer, Role, Run
from spotfleet.providers.aws.mapping.cost_export import AwsCostExport

T = 1_800_000_000.0
SECOND = 3600
FULL = Offer("local", "local", "a", "cpu", Market.ON_DEMAND, 1, 7 * SECOND, 7 * SECOND)
SPOT = Offer("local", "local", "a", "gpu", Market.SPOT, 1, 10 * SECOND, 30 * SECOND)


@pytest.fixture
def house(tmp_path, monkeypatch) -> Home:
    monkeypatch.setattr(fleet_module, "READ_PATIENCE_S", 0.1)
    return Home(tmp_path)


def host(name: str, role: Role, offer: Offer, seconds: float) -> list[Event]:
    return [LaunchIntended(T, name, role, offer, ""),
            HostListed(T, name, f"i-{name}", CloudState.TERMINATED, (Run(T, T + seconds),))]


def fleet(house: Home, name: str, down: bool = True, brought: bool = True, workers_s: float = 100.0) -> FleetDir:
    """Its dispatcher has run for 100 s, its worker for `workers_s`."""
    folder = house.folder(name)
    folder.make(FleetRecord(FleetSpec(name), name, T, reached=True, down_at=T + 200 if down else 0.0),
                Keys("admin", "secret", "", ""), "")
    made = FleetCreated(T, name, "local", Nodes(), BillingRules(1))
    ended = [FleetDown(T + 200, "down")] if down else []
    write(folder.ledger, [made, *host(f"{name}-d-0", Role.DISPATCHER, FULL, 100), *ended])
    if down and brought:
        folder.archive.mkdir()
        write(folder.archive / "ledger.db", [made, *host(f"{name}-0", Role.WORKER, SPOT, workers_s)])
    return folder


def write(path: Path, events: list[Event]) -> None:
    ledger = Ledger(path)
    ledger.append(*events)
    ledger.close()


def test_a_home_without_fleets_has_cost_nothing(house):
    found = costs(home=house.path)
    assert (found, sum_costs(found).micros, sum_costs(found).breakdown.total) == ([], 0, 0)
    assert all(grouped(found, way) == () for way in WAYS)


def test_all_fleets_of_a_home_are_added_up_also_those_whose_name_is_used_again(house):
    house.move_to_old(fleet(house, "digits"))
    fleet(house, "digits", workers_s=50)
    fleet(house, "words", workers_s=10)
    found = costs(home=house.path)
    assert [(b.fleet.partition("-")[0], b.report().micros) for b in found] == [
        ("digits", 1200), ("words", 800), ("digits", 1700)]
    assert sum_costs(found).micros == 3700
    for way in WAYS:
        assert sum(row.micros for row in grouped(found, way)) == 3700
    assert [row.key for row in grouped(found[:2], "host")] == [
        "digits: digits-0", "digits: digits-d-0", "words: words-0", "words: words-d-0"]


def test_a_fleet_is_chosen_by_its_name(house):
    fleet(house, "digits")
    fleet(house, "words")
    assert [b.fleet for b in costs(["words"], house.path)] == ["words"]
    with pytest.raises(NoSuchFleet):
        costs(["numbers"], house.path)


def test_a_fleet_that_brought_nothing_home_says_so(house):
    fleet(house, "digits", brought=False)
    (books,) = costs(home=house.path)
    assert books.report().micros == 700
    assert books.missing == "its dispatcher's records were not copied here: its worker hosts are missing here"
    assert sum_costs([books]).missing == (f"digits: {books.missing}",)


def test_a_lost_dispatcher_leaves_its_own_machine_in_the_bill_and_is_named(house, monkeypatch):
    fleet(house, "digits", down=False)

    def lost(_fleet, _patience_s=None):
        raise DispatcherUnreachable("the dispatcher's machine is gone")

    monkeypatch.setattr(fleet_module.Fleet, "_client", lost)
    monkeypatch.setattr(fleet_module, "close_if_ended", lambda _folder: False)
    (books,) = costs(home=house.path)
    assert (books.living, books.report().micros) == (True, 700)
    assert books.missing == ("its worker hosts are missing here, as the records of them cannot be read now: the "
                             "dispatcher's "
                             "machine is gone")
    with pytest.raises(DispatcherUnreachable):
        fleet_module.Fleet("digits", house.path).cost()


def test_a_folder_that_cannot_be_read_hides_no_other_fleet(house):
    (fleet(house, "digits").path / "fleet.json").write_text("{")
    fleet(house, "words")
    broken, words = costs(home=house.path)
    assert (broken.fleet, broken.events, words.report().micros) == ("digits", (), 1700)
    assert "fleet.json cannot be read" in broken.missing


def test_an_earlier_fleet_of_a_name_is_asked_for_by_the_name_that_all_of_them_are_listed_with(house):
    house.move_to_old(fleet(house, "digits"))
    fleet(house, "digits", workers_s=50)
    earlier = costs(home=house.path)[-1].fleet
    assert costs([earlier], house.path)[0].report().micros == 1700
    assert costs_module.whole(earlier, house.path).report().micros == 1700
    assert costs_module.whole("digits", house.path).report().micros == 1200
    with pytest.raises(NoSuchFleet, match="no fleet 'digits-2020'"):
        costs_module.whole("digits-2020", house.path)


def test_traffic_without_a_rate_has_no_row_that_says_it_cost_nothing(house):
    fleet(house, "digits")
    (books,) = costs(home=house.path)
    moved = ExtraLine("traffic", "words-1", "", "", "local/local", "between zones", 0.2, "GiB", 0)
    report = replace(books.report(), extras=(moved,))
    assert by_pool(report) == by_pool(books.report()) and by_host(report) == by_host(books.report())
    charged = replace(report, extras=(replace(moved, micros=5),))
    assert (by_pool(charged)[-1].key, by_host(charged)[-1].key) == ("(traffic)", "(traffic of words-1)")


HEADER = "lineItem/ResourceId,lineItem/UsageStartDate,lineItem/UsageType,lineItem/UnblendedCost\n"
LINE = "i-digits-0,2027-01-15T08:00:00Z,SpotUsage:gpu,0.001\n"


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "gzip"])
def test_a_billing_export_is_read_as_it_is_or_compressed(house, tmp_path, pack):
    fleet(house, "digits")
    file = tmp_path / "export"
    file.write_bytes(pack(("\ufeff" + HEADER + LINE).encode()))
    (row,) = reconcile(file, home=house.path).rows
    assert (row.resource, row.host, row.micros, row.their_micros) == ("i-digits-0", "digits-0", 1000, 1000)


class OtherExport:
    """Exports of another cloud: resource and dollars in each line."""

    name, how, lag, untagged = "Cumulus", "ask Cumulus", "later", "no tags"

    def reads(self, header: Sequence[str]) -> bool:
        return "vm" in header

    def lines(self, header: Sequence[str], rows: Iterable[dict[str, str]]) -> Iterator[BilledLine]:
        for row in rows:
            yield BilledLine(row["vm"], "machine", "", T, T + 3600.0, "", "", lambda row=row: Decimal(row["usd"]))


def test_an_export_is_read_by_the_cloud_whose_first_line_it_has(house, tmp_path, monkeypatch):
    plugins = [SimpleNamespace(name="aws", cost_export=AwsCostExport()), SimpleNamespace(name="toy", cost_export=None),
               SimpleNamespace(name="cumulus", cost_export=OtherExport())]
    monkeypatch.setattr(costs_module, "usable", lambda: plugins)
    fleet(house, "digits")
    for number, text in enumerate((HEADER + LINE, "vm,usd\ni-digits-0,0.002\n")):
        (tmp_path / f"{number}.csv").write_text(text)
    found = [reconcile(tmp_path / f"{number}.csv", home=house.path) for number in range(2)]
    assert [(r.cloud, r.rows[0].their_micros) for r in found] == [("AWS", 1000), ("Cumulus", 2000)]
    (tmp_path / "lines.json").write_text('{"vm": "i-digits-0", "usd": 0.003}\n\n{"vm": "i-digits-0", "usd": "0.001"}\n')
    assert reconcile(tmp_path / "lines.json", home=house.path).rows[0].their_micros == 4000
    (tmp_path / "other.csv").write_text("host,dollars\na,1\n")
    with pytest.raises(UsageError, match="is no billing export of AWS or Cumulus"):
        reconcile(tmp_path / "other.csv", home=house.path)


@pytest.mark.parametrize(("data", "said"), [
    (None, "cannot be read: No such file"), (b"", "is empty"), (b"PAR1....", "is a Parquet file"),
    (b"\xff\xfe\x00a", "is no CSV file"), (gzip.compress(HEADER.encode() * 99)[:40], "cannot be read"),
    (b"host,dollars\na,1\n", "is no billing export of AWS or Google Cloud"),
    (b'{"usage_start_time": "", "sku": {}}\n', "lacks the column usage_end_time"),
    (b'{"usage_start_time": "", \n', "no JSON object"), (b'{"a": 1}\n[]\n', "is no billing export of"),
    (b"line_item_usage_type,dollars\na,1\n", "lacks the column line_item_resource_id"),
], ids=["none", "empty", "parquet", "no-text", "broken-off", "other-file", "json-columns", "broken-json", "other-json",
        "other-columns"])
def test_a_file_that_is_no_billing_export_is_refused_with_how_to_get_one(house, tmp_path, data, said):
    file = tmp_path / "export.csv"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(UsageError, match=said) as raised:
        reconcile(file, home=house.path)
    assert raised.value.hint and raised.value.hint in costs_module.how_to_export()


@pytest.mark.parametrize(("text", "at"), [
    ("36h", T - 36 * 3600), ("7d", T - 7 * 86400), ("1.5 h", T - 5400), ("2027-01-15", 1799971200.0),
    ("2027-01-15T08:00", T), ("2027-01-15T08:00:00Z", T), ("2027-01-15 09:00+01:00", T),
], ids=["hours", "days", "part-of-an-hour", "day", "minute", "utc", "elsewhere"])
def test_instants_as_people_write_them(text, at):
    assert instant(text, now=T) == at


@pytest.mark.parametrize("text", ["", "yesterday", "7", "2027-13-01"], ids=["empty", "word", "no-unit", "no-month"])
def test_what_is_no_instant_is_refused(text):
    with pytest.raises(UsageError, match="is no time"):
        instant(text, now=T)
