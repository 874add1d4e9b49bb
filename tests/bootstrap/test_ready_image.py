"""`provision.sh` on this machine, but for the packages of the system: what an image spares its hosts."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from spotfleet.bootstrap.wheel import build
from spotfleet.model import EnvironmentSpec, Role
from tests.support.bootstrap.existing_machine import F1, ExistingMachine, plan

TOP = Path(__file__).parents[2]
PROVISION = TOP / "spotfleet" / "bootstrap" / "provision.sh"
NO_INDEX = "http://127.0.0.1:9/simple"  # nothing answers there


def provision(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(PROVISION), *words], capture_output=True, text=True, timeout=120)


@pytest.mark.processes
def test_on_a_ready_image_nothing_is_installed_between_a_launch_and_the_agent(machine: ExistingMachine, tmp_path: Path):
    image = tmp_path / "opt" / "spotfleet"
    wheel = build()
    (tmp_path / wheel.name).write_bytes(wheel.data)
    made = provision("--wheel", str(tmp_path / wheel.name), "--venv-only", "--extras", "train,aws", "--prefix",
                     str(image), "--torch", "none", "--index", NO_INDEX, "--see", sysconfig.get_path("purelib"))
    assert made.returncode == 0, made.stderr
    assert made.stderr.splitlines()[-1].endswith(f"environment: {{python: {image}/bin/python, inherit: true}}")

    wanted = EnvironmentSpec(python=f"{image}/bin/python", inherit=True, index_url=NO_INDEX)
    host = plan(wheel, role=Role.WORKER, module="spotfleet.agent", environment=wanted)
    machine.bring(host, None)  # the image has the wheel
    machine.start()
    machine.wait_for("running")
    assert "pip" not in machine.log().replace("inherit.py", "") and " uv" not in machine.log(), machine.log()
    [environment] = (machine.root / "envs").iterdir()
    look = "import boto3, spotfleet, spotfleet.dispatcher.http.app, torch; print(spotfleet.__file__)"
    seen = machine.run(f'cd / && {environment}/bin/python -c "{look}"', PYTHONPATH="")
    assert seen.stdout.startswith(str(environment)), seen.stderr
    assert machine.remove(F1).stderr == "" and image.exists()


@pytest.mark.skipif("ID=debian" not in Path("/etc/os-release").read_text().splitlines(), reason="not Debian")
@pytest.mark.parametrize(("kernel", "headers"), [
    ("6.1.0-40-cloud-amd64", "linux-headers-cloud-amd64"), ("6.1.0-40-amd64", "linux-headers-amd64")])
def test_the_driver_is_built_for_the_kernel_that_the_image_boots(tmp_path: Path, kernel: str, headers: str):
    for name, text in (("uname", f"echo {kernel}"), ("apt-get", 'echo "$@"'), ("dpkg-query", "exit 1"),
                       ("modinfo", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(["bash", str(PROVISION), "--gpus", "--simulate"], capture_output=True, text=True, timeout=120,
                          env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert done.returncode == 0 and f" {headers} nvidia-kernel-dkms " in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("words, why", [
    (["--torhc", "x"], "unknown option --torhc"),
    (["--prefix"], "--prefix needs a value"),
    (["--venv-only"], "no wheel: name it with --wheel"),
    (["--venv-only", "--wheel", "/nowhere"], "there is no file /nowhere"),
    (["--venv-only", "--wheel", __file__, "--seal"], "--seal is for a machine that becomes an image"),
], ids=["unknown", "no-value", "no-wheel", "lost-wheel", "seal-here"])
def test_a_wrong_option_is_named_before_anything_is_done(words: list[str], why: str):
    done = provision(*words)
    assert done.returncode == 1 and why in done.stderr and done.stdout == ""


def test_the_help_names_every_option():
    shown = provision("--help").stdout
    options = {w for w in PROVISION.read_text().replace(")", " ").split() if w.startswith("--") and w[2:3].isalpha()}
    ours = {"--wheel", "--prefix", "--extras", "--torch", "--torch-index", "--index", "--see", "--gpus", "--venv-only",
            "--simulate", "--seal", "--configure"}
    assert ours <= options and all(o in shown for o in ours)
