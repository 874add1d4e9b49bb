"""Agent's client of the zygote: keeps one running, requests processes, receives their exit statuses.

    down --start--> importing --warm--> up --its death--> down (after a backoff; its workers count as killed)
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from spotfleet.agent.processes.child import ChildSpec
from spotfleet.agent.processes.zygote import QUIET, SINGLE_THREADED
from spotfleet.codec import to_json

log = logging.getLogger("spotfleet.agent")

_RESTART_S, _RESTART_MAX_S = 0.05, 5.0


@dataclass(frozen=True)
class ForkedProcess:
    """A process forked by the zygote. `ended` yields its exit status, or minus the signal."""

    pid: int
    ended: asyncio.Future[int]


class Processes(Protocol):
    """Starter of a job's processes: on the host, or in the job's container."""

    async def spawn(self, spec: ChildSpec) -> ForkedProcess:
        """Start a process."""

    def kill(self, id_: str, signum: int) -> None:
        """Send a signal to a process by its id; nothing happens if it has ended."""


@dataclass(frozen=True)
class StartedZygote:
    """A zygote that has begun to import. `host_pid` translates a pid that it sends; 0 for an ended process."""

    process: asyncio.subprocess.Process  # it, or the client by which it runs in a container
    socket: socket.socket
    pid: int
    host_pid: Callable[[int], int] = lambda pid: pid


async def _start_here() -> StartedZygote:
    own, remote = socket.socketpair()
    with remote:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "spotfleet.agent.processes.zygote", str(remote.fileno()),
            pass_fds=(remote.fileno(),),
            env={**QUIET, **os.environ, **SINGLE_THREADED}, stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True)
    return StartedZygote(process, own, process.pid)


class ZygoteClient:
    """Owner of the zygote process; calls `changed` when it or one of its processes changes state."""

    def __init__(self, changed: Callable[[], None],
                 start: Callable[[], Awaitable[StartedZygote]] = _start_here) -> None:
        self._changed = changed
        self._start = start
        self._host_pid: Callable[[int], int] = lambda pid: pid
        self._pid = 0
        self._writer: asyncio.StreamWriter | None = None
        self._starting: dict[str, tuple[ChildSpec, asyncio.Future[ForkedProcess]]] = {}
        self._running: dict[str, ForkedProcess] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._deaths = 0
        self.warm = False

    @property
    def why(self) -> str:
        """Reason why no process can be forked at once; "" when one can."""
        if self.warm:
            return ""
        return "importing torch" + (f" (again: it ended {self._deaths} times)" if self._deaths else "")

    @property
    def pid(self) -> int:
        return self._pid

    async def run(self) -> None:
        """Keep a zygote running until cancelled."""
        pause_s = _RESTART_S
        while True:
            try:
                await self._start_and_listen()
            except OSError as error:
                log.error("cannot start a zygote: %s", error)
            log.error("zygote ended with %s; starting another", self._process.returncode if self._process else None)
            self._deaths += 1
            pause_s = _RESTART_S if self.warm else min(2 * pause_s, _RESTART_MAX_S)
            self._clean_up()
            await asyncio.sleep(pause_s)

    async def close(self, bound_s: float) -> None:
        """Close the zygote's socket, which ends it and its workers; wait for that at most `bound_s`."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.terminate()  # while it imports it does not poll its socket
                async with asyncio.timeout(bound_s):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()

    async def spawn(self, spec: ChildSpec) -> ForkedProcess:
        """Fork a process. Waits while the zygote imports or restarts; a cancellation ends a process that starts."""
        answer: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._starting[spec.id] = (spec, answer)
        self._ask_fork(spec)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():  # it started at the same moment
                self.kill(spec.id, signal.SIGKILL)
            raise
        finally:
            self._starting.pop(spec.id, None)

    def kill(self, id_: str, signum: int) -> None:
        """Send a signal to a process by its id; nothing happens if it has ended."""
        self._send({"do": "kill", "id": id_, "signal": int(signum)})

    async def _start_and_listen(self) -> None:
        started = await self._start()
        self._process, self._pid, self._host_pid = started.process, started.pid, started.host_pid
        reader, self._writer = await asyncio.open_connection(sock=started.socket)
        for spec, _ in list(self._starting.values()):
            self._ask_fork(spec)
        try:
            while line := await reader.readline():
                self._receive(json.loads(line))
        except ConnectionError as error:
            log.warning("zygote: %s", error)
        finally:
            self._writer.close()
            self._writer = None
        await self._process.wait()

    def _receive(self, message: dict[str, Any]) -> None:
        match message["event"]:
            case "warm":
                self.warm = True
                log.info("zygote %s is warm after %.1f s (torch: %s, threads: %s)", self.pid, message["seconds"],
                         message["torch"], message["threads"])
            case "started":
                self._started(message["id"], message["pid"])
            case "ended":
                process = self._running.pop(message["id"], None)
                if process is not None and not process.ended.done():
                    process.ended.set_result(message["code"])
        self._changed()

    def _started(self, id_: str, pid: int) -> None:
        process = ForkedProcess(self._host_pid(pid), asyncio.get_running_loop().create_future())
        self._running[id_] = process
        _, answer = self._starting.get(id_, (None, None))
        if answer is None or answer.done():
            self.kill(id_, signal.SIGKILL)  # its caller has gone
        else:
            answer.set_result(process)

    def fail(self, error: Exception) -> None:
        """Let each process that waits to be started fail, as no zygote will come any more."""
        for _, answer in self._starting.values():
            if not answer.done():
                answer.set_exception(error)
        self._clean_up()

    def _clean_up(self) -> None:
        """Clean up after a dead zygote: the kernel killed its children; kill the processes that those had started."""
        self.warm = False
        for process in self._running.values():
            _kill_group(process.pid)
            if not process.ended.done():
                process.ended.set_result(-signal.SIGKILL)
        self._running.clear()
        self._changed()

    def _ask_fork(self, spec: ChildSpec) -> None:
        self._send({"do": "fork", "spec": to_json(spec)})

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None:  # otherwise: repeated once a zygote is up, or its processes are gone
            self._writer.write(json.dumps(message).encode() + b"\n")


def _kill_group(pid: int) -> None:
    try:
        if pid:
            os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # no other process was in the worker's session
