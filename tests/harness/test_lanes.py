"""Lanes of a test run: order, slots, and what a test does to the run that ends its own process."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lanes import RESULTS, SLOTS_FOLDER, longest_first
from tests.support.runner import SHARE
from tests.support.source_tree import TOP

HOLDS_A_SLOT = """
import sys, time
from pathlib import Path
from tests.support.lanes import slot
with slot(Path(sys.argv[1]), poll_s=0.01):
    print("held", flush=True)
    sys.stdin.read()
"""
ENDS_ITS_PROCESS = """
import os, pytest
def note(name):
    with open("ran", "a") as file:
        file.write(name + "\\n")
@pytest.mark.parametrize("n", range(4))
def test_before(n):
    note(f"before {n}")
def test_that_ends_its_process():
    note("end")
    os._exit(3)
@pytest.mark.parametrize("n", range(4))
def test_after(n):
    note(f"after {n}")
"""
TAKES_SLOTS = """
import os, pathlib, time, pytest
@pytest.mark.processes
def test_it():
    n = pathlib.Path(__file__).name
    mine = pathlib.Path(f"running-{n}")
    mine.touch()
    time.sleep(0.3)
    count = len(list(pathlib.Path().glob("running-*")))
    mine.unlink()
    assert count <= 2
"""
ORDER = """
import pytest
@pytest.mark.exclusive
def test_a_alone():
    print("alone", file=open("ran", "a"))
def test_b():
    print("b", file=open("ran", "a"))
"""
STARTS = """
import subprocess, sys, pytest
@pytest.fixture(scope="module")
def child():
    return subprocess.run([sys.executable, "-c", ""], check=True)
def test_that_starts_one(child):
    pass
def test_that_has_it(child):
    pass
def test_that_has_none():
    pytest.skip("not today")
def test_that_fails():
    raise ValueError
"""


def run_pytest(folder: Path, text: str, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    path = os.pathsep.join([str(TOP / "tests"), str(TOP), os.environ["PYTHONPATH"]])
    env = {k: v for k, v in os.environ.items() if k != SLOTS_FOLDER}
    env |= {"PYTHONPATH": path, "TEST_LEFTOVERS_S": "0.5", RESULTS: str(folder / "results.json")}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", str(folder),
               "test_it.py", *more]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=150)


def test_the_longest_file_comes_first_whole_and_one_without_record_before_all():
    tests = ["a.py::test_1", "new.py::test_1", "b.py::test_1", "a.py::test_2"]
    assert longest_first(tests, {"a.py": 1.0, "b.py": 2.0}) == [
        "new.py::test_1", "b.py::test_1", "a.py::test_1", "a.py::test_2"]


def test_two_processes_hold_slots_and_the_kernel_frees_that_of_a_killed_one(tmp_path):
    def holder() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", HOLDS_A_SLOT, str(tmp_path)], cwd=TOP, text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    holders = [holder(), holder()]
    try:
        assert [h.stdout.readline() for h in holders] == ["held\n", "held\n"]
        holders.append(third := holder())
        assert select.select([third.stdout], [], [], 2)[0] == []
        holders[0].kill()
        assert third.stdout.readline() == "held\n"
    finally:
        for h in holders:
            h.kill()
            h.communicate()


def test_tests_with_processes_run_two_at_a_time_in_any_number_of_workers(tmp_path):
    more = [f"test_it_{n}.py" for n in range(7)]
    for name in more:
        (tmp_path / name).write_text(TAKES_SLOTS)
    done = run_pytest(tmp_path, TAKES_SLOTS, "-n", "4", *SHARE, *more)
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout


def test_a_test_that_ends_its_process_has_failed_and_every_other_runs_once(tmp_path):
    done = run_pytest(tmp_path, ENDS_ITS_PROCESS, "-n", "2", *SHARE)
    assert done.returncode == 1, done.stdout
    assert "1 failed, 8 passed" in done.stdout
    assert sorted((tmp_path / "ran").read_text().splitlines()) == sorted(
        ["end", *(f"{when} {n}" for when in ("before", "after") for n in range(4))])
    results = json.loads((tmp_path / "results.json").read_text())
    assert [test for test, result in results.items() if result["outcome"] == "failed"] == [
        "test_it.py::test_that_ends_its_process"]


def test_exclusive_tests_come_last(tmp_path):
    done = run_pytest(tmp_path, ORDER, "-n", "1", *SHARE)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "ran").read_text() == "b\nalone\n"


@pytest.mark.parametrize("processes", ["0", "2"])
def test_results_name_outcomes_and_who_starts_processes_by_themselves_or_by_a_fixture(tmp_path, processes):
    done = run_pytest(tmp_path, STARTS, "-n", processes)
    assert done.returncode == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert {test.partition("::")[2]: (result["outcome"], result["starts"]) for test, result in results.items()} == {
        "test_that_starts_one": ("passed", True), "test_that_has_it": ("passed", True),
        "test_that_has_none": ("skipped", False), "test_that_fails": ("failed", False)}
    assert "not today" in results["test_it.py::test_that_has_none"]["why"]
