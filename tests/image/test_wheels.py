"""pip's resolution of torch and NCCL, by the package index. Only the metadata of wheels is downloaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
EXTRAS = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def resolved(*requirements: str) -> dict[str, str]:
    """Map names to versions of what pip would install from the public index; skips where there is none."""
    # -I: without the guard of the tests' network. No configuration: a developer's may name a folder of torch for CPUs.
    command = [sys.executable, "-I", "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q", "--report", "-",
               "--disable-pip-version-check", "--python-version", "3.12", "--only-binary", ":all:", "--target",
               "/nowhere", *requirements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540,
                          env={**os.environ, "PIP_CONFIG_FILE": os.devnull})
    if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
        raise LookupError(done.stderr)
    if done.returncode:
        pytest.skip(f"pip reaches no package index here: {done.stderr.strip().splitlines()[-1]}")
    return {i["metadata"]["name"]: i["metadata"]["version"] for i in json.loads(done.stdout)["install"]}


def test_by_default_nccl_is_what_torch_brings():
    try:
        found = resolved(*(r for r in EXTRAS["train"] if r.startswith("torch")))
    except LookupError as error:
        pytest.skip(f"this index has no torch: {error}")
    nccl = [name for name in found if name.startswith("nvidia-nccl")]
    assert nccl == ["nvidia-nccl-cu13"] and not any("nccl" in r for r in EXTRAS["train"])


def test_the_pinned_nccl_of_cuda_12_exists():
    [pin] = [r for r in EXTRAS["cuda12"] if r.startswith("nvidia-nccl-cu12")]
    try:
        assert resolved(pin) == {"nvidia-nccl-cu12": pin.partition("==")[2]}
    except LookupError as error:
        pytest.skip(f"this index has no wheels of NVIDIA: {error}")


def test_without_the_index_of_cuda_12_pip_refuses_and_mixes_nothing():
    """A CUDA 13 torch with the libraries of CUDA 12 would load whichever NCCL was installed last."""
    with pytest.raises(LookupError, match=r"torch==2\.11\.0\+cu128"):
        resolved(*EXTRAS["cuda12"])
