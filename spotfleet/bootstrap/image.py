"""`python -m spotfleet.bootstrap.image PREFIX WHEEL`: folder of a host that has no fleet, on a machine that becomes an
image.

provision.sh runs it from the wheel; bootstrap.sh in the folder then makes the environment that hosts of the same
version use, so that they find it whole. Prints the folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import zipfile
from pathlib import Path

from spotfleet.bootstrap import HostPlan, Wheel, cloud_init, script
from spotfleet.model import EnvironmentSpec, Role

PREFIX = "/opt/spotfleet"  # environment of an image; provision.sh has the same
IMAGE = "image"  # used instead of a request_id
PROVISION = "provision.sh"
NO_HOST = ('extra == "all"', 'extra == "demo"', 'extra == "dev"')  # requirements that no image has


def environment(prefix: str = PREFIX) -> EnvironmentSpec:
    """Return the environment of hosts that start from an image."""
    return EnvironmentSpec(python=f"{prefix}/bin/python", inherit=True)


def plan(prefix: str, wheel_name: str, wheel_sha256: str) -> HostPlan:
    return HostPlan(IMAGE, "", Role.WORKER, "spotfleet.agent", {}, wheel_name, wheel_sha256, environment(prefix),
                    root=cloud_init.ROOT)


def recipe(wheel: Wheel) -> str:
    """Return the version of images that are made now, 12 characters: by the script and by what this wheel requires.

    Another version of spotfleet with the same requirements has the same recipe: its hosts bring their own code.
    """
    with zipfile.ZipFile(io.BytesIO(wheel.data)) as archive:
        about = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        needs = [line for line in archive.read(about).decode().splitlines()
                 if line.startswith("Requires-Dist: ") and not line.endswith(NO_HOST)]
    return hashlib.sha256("\n".join([script.text(PROVISION), *needs]).encode()).hexdigest()[:12]


def main() -> None:
    prefix, wheel = sys.argv[1], Path(sys.argv[2])
    data = wheel.read_bytes()
    made = plan(prefix, wheel.name, hashlib.sha256(data).hexdigest())
    folder = Path(made.root, IMAGE)
    os.umask(0o077)
    (folder / "wheel").mkdir(parents=True, exist_ok=True)
    for name, text in script.files(made).items():
        (folder / name).write_text(text)
    (folder / "wheel" / wheel.name).write_bytes(data)
    print(folder)


if __name__ == "__main__":
    main()
