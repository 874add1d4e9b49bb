from __future__ import annotations

import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spotfleet.bootstrap.wheel import build
from tests.support.image import debian

TOP = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def image() -> Iterator[debian.Debian]:
    """A Debian that the provisioning script has made a ready image, for hosts without GPUs; not sealed yet."""
    if why := debian.why_not():
        pytest.skip(why)
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], f"torch=={torch.__version__}",
              *(r for r in project["optional-dependencies"]["train"] if not r.startswith("torch"))]
    with tempfile.TemporaryDirectory(dir=debian.room(), prefix="spotfleet-image-") as folder:
        try:
            made = debian.Debian(Path(folder) / "root", debian.wheelhouse(wanted))
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"no Debian can be downloaded here: {error}")
        wheel = build()
        made.path(f"/root/{wheel.name}").write_bytes(wheel.data)
        shutil.copy(TOP / "spotfleet/bootstrap/provision.sh", made.path("/root"))
        provision(made)
        yield made


def provision(machine: debian.Debian, *words: str) -> str:
    """Run the script as for an image without GPUs; return its messages."""
    done = machine.run("bash", "/root/provision.sh", "--wheel", f"/root/{build().name}", "--torch",
                       f"torch=={torch.__version__}", *words,
                       env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": debian.WHEELS})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr
