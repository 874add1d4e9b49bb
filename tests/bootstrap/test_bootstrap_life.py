"""From an empty folder to a process that is kept running, and to its end: real scripts, real environments."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.bootstrap import Wheel
from spotfleet.model import Role
from tests.support.bootstrap.existing_machine import F1, G1, INHERIT, LONG, ExistingMachine, alive, plan, wait_until

SSH = "fd00::2 50022 fd00::1 22"  # SSH_CONNECTION: whence, and where it arrived


def ours(env: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith("SPOTFLEET_")}


def test_a_dispatcher_learns_its_place_from_the_way_that_ssh_took(machine: ExistingMachine, idle_wheel: Wheel):
    machine.bring(plan(idle_wheel, port=7443), idle_wheel)
    machine.start(SSH_CONNECTION=SSH, PYTHONPATH="/of/somebody/else", PIP_USER="1")
    told, home = machine.life(), machine.home()
    assert ours(told["env"]) == {
        "SPOTFLEET_HOST_ADDRESS": "fd00::1", "SPOTFLEET_HOST_PORT": "7443", "SPOTFLEET_METADATA_URL": str(home),
        "SPOTFLEET_WHEEL": f"{home}/wheel/{idle_wheel.name}", "SPOTFLEET_HOST_MARK": F1,
    }
    assert told["argv"][1:] == ["--home", str(home)]
    strange = {"SSH_CONNECTION", "PYTHONPATH", "PIP_USER"}
    assert not told["env"].keys() & strange
    added = {"OLDPWD", "PWD", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR"}
    assert {n for n in told["env"].keys() - machine.env.keys() if not n.startswith("SPOTFLEET_")} <= added
    assert machine.look() == ("running", "spotfleet.idle")


@pytest.mark.parametrize(("given", "told"), [
    ({"role": Role.WORKER}, {}),
    ({"role": Role.WORKER, "address": "10.9.8.7", "metadata_url": "http://169.254.169.254"},
     {"SPOTFLEET_HOST_ADDRESS": "10.9.8.7", "SPOTFLEET_METADATA_URL": "http://169.254.169.254"}),
    ({"address": "10.9.8.7"}, {"SPOTFLEET_HOST_ADDRESS": "10.9.8.7"}),
], ids=["an agent: none", "an agent: what the user set", "a dispatcher: what the user set"])
def test_an_address_that_the_user_set_wins_and_an_agent_finds_its_own(machine, idle_wheel, given, told):
    machine.bring(plan(idle_wheel, **given), idle_wheel)
    machine.start(SSH_CONNECTION=SSH)
    found = ours(machine.life()["env"])
    home = machine.home()
    assert found == {"SPOTFLEET_METADATA_URL": str(home), "SPOTFLEET_WHEEL": f"{home}/wheel/{idle_wheel.name}",
                     "SPOTFLEET_HOST_MARK": F1, **told}


@pytest.mark.parametrize(("lent", "name"), [(True, "lent"), (False, "own")])
def test_the_beginning_and_the_end_of_the_set_up_are_noted_once_in_a_boot(machine, idle_wheel, lent, name):
    machine.bring(plan(idle_wheel, power_off=lent), idle_wheel)
    machine.start()
    os.kill(machine.life()["pid"], signal.SIGKILL)
    machine.life(1)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    lines = [line.split() for line in (machine.home() / "stages").read_text().splitlines()]
    assert [line[:2] for line in lines] == [[name, boot], ["ready", boot]]
    assert 0 < float(lines[0][2]) <= float(lines[1][2]) <= float(Path("/proc/uptime").read_text().split()[0])


def test_three_starts_at_once_and_one_later_start_one_process(machine: ExistingMachine, idle_wheel: Wheel):
    machine.bring(plan(idle_wheel), idle_wheel)
    for _ in range(3):
        machine.start()
    pid = machine.life()["pid"]
    machine.start()
    running = [command for command in machine.processes().values() if "spotfleet.idle" in command]
    assert (len(running), alive(pid), machine.home(F1).joinpath("life-1.json").exists()) == (1, True, False)


def test_two_hosts_of_one_machine_make_one_environment_between_them(machine: ExistingMachine, idle_wheel: Wheel):
    for name in (F1, G1):
        machine.bring(plan(idle_wheel, name), idle_wheel)
    machine.start(F1)
    machine.start(G1)
    assert machine.life(0, F1)["pid"] != machine.life(0, G1)["pid"]
    assert [machine.log(name).count("inherit.py") for name in (F1, G1)].count(1) == 1
    assert len(list((machine.root / "envs").iterdir())) == 1


def test_status_0_means_off_for_good(machine: ExistingMachine, idle_wheel: Wheel):
    machine.bring(plan(idle_wheel), idle_wheel)
    machine.start()
    machine.life()
    machine.end_process(0)
    assert machine.wait_for("off") == "spotfleet.idle has ended: the host wants to be off"
    wait_until(lambda: not machine.processes())
    machine.start()
    assert (machine.look()[0], machine.processes()) == ("off", {})


@pytest.mark.parametrize("asked", [True, False])
def test_only_a_machine_that_a_cloud_lent_is_powered_off(machine: ExistingMachine, idle_wheel: Wheel, asked: bool):
    def harmless(text: str) -> str:
        said = "systemctl poweroff 2>/dev/null || shutdown -h now 2>/dev/null || poweroff -f"
        assert text.count(said) == 1
        return text.replace(said, "touch powered-off")

    machine.bring(plan(idle_wheel, power_off=asked), idle_wheel, harmless)
    machine.start()
    machine.life()
    machine.end_process(0)
    machine.wait_for("off")
    wait_until(lambda: not machine.processes())
    assert (machine.home() / "powered-off").exists() == asked


def test_a_process_that_fails_is_started_again_and_the_state_says_why(machine: ExistingMachine, idle_wheel: Wheel):
    machine.bring(plan(idle_wheel), idle_wheel, lambda text: text.replace("BACKOFFS=(0.5 1 ", "BACKOFFS=(0.1 0.1 "))
    machine.start()
    first = machine.life()
    machine.end_process(7)
    second = machine.life(1)
    assert machine.look() == ("running", "spotfleet.idle; it ended with status 7 before: ending with 7")
    os.kill(second["children"][1], signal.SIGKILL)  # it bears no mark: once its parent is dead nobody knows it
    os.kill(second["pid"], signal.SIGKILL)
    machine.life(2)
    assert [alive(pid) for pid in (first["pid"], second["pid"], second["children"][0])] == [False, False, False]


def test_a_process_whose_supervisor_was_killed_gets_another_one_and_is_not_disturbed(machine, idle_wheel):
    machine.bring(plan(idle_wheel), idle_wheel)
    machine.start()
    pid = machine.life()["pid"]
    [supervisor] = [pid for pid, command in machine.processes().items() if command.endswith("bootstrap.sh run")]
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not alive(supervisor))
    machine.start()
    wait_until(lambda: any(c.endswith("bootstrap.sh run") for c in machine.processes().values()))
    wait_until(lambda: machine.look()[0] == "running")
    assert (alive(pid), machine.home().joinpath("life-1.json").exists()) == (True, False)
    machine.end_process(3)
    assert machine.life(1)["pid"] != pid


def test_neither_folder_nor_python_need_have_plain_names(tmp_path: Path, idle_wheel: Wheel):
    home = tmp_path / "it's 100% $HOME"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "my python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (home / "bin" / "my python").chmod(0o755)
    machine = ExistingMachine(home)
    machine.bring(plan(idle_wheel, environment=replace(INHERIT, python="~/bin/my python")), idle_wheel)
    machine.start(HOME=str(home))
    try:
        assert machine.life()["env"]["SPOTFLEET_METADATA_URL"] == str(machine.home())
        [environment] = (machine.root / "envs").iterdir()
        command = shlex.quote(f"{environment}/bin/spotfleet")
        assert machine.run(command, PYTHONPATH="").stdout == "hello\n"
    finally:
        assert machine.remove().stderr == ""
    assert (machine.processes(), machine.root.exists()) == ({}, False)


def test_where_the_caller_stands_does_not_matter(machine: ExistingMachine, idle_wheel: Wheel):
    machine.bring(plan(idle_wheel), idle_wheel)
    (machine.root.parent / "spotfleet").mkdir()  # as in the folder of a checkout
    (machine.root.parent / "spotfleet" / "__init__.py").write_text("raise RuntimeError('of another project')\n")
    machine.run(f"bash root/{F1}/bootstrap.sh start")
    assert machine.life()["argv"][1:] == ["--home", str(machine.home())]


def test_a_lock_that_the_children_of_a_killed_script_hold_is_waited_for(machine: ExistingMachine, idle_wheel: Wheel):
    machine.bring(plan(idle_wheel), idle_wheel)
    lock = machine.home() / "run.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        machine.start()
        wait_until(lambda: any("bootstrap.sh run" in command for command in machine.processes().values()))
    assert machine.life()["pid"]


def test_a_host_of_which_nothing_runs_says_so(machine: ExistingMachine, idle_wheel: Wheel):
    machine.bring(plan(idle_wheel), idle_wheel, lambda text: text.replace("START_S=10", "START_S=0"))
    machine.start()
    machine.life()
    wait_until(lambda: machine.look() == ("running", "spotfleet.idle"))
    machine.power_cut()
    wait_until(lambda: machine.look() == (
        "failed", "nothing of it runs: its machine was restarted, or somebody ended it "
                  "(it was running: spotfleet.idle)"))


def test_what_is_inherited_is_seen_and_ours_comes_first(machine: ExistingMachine, idle_wheel: Wheel):
    machine.bring(plan(idle_wheel), idle_wheel)
    machine.start()
    machine.life()
    [environment] = (machine.root / "envs").iterdir()
    code = "import pytest, spotfleet, sys; print(spotfleet.__file__.startswith(sys.prefix), pytest.__version__)"
    seen = machine.run(f"{environment}/bin/python -c '{code}'", PYTHONPATH="").stdout.split()
    assert seen == ["True", pytest.__version__]
    assert machine.run(f"{environment}/bin/spotfleet", PYTHONPATH="").stdout == "hello\n"
    assert machine.run(f"{environment}/bin/pip --version", PYTHONPATH="").stdout.startswith("pip ")


@pytest.mark.parametrize("point", [120, 171, 230])
def test_killed_at_any_command_it_is_finished_by_the_next_run(machine, idle_wheel, tmp_path: Path, point: int):
    """Each command of bash is a point: here as it searches for Python, as it starts the process and as it makes the
    environment. `test_every_point_of_it` tries one of three, to the end."""
    killed_and_finished(machine, idle_wheel, tmp_path, point)


@LONG
@pytest.mark.parametrize("point", range(40, 236, 3))
def test_every_point_of_it(machine, idle_wheel, tmp_path: Path, point: int):
    killed_and_finished(machine, idle_wheel, tmp_path, point)


def killed_and_finished(machine: ExistingMachine, wheel: Wheel, tmp_path: Path, point: int) -> None:
    bomb = tmp_path / "bomb.sh"  # read by each bash at its start
    bomb.write_text(f"set -T\ntrap '(( ++SPENT == {point} )) && kill -9 $$' DEBUG\n")
    machine.bring(replace(plan(wheel), environment=INHERIT), wheel)
    machine.run(f"setsid env SPOTFLEET_HOST_MARK={F1} bash {machine.home()}/bootstrap.sh run", BASH_ENV=str(bomb))
    machine.start()
    pid = machine.life()["pid"]
    wait_until(lambda: machine.look() == ("running", "spotfleet.idle"), machine.log)
    assert (alive(pid), len([c for c in machine.processes().values() if "spotfleet.idle" in c])) == (True, 1)
