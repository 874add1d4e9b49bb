"""What comes before a job's first worker on this host, once: its buckets (`agent/mounts.py`), then its `setup`, whose
output is kept apart and whose failure is explained.

    due --run--> done (a marker in the job's folder)
         |---- fails, or takes longer than its limit --> SetupFailed, for each worker that waited; the next one tries
         |     again, and `dispatcher/restart.py` says how often
         |---- a signal ends it: run again, FEW_SIGNALS times: it may be the host that goes
         '---- its worker is not wanted any more: ended, and nobody's failure

Output goes to the log `HOST#setup` of the job. The text is run by `bash -c` as the user wrote it: its last command's
status is its status, unless it says `set -e` itself. Two traps note which lines failed; they are not seen by functions,
subshells and sourced files, so that the line is one of the user's own text.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import shlex
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet.agent import mounter
from spotfleet.agent.child import ChildSpec
from spotfleet.agent.mounts import Order
from spotfleet.agent.ship import LogShipper
from spotfleet.agent.transfer import Transfers
from spotfleet.agent.zygote_client import ZygoteClient
from spotfleet.codec import to_text
from spotfleet.errors import DiskFull, SpotfleetError
from spotfleet.model import JobSpec

log = logging.getLogger("spotfleet.agent")

FEW_SIGNALS = 2
PAUSE_S = 1.0  # after a signal: a host that goes is told so within this time
KILL_S = 2.0
LOG_S = 5.0  # a failure waits so long for its output to be at the dispatcher
LAST_LINES, LAST_CHARS = 15, 2000
_TRACES = re.compile(r"\bset\s+-[a-zA-Z]*x|\bxtrace\b")


class SetupFailed(SpotfleetError):
    """What comes before a job's script has failed on this host, for the `tries`th time. `sure`: another host would
    hear the same."""

    def __init__(self, message: str, tries: int, *, sure: bool = False) -> None:
        super().__init__(message)
        self.tries, self.sure = tries, sure


@dataclass(frozen=True)
class Scene:
    """One job on this host, for the worker that is about to start."""

    host: str
    job: str
    folder: Path  # the job's
    source: Path
    env: dict[str, str]


@dataclass(frozen=True)
class Line:
    """A command of the user's text."""

    number: int
    command: str
    code: int = 0

    def __str__(self) -> str:
        text = " ".join(self.command.split())
        return f"line {self.number} (`{text if len(text) <= 200 else text[:200] + '...'}`)"


@dataclass(frozen=True)
class _Step:
    """Something that is done once for a job on this host: a file says so, also to a later agent."""

    marker: Path
    text: str  # empty: there is nothing to do

    @property
    def done(self) -> bool:
        return not self.text or (self.marker.exists() and self.marker.read_text() == self._digest)

    def mark(self) -> None:
        self.marker.write_text(self._digest)

    @property
    def _digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class Setups:
    def __init__(self, transfers: Transfers, zygote: ZygoteClient) -> None:
        self._transfers, self._zygote = transfers, zygote
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._failures: dict[str, SetupFailed] = {}  # of each job the last
        self._shipping: set[asyncio.Task[None]] = set()

    async def done(self, scene: Scene, spec: JobSpec, say: Callable[[str], None]) -> None:
        """Returns once `file_mounts` are here and `setup` has succeeded. SetupFailed names the mount, or line, code and
        the end of the output; DiskFull."""
        mounts = _Step(scene.folder / "mounts.done", to_text(spec.file_mounts) if spec.file_mounts else "")
        setup = _Step(scene.folder / "setup.done", spec.setup.strip() and spec.setup)
        before = self._failures.get(scene.job)
        if self._locks[scene.job].locked():
            say("waiting for the setup that another worker runs")
        async with self._locks[scene.job]:
            last = self._failures.get(scene.job)
            if last is not None and last is not before and not (mounts.done and setup.done):
                raise last
            tries = last.tries + 1 if last else 1
            try:
                if not mounts.done:
                    await self._mount(scene, spec.file_mounts, tries, say)
                    mounts.mark()
                if not setup.done:
                    await self._try(scene, spec.setup, spec.setup_timeout_s, tries, say)
                    setup.mark()
            except SetupFailed as error:
                self._failures[scene.job] = error
                raise

    async def _mount(self, scene: Scene, mounts: dict[str, str], tries: int, say: Callable[[str], None]) -> None:
        say("looking into buckets")
        cache = scene.folder.parent.parent / "mounts"
        said = await mounter.fetch(Order(mounts, str(cache), str(scene.source)), scene.env, say)
        if said.full:
            raise DiskFull(said.error)
        if said.error:
            raise SetupFailed(said.error, tries, sure=said.sure)

    async def _try(self, scene: Scene, command: str, limit_s: float, tries: int, say: Callable[[str], None]) -> None:
        run = _Run(scene.folder / "setup.log", scene.folder / "setup.trace")
        shipper = LogShipper(self._transfers, scene.job, f"{scene.host}#setup", run.log)
        shipping = asyncio.create_task(shipper.run())
        self._shipping.add(shipping)
        shipping.add_done_callback(self._shipping.discard)
        try:
            for left in reversed(range(FEW_SIGNALS + 1)):
                say("running setup" + (f" (try {tries})" if tries > 1 else ""))
                run.begin(tries)
                why, by_signal = await self._run(scene, run, command, limit_s)
                run.end(why)
                if not (by_signal and left):
                    break
                await asyncio.sleep(PAUSE_S)
        finally:
            shipper.complete()
        if why:
            await asyncio.wait([shipping], timeout=LOG_S)
            raise SetupFailed(f"setup failed: {why}{run.last_output()}", tries)

    async def _run(self, scene: Scene, run: _Run, command: str, limit_s: float) -> tuple[str, bool]:
        """Why it failed, "" if it did not, and whether a signal from without did it."""
        text = traps(run.trace, command) + command
        spec = ChildSpec(f"{scene.host}/{scene.job}#setup", str(scene.source), str(run.log), scene.env, run=text)
        process = await self._zygote.spawn(spec)
        try:
            ended, _ = await asyncio.wait([process.ended], timeout=limit_s or None)
            if not ended:
                self._zygote.kill(spec.id, signal.SIGTERM)
                await asyncio.wait([process.ended], timeout=KILL_S)
                self._zygote.kill(spec.id, signal.SIGKILL)
                at = run.last_line()
                return f"it did not end within {limit_s:g} s" + (f"; it was at {at}" if at else ""), False
            return explain(process.ended.result(), run.failed_lines(), run.last_line())
        except asyncio.CancelledError:
            self._zygote.kill(spec.id, signal.SIGKILL)
            run.end("it was ended before its end, as its worker is not wanted here any more")
            raise


def explain(code: int, failed: list[Line], last: Line | None) -> tuple[str, bool]:
    """Why a setup with this exit status (or minus a signal) failed, and whether a signal ended the shell itself."""
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
    """To be put before the first line of a script, in that line: failing commands are appended to `trace`, the last one
    at the end. A script that prints each of its commands is not made to print these."""
    file = shlex.quote(str(trace))
    write = f'2>/dev/null >>{file} || :'
    text = f"trap 'printf \"E%s\\0%s\\0%s\\0\" \"$?\" \"$LINENO\" \"$BASH_COMMAND\" {_quoted(write)}' ERR; "
    if _TRACES.search(command):
        return text
    # The last trap is run once more for the command in the one before it, which has a line of its own.
    text += f"trap 'printf \"A0\\0%s\\0%s\\0\" \"$_sf_was\" \"$_sf_command\" {_quoted(write)}' EXIT; "
    return text + "trap '_sf_was=${_sf_line-} _sf_line=$LINENO _sf_command=$BASH_COMMAND' DEBUG; "


def _quoted(text: str) -> str:
    """For the inside of single quotes."""
    return text.replace("'", "'\\''")


class _Run:
    """What the runs of one setup leave on this host's disk."""

    def __init__(self, log: Path, trace: Path) -> None:
        self.log, self.trace = log, trace
        self._from, self._begun = 0, 0.0

    def begin(self, tries: int) -> None:
        self.trace.unlink(missing_ok=True)
        self._say(f"setup begins, try {tries} on this host")
        self._from, self._begun = self.log.stat().st_size, time.monotonic()

    def end(self, why: str) -> None:
        self._to, lasted_s = self.log.stat().st_size, time.monotonic() - self._begun
        self._say(f"setup has {'failed' if why else 'succeeded'} after {lasted_s:.1f} s{': ' if why else ''}{why}")

    def _say(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(f"spotfleet: {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}: {text}\n")

    def failed_lines(self) -> list[Line]:
        return [replace(line, code=int(kind[1:])) for kind, line in self._lines() if kind.startswith("E")]

    def last_line(self) -> Line | None:
        return next((line for kind, line in reversed(self._lines()) if kind.startswith("A")), None)

    def _lines(self) -> list[tuple[str, Line]]:
        try:
            words = self.trace.read_text(errors="replace").split("\0")[:-1]
        except FileNotFoundError:
            return []
        rows = zip(words[::3], words[1::3], words[2::3], strict=False)
        return [(kind, Line(int(number), command)) for kind, number, command in rows
                if number.isdigit() and command.split() and kind[1:].isdigit()]

    def last_output(self) -> str:
        """The end of what the last run printed, to follow an error."""
        with self.log.open("rb") as file:
            file.seek(max(self._from, self._to - LAST_CHARS))
            text = file.read(max(0, self._to - file.tell())).decode(errors="replace")
        lines = text.splitlines()[-LAST_LINES:]
        return "\n  ".join(["\nits last output:", *lines]) if lines else ""
