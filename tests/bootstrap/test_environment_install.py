"""Environments that are made of packages from an index, by pip and by uv; the index is a folder served on loopback."""

from __future__ import annotations

import ensurepip
import functools
import shutil
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from spotfleet.model import EnvironmentSpec, Role
from tests.support.bootstrap.existing_machine import F1, LONG, ExistingMachine, plan, stand_in

UV = Path(sys.executable).parent / "uv"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        return


def published(index: Path, name: str, version: str, requires: str = "") -> None:
    """A wheel in the index, of one module that knows its version."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = '{version}'\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
                       + (f"Requires-Dist: {requires}\n" if requires else ""))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture
def index_url(tmp_path: Path) -> Iterator[str]:
    """Holds two versions of `tensors`, `trainer`, which is glad of either, and pip itself."""
    index = tmp_path / "index"
    published(index, "tensors", "1.0")
    published(index, "tensors", "2.0")
    published(index, "trainer", "1.0", "tensors>=1")
    (index / "pip").mkdir()
    for wheel in Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"):
        shutil.copy(wheel, index / "pip")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(index)))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("installer", [pytest.param("pip", marks=LONG if UV.exists() else ()), "uv"])
def test_a_worker_gets_the_user_s_versions_and_what_training_needs(machine: ExistingMachine, tmp_path: Path,
                                                                   index_url: str, installer: str):
    if installer == "uv" and not UV.exists():
        pytest.skip("there is no uv here")
    wheel = stand_in(tmp_path / "wheel", train="trainer")
    wanted = EnvironmentSpec(python=sys.executable, packages=("tensors==1.0",), index_url=index_url,
                             installer=installer)
    machine.bring(plan(wheel, role=Role.WORKER, environment=wanted), wheel, lambda text: text.replace("=3000", "=100"))
    machine.start(PATH=f"{UV.parent}:/usr/bin:/bin")
    machine.life()
    [environment] = (machine.root / "envs").iterdir()
    look = "import pip, tensors, trainer; print(tensors.VERSION, trainer.VERSION); import pytest"
    seen = machine.run(f'cd / && {environment}/bin/python -c "{look}"', PYTHONPATH="")
    assert (seen.stdout, seen.stderr.splitlines()[-1]) == (
        "1.0 1.0\n", "ModuleNotFoundError: No module named 'pytest'")
    assert machine.run(f"{environment}/bin/spotfleet", PYTHONPATH="").stdout == "hello\n"
    assert (f"{UV} pip install" in machine.log()) == (installer == "uv")
    assert machine.remove(F1).stderr == ""
    assert not machine.root.exists()


@pytest.mark.parametrize("lent", [True, False])
def test_a_lent_machine_that_cloud_init_left_without_venv_installs_it_and_a_user_s_own_does_not(
        machine: ExistingMachine, tmp_path: Path, lent: bool):
    tools, installed = tmp_path / "bin", tmp_path / "installed"
    tools.mkdir()
    for name, text in {
            "python3": f"""case $* in
*sys.executable*) printf '3.12.3\\n{tools}/python3\\n'; exit ;;
*ensurepip*) [ -e {installed} ]; exit ;;
*"-m pip --version"*) exit 1 ;;
"-m venv "*) set -- -m venv --without-pip "$3" ;;
esac
exec {sys.executable} "$@"
""", "id": "echo 0\n",
            "apt-get": f'echo "$*" >>{installed}.asked\n[ "$2" != update ] || exit 1\ntouch {installed}\n'}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}")
        (tools / name).chmod(0o755)
    wheel = stand_in(tmp_path / "wheel")
    machine.bring(plan(wheel, environment=EnvironmentSpec(installer="pip"), power_off=lent), wheel,
                  lambda text: text.replace("=400 ", "=100 ").replace("FAILED_S=900", "FAILED_S=9000"))
    machine.start(PATH=f"{tools}:/usr/bin:/bin")
    why = machine.wait_for("failed")
    asked = Path(f"{installed}.asked")
    if lent:
        assert asked.read_text().splitlines() == [
            "-q update", "-o DPkg::Lock::Timeout=300 -qy install python3-venv"]
        assert "pip install -r" in why and "No module named pip" in why  # the stand-in's environment has no pip
    else:
        assert "install python3-venv" in why and not asked.exists()
