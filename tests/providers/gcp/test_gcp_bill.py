"""Google Cloud's billing export, and the rules by which it bills."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from spotfleet.errors import UsageError
from spotfleet.model import BillingRules
from spotfleet.providers.gcp import GcpProvider
from spotfleet.providers.gcp.mapping.cost_export import GcpCostExport, kind_of

EXPORT = GcpCostExport()
ROW = {"service_description": "Compute Engine", "sku_description": "Spot Preemptible G2 Instance Core running in Iowa",
       "usage_start_time": "2026-11-22 14:00:00 UTC", "usage_end_time": "2026-11-22 15:00:00 UTC", "cost": "0.25",
       "labels": json.dumps([{"key": "spotfleet", "value": "f-ab12"}, {"key": "spotfleet-host", "value": "f-ab12-1"}]),
       "resource_global_name": "//compute.googleapis.com/projects/p/zones/us-central1-a/instances/77",
       "currency": "USD", "cost_type": "regular", "credits": "[]"}


def lines(*rows: dict[str, str]) -> list:
    return list(EXPORT.lines(list(ROW), rows))


def test_a_machines_line_has_its_id_its_host_and_its_cost():
    [line] = lines(ROW)
    assert (line.resource, line.kind, line.left_out) == ("77", "machine", "")
    assert (line.fleet, line.host) == ("f-ab12", "f-ab12-1")
    assert line.dollars() == Decimal("0.25") and line.until - line.since == 3600.0


def test_a_gangs_machine_is_known_by_its_name_in_the_detailed_export():
    name = "projects/p/zones/us-central1-a/instances/f-ab12-2-s3k9"
    [line] = lines({**ROW, "labels": json.dumps([{"key": "spotfleet", "value": "f-ab12"}]), "resource_name": name})
    assert line.host == "f-ab12-2"


def test_nested_columns_are_read_as_json():
    nested = {"service": json.dumps({"description": "Compute Engine"}),
              "sku": json.dumps({"description": "Balanced PD Capacity"}),
              **{k: ROW[k] for k in ("usage_start_time", "usage_end_time", "cost", "labels")}}
    assert EXPORT.reads(list(nested))
    [line] = EXPORT.lines(list(nested), [nested])
    assert (line.kind, line.host) == ("disk", "f-ab12-1")


@pytest.mark.parametrize("sku, kind", [
    ("Nvidia L4 GPU attached to Spot Preemptible VMs running in Iowa", "machine"), ("E2 Instance Ram running in Iowa",
                                                                                    "machine"),
    ("Balanced PD Capacity in Iowa", "disk"), ("SSD backed Local Storage attached to Spot VMs", "disk"),
    ("External IP Charge on a Spot Preemptible VM", "address"), ("Network Inter Zone Data Transfer Out", "traffic"),
    ("Storage PD Snapshot in US", ""), ("Network Internet Ingress", ""), ("Something", "")])
def test_kinds_of_usage_are_told_by_the_sku(sku, kind):
    assert kind_of(sku) == kind


def test_taxes_other_services_and_credits_are_left_out_by_name():
    credits = json.dumps([{"name": "Sustained use discount", "amount": -0.05}])
    assert [(o.left_out, o.dollars()) for o in lines({**ROW, "credits": credits})] == [
        ("", Decimal("0.25")), ("credit: Sustained use discount", Decimal("-0.05"))]
    assert lines({**ROW, "cost_type": "tax"})[0].left_out == "tax"
    assert lines({**ROW, "service_description": "BigQuery"})[0].left_out.startswith("Spot Preemptible G2")


@pytest.mark.parametrize("changed, text", [({"cost": "much"}, "no number of dollars"), ({"currency": "EUR"}, "EUR"),
                                           ({"usage_start_time": "soon"}, "no time")])
def test_a_line_that_cannot_be_understood_is_named(changed, text):
    with pytest.raises(UsageError, match=f"line 2 .*{text}"):
        [line.dollars() for line in lines({**ROW, **changed})]


def test_a_missing_column_is_named_with_how_to_export():
    with pytest.raises(UsageError, match="lacks the column labels") as caught:
        list(EXPORT.lines(["usage_start_time", "usage_end_time", "cost"], []))
    assert "BigQuery" in caught.value.hint
    assert not EXPORT.reads(["lineItem/ResourceId"])


def test_a_second_is_billed_as_such_after_the_first_minute_which_is_free_if_the_machine_is_taken():
    assert GcpProvider({"section": {"project": "p-1"}}).billing() == BillingRules(60, 60)
