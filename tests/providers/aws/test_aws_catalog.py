"""What instance types are."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import moto
import pytest

from spotfleet.model import Market, Need
from spotfleet.providers.aws import types
from spotfleet.providers.aws.types import TypeFacts, accelerator_name, parsed
from spotfleet.providers.kit.mapping.types import same_accelerator


@cache
def everything() -> dict[str, dict]:
    """DescribeInstanceTypes of all types, as recorded from EC2 by moto's authors."""
    packed = Path(moto.__file__).parent / "ec2" / "resources" / "instance_types.json.gz"
    return json.loads(gzip.decompress(packed.read_bytes()))


@pytest.mark.parametrize(("kind", "gpus", "accelerator"), [
    ("g5.xlarge", 1, "A10G"), ("g5.12xlarge", 4, "A10G"), ("g5.48xlarge", 8, "A10G"), ("g4dn.12xlarge", 4, "T4"),
    ("p3dn.24xlarge", 8, "V100-32GB"), ("p4d.24xlarge", 8, "A100"), ("p4de.24xlarge", 8, "A100-80GB"),
    ("p5.48xlarge", 8, "H100"), ("p5en.48xlarge", 8, "H200"), ("g6.xlarge", 1, "L4"), ("g6f.xlarge", 1, "L4-3GB"),
    ("g6e.12xlarge", 4, "L40S"), ("g7e.2xlarge", 1, "RTX-PRO-6000"), ("m5.large", 0, ""), ("t3.small", 0, ""),
])
def test_accelerators_are_counted_and_called_as_users_call_them(kind, gpus, accelerator):
    facts = parsed(everything()[kind])
    assert (facts.gpus, facts.accelerator) == (gpus, accelerator)
    assert facts.slots == (gpus or 1)


def test_the_facts_of_a_big_machine_are_whole():
    assert parsed(everything()["p4d.24xlarge"]) == TypeFacts(
        "p4d.24xlarge", 96, 1_179_648, 8, "A100", ("x86_64",), (Market.SPOT, Market.ON_DEMAND), clusters=True,
        efa_cards=(0, 1, 2, 3))


def test_a_small_machine_has_no_efa_and_stands_in_no_cluster():
    facts = parsed(everything()["t3.small"])
    assert (facts.vcpus, facts.efa_cards, facts.clusters, facts.burstable) == (2, (), False, True)


def test_every_type_that_ec2_has_can_be_read():
    kinds = [parsed(item) for item in everything().values()]
    assert len(kinds) > 1000
    assert all(k.vcpus and k.slots for k in kinds)
    assert {k.name for k in kinds if k.gpus and not k.accelerator} == set()


def test_every_accelerator_is_found_among_the_names_that_are_asked_for():
    """Else a need for one would miss its machines."""
    assert {n for n, item in everything().items() if parsed(item).gpus and n[0] not in "gp"} == set()


@pytest.mark.parametrize(("wish", "name", "same"), [
    ("a10g", "A10G", True), ("NVIDIA A10G", "A10G", True), ("Tesla-T4", "T4", True), ("A100-80gb", "A100-80GB", True),
    ("a100 80GB", "A100-80GB", True), ("A100", "A100-80GB", False), ("V100", "V100-32GB", False), ("L4", "L40S", False),
    ("rtx pro 6000", "RTX-PRO-6000", True),
])
def test_a_wish_for_an_accelerator_means_exactly_one_kind(wish, name, same):
    assert same_accelerator(wish, name) is same


def test_a_device_without_a_known_memory_bears_its_bare_name():
    assert accelerator_name({"Name": "NVIDIA Tesla V100"}) == "V100"


def test_one_page_of_types_answers_a_need_for_accelerators(cloud, aws):
    account = aws().account
    cloud.forget_calls()
    for count in (1, 4):
        assert types.fitting(account, "us-east-1", Need(accelerator="A10G", accelerator_count=count))
    assert [c.action for c in cloud.calls] == ["ec2:DescribeInstanceTypes"]


def test_a_need_that_names_nothing_means_small_machines_of_our_processors(aws):
    account = aws().account
    small = types.fitting(account, "us-east-1", Need(use_spot=False))
    assert small
    assert all(f.vcpus == 2 and f.x86_64 and not f.gpus for f in small.values())
    hosts = types.fitting(account, "us-east-1", Need())
    assert hosts and not [name for name in (*hosts, *types.FOR_HOSTS) if name.startswith("t")]  # they train


@pytest.mark.parametrize(("need", "said"), [
    (Need(instance_type="g5.xlrge"), "instance_type 'g5.xlrge' is not known in us-east-1; did you mean 'g5.xlarge'?"),
    (Need(accelerator="A10"), "did you mean 'A10G'?"),
    (Need(accelerator="A10G", accelerator_count=3), "no type has 3 of accelerators 'A10G' in us-east-1: there are "
                                                    "types with 1, 4, 8"),
    (Need(region="us-esat-1"), "region 'us-esat-1' is none of those that are enabled for the account; did you mean "
                               "'us-east-1'?"),
    (Need(region="us-west-2"), "region 'us-west-2' is none of `aws.regions`: us-east-1"),
    (Need(instance_type="t4g.small"), "instance_type 't4g.small' has no x86_64 processor"),
    (Need(instance_type="g5.xlarge"), ""),
    (Need(accelerator="A10G", accelerator_count=4), ""),
    (Need(), ""),
])
def test_words_that_name_nothing_are_told_with_the_nearest_that_do(aws, need, said):
    found = aws().unknown([need])
    assert said in found if said else found == ""


@pytest.mark.parametrize("need, what", [
    (Need(accelerator="V100", accelerator_count=1), "accelerators 'V100'"),
    (Need(instance_type="p3.2xlarge"), "instance_type 'p3.2xlarge'"),
    (Need(instance_type="g4ad.xlarge"), "instance_type 'g4ad.xlarge'"),
    (Need(accelerator="L4-3GB"), "accelerators 'L4-3GB'"),
], ids=["v100", "p3", "amd", "share"])
def test_gpus_that_the_default_image_does_not_drive_are_not_launched_without_an_image_that_does(aws, need, what):
    assert types.fitting(aws().account, "us-east-1", need) == {}
    why = types.unknown(aws().account, [need])
    assert why.startswith(f"{what} has no driver on the default image") and "`aws.image`" in why
    own = aws(image="ami-0123456789abcdef0").account
    assert len(types.fitting(own, "us-east-1", need)) == 1 and types.unknown(own, [need]) == ""


def test_no_gpu_is_suggested_that_the_default_image_does_not_drive(aws):
    why = types.unknown(aws().account, [Need(accelerator="X100")])
    assert "A10G" in why and "V100" not in why and "Radeon" not in why
