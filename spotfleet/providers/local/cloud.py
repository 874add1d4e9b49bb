"""Daemon of the emulated cloud: `python -m spotfleet.providers.local.cloud --home SPOTFLEET_HOME`.

The command returns when the daemon answers, and the daemon lives on. In SPOTFLEET_HOME/local it keeps `cloud.lock`
(held while it lives: one daemon per home), `cloud.json` (its address), `state.json` and `cloud.log`.

It ends by itself
- IDLE_S after the end of its last host and the last call, if it has launched one;
- UNUSED_S after its start and the last call, if it has not;
- after a SIGKILL of all hosts, on a shutdown call or the death of the process
  SPOTFLEET_LOCAL_OWNER_PID.
SIGTERM and SIGKILL end only the daemon: its hosts run on, and the next daemon of this home adopts them.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
import time
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any

from spotfleet.codec import to_json
from spotfleet.errors import SpotfleetError
from spotfleet.providers.local import proc
from spotfleet.providers.local.service import LocalCloudService, write
from spotfleet.storage import atomic, daemon_logs, locks, private

TICK_S = 0.05
IDLE_S = 5.0
UNUSED_S = 60.0
LOCK_S = 15.0  # wait for a daemon that is ending
END_S = 30.0  # for all hosts at a shutdown; each takes at most TERM_S + KILL_S
ANSWER_S = 2.0  # for the answer to a shutdown call to be sent
READ_S = 30.0  # a silent connection is closed after this


class LocalCloudDaemon:
    """One Cloud behind HTTP on a port of 127.0.0.1, and the conditions for its end."""

    def __init__(self, home: Path) -> None:
        self.local = home / "local"
        self.cloud = LocalCloudService(self.local)
        self.token = secrets.token_urlsafe(24)
        self.owner = _owner(self.local)
        self.wake = Event()
        self.called_at = time.monotonic()
        self.must_end = False  # a shutdown call came
        self.ended = Event()  # no process of this cloud is left
        self.answered = Event()  # the `shutdown` call was answered
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.home = self  # type: ignore[attr-defined]

    def start(self) -> None:
        """Start to answer calls; `cloud.json` holds the address."""
        Thread(target=self._server.serve_forever, args=(0.05,), name="api", daemon=True).start()
        pid = os.getpid()
        write(self.local / "cloud.json", {"port": self._server.server_address[1], "token": self.token, "pid": pid,
                                          "started": proc.started(pid)})

    def run(self) -> None:
        """Tick until a condition for the end holds; then leave nothing but files."""
        while not self._reason():
            self.cloud.tick()
            self.wake.wait(TICK_S)
            self.wake.clear()
        with self.cloud.lock:
            self.cloud.closing = True
            self.cloud.machines.term_s = 0.0
        print(f"ending: {self._reason()}", flush=True)
        self.cloud.terminate_all()
        while self.cloud.machines.busy():
            self.cloud.tick()
            time.sleep(TICK_S)
        (self.local / "cloud.json").unlink(missing_ok=True)
        self.cloud.machines.close()
        self.ended.set()
        if self.must_end:
            self.answered.wait(ANSWER_S)
        self._server.shutdown()

    def _reason(self) -> str:
        if self.cloud.closing:
            return "told to shut down"
        if self.owner and not proc.alive(*self.owner):
            return f"its owner, process {self.owner[0]}, is dead"
        quiet_s = time.monotonic() - self.called_at
        if self.cloud.living() or quiet_s < IDLE_S:
            return ""
        if self.cloud.launches:
            return "its last host is gone"
        return "nothing was launched" if quiet_s > UNUSED_S else ""


class _Handler(BaseHTTPRequestHandler):
    """POST /call {"method", "args"} -> {"result"} or {"error": {"kind", "message", "hint", "scope"}}."""

    timeout = READ_S

    def do_POST(self) -> None:
        daemon: LocalCloudDaemon = self.server.home  # type: ignore[attr-defined]
        cloud = daemon.cloud
        given = self.headers.get("Authorization", "")
        if self.path != "/call" or not compare_digest(given.encode(), f"Bearer {daemon.token}".encode()):
            self._answer(401, {})
            return
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
            method, args = str(body["method"]), dict(body["args"])
        except (ValueError, KeyError, TypeError) as error:
            self._answer(400, _error(SpotfleetError(f"call: {error!r}")))
            return
        with cloud.lock:
            if cloud.closing:
                self._answer(503, {})
                return
            daemon.called_at = time.monotonic()
            fate = cloud.faults.fate(method)
        time.sleep(cloud.faults.latency_s)
        answer: dict[str, Any] = {}
        if fate != "before":
            try:
                answer = {"result": cloud.call(method, args)}
            except SpotfleetError as error:
                answer = _error(error)
            daemon.wake.set()
        if method == "shutdown":
            daemon.must_end = True
            daemon.ended.wait(END_S)
        if fate:
            self.close_connection = True  # the answer is lost on purpose
        else:
            self._answer(200, answer)
        if method == "shutdown":
            daemon.answered.set()

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Suppress request logs: the log is for errors."""


def _error(error: SpotfleetError) -> dict[str, Any]:
    return {"error": to_json({"kind": type(error).__name__, "message": str(error), "hint": error.hint,
                              "scope": getattr(error, "scope", "")})}


def _owner(local: Path) -> tuple[int, int] | None:
    """Return the process to end with: named in the environment, or for the previous daemon."""
    path = local / "owner.json"
    if pid := int(os.environ.get("SPOTFLEET_LOCAL_OWNER_PID", "0")):
        write(path, [pid, proc.started(pid)])
    if not path.exists():
        return None
    pid, started = json.loads(path.read_text(encoding="utf-8"))
    return pid, started


def _lock(path: Path) -> IO[str] | None:
    """Return the open, locked file; None if another daemon of this home keeps running."""
    file = private.open_file(path, "a")  # held until the process ends
    deadline = time.monotonic() + LOCK_S
    while not locks.take(file):
        if (path.parent / "cloud.json").exists() or time.monotonic() > deadline:
            file.close()
            return None
        time.sleep(0.05)
    return file


def _into_background(log: Path) -> int:
    """Continue in a detached child; the parent exits 0 when a byte arrives through the returned pipe."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os._exit(0 if os.read(reader, 1) else 1)
    os.close(reader)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0), os.dup2(out, 1), os.dup2(out, 2)
    return writer


def main() -> int:
    parser = argparse.ArgumentParser(description="The emulated cloud of one SPOTFLEET_HOME.")
    parser.add_argument("--home", type=Path, required=True, help="SPOTFLEET_HOME")
    home: Path = parser.parse_args().home.absolute()
    atomic.make_folder(home / "local")
    ready = _into_background(home / "local" / "cloud.log")
    held = _lock(home / "local" / "cloud.lock")
    if held is None:
        os.write(ready, b"1")
        return 0
    daemon_logs.keep_output_bounded()
    daemon = LocalCloudDaemon(home)
    daemon.start()
    os.write(ready, b"1")
    os.close(ready)
    daemon.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
