"""The fleet and the script of scripts/smoke-aws and scripts/smoke-gcp: as small as shows what has to be shown."""

from __future__ import annotations

import argparse
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

TOP = Path(__file__).parents[1]
CPU_TORCH = ("torch @ https://download.pytorch.org/whl/cpu/"  # a tenth of PyPI's; Ubuntu 24.04 has Python 3.12
             "torch-2.13.0%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl")
GPU_TORCH = "torch==2.13.0"
FILE = """\
name: {name}
provider: aws
nodes: {{min: 2, target: 2, max: 2}}
resources: {{use_spot: true{wanted}}}
aws: {{regions: [{region}], disk: {disk}, dispatcher_disk: 20}}
environment: {{packages: ["{torch}", scikit-learn]}}
checkpoint: {{interval: 30s}}
max_lifetime: 3h
autostop: {{idle_minutes: 30, down: true}}
tags: {{purpose: spotfleet-smoke}}
workdir: .
"""


def prepared(args: argparse.Namespace, folder: Path, part: str = "basic", over: Mapping[str, Any] | None = None,
             file: str = FILE) -> str:
    """Fleet file and script of a part in `folder`, with what it lays `over` the file; the fleet's name."""
    name = (args.name or f"smoke-{secrets.token_hex(2)}") + ("" if part == "basic" else f"-{part}")
    torch = args.torch or (GPU_TORCH if args.type else CPU_TORCH)
    wanted = f", instance_type: {args.type}" if args.type else ""
    text = file.format(name=name, region=args.region, wanted=wanted, torch=torch, disk=100 if args.type else 30)
    if over:
        text = yaml.safe_dump(_over(yaml.safe_load(text), dict(over)), sort_keys=False)
    if args.more:
        text = yaml.safe_dump(_over(yaml.safe_load(text), yaml.safe_load(Path(args.more).read_text())), sort_keys=False)
    (folder / "fleet.yaml").write_text(text)
    for script in ("digits.py", "digits_net.py"):
        shutil.copy(TOP / "examples" / script, folder)
    return name


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`environment` is replaced whole: what one way of making it says is wrong for another."""
    return below | {key: _over(below[key], value) if isinstance(value, dict) and key != "environment" and key in below
                    else value for key, value in above.items()}
