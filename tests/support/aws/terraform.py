"""Terraform with AWS's provider as another client of the fake, without any network.

Both must lie on this machine: `terraform` on PATH, and the provider in a filesystem mirror, which SPOTFLEET_TF_MIRROR
names or which lies in one of the usual places.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

PROVIDER = "registry.terraform.io/hashicorp/aws"
MIRRORS = ("/opt/*", "/usr/share/terraform/plugins", "/usr/local/share/terraform/plugins", "~/.terraform.d/plugins")
SERVICES = ("ec2", "iam", "sts")
COMMAND_S = 900.0  # the provider's start alone takes half a minute of a busy processor


def mirror() -> Path | None:
    """Return the folder of a filesystem mirror that holds AWS's provider; None where there is none."""
    named = os.environ.get("SPOTFLEET_TF_MIRROR")
    patterns = [named] if named else [str(Path(mirror).expanduser()) for mirror in MIRRORS]
    places = [place for pattern in patterns for place in sorted(glob(pattern))]
    return next((Path(p) for p in places if list(Path(p).glob(f"{PROVIDER}/*/*/terraform-provider-aws*"))), None)


def why_not() -> str:
    """Return why Terraform cannot run here; "" where it can."""
    if shutil.which("terraform") is None:
        return "there is no terraform on PATH"
    return "" if mirror() else f"AWS's provider of Terraform is in none of {', '.join(MIRRORS)}"


@dataclass(frozen=True)
class Terraform:
    """A configuration in a folder of its own, applied to one fake."""

    folder: Path
    url: str

    def write(self, configuration: str) -> None:
        endpoints = "\n".join(f'    {service} = "{self.url}"' for service in SERVICES)
        (self.folder / "main.tf").write_text(f"""
terraform {{
  required_providers {{
    aws = {{ source = "hashicorp/aws" }}
  }}
}}
provider "aws" {{
  region                  = "us-east-1"
  skip_metadata_api_check = true
  max_retries             = 5
  endpoints {{
{endpoints}
  }}
}}
{configuration}""")
        (self.folder / "cli.tfrc").write_text(f"""disable_checkpoint = true
provider_installation {{
  filesystem_mirror {{
    path    = "{mirror()}"
    include = ["{PROVIDER}"]
  }}
}}
""")

    def run(self, *command: str, allowed: Sequence[int] = (0,)) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"TF_CLI_CONFIG_FILE": str(self.folder / "cli.tfrc"), "TF_IN_AUTOMATION": "1",
                            "CHECKPOINT_DISABLE": "1", "AWS_EC2_METADATA_DISABLED": "true"}
        done = subprocess.run(["terraform", *command, "-no-color"], cwd=self.folder, env=env, text=True,
                              capture_output=True, timeout=COMMAND_S, check=False)
        assert done.returncode in allowed, f"terraform {' '.join(command)}:\n{done.stdout}\n{done.stderr}"
        return done

    def apply(self) -> None:
        self.run("apply", "-input=false", "-auto-approve")

    def plan(self) -> list[dict[str, Any]]:
        """Return the resources that another apply would change, after reading them all."""
        self.run("plan", "-input=false", "-out=again")
        said = json.loads(self.run("show", "-json", "again").stdout)
        return [c for c in said.get("resource_changes", []) if c["change"]["actions"] not in (["no-op"], ["read"])]

    def destroy(self) -> None:
        self.run("destroy", "-input=false", "-auto-approve")
