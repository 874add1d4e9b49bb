"""The host-discovery script: run with a limit of time, in a process group that ends with it, outside every lock."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from threading import Lock, Thread

from spotfleet.config.machine_values import line

MOST_BYTES = 1 << 20
AGAIN_S = 5.0  # between two runs
TAIL = 200  # characters of what it said that a message repeats


class DiscoveryFailed(Exception):
    """The script gave no list; the message says why."""


class Discovery:
    """The newest good list of one script; what went wrong since is in `trouble`."""

    def __init__(self, script: str, limit_s: float) -> None:
        self.trouble, self.ever = "", False  # ever: was there a good list?
        self._script, self._limit_s = script, limit_s
        self._found: tuple[tuple[str, int], ...] = ()
        self._running = Lock()  # one run at a time
        self._until = 0.0  # monotonic; the list is fresh. 0: there was no run yet

    def found(self) -> tuple[tuple[str, int], ...]:
        """(host, slots) as the script said last. The first call waits for it; later ones have it run beside them when
        its list is old, so that a slow script holds nobody up. Never raises."""
        if self._script and not self._until:
            self._look()
        elif self._script and time.monotonic() >= self._until and not self._running.locked():
            Thread(target=self._look, name="discovery", daemon=True).start()
        return self._found

    def _look(self) -> None:
        with self._running:
            if time.monotonic() < self._until:
                return  # somebody else has just looked
            try:
                self._found = run(self._script, self._limit_s)
                self.trouble, self.ever = "", True
            except DiscoveryFailed as error:
                self.trouble = str(error)
            self._until = time.monotonic() + AGAIN_S


def run(script: str, limit_s: float) -> tuple[tuple[str, int], ...]:
    """What `script` lists. Raises DiscoveryFailed after `limit_s` at most; nothing that it started is left then."""
    with tempfile.TemporaryDirectory(prefix="spotfleet-discovery-") as folder:
        path = Path(folder, "script")
        path.write_text(script)
        interpreter = _interpreter(script.partition("\n")[0])
        with Path(folder, "out").open("w+b") as out, Path(folder, "err").open("w+b") as err:
            try:
                process = subprocess.Popen([*interpreter, str(path)], cwd="/", stdin=subprocess.DEVNULL, stdout=out,
                                           stderr=err, start_new_session=True)
            except OSError as error:
                raise DiscoveryFailed(f"the discovery script cannot be started: {error}") from None
            status = _wait(process, limit_s)
            said, cries = _text(out), _text(err)
    if status is None:
        raise DiscoveryFailed(f"the discovery script was still running after {limit_s:g} s and was ended"
                              + _quoted(cries))
    if status:
        raise DiscoveryFailed(f"the discovery script ended with status {status}{_quoted(cries or said)}")
    return read(said)


def _interpreter(first: str) -> list[str]:
    try:
        return (shlex.split(first[2:]) if first.startswith("#!") else []) or ["/bin/sh"]
    except ValueError as error:
        raise DiscoveryFailed(f"the discovery script's first line {first!r} names no program: {error}") from None


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Its status, None when it had to be ended. What it left behind in its session's group ends too."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _text(file) -> str:
    file.seek(0)
    return file.read(MOST_BYTES).decode("utf-8", "replace")


def _quoted(text: str) -> str:
    return f": {text.strip()[-TAIL:]}" if text.strip() else ""


def read(text: str) -> tuple[tuple[str, int], ...]:
    """(host, slots) of each line `host` or `host:slots`; blank lines and comments are left out, and all but the first
    line about a host. Raises DiscoveryFailed naming the line."""
    found: dict[str, int] = {}
    for number, written in enumerate(text.splitlines(), 1):
        said = written.partition("#")[0].strip()
        if not said:
            continue
        try:
            host, slots = line(said)
        except ValueError as error:
            raise DiscoveryFailed(f"the discovery script's line {number}: {error}") from None
        found.setdefault(host, slots)
    return tuple(found.items())
