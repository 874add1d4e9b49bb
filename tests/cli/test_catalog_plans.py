"""`up FILE --dryrun` before there is an account, or a provider: a plan with the catalog's prices."""

from __future__ import annotations

import pytest

from spotfleet.catalog import load
from spotfleet.model import Market, Need
from tests.support.cli.cli_user import User

TASK = "name: t\nresources: {%s}\nrun: python x.py\n"


@pytest.fixture
def newcomer(user: User, monkeypatch: pytest.MonkeyPatch) -> User:
    """One without an account, whose cloud would answer nobody."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    return user


def cheapest(need: Need, cloud: str, region: str) -> int:
    return min(o.price_micros_h for o in load().offers(need, cloud) if region in ("", o.region))


def test_a_fleet_on_a_cloud_without_an_account_is_planned_with_the_catalogs_prices_and_their_dates(newcomer):
    newcomer.write("t.yaml", "name: t\nprovider: aws\nnodes: 2\nresources: {accelerators: 'A10G:1'}\n"
                             "aws: {regions: [us-east-1, us-west-2]}\n")
    said = newcomer.ok("up t.yaml --dryrun")
    best = min(cheapest(Need(accelerator="A10G", accelerator_count=1), "aws", r) for r in ("us-east-1", "us-west-2"))
    assert f"${best / 1e6:.4f}" in said.out and "chosen" in said.out and "dearer" in said.out
    assert "prices are the catalog's, of 20" in said.out
    assert "there are no credentials for its provider here" in said.out
    assert "before `up`" not in said.out
    assert "no valid credentials" in newcomer.fails("up t.yaml -y", code=3).err


def test_a_task_without_a_provider_is_planned_where_it_costs_least_and_up_asks_for_the_choice(newcomer):
    newcomer.write("t.yaml", TASK % "cpus: 16+, memory: 64+")
    said = newcomer.ok("up t.yaml --dryrun")
    size = Need(min_vcpus=16, min_memory_gib=64)
    assert "fleet t on aws in us-east-1" in said.out
    assert f"${cheapest(size, 'aws', 'us-east-1') / 1e6:.4f}" in said.out
    assert "before `up`:\n  t.yaml: names no provider; write `infra: aws` " in said.out
    assert "names no provider" in newcomer.fails("up t.yaml -y", code=2).err
    assert "names no provider" not in newcomer.ok("up t.yaml --dryrun --infra aws/us-west-2").out


def test_what_only_a_cloud_without_a_provider_here_sells_is_priced_there_and_says_so(newcomer):
    newcomer.write("t.yaml", TASK % "accelerators: 'A10:1'")
    said = newcomer.ok("up t.yaml --dryrun")
    assert "fleet t on azure in " in said.out and "130 GiB" not in said.out
    assert "sells no such machine; azure does, for which no provider is installed here" in said.out


def test_an_old_gpu_is_planned_with_the_image_that_it_needs(newcomer):
    newcomer.write("t.yaml", TASK % "infra: aws, accelerators: V100")
    said = newcomer.ok("up t.yaml --dryrun")
    assert "the default image has no driver for the GPUs of p3.2xlarge" in said.out
    newcomer.write("t.yaml", TASK % "infra: aws, accelerators: V100, image_id: ami-0a1b2c3d4e5f67890")
    assert "driver" not in newcomer.ok("up t.yaml --dryrun").out


def test_a_type_whose_spot_price_nobody_knows_is_shown_with_its_price_on_demand(newcomer):
    newcomer.write("t.yaml", TASK % "infra: aws, accelerators: 'H100:1'")
    said = newcomer.ok("up t.yaml --dryrun")
    full = cheapest(Need(accelerator="H100", accelerator_count=1, use_spot=False), "aws", "us-east-1")
    assert f"${full / 1e6:.4f}" in said.out and "it has no spot price of p5.4xlarge" in said.out


def test_an_unknown_gpu_and_a_place_without_it_are_refused_with_what_there_is(newcomer):
    newcomer.write("t.yaml", TASK % "infra: aws, accelerators: H1000")
    assert "aws has no GPU 'H1000'; did you mean 'H100'" in newcomer.fails("up t.yaml --dryrun", code=2).err
    newcomer.write("t.yaml", TASK % "infra: aws/us-east-2, accelerators: V100, image_id: ami-0a1b2c3d4e5f67890")
    error = newcomer.fails("up t.yaml --dryrun").err
    assert "the catalog has no price" in error and "it has prices of such machines in aws/" in error


def test_the_plan_lists_everything_that_up_still_needs(newcomer):
    newcomer.write("t.yaml", "name: T\nresources: {infra: aws, image_id: 'docker:x'}\nenvs: {A: }\nworkdir: gone\n"
                             "file_mounts: {/data: missing}\nrun: x\n")
    said = newcomer.ok("up t.yaml --dryrun")
    below = said.out.partition("before `up`:\n")[2].splitlines()
    assert [line.split(":")[1] for line in below] == ["3", "4", "5"], said.out
    assert "note: the fleet's name is 't'" in said.err
    assert "t.yaml has 3 problems" in newcomer.fails("up t.yaml -y", code=2).err


def test_the_catalog_has_cpu_machines_of_every_usual_size():
    for cpus in (1, 2, 4, 8, 16, 32, 64, 96, 128):
        assert load().offers(Need(min_vcpus=cpus, max_vcpus=cpus), "aws"), cpus
    (biggest,) = {o.instance_type for o in load().offers(Need(min_memory_gib=1024, use_spot=False), "aws")
                  if o.market is Market.ON_DEMAND and not o.accelerator}
    assert biggest == "r6i.32xlarge"
