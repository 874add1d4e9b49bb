"""The wheel of the running code: the same bytes wherever it is made, and one that installers take."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import spotfleet
from spotfleet import version
from spotfleet.bootstrap.wheel import build, build_from
from tests.support.bootstrap.existing_machine import LONG

LOOK = """
import json, os, spotfleet
from importlib.metadata import entry_points, requires, version
from spotfleet.bootstrap import script
from spotfleet.bootstrap.wheel import build
print(json.dumps({
    "where": spotfleet.__file__, "version": version("spotfleet"), "digest": build().sha256,
    "clouds": sorted(e.name for e in entry_points(group="spotfleet.clouds")),
    "catalog": sorted(e.name for e in entry_points(group="spotfleet.catalog")),
    "script": len(script.text("bootstrap.sh")),
    "torch": [r for r in requires("spotfleet") if r.startswith("torch")],
}))
"""


def names(data: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(data)).namelist()


def test_the_same_code_gives_the_same_bytes_whenever_and_wherever_it_lies(tmp_path: Path):
    package = Path(spotfleet.__file__).parent
    copy = tmp_path / "elsewhere" / "spotfleet"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package.parent / "pyproject.toml", copy.parent)
    for path in copy.rglob("*"):
        os.utime(path, (1e9, 1e9))
    (copy / "__pycache__").mkdir(exist_ok=True)
    for stray in ("__pycache__/model.cpython-311.pyc", ".model.py.swp", "model.py~"):
        (copy / stray).write_bytes(b"x")
    assert build_from(copy) == build_from(package)
    (copy / "model.py").write_text((copy / "model.py").read_text() + "\n")
    assert build_from(copy).sha256 != build_from(package).sha256


def test_the_release_in_the_code_is_the_one_that_is_declared():
    declared = tomllib.loads((Path(spotfleet.__file__).parent.parent / "pyproject.toml").read_text())
    assert spotfleet.__version__ == version.__version__ == declared["project"]["version"]


def test_scripts_are_in_it_and_each_file_is_recorded_with_its_digest():
    wheel = zipfile.ZipFile(io.BytesIO(build().data))
    record = {name: digest for name, digest, _ in csv.reader(wheel.read("spotfleet-0.1.0.dist-info/RECORD")
                                                             .decode().splitlines())}
    assert {"spotfleet/bootstrap/bootstrap.sh", "spotfleet/bootstrap/remove.sh"} < set(record)
    assert record == {
        name: "" if name.endswith("/RECORD") else
        "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).rstrip(b"=").decode()
        for name in wheel.namelist()}


@pytest.mark.parametrize("installer", [pytest.param("pip", marks=LONG), "uv"])
def test_it_is_installed_with_its_plugins_and_makes_itself_again(tmp_path: Path, installer: str):
    """From the distribution's metadata, where no pyproject.toml is: the dispatcher's own wheel is the laptop's."""
    file = tmp_path / build().name
    file.write_bytes(build().data)
    venv.EnvBuilder(symlinks=True).create(tmp_path / "env")
    python = str(tmp_path / "env" / "bin" / "python")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"UV_CACHE_DIR": str(tmp_path / "cache")}
    tool = {"pip": [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install"],
            "uv": [sys.executable, "-m", "uv", "pip", "install", "--python", python]}[installer]
    if subprocess.run([*tool[:3], "--version"], capture_output=True, timeout=60, env=env).returncode != 0:
        pytest.skip(f"there is no {installer} here")
    done = subprocess.run([*tool, "--no-deps", "--no-index", str(file)], capture_output=True, text=True, timeout=60,
                          env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = subprocess.run([python, "-c", LOOK], capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)
    assert json.loads(found.stdout or found.stderr) == {
        "where": str(next((tmp_path / "env").glob("lib/python*/site-packages")) / "spotfleet" / "__init__.py"),
        "version": "0.1.0", "digest": build().sha256, "providers": ["local", "ssh"],
        "interruptions": ["aws", "gcp", "local", "ssh"],
        "script": len((Path(spotfleet.__file__).parent / "bootstrap" / "bootstrap.sh").read_text()),
        "torch": ['torch>=2.11; extra == "train"'],
    }
    assert (tmp_path / "env" / "bin" / "spotfleet").read_text().count("from spotfleet.cli import main") == 1
