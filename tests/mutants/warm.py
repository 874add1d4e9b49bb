"""A process that has loaded the packages of others once, and forks for each run of pytest: half of a short run is their
imports. Run by its path, so that nothing of a tree is loaded before the fork.

Reads lines {"folder", "arguments", "environment", "limit_s"} from stdin, writes pytest's status for each to stdout.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time

LOADED = ("aiohttp", "boto3", "cryptography.x509", "hypothesis", "numpy", "paramiko", "psutil", "pytest", "torch",
          "typer")
POLL_S = 0.01


def main() -> None:
    for name in LOADED:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    for line in sys.stdin:
        print(in_child(**json.loads(line)), flush=True)


def in_child(folder: str, arguments: list[str], environment: dict[str, str], limit_s: float) -> int:
    """Return pytest's status; 1 beyond `limit_s`."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = run(folder, arguments, environment)
        finally:
            os._exit(status)
    end = time.monotonic() + limit_s
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 1
        time.sleep(POLL_S)
    return abs(os.waitstatus_to_exitcode(ended[1]))


def run(folder: str, arguments: list[str], environment: dict[str, str]) -> int:
    """Run pytest as `python -m pytest` does in the folder, without a word."""
    import pytest

    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:1] = [folder]  # the folder of this file is the first
    return int(pytest.main(arguments))


if __name__ == "__main__":
    main()
