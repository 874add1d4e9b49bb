"""A machine in a temporary folder, with a stand-in for our code that is quickly installed and does as it is told."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.bootstrap import HostPlan, Wheel, script
from spotfleet.bootstrap.wheel import build_from
from spotfleet.model import EnvironmentSpec, Role

PATIENCE_S = 60.0
LONG = pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="the long form: SPOTFLEET_LONG=1")
RUN = secrets.token_hex(3)  # marks of processes are known machine-wide: no other run of the tests has these hosts
F1, F2, G1 = f"f-{RUN}-1", f"f-{RUN}-2", f"g-{RUN}-1"
MARK = "SPOTFLEET_HOST_MARK"
INHERIT = EnvironmentSpec(python=sys.executable, inherit=True)

PYPROJECT = """
[project]
name = "spotfleet"
version = "0.0.1"
description = "A stand-in"
requires-python = ">=3.11"
dependencies = []
[project.optional-dependencies]
train = [{train}]
[project.scripts]
spotfleet = "spotfleet.idle:greet"
[project.entry-points."spotfleet.clouds"]
"""

IDLE = '''
"""Tells where it finds itself, and ends with the status that it finds in the file `end`."""
import json, os, subprocess, sys, time
from pathlib import Path

def greet():
    print("hello")

if __name__ == "__main__":
    home = Path(sys.argv[2])
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(argv, start_new_session=True), subprocess.Popen(argv, env={}, start_new_session=True)]
    lives = len(list(home.glob("life-*")))
    told = {"argv": sys.argv, "pid": os.getpid(), "children": [c.pid for c in children], "env": dict(os.environ)}
    Path(home, ".told").write_text(json.dumps(told))
    Path(home, ".told").replace(home / f"life-{lives}.json")
    print(f"life {lives}", flush=True)
    while not (home / "end").exists():
        time.sleep(0.02)
    status = int((home / "end").read_text())
    (home / "end").unlink()
    for child in children:
        child.kill()
        child.wait()
    print(f"ending with {status}", flush=True)
    sys.exit(status)
'''


def stand_in(folder: Path, idle: str = IDLE, train: str = "") -> Wheel:
    """A wheel that is called like ours; `train` is a requirement of its extra."""
    package = folder / "spotfleet"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT.replace("{train}", f'"{train}"' if train else ""))
    (package / "__init__.py").write_text("")
    (package / "idle.py").write_text(idle)
    return build_from(package)


def plan(wheel: Wheel, request_id: str = F1, **given) -> HostPlan:
    return replace(HostPlan(request_id, "f", Role.DISPATCHER, "spotfleet.idle", {"boot.json": "{}"}, wheel.name,
                            wheel.sha256, INHERIT), **given)


class ExistingMachine:
    """What provider ssh does to a machine, done here."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SSH_", "SPOTFLEET_"))}

    def home(self, request_id: str = F1) -> Path:
        return self.root / request_id

    def bring(self, wanted: HostPlan, wheel: Wheel | None, change: Callable[[str], str] = str) -> None:
        """Everything but the start; `change` edits bootstrap.sh."""
        home = self.home(wanted.request_id)
        (home / "wheel").mkdir(parents=True, exist_ok=True)
        for name, text in script.files(wanted).items():
            (home / name).write_text(change(text) if name == "bootstrap.sh" else text)
        if wheel is not None:
            (home / "wheel" / wheel.name).write_bytes(wheel.data)
        (self.root / "claim").write_text(f"{wanted.request_id}\n")

    def run(self, command: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", "-c", command], input=stdin, env={**self.env, **env}, capture_output=True,
                              text=True, timeout=PATIENCE_S, cwd=self.root.parent)

    def start(self, request_id: str = F1, **env: str) -> None:
        done = self.run(script.start(str(self.root), request_id), **env)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def look(self, request_id: str = F1) -> tuple[str, str]:
        """State and why."""
        state, _, why = self.run(f"bash {self.root}/{request_id}/bootstrap.sh look").stdout.strip().split(" ", 2)
        return state, why

    def state(self, request_id: str = F1) -> str:
        """As written."""
        path = self.home(request_id) / "state"
        return path.read_text().partition(" ")[0] if path.exists() else ""

    def wait_for(self, *states: str, request_id: str = F1) -> str:
        """Until it is in one of these; the why."""
        end = time.monotonic() + PATIENCE_S
        while (found := self.look(request_id))[0] not in states:
            assert time.monotonic() < end and found[0] in ("installing", "running"), f"{found}\n{self.log(request_id)}"
            time.sleep(0.05)
        return found[1]

    def life(self, number: int = 0, request_id: str = F1) -> dict:
        """What the process told when it was started for the `number`th time."""
        def told() -> str:
            assert self.state(request_id) != "failed", self.log(request_id)
            return self._life(number, request_id)

        return json.loads(wait_until(told, lambda: self.log(request_id)))

    def _life(self, number: int, request_id: str) -> str:
        path = self.home(request_id) / f"life-{number}.json"
        return path.read_text() if path.exists() else ""

    def end_process(self, status: int, request_id: str = F1) -> None:
        (self.home(request_id) / "end").write_text(str(status))

    def log(self, request_id: str = F1) -> str:
        path = self.home(request_id) / "bootstrap.log"
        return path.read_text(errors="replace") if path.exists() else "no log"

    def remove(self, request_id: str = F1, *, keep_environments: bool = False) -> subprocess.CompletedProcess[str]:
        return self.run(script.removal(str(self.root), request_id, keep_environments=keep_environments),
                        stdin=script.text("remove.sh"))

    def processes(self, request_id: str = F1) -> dict[int, str]:
        """pid -> command line of whatever bears the host's mark."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={request_id}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
        return found


    def power_cut(self) -> None:
        """Every process of F1 dies, and whoever would start another one first."""
        children = [pid for path in self.home().glob("life-*.json") for pid in json.loads(path.read_text())["children"]]
        found = self.processes()
        for pid in [*sorted(found, key=lambda pid: "bootstrap.sh" not in found[pid]), *children]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.processes())


def wait_until(ready: Callable[[], object], why: Callable[[], str] = str):
    """What `ready` returns once it is true."""
    end = time.monotonic() + PATIENCE_S
    while not (found := ready()):
        assert time.monotonic() < end, why()
        time.sleep(0.02)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
