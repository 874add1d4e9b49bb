"""`catalog update` against price lists on loopback: pages, troubles, prices that cannot be."""

from __future__ import annotations

import json

import pytest

from spotfleet.catalog import load as load_catalog
from spotfleet.catalog import web as web_module
from spotfleet.catalog.store import Store
from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.providers.gcp import price_list as gcp_prices
from tests.support.catalog.price_web import KEY, Web

ND = "Standard_ND96asr_v4"  # 8 A100; 27.197 on demand in eastus, as shipped
AZURE = "catalog update --provider azure"


def azure(shopper, region="eastus", name=ND):
    return load_catalog(shopper.home).by_key["azure", name, region]


def sells(web: Web, **regions: float) -> None:
    for region, usd in regions.items():
        web.sell(ND, region, usd)


# ---- Azure


def test_prices_of_all_pages_count_from_now_on_with_their_own_date(web, shopper):
    sells(web, eastus=28.0, westus2=27.0, westeurope=36.0, uksouth=37.0, japaneast=38.0)
    web.sell(ND, "eastus", 11.0, "Spot")
    said = shopper.ok(AZURE)
    assert said.out.startswith("azure: 5 prices, 5 of them new or changed, in ")
    now = azure(shopper)
    assert (now.on_demand_micros_h, now.spot_micros_h) == (28_000_000, 11_000_000)
    assert now.spot_source.name == "Azure Retail Prices API" and now.spot_source.as_of >= "2026-01-01"
    assert azure(shopper, "japaneast").on_demand_micros_h == 38_000_000  # the last page
    assert azure(shopper, name="Standard_NC6s_v3").on_demand_source.name == "karpenter-provider-azure"  # not sold there


def test_windows_low_priority_and_reservations_are_no_prices_of_ours(web, shopper):
    sells(web, eastus=28.0)
    web.sell(ND, "eastus", 60.0, product="Virtual Machines NDSv4 Series Windows")
    web.sell(ND, "eastus", 5.0, "Low Priority")
    web.sell(ND, "eastus", 200_000.0, type="Reservation")
    web.sell(ND, "eastus", 60.0, product="NDSv4 Series Cloud Services")
    web.sell(ND, "eastus", 25.0, currencyCode="EUR")
    web.sell(ND, "eastus", 0.0, "Spot")
    web.sell(ND, "westus2", 26.0, "Low Priority")
    shopper.ok(AZURE)
    assert azure(shopper, "westus2").on_demand_source.name == "karpenter-provider-azure"
    assert (azure(shopper).on_demand_micros_h, azure(shopper).spot_micros_h) == (28_000_000, 0)


@pytest.mark.parametrize("fault", [429, 503, "cut", "html"])
def test_a_passing_trouble_is_waited_out(web, shopper, fault):
    sells(web, eastus=28.0)
    web.faults = [fault, fault, None]
    shopper.ok(AZURE)
    assert azure(shopper).on_demand_micros_h == 28_000_000


@pytest.mark.parametrize(("fault", "why"), [
    (503, "127.0.0.1 answered 503"), ("cut", "127.0.0.1 gave no whole answer"), (404, "127.0.0.1 answered 404"),
    (403, "127.0.0.1 answered 403")])
def test_a_lasting_trouble_leaves_the_old_prices_and_says_whose_it_is(web, shopper, fault, why):
    sells(web, eastus=28.0, westus2=27.0, westeurope=36.0, uksouth=37.0)
    shopper.ok(AZURE)
    text = Store(shopper.home).path("azure").read_text()
    web.meters[0]["retailPrice"] = 29.0
    web.faults = [None] * 3 + [fault] * 50  # after the first pages
    said = shopper.fails(AZURE, 3 if fault == 403 else 1)
    assert said.err.startswith(f"azure: not updated, what there was counts on: {why}")
    assert Store(shopper.home).path("azure").read_text() == text


def test_a_next_page_on_another_host_is_not_asked_for(web, shopper):
    sells(web, **{f"region{i}": 28.0 for i in range(4)})
    web.next_host = "http://prices.example.com"
    assert "another host: prices.example.com" in shopper.fails(AZURE, 1).err


def test_an_answer_without_any_price_we_can_read_changes_nothing(web, shopper):
    assert "no price that we know how to read" in shopper.fails(AZURE, 1).err
    assert not Store(shopper.home).folder.exists()


def test_prices_out_of_reason_are_refused_and_the_others_taken(web, shopper):
    """SkyPilot's catalog once had prices a hundred times too low."""
    sells(web, eastus=0.27197, westus2=27.5, uksouth=5_000.0)
    web.sell(ND, "westus2", 250.0, "Spot")
    said = shopper.ok(AZURE)
    assert said.err.splitlines() == [f"  refused as out of reason: {ND} {line}" for line in (
        "eastus on-demand $0.2720/h, which was $27.1970/h",
        "westus2 spot $250.0000/h, on demand $27.5000/h",
        "uksouth on-demand $5,000.0000/h: no machine costs that")]
    assert azure(shopper).on_demand_micros_h == 27_197_000
    assert (azure(shopper, "westus2").on_demand_micros_h, azure(shopper, "westus2").spot_micros_h) == (27_500_000, 0)


# ---- GCP


def gcp_sells(web: Web) -> None:
    for spot, words, factor in ((False, "", 1.0), (True, "Spot Preemptible ", 0.5)):
        web.part(f"{words}A2 Instance Core running in Iowa", 0.03 * factor, "us-central1", "us-east1", spot=spot)
        web.part(f"{words}A2 Instance Ram running in Iowa", 0.004 * factor, "us-central1", "us-east1", spot=spot)
        at = "attached to Spot Preemptible VMs " if spot else ""
        web.part(f"Nvidia Tesla A100 GPU {at}running in Iowa", 3.0 * factor, "us-central1", spot=spot)
    web.part("N1 Predefined Instance Core running in Iowa", 0.03, "us-central1")
    web.part("N1 Predefined Instance Ram running in Iowa", 0.004, "us-central1")
    web.part("Nvidia Tesla T4 GPU running in Iowa", 0.35, "us-central1")
    web.part("E2 Instance Core running in Iowa", 0.02, "us-central1")
    web.part("E2 Instance Ram running in Iowa", 0.003, "us-central1")
    web.part("Commitment v1: A2 Cpu in Iowa for 1 Year", 0.001, "us-central1", usage="Commit1Yr")
    web.part("A2 Instance Core running in Iowa", 0.0001, "us-central1", family="License")


def test_a_machine_of_gcp_costs_what_its_parts_cost_where_all_are_sold(web, shopper, monkeypatch):
    gcp_sells(web)
    monkeypatch.setenv(gcp_prices.KEY_VARIABLE, KEY)
    shopper.ok("catalog update --provider gcp")
    found = load_catalog(shopper.home)
    a100 = found.by_key["gcp", "a2-highgpu-1g", "us-central1"]  # 12 cores, 85 GiB, one A100
    assert (a100.on_demand_micros_h, a100.spot_micros_h) == (3_700_000, 1_850_000)
    assert a100.zones == ("us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f")  # known before
    assert found.by_key["gcp", "e2-small", "us-central1"].on_demand_micros_h == 16_000  # half a core, 2 GiB
    t4 = found.by_key["gcp", "n1-standard-4+nvidia-tesla-t4x1", "us-central1"]  # 4 cores, 15 GiB, one T4
    assert (t4.on_demand_micros_h, t4.machine.accelerator, t4.machine.slots) == (530_000, "T4", 1)
    assert found.by_key["gcp", "a2-highgpu-1g", "us-east1"].on_demand_source.as_of == "2026-07-30"  # no GPU there
    assert all(KEY not in asked for asked in web.asked)


def test_what_gcp_sells_for_less_under_conditions_is_no_price_of_a_machine(web, shopper, monkeypatch):
    web.part("A3Plus Instance Core running in Americas", 0.026924, "us-central1")
    web.part("A3Plus Instance Ram running in Americas", 0.002344, "us-central1")
    web.part("Reserved Nvidia H100 80GB Mega GPU in Americas in Calendar Mode", 4.841121, "us-central1")
    web.part("Nvidia H100 Mega 80GB GPU attached to DWS Defined Duration VMs running in Americas", 4.42, "us-central1")
    monkeypatch.setenv(gcp_prices.KEY_VARIABLE, KEY)
    shopper.fails("catalog update --provider gcp", 1)  # no GPU at a price that counts
    web.part("Nvidia H100 80GB Plus GPU running in Americas", 10.344276, "us-central1")
    shopper.ok("catalog update --provider gcp")
    mega = load_catalog(shopper.home).by_key["gcp", "a3-megagpu-8g", "us-central1"]
    assert mega.on_demand_micros_h == 92_742_368  # 208 cores, 1872 GiB, 8 GPUs


@pytest.mark.parametrize(("key", "why"), [("", "nobody says who asks"), ("wrong", "API key not valid")])
def test_gcp_says_what_to_do_when_it_is_not_told_who_asks(web, shopper, monkeypatch, key, why):
    monkeypatch.setitem(__import__("sys").modules, "google.auth", None)
    monkeypatch.setenv(gcp_prices.KEY_VARIABLE, key)
    said = shopper.fails("catalog update --provider gcp", 3)
    assert why in said.err and "GOOGLE_API_KEY" in said.err and "wrong" not in said.err


# ---- several


def test_what_one_provider_refuses_stops_no_other_and_those_not_set_up_are_no_failure(web, shopper):
    sells(web, eastus=28.0)
    said = shopper.ok("catalog update -o json")
    told = {u["provider"]: u for u in said.data}
    assert told["azure"]["prices"] == 1 and told["aws"]["error"] and told["gcp"]["error"]
    assert sorted(p.name for p in Store(shopper.home).folder.iterdir()) == ["azure.csv"]


def test_if_nothing_could_be_asked_a_person_is_needed(web, shopper):
    web.faults = [403] * 9
    shopper.fails("catalog update", 3)


def test_an_unknown_provider_is_answered_with_the_nearest(shopper):
    assert "did you mean 'azure'?" in shopper.fails("catalog update --provider asure", 2).err


def test_catalog_shows_rows_sources_and_ages(web, shopper):
    sells(web, eastus=28.0)
    shopper.ok(AZURE)
    lines = shopper.ok("catalog").out.splitlines()
    assert [" ".join(line.split()) for line in lines if "Retail" in line] == [
        f"azure updated 1 Azure Retail Prices API {azure(shopper).on_demand_source.as_of} today 1"]
    parts = shopper.ok("catalog -o json").data
    assert [(p["provider"], p["where"]) for p in parts] == [
        ("aws", "package"), ("azure", "package"), ("azure", "updated"), ("gcp", "package")]
    assert all(s["as_of"] and s["age_days"] >= 0 for p in parts for s in p["sources"])


# ---- HTTP


def test_a_server_that_says_when_to_come_again_is_obeyed(web):
    waits: list[float] = []
    web.faults, web.retry_after = [429, 429], "7"
    web_module.get(f"{web.url}/api/retail/prices", {"$filter": ""}, sleep=waits.append)
    assert waits == [7.0, 7.0] and len(web.asked) == 3


def test_waits_grow_between_tries_and_end(web, monkeypatch):
    monkeypatch.setattr(web_module, "WAIT_S", 1.0)
    waits: list[float] = []
    web.faults = [500] * web_module.TRIES
    with pytest.raises(SpotfleetError, match="5 times in a row"):
        web_module.get(web.url, {"$filter": ""}, sleep=waits.append)
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_a_refusal_is_not_tried_again_and_shows_no_header(web):
    with pytest.raises(NeedsPerson, match="API key not valid") as refused:
        web_module.get(f"{web.url}/v1/services/x/skus", {}, {"X-Goog-Api-Key": "secret"})
    assert len(web.asked) == 1 and "secret" not in json.dumps(str(refused.value))


def test_nobody_is_followed_elsewhere_with_a_key(web):
    web.faults = [302]
    with pytest.raises(SpotfleetError, match="answered 302"):
        web_module.get(web.url, {}, {"X-Goog-Api-Key": "secret"})
    assert len(web.asked) == 1
