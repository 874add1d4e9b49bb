"""One running container of a job, and the processes in it.

    starting --READY--> up --the FIFO closes, or the engine ends it--> ended
        '--- the engine's client ends first --> ContainerFailed

Scripts are forked from a zygote in the container, which starts with the first of them: after `setup`, which may install
torch. Commands are children of the host's zygote, which enter the container.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from spotfleet.agent.containers.engines import ContainerOrder, Engine
from spotfleet.agent.containers.refusals import Refusal, meaning
from spotfleet.agent.processes.child import ChildSpec
from spotfleet.agent.processes.entered import MORE_FILES, NEEDS, PID_FILE, signal_script
from spotfleet.agent.processes.zygote import QUIET, SINGLE_THREADED
from spotfleet.agent.processes.zygote_client import ForkedProcess, Processes, StartedZygote, ZygoteClient
from spotfleet.errors import SpotfleetError

log = logging.getLogger("spotfleet.agent")

PACKAGES = "/opt/spotfleet"  # in each container: the folder that holds this host's spotfleet
OLDEST_PYTHON = (3, 11)
READY = "spotfleet: ready"
MISSING = "spotfleet: missing "
_KILL_S = 5.0  # for a client that sends SIGKILL in the container
_END_S = 5.0  # from the close of the FIFO until the engine has removed the container
_OUTPUT_BYTES = 4000
_POLL_S = 0.01

# The container's first process. $1 is its folder. `wait` also reaps processes whose parents have ended.
FIRST = rf"""
cd "$1" || exit 1
(read -r _ <alive) &
alive=$!
cat /proc/1/environ >environ
for name in {' '.join(NEEDS)}; do command -v "$name" >/dev/null || echo "{MISSING}$name"; done
command -v bash >bash
for name in python python3 python3.14 python3.13 python3.12 python3.11; do
  if path=$(command -v "$name") && "$path" -c 'import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})' 2>/dev/null
  then echo "$path" >python; break; fi
done
cd /
echo "{READY}"
wait "$alive"
exit 0
"""


class ContainerFailed(SpotfleetError):
    """Failure of a container. `sure`: another host would get the same error."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.sure = refusal.sure
        self.tries = 0  # number of this failure among those of its job here, once it is counted


class JobContainer:
    """The container of one job. `host` starts processes outside it; the folder `sockets` is mounted in it."""

    def __init__(self, engine: Engine, order: ContainerOrder, host: Processes, sockets: Path,
                 changed: Callable[[], None]) -> None:
        self._engine, self._order, self._host, self._sockets = engine, order, host, sockets
        self._folder = Path(order.folder)
        self._alive_fd = -1
        self._process: asyncio.subprocess.Process | None = None
        self._zygote = ZygoteClient(changed, self._start_zygote)
        self._keeping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._killing: set[asyncio.Task[None]] = set()
        self._entered: dict[str, str] = {}  # process forked by the host's zygote -> its log
        self._errors = bytearray()
        self.environ: dict[str, str] = {}  # the image's
        self.python = ""  # in the container; "": it has none that is new enough

    @property
    def name(self) -> str:
        return self._order.name

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None and self._alive_fd >= 0

    @property
    def bash(self) -> bool:
        return bool(self._read("bash"))

    async def start(self) -> None:
        """Start the container and wait until it is up. Raises ContainerFailed."""
        for name, text in self._engine.files(self._order).items():
            (self._folder / name).write_text(text)
        os.mkfifo(self._folder / "alive", 0o600)
        self._alive_fd = os.open(self._folder / "alive", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._engine.start(self._order), stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True)
            self._watching = asyncio.create_task(self._watch(self._process))
            await self._become_ready(self._process)
        except BaseException:
            await self.close()
            raise

    async def _become_ready(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        missing = []
        while (line := (await process.stdout.readline()).decode(errors="replace").strip()) != READY:
            if not line and process.stdout.at_eof():
                await process.wait()
                assert self._watching is not None
                await self._watching
                output = self._errors.decode(errors="replace")
                raise ContainerFailed(meaning(self._engine.name, self._order.image, output))
            missing += [line.removeprefix(MISSING)] if line.startswith(MISSING) else []
        if missing:
            raise ContainerFailed(Refusal(
                f"container: the image {self._order.image} has no {' and no '.join(missing)}, which jobs need in it "
                "(package util-linux, or BusyBox)", sure=True))
        pairs = (pair.partition("=") for pair in self._read("environ").split("\0"))
        self.environ = {name: value for name, _, value in pairs if name}
        self.python = self._read("python").strip()

    def _read(self, name: str) -> str:
        return _text(self._folder / name)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Read the client's errors until the container has ended; then let its processes fail."""
        assert process.stderr is not None
        while data := await process.stderr.read(4096):
            self._errors += data
            del self._errors[:-_OUTPUT_BYTES]
        code = await process.wait()
        log.info("container %s ended (%s)", self.name, code)
        if self._keeping is not None:
            self._keeping.cancel()
        self._zygote.fail(ContainerFailed(Refusal(
            f"container: {self.name} has ended ({self._engine.name}: status {code}): something outside has ended it, "
            "such as a removal or the kernel for lack of memory")))

    async def require(self, *, script: bool, torch: bool) -> None:
        """Raise ContainerFailed if the container lacks a Python for scripts, or torch."""
        image = self._order.image
        if script and not self.python:
            oldest = ".".join(map(str, OLDEST_PYTHON))
            raise ContainerFailed(Refusal(
                f"container: {image} has no Python {oldest} or newer, which the processes of a script need: use an "
                "image that has one, or run the script as a command (spotfleet run -- ...)", sure=True))
        if torch and await self.run(self.python, "-c", "import importlib.util, sys; "
                                                       "sys.exit(importlib.util.find_spec('torch') is None)"):
            raise ContainerFailed(Refusal(
                f"container: {image} has no torch for {self.python}, which an elastic job needs: use an image with "
                "it, or install it in `setup`", sure=True))

    async def run(self, *command: str) -> int:
        """Run a short command in the container; return its exit status."""
        return (await call([*self._engine.enter(self.name), *command]))[0]

    async def spawn(self, spec: ChildSpec) -> ForkedProcess:
        """Start a process in the container. Raises ContainerFailed if the container ends before that."""
        if not self.alive:
            raise ContainerFailed(Refusal(f"container: {self.name} has ended"))
        if spec.argv:
            if self._keeping is None:
                self._keeping = asyncio.create_task(self._keep_zygote())
            return await self._zygote.spawn(spec)
        self._entered[spec.id] = spec.log
        process = await self._host.spawn(replace(spec, inside=tuple(self._engine.enter(self.name))))
        process.ended.add_done_callback(lambda _: self._entered.pop(spec.id, None))
        try:
            return ForkedProcess(await _entered_pid(spec.log, process.ended), process.ended)
        except asyncio.CancelledError:
            self.kill(spec.id, signal.SIGKILL)
            raise

    def kill(self, id_: str, signum: int) -> None:
        """Send a signal to a process by its id."""
        entered = self._entered.get(id_)
        if entered is None:
            self._zygote.kill(id_, signum)
        elif signum != signal.SIGKILL:
            self._host.kill(id_, signum)  # its runner sends it on
        else:
            task = asyncio.create_task(self._kill_entered(id_, entered))
            self._killing.add(task)
            task.add_done_callback(self._killing.discard)

    async def _kill_entered(self, id_: str, log_file: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILL_S):
                await self.run("sh", "-c", signal_script(log_file, signal.SIGKILL))
        self._host.kill(id_, signal.SIGKILL)

    async def close(self) -> None:
        """End the container with all of its processes, and remove it and its folder."""
        if self._alive_fd >= 0:
            os.close(self._alive_fd)
            self._alive_fd = -1
        if self._process is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
            if self._process.returncode is None:
                await call(self._engine.remove(self.name))
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._watching is not None:
            await asyncio.gather(self._watching, *self._killing, return_exceptions=True)
        await self._zygote.close(1.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep_zygote(self) -> None:
        try:
            await self._zygote.run()
        except ContainerFailed as error:
            self._keeping = None  # the next script tries again
            self._zygote.fail(error)

    async def _start_zygote(self) -> StartedZygote:
        """Start a zygote in the container, which connects to a socket of ours. Raises ContainerFailed."""
        path = self._sockets / f"z{os.urandom(2).hex()}"  # as long as the agent's own name there
        exports = {**QUIET, **SINGLE_THREADED, "PYTHONPATH": os.pathsep.join(filter(None, [
            self.environ.get("PYTHONPATH"), PACKAGES]))}
        named = "".join(f"export {name}={value}; " for name, value in exports.items())
        script = f'{MORE_FILES}; {named}exec "$@"'
        with socket.socket(socket.AF_UNIX) as server, (self._folder / "zygote.log").open("wb") as output:
            server.bind(str(path))
            try:
                server.listen(1)
                server.setblocking(False)
                client = await asyncio.create_subprocess_exec(
                    *self._engine.enter(self.name), "sh", "-c", script, "sh", self.python, "-m",
                    "spotfleet.agent.processes.zygote", str(path),
                    stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
                accepting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(server))
                ending = asyncio.ensure_future(client.wait())
                try:
                    await asyncio.wait([accepting, ending], return_when=asyncio.FIRST_COMPLETED)
                    if not accepting.done():
                        text = self._read("zygote.log")
                        raise ContainerFailed(meaning(self._engine.name, self._order.image, text))
                    connection, _ = accepting.result()
                finally:
                    accepting.cancel()
                    ending.cancel()
            finally:
                path.unlink(missing_ok=True)
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return StartedZygote(client, connection, pid, lambda inner: host_pid(pid, inner))


def host_pid(parent: int, inner: int, proc: Path = Path("/proc")) -> int:
    """Return the pid here of the child of `parent` that has pid `inner` in its own namespace; 0 if it has ended."""
    return next((pid for pid, above in _with_inner_pid(inner, proc) if above == parent), 0)


def _with_inner_pid(inner: int, proc: Path) -> Iterator[tuple[int, int]]:
    """Yield pid and parent's pid, both those here, of each process with pid `inner` in its own namespace."""
    for status in proc.glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except (OSError, ValueError):
            continue
        if lines.get("NSpid", "").split()[-1:] == [str(inner)]:
            yield int(status.parent.name), int(lines.get("PPid", 0))


async def _entered_pid(log_file: str, ended: asyncio.Future[int], proc: Path = Path("/proc")) -> int:
    """Wait for a command that enters the container; return its pid here, or 0 if it has ended. It leads a session, by
    which the agent knows its processes. Its parent in the container writes to the log; it may write elsewhere."""
    while not ended.done():
        inner = _text(Path(log_file + PID_FILE)).strip()
        for pid, parent in _with_inner_pid(int(inner), proc) if inner.isdigit() else ():
            with suppress(OSError):
                if os.path.samefile(proc / str(parent) / "fd/1", log_file):
                    return pid
        await asyncio.wait([ended], timeout=_POLL_S)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")
    except FileNotFoundError:
        return ""


async def call(command: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run a command of an engine; return its exit status, output and errors. A cancellation ends it."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True, env=None if env is None else {**os.environ, **env})
    except FileNotFoundError as error:
        return 127, "", f"{command[0]}: {error.strerror}"
    try:
        output, errors = await process.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    return process.returncode or 0, output.decode(errors="replace"), errors.decode(errors="replace")
