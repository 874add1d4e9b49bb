"""A machine that a cloud lent is not paid for when it has no host: failed, never given its code, or off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfleet.bootstrap import Wheel
from tests.support.bootstrap.existing_machine import INHERIT, ExistingMachine, plan, wait_until

OFF = "systemctl poweroff 2>/dev/null || shutdown -h now 2>/dev/null || poweroff -f"


def harmless(text: str, **settings: str) -> str:
    """bootstrap.sh that notes what it would do to the machine, with other waits."""
    assert text.count(OFF) == 1
    text = text.replace(OFF, 'echo >>"$host/powered-off"')
    for name, value in {"FAILED_LOOK_S": "0.1", "SCREEN": "/dev/null", **settings}.items():
        assert text.count(f"{name}=") == 1
        before, _, after = text.partition(f"{name}=")
        text = f"{before}{name}={value}{after[len(after.split(maxsplit=1)[0]):]}"
    return text


def times_off(machine: ExistingMachine) -> int:
    path = machine.home() / "powered-off"
    return len(path.read_text()) if path.exists() else 0


@pytest.mark.parametrize("lent", [True, False])
def test_a_lent_machine_that_nobody_gave_its_code_goes_off_and_somebody_s_own_stays(
        machine, idle_wheel, lent, tmp_path):
    screen = tmp_path / "screen"
    screen.touch()
    machine.bring(plan(idle_wheel, power_off=lent), None, lambda text: harmless(
        text, WHEEL_S="0", FAILED_S="1", SCREEN=str(screen)))
    machine.start()
    assert machine.wait_for("failed").startswith(f"nobody put {idle_wheel.name} with digest")
    wait_until(lambda: not machine.processes())
    assert times_off(machine) == lent
    assert ("spotfleet: this host has failed" in screen.read_text()) == lent  # a cloud keeps that
    assert (f"nobody put {idle_wheel.name} with digest" in screen.read_text()) == lent


def test_until_then_somebody_may_mend_it_and_start_again(machine: ExistingMachine, idle_wheel: Wheel):
    wanted = plan(idle_wheel, power_off=True)
    machine.bring(replace(wanted, environment=replace(INHERIT, python="python9.9")), idle_wheel,
                  lambda text: harmless(text, FAILED_S="600"))
    machine.start()
    assert "no Python 3.11 or newer" in machine.wait_for("failed")
    waiting = machine.processes()
    machine.bring(wanted, idle_wheel, lambda text: harmless(text, FAILED_S="600"))
    machine.start()
    wait_until(lambda: machine.state() != "failed", machine.log)  # the script that waits for somebody goes first
    machine.life()
    wait_until(lambda: not waiting.keys() & machine.processes().keys())
    assert (machine.look(), times_off(machine)) == (("running", "spotfleet.idle"), 0)


def test_a_machine_whose_host_is_off_and_that_somebody_switches_on_again_goes_off_again(machine, idle_wheel):
    machine.bring(plan(idle_wheel, power_off=True), idle_wheel, lambda text: harmless(text, FAILED_S="1"))
    machine.start()
    machine.life()
    machine.end_process(0)
    wait_until(lambda: times_off(machine) == 1 and not machine.processes())
    machine.start()
    wait_until(lambda: times_off(machine) == 2)
    assert machine.look()[0] == "off" and not (machine.home() / "life-1.json").exists()


@pytest.mark.parametrize("lent, steady", [(True, False), (False, False), (True, True)])
def test_a_lent_machine_whose_process_has_no_steady_run_goes_off_and_says_why(machine, idle_wheel, lent, steady):
    """What would end the machine by its own clock lives in that process."""
    def hasty(text: str) -> str:
        short = harmless(text, GIVEN_UP="3", FAILED_S="1").replace("BACKOFFS=(0.5 1 2 ", "BACKOFFS=(0.1 0.1 0.1 ")
        return short.replace("STEADY_S=60", "STEADY_S=0") if steady else short

    machine.bring(plan(idle_wheel, power_off=lent), idle_wheel, hasty)
    machine.start()
    for life in range(3):
        machine.life(life)
        machine.end_process(9)
    if lent and not steady:
        why = machine.wait_for("failed")
        assert why.startswith("spotfleet.idle ended 3 times") and why.endswith("status 9: ending with 9"), why
        wait_until(lambda: not machine.processes())
        assert times_off(machine) == 1
    else:
        assert machine.life(3) and times_off(machine) == 0


def test_a_python_without_the_cloud_s_sdk_is_refused_by_name_where_it_is_inherited(machine, idle_wheel: Wheel):
    sdk = "azure.mgmt.compute"  # the tests' own Python lacks it
    wanted = plan(idle_wheel, extras=("azure",), modules=(sdk,))
    machine.bring(wanted, idle_wheel)
    machine.start()
    why = machine.wait_for("failed")
    assert why.startswith("environment.inherit: ") and "must have what spotfleet requires, and azure.mgmt.comp" in why
    assert "No module named 'azure" in why
