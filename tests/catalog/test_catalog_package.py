"""What the package carries: small, dated, of named and licensed sources, and plausible."""

from __future__ import annotations

import re
from datetime import date

import pytest

from spotfleet import catalog
from spotfleet.bootstrap import wheel
from spotfleet.catalog import names
from spotfleet.catalog.pricing.table import parsed, written
from spotfleet.catalog.pricing.values import Catalog, CatalogPrice, MachineType, Source, sources
from spotfleet.catalog.store import PACKAGED, Store
from spotfleet.model import Need

LICENSED = {"Apache-2.0"}
TODAY = Source("the cloud itself", "2026-11-22")


@pytest.fixture(scope="module")
def shipped() -> Catalog:
    return Catalog(tuple(p for name in names() for p in parsed((PACKAGED / f"{name}.csv").read_text()).prices))


def test_it_is_small():
    assert sum(p.stat().st_size for p in PACKAGED.glob("*")) < 150_000


def test_it_travels_with_the_code():
    """To dispatchers and hosts, too, which get the code as a wheel of this machine's making."""
    assert all(f"spotfleet/catalog/data/{name}.csv".encode() in wheel.build().data for name in names())


def test_each_figure_names_a_licensed_source_and_its_day(shipped):
    said = sources(shipped.prices)
    assert {s.licence for s in said} <= LICENSED
    assert all(date(2024, 1, 1) < date.fromisoformat(s.as_of) <= date(2026, 11, 22) and s.url for s in said)
    assert not [s for s in said if re.search("skypilot", s.name + s.url, re.I)]
    for p in shipped.prices:
        assert p.on_demand_source is not None and bool(p.spot_source) == bool(p.spot_micros_h)
        assert bool(p.band_source) == (p.band is not None)


def test_each_source_is_in_the_list_for_people(shipped):
    book = (PACKAGED.parent / "SOURCES.md").read_text()
    assert [s for s in sources(shipped.prices) if s.url not in book or s.as_of not in book] == []


def test_there_is_one_price_per_type_and_region_and_it_is_plausible(shipped):
    assert len({p.key for p in shipped.prices}) == len(shipped.prices) > 1000
    for p in shipped.prices:
        assert 0 <= p.spot_micros_h <= p.on_demand_micros_h, p.key
        assert 5_000 < p.on_demand_micros_h < 300_000_000, p.key  # half a cent to 300 dollars an hour
        assert p.machine.vcpus > 0 and p.machine.memory_gib > 0 and bool(p.machine.accelerator) == (p.machine.count > 0)


def test_no_machine_is_sold_without_its_gpus(shipped):
    """As one source has it in some regions, where 8 H100 then seem to cost an eighth of what they do."""
    prices: dict[str, list[int]] = {}
    for p in shipped.prices:
        prices.setdefault(p.machine.name, []).append(p.on_demand_micros_h)
    assert [name for name, some in prices.items() if max(some) > 3 * min(some)] == []


@pytest.mark.parametrize("provider", names())
def test_each_cloud_has_gpus_a_dispatcher_and_rates(shipped, provider):
    here = [p for p in shipped.prices if p.machine.provider == provider]
    assert {p.machine.accelerator for p in here} >= {"A100", "H100"}
    assert [p for p in here if not p.machine.count and p.machine.vcpus == 2]
    rates = catalog.load().rates(provider, "somewhere")
    assert rates.source and rates.as_of and rates.disk_micros_gib_month and rates.address_micros_h


def test_facts_that_everybody_knows(shipped):
    price = shipped.by_key["aws", "p4d.24xlarge", "us-east-1"]
    assert price.machine == MachineType("aws", "p4d.24xlarge", 96, 1152, "A100", 8)
    assert price.on_demand_micros_h == 21_957_642
    assert catalog.load().rates("aws").zone_micros_gib == 20_000  # a cent at either end


# ---- over it, what the user has fetched


def fetched(micros: int) -> Catalog:
    return Catalog((CatalogPrice(MachineType("aws", "p4d.24xlarge"), "us-east-1", 0, micros, None, TODAY),))


def test_what_was_fetched_counts_before_what_is_shipped(tmp_path):
    Store(tmp_path).save("aws", fetched(5_000_000))
    price = catalog.load(tmp_path).by_key["aws", "p4d.24xlarge", "us-east-1"]
    assert (price.spot_micros_h, price.spot_source, price.on_demand_micros_h) == (5_000_000, TODAY, 21_957_642)
    Store(tmp_path).save("aws", fetched(4_000_000))
    assert catalog.load(tmp_path).offers(Need(accelerator="A100", accelerator_count=8))[0].price_micros_h == 4_000_000


def test_a_damaged_file_of_the_user_is_passed_over_and_named(tmp_path):
    text = written("aws", fetched(5_000_000))
    Store(tmp_path).save("aws", fetched(1))
    Store(tmp_path).path("aws").write_text(text[:-4])
    assert catalog.load(tmp_path) == catalog.load(tmp_path / "nothing")
    assert [str(Store(tmp_path).path("aws")) in line for line in Store(tmp_path).problems()] == [True]


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.save("aws", fetched(5_000_000))
    monkeypatch.setattr("os.fsync", lambda _fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        store.save("aws", fetched(1))
    assert store.part("aws").catalog == parsed(written("aws", fetched(5_000_000)))
    assert [p.name for p in store.folder.iterdir()] == ["aws.csv"]
