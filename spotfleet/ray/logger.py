"""`ray_logger`: values logged in a worker reach the callbacks of `ElasticExecutor.run` in the driver."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.protocol.messages import JOB_KEY
from spotfleet.worker.control import TCP, connect

ANSWER_S = 10.0
_connection: tuple[int, socket.socket] | None = None  # the process that opened it, and the connection


def log(info: dict[str, Any]) -> None:
    """Pass `info` to each callback of the driver, as a dict. Return once it has arrived there.

    Values are those of JSON: numbers, texts, lists, dicts; scalars of torch and numpy become numbers. Outside of an
    executor's worker this does nothing. Raises UsageError for other values, and OSError if the driver does not answer
    within ANSWER_S.
    """
    if is_worker():
        send(info, ANSWER_S)


def is_worker() -> bool:
    """Return whether this process is a worker of an executor."""
    return os.environ.get("SPOTFLEET_SOCKET", "").startswith(TCP)


def send(info: dict[str, Any], limit_s: float) -> Any:
    """Send one value to the coordinator; return its answer. Raises as `log` does."""
    global _connection
    path = os.environ["SPOTFLEET_SOCKET"]
    try:
        line = json.dumps(info, default=_number).encode() + b"\n"
    except TypeError as error:
        raise UsageError(f"ray_logger.log: {error}", hint="log numbers, texts, and lists and dicts of them") from error
    if _connection is None or _connection[0] != os.getpid():
        sock = connect(path, os.environ.get(JOB_KEY, ""))
        sock.sendall(json.dumps({"log_of": os.environ["SPOTFLEET_WORKER"]}).encode() + b"\n")
        _connection = os.getpid(), sock
    sock = _connection[1]
    answer = b""
    try:
        sock.settimeout(limit_s)
        sock.sendall(line)
        while not answer.endswith(b"\n"):
            part = sock.recv(1 << 16)
            if not part:
                raise ConnectionError("the coordinator has gone")
            answer += part
    except OSError:
        _connection = None
        raise
    return json.loads(answer)


def _number(value: Any) -> Any:
    if hasattr(value, "item") and callable(value.item):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be logged")
