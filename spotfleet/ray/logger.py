"""`ray_logger`: values logged in a worker reach the callbacks of `ElasticExecutor.run` in the driver."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.protocol.messages import JOB_KEY
from spotfleet.ray.run.line import LINE_BYTES
from spotfleet.worker.control import TCP, connect

ANSWER_S = 300.0  # a driver may be stopped for a while; a worker that waits for long is found by membership
AGAIN_S = 0.2  # between two connections
_connection: tuple[int, socket.socket] | None = None  # the process that opened it, and the connection
_answered = 0  # values of this process
_lock = threading.Lock()


def log(info: dict[str, Any]) -> None:
    """Pass `info` to each callback of the driver, as a dict. Return once it has arrived there.

    Values are those of JSON: numbers, texts, lists, dicts; scalars of torch and numpy become numbers. Outside of an
    executor's worker this does nothing. Raises UsageError for other values and for more than a MiB of them, and OSError
    if the driver does not answer within ANSWER_S.
    """
    if is_worker():
        send(info, ANSWER_S)


def is_worker() -> bool:
    """Return whether this process is a worker of an executor."""
    return os.environ.get("SPOTFLEET_SOCKET", "").startswith(TCP)


def send(info: dict[str, Any], limit_s: float) -> Any:
    """Send one value to the coordinator; return its answer. Raises as `log` does.

    After a lost connection it is sent again over a new one, and is passed on once all the same.
    """
    global _answered
    try:
        line = json.dumps(info, default=_number).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise UsageError(f"ray_logger.log: {error}", hint="log numbers, texts, and lists and dicts of them") from error
    if len(line) > LINE_BYTES:
        raise UsageError(f"ray_logger.log: {len(line)} bytes, and at most {LINE_BYTES} can be logged at once",
                         hint="log numbers, and return large values or write them to a file")
    end = time.monotonic() + limit_s
    with _lock:
        while True:
            try:
                answer = _exchange(line, max(0.01, end - time.monotonic()))
                _answered += 1
                return answer
            except OSError:
                _close()
                if time.monotonic() + AGAIN_S > end:
                    raise
                time.sleep(AGAIN_S)


def _exchange(line: bytes, limit_s: float) -> Any:
    global _connection
    if _connection is None or _connection[0] != os.getpid():
        sock = connect(os.environ["SPOTFLEET_SOCKET"], os.environ.get(JOB_KEY, ""))
        _connection = os.getpid(), sock
        first = {"log_of": os.environ["SPOTFLEET_WORKER"], "sender": str(os.getpid()), "next": _answered}
        sock.sendall(json.dumps(first).encode() + b"\n")
    sock = _connection[1]
    sock.settimeout(limit_s)
    sock.sendall(line)
    answer = b""
    while not answer.endswith(b"\n"):
        part = sock.recv(1 << 16)
        if not part:
            raise ConnectionError("the coordinator has gone")
        answer += part
    return json.loads(answer)


def _close() -> None:
    global _connection
    if _connection is not None and _connection[0] == os.getpid():
        _connection[1].close()
    _connection = None


def _number(value: Any) -> Any:
    if hasattr(value, "item") and callable(value.item):
        try:
            return value.item()
        except RuntimeError as error:  # torch's, for a tensor of several numbers
            raise TypeError(f"a {type(value).__name__} of several numbers cannot be logged") from error
    raise TypeError(f"a {type(value).__name__} cannot be logged")
