"""A run that leaves a process behind fails, says which test started it, and ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

LEAVES_ONE = """
import subprocess, sys
def test_that_forgets(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
    open({pid_file!r}, "w").write(str(child.pid))
"""


def run_pytest(folder: Path, text: str, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--rootdir", str(folder), "test_it.py", *more]
    env = os.environ | {"PYTHONPATH": path, "TEST_LEFTOVERS_S": "0.5"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def runs(pid: int) -> bool:
    """False for a zombie too: what is left of it is the business of its adoptive parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_process_left_behind_fails_the_run_and_is_ended(tmp_path, processes):
    done = run_pytest(tmp_path, LEAVES_ONE.format(pid_file=str(tmp_path / "pid")), "-n", processes)
    assert done.returncode == 1
    assert "started in test_it.py::test_that_forgets" in done.stderr
    assert not runs(int((tmp_path / "pid").read_text()))


def test_a_run_that_leaves_nothing_passes(tmp_path):
    done = run_pytest(tmp_path, "def test_fine():\n    assert True\n")
    assert done.returncode == 0, done.stdout + done.stderr
