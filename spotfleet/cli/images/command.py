"""The commands `image build`, `image list` and `image rm`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import typer

from spotfleet.api.account import images
from spotfleet.api.home import Home
from spotfleet.bootstrap import image, wheel
from spotfleet.cli.console import confirm, next_command, print_message, print_step
from spotfleet.cli.render import span
from spotfleet.cli.tables import table
from spotfleet.codec import to_json
from spotfleet.providers import MachineImage


def build(provider: str, file: Path | None, *, gpus: bool, region: str, folder: Path | None) -> None:
    written = images.build(Home(), provider, file, gpus=gpus, region=region, folder=folder, progress=print_step)
    if written is not None:
        print_message(f"wrote Packer's files to {written}")
        next_command(f"cd {written} && packer init . && packer build .")
    else:
        next_command(f"{provider}: {{image: spotfleet}}   (in the fleet file: hosts start from the newest image)")


def show(provider: str, file: Path | None, region: str, *, as_json: bool) -> None:
    found, now = images.listed(Home(), provider, file, region), image.recipe(wheel.running())
    if as_json:
        print(json.dumps([{**to_json(one), "outdated": one.recipe != now} for one in found], indent=1))
        return
    if found:
        print(table(["image", "name", "for", "region", "made by", "age", "GiB", "state"],
                    [_row(one, now) for one in found], right=["GiB"], drop=["GiB", "region", "made by"]))
    else:
        print_message("no ready image is listed")
        next_command(f"spotfleet image build {provider}")


def _row(one: MachineImage, now: str) -> tuple[str, ...]:
    return (one.id, one.name if one.name != one.id else "", "GPUs" if one.kind == "gpu" else "CPUs", one.region,
            one.version, span(time.time() - one.since), str(one.disk_gib),
            "current" if one.recipe == now else "outdated")


def remove(provider: str, ids: list[str], file: Path | None, region: str, *, yes: bool) -> None:
    if not confirm(f"Remove {', '.join(ids)}? Fleets whose files name them start no more hosts.", yes):
        raise typer.Exit(1)
    done = images.remove(Home(), provider, file, region, ids)
    print_message(f"removed: {', '.join(one.id for one in done)}")
