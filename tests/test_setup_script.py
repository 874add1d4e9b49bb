"""scripts/setup with a Python and an apt-get that only record what they are asked: what is installed where, and what is
printed meanwhile. And setup.py: what `pip install .` packages."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SETUP = Path(__file__).parent.parent / "scripts" / "setup"
PYTHON = """#!/bin/bash
case "$*" in
  *"import sys"*) exit 0 ;;
  *"import ensurepip"*) [ -z "$WITHOUT_VENV" ]; exit ;;
  *find_spec*) [ -z "$COPY_INSTALLED" ]; exit ;;
  "-m venv "*)
    mkdir -p "$3/bin"; cp "$0" "$3/bin/python"
    if [ -n "$VENV_STOPS" ]; then
      sleep 600 &
      echo $! >"$CALLS.child"
      wait
    fi
    touch "$3/bin/activate" "$3/pip" ;;
  "-m pip --version") [ -e "$(dirname "$0")/../pip" ]; exit ;;
  *pip*)
    echo "pip $*" >>"$CALLS"
    echo "Collecting numpy>=1.26"
    echo "  Downloading https://files.example/numpy-2.4.0-cp311-cp311-linux_x86_64.whl (16.6 MB)"
    case "$*" in *torch==*) sleep "${PIP_S:-0}" ;; esac
    exit "${PIP_FAILS:-0}" ;;
esac
"""
APT = """#!/bin/bash
echo "apt-get $*" >>"$CALLS"
"""


@dataclass
class Bare:
    """A machine with a recording Python and apt-get."""

    folder: Path

    def setup(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(SETUP), *words], env=self.environ | environ, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL)

    @property
    def environ(self) -> dict[str, str]:
        return {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "SPOTFLEET_PYTHON": "recording-python",
                "SPOTFLEET_VENV": str(self.folder / "venv"), "CALLS": str(self.folder / "calls")}

    def calls(self, program: str) -> list[str]:
        """What it was asked since the last call."""
        file = self.folder / "calls"
        found = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [line for line in found if line.startswith(program)]


@pytest.fixture
def bare(tmp_path: Path) -> Bare:
    (tmp_path / "bin").mkdir()
    for name, text in (("recording-python", PYTHON), ("apt-get", APT)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return Bare(tmp_path)


def test_the_demo_installs_what_it_needs_into_the_environment_and_nothing_elsewhere(bare):
    done = bare.setup("demo")
    assert (done.returncode, done.stdout) == (0, f"{bare.folder / 'venv'}\n")
    assert [line.split()[-1] for line in (bare.folder / "calls").read_text().splitlines()] == [
        "torch==2.13.0", f"{SETUP.parent.parent}[train,demo]"]


def test_the_environment_is_shared_and_the_tests_add_what_they_need(bare):
    bare.setup("demo")
    bare.calls("")
    bare.setup("demo")
    assert bare.calls("") == []  # quick when nothing changed
    bare.setup()
    assert bare.calls("pip")[-1].endswith("[train,dev]")
    bare.setup()
    bare.setup("demo")
    assert bare.calls("pip") == []  # the tests' environment has all that the demo needs


def test_without_the_venv_module_and_a_terminal_the_demo_says_what_to_install(bare):
    done = bare.setup("demo", WITHOUT_VENV="1")
    assert done.returncode == 1 and "apt-get install python3-venv" in done.stderr
    assert bare.calls("") == []


def test_progress_is_printed_with_the_package_and_the_seconds_also_while_pip_is_silent(bare):
    shown = bare.setup("demo", PIP_S="12").stderr
    seconds = [int(s) for s in re.findall(r"^  (\d+) s: downloading numpy-2\.4\.0 \(16\.6 MB\)$", shown, re.MULTILINE)]
    assert len(seconds) >= 3 and max(seconds) >= 10  # torch, after ten seconds again, the rest
    assert max(len(line) for line in shown.splitlines() if not line.startswith("making ")) <= 80  # names a folder


def test_a_pip_that_fails_is_shown_with_its_output_and_tried_again_the_next_time(bare):
    done = bare.setup("demo", PIP_FAILS="1")
    assert done.returncode == 1 and "Collecting numpy" in done.stderr and "failed: installing torch" in done.stderr
    bare.calls("")
    assert bare.setup("demo").returncode == 0 and len(bare.calls("pip")) == 2


def test_an_interrupted_installation_ends_all_its_processes_and_the_next_one_completes_it(bare):
    running = subprocess.Popen([str(SETUP), "demo"], env=bare.environ | {"VENV_STOPS": "1"}, start_new_session=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    started = bare.folder / "calls.child"
    wait_until(lambda: started.exists() and started.read_text().strip())
    child = int(started.read_text())
    os.killpg(running.pid, signal.SIGINT)
    said = running.communicate(timeout=60)[1]
    assert running.returncode == 130 and "run the same command again to continue" in said
    wait_until(lambda: not is_running(child))
    done = bare.setup("demo")
    assert done.returncode == 0 and "making " in done.stderr and len(bare.calls("pip")) == 2


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_environment_that_never_gets_pip_is_to_be_removed(bare):
    (bare.folder / "venv").mkdir()
    (bare.folder / "bin/recording-python").write_text(PYTHON.replace('"$3/pip"', ""))
    done = bare.setup("demo")
    assert done.returncode == 1 and "remove this folder and run the same command again" in done.stderr


def test_after_pip_install_of_a_copy_the_environment_runs_the_clones_code_again(bare):
    bare.setup("demo")
    bare.calls("")
    assert bare.setup("demo", COPY_INSTALLED="1").returncode == 0
    assert f"-e {SETUP.parent.parent}[train,demo]" in bare.calls("pip")[-1]


def test_an_unknown_word_is_refused(bare):
    done = bare.setup("everything")
    assert done.returncode == 1 and "unknown word 'everything'" in done.stderr


def test_a_build_in_the_clone_packages_no_module_that_is_deleted_there(tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(SETUP.parent.parent / name, tmp_path)
    package = tmp_path / "spotfleet"
    package.mkdir()
    for name in ("__init__.py", "stays.py", "goes.py"):
        (package / name).touch()
    built = tmp_path / "build/lib/spotfleet"
    build = [sys.executable, "setup.py", "-q", "build"]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    assert (built / "goes.py").exists()
    (package / "goes.py").unlink()
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    assert sorted(p.name for p in built.glob("*.py")) == ["__init__.py", "stays.py"]
