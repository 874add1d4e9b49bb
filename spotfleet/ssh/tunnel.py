"""Streams to one port on the dispatcher's machine, all through one SSH connection that outlives the command.

    no connection --a stream is wanted--> connecting --let in--> open --unused for IDLE_S, or `close`--> none
         ^                                    | refused: the error gives the reason |
         +-- dead link: ssh detects it within ALIVE_S x ALIVES, and a caller without an answer sets it aside --+

The connection is a background `ssh` (ControlMaster). The first stream costs a handshake, each further one a round trip,
also those of later commands. A lock beside its socket ensures that only one is made at a time. Time limits: connecting
ends after HANDSHAKE_S, and a stream that is not opened in time ends with its `timeout_s`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import socket

from spotfleet.errors import NeedsPerson
from spotfleet.ssh import openssh
from spotfleet.ssh.mux import MuxControl, StreamRefused
from spotfleet.storage import private
from spotfleet.storage.locks import locked

IDLE_S = 60  # the connection is kept for the next command
ALIVE_S, ALIVES = 4, 3  # a dead link is given up after their product; on a slow one, an upload delays the answers
HANDSHAKE_S = 10.0  # limit for a new connection, even if a stream is wanted sooner
END_S = 5.0  # limit for the background ssh to end after a request
LOCAL_S = 3.0  # limit for a local answer of the background ssh; beyond it, the process hangs
LOOK_S = 0.02
LOG_CHARS = 4000

_open: list[MuxControl] = []  # open sessions, which must last as long as their streams
_guard = threading.Lock()


class NotConnected(ConnectionRefusedError):
    """Error: no stream was opened, so no data can have arrived."""


@dataclass(frozen=True)
class Tunnel:
    """Tunnel to one port; may be used from any thread, and dropped at any time."""

    config: Path  # the fleet's ssh_config
    alias: str  # name of the machine in it
    address: str  # where the port is, as that machine sees it
    port: int
    control: Path  # `openssh.control_path`

    def dial(self, timeout_s: float) -> socket:
        """Open a stream to the port. Raises NotConnected for errors that may pass, NeedsPerson for others."""
        _sweep()
        try:
            try:
                return self._stream(timeout_s)
            except (ConnectionResetError, BrokenPipeError, FileNotFoundError):  # it has just ended; the next one is new
                return self._stream(timeout_s)
        except NotConnected:
            raise
        except StreamRefused as error:
            raise self._refused(self._log().rpartition("\n")[2] or str(error)) from None
        except OSError as error:
            raise NotConnected(f"{self._machine} does not answer over SSH ({error})") from None

    def connect(self) -> None:
        """Establish the connection for every process that uses its socket. Raises as `dial` does."""
        try:
            self._connected(HANDSHAKE_S).close()
        except NotConnected:
            raise
        except OSError as error:
            raise NotConnected(f"{self._machine} does not answer over SSH ({error})") from None

    def close(self) -> None:
        """End the connection, even while others use it; it is gone on return."""
        with self._locked(HANDSHAKE_S + END_S):
            with suppress(OSError):
                control = MuxControl.connect(self.control, time.monotonic() + LOCAL_S)
                try:
                    control.terminate()
                finally:
                    control.close()
            end = time.monotonic() + END_S
            while self._process() and time.monotonic() < end:
                time.sleep(LOOK_S)
            self._kill()
            for path in (self.control, self._beside(".log"), self._beside(".pid")):
                path.unlink(missing_ok=True)

    # --- one stream

    def _stream(self, timeout_s: float) -> socket:
        control, pid = self._connected(timeout_s), 0
        try:
            pid = control.pid()
            stream = control.open(self.address, self.port)
        except BaseException as error:
            control.close()
            if isinstance(error, TimeoutError):
                self._set_aside(pid)
            raise
        stream.settimeout(None)
        with _guard:
            _open.append(control)
        return stream

    def _set_aside(self, pid: int) -> None:
        """Stop offering this connection to new streams: it serves the existing ones, and ends."""
        with suppress(OSError), self._locked(END_S):
            control = MuxControl.connect(self.control, time.monotonic() + LOCAL_S)
            try:
                if control.pid() == pid:  # otherwise another thread has done it
                    control.stop_listening()
            finally:
                control.close()

    # --- the connection

    def _connected(self, timeout_s: float) -> MuxControl:
        """Return a session with the background ssh, which is started if there is none."""
        if control := self._found(timeout_s):
            return control
        limit_s = max(timeout_s, HANDSHAKE_S)
        with self._locked(limit_s):
            if control := self._found(timeout_s):  # another command has made it meanwhile
                return control
            self._kill()
            self.control.unlink(missing_ok=True)
            self._start(limit_s)
            control = MuxControl.connect(self.control, time.monotonic() + LOCAL_S)
            control.deadline = time.monotonic() + timeout_s
            with private.open_file(self._beside(".pid"), "w") as file:
                file.write(str(control.pid()))
            return control

    def _found(self, timeout_s: float) -> MuxControl | None:
        try:
            control = MuxControl.connect(self.control, time.monotonic() + LOCAL_S)
        except OSError:
            return None
        control.deadline = time.monotonic() + timeout_s
        return control

    def _start(self, limit_s: float) -> None:
        log = self._beside(".log")
        log.unlink(missing_ok=True)
        options = {"ControlMaster": "yes", "ControlPath": self.control, "ControlPersist": IDLE_S, "BatchMode": "yes",
                   "ServerAliveInterval": ALIVE_S, "ServerAliveCountMax": ALIVES, "LogLevel": "INFO",
                   "ConnectTimeout": int(HANDSHAKE_S)}
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        line = openssh.command(self.config, *words, "-f", "-N", "-T", "-E", str(log), self.alias)
        try:
            done = subprocess.run(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  cwd="/", start_new_session=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise NotConnected(f"{self._machine} does not answer over SSH in time") from None
        if done.returncode:
            said = self._log()
            log.unlink(missing_ok=True)
            raise self._refused(said or f"ssh has ended with status {done.returncode}")

    def _refused(self, said: str) -> Exception:
        found = openssh.meaning(said, self._machine)
        return NeedsPerson(found.why, hint=found.hint) if found.person else NotConnected(found.why)

    @property
    def _machine(self) -> str:
        return f"the dispatcher's machine ({self.alias})"

    def _log(self) -> str:
        try:
            return self._beside(".log").read_text(errors="replace").strip()[-LOG_CHARS:]
        except OSError:
            return ""

    # --- the process, and the files beside its socket

    def _process(self) -> int:
        """Return the pid of the background ssh that was started last; 0 when it has ended. Its title distinguishes it
        from another process with a reused pid."""
        try:
            pid = int(self._beside(".pid").read_text())
        except (OSError, ValueError):
            return 0
        return pid if str(self.control) in _title(pid) else 0

    def _kill(self) -> None:
        """Kill a process that does not even answer locally."""
        if pid := self._process():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + END_S
            while self._process() and time.monotonic() < end:
                time.sleep(LOOK_S)

    def _locked(self, wait_s: float) -> AbstractContextManager[None]:
        openssh.make_private(self.control.parent)
        return locked(self._beside(".lock"), wait_s)

    def _beside(self, ending: str) -> Path:
        return self.control.with_name(self.control.name + ending)


def _sweep() -> None:
    """Close the sessions of streams that have ended."""
    with _guard:
        for control in list(_open):
            if control.over:
                control.close()
                _open.remove(control)


def _title(pid: int) -> str:
    """Return the command line of a process; "" if no process has that pid, or if it is a zombie."""
    if Path("/proc/self").exists():
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
    return subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True).stdout
