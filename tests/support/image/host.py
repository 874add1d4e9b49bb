"""A host of a ready image: the files of its user data, then the command line of the installed unit."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import yaml

from spotfleet.bootstrap import HostPlan, Wheel, cloud_init, image
from spotfleet.model import EnvironmentSpec, Role
from tests.support.image.debian import Debian

UNIT = "/etc/systemd/system/spotfleet-host.service"


def plan(wheel: Wheel, request_id: str, files: dict[str, str], environment: EnvironmentSpec | None = None) -> HostPlan:
    return HostPlan(request_id, "f", Role.WORKER, "spotfleet.agent", files, wheel.name, wheel.sha256,
                    environment or image.environment(), root=cloud_init.ROOT, power_off=True)


def boot(machine: Debian, wanted: HostPlan, wheel: Wheel | None = None, **env: str) -> subprocess.Popen[bytes]:
    """Do what cloud-init and systemd do; `wheel`: that the host would fetch."""
    made = yaml.safe_load(cloud_init.user_data(wanted, user="ubuntu", authorized_keys=[], host_key=None))
    for file in made["write_files"]:
        path = machine.path(file["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file["content"])
        path.chmod(int(file["permissions"], 8))
    if wheel is not None:
        folder = folder_of(machine, wanted) / "wheel"
        folder.mkdir(exist_ok=True)
        (folder / wheel.name).write_bytes(wheel.data)
    command = next(line.removeprefix("ExecStart=") for line in machine.path(UNIT).read_text().splitlines()
                   if line.startswith("ExecStart="))
    argv = [word.replace("$$", "$") for word in shlex.split(command)]
    return subprocess.Popen(machine.argv(argv, env), stdin=subprocess.DEVNULL)


def folder_of(machine: Debian, wanted: HostPlan) -> Path:
    return machine.path(f"{wanted.root}/{wanted.request_id}")


def log(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for name in
                     ("bootstrap.log", "console.log") if (path := folder / name).exists())
