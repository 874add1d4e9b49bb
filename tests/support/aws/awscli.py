"""The AWS CLI as another client of the fake: an environment of its own, made once and kept, and its commands."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "1.46.*"
INSTALL_S, COMMAND_S = 600.0, 120.0


@dataclass(frozen=True)
class AwsCli:
    """The command `aws` with credentials and endpoint of a fake."""

    python: Path
    env: dict[str, str]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self.python), "-m", "awscli", *command], env=os.environ | self.env, text=True,
                              capture_output=True, timeout=COMMAND_S, check=False)

    def ok(self, *command: str) -> Any:
        """Return what a command prints, parsed."""
        done = self.run(*command, "--output", "json")
        assert done.returncode == 0, f"aws {' '.join(command)}: {done.stderr}"
        return json.loads(done.stdout) if done.stdout.strip() else None

    def refused(self, *command: str) -> str:
        """Return the code of the error that a command ends with."""
        done = self.run(*command)
        assert done.returncode == 255, f"aws {' '.join(command)}: {done.returncode} {done.stdout} {done.stderr}"
        return done.stderr.partition("(")[2].partition(")")[0]


def python_with_cli() -> Path:
    """Return the Python of the environment, made at the first use. OSError where it cannot be installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spotfleet-tests"
    folder = cache / f"awscli-{VERSION.rstrip('.*')}-py{sys.version_info.major}.{sys.version_info.minor}"
    python, whole = folder / "bin" / "python", folder / "whole"
    with _alone(cache):
        if not whole.exists():
            _install(folder, python)
            whole.touch()
    return python


def _install(folder: Path, python: Path) -> None:
    # -I: without the guard of the tests' network, which the package index is outside of
    steps = ([sys.executable, "-I", "-m", "venv", "--clear", str(folder)],
             [str(python), "-I", "-m", "pip", "install", "-q", "--disable-pip-version-check", f"awscli=={VERSION}"])
    for step in steps:
        try:
            subprocess.run(step, capture_output=True, text=True, timeout=INSTALL_S, check=True)
        except subprocess.CalledProcessError as error:
            raise OSError(f"{' '.join(step[-2:])}: {error.stderr.strip()[-300:]}") from error
        except subprocess.TimeoutExpired as error:
            raise OSError(f"{' '.join(step[-2:])}: not done in {INSTALL_S:.0f} s") from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock, so that of two test processes one installs."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
