"""The image in which jobs run: `container`, or SkyPilot's `image_id: docker:IMAGE`."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfleet.config import parse
from spotfleet.errors import UsageError
from spotfleet.model import ContainerSpec

FILE = Path("t.yaml")


@pytest.mark.parametrize(("text", "spec"), [
    ("container: pytorch/pytorch:2.6.0", ContainerSpec("pytorch/pytorch:2.6.0")),
    ("resources: {image_id: 'docker:nvcr.io/nvidia/pytorch:24-py3'}", ContainerSpec("nvcr.io/nvidia/pytorch:24-py3")),
    ("container: {image: 'a@sha256:0f', engine: podman, mounts: [/mnt/data, '/m:/n:ro']}",
     ContainerSpec("a@sha256:0f", "podman", ("/mnt/data", "/m:/n:ro"))),
    ("resources: {image_id: docker:a}\ncontainer: {engine: podman}", ContainerSpec("a", "podman")),
    ("container: /srv/root", ContainerSpec("/srv/root")),
    ("run: x", ContainerSpec()),
])
def test_an_image_is_read_from_either_key(text, spec):
    assert parse(f"provider: local\n{text}", FILE, {}).spec.container == spec


@pytest.mark.parametrize(("text", "said"), [
    ("container: {engine: podman}", "container: names no image; write `image: pytorch/pytorch"),
    ("container: --privileged", "container: expected an image such as"),
    ("container: 'a b'", "container: expected an image such as"),
    ("container: [a]", "container: expected an image such as"),
    ("container: {image: a, engine: lxc}", "container.engine: expected auto or docker or podman or runc, got 'lxc'"),
    ("container: {image: a, mounts: [data]}", "container.mounts: expected absolute paths as FOLDER"),
    ("container: {image: a, mounts: ['/a,readonly']}", "container.mounts: expected absolute paths as FOLDER"),
    ("container: {image: a, engine: runc}", "container.image: engine runc takes the absolute path of a folder"),
    ("container: {image: /srv/root, engine: docker}", "container.image: is a folder, and engine docker takes images"),
    ("container: a\nresources: {image_id: docker:b}", "resources.image_id: container.image means the same"),
    ("resources: {image_id: 'docker:'}", "resources.image_id: expected an image such as"),
    ("container: {image: a, gpus: all}", "container.gpus: unknown key"),
])
def test_a_container_that_cannot_be_is_refused_with_its_key(text, said):
    with pytest.raises(UsageError) as refused:
        parse(f"provider: local\n{text}", FILE, {})
    assert said in str(refused.value)
