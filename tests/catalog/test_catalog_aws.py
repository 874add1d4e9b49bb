"""Offers and `catalog update` against an AWS that behaves, by its real SDK over a socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfleet.catalog import load as load_catalog
from spotfleet.catalog import update
from spotfleet.catalog.pricing.table import parsed, written
from spotfleet.catalog.pricing.values import Catalog
from spotfleet.catalog.store import PACKAGED, Store
from spotfleet.providers.aws import session

UPDATE = "catalog update --provider aws"


@pytest.fixture(scope="module", autouse=True)
def models_read_once() -> Iterator[None]:
    """botocore reads its models, megabytes of JSON, for each session anew."""
    import botocore.session

    made = botocore.session.create_loader()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", lambda search_path_string=None: made)
        yield


@pytest.fixture(scope="module")
def shared_cloud() -> Iterator[Any]:
    from tests.support.fakes.aws import AwsCloud

    with AwsCloud() as cloud:
        yield cloud


@pytest.fixture
def cloud(shared_cloud: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """As new. Prices of few types are asked for, for quickness: those that it sells with GPUs, and t3."""
    shipped = parsed((PACKAGED / "aws.csv").read_text()).prices
    some = Catalog(tuple(p for p in shipped if p.machine.name.startswith(("t3.", "g4dn.xlarge", "p4d."))))
    (tmp_path / "aws.csv").write_text(written("aws", some))
    monkeypatch.setattr(update, "PACKAGED", tmp_path)
    shared_cloud.reset()
    session.reset()  # what other tests were told
    for name, value in shared_cloud.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.0)
    yield shared_cloud
    assert not shared_cloud.findings, shared_cloud.findings[:10]


def test_offers_are_live_where_aws_is_set_up(cloud, shopper):
    cloud.set_price("us-west-2a", "g5.xlarge", 0.31)
    rows = shopper.ok("offers --gpus A10G:1 --infra aws/us-west-2 -o json").data
    first = next(r for r in rows if r["type"] == "g5.xlarge")
    assert (first["zones"], first["spot"]["usd_h"], first["on_demand"]["usd_h"]) == (
        ["us-west-2a"], 0.31, cloud.on_demand_usd("g5.xlarge", "us-west-2"))
    assert first["spot"]["live"] and first["on_demand"]["live"]


def test_an_aws_that_fails_is_named_and_the_catalog_answers(cloud, shopper):
    cloud.fault("ec2:*", code="InternalError", times=1000)
    said = shopper.ok("offers --gpus A10G:1 --infra aws/us-east-1")
    assert said.err.startswith("aws did not answer: aws us-east-1") and "g5.xlarge" in said.out


def test_an_update_takes_spot_prices_of_all_regions_and_prices_on_demand(cloud, shopper):
    for zone, usd in (("a", 0.33), ("b", 0.31), ("c", 0.32)):
        cloud.set_price(f"us-west-2{zone}", "g5.xlarge", usd)
    cloud.set_price("us-west-2a", "g5.2xlarge", 400.0)
    said = shopper.ok(UPDATE)
    found = load_catalog(shopper.home).by_key
    g5 = found["aws", "g5.xlarge", "us-west-2"]
    assert (g5.spot_micros_h, g5.on_demand_micros_h, g5.zones) == (
        310_000, round(cloud.on_demand_usd("g5.xlarge", "us-west-2") * 1e6), ("us-west-2a", "us-west-2b", "us-west-2c"))
    assert g5.spot_source.name == "EC2 DescribeSpotPriceHistory" and g5.band == 4  # which only the package knows
    assert ("aws", "p4d.24xlarge", "us-west-2") in found  # which the package has in us-east-1 alone
    assert found["aws", "g5.2xlarge", "us-west-2"].spot_micros_h < 2_000_000 and "refused" not in said.err


def test_a_region_that_fails_keeps_what_it_had_and_is_named(cloud, shopper):
    shopper.ok(UPDATE)
    before = load_catalog(shopper.home).by_key["aws", "g5.xlarge", "eu-west-1"]
    session.reset()
    cloud.set_price("us-west-2a", "g5.xlarge", 0.05)
    cloud.fault("ec2:DescribeSpotPriceHistory", code="InternalError", times=4)  # the first region that is asked
    said = shopper.ok(UPDATE)
    assert "aws: eu-west-1 is left out: aws eu-west-1" in said.err
    found = load_catalog(shopper.home).by_key
    assert found["aws", "g5.xlarge", "eu-west-1"] == before
    assert found["aws", "g5.xlarge", "us-west-2"].spot_micros_h == 50_000


def test_without_permission_nothing_changes_and_it_is_said_whose_it_is(cloud, shopper):
    cloud.deny("owner", {"ec2:DescribeSpotPriceHistory"})
    said = shopper.fails(UPDATE, 3)
    assert "aws: not updated, what there was counts on: " in said.err and "ec2:DescribeSpotPriceHistory" in said.err
    assert not Store(shopper.home).folder.exists()


def test_without_the_price_list_spot_prices_are_updated_alone(cloud, shopper):
    cloud.deny("owner", {"pricing:GetProducts"})
    cloud.set_price("us-east-1a", "g5.xlarge", 0.25)
    said = shopper.ok(UPDATE)
    assert "some on-demand prices are not available" in said.err
    g5 = load_catalog(shopper.home).by_key["aws", "g5.xlarge", "us-east-1"]
    assert (g5.spot_micros_h, g5.on_demand_source.name) == (250_000, "karpenter-provider-aws")
