"""`spotfleet offers`: what is shown, in which order, of which age; wrong words; providers that answer and do not."""

from __future__ import annotations

import re
import sys
import time

import pytest

from spotfleet import providers
from spotfleet.catalog.pricing import ranking
from spotfleet.catalog.pricing.useful import expected_lifetime_s, useful_micros_h
from spotfleet.catalog.pricing.values import Catalog, CatalogPrice, MachineType, Source
from spotfleet.cli.commands.offers import age
from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import Market, Need, Offer
from spotfleet.providers.local.inprocess import InProcessProvider

V100 = "offers --gpus V100:4 --infra aws"
DAY_S = 86400.0


def zone(name: str, spot: int, market: Market = Market.SPOT) -> Offer:
    return Offer("aws", name[:-1], name, "p3.8xlarge", market, 4, spot if market is Market.SPOT else 12_300_000,
                 12_300_000, "V100")


class Aws:
    """A provider that is set up and sells `offered`; what it was asked is in `needs`."""

    name = "aws"

    def __init__(self, *offered: Offer, error: SpotfleetError | None = None) -> None:
        self.offered, self.error, self.needs = offered, error, []

    def offers(self, need: Need) -> list[Offer]:
        self.needs.append(need)
        if self.error:
            raise self.error
        market = Market.SPOT if need.use_spot else Market.ON_DEMAND
        return [o for o in self.offered if o.market is market]


@pytest.fixture
def sold(monkeypatch):
    """sold(offer, ...): AWS has these now, and there are credentials."""
    def put(*offered: Offer, error: SpotfleetError | None = None) -> Aws:
        aws = Aws(*offered, error=error)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA-not-a-real-key")
        monkeypatch.setattr(providers, "load", lambda name, config: aws)
        return aws

    return put


# ---- order


def test_the_cheapest_work_comes_first_not_the_cheapest_machine(shopper):
    rows = shopper.ok("offers --all --no-live -o json").data
    costs = [r["useful_micros_per_gpu_h"] for r in rows]
    assert costs == sorted(costs) and len(rows) > 1000
    for r in rows[::50]:
        spot = r["market"] == "spot"
        band = None if r["interruption_band"] is None else ["<5%", "5-10%", "10-15%", "15-20%", ">20%"].index(
            r["interruption_band"])
        price = r["spot" if spot else "on_demand"]["micros_h"]
        assert r["useful_micros_per_gpu_h"] == useful_micros_h(price, max(1, r["gpus"]), *(
            [expected_lifetime_s(band)] if spot else []))


def test_of_equal_prices_the_type_that_is_taken_less_often_comes_first():
    told = Source("a list", "2026-01-01")
    rare, often = (CatalogPrice(MachineType("aws", name, 8, 61, "V100", 1), "us-east-1", 3_000_000, 900_000, told, told,
                                band,
                         told) for name, band in (("rare", 0), ("often", 4)))
    assert [r.price.machine.name for r in ranking.ranked([often, rare])] == ["rare", "often"]


def test_a_spot_price_that_saves_less_than_its_interruptions_cost_is_no_bargain():
    told = Source("a list", "2026-01-01")
    dear = CatalogPrice(MachineType("aws", "p3", 8, 61, "V100", 1), "us-east-1", 1_000_000, 999_000, told, told, 4,
                        told)
    assert [r.market for r in ranking.ranked([dear])] == [Market.ON_DEMAND]


def test_one_line_per_type_and_region_unless_all_are_asked_for(shopper, sold):
    sold(zone("us-west-2a", 2_000_000), zone("us-west-2b", 1_500_000))
    few = shopper.ok(f"{V100}/us-west-2 --spot -o json").data
    assert [(r["zones"], r["spot"]["micros_h"]) for r in few] == [(["us-west-2b"], 1_500_000)]
    every = shopper.ok(f"{V100}/us-west-2 --spot --all -o json").data
    assert [r["zones"][0] for r in every] == ["us-west-2b", "us-west-2a"]


def test_twenty_lines_unless_all_are_asked_for(shopper):
    said = shopper.ok("offers --no-live")
    assert len(said.out.splitlines()) == 21 and "--all shows the others" in said.err
    assert not [line for line in said.out.splitlines()[1:] if not re.search(r":\d", line)]  # with GPUs all


@pytest.mark.parametrize(("option", "markets"), [("--spot", {"spot"}), ("--on-demand", {"on-demand"})])
def test_one_market_alone_can_be_asked_for(shopper, option, markets):
    assert {r["market"] for r in shopper.ok(f"offers --gpus A100:8 --no-live {option} -o json").data} == markets


# ---- ages and sources


def test_a_live_price_is_called_live_and_the_others_by_their_age(shopper, sold):
    sold(zone("us-east-1a", 2_000_000))
    rows = {r["region"]: r for r in shopper.ok("offers --gpus V100:4 --all -o json").data if r["provider"] == "aws"}
    assert (rows["us-east-1"]["spot"]["live"], rows["us-east-1"]["spot"]["age_days"]) == (True, 0)
    told = shopper.ok("offers --gpus V100:4")
    assert re.search(r"^aws +us-east-1 +a +p3.8xlarge .* live$", told.out, re.M)
    assert re.search(r"^azure .* \d+ mo$|^azure .* \d y$", told.out, re.M)


def test_each_figure_of_json_has_its_source_and_day(shopper):
    for row in shopper.ok("offers --gpus A100 --no-live --all -o json").data:
        for figure in (row["spot"], row["on_demand"]):
            assert figure is None or (figure["source"] and figure["as_of"] and figure["age_days"] >= 0)


@pytest.mark.parametrize(("days", "word"), [
    (0, "today"), (1, "1 d"), (59, "59 d"), (60, "2 mo"), (729, "24 mo"), (730, "2 y"), (1100, "3 y")])
@pytest.mark.parametrize("zone", ["UTC0", "WEST-13", "EAST+11"])
def test_ages_in_words_wherever_the_laptop_stands(days, word, zone, monkeypatch):
    with monkeypatch.context() as there:
        there.setenv("TZ", zone)
        time.tzset()
        told = age(Source("a list", "2024-01-01"), today=1704067200 + (days + 0.5) * DAY_S)
    time.tzset()
    assert told == word


def test_an_estimated_price_is_marked(shopper):
    said = shopper.ok(f"{V100} --no-live")
    assert re.search(r" ~1\.\d+ ", said.out) and "~ estimated" in said.err


def test_lines_fit_a_terminal(shopper):
    assert max(map(len, shopper.ok("offers --no-live").out.splitlines())) <= 140


@pytest.mark.parametrize("width", [60, 80, 120])
def test_provider_and_prices_are_shown_on_every_terminal(shopper, monkeypatch, width):
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _self: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    head, *rows = shopper.ok("offers --gpus A100:8 --no-live").out.splitlines()
    assert {"provider", "type", "spot $/h", "on-demand", "useful"} <= set(re.split(r"\s{2,}", head))
    assert {"savings", "age", "region"} <= set(head.split()) or width < 120
    assert max(map(len, [head, *rows])) <= width


def test_providers_that_cannot_be_launched_yet_come_last_in_the_table(shopper):
    wanted = "offers --gpus T4:1 --no-live --all"
    said = shopper.ok(wanted)
    order = [line.split()[0] for line in said.out.splitlines()[1:]]
    by_cost = [row["provider"] for row in shopper.ok(f"{wanted} -o json").data]
    assert order == sorted(by_cost, key=lambda name: name != "aws") != by_cost
    assert "azure, listed last: prices for comparison" in said.err
    assert "listed last" not in shopper.ok("offers --gpus V100:4 --infra aws --no-live").err


# ---- providers


def test_where_a_provider_answers_its_word_replaces_the_catalogs(shopper, sold):
    aws = sold(zone("us-east-1a", 1_000_000), zone("us-east-1a", 0, Market.ON_DEMAND))
    row, = shopper.ok(f"{V100}/us-east-1 -o json").data
    assert (row["spot"]["micros_h"], row["on_demand"]["micros_h"], row["interruption_band"]) == (
        1_000_000, 12_300_000, ">20%")
    assert [(n.region, n.accelerator, n.accelerator_count, n.use_spot) for n in aws.needs] == [
        ("us-east-1", "V100", 4, True), ("us-east-1", "V100", 4, False)]


def test_a_provider_that_does_not_answer_is_named_and_the_catalog_answers(shopper, sold):
    sold(error=SpotfleetError("aws us-east-1: no answer within 30 s"))
    said = shopper.ok(V100)
    assert said.err.startswith("aws did not answer: aws us-east-1: no answer within 30 s; the catalog answers\n")
    assert "p3.8xlarge" in said.out


def test_with_no_live_nobody_is_asked(shopper, sold):
    aws = sold(error=SpotfleetError("no"))
    shopper.ok(f"{V100} --no-live")
    assert aws.needs == []


def test_without_credentials_nobody_waits_and_nothing_is_said(shopper, monkeypatch):
    monkeypatch.setattr(providers, "load", lambda name, config: pytest.fail("asked"))
    assert "not asked" not in shopper.ok("offers --gpus V100:4").err


def test_refused_credentials_are_told_to_whoever_named_the_provider(shopper, sold):
    sold(error=NeedsPerson("no valid credentials: expired"))
    assert "aws was not asked: no valid credentials: expired" in shopper.ok(V100).err
    assert "expired" not in shopper.ok("offers --gpus V100:4").err


def test_the_emulated_cloud_is_asked_by_name_alone(shopper, monkeypatch):
    cloud = InProcessProvider()
    monkeypatch.setattr(providers, "load", lambda name, config: cloud)
    rows = shopper.ok("offers --infra local --all -o json").data
    assert {(r["provider"], r["spot"]["live"]) for r in rows} == {("local", True)}
    assert {o.instance_type for o in cloud.offers(Need())} == {r["type"] for r in rows}
    assert "local" not in {r["provider"] for r in shopper.ok("offers --all -o json").data}


# ---- words


@pytest.mark.parametrize(("line", "said"), [
    ("--gpus A10O:8", "no GPU 'A10O'; did you mean 'A10' or 'A10G' or 'A100'?"),
    ("--gpus V100:1 --infra gcp", "gcp has no GPU 'V100'; it is sold by aws, azure\n"),
    ("-t p4d.24xlarge --infra gcp", "gcp has no instance type 'p4d.24xlarge'; it is sold by aws\n"),
    ("-t p4d.24xlarge --gpus A100:4", "p4d.24xlarge has A100:8, not A100:4\n"),
    ("-t t3.small --gpus T4", "t3.small has no GPU, not T4\n"),
    ("--gpus A100:3", "no type has 3 of 'A100': there are types with 1, 2, 4, 8, 16"),
    ("--instance-type p3.8xlrage", "no instance type 'p3.8xlrage'; did you mean 'p3.8xlarge'"),
    ("--infra aws/us-est-1", "aws has no region 'us-est-1'; did you mean"),
    ("--infra asw", "did you mean 'aws'?"),
    ("--infra aws/us-east-1/us-east-1a/x", "is no place"),
    ("--infra ssh", "machines over SSH are yours already"),
    ("--gpus A100:8,V100:8", "--gpus A100:8,V100:8"),
], ids=lambda v: v.split("=")[0][:30])
def test_words_that_name_nothing_are_answered_with_the_nearest(shopper, line, said):
    told = shopper.fails(f"offers --no-live {line}", 2)
    assert said in told.err and told.out == ""


def test_what_is_not_sold_there_is_shown_where_it_is(shopper):
    told = shopper.fails("offers --gpus A100:8 --infra aws/eu-west-1 --no-live", 1)
    assert "it is sold in aws/us-east-1, " in told.err and "catalog update" in told.err


def test_where_it_is_sold_only_on_demand_is_not_named_to_who_wants_spot(shopper):
    told = shopper.fails("offers --gpus A100:8 --infra azure --spot --no-live", 1)
    assert "it is sold in aws/us-east-1, gcp/" in told.err and "azure/" not in told.err


def test_a_wish_without_place_or_name_is_never_unknown():
    assert ranking.unknown(Catalog(), Need()) == ""
