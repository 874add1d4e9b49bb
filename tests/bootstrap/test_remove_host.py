"""remove.sh: afterwards the machine holds nothing of the host, whatever it was doing; other hosts are untouched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spotfleet.bootstrap import Wheel, script
from tests.support.bootstrap.existing_machine import (
    F1,
    F2,
    G1,
    INHERIT,
    ExistingMachine,
    alive,
    plan,
    stand_in,
    wait_until,
)

STUBBORN = """
import os, signal, subprocess, sys, time
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(sys.argv[2], "life-0.json").write_text("{}")
    time.sleep(600)
"""


def started(machine: ExistingMachine, wheel: Wheel, request_id: str = F1, **given) -> dict:
    machine.bring(plan(wheel, request_id, **given), wheel)
    machine.start(request_id)
    return machine.life(0, request_id)


def test_nothing_is_left_of_a_running_host_and_removing_it_again_is_no_error(machine, idle_wheel):
    told = started(machine, idle_wheel)
    for _ in range(2):
        done = machine.remove()
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        # also the child that left the session and cleaned its environment
        assert [pid for pid in (told["pid"], *told["children"]) if alive(pid)] == []
        assert (machine.processes(), machine.root.exists()) == ({}, False)


def test_a_host_that_is_being_installed_can_be_removed(machine: ExistingMachine, idle_wheel: Wheel):
    machine.bring(plan(idle_wheel), None)
    machine.start()
    wait_until(lambda: "waits for its code" in machine.look()[1])
    assert machine.remove().stderr == ""
    assert (machine.processes(), machine.root.exists()) == ({}, False)


def test_a_process_that_does_not_heed_sigterm_is_killed(machine: ExistingMachine, tmp_path: Path):
    started(machine, stand_in(tmp_path / "stubborn", STUBBORN))
    text = script.text("remove.sh").replace("TERM_S=5", "TERM_S=0")
    assert machine.run(script.removal(str(machine.root), F1), stdin=text).stderr == ""
    assert (machine.processes(), machine.root.exists()) == ({}, False)


def test_another_host_of_the_machine_keeps_its_process_its_claim_and_its_environment(machine, idle_wheel, tmp_path):
    other_wheel = stand_in(tmp_path / "other", STUBBORN.replace("SIG_IGN", "SIG_DFL"))
    started(machine, idle_wheel, F1)
    started(machine, other_wheel, F2)
    pid = started(machine, idle_wheel, G1)["pid"]
    assert len(list((machine.root / "envs").iterdir())) == 2
    assert [machine.remove(name).stderr for name in (F1, F2)] == ["", ""]
    assert (machine.processes(F1), machine.processes(F2), alive(pid)) == ({}, {}, True)
    assert (machine.root / "claim").read_text() == f"{G1}\n"
    assert [p.name for p in (machine.root / "envs").iterdir()] == [
        line.partition("=")[2] for line in (machine.home(G1) / "settings.sh").read_text().splitlines()
        if line.startswith("ENVIRONMENT=")]


def test_environments_can_be_kept_for_the_next_host_and_be_removed_without_one(machine, idle_wheel):
    started(machine, idle_wheel)
    assert machine.remove(keep_environments=True).stderr == ""
    assert sorted(p.name for p in machine.root.iterdir()) == ["envs", "lock"]
    started(machine, idle_wheel, F2)
    assert "inherit.py" not in machine.log(F2)
    assert machine.remove(F2, keep_environments=True).stderr == ""
    assert machine.remove("").stderr == ""
    assert not machine.root.exists()


def test_what_is_left_of_a_removal_that_was_killed_goes_with_the_next(machine: ExistingMachine, idle_wheel: Wheel):
    started(machine, idle_wheel)
    machine.power_cut()
    for name in ("settings.sh", "remove.sh", "bootstrap.sh", "state"):
        (machine.home() / name).unlink()
    assert machine.remove().stderr == ""
    assert not machine.root.exists()


def test_the_copy_in_the_folder_removes_the_host_also_when_the_host_itself_calls_it(machine, idle_wheel):
    machine.bring(plan(idle_wheel, environment=replace(INHERIT)), idle_wheel)
    machine.start()
    machine.life()
    done = machine.run(f"exec sh {machine.home()}/remove.sh", SPOTFLEET_HOST_MARK=F1)
    assert (done.returncode, done.stderr, machine.processes(), machine.root.exists()) == (0, "", {}, False)


def test_a_claim_of_somebody_else_and_folders_that_are_not_ours_are_left_alone(machine: ExistingMachine):
    (machine.root / "photos").mkdir(parents=True)
    (machine.root / "claim").write_text("g-7\n")
    assert machine.remove(F1).stderr == ""
    assert sorted(p.name for p in machine.root.iterdir()) == ["claim", "photos"]


def test_a_folder_that_held_the_users_own_environments_before_holds_them_afterwards(machine, idle_wheel):
    own = {machine.root / "envs" / "research" / "keep", machine.root / "cache" / "keep"}
    for path in own:
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    started(machine, idle_wheel)
    assert len(list((machine.root / "envs").iterdir())) == 2
    assert machine.remove().stderr == ""
    assert {path for path in machine.root.rglob("*") if path.is_file()} == own


def test_a_name_that_leads_out_of_the_root_is_refused(machine: ExistingMachine):
    precious = machine.root.parent / "precious"
    precious.mkdir(parents=True)
    machine.root.mkdir()
    done = machine.remove("../precious")
    assert (done.returncode, done.stderr) == (2, "remove.sh: ../precious is no host\n")
    assert precious.is_dir()
