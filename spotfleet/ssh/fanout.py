"""Parallel execution of one command on several machines; a machine that hangs or is away does not delay the others."""

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

TIMED_OUT, SSH_FAILED = 124, 255  # as `timeout` and ssh report it
GRACE_S = 15.0  # added to a time limit: for the connection, and for the far side to enforce the limit itself
KEPT_BYTES = 8 << 20  # kept end of each stream of a machine


@dataclass(frozen=True)
class FanoutTarget:
    """Machine, and how `ssh` reaches it."""

    alias: str
    host: str
    config: Path
    options: tuple[str, ...] = ()  # options for ssh

    def command(self, *words: str) -> list[str]:
        return openssh.command(self.config, *self.options, *words)


@dataclass(frozen=True)
class CommandOutcome:
    """Result of the command on one machine."""

    host: str
    alias: str
    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    trouble: str = ""  # why the command could not run, or not to its end


OnLine = Callable[[FanoutTarget, str, str], None]  # place, "stdout" or "stderr", a line without its newline


def run(places: Sequence[FanoutTarget], command: str, limit_s: float, on_line: OnLine) -> list[CommandOutcome]:
    """Run the command everywhere, for `limit_s` at most (0: no limit); return the outcomes in the order of `places`.

    On an exception here, such as KeyboardInterrupt, the connections are ended.
    """
    jobs = [_Job(place, command, limit_s, on_line) for place in places]
    try:
        for job in jobs:
            job.start()
        return [job.outcome() for job in jobs]
    finally:
        for job in jobs:
            job.end()


def limited(command: str, limit_s: float) -> str:
    """Return the command line for the far side, which enforces the time limit there if it has `timeout`."""
    if not limit_s:
        return command
    inner = shlex.quote(command)
    script = (f'if command -v timeout >/dev/null 2>&1; then exec timeout -k 5 {limit_s:g} "${{SHELL:-sh}}" -c {inner}; '
              f'else exec "${{SHELL:-sh}}" -c {inner}; fi')
    return f"exec sh -c {shlex.quote(script)}"  # fish and csh could not parse it


class _Job:
    def __init__(self, place: FanoutTarget, command: str, limit_s: float, on_line: OnLine) -> None:
        self.place, self.limit_s, self.on_line = place, limit_s, on_line
        self.begun, self.seconds, self.code = time.monotonic(), 0.0, SSH_FAILED
        self.process: subprocess.Popen[bytes] | None = None
        self.threads: list[threading.Thread] = []
        self.folder = tempfile.TemporaryDirectory(prefix="spotfleet-ssh-")
        self.log = Path(self.folder.name, "log")  # messages of ssh, separate from the output of the command
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
            self.on_line(self.place, name, line.decode(errors="replace").rstrip("\r\n"))

    def _watch(self) -> None:
        assert self.process is not None
        try:
            self.code = self.process.wait(self.limit_s + GRACE_S if self.limit_s else None)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            self.code = TIMED_OUT
        self.seconds = time.monotonic() - self.begun

    def outcome(self) -> CommandOutcome:
        for thread in self.threads:
            thread.join()
        out, err = (bytes(self.said[name]).decode(errors="replace") for name in ("stdout", "stderr"))
        return CommandOutcome(self.place.host, self.place.alias, self.code, out, err, round(self.seconds, 3),
                       self._trouble(self.code))

    def _trouble(self, code: int) -> str:
        if code == TIMED_OUT and self.limit_s:
            return f"not done within {self.limit_s:g} s"
        try:
            said = self.log.read_text(errors="replace")
        except OSError:
            said = ""
        if code != SSH_FAILED or not said.strip():  # otherwise it is the command's own status
            return ""
        said += bytes(self.said["stderr"]).decode(errors="replace")  # an ssh on the way may report the cause there
        found = openssh.meaning(said, self.place.alias)
        return found.why + (f"; {found.hint}" if found.hint else "")

    def end(self) -> None:
        """End the connection; it is gone on return."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        for thread in self.threads:
            thread.join(GRACE_S)
        self.folder.cleanup()
