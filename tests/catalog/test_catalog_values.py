"""The catalog as values and as text, and the formula by which offers are ordered."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotfleet.catalog.pricing.table import CatalogError, parsed, written
from spotfleet.catalog.pricing.useful import BANDS, BOOT_S, REPEATED_S, expected_lifetime_s, useful_micros_h
from spotfleet.catalog.pricing.values import Catalog, CatalogPrice, MachineType, Source
from spotfleet.model import Market, Need, Offer, Rates

LIST = Source("the list", "2026-01-02", "Apache-2.0", "https://example.com/list")
GUESS = Source("the list, less an average", "2025-06-28", estimate=True)
P3 = MachineType("aws", "p3.8xlarge", 32, 244, "V100", 4)
P4D = MachineType("aws", "p4d.24xlarge", 96, 1152, "A100", 8)
T3 = MachineType("aws", "t3.small", 2, 2)


def price(machine=P3, region="us-east-1", on_demand=12_240_000, spot=3_000_000, band=None, zones=()):
    return CatalogPrice(machine, region, on_demand, spot, LIST if on_demand else None, GUESS if spot else None, band,
                 LIST if band is not None else None, zones)


SHELF = Catalog((price(), price(region="us-west-2", spot=2_000_000), price(P4D, on_demand=21_957_642, spot=0),
                 price(T3, on_demand=20_800, spot=6_000, zones=("us-east-1a", "us-east-1b"))))


# ---- what is asked


@pytest.mark.parametrize(("need", "found"), [
    (Need(accelerator="v100"), ["us-west-2", "us-east-1"]),
    (Need(accelerator="NVIDIA V100", accelerator_count=4, region="us-east-1"), ["us-east-1"]),
    (Need(accelerator="V100", accelerator_count=8), []),
    (Need(instance_type="p3.8xlarge", max_micros_h=2_500_000), ["us-west-2"]),
    (Need(instance_type="p3.8xlarge", zone="us-west-2c"), ["us-west-2"]),
    (Need(accelerator="A100"), []),  # its spot price is not known
    (Need(accelerator="A100", use_spot=False), ["us-east-1"]),
    (Need(instance_type="t3.small"), ["us-east-1a", "us-east-1b"]),
    (Need(instance_type="t3.small", zone="us-east-1b"), ["us-east-1b"]),
    (Need(instance_type="t3.small", zone="us-east-1c"), []),
], ids=range(10))
def test_offers_are_what_satisfies_a_need_at_a_known_price_cheapest_first(need, found):
    assert [o.zone for o in SHELF.offers(need)] == found


def test_an_offer_bears_both_prices_and_the_region_where_no_zone_is_known():
    assert SHELF.offers(Need(accelerator="V100", region="us-east-1")) == [
        Offer("aws", "us-east-1", "us-east-1", "p3.8xlarge", Market.SPOT, 4, 3_000_000, 12_240_000, "V100")]


@pytest.mark.parametrize(("word", "first"), [
    ("p3.8xlrage", "p3.8xlarge"), ("us-est-1", "us-east-1"), ("V10O", "V100"), ("nvidia-a10", "A100")])
def test_the_nearest_names_come_first(word, first):
    assert SHELF.nearest(word)[0] == first


def test_nothing_is_near_to_nonsense():
    assert SHELF.nearest("qqqqqqq") == ()


def test_rates_of_a_region_come_before_those_of_its_provider_and_unknown_ones_have_no_source():
    usual, here = Rates(80_000, source="aws", as_of="2026-01-01"), Rates(96_000, source="tokyo", as_of="2026-01-01")
    catalog = Catalog(region_rates={("aws", ""): usual, ("aws", "ap-northeast-1"): here})
    assert catalog.rates("aws", "eu-west-1") == usual
    assert catalog.rates("aws", "ap-northeast-1") == here
    assert catalog.rates("gcp", "us-east1") == Rates() and not Rates().source


def test_newer_prices_go_over_older_ones_and_leave_what_they_do_not_know():
    today = Source("the cloud itself", "2026-11-22")
    newer = Catalog((CatalogPrice(replace(P3, vcpus=0), "us-east-1", 0, 2_500_000, None, today),))
    assert newer.over(Catalog((price(band=4), price(T3)))) == Catalog(
        (replace(price(band=4), spot_micros_h=2_500_000, spot_source=today), price(T3)))


# ---- as text

SOURCES = st.builds(Source, st.text("abc, \"'", min_size=1), st.dates().map(str), st.sampled_from(["", "Apache-2.0"]),
                    st.just(""), st.booleans())
NAMES = st.text("abcdefg.-123", min_size=1, max_size=8)
MACHINES = st.builds(MachineType, st.just("aws"), NAMES, st.integers(0, 512), st.integers(0, 4096).map(float),
                     st.sampled_from(["", "A100"]), st.integers(0, 16))


@st.composite
def prices(draw):
    full, spot, band = draw(st.integers(0, 10**9)), draw(st.integers(0, 10**9)), draw(st.none() | st.integers(0, 4))
    region = draw(NAMES)
    return CatalogPrice(draw(MACHINES), region, full, spot, draw(SOURCES) if full else None,
                        draw(SOURCES) if spot else None,
                 band, draw(SOURCES) if band is not None else None,
                 tuple(region + z for z in sorted(draw(st.sets(st.sampled_from("abc"))))))


@st.composite
def catalogs(draw):
    some = draw(st.lists(prices(), max_size=6, unique_by=lambda p: p.machine.name))
    rates = draw(st.dictionaries(st.tuples(st.just("aws"), NAMES), st.builds(
        Rates, *[st.integers(0, 10**6)] * 4, st.just("a page"), st.just("2026-01-01")), max_size=3))
    return Catalog(tuple(sorted(some, key=lambda p: p.key)), rates)


@settings(max_examples=30)
@given(catalogs())
def test_a_written_catalog_reads_as_it_was(catalog):
    assert parsed(written("aws", catalog)) == catalog


def test_half_a_catalog_is_none():
    text = written("aws", SHELF)
    for end in itertools.chain(range(0, len(text) - 1, 7), [len(text) - 2]):
        with pytest.raises(CatalogError):
            parsed(text[:end])


@pytest.mark.parametrize("wrong", [
    "price,nobody,us-east-1,1,0,,,,,", "price,t3.small,us-east-1,-1,0,,,,,", "price,t3.small,us-east-1,1,9,,,,,",
    "price,t3.small,us-east-1,,,,,7,0,", "colour,blue"])
def test_a_line_that_means_nothing_is_named(wrong):
    text = f"spotfleet-catalog,1,aws\nsource,0,a,2026-01-01,,,\nmachine,t3.small,2,2,,\n{wrong}\nend,3\n"
    with pytest.raises(CatalogError, match="line 4"):
        parsed(text)


# ---- what work costs

PRICES, LIVES = st.integers(1, 10**9), st.floats(60, 10**8)


@given(PRICES, st.integers(1, 16))
def test_on_demand_an_hour_of_work_costs_what_an_hour_costs(micros, gpus):
    assert useful_micros_h(micros, gpus) == math.floor(micros / gpus + 0.5)


@given(PRICES, st.integers(1, 16), LIVES, LIVES)
def test_a_longer_life_never_makes_work_dearer(micros, gpus, one, other):
    short, long = sorted((one, other))
    assert useful_micros_h(micros, gpus, long) <= useful_micros_h(micros, gpus, short)


def test_a_life_as_long_as_boot_and_repeated_work_doubles_the_price():
    assert useful_micros_h(3_000_000, 4, BOOT_S + REPEATED_S) == 1_500_000


def test_the_more_often_a_type_is_taken_the_shorter_its_life():
    lives = [expected_lifetime_s(band) for band in range(len(BANDS))]
    assert lives == sorted(lives, reverse=True)
    assert lives[4] == pytest.approx(1.635 * 3600, rel=1e-3)  # as measured
    assert lives[3] < expected_lifetime_s(None) <= lives[1]


def test_a_life_of_no_time_is_refused():
    with pytest.raises(ValueError, match="none"):
        useful_micros_h(1, 1, 0.0)


# ---- what must not depend on it


def test_no_bill_ever_looks_into_the_catalog():
    """Bills come from the ledger: whatever makes them does not even import the catalog, so no update can change one."""
    program = """if True:
        import sys
        from importlib import import_module
        from pathlib import Path
        import spotfleet.fleet.cost
        for path in Path(spotfleet.fleet.cost.__path__[0]).glob("*.py"):
            import_module(f"spotfleet.fleet.cost.{path.stem}")
        print([m for m in sys.modules if m.startswith("spotfleet.catalog")], "spotfleet.fleet.cost.meter" in
        sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] True"
