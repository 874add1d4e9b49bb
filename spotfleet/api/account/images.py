"""Ready images of an account, which Packer builds from a cloud's recipe: docs/clouds/images.md."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from spotfleet import config, providers
from spotfleet.api.home import Home
from spotfleet.api.machine import provider_config
from spotfleet.bootstrap import image, script, wheel
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.model import FleetSpec, Need
from spotfleet.providers import MachineImage, MachineImages
from spotfleet.providers.plugin import Config, ImageRecipe, plugin_of

INSTALL = "install Packer 1.7 or newer, by Homebrew `brew install hashicorp/tap/packer`, on Linux by the packages of " \
          "https://developer.hashicorp.com/packer/install; or write its files with --folder DIR"


def build(home: Home, provider: str, file: Path | None, *, gpus: bool, region: str, folder: Path | None,
          progress: Callable[[str], None]) -> Path | None:
    """Build an image with Packer, whose output goes to stderr. With `folder`, only write its files there and return it.

    Raises UsageError without Packer, and SpotfleetError where it fails.
    """
    made = _recipe(home, provider, file, gpus, region)
    if folder is None and shutil.which("packer") is None:
        raise UsageError("images are built by Packer, which is not installed here", hint=INSTALL)
    with ExitStack() as kept:
        where = folder or Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="spotfleet-image-")))
        write(made, where)
        if folder is not None:
            return folder
        for command in ("init", "build"):
            progress(f"packer {command}")
            done = subprocess.run(["packer", command, "."], cwd=where, env=os.environ | made.environ, stdout=2,
                                  stdin=subprocess.DEVNULL)
            if done.returncode:
                more = f"is Packer older than 1.7? {INSTALL}" if command == "init" else "PACKER_LOG=1 shows more"
                raise SpotfleetError(f"packer {command} ended with status {done.returncode}; its output is above",
                                     hint=more)
    return None


def write(made: ImageRecipe, folder: Path) -> None:
    """Write all that `packer init . && packer build .` needs."""
    code = wheel.running()
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**made.files, image.PROVISION: script.text(image.PROVISION)}.items():
        (folder / name).write_text(text)
    (folder / code.name).write_bytes(code.data)
    (folder / "values.auto.pkrvars.json").write_text(json.dumps(made.variables, indent=1) + "\n")


def listed(home: Home, provider: str, file: Path | None, region: str) -> list[MachineImage]:
    """List the images of one provider, newest first."""
    return _opened(home, provider, file, region).images()


def remove(home: Home, provider: str, file: Path | None, region: str, ids: list[str]) -> list[MachineImage]:
    """Remove images by id or name; return them. Raises UsageError, before any is removed, for one that is not listed.
    """
    account = _opened(home, provider, file, region)
    found = account.images()
    by_name = {name: one for one in found for name in (one.id, one.name)}
    if missing := [name for name in ids if name not in by_name]:
        raise UsageError(f"{provider} lists no ready image {', '.join(missing)}",
                         hint=f"`spotfleet image list {provider}` shows their ids and names")
    wanted = list(dict.fromkeys(by_name[name] for name in ids))
    for one in wanted:
        account.delete_image(one)
    return wanted


def _settings(home: Home, provider: str, file: Path | None) -> Config:
    spec = config.load(file).spec if file is not None else FleetSpec("", provider=provider)
    if spec.provider != provider:
        raise UsageError(f"{file} is for provider {spec.provider}, not {provider}",
                         hint=f"name {spec.provider}, or leave -f out")
    return provider_config(home, spec)


def _recipe(home: Home, provider: str, file: Path | None, gpus: bool, region: str) -> ImageRecipe:
    found = plugin_of(provider).image_recipe(_settings(home, provider, file), gpus=gpus, region=region)
    if found is None:
        raise _none(provider)
    return found


def _opened(home: Home, provider: str, file: Path | None, region: str) -> MachineImages:
    settings = _settings(home, provider, file)
    if region:
        settings = plugin_of(provider).narrowed(settings, Need(region=region))
    opened = providers.load(provider, settings)
    if not isinstance(opened, MachineImages):
        raise _none(provider)
    return opened


def _none(provider: str) -> UsageError:
    return UsageError(f"machines of provider {provider} start from no image that spotfleet builds",
                      hint="docs/clouds/images.md names the clouds that have some")
