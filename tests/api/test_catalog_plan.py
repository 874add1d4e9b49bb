"""The catalog in the place of a provider: which machines it offers for a plan, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from spotfleet.api.lifecycle.catalog_plan import CatalogProvider
from spotfleet.catalog.pricing.values import Catalog, CatalogPrice, MachineType
from spotfleet.errors import NoCapacity
from spotfleet.model import FleetSpec, Market, Need
from spotfleet.providers.kit.offers import RegionChoice, in_turn


def price(name: str, region: str, full: int, spot: int, vcpus: int = 4, accelerator: str = "") -> CatalogPrice:
    machine = MachineType("aws", name, vcpus, 4.0 * vcpus, accelerator, 1 if accelerator else 0)
    return CatalogPrice(machine, region, full, spot)


CATALOG = Catalog((
    price("t3.small", "r1", 20, 5, 2), price("m5.large", "r1", 96, 30, 2), price("m5.4xlarge", "r1", 768, 300, 16),
    price("m5.4xlarge", "r2", 700, 350, 16), price("g4dn.xlarge", "r1", 526, 200, accelerator="T4"),
    price("p3.2xlarge", "r1", 3060, 600, 8, "V100"), price("g9.xlarge", "r2", 800, 0, accelerator="T4"),
))


def provider(*regions: str, image: str = "") -> CatalogProvider:
    return CatalogProvider("aws", CATALOG, FleetSpec("f", "aws", section={"image": image}), regions)


def types(need: Need, *regions: str, image: str = "") -> list[tuple[str, int]]:
    return [(o.instance_type, o.price_micros_h) for o in provider(*regions, image=image).offers(need)]


def test_a_need_without_a_kind_gets_the_clouds_usual_types_and_no_gpu():
    assert types(Need()) == [("m5.large", 30)]
    assert types(Need(use_spot=False)) == [("t3.small", 20), ("m5.large", 96)]  # a dispatcher


def test_a_size_is_met_by_machines_without_gpus_in_the_chosen_regions():
    assert types(Need(min_vcpus=8)) == [("m5.4xlarge", 300), ("m5.4xlarge", 350)]
    assert types(Need(min_vcpus=8, max_vcpus=8)) == []
    assert types(Need(min_memory_gib=60, max_memory_gib=64), "r2") == [("m5.4xlarge", 350)]


def test_a_type_without_a_known_spot_price_is_offered_at_its_price_on_demand():
    assert types(Need(accelerator="T4"), image="ami-1") == [("g4dn.xlarge", 200), ("g9.xlarge", 800)]
    assert all(o.market is Market.SPOT for o in provider().offers(Need(accelerator="T4")))


def test_types_that_the_image_cannot_drive_are_offered_only_where_there_are_no_others():
    assert types(Need(accelerator="V100")) == [("p3.2xlarge", 600)]
    assert types(Need(min_vcpus=4, accelerator_count=1)) == [("g4dn.xlarge", 200)]
    assert ("p3.2xlarge", 600) in types(Need(min_vcpus=4, accelerator_count=1), image="ami-1")


def test_the_region_is_that_of_the_first_alternative_in_order_that_any_region_sells():
    first, second, third = Need(instance_type="a"), Need(instance_type="b", turn=1), Need(instance_type="c", turn=2)
    asked: list[tuple[str, ...]] = []

    def choose(needs: Sequence[Need]) -> RegionChoice:
        asked.append(tuple(n.instance_type for n in needs))
        if needs != [second]:
            raise NoCapacity("not sold")
        return RegionChoice("r", ())

    assert in_turn([first, second, third], choose).region == "r" and asked == [("a",), ("b",)]
    with pytest.raises(NoCapacity, match="not sold"):
        in_turn([first, third], choose)
    with pytest.raises(NoCapacity, match="not sold"):
        in_turn([first, replace(second, turn=0)], choose)
    assert asked[-1] == ("a", "b"), "without an order all at once"


def test_the_cheapest_region_sells_hosts_and_dispatcher():
    choice = provider().cheapest_region([Need(min_vcpus=16)], Need(use_spot=False), 2)
    assert choice.region == "r1" and [row.region for row in choice.rows] == ["r1", "r2"]
