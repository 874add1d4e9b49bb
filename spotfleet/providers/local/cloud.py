"""The daemon that plays the cloud: `python -m spotfleet.providers.local.cloud --home SPOTFLEET_HOME`.

The command returns when the daemon answers, and the daemon lives on. In SPOTFLEET_HOME/local it keeps `cloud.lock`
(held while it lives: one daemon per home), `cloud.json` (where to call it), `state.json` and `cloud.log`.

It ends by itself
- IDLE_S after the last of its hosts has ended and the last call, if it has launched one;
- UNUSED_S after its start and the last call, if it has not;
- after killing all hosts, without asking them first, when told to shut down or when the process
  SPOTFLEET_LOCAL_OWNER_PID has died.
SIGTERM and SIGKILL end only the daemon: its hosts run on, and the next daemon of this home adopts them.
"""

from __future__ import annotations

import argparse
import fcntl
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
from spotfleet.providers.local.service import Cloud, write

TICK_S = 0.05
IDLE_S = 5.0
UNUSED_S = 60.0
LOCK_S = 15.0  # how long to wait for a daemon that is just ending
END_S = 30.0  # for all hosts to end at a shutdown; each takes at most TERM_S + KILL_S
ANSWER_S = 2.0  # for the answer to a shutdown to leave
READ_S = 30.0  # a silent connection is closed after so long


class Daemon:
    """One Cloud behind HTTP on a port of 127.0.0.1, and the reasons to end."""

    def __init__(self, home: Path) -> None:
        self.local = home / "local"
        self.cloud = Cloud(self.local)
        self.token = secrets.token_urlsafe(24)
        self.owner = _owner(self.local)
        self.wake = Event()
        self.called_at = time.monotonic()
        self.told = False  # to shut down
        self.ended = Event()  # nothing of this cloud runs any more
        self.answered = Event()  # whoever called `shutdown` knows it
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.home = self  # type: ignore[attr-defined]

    def start(self) -> None:
        """Answer from now on; `cloud.json` says where."""
        Thread(target=self._server.serve_forever, args=(0.05,), name="api", daemon=True).start()
        pid = os.getpid()
        write(self.local / "cloud.json", {"port": self._server.server_address[1], "token": self.token, "pid": pid,
                                          "started": proc.started(pid)})

    def run(self) -> None:
        """Tick until a reason to end comes; then leave nothing behind but files."""
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
        if self.told:
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
        return "nobody has launched anything" if quiet_s > UNUSED_S else ""


class _Handler(BaseHTTPRequestHandler):
    """POST /call {"method", "args"} -> {"result"} or {"error": {"kind", "message", "hint", "scope"}}."""

    timeout = READ_S

    def do_POST(self) -> None:
        daemon: Daemon = self.server.home  # type: ignore[attr-defined]
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
            daemon.told = True
            daemon.ended.wait(END_S)
        if fate:
            self.close_connection = True  # an answer that never comes
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
        """Say nothing: the log is for what goes wrong."""


def _error(error: SpotfleetError) -> dict[str, Any]:
    return {"error": to_json({"kind": type(error).__name__, "message": str(error), "hint": error.hint,
                              "scope": getattr(error, "scope", "")})}


def _owner(local: Path) -> tuple[int, int] | None:
    """The process to die with: named in the environment, or for the daemon before us."""
    path = local / "owner.json"
    if pid := int(os.environ.get("SPOTFLEET_LOCAL_OWNER_PID", "0")):
        write(path, [pid, proc.started(pid)])
    if not path.exists():
        return None
    pid, started = json.loads(path.read_text(encoding="utf-8"))
    return pid, started


def _lock(path: Path) -> IO[str] | None:
    """The open, locked file; None when another daemon of this home lives on."""
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - held until the process ends
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if (path.parent / "cloud.json").exists() or time.monotonic() > deadline:
                file.close()
                return None
            time.sleep(0.05)


def _into_background(log: Path) -> int:
    """Go on in a child that nobody waits for; the parent exits 0 when a byte comes through the returned pipe."""
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
    (home / "local").mkdir(parents=True, exist_ok=True, mode=0o700)
    ready = _into_background(home / "local" / "cloud.log")
    held = _lock(home / "local" / "cloud.lock")
    if held is None:
        os.write(ready, b"1")
        return 0
    daemon = Daemon(home)
    daemon.start()
    os.write(ready, b"1")
    os.close(ready)
    daemon.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
