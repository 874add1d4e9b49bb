"""Ready images on EC2: found by tag, used by `image: spotfleet`, reported when outdated, removed with their disks."""

from __future__ import annotations

import gzip
import json

import pytest

from spotfleet.bootstrap import image, wheel
from spotfleet.cli.app import run
from spotfleet.errors import NeedsPerson, UsageError
from spotfleet.model import FleetSpec, Market, Offer, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.aws import images
from spotfleet.providers.aws.plugin import AWS
from spotfleet.providers.kit import userdata

CPU, GPU, OLD = "ami-0000000000000001c", "ami-0000000000000002c", "ami-0000000000000003c"
NOW = image.recipe(wheel.running())


def made(cloud, id: str, kind: str, recipe: str, at: str) -> None:
    cloud.add_image(id, f"spotfleet-{kind}-{recipe}", made=at, tags={
        "spotfleet-image": kind, "spotfleet-recipe": recipe, "spotfleet-version": "0.1.0"})


@pytest.fixture
def three(cloud):
    cloud.add_image("ami-0000000000000009c", "another program's")
    made(cloud, OLD, "cpu", "0123456789ab", "2026-10-01T00:00:00.000Z")
    made(cloud, GPU, "gpu", "0123456789ab", "2026-11-02T00:00:00.000Z")
    made(cloud, CPU, "cpu", NOW, "2026-11-03T00:00:00.000Z")
    return cloud


def offer(accelerator: str = "") -> Offer:
    return Offer("p", "us-east-1", "us-east-1a", "x", 1, Market.SPOT, 1, 1, accelerator=accelerator)


def test_images_of_ours_are_listed_newest_first_and_no_others(three, aws):
    assert [(i.id, i.kind, i.recipe == NOW, i.region) for i in aws().images()] == [
        (CPU, "cpu", True, "us-east-1"), (GPU, "gpu", False, "us-east-1"), (OLD, "cpu", False, "us-east-1")]


def test_a_host_starts_from_the_newest_image_of_its_kind_and_installs_nothing(three, aws):
    account = aws(image="spotfleet", dispatcher_image="spotfleet").account
    found = {what: images.image(account, "us-east-1", images.wanted(account, role, offer(accelerator))).id
             for what, role, accelerator in (("cpu", Role.WORKER, ""), ("gpu", Role.WORKER, "L4"),
                                             ("dispatcher", Role.DISPATCHER, "L4"))}
    assert found == {"cpu": CPU, "gpu": GPU, "dispatcher": CPU}
    for role in (Role.WORKER, Role.DISPATCHER):
        request = LaunchRequest("f-1", "f", role, offer(), Boot("spotfleet.agent"))
        text = gzip.decompress(userdata.user_data(account.settings.machine, [request])).decode()
        assert "PYTHON=/opt/spotfleet/bin/python\n" in text and "INHERIT=yes\n" in text
        assert "package_update" not in text


def test_a_dispatcher_without_a_ready_image_has_an_environment_of_its_own(three, aws):
    account = aws(image="spotfleet").account
    request = LaunchRequest("f-1", "f", Role.DISPATCHER, offer(), Boot("spotfleet.dispatcher"))
    text = gzip.decompress(userdata.user_data(account.settings.machine, [request])).decode()
    assert "PYTHON=python3\n" in text and "INHERIT=''\n" in text


def test_a_fleet_without_such_an_image_is_told_how_to_build_one(cloud, aws):
    account = aws(image="spotfleet").account
    with pytest.raises(NeedsPerson, match="aws: there is no ready image for hosts with GPUs in us-east-1") as raised:
        images.image(account, "us-east-1", images.wanted(account, Role.WORKER, offer("L4")))
    assert raised.value.hint.startswith("spotfleet image build aws --gpus --region us-east-1")


def test_up_reports_an_outdated_image_and_no_other(three, aws):
    said: list[str] = []
    images.report(aws(image="spotfleet").account, said.append)
    [line] = said
    assert line.startswith("aws us-east-1: image spotfleet-gpu-0123456789ab is outdated: spotfleet 0.1.0 made it")
    images.report(aws(image=CPU).account, said.append)
    assert said == [line]


def test_rm_removes_the_image_with_its_disk_and_may_be_repeated(three, aws):
    provider = aws()
    [old] = [i for i in provider.images() if i.id == OLD]
    provider.delete_image(old)
    provider.delete_image(old)
    assert OLD not in three.images and three.snapshots == set()
    assert [i.id for i in aws().images()] == [CPU, GPU]


def test_the_recipe_names_the_region_and_the_networks_that_packer_comes_from():
    config = AWS.config(FleetSpec("", provider="aws", section={"regions": ["eu-west-1"], "ssh_from": ["192.0.2.0/24"],
                                                              "profile": "builds"}), {}, "")
    found = AWS.image_recipe(config, gpus=True, region="")
    assert found is not None and found.environ == {"AWS_PROFILE": "builds"}
    values = {key: found.variables[key] for key in ("region", "ssh_from", "kind", "options", "recipe")}
    assert values == {"region": "eu-west-1", "ssh_from": ["192.0.2.0/24"], "kind": "gpu", "options": "--gpus",
                      "recipe": NOW}
    with pytest.raises(UsageError, match="an image of EC2 belongs to a region"):
        AWS.image_recipe(AWS.config(FleetSpec("", provider="aws"), {}, ""), gpus=True, region="")


def test_the_commands_list_images_with_their_state_and_remove_them_by_name(three, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SPOTFLEET_HOME", str(tmp_path))
    assert run(["image", "list", "aws", "--region", "us-east-1", "-o", "json"]) == 0
    assert {i["id"]: i["outdated"] for i in json.loads(capsys.readouterr().out)} == {CPU: False, GPU: True, OLD: True}
    assert run(["image", "rm", "aws", "nothing", "--region", "us-east-1", "--yes"]) == 2
    assert "aws lists no ready image nothing" in capsys.readouterr().err
    assert run(["image", "rm", "aws", "spotfleet-cpu-0123456789ab", "--region", "us-east-1", "--yes"]) == 0
    assert OLD not in three.images and {CPU, GPU} <= three.images.keys()
    assert run(["image", "list", "aws", "--region", "us-east-1"]) == 0
    shown = capsys.readouterr().out
    assert "outdated" in shown and "current" in shown and OLD not in shown
