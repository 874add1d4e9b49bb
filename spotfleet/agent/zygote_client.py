"""The agent's side of the zygote: keeps one running, asks it for processes, hears of their ends.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spotfleet.agent.child import ChildSpec
from spotfleet.agent.zygote import QUIET, SINGLE_THREADED
from spotfleet.codec import to_json

log = logging.getLogger("spotfleet.agent")

_RESTART_S, _RESTART_MAX_S = 0.05, 5.0


@dataclass(frozen=True)
class Process:
    """One process forked by the zygote. `ended` yields its exit status, or minus the signal."""

    pid: int
    ended: asyncio.Future[int]


class ZygoteClient:
    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._writer: asyncio.StreamWriter | None = None
        self._starting: dict[str, tuple[ChildSpec, asyncio.Future[Process]]] = {}
        self._running: dict[str, Process] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._deaths = 0
        self.warm = False

    @property
    def why(self) -> str:
        """What a host waits for here; "" when it can fork at once."""
        if self.warm:
            return ""
        return "importing torch" + (f" (again: it ended {self._deaths} times)" if self._deaths else "")

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def run(self) -> None:
        """Keep a zygote running until cancelled."""
        pause_s = _RESTART_S
        while True:
            try:
                await self._start_and_listen()
            except OSError as error:
                log.error("cannot start a zygote: %s", error)
            self._deaths += 1
            pause_s = _RESTART_S if self.warm else min(2 * pause_s, _RESTART_MAX_S)
            self._bury()
            await asyncio.sleep(pause_s)

    async def close(self, bound_s: float) -> None:
        """Let go of the zygote, which ends with its workers; wait for that at most `bound_s`."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.terminate()  # it does not see the end of its socket while it imports
                async with asyncio.timeout(bound_s):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()

    async def spawn(self, spec: ChildSpec) -> Process:
        """Fork a process. Waits while the zygote imports or restarts; cancelling ends the process if it comes."""
        answer: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        self._starting[spec.id] = (spec, answer)
        self._ask_fork(spec)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():  # it came in the same moment
                self.kill(spec.id, signal.SIGKILL)
            raise
        finally:
            self._starting.pop(spec.id, None)

    def kill(self, id_: str, signum: int) -> None:
        """Send a signal to a process of ours by its id; nothing happens if it has ended."""
        self._send({"do": "kill", "id": id_, "signal": int(signum)})

    async def _start_and_listen(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "spotfleet.agent.zygote", str(theirs.fileno()), pass_fds=(theirs.fileno(),),
                env={**QUIET, **os.environ, **SINGLE_THREADED}, stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        for spec, _ in list(self._starting.values()):
            self._ask_fork(spec)
        try:
            while line := await reader.readline():
                self._hear(json.loads(line))
        except ConnectionError as error:
            log.warning("zygote: %s", error)
        finally:
            self._writer.close()
            self._writer = None
        await self._process.wait()

    def _hear(self, message: dict[str, Any]) -> None:
        match message["say"]:
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
        process = Process(pid, asyncio.get_running_loop().create_future())
        self._running[id_] = process
        _, answer = self._starting.get(id_, (None, None))
        if answer is None or answer.done():
            self.kill(id_, signal.SIGKILL)  # whoever wanted it has gone
        else:
            answer.set_result(process)

    def _bury(self) -> None:
        """The zygote has died: the kernel killed its children; end what those had started, too."""
        log.error("zygote ended with %s; starting another", self._process.returncode if self._process else None)
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
        if self._writer is not None:  # else: repeated when a zygote is up, or its processes are gone
            self._writer.write(json.dumps(message).encode() + b"\n")


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # the worker was alone in its session
