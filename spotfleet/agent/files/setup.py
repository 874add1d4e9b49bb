"""Setup of a job on this host, once before its first worker: its buckets (`mount_process.py`), then its `setup`.

    due --run--> done (a marker in the job's folder)
         |---- fails, or takes longer than its limit --> SetupError, for each worker that waited; the next one tries
         |     again, and `dispatcher/jobs/restart.py` limits the tries
         |---- a signal ends it: run again, FEW_SIGNALS times: the host itself may be about to end
         '---- its worker is not wanted any more: ended, and not counted as a failure

The output goes to the job's log `HOST#setup`. `bash -c` runs the text as the user wrote it: the status of its last
command is its status, unless it contains `set -e`. Two traps record which lines failed. Functions, subshells and
sourced files do not inherit them, so that each recorded line is one of the user's own text.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import re
import shlex
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from spotfleet.agent.files.mount_process import MountOrder
from spotfleet.agent.files.mounts import fetch as fetch_mounts
from spotfleet.agent.files.uploads import LogShipper
from spotfleet.agent.processes.child import ChildSpec
from spotfleet.agent.processes.zygote_client import Processes
from spotfleet.agent.transfer import Transfers
from spotfleet.codec import to_text
from spotfleet.errors import DiskFull, SpotfleetError
from spotfleet.model import JobSpec

log = logging.getLogger("spotfleet.agent")

FEW_SIGNALS = 2
PAUSE_S = 1.0  # after a signal: the end of the host shows within this time
KILL_S = 2.0
LOG_S = 5.0  # wait for a failure's output to reach the dispatcher
LAST_LINES, LAST_CHARS = 15, 2000
_TRACES = re.compile(r"\bset\s+-[a-zA-Z]*x|\bxtrace\b")


class SetupError(SpotfleetError):
    """Failure of a job's setup on this host, at its `tries`th try. `sure`: another host would get the same error."""

    def __init__(self, message: str, tries: int, *, sure: bool = False) -> None:
        super().__init__(message)
        self.tries, self.sure = tries, sure


@dataclass(frozen=True)
class SetupContext:
    """One job on this host, for the worker that is about to start."""

    host: str
    job: str
    folder: Path  # the job's
    source: Path
    env: dict[str, str]
    processes: Processes
    fetch_env: dict[str, str] = field(default_factory=dict)  # for what runs on the host in any case; empty: `env`
    instance: str = ""  # name of the container: another one needs the setup anew
    bash: bool = True  # its shell is bash


@dataclass(frozen=True)
class SetupCommand:
    """A command of the user's text, with its line number and exit status."""

    number: int
    command: str
    code: int = 0

    def __str__(self) -> str:
        text = " ".join(self.command.split())
        return f"line {self.number} (`{text if len(text) <= 200 else text[:200] + '...'}`)"


@dataclass(frozen=True)
class _Step:
    """A step that is done once for a job on this host; a marker file records it, also for a later agent."""

    marker: Path
    text: str  # empty: there is nothing to do

    @property
    def done(self) -> bool:
        return not self.text or (self.marker.exists() and self.marker.read_bytes() == self._digest.encode())

    def mark(self) -> None:
        self.marker.write_text(self._digest)

    @property
    def _digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class Setups:
    """Setups of this host's jobs; one at a time for each job."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._failures: dict[str, SetupError] = {}  # the last one of each job
        self._shipping: set[asyncio.Task[None]] = set()
        self._runs = itertools.count(1)

    async def done(self, context: SetupContext, spec: JobSpec, progress: Callable[[str], None]) -> None:
        """Fetch `file_mounts` and run `setup`, unless both are done.

        SetupError names the mount, or the line, the exit code and the end of the output. Raises DiskFull, too.
        """
        mounts = _Step(context.folder / "mounts.done", to_text(spec.file_mounts) if spec.file_mounts else "")
        setup = _Step(context.folder / "setup.done", spec.setup.strip() and context.instance + spec.setup)
        before = self._failures.get(context.job)
        if self._locks[context.job].locked():
            progress("waiting for the setup that another worker runs")
        async with self._locks[context.job]:
            last = self._failures.get(context.job)
            if last is not None and last is not before and not (mounts.done and setup.done):
                raise last
            tries = last.tries + 1 if last else 1
            try:
                if not mounts.done:
                    await self._mount(context, spec.file_mounts, tries, progress)
                    mounts.mark()
                if not setup.done:
                    await self._try(context, spec.setup, spec.setup_timeout_s, tries, progress)
                    setup.mark()
            except SetupError as error:
                self._failures[context.job] = error
                raise

    def unfit(self, job: str, why: str) -> SetupError:
        """Return the error for a host on which a job cannot run whatever its setup does, counted as a failure of it."""
        last = self._failures.get(job)
        self._failures[job] = error = SetupError(why, last.tries + 1 if last else 1)
        return error

    async def _mount(self, context: SetupContext, mounts: dict[str, str], tries: int,
                     progress: Callable[[str], None]) -> None:
        progress("looking into buckets")
        cache = context.folder.parent.parent / "mounts"
        order = MountOrder(mounts, str(cache), str(context.source))
        report = await fetch_mounts(order, context.fetch_env or context.env, progress)
        if report.full:
            raise DiskFull(report.error)
        if report.error:
            raise SetupError(report.error, tries, sure=report.sure)

    async def _try(self, context: SetupContext, command: str, limit_s: float, tries: int,
                   progress: Callable[[str], None]) -> None:
        run = _Run(context.folder / "setup.log", context.folder / "setup.trace")
        shipper = LogShipper(self._transfers, context.job, f"{context.host}#setup", run.log)
        shipping = asyncio.create_task(shipper.run())
        self._shipping.add(shipping)
        shipping.add_done_callback(self._shipping.discard)
        try:
            for left in reversed(range(FEW_SIGNALS + 1)):
                progress("running setup" + (f" (try {tries})" if tries > 1 else ""))
                run.begin(tries)
                why, by_signal = await self._run(context, run, command, limit_s)
                run.end(why)
                if not (by_signal and left):
                    break
                await asyncio.sleep(PAUSE_S)
        finally:
            shipper.complete()
        if why:
            await asyncio.wait([shipping], timeout=LOG_S)
            raise SetupError(f"setup failed: {why}{run.last_output()}", tries)

    async def _run(self, context: SetupContext, run: _Run, command: str, limit_s: float) -> tuple[str, bool]:
        """Run the command once; return why it failed ("" if it did not), and whether an outside signal ended it."""
        text = (traps(run.trace, command) if context.bash else "") + command
        # One that was killed a moment ago may not have been reported as ended: its report must not count for this one.
        name = f"{context.host}/{context.job}#setup{next(self._runs)}"
        spec = ChildSpec(name, str(context.source), str(run.log), context.env, run=text)
        process = await context.processes.spawn(spec)
        try:
            ended, _ = await asyncio.wait([process.ended], timeout=limit_s or None)
            if not ended:
                context.processes.kill(spec.id, signal.SIGTERM)
                await asyncio.wait([process.ended], timeout=KILL_S)
                context.processes.kill(spec.id, signal.SIGKILL)
                at = run.last_line()
                return f"it did not end within {limit_s:g} s" + (f"; it was at {at}" if at else ""), False
            return explain(process.ended.result(), run.failed_lines(), run.last_line())
        except asyncio.CancelledError:
            context.processes.kill(spec.id, signal.SIGKILL)
            run.end("it was ended before its end, as its worker is not wanted here any more")
            raise


def explain(code: int, failed: list[SetupCommand], last: SetupCommand | None) -> tuple[str, bool]:
    """Explain a setup's exit status (or minus a signal); also return whether a signal ended the shell itself."""
    if code == 0:
        return "", False
    guilty = next((line for line in reversed(failed) if line.code == code), None)
    if guilty is None and last is not None and last.command.split()[0] in ("exit", "return", "exec"):
        guilty = last
    number = -code if code < 0 else code - 128
    if guilty is None and number in tuple(signal.Signals):
        return f"it was ended by {signal.Signals(number).name}", True
    if guilty is None:
        return f"it exited with code {code}", False
    first = next((line for line in failed if line.number < guilty.number and line.code), None)
    earlier = f"; before that {first} failed with code {first.code}" if first else ""
    return f"{guilty} exited with code {code}{earlier}", False


def traps(trace: Path, command: str) -> str:
    """Return shell code to put in front of a script, on its first line, so that line numbers stay.

    It appends each failing command to `trace`, and the last command at the end. A script that prints its commands
    (`set -x`) gets only the first trap, so that the others are not printed.
    """
    file = shlex.quote(str(trace))
    write = f'2>/dev/null >>{file} || :'
    text = f"trap 'printf \"E%s\\0%s\\0%s\\0\" \"$?\" \"$LINENO\" \"$BASH_COMMAND\" {_quoted(write)}' ERR; "
    if _TRACES.search(command):
        return text
    # The DEBUG trap also runs for the command inside the EXIT trap, which has a line number of its own.
    text += f"trap 'printf \"A0\\0%s\\0%s\\0\" \"$_sf_was\" \"$_sf_command\" {_quoted(write)}' EXIT; "
    return text + "trap '_sf_was=${_sf_line-} _sf_line=$LINENO _sf_command=$BASH_COMMAND' DEBUG; "


def _quoted(text: str) -> str:
    """Escape `text` for use inside single quotes."""
    return text.replace("'", "'\\''")


class _Run:
    """Log and trace file of one setup on this host's disk."""

    def __init__(self, log: Path, trace: Path) -> None:
        self.log, self.trace = log, trace
        self._from, self._begun = 0, 0.0

    def begin(self, tries: int) -> None:
        self.trace.unlink(missing_ok=True)
        self._write_line(f"setup begins, try {tries} on this host")
        self._from, self._begun = self.log.stat().st_size, time.monotonic()

    def end(self, why: str) -> None:
        self._to, lasted_s = self.log.stat().st_size, time.monotonic() - self._begun
        outcome = "failed" if why else "succeeded"
        self._write_line(f"setup has {outcome} after {lasted_s:.1f} s{': ' if why else ''}{why}")

    def _write_line(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(f"spotfleet: {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}: {text}\n")

    def failed_lines(self) -> list[SetupCommand]:
        return [replace(line, code=int(kind[1:])) for kind, line in self._lines() if kind.startswith("E")]

    def last_line(self) -> SetupCommand | None:
        return next((line for kind, line in reversed(self._lines()) if kind.startswith("A")), None)

    def _lines(self) -> list[tuple[str, SetupCommand]]:
        try:
            words = self.trace.read_text(errors="replace").split("\0")[:-1]
        except FileNotFoundError:
            return []
        rows = zip(words[::3], words[1::3], words[2::3], strict=False)
        return [(kind, SetupCommand(int(number), command)) for kind, number, command in rows
                if number.isdigit() and command.split() and kind[1:].isdigit()]

    def last_output(self) -> str:
        """Return the end of the last run's output, to follow an error message."""
        with self.log.open("rb") as file:
            file.seek(max(self._from, self._to - LAST_CHARS))
            text = file.read(max(0, self._to - file.tell())).decode(errors="replace")
        lines = text.splitlines()[-LAST_LINES:]
        return "\n  ".join(["\nits last output:", *lines]) if lines else ""
