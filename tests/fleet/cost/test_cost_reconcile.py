"""A billing export of AWS beside our ledgers, in both of its formats."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from spotfleet.cli.commands.cost_table import reconciled
from spotfleet.errors import UsageError
from spotfleet.fleet.cost.compare import Difference, Reconciliation, compare
from spotfleet.fleet.cost.groups import FleetLedgers
from spotfleet.fleet.cost.rows import reconciliation_json
from spotfleet.fleet.domain.events import Event, FleetCreated, HostListed, LaunchIntended, RatesStamped
from spotfleet.model import BillingRules, CloudState, Market, Nodes, Offer, Rates, Role, Run
from spotfleet.providers.aws.mapping.cost_export import AwsCostExport, columns, kind_of

AWS = AwsCostExport()
T = 1_700_006_400.0  # 2023-11-15 00:00:00 UTC
HOUR = 3600.0
SPOT = Offer("aws", "us-east-1", "us-east-1a", "g5.xlarge", Market.SPOT, 1, 400_000, 1_006_000, "A10G")
LEGACY = ("identity/LineItemId", "lineItem/LineItemType", "lineItem/UsageStartDate", "lineItem/UsageEndDate",
          "lineItem/UsageType", "lineItem/ResourceId", "lineItem/UnblendedCost", "lineItem/CurrencyCode",
          "pricing/publicOnDemandCost", "resourceTags/user:spotfleet", "resourceTags/user:spotfleet-host")
CUR2 = ("line_item_line_item_type", "line_item_usage_start_date", "line_item_usage_end_date", "line_item_usage_type",
        "line_item_resource_id", "line_item_unblended_cost", "line_item_currency_code",
        "pricing_public_on_demand_cost", "resource_tags")


def books(*hosts: tuple[str, str, float], fleet: str = "f", cloud_name: str = "f-a1b2", now: float = T + 10 * HOUR,
          ) -> FleetLedgers:
    """Hosts as (name, instance, hours from T on), each with a disk for a dollar an hour, an address for 5 cents."""
    events: list[Event] = [FleetCreated(T, cloud_name, "aws", Nodes(), BillingRules(60)),
                           RatesStamped(T, "aws", "us-east-1", Rates(1_000_000, 50_000))]
    for name, machine, hours in hosts:
        ended = T + hours * HOUR
        events += [LaunchIntended(T, name, Role.WORKER, SPOT, ""),
                   HostListed(ended, name, machine, CloudState.TERMINATED, (Run(T, ended),), disk_gib=730, addresses=1,
                              ended_at=ended)]
    return FleetLedgers(fleet, tuple(events), now)


def item(resource: str, usage: str, dollars: str, hour: int = 0, kind: str = "Usage", currency: str = "USD",
         **tags: str) -> dict[str, str]:
    return {"resource": resource, "usage": usage, "dollars": dollars, "kind": kind, "currency": currency,
            "since": f"2023-11-15T{hour:02d}:00:00Z", "until": f"2023-11-15T{hour + 1:02d}:00:00Z",
            **{k.replace("_", "-"): v for k, v in tags.items()}}


def legacy(*items: dict[str, str]) -> str:
    return text(LEGACY, [["x", i["kind"], i["since"], i["until"], i["usage"], i["resource"], i["dollars"],
                          i["currency"], "9", i.get("spotfleet", ""), i.get("spotfleet-host", "")] for i in items])


def cur2(*items: dict[str, str]) -> str:
    def tags(i: dict[str, str]) -> str:
        return json.dumps({f"user_{k.replace('-', '_')}": v for k, v in i.items() if k.startswith("spotfleet")})

    return text(CUR2, [[i["kind"], i["since"].replace("Z", ".000Z"), i["until"].replace("Z", ".000Z"), i["usage"],
                        i["resource"], i["dollars"], i["currency"], "9", tags(i)] for i in items])


def text(header: tuple[str, ...], rows: list[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out).writerows([header, *rows])
    return out.getvalue()


def compared(export: str, *ours: FleetLedgers, everything: bool = True) -> Reconciliation:
    lines = csv.DictReader(io.StringIO(export))
    return compare(ours, AWS, AWS.lines(list(lines.fieldnames or []), lines), everything, "aws")


ONE = books(("f-a1b2-0", "i-1", 2.0))
HOST = {"spotfleet": "f-a1b2", "spotfleet_host": "f-a1b2-0"}
WHOLE = (
    item("i-1", "SpotUsage:g5.xlarge", "0.4000000000", 0), item("i-1", "SpotUsage:g5.xlarge", "0.41", 1),
    item("vol-1", "EBS:VolumeUsage.gp3", "1.0", 0, **HOST), item("vol-1", "EBS:VolumeUsage.gp3", "1.0", 1, **HOST),
    item("arn:aws:ec2:us-east-1:1:network-interface/eni-1", "PublicIPv4:InUseAddress", "0.1", 0, **HOST),
)


@pytest.mark.parametrize("export", [legacy, cur2], ids=["legacy", "cur-2.0"])
def test_machines_match_by_id_and_what_hangs_on_them_by_the_tags_of_their_host(export):
    found = compared(export(*WHOLE), ONE)
    assert found == Reconciliation(T, T + 2 * HOUR, rows=(
        Difference("i-1", "machine", "f", "f-a1b2-0", 800_000, 810_000),
        Difference("vol-1", "disk", "f", "f-a1b2-0", 2_000_000, 2_000_000),
        Difference("eni-1", "address", "f", "f-a1b2-0", 100_000, 100_000)), cloud="AWS")
    assert [(d.difference, d.percent) for d in found.rows] == [(10_000, 1.25), (0, 0.0), (0, 0.0)]
    assert (found.micros, found.their_micros) == (2_900_000, 2_910_000)


def test_of_a_fleet_on_several_clouds_the_hosts_of_one_are_compared_with_its_bill():
    both = books(("f-a1b2-0", "i-1", 1.0), ("f-a1b2-1", "vm-1", 1.0))
    events = [replace(e, provider="other+aws") if isinstance(e, FleetCreated) else
              replace(e, offer=replace(SPOT, provider="other")) if isinstance(e, LaunchIntended) and
              e.request_id == "f-a1b2-1" else e for e in both.events]
    found = compared(legacy(item("i-1", "SpotUsage:g5.xlarge", "0.4")), replace(both, events=tuple(events)))
    assert ([d.host for d in found.rows], {d.host for d in found.missing}) == (["f-a1b2-0"], {"f-a1b2-0"})
    assert found.elsewhere == ()


def test_only_the_time_that_the_export_covers_is_compared():
    found = compared(legacy(item("i-1", "SpotUsage:g5.xlarge", "0.4", 1)), ONE)
    assert [(d.micros, d.their_micros) for d in found.rows] == [(400_000, 400_000)]
    assert (found.since, found.until) == (T + HOUR, T + 2 * HOUR)
    assert (found.earlier_micros, found.later_micros) == (1_450_000, 0)


def test_what_they_have_not_billed_is_listed_with_the_likely_reason():
    found = compared(legacy(*WHOLE[:2]), books(("f-a1b2-0", "i-1", 2.0), ("f-a1b2-1", "i-2", 1.0)))
    assert [(d.resource, d.kind, d.host, d.micros, d.their_micros) for d in found.missing] == [
        ("f-a1b2-0", "disk", "f-a1b2-0", 2_000_000, 0), ("f-a1b2-1", "disk", "f-a1b2-1", 1_000_000, 0),
        ("f-a1b2-1", "machine", "f-a1b2-1", 400_000, 0), ("f-a1b2-0", "address", "f-a1b2-0", 100_000, 0),
        ("f-a1b2-1", "address", "f-a1b2-1", 50_000, 0)]
    assert found.missing[2].note == f"not in the export: perhaps not billed yet ({AWS.lag})"
    assert found.missing[0].note.endswith("or spotfleet and spotfleet-host are no cost allocation tags")


def test_what_bears_our_tag_and_no_ledger_knows_is_listed_and_strangers_are_not():
    stray = item("i-9", "BoxUsage:m6i.large", "3", spotfleet="f-a1b2")
    other = item("i-8", "BoxUsage:m6i.large", "5", spotfleet="g-0000")
    found = compared(legacy(*WHOLE, stray, other, item("i-7", "BoxUsage:m6i.large", "7")), ONE)
    assert found.unknown == (
        Difference("i-8", "machine", "g-0000", "", 0, 5_000_000, "has our tag, but is in no record here"),
        Difference("i-9", "machine", "f", "", 0, 3_000_000, "has our tag, but is in no record here"))
    only = compared(legacy(*WHOLE, stray, other), ONE, everything=False)
    assert [d.resource for d in only.unknown] == ["i-9"]


def test_taxes_credits_and_snapshots_are_told_apart():
    found = compared(legacy(*WHOLE, item("i-1", "SpotUsage:g5.xlarge", "0.02", 0, "Tax"),
                            item("i-1", "SpotUsage:g5.xlarge", "-1.5", 0, "Credit"),
                            item("snap-1", "EBS:SnapshotUsage", "0.25", 0, **HOST)), ONE)
    assert found.left_out == (("Credit", -1_500_000), ("EBS:SnapshotUsage", 250_000), ("Tax", 20_000))
    assert found.their_micros == 2_910_000


def test_a_month_of_tax_does_not_make_the_export_cover_the_month():
    tax = item("i-1", "SpotUsage:g5.xlarge", "0.02", 0, "Tax") | {"until": "2023-12-01T00:00:00Z"}
    assert compared(legacy(*WHOLE, tax), ONE).until == T + 2 * HOUR


def test_traffic_is_compared_by_fleet():
    crossed = item("i-1", "USE1-DataTransfer-Regional-Bytes", "0.125", 0)
    found = compared(legacy(*WHOLE, crossed), ONE)
    (traffic,) = [d for d in found.rows if d.kind == "traffic"]
    assert (traffic.fleet, traffic.host, traffic.micros, traffic.their_micros) == ("f", "", 0, 125_000)
    assert (traffic.percent, traffic.note) == (None, "ours is an estimate, of the steps between zones alone")


def test_a_host_whose_request_launched_two_machines_is_one_row():
    one = FleetLedgers("f", tuple(
        e for e in (*ONE.events[:3],
                    replace(ONE.events[3], provider_id="i-0", state=CloudState.RUNNING), ONE.events[3])), T + 9 * HOUR)
    found = compared(legacy(item("i-0", "SpotUsage:g5.xlarge", "0.4", 0), *WHOLE[1:2]), one)
    assert [(d.resource, d.their_micros) for d in found.rows] == [("i-0, i-1", 810_000)]


def test_an_export_without_lines_of_machines_covers_nothing():
    gone = FleetLedgers("g", (), T, missing="its dispatcher does not answer")
    assert compared(legacy(), ONE, gone) == Reconciliation(
        None, None, incomplete=("g: its dispatcher does not answer",))


@pytest.mark.parametrize(("header", "said"), [
    ([h for h in LEGACY if h != "lineItem/ResourceId"], "lacks the column lineItem/ResourceId"),
    ([h for h in CUR2 if h != "line_item_usage_start_date"], "lacks the column line_item_usage_start_date"),
    (["a", "b"], "lacks the column line_item_resource_id; it has no column of a Cost and Usage Report"),
], ids=["legacy", "cur-2.0", "something-else"])
def test_a_missing_column_is_named_with_how_to_export(header, said):
    with pytest.raises(UsageError, match=said) as raised:
        columns(header)
    assert "Data Exports" in raised.value.hint and "resource IDs" in raised.value.hint


@pytest.mark.parametrize("dollars", ["NaN", "sNaN", "Infinity", "-inf", "1e999999", "1e16", "-1e999999999"])
def test_dollars_are_finite_and_fewer_than_there_are(dollars):
    with pytest.raises(UsageError, match=r"line 2 of the billing export: lineItem/UnblendedCost is .*, no number"):
        compared(legacy(item("i-1", "SpotUsage:g5.xlarge", dollars)), ONE)


def test_dollars_may_have_exponents_of_any_small_size():
    lines = [item("i-1", "SpotUsage:g5.xlarge", dollars) for dollars in ("4E-1", "1e-999", "0E999")]
    found = compared(legacy(*lines), ONE)
    assert [d.their_micros for d in found.rows] == [400_000]


@pytest.mark.parametrize("instant", ["2026-13-45", "2026-02-31T00:00:00Z", "2026-02-28T25:00:00Z", "0000-01-01"])
def test_instants_are_in_the_calendar(instant):
    with pytest.raises(UsageError, match=r"line 2 of the billing export: lineItem/UsageStartDate is .*, no time"):
        compared(legacy(item("i-1", "SpotUsage:g5.xlarge", "1") | {"since": instant}), ONE)


@pytest.mark.parametrize(("line", "said"), [
    (item("i-1", "SpotUsage:g5.xlarge", "lots"), "line 2 of the billing export: lineItem/UnblendedCost is 'lots'"),
    (item("i-1", "SpotUsage:g5.xlarge", "1") | {"since": "soon"}, "line 2 .*: lineItem/UsageStartDate is 'soon'"),
    (item("i-1", "SpotUsage:g5.xlarge", "1", currency="EUR"), "line 2 of the billing export is in EUR"),
], ids=["no-number", "no-time", "other-money"])
def test_a_line_that_cannot_be_understood_is_named(line, said):
    with pytest.raises(UsageError, match=said):
        compared(legacy(line), ONE)


def test_a_line_that_breaks_off_is_named():
    with pytest.raises(UsageError, match="line 2 of the billing export has not as many fields"):
        compared(",".join(LEGACY) + "\nx,Usage,2023", ONE)


def test_kinds_of_usage():
    said = ("USE2-SpotUsage:g5.xlarge", "BoxUsage:m6i.large", "EUC1-EBS:VolumeUsage.gp3",
            "EBS:VolumeP-Throughput.gp3", "EBS:SnapshotUsage", "USE1-PublicIPv4:InUseAddress",
            "DataTransfer-Regional-Bytes", "USE1-USW2-AWS-Out-Bytes", "Requests-Tier1", "CPUCredits:t3")
    assert [kind_of(u) for u in said] == ["machine", "machine", "disk", "disk", "", "address", "traffic", "traffic",
                                          "", ""]


def test_a_reconciliation_travels_as_json():
    data = json.loads(json.dumps(reconciliation_json(compared(legacy(*WHOLE), ONE))))
    assert (data["micros"], data["dollars"], data["their_dollars"]) == (2_900_000, "2.900000", "2.910000")
    assert data["rows"][0] == {
        "resource": "i-1", "kind": "machine", "fleet": "f", "host": "f-a1b2-0", "micros": 800_000, "note": "",
        "their_micros": 810_000, "difference_micros": 10_000, "percent": 1.25, "dollars": "0.800000",
        "their_dollars": "0.810000", "difference_dollars": "0.010000"}


def test_a_fleet_on_no_cloud_of_aws_is_not_missing_from_its_bill_but_named():
    created, *others = books(("l-1-0", "i-9", 2.0), fleet="l", cloud_name="l-1").events
    local = FleetLedgers("l", (replace(created, provider="local"), *others), T + 10 * HOUR)
    found, alone = compared(legacy(*WHOLE), ONE, local), compared(legacy(*WHOLE), ONE)
    assert found == replace(alone, elsewhere=("l",))
    assert reconciliation_json(found)["elsewhere"] == ["l"]
    assert "not compared: l, not on AWS" in reconciled(found) and "not on AWS" not in reconciled(alone)
    assert compared(legacy(item("i-9", "BoxUsage:x", "1")), local).elsewhere == ()  # what the bill has is compared
