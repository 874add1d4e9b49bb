"""Reader of a base's contract: from Terraform's output, from a file, or from the account by the base's tag."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spotfleet.config import Given, load
from spotfleet.config import base as contracts
from spotfleet.errors import UsageError
from spotfleet.plugins import Base
from spotfleet.providers.plugin import plugin_of

STDIN = "-"
TERRAFORM_S = 120.0  # a remote state is fetched


def read(source: str) -> Base:
    """Return the base of `source`: a folder where Terraform has been applied, a file with its outputs, or "-".

    Raises UsageError where Terraform, or its output, is missing or wrong.
    """
    if source == STDIN:
        return contracts.parse(sys.stdin.read(), "standard input")
    path = Path(source)
    if path.is_dir():
        return contracts.parse(_outputs(path), f"terraform output in {path}")
    try:
        return contracts.parse(path.read_text("utf-8"), str(path))
    except FileNotFoundError:
        raise UsageError(f"--from-terraform: there is no folder or file {path}",
                         hint="name the folder in which you ran `terraform apply`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--from-terraform: {path} cannot be read: {error}",
                         hint="terraform output -json > base.json") from None


def _outputs(folder: Path) -> str:
    for program in ("terraform", "tofu"):
        try:
            done = subprocess.run([program, f"-chdir={folder}", "output", "-json", "-no-color"], text=True,
                                  capture_output=True, timeout=TERRAFORM_S, check=False, stdin=subprocess.DEVNULL)
        except FileNotFoundError:
            continue
        except subprocess.TimeoutExpired:
            raise UsageError(f"{program} output in {folder} has not ended after {TERRAFORM_S:.0f} s",
                             hint=f"`{program} -chdir={folder} output -json > base.json`, then --from-terraform "
                                  "base.json") from None
        if done.returncode:
            raise UsageError(f"{program} output in {folder}: {done.stderr.strip() or done.stdout.strip()}",
                             hint=f"{program} -chdir={folder} init && {program} -chdir={folder} apply")
        return done.stdout
    raise UsageError("there is neither `terraform` nor `tofu` on this machine",
                     hint="run `terraform output -json > base.json` where it is, then --from-terraform base.json")


def discover(name: str, file: Path) -> Base:
    """Return the base `name` of the account and regions that a fleet file names. Raises NeedsPerson for none."""
    spec = load(file, given=Given(draft=True)).spec
    plugin = plugin_of(spec.provider)
    provider = plugin.open(plugin.config(spec, os.environ, ""))
    return contracts.parse(plugin.base_contract(provider, name), f"base {name}")
