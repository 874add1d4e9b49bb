"""TCP server of a coordinator: workers send reports and receive orders, as from an agent.

    handshake (worker/handshake.py) --> first line names the worker --> reports | logged values --> EOF

The first line of a connection is a report, or {"log_of": WORKER, "sender": PID, "next": N}; after the latter each line
is one logged value, the N-th of that process and those after it, and is answered by one line: what `on_log` has
returned, as JSON. Until then the worker's call does not return. A value that comes again, over a new connection, gets
the same answer.
Orders are repeated each second: a machine that vanished acknowledges none, and the kernel ends the connection
(`control.no_delay`). A worker in which one call holds Python's lock for long still acknowledges them.
A connection without a first line is closed after HELLO_LIMIT_S, or when there are more than MOST_STRANGERS.

Threads: one accepts, one for each connection. `send` may be called by any thread.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spotfleet.addresses import joined
from spotfleet.protocol.messages import WorkerOrders, WorkerReport, dump, load
from spotfleet.worker.control import TCP, no_delay
from spotfleet.worker.handshake import admit

HELLO_LIMIT_S = 5.0  # for the proof of the key and the first line
MOST_STRANGERS = 512  # connections without that; for one more the oldest is closed
SWEEP_S, GONE_S = 0.5, 0.05
SEND_LIMIT_S = 1.0
LINE_BYTES = 1 << 20


class ControlServer:
    """The server, and the newest connection of each worker."""

    def __init__(self, address: str, key: str, on_report: Callable[[WorkerReport], None],
                 on_closed: Callable[[str], None], on_log: Callable[[str, Any], Any]) -> None:
        self._key, self._on_report, self._on_closed, self._on_log = key, on_report, on_closed, on_log
        self._listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._listener.bind((address, 0))
        self._listener.listen(512)
        self.path = TCP + joined(address, self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._peers: dict[str, socket.socket] = {}
        self._all: set[socket.socket] = set()
        self._strangers: dict[socket.socket, float] = {}  # since when, oldest first
        self._logged: dict[tuple[str, str], _Logged] = {}  # by worker and process
        self._closed = False
        threading.Thread(target=self._accept, name="spotfleet-line", daemon=True).start()

    def send(self, worker: str, orders: WorkerOrders) -> None:
        """Send orders to a worker that is connected. One that reads nothing is disconnected, and connects again."""
        with self._lock:
            sock = self._peers.get(worker)
        if sock is not None:
            try:
                sock.sendall(dump(orders).encode() + b"\n")
            except OSError:
                _shut(sock)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            found = [self._listener, *self._all]
        for sock in found:
            _shut(sock)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                self._listener.settimeout(SWEEP_S if self._strangers else None)
                sock, _ = self._listener.accept()
            except TimeoutError:
                self._cut_off()
                continue
            except OSError:
                time.sleep(GONE_S)  # closed; or the client has gone, or no descriptor is left
                continue
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                self._all.add(sock)
                self._strangers[sock] = time.monotonic()
            self._cut_off()
            threading.Thread(target=self._serve, args=(sock,), name="spotfleet-line", daemon=True).start()

    def _cut_off(self) -> None:
        """Close the connections of strangers that are late, and the oldest ones where there are too many."""
        with self._lock:
            late = [s for s, since in self._strangers.items() if time.monotonic() - since > HELLO_LIMIT_S]
            crowd = list(self._strangers)[:max(0, len(self._strangers) - MOST_STRANGERS)]
        for sock in {*late, *crowd}:
            _shut(sock)

    def _serve(self, sock: socket.socket) -> None:
        worker = ""
        try:
            no_delay(sock)
            sock.settimeout(HELLO_LIMIT_S)
            admit(sock, self._key)
            lines = _Lines(sock)
            first = lines.next()
            with self._lock:
                self._strangers.pop(sock, None)
            if "log_of" in (found := json.loads(first)):
                self._logs(sock, lines, found)
                return
            sock.setblocking(True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_LIMIT_S))
            report = load(WorkerReport, first)
            with self._lock:
                worker, old = report.worker, self._peers.get(report.worker)
                self._peers[worker] = sock
            if old is not None:
                _shut(old)
            while True:
                self._on_report(report)
                report = load(WorkerReport, lines.next())
                if report.worker != worker:
                    return
        except (OSError, ValueError):
            return  # gone, a stranger, or of another release: the worker connects again
        finally:
            self._forget(worker, sock)

    def _logs(self, sock: socket.socket, lines: _Lines, first: dict[str, Any]) -> None:
        sock.setblocking(True)
        worker, number = str(first["log_of"]), int(first.get("next", 0))
        with self._lock:
            logged = self._logged.setdefault((worker, str(first.get("sender"))), _Logged())
        while True:
            value = json.loads(lines.next())
            with logged.lock:  # an earlier connection may still wait for the answer to the same value
                if number != logged.number:
                    logged.answer, logged.number = self._on_log(worker, value), number
                answer = logged.answer
            number += 1
            sock.sendall(json.dumps(answer).encode() + b"\n")

    def _forget(self, worker: str, sock: socket.socket) -> None:
        with self._lock:
            self._all.discard(sock)
            self._strangers.pop(sock, None)
            current = self._peers.get(worker) is sock
            if current:
                del self._peers[worker]
        sock.close()
        if current:
            self._on_closed(worker)


@dataclass
class _Logged:
    """The newest value of a process that was passed on, with the answer."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    number: int = -1
    answer: Any = None


class _Lines:
    """Lines of a connection. ConnectionError at its end, ValueError at a line that is too long."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._pending = sock, b""

    def next(self) -> bytes:
        while b"\n" not in self._pending:
            if len(self._pending) > LINE_BYTES:
                raise ValueError("line too long")
            data = self._sock.recv(1 << 16)
            if not data:
                raise ConnectionError("closed")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line


def _timeval(seconds: float) -> bytes:
    return int(seconds).to_bytes(8, "little") + int(1e6 * (seconds % 1)).to_bytes(8, "little")


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # no longer connected
