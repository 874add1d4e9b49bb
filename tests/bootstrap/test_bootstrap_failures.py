"""What hinders a machine from becoming a host is said in `state` by name, in bounded time, and another run cures it."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.bootstrap import Wheel
from tests.support.bootstrap.existing_machine import F1, INHERIT, ExistingMachine, plan, stand_in, wait_until

TMPFS_MIB = 12


def setting(**values: str) -> Callable[[str], str]:
    """bootstrap.sh with other constants."""
    def change(text: str) -> str:
        for name, value in values.items():
            text, count = re.subn(rf"\b{name}=\d+", f"{name}={value}", text, count=1)
            assert count == 1, name
        return text

    return change


def failed(machine: ExistingMachine, wheel: Wheel | None, change: Callable[[str], str] = str, **given) -> str:
    """Start this plan; why it failed."""
    wanted = plan(wheel or Wheel("none.whl", "0" * 64, b""), **given)
    machine.bring(wanted, wheel, change)
    machine.start()
    return machine.wait_for("failed")


def test_a_machine_without_python_says_so_and_how_to_get_one(machine: ExistingMachine, idle_wheel: Wheel):
    why = failed(machine, idle_wheel, environment=replace(INHERIT, python="no-such-python"))
    assert why.startswith("no Python 3.11 or newer on this machine: there is no no-such-python; install one (")
    assert "apt-get install python3 python3-venv" in why and "environment.python" in why


def test_a_python_that_is_too_old_is_named_with_its_version(machine, idle_wheel, tmp_path: Path):
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\necho 3.9.2\necho /usr/bin/python3.9\n")
    old.chmod(0o755)
    why = failed(machine, idle_wheel, environment=replace(INHERIT, python=str(old)))
    assert why.startswith(f"no Python 3.11 or newer on this machine: {old} is Python 3.9.2; install one")


def test_a_newer_python_beside_an_old_python3_is_found(machine: ExistingMachine, idle_wheel: Wheel, tmp_path: Path):
    (tmp_path / "bin").mkdir()
    for name, text in {"python3": "echo 3.9.2\necho /usr/bin/python3\n",
                       "python3.12": f'exec {sys.executable} "$@"\n'}.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)
    machine.bring(plan(idle_wheel, environment=replace(INHERIT, python="python3")), idle_wheel)
    machine.start(PATH=f"{tmp_path}/bin:/usr/bin:/bin")
    assert machine.life()["pid"]
    assert f"Python {'.'.join(map(str, sys.version_info[:3]))}: {sys.executable}" in machine.log()


def test_a_failing_step_is_told_with_its_line_its_command_and_its_last_words(machine, idle_wheel):
    why = failed(machine, idle_wheel, environment=replace(INHERIT, packages=("./no-such-package",)))
    line = re.match(r"bootstrap\.sh line (\d+): (\S+)/bin/python -m pip install -r (\S+): ended with status 1: ", why)
    assert line, why
    said = (machine.home() / "bootstrap.sh").read_text().splitlines()[int(line[1]) - 1]
    assert "-m pip install" in said
    assert "no-such-package" in why


def test_an_installer_that_hangs_is_given_up_and_a_second_run_makes_it_good(machine, idle_wheel):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://me:secret@127.0.0.1:{silent.getsockname()[1]}"
        wanted = replace(INHERIT, packages=("nothing",), index_url=index)
        machine.bring(plan(idle_wheel, environment=wanted), idle_wheel, setting(PACKAGES_S="5"))
        machine.start()
        wait_until(lambda: any(" -m pip " in command for command in machine.processes().values()))
        assert "secret" not in str(machine.processes())
        why = machine.wait_for("failed")
    assert re.search(r"-m pip install -r \S+: took longer than 5 s: ", why)
    assert "secret" not in machine.log() + why
    wait_until(lambda: not machine.processes())
    (machine.home() / "packages.txt").write_text("")
    machine.start()
    assert machine.life()["pid"]


def test_code_that_nobody_brings_is_waited_for_so_long_and_no_longer(machine: ExistingMachine):
    assert re.fullmatch(rf"nobody put none.whl with digest 0{{64}} into \S+/{F1}/wheel within 1 s",
                        failed(machine, None, setting(WHEEL_S="1")))


def test_code_that_comes_late_or_in_pieces_is_taken_when_it_is_whole(machine: ExistingMachine, idle_wheel: Wheel):
    machine.bring(plan(idle_wheel), None)
    machine.start()
    path = machine.home() / "wheel" / idle_wheel.name
    path.write_bytes(idle_wheel.data[:100])
    wait_until(lambda: "waits for its code" in machine.look()[1])
    path.write_bytes(idle_wheel.data)
    assert machine.life()["pid"]


def test_what_the_inherited_python_lacks_is_named(machine: ExistingMachine, tmp_path: Path):
    wheel = stand_in(tmp_path / "wheel", "import no_such_library\n")
    why = failed(machine, wheel)
    assert why.startswith(f"environment.inherit: {sys.executable} must have what spotfleet requires: install it there")
    assert "No module named 'no_such_library'" in why
    machine.start()  # what is half made is made anew, and not taken for whole
    assert machine.wait_for("failed") == why


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with TMPFS_MIB of room, gone with the test."""
    if os.geteuid() != 0:
        pytest.skip("a disk of its own is mounted by root only")
    folder = tmp_path / "root"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={TMPFS_MIB}m".encode()) != 0:
        pytest.skip(f"no tmpfs can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield folder
    libc.umount2(str(folder).encode(), 2)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def test_a_disk_that_is_too_small_is_named_before_anything_is_made(small_disk, machine, idle_wheel):
    why = failed(machine, idle_wheel)
    assert re.fullmatch(rf"the disk of {small_disk} is full: \d+ MiB are free and an environment needs about 48; "
                        "make room there or set another folder", why)


def test_a_disk_that_fills_up_meanwhile_is_named_and_half_an_environment_is_no_trace(small_disk, machine, tmp_path):
    wheel = stand_in(tmp_path / "wheel")
    machine.bring(plan(wheel), wheel, setting(INHERIT_ROOM_MIB="0"))
    (small_disk / "filler").write_bytes(b"x" * ((TMPFS_MIB << 20) - (256 << 10)))
    with (machine.home() / "inherit.py").open("a") as script:
        script.write("\nopen(sys.argv[1] + '/large', 'wb').write(bytes(1 << 20))\n")
    machine.start()
    why = machine.wait_for("failed")
    assert why.startswith(f"the disk of {small_disk} is full (0 MiB free): make room there or set another folder. "
                          "bootstrap.sh line ")
    assert why.endswith("OSError: [Errno 28] No space left on device")
    assert list((small_disk / "envs").iterdir()) == []
    (small_disk / "filler").unlink()
    machine.bring(plan(wheel), wheel, setting(INHERIT_ROOM_MIB="0"))
    machine.start()
    assert machine.life()["pid"]


def test_with_no_room_at_all_the_start_itself_says_so(small_disk, machine, idle_wheel):
    machine.bring(plan(idle_wheel), idle_wheel)
    fill(small_disk)
    done = machine.run(f"bash {machine.home()}/bootstrap.sh start")
    assert done.returncode == 1
    assert f"the disk of {small_disk} is full (0 MiB free): make room there" in done.stderr
    assert (machine.remove().stderr, sorted(p.name for p in small_disk.iterdir())) == ("", ["filler"])
