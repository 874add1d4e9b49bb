"""Client of the daemon of a home: starts it if necessary, calls it, turns answers into values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotfleet import errors
from spotfleet.errors import SpotfleetError
from spotfleet.providers.local import proc
from spotfleet.providers.local.environment import passed
from spotfleet.storage import atomic, locks, private

START_S = 30.0  # for a daemon to answer; it takes 0.2 s on an idle machine
CALL_S = 60.0  # for an answer; nearly all take milliseconds
HOST_ONLY = (proc.MARK, "SPOTFLEET_HOST_ADDRESS", "SPOTFLEET_HOST_PORT", "SPOTFLEET_METADATA_URL")


@dataclass(frozen=True)
class LocalCloudLink:
    """Connection to the daemon of one home."""

    home: Path  # SPOTFLEET_HOME

    def call(self, method: str, **args: Any) -> Any:
        """Return the result, as JSON values. Raises the cloud's own error.

        Raises SpotfleetError if the answer got lost: then it is unknown whether the call took effect.
        """
        deadline = time.monotonic() + START_S
        while True:
            where = self.daemon() or self._start()
            try:
                status, answer = self._ask(where, {"method": method, "args": args})
            except ConnectionRefusedError:
                status, answer = 503, {}
            except (OSError, ValueError) as error:
                raise SpotfleetError(f"local cloud: {method} was not answered: {error!r}", hint="try again") from error
            if status == 200:
                return _result(answer)
            if time.monotonic() > deadline:
                raise SpotfleetError(f"local cloud: {method} was answered {status}", hint=self._log_tail())
            time.sleep(0.05)  # the daemon is ending or starting

    def daemon(self) -> dict[str, Any] | None:
        """Return port, token and pid of the daemon, if one lives."""
        try:
            where = json.loads((self.home / "local" / "cloud.json").read_text(encoding="utf-8"))
            return where if proc.alive(where["pid"], where["started"]) else None
        except (OSError, ValueError, KeyError):
            return None

    def known(self) -> bool:
        """Return whether this home has, or ever had, a cloud. A query need not start one."""
        return (self.home / "local" / "state.json").exists() or self.daemon() is not None

    def shutdown(self) -> None:
        """End all hosts and the daemon; returns when its process is gone."""
        self.call("ping")
        where = self.daemon()
        self.call("shutdown")
        deadline = time.monotonic() + START_S
        while where and proc.alive(where["pid"], where["started"]):
            if time.monotonic() > deadline:
                raise SpotfleetError("local cloud: its daemon does not end", hint=self._log_tail())
            time.sleep(0.01)

    def _start(self) -> dict[str, Any]:
        """Start the daemon, unless another process has just done it."""
        private.check_home(self.home)
        atomic.make_folder(self.home / "local")
        with private.open_file(self.home / "local" / "start.lock", "a") as lock:
            locks.take(lock, wait=True)
            deadline = time.monotonic() + START_S
            while time.monotonic() < deadline:
                if where := self.daemon():
                    return where
                environment = {k: v for k, v in passed(os.environ).items() if k not in HOST_ONLY}
                try:
                    # Not in the user's folder, whose modules might have the same names as ours or Python's.
                    done = subprocess.run([sys.executable, "-m", "spotfleet.providers.local.cloud", "--home",
                                           str(self.home)], cwd=self.home / "local", env=environment,
                                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S)
                except subprocess.TimeoutExpired:
                    break
                if done.returncode != 0:
                    raise SpotfleetError(f"local cloud: its daemon did not start: {done.stderr.strip()[-500:]}",
                                         hint=self._log_tail())
        raise SpotfleetError(f"local cloud: no daemon answers after {START_S:.0f} s", hint=self._log_tail())

    def _ask(self, where: dict[str, Any], body: dict[str, Any]) -> tuple[int, Any]:
        from http.client import HTTPConnection, HTTPException  # 30 ms that `--help` need not pay

        connection = HTTPConnection("127.0.0.1", where["port"], timeout=CALL_S)
        try:
            connection.request("POST", "/call", json.dumps(body), {"Authorization": f"Bearer {where['token']}"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except HTTPException as error:
            raise ConnectionError(repr(error)) from error
        finally:
            connection.close()

    def _log_tail(self) -> str:
        path = self.home / "local" / "cloud.log"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        return f"the end of {path}: " + (" | ".join(lines[-8:]) or "(empty)")


def _result(answer: Any) -> Any:
    if "error" not in answer:
        return answer["result"]
    error = answer["error"]
    kind = getattr(errors, error["kind"], SpotfleetError)
    if kind is errors.NoCapacity:
        raise errors.NoCapacity(error["message"], hint=error["hint"], scope=error["scope"])
    raise kind(error["message"], hint=error["hint"])
