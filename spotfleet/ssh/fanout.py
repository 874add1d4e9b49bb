"""One command on several machines at once, each for itself: one that hangs or is away holds no other back."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from spotfleet.ssh import openssh

TIMED_OUT, SSH_FAILED = 124, 255  # as `timeout` and ssh say it
GRACE_S = 15.0  # on top of a time limit: for the connection, and for the far side to keep the limit itself
KEPT_BYTES = 8 << 20  # of each stream of a machine, its end


@dataclass(frozen=True)
class Place:
    """A machine and how `ssh` enters it."""

    alias: str
    host: str
    config: Path
    options: tuple[str, ...] = ()  # words for ssh

    def command(self, *words: str) -> list[str]:
        return openssh.command(self.config, *self.options, *words)


@dataclass(frozen=True)
class Outcome:
    """What became of the command on one machine."""

    host: str
    alias: str
    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    trouble: str = ""  # why it could not run there, or not to its end


Hear = Callable[[Place, str, str], None]  # where, "stdout" or "stderr", a line without its end


def run(places: Sequence[Place], command: str, limit_s: float, hear: Hear) -> list[Outcome]:
    """Run it everywhere, for `limit_s` at most (0: no limit); the outcomes in the order of `places`.

    On an exception in here, such as KeyboardInterrupt, the connections are ended.
    """
    jobs = [_Job(place, command, limit_s, hear) for place in places]
    try:
        for job in jobs:
            job.start()
        return [job.outcome() for job in jobs]
    finally:
        for job in jobs:
            job.end()


def limited(command: str, limit_s: float) -> str:
    """The command line for the far side, which ends it there when its time is over, where it has `timeout`."""
    if not limit_s:
        return command
    inner = shlex.quote(command)
    script = (f'if command -v timeout >/dev/null 2>&1; then exec timeout -k 5 {limit_s:g} "${{SHELL:-sh}}" -c {inner}; '
              f'else exec "${{SHELL:-sh}}" -c {inner}; fi')
    return f"exec sh -c {shlex.quote(script)}"  # fish and csh would not read it


class _Job:
    def __init__(self, place: Place, command: str, limit_s: float, hear: Hear) -> None:
        self.place, self.limit_s, self.hear = place, limit_s, hear
        self.begun, self.seconds, self.code = time.monotonic(), 0.0, SSH_FAILED
        self.process: subprocess.Popen[bytes] | None = None
        self.threads: list[threading.Thread] = []
        self.folder = tempfile.TemporaryDirectory(prefix="spotfleet-ssh-")
        self.log = Path(self.folder.name, "log")  # ssh's own words, apart from those of the command
        self.line = place.command("-o", "BatchMode=yes", "-n", "-T", "-E", str(self.log), place.alias,
                                  limited(command, limit_s))
        self.said = {"stdout": bytearray(), "stderr": bytearray()}

    def start(self) -> None:
        self.process = subprocess.Popen(self.line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, start_new_session=True)
        assert self.process.stdout is not None and self.process.stderr is not None
        for target, arguments in ((self._read, ("stdout", self.process.stdout)),
                                  (self._read, ("stderr", self.process.stderr)), (self._watch, ())):
            thread = threading.Thread(target=target, args=arguments, daemon=True)
            self.threads.append(thread)
            thread.start()

    def _read(self, name: str, pipe: BinaryIO) -> None:
        for line in pipe:
            kept = self.said[name]
            kept += line
            del kept[:-KEPT_BYTES]
            self.hear(self.place, name, line.decode(errors="replace").rstrip("\r\n"))

    def _watch(self) -> None:
        assert self.process is not None
        try:
            self.code = self.process.wait(self.limit_s + GRACE_S if self.limit_s else None)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            self.code = TIMED_OUT
        self.seconds = time.monotonic() - self.begun

    def outcome(self) -> Outcome:
        for thread in self.threads:
            thread.join()
        out, err = (bytes(self.said[name]).decode(errors="replace") for name in ("stdout", "stderr"))
        return Outcome(self.place.host, self.place.alias, self.code, out, err, round(self.seconds, 3),
                       self._trouble(self.code))

    def _trouble(self, code: int) -> str:
        if code == TIMED_OUT and self.limit_s:
            return f"not done within {self.limit_s:g} s"
        try:
            said = self.log.read_text(errors="replace")
        except OSError:
            said = ""
        if code != SSH_FAILED or not said.strip():  # else it is the command's own status
            return ""
        said += bytes(self.said["stderr"]).decode(errors="replace")  # where the ssh on the way says what is wrong
        found = openssh.meaning(said, self.place.alias)
        return found.why + (f"; {found.hint}" if found.hint else "")

    def end(self) -> None:
        """The connection is gone when this returns."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        for thread in self.threads:
            thread.join(GRACE_S)
        self.folder.cleanup()
