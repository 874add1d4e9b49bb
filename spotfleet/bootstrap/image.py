"""`python -m spotfleet.bootstrap.image PREFIX WHEEL`: folder of a host that has no fleet, on a machine that becomes an
image.

provision.sh runs it from the wheel; bootstrap.sh in the folder then makes the environment that hosts of the same
version use, so that they find it whole. Prints the folder.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from spotfleet.bootstrap import HostPlan, cloud_init, script
from spotfleet.model import EnvironmentSpec, Role

PREFIX = "/opt/spotfleet"  # environment of an image; provision.sh has the same
IMAGE = "image"  # used instead of a request_id


def environment(prefix: str = PREFIX) -> EnvironmentSpec:
    """Return the environment of hosts that start from an image."""
    return EnvironmentSpec(python=f"{prefix}/bin/python", inherit=True)


def plan(prefix: str, wheel_name: str, wheel_sha256: str) -> HostPlan:
    return HostPlan(IMAGE, "", Role.WORKER, "spotfleet.agent", {}, wheel_name, wheel_sha256, environment(prefix),
                    root=cloud_init.ROOT)


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
