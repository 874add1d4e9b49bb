"""Ready images on Google Cloud: found by family and label, used by `image: spotfleet`, reported when outdated."""

from __future__ import annotations

import pytest

from spotfleet.bootstrap import image, wheel
from spotfleet.errors import NeedsPerson, UsageError
from spotfleet.model import FleetSpec, Market, Offer, Role
from spotfleet.providers.gcp import images
from spotfleet.providers.gcp.plugin import GCP

NOW = image.recipe(wheel.running())


def made(cloud, kind: str, recipe: str, at: str) -> str:
    name = f"spotfleet-{kind}-{recipe}"
    cloud.add_image(name, family=f"spotfleet-{kind}", made=at, labels={
        "spotfleet-image": kind, "spotfleet-recipe": recipe, "spotfleet-version": "0-1-0"})
    return name


def offer(accelerator: str = "") -> Offer:
    return Offer("p", "us-central1", "us-central1-a", "x", 1, Market.SPOT, 1, 1, accelerator=accelerator)


def test_a_host_starts_from_the_family_of_its_kind(cloud, gcp):
    name = made(cloud, "cpu", NOW, "2026-11-03T00:00:00.000-07:00")
    account = gcp(image="spotfleet").account
    assert images.image(account, Role.WORKER, offer()) == f"projects/{cloud.project}/global/images/{name}"
    assert account.settings.machine.environment.python == "/opt/spotfleet/bin/python"
    with pytest.raises(NeedsPerson, match="gcp: there is no ready image for hosts with GPUs") as raised:
        images.image(account, Role.WORKER, offer("L4"))
    assert raised.value.hint.startswith("spotfleet image build gcp --gpus")


def test_images_are_listed_newest_first_reported_when_outdated_and_removed(cloud, gcp):
    cloud.add_image("another-program-s")
    old = made(cloud, "cpu", "0123456789ab", "2026-10-01T00:00:00.000-07:00")
    gpu = made(cloud, "gpu", "0123456789ab", "2026-11-02T00:00:00.000-07:00")
    new = made(cloud, "cpu", NOW, "2026-11-03T00:00:00.000-07:00")
    provider = gcp(image="spotfleet")
    found = provider.images()
    assert [(i.id, i.kind, i.version) for i in found] == [(new, "cpu", "0.1.0"), (gpu, "gpu", "0.1.0"),
                                                          (old, "cpu", "0.1.0")]
    said: list[str] = []
    images.report(provider.account, said.append)
    assert [line.partition(" is outdated")[0] for line in said] == [f"gcp: image {gpu}"]
    provider.delete_image(found[2])
    provider.delete_image(found[2])
    assert [i.id for i in gcp().images()] == [new, gpu]


def test_the_recipe_has_labels_that_google_cloud_takes(monkeypatch):
    config = GCP.config(FleetSpec("", provider="gcp", section={"project": "my-project-1"}), {}, "")
    found = GCP.image_recipe(config, gpus=False, region="us-central1")
    assert found is not None
    assert found.variables["tags"] == {"spotfleet-image": "cpu", "spotfleet-recipe": NOW, "spotfleet-version": "0-1-0"}
    assert (found.variables["zone"], found.variables["base_project"]) == ("us-central1-b", "ubuntu-os-cloud")
    with pytest.raises(UsageError, match="needs a place"):
        GCP.image_recipe(config, gpus=False, region="")
