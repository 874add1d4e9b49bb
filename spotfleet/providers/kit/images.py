"""Ready images, which `spotfleet image build` makes, as any cloud's provider finds them: by tag or label."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.resources import files

from spotfleet.bootstrap import image as bootstrap_image
from spotfleet.bootstrap import wheel
from spotfleet.errors import NeedsPerson
from spotfleet.model import EnvironmentSpec
from spotfleet.providers import MachineImage
from spotfleet.providers.plugin import ImageRecipe
from spotfleet.version import __version__

OURS = "spotfleet"  # value of `image` and `dispatcher_image` in the fleet file: the newest of these images
KIND, RECIPE, VERSION = "spotfleet-image", "spotfleet-recipe", "spotfleet-version"  # tags or labels
GPU, CPU = "gpu", "cpu"  # values of KIND
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # torch without CUDA, a tenth of the size


def kind(gpus: object) -> str:
    return GPU if gpus else CPU


def tags(gpus: bool) -> dict[str, str]:
    """Return the tags of an image that is made now."""
    return {KIND: kind(gpus), RECIPE: bootstrap_image.recipe(wheel.running()), VERSION: __version__}


def environment(wanted: EnvironmentSpec, image: str) -> EnvironmentSpec:
    """Return the environment of hosts: on an image of ours that of the image, unless the user names another Python."""
    if image != OURS or wanted.python != EnvironmentSpec().python:
        return wanted
    return replace(wanted, python=bootstrap_image.environment().python, inherit=True)


def newest(found: Iterable[MachineImage], wanted: str, provider: str, region: str = "") -> MachineImage:
    """Return the newest image of kind `wanted`. Raises NeedsPerson where there is none."""
    fitting = [i for i in found if i.kind == wanted]
    if not fitting:
        where = f" in {region}" if region else ""
        raise missing(provider, wanted, where)
    return max(fitting, key=lambda i: i.since)


def missing(provider: str, wanted: str, where: str = "") -> NeedsPerson:
    more = f"{' --gpus' if wanted == GPU else ''}{where.replace(' in ', ' --region ')}"
    hosts = f"hosts {'with' if wanted == GPU else 'without'} GPUs"
    return NeedsPerson(f"{provider}: there is no ready image for {hosts}{where}",
                       hint=f"spotfleet image build {provider}{more}, or leave `{provider}.image` out")


def outdated(image: MachineImage) -> str:
    """Return a remark about an image that was made by another recipe; "" about others."""
    now = bootstrap_image.recipe(wheel.running())
    if image.recipe == now:
        return ""
    return (f"image {image.name} is outdated: spotfleet {image.version} made it by recipe {image.recipe}, and "
            f"{__version__} has {now}; hosts may lack packages. Build another: spotfleet image build")


def remarks(found: Iterable[MachineImage]) -> list[str]:
    """Return what is wrong with the newest image of each kind."""
    images = list(found)
    newest_ones = [max(alike, key=lambda i: i.since) for which in (CPU, GPU)
                   if (alike := [i for i in images if i.kind == which])]
    return [remark for image in newest_ones if (remark := outdated(image))]


def recipe(package: str, names: Iterable[str], gpus: bool, **variables: object) -> ImageRecipe:
    """Return the Packer files `names` of a provider's package, with the values that every cloud's template has."""
    about = tags(gpus)
    everywhere = {"kind": kind(gpus), "tags": about, "recipe": about[RECIPE], "wheel": wheel.running().name,
                  "options": "--gpus" if gpus else f"--torch-index {CPU_INDEX}"}
    return ImageRecipe({name: (files(package) / name).read_text("utf-8") for name in names}, everywhere | variables)
