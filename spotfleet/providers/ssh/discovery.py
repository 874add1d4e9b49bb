"""Runner of the host-discovery script: with a time limit, in its own process group, outside every lock."""

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
TAIL = 200  # characters of its output that a message repeats


class DiscoveryFailed(Exception):
    """Failure of the script to produce a list; the message holds the reason."""


class Discovery:
    """The newest valid list of one script; `trouble` is the error since."""

    def __init__(self, script: str, limit_s: float, slots: int = 1) -> None:
        self.trouble, self.ever = "", False  # ever: was there a valid list?
        self._script, self._limit_s = script, limit_s
        self._slots = slots  # slots of a host whose line names none
        self._found: tuple[tuple[str, int], ...] = ()
        self._running = Lock()  # one run at a time
        self._until = 0.0  # monotonic; the list is fresh until then. 0: no run yet

    def found(self) -> tuple[tuple[str, int], ...]:
        """Return the script's last (host, slots) list. Never raises.

        The first call waits for the script. Later calls run it in a thread when the list is old, so that a slow script
        blocks nobody.
        """
        if self._script and not self._until:
            self._refresh()
        elif self._script and time.monotonic() >= self._until and not self._running.locked():
            Thread(target=self._refresh, name="discovery", daemon=True).start()
        return self._found

    def _refresh(self) -> None:
        with self._running:
            if time.monotonic() < self._until:
                return  # another thread has just run it
            try:
                self._found = run(self._script, self._limit_s, self._slots)
                self.trouble, self.ever = "", True
            except DiscoveryFailed as error:
                self.trouble = str(error)
            self._until = time.monotonic() + AGAIN_S


def run(script: str, limit_s: float, slots: int = 1) -> tuple[tuple[str, int], ...]:
    """Run `script` and parse its list. Raises DiscoveryFailed after `limit_s` at most; ends all its processes."""
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
            output, error_output = _text(out), _text(err)
    if status is None:
        raise DiscoveryFailed(f"the discovery script was still running after {limit_s:g} s and was ended"
                              + _quoted(error_output))
    if status:
        raise DiscoveryFailed(f"the discovery script ended with status {status}{_quoted(error_output or output)}")
    return read(output, slots)


def _interpreter(first: str) -> list[str]:
    try:
        return (shlex.split(first[2:]) if first.startswith("#!") else []) or ["/bin/sh"]
    except ValueError as error:
        raise DiscoveryFailed(f"the discovery script's first line {first!r} names no program: {error}") from None


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return its status, None if it was ended. Also ends all processes left in its group."""
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


def read(text: str, slots: int = 1) -> tuple[tuple[str, int], ...]:
    """Parse lines `host`, which has `slots`, or `host:slots`; skips blank lines, comments and repeated hosts.

    Raises DiscoveryFailed with the line number.
    """
    found: dict[str, int] = {}
    for number, written in enumerate(text.splitlines(), 1):
        entry = written.partition("#")[0].strip()
        if not entry:
            continue
        try:
            host, count = line(entry, slots)
        except ValueError as error:
            raise DiscoveryFailed(f"the discovery script's line {number}: {error}") from None
        found.setdefault(host, count)
    return tuple(found.items())
